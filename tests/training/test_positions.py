"""Positions moved by a pilot: only training texts, the same for every method, counted, and kept for going on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import tiny
from tfive.config.config import Config
from tfive.errors import RunFailed, UserError
from tfive.rl import thought_variance
from tfive.telemetry import Silent
from tfive.training import positions
from tfive.training.corpus import corpus_of
from tfive.training.positions import PLACES, REPORT, Pilot
from tfive.training.run_folder import CHECKPOINTS
from tfive.training.start import resume, train

pytestmark = pytest.mark.model

MOVED = ("text.positions.variance=0.75", "text.positions.uniform=0.25", "text.positions.pilot=48",
         "window.windows=1", "window.actor_steps=1", "run.checkpoint_every=1")  # fmt: skip
GRPO = ("method=quiet-star-grpo", "thought.group=2")


def numbers(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name.startswith(("dev_", "test_"))}


def test_training_positions_move_before_the_first_window_and_stay_moved(tmp_path: Path) -> None:
    config = tiny.configure(tmp_path, *MOVED, *GRPO)
    summary = train(config, tmp_path / "run", quiet=True)
    report, corpus = summary["positions"], corpus_of(config)
    found = load_file(tmp_path / "run" / PLACES)["positions"]
    measured = np.concatenate([corpus.sequences(split) for split in ("development", "test")])
    trained = np.setdiff1d(np.arange(len(corpus)), measured)
    assert np.array_equal(found[measured], corpus.positions[measured])
    assert ((found >= 0).sum(1) == corpus.items_in).all()
    elsewhere = sum(np.setdiff1d(found[row], corpus.positions[row]).size for row in trained)
    assert report["moved"] == elsewhere
    assert 0.4 * report["positions"] < elsewhere < 0.85 * report["positions"]
    counted = summary["account"]["roles"]["positions"]
    assert counted["trajectories"] == report["thoughts"] == 48 * thought_variance.THOUGHTS
    assert counted["generated_tokens"] >= counted["trajectories"]
    assert summary["account"]["seconds"]["positions"]["all"] > 0
    # Stopped before the first checkpoint: the pilot is not asked again, and all comes out the same.
    other = tmp_path / "again"
    other.mkdir()
    for name in ("config.toml", PLACES, REPORT):
        (other / name).write_bytes((tmp_path / "run" / name).read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positions, "Pilot", lambda *_: pytest.fail("it is asked once"))
        again = resume(other, quiet=True)
    assert numbers(again) == numbers(summary)
    assert again["account"]["roles"] == summary["account"]["roles"]
    assert (other / CHECKPOINTS).is_dir()
    # Another method at the same seed has the same positions, and one without thoughts can stand beside both.
    second = train(tiny.configure(tmp_path, *MOVED, "method=anchor-only"), tmp_path / "anchor", quiet=True)
    assert second["positions"]["digest"] == report["digest"]
    third = train(tiny.configure(tmp_path, *MOVED, "method=ntp"), tmp_path / "ntp", quiet=True)
    assert "positions" not in third
    assert third["identity"] == second["identity"] == summary["identity"]
    assert third["laps"][0]["actor_items"] == second["laps"][0]["actor_items"]
    (other / PLACES).write_bytes((other / PLACES).read_bytes()[:-1] + b"?")
    (other / "summary.json").unlink()
    with pytest.raises(UserError, match=r"not the positions that the run began with .*checksum"):
        resume(other, quiet=True)


def test_the_pilot_reads_texts_that_actor_and_critics_learn_from_alone(tmp_path: Path) -> None:
    config = tiny.configure(tmp_path, *MOVED)
    corpus = corpus_of(config)
    pilot = Pilot(config, tiny_loaded(config), corpus, None)
    texts = pilot.pilot_texts()
    rows = np.unique(texts.items_BP[texts.items_BP >= 0].numpy() // corpus.per_text)
    assert set(corpus.role_of[rows]) <= {"pool_1", "pool_2"}
    assert int((texts.positions_BP >= 0).sum()) == 48


def tiny_loaded(config: Config) -> Any:
    from tfive.models.load import load_model

    return load_model(config.model.name)


def test_where_all_thoughts_gain_the_same_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = thought_variance.pilot_gains
    monkeypatch.setattr(positions, "pilot_gains", lambda *some, **more: (0 * found(*some, **more)[0], 1))
    config = tiny.configure(tmp_path, *MOVED, *GRPO)
    with pytest.raises(RunFailed, match=r"nothing to place by; set text\.positions\.variance = 0"):
        positions.move_positions(config, tiny_loaded(config), corpus_of(config), Silent(), tmp_path / "run", None)


def test_shut_gates_are_refused_and_those_of_a_warm_start_are_not(tmp_path: Path) -> None:
    gated = (*MOVED, "thought.reading=gated", "anchor.conditioned=1", "window.windows=2")
    with pytest.raises(UserError, match=r"text\.positions\.variance = 0\.75: with thought\.reading = gated"):
        tiny.configure(tmp_path, *gated)
    assert tiny.configure(tmp_path, *gated, "warmstart.source=hindsight").text.positions.variance == 0.75


def test_what_moves_is_prepared_like_any_random_position(tmp_path: Path) -> None:
    moved, plain = (corpus_of(tiny.configure(tmp_path, *some)) for some in (MOVED, ("text.positions.uniform=1",)))
    assert moved.folder == plain.folder
