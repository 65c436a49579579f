"""AdamW with a learning-rate schedule, in float32 whatever precision the model computes in.

Mid-training steps are far smaller than the spacing of bfloat16 numbers, so master weights, moments and accumulated
gradients are float32. A float32 or float64 model is its own master and needs no second copy. Where memory does not
allow masters, bfloat16 weights are rounded stochastically (`rl/rounding.py`). Where several processes hold the weights
in shards, each keeps masters, moments and gradients of its own rows alone.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.utils.hooks import RemovableHandle

from tfive.distributed.pieces import Piece, piece_of
from tfive.distributed.sharding import Sharding, held_of
from tfive.distributed.world import SINGLE, World
from tfive.rl.rounding import round_stochastically

Schedule = Literal["constant", "linear", "cosine"]
Bf16Update = Literal["master", "stochastic"]

_APART = 1 << 30
"""Added to the step of updates with a rate of their own, so that their rounding noise is another."""

BETAS = (0.9, 0.95)
"""Decay of AdamW's moments: the second forgets within tens of steps, because a window has few and changes the data."""

EPS = 1e-8
"""Added to the root of the second moment; AdamW's usual value."""


def learning_rate(
    step: int, *, lr: float, schedule: Schedule, warmup_steps: int, total_steps: int, final_fraction: float
) -> float:
    """Rate of update `step` (from 0): linear warm-up to `lr`, then constant or falling to `final_fraction · lr`."""
    if schedule != "constant" and total_steps <= warmup_steps:
        raise ValueError(f"schedule {schedule!r} needs total_steps ({total_steps}) above warmup_steps ({warmup_steps})")
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    left = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * (final_fraction + (1.0 - final_fraction) * left)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a weight of `dtype` is trained: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class _Slot:
    """One parameter with the state of its updates; `master` is None if the parameter itself holds the exact weights."""

    name: str
    number: int
    parameter: nn.Parameter
    master: Tensor | None
    decays: bool
    lr_multiplier: float
    gradient: Tensor | None = None
    moments: tuple[Tensor, Tensor, Tensor] | None = None
    apart: tuple[Tensor, Tensor, Tensor] | None = None
    """The moments of updates that have a rate of their own."""
    shards: Sharding | None = None
    handle: RemovableHandle | None = field(default=None, repr=False)

    @property
    def held(self) -> Tensor:
        """The parameter itself, or this process's rows of it."""
        return self.parameter.detach() if self.shards is None else self.shards.local(self.parameter)

    @property
    def weights(self) -> Tensor:
        return self.held if self.master is None else self.master

    def saved(self, tensor: Tensor) -> Tensor | Piece:
        """A tensor of the parameter's state as it goes into a state dict."""
        return tensor if self.shards is None else self.shards.piece(self.name, tensor)

    def own(self, saved: Tensor | Piece) -> Tensor:
        """The part of a saved tensor that this process holds."""
        mine = piece_of(self.held) if self.shards is None else self.shards.piece(self.name, self.held)
        return held_of(saved, self.name, mine)

    def collect(self, parameter: Tensor) -> None:
        """Add the parameter's gradient to the float32 accumulator and free it."""
        if parameter.grad is None:
            return
        own = parameter.grad if self.shards is None else self.shards.local(parameter.grad)
        arrived = own.to(wide(parameter.dtype))
        self.gradient = arrived if self.gradient is None else self.gradient.add_(arrived)
        parameter.grad = None

    def write(self) -> None:
        """Round the master into the parameter; a shard is its own master."""
        if self.master is not None and self.shards is None:
            self.parameter.copy_(self.master)

    def ready_moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """First moment, second moment and step counter, allocated on the first update so that a frozen part has
        none."""
        if self.moments is None:
            held = self.held
            like = torch.zeros_like(held, dtype=wide(held.dtype), memory_format=torch.contiguous_format)
            steps = torch.zeros((), dtype=torch.float32, device=like.device)
            self.moments = (like, torch.zeros_like(like), steps)
        return self.moments


def _collecting(slot: _Slot) -> Callable[[Tensor], None]:
    """A parameter's gradient hook. It refers to the slot weakly: autograd keeps hooks out of the garbage collector's
    sight, and a cycle slot → parameter → hook → slot would never be freed."""
    found = weakref.ref(slot)

    def collect(parameter: Tensor) -> None:
        own = found()
        if own is not None:
            own.collect(parameter)

    return collect


@dataclass(frozen=True)
class StepReport:
    """What one call of `step` did; a non-finite gradient is dropped with `applied` False and no weight touched."""

    lr: float
    gradient_norm: float
    applied: bool


class MasterOptimizer:
    """AdamW with float32 master weights, moments and gradient accumulation over parameters of any compute precision.

    Call `backward()` as often as there are micro-batches, then `step(divide_by=…)`. Each gradient is added to a
    float32 accumulator as soon as it is computed, so the sum is the same with or without a checkpoint in between; read
    it through `gradients()`, `parameter.grad` stays empty. With `bf16_update="stochastic"` there is no master copy: the
    bfloat16 weights themselves are rounded stochastically. Norms, biases and other vectors do not decay.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS,
        weight_decay: float = 0.0,
        clip_norm: float | None = 1.0,
        schedule: Schedule = "constant",
        warmup_steps: int = 0,
        total_steps: int = 0,
        final_fraction: float = 0.0,
        bf16_update: Bf16Update = "master",
        lr_multipliers: Mapping[str, float] | None = None,
        seed: int = 0,
        world: World = SINGLE,
        shards: Sharding | None = None,
    ) -> None:
        """`lr_multipliers` maps a name prefix to a factor on the rate (the longest matching prefix counts).
        `world`: the processes whose gradients are summed before each update, which all of them make alike. With
        `shards` they arrive summed, and every process calls every method alike, since what is gathered is common
        work."""
        self.world = SINGLE if shards is not None else world
        self.lr, self.betas, self.eps, self.weight_decay, self.clip_norm = lr, betas, eps, weight_decay, clip_norm
        self.schedule, self.warmup_steps, self.total_steps = schedule, warmup_steps, total_steps
        self.final_fraction, self.seed, self.stochastic = final_fraction, seed, bf16_update == "stochastic"
        self.steps = self.skipped = 0
        self._factor, self._round_offset, self.shards = 1.0, 0, shards
        self._slots = [
            self._slot(number, name, parameter, lr_multipliers or {})
            for number, (name, parameter) in enumerate(named_parameters)
        ]
        if not self._slots:
            raise ValueError("there is nothing to train: no parameter was given")
        self.current_lr()

    def _slot(self, number: int, name: str, parameter: nn.Parameter, multipliers: Mapping[str, float]) -> _Slot:
        if not parameter.requires_grad:
            raise ValueError(f"parameter {name} is frozen; give the optimiser trainable parameters only")
        if not parameter.is_contiguous():
            raise ValueError(f"parameter {name} is not contiguous")
        exact = parameter.dtype == wide(parameter.dtype)
        if self.stochastic and not exact and parameter.dtype != torch.bfloat16:
            raise ValueError(f"stochastic rounding is for bfloat16 weights; {name} is {parameter.dtype}")
        master = None if exact or self.stochastic else parameter.detach().to(torch.float32)
        if self.shards is not None and not self.stochastic:
            # Shards are masters themselves; they are saved as such where the model computes in less.
            compute = self.shards.computes_in(name)
            master = None if compute == wide(compute) else self.shards.local(parameter)
        prefixes = [prefix for prefix in multipliers if name.startswith(prefix)]
        factor = multipliers[max(prefixes, key=len)] if prefixes else 1.0
        slot = _Slot(name, number, parameter, master, parameter.ndim >= 2, factor, shards=self.shards)
        slot.handle = parameter.register_post_accumulate_grad_hook(_collecting(slot))
        return slot

    def current_lr(self) -> float:
        """Learning rate of the next update."""
        return self._factor * learning_rate(
            self.steps,
            lr=self.lr,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps,
            final_fraction=self.final_fraction,
        )

    def masters(self) -> dict[str, Tensor]:
        """The exact weights by name, detached and whole: for moving averages and saved copies."""
        if self.shards is None:
            return {slot.name: slot.weights for slot in self._slots}
        return {slot.name: self.shards.gathered(slot.name, slot.weights) for slot in self._slots}

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The accumulated float32 gradients of this process by name; those of shards are of its rows, and sums over all
        processes."""
        for slot in self._slots:
            slot.collect(slot.parameter)
            if slot.gradient is not None:
                yield slot.name, slot.gradient

    def zero_grad(self) -> None:
        """Drop all accumulated gradients."""
        for slot in self._slots:
            slot.gradient = slot.parameter.grad = None

    @contextmanager
    def apart(self, lr: float) -> Iterator[None]:
        """Updates in this block are of another loss on the same weights: they have moments of their own, and the rate
        `lr` where the others have `self.lr`."""
        self._factor, self._round_offset = lr / self.lr, _APART
        for slot in self._slots:
            slot.moments, slot.apart = slot.apart, slot.moments
        try:
            yield
        finally:
            self._factor, self._round_offset = 1.0, 0
            for slot in self._slots:
                slot.moments, slot.apart = slot.apart, slot.moments

    @torch.no_grad()
    def step(self, divide_by: float = 1.0, *, counted: bool = True) -> StepReport:
        """One AdamW update with the accumulated sum divided by `divide_by` (the global count of valid tokens). One that
        is not `counted` leaves the schedule where it is, for another update of the same step."""
        self._sum_over_processes()
        gradients = [gradient for _, gradient in self.gradients()]
        lr = self.current_lr()
        if not gradients:
            raise ValueError("step without a gradient: call backward first")
        norm = float(nn.utils.get_total_norm(gradients))
        norm = (norm if self.shards is None else self.shards.norm(norm)) / divide_by
        if not math.isfinite(norm):
            return self.skip(norm)
        factor = 1.0 / divide_by
        if self.clip_norm is not None and norm > self.clip_norm:
            factor *= self.clip_norm / norm
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self._update(lr)
        self.steps += counted
        self.zero_grad()
        return StepReport(lr, norm, applied=True)

    def _sum_over_processes(self) -> None:
        """Make every process's accumulated gradients those of all."""
        if self.world.size == 1:
            return
        for slot in self._slots:
            slot.collect(slot.parameter)

        def zeros(number: int) -> Tensor:
            parameter = self._slots[number].parameter
            return torch.zeros_like(parameter, dtype=wide(parameter.dtype))

        sums = self.world.reduce_gradients([slot.gradient for slot in self._slots], zeros)
        for slot, gradient in zip(self._slots, sums):
            slot.gradient = gradient

    def skip(self, norm: float = math.nan) -> StepReport:
        """Drop the accumulated gradient and count a skipped update; no weight changes."""
        self.skipped += 1
        self.zero_grad()
        return StepReport(self.current_lr(), norm, applied=False)

    def _update(self, lr: float) -> None:
        together: dict[tuple[float, float, torch.device, torch.dtype], list[_Slot]] = {}
        step = self.steps + self._round_offset
        for slot in self._slots:
            if slot.gradient is None:
                continue
            decay = self.weight_decay if slot.decays else 0.0
            if self.stochastic and slot.parameter.dtype == torch.bfloat16:
                held = slot.held
                weights = held.to(torch.float32)
                self._adamw([slot], [weights], lr * slot.lr_multiplier, decay)
                row = 0 if self.shards is None else self.shards.piece(slot.name, held).offset[0]
                first = row * math.prod(held.shape[1:])
                round_stochastically(weights, held, seed=self.seed, step=step, number=slot.number, first=first)
            else:
                key = (lr * slot.lr_multiplier, decay, slot.weights.device, slot.weights.dtype)
                together.setdefault(key, []).append(slot)
        for (rate, decay, _, _), slots in together.items():
            self._adamw(slots, [slot.weights for slot in slots], rate, decay)
            for slot in slots:
                slot.write()
        if self.shards is not None:
            self.shards.refresh()

    def _adamw(self, slots: list[_Slot], weights: list[Tensor], lr: float, weight_decay: float) -> None:
        first, second, steps = (list(parts) for parts in zip(*(slot.ready_moments() for slot in slots)))
        gradients = [slot.gradient for slot in slots if slot.gradient is not None]
        beta1, beta2 = self.betas
        adamw(
            weights, gradients, first, second, [], steps, fused=True, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=self.eps,
        )  # fmt: skip

    def release(self) -> None:
        """Remove the gradient hooks from the parameters, so that another optimiser can take over."""
        for slot in self._slots:
            if slot.handle is not None:
                slot.handle.remove()
                slot.handle = None

    def state_dict(self) -> dict[str, Any]:
        """Counters, moments, master weights and pending gradients; tensors are references, and of shards `Piece`s."""
        parameters: dict[str, dict[str, Any]] = {}
        for slot in self._slots:
            slot.collect(slot.parameter)
            entry: dict[str, Any] = {} if slot.master is None else {"master": slot.saved(slot.master)}
            if slot.gradient is not None:
                entry["gradient"] = slot.saved(slot.gradient)
            for prefix, moments in (("", slot.moments), ("apart_", slot.apart)):
                if moments is not None:
                    first, second = (slot.saved(moment) for moment in moments[:2])
                    steps = int(moments[2].item())
                    entry |= {f"{prefix}first": first, f"{prefix}second": second, f"{prefix}steps": steps}
            parameters[slot.name] = entry
        return {"steps": self.steps, "skipped": self.skipped, "parameters": parameters}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state of whole tensors (or of the same pieces); names and shapes must match. Master weights
        are written into the parameters too; shards without masters are taken from the whole copy, to be loaded
        before."""
        saved = state["parameters"]
        names = [slot.name for slot in self._slots]
        if set(saved) != set(names):
            raise ValueError(f"optimiser state is of other parameters: {sorted(set(saved) ^ set(names))[:3]}")
        if self.shards is not None:
            self.shards.take()
        for slot in self._slots:
            entry = saved[slot.name]
            if (slot.master is None) != ("master" not in entry):
                raise ValueError(f"optimiser state of {slot.name} was saved in another precision setting")
            if slot.master is not None:
                slot.master.copy_(slot.own(entry["master"]))
                slot.write()
            slot.parameter.grad = slot.moments = slot.apart = None
            held = slot.held
            like = torch.empty_like(held, dtype=wide(held.dtype))
            slot.gradient = like.copy_(slot.own(entry["gradient"])) if "gradient" in entry else None
            if "apart_first" in entry:
                slot.apart, slot.moments = _filled(slot, entry, "apart_"), None
            if "first" in entry:
                _filled(slot, entry, "")
        if self.shards is not None:
            self.shards.refresh()
        self.steps, self.skipped = int(state["steps"]), int(state["skipped"])


def _filled(slot: _Slot, entry: Mapping[str, Any], prefix: str) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh moments of a slot with the saved values under `prefix`."""
    first, second, steps = slot.ready_moments()
    first.copy_(slot.own(entry[f"{prefix}first"]))
    second.copy_(slot.own(entry[f"{prefix}second"]))
    steps.fill_(entry[f"{prefix}steps"])
    return first, second, steps
