"""The warm start: given and hindsight thoughts are learned before the first window, counted, and kept for going on."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from tfive.cli.app import _call
from tfive.config.config import Config
from tfive.distributed.world import SINGLE
from tfive.errors import RunFailed, UserError
from tfive.rl import hindsight
from tfive.rl.hindsight import chosen
from tfive.rl.roles import Ledger
from tfive.training import positions, start, warmstart
from tfive.training.live_status import PROGRESS
from tfive.training.progress import ProgressReport
from tfive.training.recorder import METRICS
from tfive.training.run_folder import CHECKPOINTS
from tfive.training.start import resume, train
from tfive.training.summary import SUMMARY
from tfive.training.warmstart_kept import REPORT, ROUNDS, WEIGHTS, Rounds, rounds_kept
from tfive.tree import admission
from tfive.tree.forward import TreeModel

pytestmark = pytest.mark.model

HINDSIGHT = ("warmstart.source=hindsight", "warmstart.items=24", "warmstart.samples=2", "warmstart.steps=3",
             "warmstart.rounds=2", "warmstart.lr=1e-3", "window.windows=1", "window.actor_steps=1",
             "method=quiet-star-grpo", "thought.group=2", "run.checkpoint_every=1")  # fmt: skip


def numbers(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name.startswith("dev_")}


def test_hindsight_thoughts_come_before_the_first_window(tmp_path: Path) -> None:
    config = tiny.configure(tmp_path, *HINDSIGHT)
    summary = train(config, tmp_path / "run", quiet=True)
    report = summary["warmstart"]
    first, second = report["rounds"]
    assert 0 < first["kept"] <= 24 < first["thoughts"]
    assert second["kept"] > 0
    assert first["loss_last"] < first["loss_first"]
    assert report["before"]["no_thought_loss"] != report["after"]["no_thought_loss"]
    assert summary["dev_no_thought_loss_start"] == pytest.approx(report["after"]["no_thought_loss"])
    counted = summary["account"]["roles"]["warmstart"]
    assert counted["trajectories"] == first["thoughts"] + second["thoughts"]
    assert counted["generated_tokens"] > 0
    assert summary["account"]["seconds"]["warmstart"]["all"] > 0
    kept = load_file(tmp_path / "run" / WEIGHTS)
    assert not torch.equal(kept["model.model.embed_tokens.weight"], tiny.model().model.embed_tokens.weight)
    assert summary["identity"]["base_weights"] == report["base"]
    # Stopped after the warm start and before the first checkpoint: it is not done again, and all comes out the same.
    other = tmp_path / "again"
    other.mkdir()
    for name in ("config.toml", METRICS, WEIGHTS, REPORT):
        (other / name).write_bytes((tmp_path / "run" / name).read_bytes())
    told = resume(other, quiet=True)
    assert numbers(told) == numbers(summary)
    assert told["account"]["roles"] == summary["account"]["roles"], "what it has cost goes on counting"
    assert (other / CHECKPOINTS).is_dir()


def test_a_run_goes_on_exactly_after_its_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.configure(tmp_path, *HINDSIGHT, "window.windows=2", "run.keep=3")
    whole = train(config, tmp_path / "run", quiet=True)
    # As if it had been stopped after its first window.
    (tmp_path / "run" / SUMMARY).unlink()
    shutil.rmtree(sorted((tmp_path / "run" / CHECKPOINTS).glob("checkpoint-*"))[-1])
    monkeypatch.setattr(warmstart, "Teaching", lambda *_: pytest.fail("it is done once"))
    again = resume(tmp_path / "run", quiet=True)
    assert numbers(again) == numbers(whole)
    assert again["account"]["roles"] == whole["account"]["roles"]


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes and the backward passes of careful reading, in order."""
    order: list[str] = []
    reading, policy, backward = warmstart.Teaching.read, TreeModel.policy, torch.Tensor.backward

    def noted(name: str, made: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            order.append(name)
            return made(*given, **named)

        return call

    def read(*given: Any) -> Any:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(TreeModel, "policy", noted("pass", policy))
            meanwhile.setattr(torch.Tensor, "backward", noted("backward", backward))
            return reading(*given)

    monkeypatch.setattr(warmstart.Teaching, "read", read)
    return order


def test_a_warm_start_says_that_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, shown, files, tracked = tmp_path / "worked.jsonl", list[str](), list[Path | None](), list[str]()
    row = {"text": "river mill farm ( boat grain salt paper town rain wind seven", "workings": [" seven boat"]}
    path.write_text((json.dumps(row) + "\n") * 3, "utf-8")
    showing, track = ProgressReport.showing, ProgressReport.track

    def seen(report: ProgressReport, headline: Any, file: Path | None = None, *, drawn: bool = True) -> Any:
        shown.append(headline.line().partition(",")[0])
        files.append(file)
        return showing(report, headline, file, drawn=drawn)

    def counted(report: ProgressReport, items: Any, label: str, total: int | None = None) -> Any:
        tracked.append(f"{label}: {total}")
        return track(report, items, label, total)

    monkeypatch.setattr(ProgressReport, "showing", seen)
    monkeypatch.setattr(ProgressReport, "track", counted)
    asked = ("text.positions.pattern=farm \\(", "text.positions.match=0.5", "window.windows=1", "window.actor_steps=1",
             "method=anchor-only")  # fmt: skip
    given = ("warmstart.source=given", f"warmstart.path={path}", "warmstart.steps=2", "warmstart.reading=3")
    train(tiny.configure(tmp_path, *asked, *given), tmp_path / "warm")
    assert shown[-3:-1] == ["warm start", "building critics"]
    assert files[-3:] == [tmp_path / "warm" / PROGRESS] * 3
    assert [one for one in tracked if one.startswith("warm start")] == [
        "warm start, writing: 2",
        "warm start, reading: 3",
    ]
    shown.clear()
    # What a terminal is not shown, other programs find in the file.
    train(tiny.configure(tmp_path, *asked), tmp_path / "cold", quiet=True)
    assert "building critics" in shown
    assert "warm start" not in shown
    assert files[-2:] == [tmp_path / "cold" / PROGRESS] * 2


def test_a_signal_in_a_warm_start_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.configure(tmp_path, *HINDSIGHT)
    folder, words = tmp_path / "run", [word for one in (*tiny.OVERRIDES, *HINDSIGHT) for word in ("--set", one)]
    go_on = f"go on with: tfive resume {folder}"
    for owner, what, typed, said in (
        (
            warmstart.Teaching,
            "round",
            ["train", str(tmp_path / "tiny.toml"), *words, "--out"],
            "is not over and begins again",
        ),
        (start, "build", ["resume"], "is kept"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, what, lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
            assert _call([*typed, str(folder)]) == 1
        told = capsys.readouterr().err.splitlines()
        assert told[-1] == f"tfive: error: SIGTERM: its warm start {said}; {go_on}"
    # The second command says at once, before its warm start, that it begins again.
    assert [line for line in told if "beginning again" in line] == ["no checkpoint yet; beginning again"]
    assert _call(["resume", str(folder), "--quiet"]) == 0


@pytest.mark.parametrize(
    ("stopped_in", "more"),
    [
        ("round", ("thought.reading=gated", "anchor.conditioned=1")),
        ("read", ("warmstart.reading=2", "thought.delimiters=learned")),
    ],
)
def test_a_warm_start_goes_on_behind_its_last_whole_round(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stopped_in: str,
    more: tuple[str, ...],
) -> None:
    config, folder = tiny.configure(tmp_path, *HINDSIGHT, *more), tmp_path / "stopped"
    whole = train(config, tmp_path / "whole", quiet=True)
    assert not (tmp_path / "whole" / ROUNDS).exists()
    work = getattr(warmstart.Teaching, stopped_in)
    done: list[int] = []

    def until_the_end(teaching: Any, *given: Any) -> Any:
        if stopped_in == "read" or given[0] == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return work(teaching, *given)

    words = [word for one in (*tiny.OVERRIDES, *HINDSIGHT, *more) for word in ("--set", one)]
    with monkeypatch.context() as patched:
        patched.setattr(warmstart.Teaching, stopped_in, until_the_end)
        assert _call(["train", str(tmp_path / "tiny.toml"), *words, "--out", str(folder)]) == 1
    rounds = 1 if stopped_in == "round" else 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"SIGTERM: its warm start is not over and goes on after round {rounds}; go on with" in told
    # What was written after the round that is kept is written again.
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write('{"step": 0, "seconds": 9.0, "event": "warm start", "detail": "a round that was lost"}\n')
    drawn = warmstart.Teaching.round

    def noted(teaching: Any, number: int, *given: Any) -> Any:
        done.append(number)
        return drawn(teaching, number, *given)

    with monkeypatch.context() as patched:
        patched.setattr(warmstart.Teaching, "round", noted)
        assert _call(["resume", str(folder)]) == 0
    assert done == list(range(rounds, 2))
    assert f"no checkpoint yet; going on in its warm start after round {rounds}" in capsys.readouterr().err
    again = json.loads((folder / SUMMARY).read_text("utf-8"))
    assert numbers(again) == numbers(whole)
    assert again["account"]["roles"] == whole["account"]["roles"]
    assert again["warmstart"] == whole["warmstart"]
    first, second = (load_file(tmp_path / name / WEIGHTS) for name in ("whole", "stopped"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not (folder / ROUNDS).exists()
    events = [json.loads(line).get("detail", "") for line in (folder / METRICS).read_text("utf-8").splitlines()]
    assert "a round that was lost" not in events
    assert [event for event in events if "going on after" in event] == [f"going on after round {rounds} of 2"]
    assert [sum(event.startswith(f"round {number} of 2: ") for event in events) for number in (1, 2)] == [1, 1]


def test_rounds_of_another_warm_start_or_damaged_ones_are_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = tiny.configure(tmp_path, *HINDSIGHT), tmp_path / "run"
    work = warmstart.Teaching.round
    with monkeypatch.context() as patched:
        patched.setattr(
            warmstart.Teaching, "round",
            lambda teaching, number, *rest: work(teaching, number, *rest) if number < 1 else pytest.fail("stopped"),
        )  # fmt: skip
        with pytest.raises(pytest.fail.Exception, match="stopped"):
            train(config, folder, quiet=True)
        assert not _kept_without(patched, tmp_path, config)
    saved = (folder / "config.toml").read_text("utf-8")
    stopped = shutil.copytree(folder, tmp_path / "stopped")
    (folder / "config.toml").write_text(saved.replace("\nsamples = 2", "\nsamples = 3", 1), "utf-8")
    assert _call(["resume", str(folder)]) == 0
    said = capsys.readouterr().err
    assert "warmstart.samples = 3, the run began with 2; restore it in config.toml, or start another run" in said
    assert "its rounds so far were learned otherwise" in said
    assert "it begins again" in said
    more = tiny.configure(tmp_path / "more", *HINDSIGHT, "warmstart.samples=3")
    assert numbers(json.loads((folder / SUMMARY).read_text("utf-8"))) == numbers(
        train(more, tmp_path / "m", quiet=True)
    )
    file = next((stopped / ROUNDS).rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    whole = train(config, tmp_path / "whole", quiet=True)
    assert _call(["resume", str(stopped)]) == 0
    assert "of its rounds cannot be used" in capsys.readouterr().err
    assert numbers(json.loads((stopped / SUMMARY).read_text("utf-8"))) == numbers(whole)


def test_rounds_of_another_precision_are_left(tmp_path: Path) -> None:
    loaded = start.load_model(tiny.configure(tmp_path).model.name, device=torch.device("cpu"), dtype=torch.float32)
    config = tiny.configure(tmp_path, *HINDSIGHT)
    kept = Rounds(tmp_path, config, {}, "text", loaded, SINGLE, saves=True)
    kept.save({"done": 1})
    tree, lines = kept.newest()
    assert tree is not None
    assert tree["done"] == 1
    assert lines == []
    model: Any = loaded.model
    model.to(torch.bfloat16)
    tree, (line,) = kept.newest()
    assert tree is None
    assert line == "its rounds so far were learned otherwise (torch.float32 then, torch.bfloat16 now); it begins again"
    assert rounds_kept(tmp_path) == 1


def test_what_a_stop_left_of_the_rounds_goes(tmp_path: Path) -> None:
    config = tiny.configure(tmp_path, *HINDSIGHT)
    train(config, tmp_path / "run", quiet=True)
    again = tmp_path / "again"
    (again / ROUNDS).mkdir(parents=True)
    for name in ("config.toml", WEIGHTS, REPORT):  # without metrics: what was spent is known all the same
        shutil.copy(tmp_path / "run" / name, again)
    told, whole = resume(again, quiet=True), json.loads((tmp_path / "run" / SUMMARY).read_text("utf-8"))
    assert numbers(told) == numbers(whole)
    assert told["account"]["roles"] == whole["account"]["roles"]
    assert not (again / ROUNDS).exists()


def _kept_without(patched: pytest.MonkeyPatch, tmp_path: Path, config: Config) -> bool:
    """Whether rounds are kept where checkpoints are not asked for."""
    seldom = config.model_copy(update={"run": config.run.model_copy(update={"checkpoint_every": 0})})
    with pytest.raises(pytest.fail.Exception, match="stopped"):
        train(seldom, tmp_path / "seldom", quiet=True)
    return (tmp_path / "seldom" / ROUNDS).exists()


def test_only_texts_that_are_read_get_thoughts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "worked.jsonl"
    texts = [f"{n} river mill farm ( boat grain salt paper town rain wind seven" for n in range(12)]
    rows = [{"text": text, "workings": [" seven boat"]} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    monkeypatch.setattr(warmstart, "BATCH", 4)
    asked = ("warmstart.source=given", f"warmstart.path={path}", "text.positions.pattern=farm \\(", "warmstart.steps=1",
             "text.positions.match=0.5", "window.windows=1", "window.actor_steps=1", "method=anchor-only")  # fmt: skip
    for updates, drawn in ((2, 8), (5, 12)):  # the fourth begins again with all
        config = tiny.configure(tmp_path, *asked, f"warmstart.reading={updates}")
        _, read = train(config, tmp_path / f"run-{updates}", quiet=True)["warmstart"]["rounds"]
        assert read["thoughts"] == drawn


def test_given_workings_are_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{n} river mill farm ( boat grain salt paper town rain wind seven" for n in range(12)]
    rows = [{"text": text, "workings": [" seven boat"]} for text in texts]
    path = tmp_path / "worked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    asked = ("warmstart.source=given", f"warmstart.path={path}", "text.positions.pattern=farm \\(",
             "warmstart.steps=12", "text.positions.match=0.5", "warmstart.lr=1e-2", "window.windows=1",
             "window.actor_steps=1",
             "method=anchor-only")  # fmt: skip
    summary = train(tiny.configure(tmp_path, *asked), tmp_path / "run", quiet=True)
    (only,) = summary["warmstart"]["rounds"]
    assert only["kept"] == 12
    assert only["thoughts"] == 0
    assert only["loss_last"] < 0.7 * only["loss_first"]
    assert "unfit" not in only
    assert "texts with workings" not in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8")
    # Reading after thoughts of its own comes last: more thoughts are drawn, and what follows them gets likelier.
    order = watched(monkeypatch)
    careful = train(tiny.configure(tmp_path, *asked, "warmstart.reading=12"), tmp_path / "careful", quiet=True)
    learned, read = careful["warmstart"]["rounds"]
    assert learned["kept"] == 12
    assert read["thoughts"] == 12 == careful["account"]["roles"]["warmstart"]["trajectories"]
    assert learned["continuation_last"] < read["continuation_first"]
    assert read["continuation_last"] < read["continuation_first"]
    # Activations of one pass at a time.
    assert order == ["pass", "backward"] * (len(order) // 2)
    assert len(order) > 24
    long = [{"text": text, "workings": [" seven boat" * 40]} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, *long[:4])), "utf-8")
    mixed = train(tiny.configure(tmp_path, *asked), tmp_path / "mixed", quiet=True)
    (some,) = mixed["warmstart"]["rounds"]
    assert (some["kept"], some["unfit"]) == (12, 4)
    events = [json.loads(line) for line in (tmp_path / "mixed" / "metrics.jsonl").read_text("utf-8").splitlines()]
    (said,) = [one["detail"] for one in events if "of 16 workings are" in one.get("detail", "")]
    assert said.endswith("longer than thought.length = 4, with their close, and not learned; 81 would hold nine of ten")
    (changed,) = [one["detail"] for one in events if one.get("detail", "").startswith("on development texts: ")]
    before, after = (mixed["warmstart"][when]["thought_gain"] for when in ("before", "after"))
    assert f"thought_gain {before:+.3f} → {after:+.3f}" in changed
    (told,) = [one["detail"] for one in events if one.get("detail", "").startswith("round 1 of 1: ")]
    assert told.startswith("round 1 of 1: 12 workings learned, 4 do not fit a thought; first and last update: loss ")
    path.write_text("".join(json.dumps(row) + "\n" for row in long), "utf-8")
    with pytest.raises(UserError, match=r"thought\.length = \d+: no working of warmstart\.path = .* fits.*\(81 holds"):
        train(tiny.configure(tmp_path, *asked), tmp_path / "long", quiet=True)
    # Texts that go on behind a row may have been made for longer ones.
    wide = [{"text": text + " town" * 200, "workings": [" seven boat"], "tokens": 7} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in wide), "utf-8")
    train(tiny.configure(tmp_path, *asked), tmp_path / "wide", quiet=True)
    told = (tmp_path / "wide" / "metrics.jsonl").read_text("utf-8")
    assert "12 of 12 texts with workings are longer than text.sequence_length = " in told
    assert "12 of 12 texts with workings were made for another model's tokens; make them anew" in told
    # Without a close a thought has its full length; what is shorter cannot be one either.
    whole = [{"text": text, "workings": [" seven boat" * (1 + n % 2)]} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in whole), "utf-8")
    fixed = train(tiny.configure(tmp_path, *asked, "thought.variable_length=false"), tmp_path / "fixed", quiet=True)
    (some,) = fixed["warmstart"]["rounds"]
    assert (some["kept"], some["unfit"]) == (6, 6)
    assert "6 of 12 workings are not exactly thought.length = 4" in (tmp_path / "fixed" / "metrics.jsonl").read_text(
        "utf-8"
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with pytest.raises(UserError, match=r"has exactly so many tokens; use thought\.variable_length = true"):
        train(tiny.configure(tmp_path, *asked, "thought.variable_length=false"), tmp_path / "none", quiet=True)
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "long").exists()
    path.write_text(json.dumps({"text": "nothing here"}) + "\n", "utf-8")
    with pytest.raises(UserError, match="no row has a working"):
        train(tiny.configure(tmp_path, *asked), tmp_path / "none", quiet=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("warmstart.source=given",), "path names the file"),
        (("warmstart.path=x",), "path names the file"),
        (("warmstart.reading=100",), "reading comes after a warm start's rounds"),
        (("warmstart.source=given", "warmstart.path=x"), r"text\.positions\.pattern is empty"),
    ],
)
def test_bad_settings_are_one_line(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny.configure(tmp_path, *overrides)


def test_hindsight_opens_gates_that_start_shut(tmp_path: Path) -> None:
    """Behind shut gates no thought helps more than another, so the first round reads them as text."""
    asked = (*HINDSIGHT, "warmstart.steps=6", "thought.reading=gated", "anchor.conditioned=1", "window.windows=2")
    summary = train(tiny.configure(tmp_path, *asked), tmp_path / "run", quiet=True)
    report = summary["warmstart"]
    first, second = report["rounds"]
    assert report["before"]["thought_gain"] == report["before"]["content_gain"] == 0
    assert first["kept"] > 0
    assert first["content_gain"] > 0
    assert second["kept"] > 0
    gates = load_file(tmp_path / "run" / WEIGHTS)["gates.gate"]
    assert bool((gates != 0).all())
    assert summary["dev_thought_gain_start"] != 0 != summary["test_thought_gain_start"], "it begins with open gates"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    openness = [row["reading_openness"] for row in rows if "reading_openness" in row]
    assert len(openness) == 2
    # Windows go on from the gates that the warm start left: their one update moves each by about the rate of gates.
    assert report["after"]["reading_openness"] == pytest.approx(float(gates.tanh().abs().mean()))
    assert openness[0] == pytest.approx(report["after"]["reading_openness"], abs=0.011)
    assert report["after"]["reading_openness"] > 0.02


def test_gates_stay_as_the_warm_start_left_them_without_a_conditioned_anchor(tmp_path: Path) -> None:
    asked = (*HINDSIGHT, "thought.reading=gated", "anchor.conditioned=0", "anchor.next_token=0")
    report = train(tiny.configure(tmp_path, *asked), tmp_path / "run", quiet=True)["warmstart"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (window,) = [row for row in rows if "reading_openness" in row]
    assert window["reading_openness"] == report["after"]["reading_openness"] > 0
    # Open gates need no window of reading before the first reward.
    assert window["reward_scale"] > 0
    assert window["gradient_norm"] > 0  # of rewards: there is no anchor


def _none_useful(*given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    best, gain, useful = chosen(*given)
    return best, gain, torch.zeros_like(useful)


def test_reading_is_learned_where_no_thought_helped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a thought helped it is mostly right: reading there alone teaches trust."""
    few = list[int]()

    def first_text_alone(*given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        best, gain, useful = chosen(*given)
        only = torch.zeros_like(useful)
        only[0, 0] = True
        few.append(len(useful))
        return best, gain, only

    monkeypatch.setattr(hindsight, "chosen", first_text_alone)
    asked = (*HINDSIGHT, "warmstart.rounds=1", "warmstart.reading=8", "window.windows=1")
    wrote, read = train(tiny.configure(tmp_path, *asked), tmp_path / "run", quiet=True)["warmstart"]["rounds"]
    assert wrote["kept"] == 1
    assert read["thoughts"] > few[0] > 1


def test_rounds_go_on_where_the_last_one_ended_and_say_when_texts_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, texts_of = list[tuple[set[int], int]](), warmstart.Teaching._texts_of

    def seen(teaching: Any, number: int) -> Any:
        numbers, again = texts_of(teaching, number)
        if len(drawn) == number:
            drawn.append(({int(one) for one in numbers}, again))
        return numbers, again

    monkeypatch.setattr(warmstart.Teaching, "_texts_of", seen)
    asked = [one for one in HINDSIGHT if "rounds" not in one and "items" not in one]
    train(tiny.configure(tmp_path, *asked, "warmstart.rounds=4", "warmstart.items=50"), tmp_path / "run", quiet=True)
    before = set[int]()
    for numbers, again in drawn:
        # A text that lies across the end of a round is drawn in both.
        assert abs(again - len(numbers & before)) <= 1
        before |= numbers
    assert drawn[0][1] == drawn[1][1] == 0 < drawn[3][1]
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    said = [one["detail"] for one in told if one.get("event") == "warm start" and "in an earlier one" in one["detail"]]
    expected = [
        f"{again} texts of round {number} were drawn" for number, (_, again) in enumerate(drawn, start=1) if again
    ]
    assert [one.partition(" in an earlier")[0] for one in said] == expected


def test_without_any_useful_thought_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hindsight, "chosen", _none_useful)
    with pytest.raises(RunFailed, match=r"none of \d+ thoughts helped; raise warmstart\.items"):
        train(tiny.configure(tmp_path, *HINDSIGHT), tmp_path / "run", quiet=True)


def test_a_model_that_is_not_admitted_learns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(*_: Any) -> None:
        raise UserError("tree and plain rows differ")

    monkeypatch.setattr(admission, "_compare", differs)
    moved = ("text.positions.variance=0.75", "text.positions.uniform=0.25", "text.positions.pilot=48")
    for name, asked, kept in (("warm", HINDSIGHT, WEIGHTS), ("moved", moved, positions.PLACES)):
        with pytest.raises(UserError, match="tree and plain rows differ"):
            train(tiny.configure(tmp_path, *asked), tmp_path / name, quiet=True)
        assert not (tmp_path / name / kept).exists()


def test_text_that_cannot_fill_a_role_is_refused_before_anything_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_little(_: Ledger) -> None:
        raise UserError("the prepared text holds too little")

    monkeypatch.setattr(Ledger, "_check_sizes", too_little)
    with pytest.raises(UserError, match="holds too little"):
        train(tiny.configure(tmp_path, *HINDSIGHT), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / WEIGHTS).exists()


def test_off_there_is_nothing_of_it(tmp_path: Path) -> None:
    assert Config.load("nano").warmstart.source == "off"
