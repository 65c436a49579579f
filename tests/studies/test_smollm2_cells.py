"""The SmolLM2 study runs its cells: which there are, what the search takes, what a cell leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plan
import pytest
import run_cells
import search
import study
from recorded_cells import cell

from recorded import run
from tfive.errors import UserError
from tfive.training.loop import Stopped


def test_every_cell_is_a_configuration_and_methods_get_equally_many_trials(tmp_path: Path) -> None:
    assert {len(trials) for trials in plan.TRIALS.values()} == {3}
    assert set(plan.TRIALS) == set(plan.METHODS) - {"base"}
    for label, seed in plan.cells("search", 1):
        config = search.configuration("search", label, seed, tmp_path, [])
        assert config.method == label.partition("+")[0]
        assert config.window.windows == 3
        cell(tmp_path, "search", label, seed)
    for name in ("main", "clock", "ablations"):
        for label, seed in plan.cells(name, 2):
            config = search.configuration(name, label, seed, tmp_path, [])
            assert (config.text.sequences.development, config.text.sequences.test) == (256, 768)
            assert config.run.seed == seed
    changed = {
        label: search.configuration("ablations", label, 0, tmp_path, []) for label, _ in plan.cells("ablations", 1)
    }
    assert changed["t5+ablation-minimum"].calibration.mode == "minimum"
    pairs = ("same", "disjoint", "bracket")
    assert [changed[f"t5+ablation-pair-{pair}"].critic.pair for pair in pairs] == list(pairs)
    plain = search.configuration("main", "t5", 0, tmp_path, [])
    assert {config.optimizer.lr for config in changed.values()} == {plain.optimizer.lr}


def test_the_search_takes_the_best_planned_trial_and_lists_all(tmp_path: Path) -> None:
    low, high, failed = plan.TRIALS["t5"]
    cell(tmp_path, "search", f"t5+{low}", 100, level=0.1)
    cell(tmp_path, "search", f"t5+{high}", 100, level=0.2)
    assert search.chosen(tmp_path) == {}
    cell(tmp_path, "search", f"t5+{failed}", 100, failure="critics did not qualify")
    cell(tmp_path, "search", "t5+optimizer.lr=1.0", 100, level=0.9)
    assert search.chosen(tmp_path) == {"t5": high}
    assert len(search.trials(tmp_path)) == 4
    assert search.configuration("main", "t5", 0, tmp_path, []).optimizer.lr == 2e-4
    with pytest.raises(UserError, match="rlp: the search of rlp is not finished"):
        search.configuration("main", "rlp", 0, tmp_path, [])


def test_a_trial_is_judged_by_what_thoughts_say() -> None:
    read, wrote = ({"gain_vs_base": gain, "content_gain": -gain, "no_thought_loss": 3.0} for gain in (0.5, -0.5))
    assert search.merit("t5", wrote) > search.merit("t5", read)
    assert search.merit("ntp", wrote | {"no_thought_loss": 2.0}) > search.merit("ntp", wrote)


def test_the_pair_that_the_search_took_is_not_an_ablation(tmp_path: Path) -> None:
    assert "t5+ablation-pair-bracket" in dict(run_cells.to_do("ablations", 1, tmp_path))
    for trial in plan.TRIALS["t5"]:
        cell(tmp_path, "search", f"t5+{trial}", 100, level=0.9 if "bracket" in trial else 0.1)
    left = dict(run_cells.to_do("ablations", 1, tmp_path))
    assert "t5+ablation-pair-bracket" not in left
    assert "t5+ablation-pair-same" in left


def test_cells_to_do_are_those_without_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell(tmp_path, "main", "t5", 0)
    study.main(["list", "main", "--seeds", "1", "--runs", str(tmp_path)])
    assert capsys.readouterr().out.split() == [
        "rlp", "0", "quiet-star-grpo", "0", "quiet-star-ppo", "0", "anchor-only", "0", "ntp", "0", "base", "0",
    ]  # fmt: skip
    with pytest.raises(UserError, match="there is no such folder"):
        study.main(["table", "--runs", str(tmp_path / "absent")])


def test_all_runs_what_is_to_do_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_cell(asked: Any) -> dict[str, Any]:
        cell(asked.runs, asked.study, asked.label, asked.seed)
        return {"label": asked.label, "shared": asked.shared, "overrides": asked.overrides}

    monkeypatch.setattr(run_cells, "run_cell", run_cell)
    cell(tmp_path, "clock", "rlp", 0)
    asked = ["all", "clock", "--runs", str(tmp_path), "--set", "model.device=cpu"]
    assert study.main(asked) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["label"] for one in told] == ["t5", "quiet-star-grpo", "quiet-star-ppo", "anchor-only", "ntp"]
    assert all(not one["shared"] and one["overrides"] == ["model.device=cpu"] for one in told)
    assert not list(run_cells.to_do("clock", 1, tmp_path))


class Trainer:
    """Stands in for `train`: notes what was asked for and writes what a run would, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: list[str] = []

    def __call__(self, config: Any, folder: Path, *, quiet: bool) -> None:
        self.asked.append(config.method)
        run(folder, config.method, config.run.seed, 0.1)
        if self.error is not None:
            (folder / "summary.json").unlink()
            raise self.error


def test_a_cell_that_was_stopped_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_cells, "train", Trainer(Stopped("SIGTERM: saved in x")))
    with pytest.raises(Stopped):
        study.main(["all", "search", "--runs", str(tmp_path)])
    assert len(list(run_cells.to_do("search", 1, tmp_path))) == 18


def test_all_goes_on_behind_a_cell_that_broke_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_cells, "train", Trainer(RuntimeError("out of memory")))
    assert study.main(["all", "search", "--runs", str(tmp_path)]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(told) == 18
    assert all(one["broken"] == "RuntimeError: out of memory" for one in told)
    assert len(list(run_cells.to_do("search", 1, tmp_path))) == 18


def test_what_was_trained_is_not_trained_again_when_the_benchmarks_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer()
    monkeypatch.setattr(run_cells, "train", trainer)

    def broken(config: Any, folder: Path, written: Any) -> dict[str, Any]:
        raise RuntimeError("no room")

    monkeypatch.setattr(run_cells, "benchmarks", broken)
    with pytest.raises(RuntimeError, match="no room"):
        study.main(["cell", "base", "0", "--runs", str(tmp_path)])
    monkeypatch.setattr(run_cells, "benchmarks", lambda config, folder, written: {"verdicts": {}})
    assert study.main(["cell", "base", "0", "--runs", str(tmp_path)]) == 0
    assert trainer.asked == ["base"]
    assert json.loads((tmp_path / "main" / "base-seed0" / "cell.json").read_text("utf-8"))["train_seconds"] > 1


def test_benchmarks_are_asked_of_every_checkpoint_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        (tmp_path / "checkpoints" / f"checkpoint-{number:08d}").mkdir(parents=True)
    asked: list[tuple[str, ...]] = []

    def export(folder: Path, out: Path) -> dict[str, Any]:
        out.mkdir()
        return {"window": 5 * len(list((folder / "checkpoints").iterdir()))}

    def evaluate(wanted: Any, *, quiet: bool) -> None:
        wanted.out.mkdir()
        asked.append(wanted.names)

    def answers_of(where: Path, task: str) -> tuple[list[Any], list[Any]]:
        right = len(list((tmp_path / "checkpoints").iterdir())) == 2
        ways = dict.fromkeys(("raw", "per_character", "per_byte"), right)
        return [{"id": "a", "correct": right, "equivalent": None, "sample": 0}], [{"id": "a", **ways}]

    monkeypatch.setattr(run_cells, "export", export)
    monkeypatch.setattr(run_cells, "evaluate", evaluate)
    monkeypatch.setattr(run_cells, "answers_of", answers_of)
    monkeypatch.setattr(run_cells, "generated_values", lambda records: {"pass@1": {"a": float(records[0]["correct"])}})
    found = run_cells.benchmarks(search.configuration("main", "base", 0, tmp_path, []), tmp_path, plan.WRITTEN)
    assert asked == [plan.SCORED, plan.WRITTEN, plan.SCORED], "written answers at the end alone"
    assert found["verdicts"] == dict.fromkeys((*plan.SCORED, *plan.WRITTEN), "1")
    assert found["earlier"] == [{"window": 5, "verdicts": dict.fromkeys(plan.SCORED, "0")}]
