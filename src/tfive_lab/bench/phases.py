"""The four phases that `tfive bench engine` times, by the tree engine and by plain rows, and the clock for them."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tfive.errors import UserError
from tfive.tree.fast.replayed_backward import ReplayedBackward
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts
from tfive.tree.policy_pass import PolicyPass, ToCapture
from tfive.tree.settings import EngineOptions, SamplingSettings
from tfive_lab.bench.plain_rows import PlainRows
from tfive_lab.bench.work import Work, make_plan, make_texts, make_uniforms, value_head

PHASES = ("sampling", "scoring", "actor", "values")


class Clock:
    """Seconds and peak memory of a call; the device's queue is drained before and after it."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.device = device.type == "cuda", device
        self.peak: dict[str, int] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds and result of `call`; the peak is kept in `peak[name]`."""
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
    """Largest resident memory of this process so far, in bytes (0 where the system does not report it)."""
    if platform.system() == "Windows":
        return 0
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class OwnGradients:
    """Gradients where PyTorch leaves them; see `tree.fast.replayed_backward.Gradients`."""

    parameters: list[nn.Parameter]

    @property
    def held(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.parameters]

    def hold(self, held: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, held, strict=True):
            parameter.grad = gradient

    def fix(self) -> None:
        """A pass makes new ones: there are none before it."""

    def free(self) -> None:
        """They lie where they lie."""


@dataclass
class TreePhases:
    """The four phases by the tree engine."""

    model: PreTrainedModel
    plan: ThoughtPlan
    texts: TextBatch
    uniforms_BRT: Tensor
    engine: EngineOptions
    law: SamplingSettings

    def __post_init__(self) -> None:
        self.tree = TreeModel(self.model, self.plan, self.engine)
        self.reading: Any = None
        self.thoughts: Thoughts | None = None
        gradients, replayed = OwnGradients(list(self.model.parameters())), self.engine.replayed_passes
        self.updates = ReplayedBackward(self.engine.cuda_graphs and replayed, gradients=gradients)

    def sampling(self) -> Thoughts:
        """Read the texts and write all thoughts."""
        self.reading = self.tree.read(self.texts)
        self.thoughts = self.tree.sample(self.texts, self.uniforms_BRT, self.law, self.reading)
        return self.thoughts

    def steps(self) -> Thoughts:
        """The sampling loop alone, the texts having been read."""
        return self.tree.sample(self.texts, self.uniforms_BRT, self.law, self.reading)

    def writing(self) -> Thoughts:
        """The sampling loop over the thoughts that are there: it draws, and goes on with their tokens instead."""
        given = (self.written.tokens_BRT, self.written.length_BR)
        return self.tree.sample(self.texts, self.uniforms_BRT, self.law, self.reading, given)

    def ten_steps(self) -> None:
        """Ten sampling steps of all branches, each at the last position of its thought; call `steps` first."""
        if self.tree.sampler is None:
            raise RuntimeError("sampling comes first")
        for _ in range(10):
            self.tree.sampler.step()

    def scoring(self) -> tuple[Tensor, Tensor]:
        """Losses without a thought `[Q]` and per checkpoint `[Q, K]`, reusing the texts' cache from sampling."""
        scores = self.tree.score(self.texts, self.written, self.reading)
        return scores.no_thought_BR.flatten(), scores.losses_BRK.flatten(0, 1)

    def actor(self) -> Tensor:
        """Log-probabilities `[Q, T]`, gradients accumulated into the parameters."""
        gradients = self.updates.gradients
        gradients.hold([None] * len(gradients.held))
        tree, may = self.tree, self.updates.wanted and self.tree.replays_training
        asked = tree.to_capture(self.texts, self.written) if may else None

        def read(prepared: PolicyPass) -> dict[str, Tensor]:
            found_BRT = tree.policy_from(prepared).need("log_prob_BRT")
            (-found_BRT.sum() / found_BRT.numel()).backward()
            return {"log_prob_BRT": found_BRT.detach()}

        if not isinstance(asked, ToCapture):
            found = read(tree.prepare(self.texts, self.written) if asked is None else asked)
        else:
            found = self.updates(asked.kind, tree.home, lambda tensors: read(asked.made(tensors)), asked.tensors)
        return found["log_prob_BRT"].flatten(0, 1)

    def values(self) -> Tensor:
        """Values `[Q, T]`, no gradients."""
        with torch.no_grad():
            return self.tree.values(self.texts, self.written, value_head).flatten(0, 1)

    def forget(self) -> None:
        """Free the sampling buffers and the texts' cache."""
        self.reading, self.thoughts = None, None
        self.updates.release()
        self.tree = TreeModel(self.model, self.plan, self.engine)

    @property
    def written(self) -> Thoughts:
        """The thoughts that the phases after sampling work on."""
        if self.thoughts is None:
            raise RuntimeError("sampling comes first")
        return self.thoughts


def tree_phases(
    model: PreTrainedModel, work: Work, engine: EngineOptions, seed: int = 0, variable: bool = False
) -> TreePhases:
    """The tree engine's phases of `work` on `model`; `variable`: of thoughts that may close."""
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    device, plan = next(model.parameters()).device, replace(make_plan(work, int(vocabulary)), variable_length=variable)
    texts = make_texts(work, int(vocabulary), seed)
    uniforms_BRT = make_uniforms(texts, plan, seed).to(device)
    return TreePhases(model, plan, texts.to(device), uniforms_BRT, engine, SamplingSettings())


@dataclass
class PlainPhases:
    """The four phases by plain rows, on the thoughts that the tree sampled; each phase has a batch size of its own."""

    path: PlainRows
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
        """Seconds of one phase, None when memory runs out."""
        try:
            return clock("sweep", getattr(self, phase))[0]
        except torch.OutOfMemoryError:
            self.path.model.zero_grad(set_to_none=True)
            return None

    def sweep(self, sizes: dict[str, tuple[int, ...]], clock: Clock) -> dict[str, dict[int, float]]:
        """Seconds of every phase by batch size, `sizes` of each ascending; the fastest size is kept.

        Larger sizes are not tried after one that runs out of memory or is 1.3 times slower than the best.
        """
        found: dict[str, dict[int, float]] = {}
        for phase in PHASES:
            seconds: dict[int, float] = {}
            for size in sizes[phase]:
                self.rows[phase] = size
                taken = self._try(phase, clock)
                if taken is None:
                    # Here, not in the handler: the failed call's frames hold its memory until `_try` has returned.
                    empty(clock)
                    break
                seconds[size] = taken
                if taken > 1.3 * min(seconds.values()):
                    break
            if not seconds:
                least = sizes[phase][0]
                raise UserError(f"the plain path's {phase} does not fit in memory even with {least} rows at once")
            self.rows[phase] = min(seconds, key=lambda size: seconds[size])
            found[phase] = seconds
        return found


def empty(clock: Clock) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if clock.cuda:
        torch.cuda.empty_cache()


def repeat(side: TreePhases | PlainPhases, clock: Clock, repeats: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds of every phase, of all four and of the first three, and the last results."""
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
    """Median seconds, last results, peak memory and gradients of one implementation."""

    seconds: dict[str, float]
    results: dict[str, Any]
    peak: dict[str, int]
    gradients: list[Tensor]

    @staticmethod
    def of(side: TreePhases | PlainPhases, model: PreTrainedModel, clock: Clock, repeats: int) -> Measured:
        """Measure `repeats` rounds of all phases; the caller has warmed up."""
        clock.peak.clear()
        seconds, results = repeat(side, clock, repeats)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return Measured(seconds, results, dict(clock.peak), gradients)
