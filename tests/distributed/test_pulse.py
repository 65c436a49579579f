"""A process that works gives a sign of life with every pass, so that a lone one is never taken for one that hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from courses import course

import tiny
from tfive.distributed.pulse import Pulse
from tfive.distributed.world import World
from tfive.evaluate.generate import Decoding, GenerationRequest, generate
from tfive.evaluate.likelihood import log_likelihoods
from tfive.inference.requests import NEVER, When
from tfive.inference.thought_model import ThoughtModel
from tfive.inference.writer import TextWriter
from tfive.rl.calibration import mean, saddle
from tfive.tree.forward import TreeModel
from tfive.tree.settings import ThoughtSettings

VERBS = ("read", "sample", "score", "no_thought", "policy", "features", "lower")
SETTINGS = [
    "method=t5", "qualify.rule=fixed", "critic.warmup_rounds=1", "run.texts_per_pass=1",
    "critic.minibatches=1", "calibration.cross_fit=true",
]  # fmt: skip


class Watched(Pulse):
    """Remembers what was done since the last sign of life: the texts of every pass, and steps of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.since: list[Any] = []
        self.silent: set[str] = set()
        """Work that was begun after a pass and a step, or two of either, had given no sign."""

    def beat(self) -> None:
        super().beat()
        self.since.clear()

    def working(self, what: str, on: Any) -> None:
        if all(other is not on for other in self.since):
            self.since.append(on)
        if len(self.since) > 2:
            self.silent.add(what)


def watched(pulse: Watched, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
    def pass_over(engine: TreeModel, texts: Any, *others: Any, **named: Any) -> Any:
        pulse.working(what, texts)
        return work(engine, texts, *others, **named)

    return pass_over


class Stepping(Pulse):
    """Counts the steps of writing since the last sign of life."""

    silent = most = 0

    def beat(self) -> None:
        super().beat()
        self.silent = 0

    def counted(self, work: Callable[..., None]) -> Callable[..., None]:
        def step(*given: Any) -> None:
            self.silent += 1
            self.most = max(self.most, self.silent)
            work(*given)

        return step


@pytest.mark.model
@pytest.mark.parametrize("parity", [False, True])
def test_writing_gives_a_sign_with_every_few_tokens(parity: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ThoughtSettings(length=2, checkpoints=(2,), horizon=2, delimiters="none")
    thinker = ThoughtModel(tiny.model(), tiny.tokenizer(), shape)
    world, pulse = World(), Stepping()
    world.pulse = pulse
    for verb in ("fill", "advance"):
        monkeypatch.setattr(TextWriter, verb, pulse.counted(getattr(TextWriter, verb)))
    asked = [GenerationRequest(str(number), "river mill", 12, number) for number in range(12)]
    for when in (When(at_answer="other"), When(every=2), NEVER):
        decoding = Decoding(when=when, parity=parity)
        assert len(list(generate(thinker, asked, (), decoding, world=world))) == len(asked)
    assert pulse.steps > 12
    assert pulse.most <= 2  # as many steps as on a CPU lie between two looks
    before = pulse.steps
    questions = [[("river", " mill"), ("river", " farm town")]] * 3
    assert len(list(log_likelihoods(thinker, questions, parity=True, world=world))) == 3
    assert pulse.steps == before + 3


@pytest.mark.model
def test_no_two_passes_go_by_without_a_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, pulse = World(), Watched()
    world.pulse = pulse
    for verb in VERBS:
        monkeypatch.setattr(TreeModel, verb, watched(pulse, verb, getattr(TreeModel, verb)))
    for module in (mean, saddle):
        monkeypatch.setattr(module, "ReplayedStep", stepping(pulse, module.ReplayedStep))
    found = course(world, str(tmp_path), SETTINGS, windows=1)
    assert "fit" in found["phases"]
    assert pulse.steps > 100
    assert pulse.silent == set()


def stepping(pulse: Watched, made: Callable[..., Any]) -> Callable[..., Any]:
    """Steps of heads, each work of its own."""

    def learner(*given: Any) -> Callable[..., None]:
        step = made(*given)

        def stepped(*rows: Any) -> None:
            pulse.working("a head's step", object())
            step(*rows)

        return stepped

    return learner
