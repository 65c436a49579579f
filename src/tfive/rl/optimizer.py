"""AdamW with a learning-rate schedule, in float32 whatever precision the model computes in.

Mid-training steps are far smaller than the spacing of bfloat16 numbers, so master weights, moments and accumulated
gradients are float32. A float32 or float64 model is its own master and needs no second copy. Where memory does not
allow masters, bfloat16 weights are rounded stochastically (`rl/rounding.py`), and moments can be kept in bfloat16 the
same way. Where several processes hold the weights in shards, each keeps masters, moments and gradients of its own rows
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from tfive.distributed.sharding import Sharding
from tfive.distributed.world import SINGLE, World
from tfive.rl.rounding import CHUNK, round_stochastically
from tfive.rl.weight_slots import Accumulators, WeightSlot, collecting, filled, wide

Schedule = Literal["constant", "linear", "cosine"]
Bf16Update = Literal["master", "stochastic"]
Moments = Literal["float32", "bfloat16"]

_NOISE = {"weight": "stochastic-rounding", "first": "rounding/first-moment", "second": "rounding/second-moment"}
"""Names under which the rounding of weights and moments draws its noise."""

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
    bfloat16 weights themselves are rounded stochastically, with `moments="bfloat16"` both moments. Norms, biases and
    other vectors do not decay.
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
        moments: Moments = "float32",
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
        self.final_fraction, self.seed = final_fraction, seed
        self.stochastic, self.narrow = bf16_update == "stochastic", moments == "bfloat16"
        self.steps = self.skipped = 0
        self._factor, self._round_offset, self.shards = 1.0, 0, shards
        self._slots = [
            self._slot(number, name, parameter, lr_multipliers or {})
            for number, (name, parameter) in enumerate(named_parameters)
        ]
        if not self._slots:
            raise ValueError("there is nothing to train: no parameter was given")
        self.current_lr()

    def _slot(self, number: int, name: str, parameter: nn.Parameter, multipliers: Mapping[str, float]) -> WeightSlot:
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
        slot = WeightSlot(name, number, parameter, master, parameter.ndim >= 2, factor, shards=self.shards)
        slot.handle = parameter.register_post_accumulate_grad_hook(collecting(slot))
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

    @property
    def accumulators(self) -> Accumulators:
        """The accumulated gradients as captured passes see them."""
        return Accumulators(self._slots)

    def masters(self) -> dict[str, Tensor]:
        """The exact weights by name, detached: of shards this process's rows."""
        return {slot.name: slot.weights for slot in self._slots}

    def whole_masters(self) -> Iterator[tuple[str, Tensor]]:
        """The same, whole, one after another: there may be no room for all of them. Shards are put together as they are
        asked for, so every process must go through them alike, and to the end."""
        for slot in self._slots:
            yield slot.name, slot.weights if self.shards is None else self.shards.gathered(slot.name, slot.weights)

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

    @property
    def steps_unseen(self) -> bool:
        """Whether an update can do without the host (`rl/unseen.py`)."""
        alone = self.world.size == 1 and self.shards is None
        return alone and not (self.stochastic or self.narrow) and self.schedule == "constant" and not self.warmup_steps

    @torch.no_grad()
    def step_unseen(self) -> Tensor:
        """`step` without the host's knowing what it comes to: nothing is counted. Returns 1 where the gradient is not
        finite and no weight was touched, else 0, on the device."""
        gradients = [gradient for _, gradient in self.gradients()]
        if not gradients:
            raise ValueError("step without a gradient: call backward first")
        norm = nn.utils.get_total_norm(gradients).double()
        refused = (~norm.isfinite()).float()
        if self.clip_norm is not None:
            factor = torch.where(norm > self.clip_norm, self.clip_norm / norm, torch.ones_like(norm))
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.dtype))
        self._update(self.current_lr(), refused)
        self.zero_grad()
        return refused

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

    def _update(self, lr: float, refused: Tensor | None = None) -> None:
        """AdamW with the accumulated gradients; nothing changes where `refused` holds 1."""
        together: dict[tuple[float, float, torch.device, torch.dtype], list[WeightSlot]] = {}
        step = self.steps + self._round_offset
        for slot in self._slots:
            if slot.gradient is None:
                continue
            decay = self.weight_decay if slot.decays else 0.0
            if self._narrow(slot) or (self.stochastic and slot.parameter.dtype == torch.bfloat16):
                self._update_rounding(slot, lr * slot.lr_multiplier, decay, step)
            else:
                key = (lr * slot.lr_multiplier, decay, slot.weights.device, slot.weights.dtype)
                together.setdefault(key, []).append(slot)
        for (rate, decay, _, _), slots in together.items():
            self._adamw_together(slots, rate, decay, refused)
            # A shard is its own master.
            held = [(slot.parameter, slot.master) for slot in slots if slot.master is not None and slot.shards is None]
            if held:
                torch._foreach_copy_([parameter for parameter, _ in held], [master for _, master in held])
        if self.shards is not None:
            self.shards.refresh()

    def _narrow(self, slot: WeightSlot) -> bool:
        """Whether a slot's moments are bfloat16; exact tests train in float64, whose moments stay so."""
        return self.narrow and slot.parameter.dtype != torch.float64

    def _update_rounding(self, slot: WeightSlot, lr: float, weight_decay: float, step: int) -> None:
        """One slot's update where weights or moments are rounded: in float32, a chunk at a time, then back."""
        first, second, steps = slot.ready_moments(self._narrow(slot))
        kept = {"weight": slot.weights, "first": first, "second": second}
        flat = {name: tensor.view(-1) for name, tensor in kept.items()}
        gradient = slot.gradient.reshape(-1)  # type: ignore[union-attr]
        row = 0 if self.shards is None else self.shards.piece(slot.name, slot.held).offset[0]
        place = row * math.prod(slot.held.shape[1:])
        for start in range(0, len(gradient), CHUNK):
            at = slice(start, start + CHUNK)
            exact = {name: tensor[at].to(torch.float32) for name, tensor in flat.items()}
            weight, some, count = exact["weight"], gradient[at], steps.clone()
            self._adamw([weight], [some], [exact["first"]], [exact["second"]], [count], lr, weight_decay)
            for name, tensor in flat.items():
                key = {"seed": self.seed, "step": step, "number": slot.number, "first": place + start}
                if tensor.dtype == torch.bfloat16:
                    round_stochastically(exact[name], tensor[at], **key, name=_NOISE[name])
        steps.add_(1)
        slot.write()

    def _adamw_together(
        self, slots: list[WeightSlot], lr: float, weight_decay: float, refused: Tensor | None = None
    ) -> None:
        first, second, steps = (list(parts) for parts in zip(*(slot.ready_moments(False) for slot in slots)))
        gradients = [slot.gradient for slot in slots if slot.gradient is not None]
        self._adamw([slot.weights for slot in slots], gradients, first, second, steps, lr, weight_decay, refused)

    def _adamw(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        steps: list[Tensor],
        lr: float,
        weight_decay: float,
        refused: Tensor | None = None,
    ) -> None:
        beta1, beta2 = self.betas
        adamw(
            weights, gradients, first, second, [], steps, fused=True, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=self.eps, found_inf=refused,
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
            slot.moments = slot.apart = None
            slot.take_gradient(entry.get("gradient"))
            if "apart_first" in entry:
                slot.apart, slot.moments = filled(slot, entry, "apart_", self._narrow(slot)), None
            if "first" in entry:
                filled(slot, entry, "", self._narrow(slot))
        if self.shards is not None:
            self.shards.refresh()
        self.steps, self.skipped = int(state["steps"]), int(state["skipped"])
