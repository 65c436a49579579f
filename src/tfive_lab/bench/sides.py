"""The two sides of `tfive bench engine`: the same four phases by the tree and by the plain path, and the clock."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tfive.errors import UserError
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts
from tfive.tree.settings import EngineSettings, SamplingSettings
from tfive_lab.bench.plain import PlainPath
from tfive_lab.bench.work import Work, make_plan, make_texts, make_uniforms, value_head

PHASES = ("sampling", "scoring", "actor", "values")


class Clock:
    """Seconds and peak memory of a call, the device's queue drained on both sides."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.device = device.type == "cuda", device
        self.peak: dict[str, int] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> tuple[float, Any]:
        if self.cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        result = call()
        if self.cuda:
            torch.cuda.synchronize(self.device)
            self.peak[name] = max(self.peak.get(name, 0), torch.cuda.max_memory_allocated(self.device))
        else:
            self.peak[name] = max(self.peak.get(name, 0), _resident_peak())
        return time.perf_counter() - start, result


def _resident_peak() -> int:
    """Largest memory of this process so far, in bytes (0 where the system does not say)."""
    if platform.system() == "Windows":
        return 0
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass
class TreeSide:
    """The four phases by the tree engine."""

    model: PreTrainedModel
    plan: ThoughtPlan
    texts: TextBatch
    uniforms_BRT: Tensor
    engine: EngineSettings
    law: SamplingSettings

    def __post_init__(self) -> None:
        self.tree = TreeModel(self.model, self.plan, self.engine)
        self.reading: Any = None
        self.thoughts: Thoughts | None = None

    def sampling(self) -> Thoughts:
        """Read the texts and write all thoughts."""
        self.reading = self.tree.read(self.texts)
        self.thoughts = self.tree.sample(self.texts, self.uniforms_BRT, self.law, self.reading)
        return self.thoughts

    def steps(self) -> Thoughts:
        """The sampling loop alone, the texts having been read."""
        return self.tree.sample(self.texts, self.uniforms_BRT, self.law, self.reading)

    def ten_steps(self) -> None:
        """Ten steps of all branches, each at the last place of its thought, after `steps`."""
        if self.tree.sampler is None:
            raise RuntimeError("sampling comes first")
        for _ in range(10):
            self.tree.sampler.step()

    def scoring(self) -> tuple[Tensor, Tensor]:
        """Losses without a thought `[Q]` and per checkpoint `[Q, K]`, from the reading that sampling made."""
        scores = self.tree.score(self.texts, self._thoughts(), self.reading)
        return scores.no_thought_BR.flatten(), scores.losses_BRK.flatten(0, 1)

    def actor(self) -> Tensor:
        """Log-probabilities `[Q, T]`, gradients accumulated into the parameters."""
        self.model.zero_grad(set_to_none=True)
        found = self.tree.policy(self.texts, self._thoughts()).log_prob_BRT
        if found is None:
            raise RuntimeError("policy gave no log-probabilities")
        (-found.sum() / found.numel()).backward()
        return found.detach().flatten(0, 1)

    def values(self) -> Tensor:
        """Values `[Q, T]`, no gradients."""
        with torch.no_grad():
            return self.tree.values(self.texts, self._thoughts(), value_head).flatten(0, 1)

    def forget(self) -> None:
        """Give back the buffers of sampling and the reading."""
        self.reading, self.thoughts = None, None
        self.tree = TreeModel(self.model, self.plan, self.engine)

    def _thoughts(self) -> Thoughts:
        if self.thoughts is None:
            raise RuntimeError("sampling comes first")
        return self.thoughts


def tree_side(model: PreTrainedModel, work: Work, engine: EngineSettings, seed: int = 0) -> TreeSide:
    """The tree's side of `work` on `model`."""
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    device, plan = next(model.parameters()).device, make_plan(work, int(vocabulary))
    texts = make_texts(work, int(vocabulary), seed)
    uniforms_BRT = make_uniforms(texts, plan, seed).to(device)
    return TreeSide(model, plan, texts.to(device), uniforms_BRT, engine, SamplingSettings())


@dataclass
class PlainSide:
    """The four phases by the plain path, on the thoughts the tree wrote; each phase at its own number of rows."""

    path: PlainPath
    tokens_QT: Tensor
    rows: dict[str, int]

    def sampling(self) -> Tensor:
        """Thoughts of its own, `[Q, T]`."""
        return self.path.sample(self.rows["sampling"])

    def scoring(self) -> tuple[Tensor, Tensor]:
        """Losses without a thought and per checkpoint."""
        return self.path.score(self.tokens_QT, self.rows["scoring"])

    def actor(self) -> Tensor:
        """Log-probabilities, gradients accumulated into the parameters."""
        self.path.model.zero_grad(set_to_none=True)
        return self.path.policy(self.tokens_QT, self.rows["actor"], 1 / self.tokens_QT.numel())

    def values(self) -> Tensor:
        """Values, no gradients."""
        return self.path.values(self.tokens_QT, value_head, self.rows["values"])

    def _try(self, phase: str, clock: Clock) -> float | None:
        """Seconds of one phase, None when it does not fit."""
        try:
            return clock("sweep", getattr(self, phase))[0]
        except torch.OutOfMemoryError:
            self.path.model.zero_grad(set_to_none=True)
            return None

    def sweep(self, sizes: tuple[int, ...], clock: Clock) -> dict[str, dict[int, float]]:
        """Seconds of every phase by rows at once; the fastest is kept, what does not fit or is much slower ends it."""
        found: dict[str, dict[int, float]] = {}
        for phase in PHASES:
            seconds: dict[int, float] = {}
            for size in sizes:
                self.rows[phase] = size
                taken = self._try(phase, clock)
                if taken is None:
                    # Only here is the failed call's memory free to go: its frames have been let go of.
                    empty(clock)
                    break
                seconds[size] = taken
                if taken > 1.3 * min(seconds.values()):
                    break
            if not seconds:
                raise UserError(f"the plain path's {phase} does not fit in memory even with {sizes[0]} rows at once")
            self.rows[phase] = min(seconds, key=lambda size: seconds[size])
            found[phase] = seconds
        return found


def empty(clock: Clock) -> None:
    """Give memory back to the device."""
    gc.collect()
    if clock.cuda:
        torch.cuda.empty_cache()


def repeat(side: TreeSide | PlainSide, clock: Clock, repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds of every phase and of all in a row, and the last results."""
    seconds: dict[str, list[float]] = {phase: [] for phase in (*PHASES, "whole", "without_values")}
    results: dict[str, Any] = {}
    for _ in range(repeats):
        taken = []
        for phase in PHASES:
            spent, results[phase] = clock(phase, getattr(side, phase))
            seconds[phase].append(spent)
            taken.append(spent)
        seconds["whole"].append(sum(taken))
        seconds["without_values"].append(sum(taken[:3]))
    return {phase: statistics.median(all_of) for phase, all_of in seconds.items()}, results


@dataclass(frozen=True)
class Measured:
    """One side's medians, last results, peaks and gradients."""

    seconds: dict[str, float]
    results: dict[str, Any]
    peak: dict[str, int]
    gradients: list[Tensor]

    @staticmethod
    def of(side: TreeSide | PlainSide, model: PreTrainedModel, clock: Clock, repeats: int) -> Measured:
        """`repeats` rounds of all phases, after whatever warming up was needed."""
        clock.peak.clear()
        seconds, results = repeat(side, clock, repeats)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return Measured(seconds, results, dict(clock.peak), gradients)
