"""Starting a run: bad input is one line and writes nothing, and `--json` ends with one object that says it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tfive.cli.app import _call
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.rl.qualify import Qualifier
from tfive.training import start
from tfive.training.export import export
from tiny import OVERRIDES, configure

pytestmark = pytest.mark.model

SUMMARY = {
    "dev_thought_gain_start", "dev_thought_gain_end", "dev_content_gain_start", "dev_content_gain_end",
    "dev_content_gain_interval", "dev_gain_vs_base_end", "dev_no_thought_loss_start", "dev_no_thought_loss_end",
    "dev_mixed_gain_end", "dev_mixed_gain_interval", "mean_thought_length", "mean_gate", "r2", "retention",
    "windows", "seconds", "generated_tokens",
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
    assert len(found["r2"]) == len(found["dev_content_gain_interval"]) == len(found["dev_mixed_gain_interval"]) == 2
    assert found["generated_tokens"] == sum(role["generated_tokens"] for role in found["account"]["roles"].values())
    assert strictly((out / "summary.json").read_text("utf-8")) == found
    for line in (out / "metrics.jsonl").read_text("utf-8").splitlines():
        strictly(line)
    # A finished run gives the same summary again.
    assert strictly(start.resume_command(str(out), as_json=True, quiet=True) or "") == found


@pytest.mark.usefixtures("qualified")
def test_a_summary_of_one_text_is_still_json(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval of one text has no end; a program that reads the line must not stumble over that."""
    from tfive.training.develop import Development

    measure = Development.measure

    def endless(self: Development, *arguments: Any) -> tuple[dict[str, Any], Any]:
        found, items = measure(self, *arguments)
        return {**found, "content_gain_interval": [float("-inf"), float("inf")]}, items

    monkeypatch.setattr(Development, "measure", endless)
    line = command(home, tmp_path / "run", "window.windows=1", "calibration.mode=average", "window.probe=0")
    assert line is not None
    assert strictly(line)["dev_content_gain_interval"] == [None, None]
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


def test_only_the_end_is_saved_and_other_development_texts_are_measured(home: Path, tmp_path: Path) -> None:
    plain = ("method=ntp", "run.checkpoint_every=0", "run.develop_items=6")
    first = start.train(configure(home, *plain), tmp_path / "first", quiet=True)
    assert [path.name for path in (tmp_path / "first" / "checkpoints").iterdir()] == ["checkpoint-00000001"]
    later = start.train(configure(home, *plain, "run.develop_after=1"), tmp_path / "later", quiet=True)
    assert first["identity"]["development_items"] != later["identity"]["development_items"]
    assert first["dev_no_thought_loss_start"] != later["dev_no_thought_loss_start"]
    shown = [list(one.get("samples", ())) for one in first["history"]]
    assert [bool(one) for one in shown] == [True, *[False] * (len(shown) - 2), True]
    assert set(shown[0][0]) == {"before", "thought", "after"}


def test_the_untrained_row_is_one_measurement(home: Path, tmp_path: Path) -> None:
    summary = start.train(configure(home, "method=base", "run.checkpoint_every=0"), tmp_path / "run", quiet=True)
    assert export(tmp_path / "run", tmp_path / "out")["window"] == 0
    assert (summary["method"], summary["windows"], summary["generated_tokens"]) == ("base", 0, 0)
    assert summary["dev_thought_gain_start"] == summary["dev_thought_gain_end"] != 0
    assert summary["dev_mixed_gain_end"] is summary["r2"] is None
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


def test_a_run_is_resumed_only_where_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run here"):
        start.resume_command(str(tmp_path), as_json=True, quiet=True)
    (tmp_path / "config.toml").write_text("[model]\nname = 3\n", "utf-8")
    with pytest.raises(UserError, match=r"model\.name"):
        start.resume_command(str(tmp_path), as_json=True, quiet=True)


def test_without_json_nothing_is_returned(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Config, Path | None]] = []

    def train(config: Config, out: Path | None, quiet: bool, trust_remote_code: bool) -> dict[str, int]:
        seen.append((config, out))
        return {"a": 1}

    monkeypatch.setattr(start, "train", train)
    assert start.run_command([str(home / "tiny.toml")], OVERRIDES, None, as_json=False, quiet=True) is None
    assert start.run_command([str(home / "tiny.toml")], OVERRIDES, "o", as_json=True, quiet=True) == '{"a": 1}'
    assert [out for _, out in seen] == [None, Path("o")]
