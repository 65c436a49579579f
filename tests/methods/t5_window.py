"""Steering a window of T⁵ on the smallest run, and looking at what it did."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from stage import Tally
from tfive.methods.method import Method
from tfive.methods.t5 import T5
from tfive.rl.qualify import Qualifier
from tfive.rl.trajectory import Trajectories
from tfive.training.build import Assembly

PLAIN = ("calibration.mode=average", "window.probe=0", "gate.passes=0")
"""Enough of a window for what does not concern heads, probes or gate."""
QUICK = ("calibration.cross_fit=false",)


def t5_of(run: Assembly) -> T5:
    """The run's method, which is T⁵."""
    assert isinstance(run.method, T5)
    return run.method


def advance_to(method: Method[Any], phase: str) -> list[str]:
    """Micro-steps until `phase` is next."""
    done: list[str] = []
    while method.phase != phase or not done:
        done.append(method.advance())
    return done


def window(method: Method[Any]) -> list[str]:
    """One whole window."""
    return advance_to(method, "open")


def same(left: Any, right: Any) -> bool:
    """Equal trees, tensors bit for bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, Tensor):
        return left.equal(right)
    return bool(left == right)


def go_on(run: Any, again: Any) -> None:
    """Bring `again`, which is new, to where `run` was saved; then two windows of both."""
    _load(again, _saved(run))
    for one in (run, again):
        window(one.method)
        window(one.method)


def goes_on_from(phases: Sequence[str], new: Callable[[], Assembly], held: Callable[[Assembly], Any]) -> None:
    """One run is saved before each of these phases of its second window and goes on to the end of its third; every new
    run that is brought to where it was saved has the same `held` there."""
    run = new()
    window(run.method)
    saved: dict[str, Any] = {}
    while saved.keys() != set(phases):
        done = run.method.advance()
        assert saved or done != "close", f"a window without {phases}"
        if run.method.phase in phases:
            saved.setdefault(run.method.phase, _saved(run))
    window(run.method)
    window(run.method)
    for phase, state in saved.items():
        again = new()
        _load(again, state)
        window(again.method)
        window(again.method)
        assert run.method.window == again.method.window == 3, phase
        assert same(held(run), held(again)), phase


def _saved(run: Any) -> Any:
    return copy.deepcopy((run.method.state_dict(), run.ledger.state_dict()))


def _load(again: Any, saved: Any) -> None:
    method, ledger = saved
    again.method.load_state_dict(method)
    again.ledger.load_state_dict(ledger)


def actor_weights(run: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in run.actor.engine.model.state_dict().items()}


def logged(run: Any) -> list[tuple[str, str]]:
    tally = run.method.parts.telemetry
    assert isinstance(tally, Tally)
    return tally.events


def changing(run: Any, role: str, change: Callable[[Trajectories], Trajectories]) -> None:
    """From now on the sets of one role are changed right after they were collected."""
    collect = run.method.parts.rollout.collect

    def changed(asked: str, *arguments: Any, **options: Any) -> Trajectories:
        found = collect(asked, *arguments, **options)
        return change(found) if asked == role else found

    run.method.parts.rollout.collect = changed


def noting(records: list[Trajectories]) -> Callable[[Trajectories], Trajectories]:
    """A change that keeps each set in `records` and leaves it as it is."""

    def note(record: Trajectories) -> Trajectories:
        records.append(record)
        return record

    return note


def other_outcomes(record: Trajectories) -> Trajectories:
    rewards_BRT, returns_BRT = (
        (record.need(name) * -2 + 1) * record.mask_BRT for name in ("rewards_BRT", "returns_BRT")
    )
    return record.having(rewards_BRT=rewards_BRT, returns_BRT=returns_BRT)


def decide_tests(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that takes the outcomes of the qualification tests to come; after the given ones all pass."""

    def script(*given: bool) -> None:
        left = list(given)
        monkeypatch.setattr(Qualifier, "_criterion", lambda *_: (left.pop(0) if left else True, "as the test says"))

    script()
    return script


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Decide the outcome of every qualification test; after the given ones all pass."""
    return decide_tests(monkeypatch)
