"""Starting a run: bad input is one line and writes nothing, and `--json` ends with one object that says it all."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tfive.cli import doctor
from tfive.cli.app import _call
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.rl.qualify import Qualifier
from tfive.training import start
from tfive.training.begin import PREPARED
from tfive.training.console import Console, _on_trained_texts
from tfive.training.export import export
from tfive.training.lock import LOCK
from tfive.training.loop import Loop
from tfive.training.stop_signal import SIGNALS, StopSignal
from tiny import OVERRIDES, configure, tokenizer

pytestmark = pytest.mark.model

SUMMARY = {
    "test_thought_gain_start", "test_thought_gain_end", "test_content_gain_start", "test_content_gain_end",
    "test_content_gain_interval", "test_gain_vs_base_end", "test_no_thought_loss_start", "test_no_thought_loss_end",
    "test_mixed_gain_end", "test_mixed_gain_interval", "test_mean_thought_length", "test_mean_gate",
    "dev_thought_gain_start", "dev_thought_gain_end", "dev_content_gain_end", "r2", "retention", "windows", "seconds",
    "generated_tokens", "draws",
}  # fmt: skip
"""What a program may rely on."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    configure(folder)
    return folder


@pytest.fixture
def qualified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qualifier, "_criterion", lambda *_: (True, "let through"))


def command(home: Path, out: Path | None, *overrides: str) -> str | None:
    return start.run_command(
        [str(home / "tiny.toml")], (*OVERRIDES, *overrides), str(out) if out else None, as_json=True, quiet=True
    )


def strictly(text: str) -> Any:
    """Parsed as the standard has it: no NaN, no Infinity."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says about bad input."""
    assert _call(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err
    return shown.err


@pytest.mark.usefixtures("qualified")
def test_json_ends_with_one_object_that_says_it_all(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    status = _call(["train", str(home / "tiny.toml"), *(f"--set={o}" for o in OVERRIDES), "--set=window.windows=1",
                    "--out", str(out), "--json", "--quiet"])  # fmt: skip
    assert status == 0
    shown = capsys.readouterr()
    found = strictly(shown.out.splitlines()[-1])
    assert set(found) >= SUMMARY
    missing = {name for name in SUMMARY if found[name] is None}
    assert not missing
    assert found["windows"] == 1
    assert len(found["r2"]) == len(found["test_content_gain_interval"]) == len(found["test_mixed_gain_interval"]) == 2
    assert found["generated_tokens"] == sum(role["generated_tokens"] for role in found["account"]["roles"].values())
    assert strictly((out / "summary.json").read_text("utf-8")) == found
    for line in (out / "metrics.jsonl").read_text("utf-8").splitlines():
        strictly(line)
    # A finished run gives the same summary again.
    assert strictly(start.resume_command(str(out), as_json=True, quiet=True) or "") == found


@pytest.mark.usefixtures("qualified")
def test_a_summary_of_one_text_is_still_json(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval of one text has no end; a program that reads the line must not stumble over that."""
    from tfive.training.develop import MeasuredTexts

    measure = MeasuredTexts.measure

    def endless(self: MeasuredTexts, *arguments: Any) -> tuple[dict[str, Any], Any]:
        found, items = measure(self, *arguments)
        return {**found, "content_gain_interval": [float("-inf"), float("inf")]}, items

    monkeypatch.setattr(MeasuredTexts, "measure", endless)
    line = command(home, tmp_path / "run", "window.windows=1", "calibration.mode=average", "window.probe=0")
    assert line is not None
    assert strictly(line)["test_content_gain_interval"] == [None, None]
    assert strictly((tmp_path / "run" / "summary.json").read_text("utf-8")) == strictly(line)


@pytest.mark.usefixtures("qualified")
def test_a_callback_hears_of_every_window(home: Path, tmp_path: Path) -> None:
    heard: list[int] = []
    config = configure(home, "calibration.mode=average", "window.probe=0", "gate.passes=0")
    summary = start.train(config, tmp_path / "run", on_window=lambda report: heard.append(report["window"]), quiet=True)
    assert heard == [1, 2]
    assert summary["windows"] == 2
    assert summary["dev_mixed_gain_end"] is None
    assert summary["retention"] is None


def test_results_come_from_texts_that_nothing_looks_at_before_the_end(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tfive.training.develop import MeasuredTexts

    seen: list[tuple[str, set[int]]] = []
    right = MeasuredTexts.measure

    def noting(self: MeasuredTexts, *arguments: Any) -> Any:
        seen.append((self.role, {int(item) for item in self.texts.items_BP.flatten() if item >= 0}))
        return right(self, *arguments)

    monkeypatch.setattr(MeasuredTexts, "measure", noting)
    plain = ("method=ntp", "run.checkpoint_every=0", "run.develop_items=6", "window.windows=3")
    first = start.train(configure(home, *plain), tmp_path / "first")
    # Progress before training and after each window, then the base model and the trained one on test texts.
    assert [role for role, _ in seen] == ["develop"] * 4 + ["test"] * 2
    assert seen[-1][1]
    assert not seen[-1][1] & seen[0][1]
    last = load_file(tmp_path / "first" / "test" / "window-00003.safetensors")
    assert set(last["item"].tolist()) == seen[-1][1]
    assert float(last["thought_gain"].mean()) == pytest.approx(first["test_thought_gain_end"], abs=1e-6)
    assert first["test_thought_gain_end"] != first["dev_thought_gain_end"]
    shown_text = capsys.readouterr().err
    assert first["draws"] == {"actor": pytest.approx(3 * 16 / (2 * 96), rel=0.05)}
    assert f"each training text is drawn {first['draws']['actor']:.2f} times for the actor\n" in shown_text
    assert f"thought gain              {first['test_thought_gain_start']:+.4f} → " in shown_text
    assert "\nThis method teaches no thoughts. It is a control" in shown_text
    assert [path.name for path in (tmp_path / "first" / "checkpoints").iterdir()] == ["checkpoint-00000001"]
    shown = [list(one.get("samples", ())) for one in first["history"]]
    assert [bool(one) for one in shown] == [True, *[False] * (len(shown) - 2), True]
    assert set(shown[0][0]) == {"before", "thought", "after"}


def test_the_untrained_row_is_one_measurement(home: Path, tmp_path: Path) -> None:
    summary = start.train(configure(home, "method=base", "run.checkpoint_every=0"), tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match=r"never updated.*--untrained"):
        export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    record = export(tmp_path / "run", tmp_path / "out", untrained=True)
    assert (record["window"], record["actor_updates"]) == (0, 0)
    assert (summary["method"], summary["windows"]) == ("base", 0)
    # Measuring generates thoughts too: they are booked, and no cost of training.
    measured = summary["account"]["roles"]
    assert set(measured) == {"develop", "test"}
    assert measured["develop"]["trajectories"] == summary["history"][0]["items"] > 0
    booked = sum(one["trajectories"] for one in measured.values())
    assert booked == summary["rollouts"]["measured"] > measured["develop"]["trajectories"]
    assert summary["generated_tokens"] == sum(one["generated_tokens"] for one in measured.values()) > 0
    assert measured["develop"]["scored_tokens"] == 5 * 3 * measured["develop"]["trajectories"]
    assert summary["history"][0]["cost"]["thought_tokens"] == summary["history"][0]["cost"]["trajectories"] == 0
    assert summary["rollouts"]["auxiliary"] == 0
    assert summary["test_thought_gain_start"] == summary["test_thought_gain_end"] != 0
    assert summary["test_mixed_gain_end"] is summary["r2"] is None
    assert summary["draws"] == {}
    assert not (tmp_path / "run" / "critics").exists()


def test_a_bad_model_folder_is_one_line(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in (str(empty), str(tmp_path / "absent")):
        said = one_line(["train", str(home / "tiny.toml"), *(f"--set={o}" for o in OVERRIDES),
                         f"--set=model.name={name}", "--out", str(tmp_path / "run"), "--quiet"], capsys)  # fmt: skip
        assert name in said
        with pytest.raises(UserError):
            command(home, tmp_path / "run", f"model.name={name}")
    assert not (tmp_path / "run").exists()


def test_a_bad_out_folder_is_one_line(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine", "utf-8")
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine", "utf-8")
    with pytest.raises(UserError, match="already holds files; name another folder with --out"):
        command(home, used)
    for out in (file, file / "run"):
        with pytest.raises(UserError, match=r"file.*: .*--out"):
            command(home, out)
    assert file.read_text("utf-8") == "mine"
    assert [path.name for path in used.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("calibration.certified=true", "certified = true needs"),
        ("run.develop_items=1", r"run\.develop_items = 1"),
    ],
)
def test_what_cannot_be_trained_is_one_line(home: Path, tmp_path: Path, override: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        command(home, tmp_path / "run", override)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def hybrid(folder: Path) -> Path:
    """A folder with a model of recurrent layers and one of attention, by the tokenizer of the tiny run."""
    shape = Qwen3_5TextConfig(
        vocab_size=len(tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        max_position_embeddings=64,
    )
    Qwen3_5ForCausalLM(shape).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def test_gates_are_refused_before_the_text_is_prepared_where_layers_are_recurrent(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("tfive.training.start.corpus_of")
    model, said = hybrid(tmp_path / "hybrid"), "has recurrent layers, .*; set thought.reading = inline"
    gated = [f"model.name={model}", "thought.reading=gated", "anchor.conditioned=1", "warmstart.source=hindsight"]
    with pytest.raises(UserError, match=said) as caught:
        command(home, tmp_path / "run", *gated)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    device = doctor.Device("CPU", "cpu", 16 * 2**30, ["float32"])
    for reading, broken in (("gated", True), ("inline", False)):
        told = doctor.fit([str(home / "tiny.toml")], [*OVERRIDES, *gated, f"thought.reading={reading}"], device, 1e12)
        assert any("has recurrent layers" in rule for rule in told["broken_rules"]) is broken


def test_a_model_that_is_not_admitted_leaves_nothing_behind(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise UserError("model tiny: tree and plain rows differ from block 0 on")

    out = tmp_path / "a" / "run"
    with monkeypatch.context() as broken:
        broken.setattr("tfive.training.build.admit", refused)
        with pytest.raises(UserError, match="differ from block 0"):
            command(home, out)
        assert not (tmp_path / "a").exists()
        out.mkdir(parents=True)
        with pytest.raises(UserError, match="differ from block 0"):
            command(home, out)
        assert list(out.iterdir()) == []
    kept = out / PREPARED[0]

    def warmed(*_: Any, **__: Any) -> None:
        kept.write_text("{}", "utf-8")

    with monkeypatch.context() as broken:
        broken.setattr("tfive.training.build.admit", refused)
        broken.setattr("tfive.training.start.warm_start", warmed)
        with pytest.raises(UserError, match="differ from block 0"):
            command(home, out)
    assert {kept.name, "config.toml"} <= {path.name for path in out.iterdir()}, "a warm start is never thrown away"


def test_a_run_is_resumed_only_where_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run here"):
        start.resume_command(str(tmp_path), as_json=True, quiet=True)
    (tmp_path / "config.toml").write_text("[model]\nname = 3\n", "utf-8")
    with pytest.raises(UserError, match=r"model\.name"):
        start.resume_command(str(tmp_path), as_json=True, quiet=True)


def test_without_json_nothing_is_returned(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Config, str | None]] = []

    def train(load: Callable[[], Config], out: str | None, **given: Any) -> dict[str, int]:
        seen.append((load(), out))
        return {"a": 1}

    monkeypatch.setattr(start, "_train", train)
    assert start.run_command([str(home / "tiny.toml")], OVERRIDES, None, as_json=False, quiet=True) is None
    assert start.run_command([str(home / "tiny.toml")], OVERRIDES, "o", as_json=True, quiet=True) == '{"a": 1}'
    assert [out for _, out in seen] == [None, "o"]


def test_native_rlp_runs(home: Path, tmp_path: Path) -> None:
    """The preset with shorter thoughts and fewer of them: one position a text, one text a pass, no next-token loss."""
    kept = [one for one in OVERRIDES if not one.startswith(("thought.", "window.", "actor.", "run.", "text.positions"))]
    small = ["thought.open=(", "thought.close=)", "thought.length=8", "thought.checkpoints=[8]", "thought.group=3"]
    small += ["window.items=4", "window.windows=1", "run.develop_items=6"]
    config = Config.load(home / "tiny.toml", "rlp-native", overrides=[*kept, *small])
    assert (config.text.positions.per_text, config.run.texts_per_pass) == (1, 1)
    summary = start.train(config, tmp_path / "run", quiet=True)
    assert summary["account"]["roles"]["actor"]["trajectories"] == 4 * 3


def test_gains_on_trained_texts_stand_beside_those_on_others() -> None:
    summary = {"method": "t5", "actor_gain": 0.369, "draws": {"actor": 5.5, "critic_fit": 0.7}}
    (shown,) = _on_trained_texts(summary)
    assert shown == ("on texts it trained on", "+0.3690  (last window, before its updates; texts drawn 5.5 times)")
    # One token's gain, a method without thoughts, a model that was not trained.
    others: list[dict[str, Any]] = [{"method": "rlp"}, {"actor_gain": None}, {"draws": {}}]
    for other in others:
        assert _on_trained_texts(summary | other) == []


def test_texts_that_come_again_are_announced_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    share = {"actor": 0.39, "critic_fit": 0.05}
    Console().draws(share, 4, clock=False)
    Console().draws(share, 2, clock=False)
    Console().draws({}, 8, clock=False)
    Console().draws(share, 1000, clock=True)
    Console().draws(share, 2, clock=True)
    first, second, clocked, short = capsys.readouterr().err.splitlines()
    assert first.startswith("each training text is drawn 1.56 times for the actor, 0.20 times for the critics")
    assert "warning: texts come again, raise text.sequences.train" in first
    assert "warning" not in second
    # Who knows how many windows a clock allows?
    assert clocked.startswith("each window draws a training text 0.39 times for the actor, 0.05 times for the critics")
    assert clocked.endswith("; texts come again after about 3 windows, raise text.sequences.train to put that off")
    assert short == clocked.partition(";")[0]


def test_a_signal_while_nothing_can_be_saved_is_a_line_and_leaves_no_lock(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While inputs are read, while everything is built, and while the test texts are measured."""
    before = [signal.getsignal(number) for number in SIGNALS]
    folder, small = tmp_path / "run", ("method=anchor-only", "window.windows=1", "window.actor_steps=1")
    typed = ["train", str(home / "tiny.toml"), *(word for one in (*OVERRIDES, *small) for word in ("--set", one))]
    typed += ["--out"]
    resumed = f"go on with: tfive resume {folder}"
    for owner, name, number, said, words in (
        (start, "_inputs", signal.SIGHUP, "SIGHUP: nothing was written; give the command again", typed),
        (start, "build", signal.SIGTERM, f"SIGTERM: nothing is trained yet; {resumed}", typed),
        (Loop, "_measure_test", signal.SIGINT, f"SIGINT: the last checkpoint in {folder} stays; {resumed}", ["resume"]),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, lambda *_, number=number, **__: os.kill(os.getpid(), number))
            assert _call([*words, str(folder), "--quiet"]) == 1
        assert capsys.readouterr().err.splitlines()[-1] == f"tfive: error: {said}"
        assert not (folder / LOCK).exists()
        assert [signal.getsignal(one) for one in SIGNALS] == before
    assert json.loads((folder / "status.json").read_text("utf-8"))["state"] == "stopped"
    assert _call(["resume", str(folder), "--quiet"]) == 0


@pytest.mark.parametrize("says", [True, False])
def test_a_signal_is_answered_at_once_and_a_second_one_ends(says: bool, capfd: pytest.CaptureFixture[str]) -> None:
    asked = StopSignal(says=says)
    with asked.heard():
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked.name == "SIGTERM"
        told = capfd.readouterr().err
        assert asked.told == "SIGTERM: saves and stops after this step, a second one ends at once"
        assert told == (f"{asked.told}\n" if says else "")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert asked.name == "SIGTERM"
    assert capfd.readouterr().err == ""


def test_a_signal_during_the_last_checkpoint_stops_the_run_as_it_said(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ("method=anchor-only", "window.windows=1", "window.actor_steps=1")
    typed = ["train", str(home / "tiny.toml"), *(word for one in (*OVERRIDES, *small) for word in ("--set", one))]
    saved, folder = Loop.save, tmp_path / "run"

    def save(loop: Loop) -> None:
        saved(loop)
        if loop.assembly.method.finished(1):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "save", save)
        assert _call([*typed, "--out", str(folder)]) == 1
    told, stopped = capfd.readouterr().err.splitlines()[-2:]
    assert told == "SIGTERM: saves and stops after this step, a second one ends at once"
    assert stopped == f"tfive: error: SIGTERM: saved in {folder}; go on with: tfive resume {folder}"
    assert _call(["resume", str(folder), "--quiet"]) == 0
    assert json.loads((folder / "summary.json").read_text("utf-8"))["windows"] == 1
