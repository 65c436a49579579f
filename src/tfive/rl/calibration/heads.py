"""The two small heads of the calibration: the weight w(s, a) and the mean h(c) (app:calibration-implementation).

They read bundles of feature tensors (`rl.calibration.mixture.WeightInputs`, `MeanInputs`) that contain no return and no
GAE, and for the mean head nothing of the action or of what follows it. Inputs are standardised by moments that are
fixed once per window, before any learning, so that a head computes the same function in fitting and in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from tfive.rl.calibration.dropout import Dropout
from tfive.rl.initial import InitialWeights, dense

LAYERS = 2
"""Hidden layers of both heads: one that joins the paths and one more, so that features can interact."""

READY_BYTES = 256 * 2**20
"""What inputs that are made ready may take on a GPU."""

ACTION_WIDTH = 16
"""Units the action's embedding is projected to before the weight head reads it: few, since w is learned from hundreds
of trajectories."""


class _VisibleInputs(Protocol):
    @property
    def prefix_NTD(self) -> Tensor: ...
    @property
    def value_NT2(self) -> Tensor: ...
    @property
    def time_NT(self) -> Tensor: ...


class WeightFeatures(_VisibleInputs, Protocol):
    """What w(s, a) reads: visible and critic features, both values, time, the action's embedding and log-prob."""

    @property
    def action_NTE(self) -> Tensor: ...
    @property
    def log_prob_NT(self) -> Tensor: ...


class MeanFeatures(_VisibleInputs, Protocol):
    """What h(c) reads: the visible inputs, the tokens left, the last potential, and the scoring text's features."""

    @property
    def remaining_NT(self) -> Tensor: ...
    @property
    def potential_NT(self) -> Tensor: ...
    @property
    def scoring_NTF(self) -> Tensor: ...


@dataclass(frozen=True)
class ReadyInputs:
    """Inputs as a head's trained layers read them: joined and standardised, which no step of learning changes."""

    parts: tuple[Tensor, ...]

    def rows(self, index: Tensor) -> ReadyInputs:
        """The same for some trajectories."""
        return self.map(lambda part: part[index])

    def map(self, change: Callable[[Tensor], Tensor]) -> ReadyInputs:
        """The same with `change` applied to every tensor."""
        return ReadyInputs(tuple(change(part) for part in self.parts))


class Standardizer(nn.Module):
    """Centres and scales features by stored moments; only `fix` changes them; they are part of the state dict."""

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))

    @torch.no_grad()
    def fix(self, features: Tensor, mask: Tensor) -> None:
        """Set the moments from the valid entries; a feature that is constant there is only centred."""
        chosen = features[mask].to(torch.float64)
        if not len(chosen):
            raise ValueError("no valid entry to take moments of")
        spread = chosen.std(dim=0, correction=0)
        self.mean.copy_(chosen.mean(dim=0))
        self.scale.copy_(torch.where(spread > 1e-6, spread, torch.ones_like(spread)).reciprocal())

    def forward(self, features: Tensor) -> Tensor:
        return (features.to(self.mean.dtype) - self.mean) * self.scale


class _Path(nn.Module):
    """One group of inputs: standardised, then projected to `width` units."""

    def __init__(self, width_in: int, width: int, initial: InitialWeights) -> None:
        super().__init__()
        self.standardize = Standardizer(width_in)
        self.project = dense(width_in, width, initial)


class _Joined(nn.Module):
    """Hidden layers on the joined paths and a scalar output whose last layer is small but not zero.

    An exactly zero last layer would block every gradient above it (app:gate-behavior).
    """

    def __init__(self, width_in: int, width: int, depth: int, dropout: float, initial: InitialWeights) -> None:
        super().__init__()
        widths = [width_in] + [width] * depth
        self.hidden = nn.ModuleList(
            dense(a, b, initial.of(f"hidden {n}"), gain=2.0**0.5) for n, (a, b) in enumerate(pairwise(widths))
        )
        self.dropout = Dropout(dropout)
        self.last = dense(width, 1, initial.of("last"), gain=0.01)

    def forward(self, joined: Tensor) -> Tensor:
        x = self.dropout(nn.functional.silu(joined))
        for layer in self.hidden:
            x = self.dropout(nn.functional.silu(layer(x)))
        out: Tensor = self.last(x)
        return out.squeeze(-1)


def _scalars(*columns: Tensor) -> Tensor:
    return torch.stack(columns, dim=-1)


def _values(inputs: _VisibleInputs) -> Tensor:
    """Mean of the values, their difference, and time: for a small head more informative than the two values."""
    first, second = inputs.value_NT2.unbind(-1)
    return _scalars((first + second) / 2, first - second, inputs.time_NT, inputs.time_NT.square())


class WeightHead(nn.Module):
    """w(s, a) → [0, 1] (eq:twin-advantage), near ½ at the start.

    The state-only weight is the same head fed `inputs.state_only()`, in `standardize` too.
    """

    def __init__(
        self,
        prefix: int,
        action: int,
        *,
        width: int = 64,
        depth: int = LAYERS,
        action_width: int = ACTION_WIDTH,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`prefix` and `action` are the widths D and E of the features; E is projected down to `action_width`."""
        super().__init__()
        initial = InitialWeights(seed, "weight head")
        self.prefix = _Path(prefix, width, initial.of("prefix"))
        self.action = _Path(action, action_width, initial.of("action"))
        self.scalars = Standardizer(5)
        self.joined = _Joined(width + action_width + 5, width, depth, dropout, initial.of("joined"))

    def _columns(self, inputs: WeightFeatures) -> Tensor:
        return torch.cat([_values(inputs), inputs.log_prob_NT.unsqueeze(-1)], dim=-1)

    def standardize(self, inputs: WeightFeatures, mask_NT: Tensor) -> None:
        """Fix the input moments for a window, from the valid steps of its head-training trajectories."""
        self.prefix.standardize.fix(inputs.prefix_NTD, mask_NT)
        self.action.standardize.fix(inputs.action_NTE, mask_NT)
        self.scalars.fix(self._columns(inputs), mask_NT)

    def ready(self, inputs: WeightFeatures) -> ReadyInputs:
        """The inputs after all that is fixed for a window, for many passes over the same ones."""
        paths = self.prefix.standardize(inputs.prefix_NTD), self.action.standardize(inputs.action_NTE)
        return ReadyInputs((*paths, self.scalars(self._columns(inputs))))

    def forward(self, inputs: WeightFeatures | ReadyInputs) -> Tensor:
        ready = inputs if isinstance(inputs, ReadyInputs) else self.ready(inputs)
        prefix, action, columns = ready.parts
        return torch.sigmoid(
            self.joined(torch.cat([self.prefix.project(prefix), self.action.project(action), columns], dim=-1))
        )


class MeanHead(nn.Module):
    """h(c), the conditional mean response of eq:calibrated-weight, with a training-only path for the scoring text."""

    def __init__(
        self,
        prefix: int,
        scoring: int,
        *,
        width: int = 64,
        depth: int = LAYERS,
        dropout: float = 0.1,
        bound: float | None = None,
        seed: int = 0,
    ) -> None:
        """`prefix` and `scoring` are the widths D and F; with `bound` K_h, |h| < K_h by construction."""
        super().__init__()
        initial = InitialWeights(seed, "mean head")
        self.prefix = _Path(prefix, width, initial.of("prefix"))
        self.scoring = _Path(scoring + 1, width, initial.of("scoring"))
        self.scalars = Standardizer(5)
        self.dropout = Dropout(dropout)
        self.joined = _Joined(2 * width + 5, width, depth, dropout, initial.of("joined"))
        self.bound = bound

    def _columns(self, inputs: MeanFeatures) -> Tensor:
        return torch.cat([_values(inputs), inputs.remaining_NT.unsqueeze(-1)], dim=-1)

    def _hidden_side(self, inputs: MeanFeatures) -> Tensor:
        """Inputs available in training only: the scoring text, and the last potential, which was computed from it."""
        return torch.cat([inputs.scoring_NTF, inputs.potential_NT.unsqueeze(-1)], dim=-1)

    def standardize(self, inputs: MeanFeatures, mask_NT: Tensor) -> None:
        """Fix the input moments for a window, from the valid steps of its head-training trajectories."""
        self.prefix.standardize.fix(inputs.prefix_NTD, mask_NT)
        self.scoring.standardize.fix(self._hidden_side(inputs), mask_NT)
        self.scalars.fix(self._columns(inputs), mask_NT)

    def ready(self, inputs: MeanFeatures) -> ReadyInputs:
        """The inputs after all that is fixed for a window, for many passes over the same ones."""
        paths = self.prefix.standardize(inputs.prefix_NTD), self.scoring.standardize(self._hidden_side(inputs))
        return ReadyInputs((*paths, self.scalars(self._columns(inputs))))

    def forward(self, inputs: MeanFeatures | ReadyInputs) -> Tensor:
        ready = inputs if isinstance(inputs, ReadyInputs) else self.ready(inputs)
        seen, hidden, columns = ready.parts
        prefix, scoring = self.prefix.project(self.dropout(seen)), self.scoring.project(self.dropout(hidden))
        out: Tensor = self.joined(torch.cat([prefix, scoring, columns], dim=-1))
        return out if self.bound is None else self.bound * torch.tanh(out / self.bound)


Inputs = TypeVar("Inputs")


def ready(head: nn.Module, inputs: Inputs) -> Inputs | ReadyInputs:
    """The inputs as the head reads them again and again while it learns (`ReadyInputs`), for a head that knows them.

    On a GPU only as far as the copies take little memory there; every step has fewer kernels with them.
    """
    if not isinstance(head, WeightHead | MeanHead):
        return inputs
    if head.joined.last.weight.device.type != "cpu" and not light(inputs):
        return inputs
    with torch.no_grad():
        return head.ready(inputs)  # type: ignore[arg-type]


def outputs(head: nn.Module, inputs: WeightFeatures | MeanFeatures | ReadyInputs) -> Tensor:
    """A head's output without dropout or gradients."""
    if head.training:  # to ask all its parts takes as long as a small pass
        head.eval()
    with torch.no_grad():
        out: Tensor = head(inputs)
    return out


def light(*inputs: object) -> bool:
    """Whether copies of all these take little memory once they are made ready: float32, and nothing expanded any
    more."""
    return (
        sum(4 * part.numel() for one in inputs for part in vars(one).values() if isinstance(part, Tensor))
        <= READY_BYTES
    )


def kept_state(head: nn.Module) -> dict[str, Tensor]:
    """A copy of a head's state, by one kernel where its tensors are of one type; `copy.deepcopy` takes several times as
    long for tensors this small."""
    state = {name: value.detach() for name, value in head.state_dict().items()}
    kept = {name: torch.empty_like(value) for name, value in state.items()}
    if kept:
        torch._foreach_copy_(list(kept.values()), list(state.values()))
    return kept
