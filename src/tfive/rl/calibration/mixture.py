"""How two normalised advantages become one (eq:twin-advantage): what the weight and mean heads may read, and every
mixing rule behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

Self = TypeVar("Self", bound="_Rows")


class _Rows:
    """Feature bundles whose tensors all start with the trajectory dimension N."""

    def rows(self: Self, index: Tensor) -> Self:
        """The same bundle for some trajectories."""
        return self.map(lambda tensor: tensor[index])

    def map(self: Self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same bundle with `change` applied to every tensor."""
        return type(self)(**{name: change(tensor) for name, tensor in vars(self).items()})


@dataclass(frozen=True)
class WeightInputs(_Rows):
    """All that w(s, a) may read: frozen features known when the action is taken. No return, no GAE, and no scoring text
    but what critics that see it (`critic.sees`) have put into their features (app:calibration-implementation)."""

    prefix_NTD: Tensor
    """Frozen visible-prefix and critic features of s_t."""
    value_NT2: Tensor
    """Both critics' values of s_t."""
    time_NT: Tensor
    """Step t as a fraction of T_max."""
    action_NTE: Tensor
    """The sampled action's (input) embedding."""
    log_prob_NT: Tensor
    """The action's recorded log-probability."""

    def state_only(self) -> WeightInputs:
        """The inputs of a state-only weight: everything about the action is zeroed."""
        return replace(
            self, action_NTE=torch.zeros_like(self.action_NTE), log_prob_NT=torch.zeros_like(self.log_prob_NT)
        )


@dataclass(frozen=True)
class MeanInputs(_Rows):
    """All that h(c) may read: the full context before action t, nothing of the action or of what follows it
    (app:calibration-implementation)."""

    prefix_NTD: Tensor
    value_NT2: Tensor
    time_NT: Tensor
    remaining_NT: Tensor
    """Remaining token allowance as a fraction of T_max."""
    potential_NT: Tensor
    """The last checkpoint's potential before action t."""
    scoring_NTF: Tensor
    """Training-only features of the scoring text (and ℓ_0)."""

    def visible(self, own: int | None = None) -> MeanInputs:
        """The same context without what the actor cannot see: scoring text and potential become constants, and where
        critics see the scoring text their features and values as well. Of the prefix only the policy's `own` features,
        which come first, then stay."""
        unseen = replace(
            self, potential_NT=torch.zeros_like(self.potential_NT), scoring_NTF=torch.zeros_like(self.scoring_NTF)
        )
        if own is None:
            return unseen
        theirs = torch.zeros_like(self.prefix_NTD[..., own:])
        kept = torch.cat([self.prefix_NTD[..., :own], theirs], -1)
        return replace(unseen, prefix_NTD=kept, value_NT2=torch.zeros_like(self.value_NT2))


class WeightHead(Protocol):
    """w_φ: [N, T] in [0, 1]."""

    def __call__(self, inputs: WeightInputs) -> Tensor: ...


class MeanHead(Protocol):
    """h_ζ: [N, T]."""

    def __call__(self, inputs: MeanInputs) -> Tensor: ...


def mix(weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Ã_w = w·Ã₁ + (1 − w)·Ã₂ (eq:twin-advantage), written around the average so that w = ½ returns it exactly."""
    return (first + second) / 2 + (weight - 0.5) * (first - second)


class Mixture(Protocol):
    """A frozen rule for the actor's advantage. `weight` is None for a rule that is not a function of visible inputs."""

    @property
    def name(self) -> str: ...

    def weight(self, inputs: WeightInputs) -> Tensor | None: ...

    def mixed(self, inputs: WeightInputs, first: Tensor, second: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class FixedWeight:
    """One constant weight: ½ is the fixed average and the fallback; 1 and 0 are the single critics."""

    value: float = 0.5
    name: str = "average"

    def weight(self, inputs: WeightInputs) -> Tensor:
        return torch.full_like(inputs.time_NT, self.value)

    def mixed(self, inputs: WeightInputs, first: Tensor, second: Tensor) -> Tensor:
        return mix(self.weight(inputs).to(first.dtype), first, second).detach()


@dataclass(frozen=True)
class Minimum:
    """A_min = Ā − |ΔA|/2 (eq:twin-drift-coefficient): chooses by realised GAEs, so it is no function of visible
    inputs."""

    name: str = "minimum"

    def weight(self, inputs: WeightInputs) -> None:
        return None

    def mixed(self, inputs: WeightInputs, first: Tensor, second: Tensor) -> Tensor:
        return torch.minimum(first, second).detach()


@dataclass(frozen=True)
class LearnedWeight:
    """A frozen weight head w(s, a), or w(s) with `state_only`."""

    head: nn.Module
    state_only: bool = False
    name: str = "learned"

    def weight(self, inputs: WeightInputs) -> Tensor:
        was_training = self.head.training
        self.head.eval()
        with torch.no_grad():
            weight: Tensor = self.head(inputs.state_only() if self.state_only else inputs)
        self.head.train(was_training)
        return weight

    def mixed(self, inputs: WeightInputs, first: Tensor, second: Tensor) -> Tensor:
        return mix(self.weight(inputs).to(first.dtype), first, second).detach()


def fixed_mixture(mode: str) -> FixedWeight | Minimum | None:
    """The mixture of a mode that needs no learning; None for the learned ones."""
    fixed: dict[str, FixedWeight | Minimum] = {
        "average": FixedWeight(0.5, "average"),
        "single": FixedWeight(1.0, "single"),
        "minimum": Minimum(),
    }
    return fixed.get(mode)
