"""Studies on the smallest whole run: restarted, resumed, failed, refused. Cells run in this process."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tfive.cli.app import _call
from tfive.cli.report import compare_command
from tfive.errors import UserError
from tfive.report import figures
from tfive.report.runs import mismatches, read_study
from tfive.training import compare
from tfive.training.cells import cells_of, configured, seeds_of
from tfive.training.checkpoint import CheckpointStore
from tfive.training.run_folder import CHECKPOINTS
from tfive.training.summary import SUMMARY, save_summary
from tiny import OVERRIDES, configure

pytestmark = pytest.mark.model

SETTINGS = (*OVERRIDES, "window.windows=1", "anchor.conditioned=1.0", "gate.passes=1", "run.develop_items=8")


class Here:
    """A cell that ran in this process when it was launched."""

    launched: list[str] = []  # noqa: RUF012

    def __init__(self, cell: compare.Cell, cores: range | None) -> None:
        self.launched.append(cell.folder.name)
        going_on = (cell.folder / CHECKPOINTS).is_dir()
        cell.settings.parent.mkdir(parents=True, exist_ok=True)
        cell.settings.write_text(cell.config.to_toml(), "utf-8")
        words = ["resume", str(cell.folder)] if going_on else ["train", str(cell.settings), "--out", str(cell.folder)]
        said = io.StringIO()
        with redirect_stderr(said), redirect_stdout(said):
            self.status = _call([*words, "--quiet"])
        cell.log.write_text(said.getvalue(), "utf-8")

    def poll(self) -> int:
        return self.status


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cells launched so far, by name."""
    monkeypatch.setattr(compare, "launch", Here)
    monkeypatch.setattr(figures, "available", lambda: False)
    Here.launched = []
    return Here.launched


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    configure(folder)
    return folder


def study(home: Path, out: Path, methods: str, *overrides: str, seeds: str = "1") -> tuple[Any, bool]:
    text, complete = compare_command(
        [str(home / "tiny.toml")], methods, seeds, (*SETTINGS, *overrides), str(out), jobs=1, retry=False,
        as_json=True, quiet=True,
    )  # fmt: skip
    return json.loads(text), complete


def test_finished_cells_are_kept_and_others_added(home: Path, tmp_path: Path, here: list[str]) -> None:
    out = tmp_path / "study"
    found, complete = study(home, out, "ntp,rlp", seeds="2")
    assert complete
    assert here == ["ntp-seed0", "rlp-seed0", "ntp-seed1", "rlp-seed1"]
    assert [row["label"] for row in found["methods"]] == ["ntp", "rlp"]
    again, _ = study(home, out, "ntp,rlp", seeds="2")
    assert len(here) == 4
    assert again == found
    more, complete = study(home, out, "ntp,rlp,base", seeds="2")
    assert here[4:] == ["base-seed0", "base-seed1"]
    assert complete
    assert [row["rollouts"]["actor_per_item"] for row in more["methods"]] == [0, 8, 0]
    assert more["methods"][1]["rollouts"]["auxiliary_per_item"] == 0
    runs = read_study(out)
    assert mismatches(runs) == []
    drawn = [lap["actor_items"] for run in runs if run.seed == 0 for lap in run.summary["laps"]]
    assert len(set(drawn)) == 1
    # Every method starts where the base model stands: the very same items and thoughts.
    start = {run.label: run.history[0]["thought_gain"] for run in runs if run.seed == 0}
    assert start["ntp"] == start["rlp"] == start["base"]
    assert next(run for run in runs if run.label == "base").history[-1]["no_thought_drift"] == pytest.approx(
        0, abs=1e-6
    )


def test_failures_are_recorded_and_not_repeated(home: Path, tmp_path: Path, here: list[str]) -> None:
    out = tmp_path / "study"
    label = "t5+qualify.eta=0.99+qualify.attempts=1+qualify.on_failure=stop"
    found, complete = study(home, out, f"ntp,{label}")
    assert not complete
    assert found["methods"][1]["failed"] == [0]
    assert found["runs"][1]["failure"].startswith("critics did not qualify in 1 attempts")
    assert str(out) not in json.dumps(found)
    study(home, out, f"ntp,{label}")
    assert here == ["ntp-seed0", "t5+qualify.eta=0.99+qualify.attempts=1+qualify.on_failure=stop-seed0"]
    with pytest.raises(UserError, match=r"optimizer.lr = 0.001, now 0.002 is asked for; use another --out"):
        study(home, out, "ntp", "optimizer.lr=0.002")


def test_an_unfinished_cell_goes_on(
    home: Path, tmp_path: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, begin = tmp_path / "study", CheckpointStore.begin
    saves = []

    def once(self: CheckpointStore, tree: Any) -> None:
        saves.append(1)
        if len(saves) == 2:
            self.wait()
            raise KeyboardInterrupt
        begin(self, tree)

    monkeypatch.setattr(CheckpointStore, "begin", once)
    cells = cells_of([str(home / "tiny.toml")], ["ntp"], [0], SETTINGS, out)
    # The first checkpoint is there, the run is not: what an interrupted process leaves.
    monkeypatch.setattr(compare, "_judge", lambda cell, status: "unfinished")
    compare.run_cells(cells)
    assert compare.write_study(out, cells, {})[0].state == "stopped"
    monkeypatch.undo()
    monkeypatch.setattr(compare, "launch", Here)
    compare.run_cells(cells)
    assert compare.write_study(out, cells, {})[0].state == "done"
    assert here == ["ntp-seed0", "ntp-seed0"]


def test_a_cell_killed_in_its_first_save_begins_anew(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = cells_of([str(home / "tiny.toml")], ["ntp"], [0], SETTINGS, tmp_path / "study")
    half = cell.folder / CHECKPOINTS / ".writing-00000001"
    half.mkdir(parents=True)
    (half / "tensors-00000.safetensors").write_bytes(b"half")
    started: list[list[str]] = []
    monkeypatch.setattr(compare.subprocess, "Popen", lambda words, **_: started.append(words))
    compare.launch(cell, None)
    assert "train" in started[0]
    assert list(cell.folder.iterdir()) == []
    (cell.folder / CHECKPOINTS / "checkpoint-00000001").mkdir(parents=True)
    compare.launch(cell, None)
    assert "resume" in started[1]


def test_cells_at_once_get_as_many_cores_as_they_have_threads(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[tuple[str, range | None]] = []

    class Done:
        def __init__(self, cell: compare.Cell, cores: range | None) -> None:
            placed.append((cell.label, cores))

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(compare, "launch", Done)
    monkeypatch.setattr(compare, "_judge", lambda cell, status: "done")
    sources = [str(home / "tiny.toml")]

    def run(jobs: int, *overrides: str) -> list[range | None]:
        placed.clear()
        out = tmp_path / f"{jobs}-{len(overrides)}"
        compare.run_cells(cells_of(sources, ["ntp", "rlp"], [0], (*SETTINGS, *overrides), out), jobs=jobs)
        return [cores for _, cores in placed]

    assert run(1, "run.threads=1") == [None, None]
    assert run(2, "run.threads=1") == [range(1), range(1, 2)]
    assert run(2, "run.threads=3") == [range(3), range(3, 6)]
    cells = cells_of(sources, ["ntp"], [0], SETTINGS, tmp_path / "unset")
    assert cells[0].config.run.threads is None
    assert compare.cores_each(cells) == compare.CORES
    monkeypatch.setattr(compare.os, "sched_getaffinity", lambda _: {3, 5})
    with pytest.raises(UserError, match=r"--jobs 3: each takes one core \(run.threads\) and there are 2; use fewer"):
        compare.compare(sources, ["ntp"], [0], (*SETTINGS, "run.threads=1"), tmp_path / "many", jobs=3)
    assert not (tmp_path / "many").exists()


def test_a_cell_killed_while_it_sums_up_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text.encode(encoding)[:4])
        raise KeyboardInterrupt

    save_summary({"windows": 1}, tmp_path)
    assert json.loads((tmp_path / SUMMARY).read_text("utf-8")) == {"windows": 1}
    (tmp_path / SUMMARY).unlink()
    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        save_summary({"windows": 1}, tmp_path)
    assert not (tmp_path / SUMMARY).exists()


def test_runs_on_other_text_are_refused(home: Path, tmp_path: Path, here: list[str]) -> None:
    with pytest.raises(UserError, match="cannot be compared: "):
        study(home, tmp_path / "study", "base,base+text.positions.per_text=3+run.develop_items=9")
    with pytest.raises(UserError, match=r"cannot be compared: evaluation.sampling.temperature: 1.0 in base-seed0, 0.7"):
        study(home, tmp_path / "other", "base,base+sampling.temperature=0.7")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--methods", "t6"), "--methods t6: no method, variant"),
        (("--methods", "t5,t5"), "named twice"),
        (("--methods", "t5+a b,t5+a_b"), "named twice"),
        (("--seeds", "many"), "--seeds 'many'"),
        (("--seeds", "1,0,1"), "--seeds 1,0,1: one is named twice"),
        (("--methods", "t5+qualify.etta=1"), "did you mean qualify.eta?"),
        (("--jobs", "4096"), "--jobs 4096"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    words: tuple[str, ...], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(["compare", "nano", *words, "--out", str(tmp_path / "study")]) == 2
    said = capsys.readouterr().err
    assert part in said
    assert said.count("\n") == 1
    assert not (tmp_path / "study").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine", "utf-8")
    assert _call(["compare", "nano", "--methods", "ntp", "--seeds", "1", "--out", str(tmp_path)]) == 2
    assert "study.json is missing" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_labels_name_methods_presets_and_values() -> None:
    config = configured(["nano"], "t5+critic.pair=bracket", 3, ["qualify.eta=0.2"])
    assert (config.method, config.critic.pair, config.run.seed, config.qualify.eta) == ("t5", "bracket", 3, 0.2)
    assert configured([], "rlp", 0, []).model.name == "nano"
    assert seeds_of("3") == [0, 1, 2]
    assert seeds_of("0,4") == [0, 4]
    assert seeds_of("4,") == [4]
    with pytest.raises(UserError, match=r"--seeds 0: none would run; .* \(seed 0 alone: 0,\)"):
        seeds_of("0")


@pytest.mark.parametrize("left", ["warmstart.json", "warmstart-rounds", None])
def test_a_cell_that_was_stopped_in_its_warm_start_goes_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str | None
) -> None:
    (cell,) = cells_of([str(home / "tiny.toml")], ["ntp"], [0], SETTINGS, tmp_path)
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.toml").write_text(cell.config.to_toml(), "utf-8")
    if left is not None:
        (cell.folder / left).mkdir()
    words: list[list[str]] = []
    monkeypatch.setattr(compare.subprocess, "Popen", lambda given, **_: words.append(given))
    compare.launch(cell, None)
    assert words[0][3] == ("train" if left is None else "resume")
    assert (cell.folder / "config.toml").exists() == (left is not None)
