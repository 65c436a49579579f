"""State-value critics made from the base model: a float32 value head that knows the step,
on features of chosen reach; low-rank updates as explicit modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tfive.errors import UserError
from tfive.rl.calibration.heads import dense
from tfive.rl.settings import CriticSettings
from tfive.rng import philox
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.hf import Backbone
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts
from tfive.tree.outputs import Lower
from tfive.tree.settings import EngineSettings


class LoraLinear(nn.Module):
    """`linear(x) + (alpha / rank) · up(down(x))` with `linear` frozen; the update starts at exactly zero."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.scale = alpha / rank
        down = torch.empty(rank, linear.in_features).normal_(0.0, linear.in_features**-0.5, generator=generator)
        device = linear.weight.device
        self.down = nn.Parameter(down.to(device))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank, device=device))

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for code that asks a layer for its dtype or device."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        narrow = F.linear(x, self.down.to(x.dtype))
        return self.linear(x) + self.scale * F.linear(narrow, self.up.to(x.dtype))


def with_lora(module: nn.Module, rank: int, alpha: float, seed: int) -> int:
    """Freeze `module`, wrap every linear layer inside it, and return how many there were."""
    module.requires_grad_(False)
    return _wrapped(module, rank, alpha, torch.Generator().manual_seed(seed))


def _wrapped(module: nn.Module, rank: int, alpha: float, generator: torch.Generator) -> int:
    count = 0
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            setattr(module, name, LoraLinear(child, rank, alpha, generator))
            count += 1
        else:
            count += _wrapped(child, rank, alpha, generator)
    return count


class ValueHead(nn.Module):
    """V(s_t) in float32 from normalised features and the step, small at the start; optionally |V| ≤ `bound`."""

    def __init__(
        self, features: int, steps: int, *, width: int = 256, bound: float | None = None, seed: int = 0
    ) -> None:
        """`steps` is the longest thought T; with `width` 0 the value is linear in the features plus a bias a step."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.features, self.bound = features, bound
        self.project = dense(features, width, generator) if width else None
        self.step = nn.Parameter(torch.zeros(steps, width or 1).normal_(0.0, 0.02, generator=generator))
        self.last = dense(width or features, 1, generator, gain=0.01)

    def hidden(self, features_BRTD: Tensor, step_T: Tensor) -> Tensor:
        """What the last layer reads, `[…, T, E]`: the critic's own view of the state."""
        normal = F.layer_norm(features_BRTD.to(self.last.weight.dtype), (self.features,))
        return normal if self.project is None else F.silu(self.project(normal) + self.step[step_T])

    def read(self, hidden_BRTE: Tensor, step_T: Tensor) -> Tensor:
        """Values `[…, T]` from `hidden`."""
        value: Tensor = self.last(hidden_BRTE).squeeze(-1)
        if self.project is None:
            value = value + self.step[step_T, 0]
        return value if self.bound is None else self.bound * torch.tanh(value / self.bound)

    def forward(self, features_BRTD: Tensor, step_T: Tensor) -> Tensor:
        """Values of features `[…, T, D]` at steps counted from 0 (the value head `TreeModel.values` asks for)."""
        return self.read(self.hidden(features_BRTD, step_T), step_T)


@dataclass(frozen=True)
class Shared:
    """What both critics read of some trajectories and never changes: made once by `FrozenBase.read`."""

    features_BRTD: Tensor | None = None
    """The base model's final hidden states before each action (0 where there is none)."""
    lower: Lower | None = None
    """Activations that enter the first adapted block."""

    def to(self, device: torch.device | str) -> Shared:
        """The same on another device, e.g. kept on the host between passes."""
        lower = None if self.lower is None else replace(self.lower, hidden_BND=self.lower.hidden_BND.to(device))
        return Shared(None if self.features_BRTD is None else self.features_BRTD.to(device), lower)

    @staticmethod
    def gathered(parts: Sequence[Shared], size: int, index: Tensor) -> Shared:
        """What belongs to the texts `index` (rising), when `parts` hold `size` texts each."""
        first = parts[0]
        picked = [(parts[int(part)], index[index // size == part] - part * size) for part in (index // size).unique()]
        features = None if first.features_BRTD is None else torch.cat([p.features_BRTD[i] for p, i in picked])  # type: ignore[index]
        if first.lower is None:
            return Shared(features)
        return Shared(features, replace(first.lower, hidden_BND=torch.cat([p.lower.hidden_BND[i] for p, i in picked])))  # type: ignore[union-attr]

    def rows(self, start: int, stop: int) -> Shared:
        """What belongs to the texts `start … stop−1`."""
        lower = None if self.lower is None else replace(self.lower, hidden_BND=self.lower.hidden_BND[start:stop])
        return Shared(None if self.features_BRTD is None else self.features_BRTD[start:stop], lower)


@dataclass(frozen=True)
class Judgement:
    """One critic's view of every state before an action; masked steps are 0."""

    values_BRT: Tensor
    hidden_BRTE: Tensor
    """The value head's hidden units: the critic features that the weight and mean heads read."""


class FrozenBase:
    """The base model as critics see it: read without gradients, once per trajectory."""

    def __init__(
        self, base: PreTrainedModel, plan: ThoughtPlan, settings: CriticSettings, engine: EngineSettings | None = None
    ) -> None:
        self.tree = TreeModel(base, plan, engine, _delimiters(base, plan))
        self.first_block = first_block(self.tree.block_count, settings)

    @torch.no_grad()
    def read(self, texts: TextBatch, thoughts: Thoughts, *, features: bool = True) -> Shared:
        """What critics need of these trajectories; base `features` also when critics do not (calibration reads them).

        Features are computed from the entering activations, so the lower blocks are run once.
        """
        inside = 0 < self.first_block < self.tree.block_count
        lower = self.tree.lower(texts, thoughts, self.first_block) if inside else None
        wanted = features or self.first_block == self.tree.block_count
        return Shared(self.tree.features(texts, thoughts, lower) if wanted else None, lower)


class Critic(nn.Module):
    """One critic. Its state dict holds what it trains and nothing of the frozen base.

    `base` must stay frozen for as long as the critic lives: `lora` reads its weights in place.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        plan: ThoughtPlan,
        settings: CriticSettings,
        *,
        engine: EngineSettings | None = None,
        reward_clip: float = 3.0,
        seed: int = 0,
    ) -> None:
        """`reward_clip` is c_r: returns lie within ±2·c_r, which is the bound of a bounded head."""
        super().__init__()
        self.settings, self.plan = settings, plan
        backbone = Backbone(base)
        self.first_block = first_block(len(backbone.blocks), settings)
        self.body = _body(backbone, self.first_block, settings, seed)
        bound = 2 * reward_clip if settings.bounded else None
        self.head = ValueHead(backbone.config.hidden_size, plan.length, width=settings.width, bound=bound, seed=seed)
        self.head.to(base.device)
        self.tree = None if self.body is None else TreeModel(self.body, plan, engine, _delimiters(base, plan))
        self._own = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        self.register_state_dict_post_hook(_leave_out_frozen)
        self.register_load_state_dict_post_hook(_frozen_is_not_missing)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Named parameters for the optimiser: `head.…` and, where there is one, `body.…`."""
        return [(name, parameter) for name, parameter in self.named_parameters() if name in self._own]

    def features(self, texts: TextBatch, thoughts: Thoughts, shared: Shared) -> Tensor:
        """Features `[B, R, T, D]` of every state, with gradients to the adapted blocks where there are any.

        Under `torch.no_grad()` this is what a value-head warm-up computes once and then fits in many passes.
        """
        if self.tree is None:
            if shared.features_BRTD is None:
                raise ValueError("a critic that adapts the head alone needs base features")
            return shared.features_BRTD.to(self.head.last.weight.device)
        lower = shared.to(self.tree.device).lower
        if (0 if lower is None else lower.block) != self.first_block:
            raise ValueError(f"this critic goes on from block {self.first_block}, the frozen base was read otherwise")
        return self.tree.features(texts, thoughts, lower)

    def judge(self, features_BRTD: Tensor, mask_BRT: Tensor) -> Judgement:
        """V(s_t) and critic features from `features`; gradients reach as far as the given features carry them."""
        step_T = torch.arange(features_BRTD.shape[-2], device=features_BRTD.device)
        hidden_BRTE = self.head.hidden(features_BRTD, step_T)
        mask_BRT = mask_BRT.to(features_BRTD.device)
        return Judgement(self.head.read(hidden_BRTE, step_T) * mask_BRT, hidden_BRTE * mask_BRT[..., None])

    def values(self, texts: TextBatch, thoughts: Thoughts, shared: Shared) -> Tensor:
        """V(s_t) before every action, `[B, R, T]`, 0 where there is none, with gradients."""
        return self.judge(self.features(texts, thoughts, shared), thoughts.mask_BRT).values_BRT


def build_pair(
    base: PreTrainedModel,
    plan: ThoughtPlan,
    settings: CriticSettings,
    *,
    engine: EngineSettings | None = None,
    reward_clip: float = 3.0,
    seed: int = 0,
) -> tuple[Critic, Critic]:
    """Two separately parameterised critics; what is new in them (heads, low-rank updates) is seeded differently."""
    seeds = philox(seed, "critic", 0, np.arange(2))[:, 0]
    first, second = (
        Critic(base, plan, settings, engine=engine, reward_clip=reward_clip, seed=int(number)) for number in seeds
    )
    return first, second


def first_block(count: int, settings: CriticSettings) -> int:
    """The first of `count` blocks that a critic runs itself: none of them for `head`, all for `full`."""
    return {"head": count, "full": 0}.get(settings.adapt, max(count - settings.blocks, 0))


def _delimiters(base: PreTrainedModel, plan: ThoughtPlan) -> Delimiters | None:
    """Learned delimiters as they started: a critic's view of the opening does not move with the actor's."""
    return Delimiters.from_model(base, plan).requires_grad_(False) if plan.learned else None


def _body(backbone: Backbone, first: int, settings: CriticSettings, seed: int) -> PreTrainedModel | None:
    """The base model from block `first` on, copied (`top`, `full`) or sharing its weights under low-rank updates."""
    if settings.adapt == "head":
        return None
    # What a deep copy finds here it takes instead of copying: stand-ins for the parts that are never run.
    instead: dict[int, Any] = {id(block): nn.Identity() for block in backbone.blocks[:first]}
    if first:
        instead[id(backbone.embedding)] = nn.Identity()
    if settings.adapt == "lora":
        instead |= {id(weight): nn.Parameter(weight.detach(), False) for weight in backbone.base.parameters()}
    body: PreTrainedModel = copy.deepcopy(backbone.base, instead)
    body.requires_grad_(True)
    if settings.adapt == "lora" and not with_lora(body, settings.lora_rank, settings.lora_alpha, seed):
        raise UserError(f"critic.adapt = 'lora': {backbone.name} has no linear layers in its last blocks; use top")
    return body


def _leave_out_frozen(critic: Critic, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    own = {prefix + name for name in critic._own}
    for name in [name for name in state if name.startswith(prefix) and name not in own]:
        del state[name]


def _frozen_is_not_missing(critic: Critic, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [
        name for name in incompatible.missing_keys if any(f".{name}".endswith(f".{own}") for own in critic._own)
    ]
