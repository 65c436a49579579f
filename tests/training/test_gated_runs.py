"""Runs with gated reading: no harm before training, gates that learn, are resumed, exported and read with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tfive.errors import UserError
from tfive.inference.thought_model import ThoughtModel
from tfive.rl.qualify import Qualifier
from tfive.training import start
from tfive.training.checkpoint import CheckpointStore
from tfive.training.develop import MeasuredTexts
from tfive.training.export import export
from tfive.training.run_folder import CHECKPOINTS
from tiny import configure

pytestmark = pytest.mark.model

TEXT = "7 river mill farm ( boat grain ) salt paper town count apple letter ."
GATED = ("thought.reading=gated", "anchor.conditioned=1", "anchor.next_token=1", "window.probe=0")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def actor_of(folder: Path) -> dict[str, Any]:
    found = CheckpointStore(folder / CHECKPOINTS).newest()
    assert found.checkpoint is not None
    actor: dict[str, Any] = found.checkpoint.tree["method"]["actor"]
    return actor


@pytest.mark.parametrize("method", ["anchor-only", "quiet-star-grpo", "rlp", "t5"])
def test_every_kind_of_method_starts_without_harm_and_opens_its_gates(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    # Critics of this size qualify by luck alone; here it only matters that the actor moves.
    monkeypatch.setattr(Qualifier, "_criterion", lambda *_: (True, "let through"))
    summary = start.train(configure(home, *GATED, f"method={method}"), tmp_path / "run", quiet=True)
    first, last = summary["history"][0], summary["history"][-1]
    assert summary["reading"] == "gated"
    for name in ("thought_gain", "content_gain", "other_gain", "empty_gain", "random_gain", "gain_vs_base"):
        assert first[name] == 0.0, name
    assert last["thought_gain"] != 0.0
    gate = actor_of(tmp_path / "run")["reading_gates"]["gate"]
    assert gate.shape == (4,)
    assert bool((gate != 0).all())


def test_gates_move_at_their_own_rate_and_are_not_decayed(home: Path, tmp_path: Path) -> None:
    moved = []
    for number, rate in enumerate(("1e-2", "3e-2")):
        overrides = (*GATED, "method=anchor-only", "window.windows=1", "window.actor_steps=1", "actor.minibatches=1")
        slow = ("optimizer.lr=1e-9", "optimizer.weight_decay=0.5", f"optimizer.gate_lr={rate}")
        start.train(configure(home, *overrides, *slow), tmp_path / str(number), quiet=True)
        moved.append(actor_of(tmp_path / str(number))["reading_gates"]["gate"])
    # Adam's first step is as long as the rate, whatever the gradient.
    torch.testing.assert_close(moved[0].abs(), torch.full((4,), 1e-2), rtol=1e-3, atol=0)
    torch.testing.assert_close(moved[1], 3 * moved[0], rtol=1e-3, atol=0)


class _Stopped(Exception):
    pass


def test_a_stopped_run_goes_on_with_its_gates_and_is_exported_with_them(home: Path, tmp_path: Path) -> None:
    config = configure(home, *GATED, "method=anchor-only")
    start.train(config, tmp_path / "whole", quiet=True)

    def stop(_: Any) -> None:
        raise _Stopped

    with pytest.raises(_Stopped):
        start.train(config, tmp_path / "stopped", quiet=True, on_window=stop)
    half = actor_of(tmp_path / "stopped")["reading_gates"]["gate"]
    start.resume(tmp_path / "stopped", quiet=True)
    whole, resumed = (actor_of(tmp_path / name) for name in ("whole", "stopped"))
    assert torch.equal(resumed["reading_gates"]["gate"], whole["reading_gates"]["gate"])
    assert not torch.equal(resumed["reading_gates"]["gate"], half)
    entry = "reading_gates.gate"
    both = [actor["optimizer"]["parameters"][entry]["first"] for actor in (whole, resumed)]
    assert torch.equal(*both)

    export(tmp_path / "whole", tmp_path / "out")
    model = ThoughtModel.from_pretrained(tmp_path / "out", device="cpu", dtype=torch.float32)
    assert model.gates is not None
    assert torch.equal(model.gates.gate, whole["reading_gates"]["gate"])
    found = model.predict(TEXT)
    assert not torch.equal(found.thoughtful[found.served], found.plain[found.served])
    assert len(model.generate("7 river", max_new_tokens=5).ids) == 5
    model.gates.gate.data.zero_()
    shut = model.predict(TEXT)
    assert shut.thoughts == found.thoughts
    assert torch.equal(shut.mixed, shut.plain)


def test_exported_it_gains_what_the_run_measured(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[MeasuredTexts] = []
    right = MeasuredTexts.measure

    def noting(self: MeasuredTexts, *arguments: Any) -> Any:
        measured.append(self)
        return right(self, *arguments)

    monkeypatch.setattr(MeasuredTexts, "measure", noting)
    summary = start.train(configure(home, *GATED, "method=anchor-only"), tmp_path / "run", quiet=True)
    export(tmp_path / "run", tmp_path / "out")
    model = ThoughtModel.from_pretrained(tmp_path / "out", device="cpu", dtype=torch.float32)
    again, _ = measured[-1].measure(model.engine(), None)
    for name in ("thought_gain", "content_gain", "empty_gain"):
        assert summary["test"]["after"][name] != 0.0
        assert again[name] == pytest.approx(summary["test"]["after"][name], abs=1e-6)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("anchor.conditioned=0",), ("thought.reading = gated", "anchor.conditioned = 1")),
        (("window.windows=1",), ("window.windows = 1", "use window.windows ≥ 2")),
    ],
)
def test_what_could_never_open_a_gate_is_refused(
    home: Path, overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as error:
        configure(home, *GATED, *overrides)
    assert all(part in str(error.value) for part in parts), str(error.value)
