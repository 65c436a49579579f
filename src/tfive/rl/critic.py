"""One state-value critic V(s_t) made from the base model: a float32 value head that knows the step, on features of the
frozen base at its end or below its last blocks, of its last blocks trained in full or by low-rank updates, or of a
whole copy.

Training a pair of them is in `rl/critics.py`, saving a pair in `rl/critic_files.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tfive.errors import UserError
from tfive.rl.adapters import LORA_ALPHA, with_lora
from tfive.rl.initial import InitialWeights, dense
from tfive.rl.settings import HEADS_ALONE, CriticSettings
from tfive.rl.trajectory import Trajectories, placed
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.hf import Backbone
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts
from tfive.tree.outputs import Lower
from tfive.tree.settings import EngineOptions


def scoring_numbers(trajectories: Trajectories) -> Tensor:
    """`[B, R, T, N]`: what a critic that sees more than the prefix knows before each action. The losses of the scoring
    tokens without a thought, the loss that rewards compare with and, of a group, what the others at the position came
    to, none of which an action of this thought changes; and the potential that the checkpoints so far gave."""
    losses_BRH, before_BRT = trajectories.need("no_thought_token_BRH"), trajectories.need("potentials_BRT")
    known_BRN = torch.cat([losses_BRH, trajectories.reference_BR[..., None].to(losses_BRH)], -1)
    if trajectories.others_BRN is not None:
        known_BRN = torch.cat([known_BRN, trajectories.others_BRN.to(losses_BRH)], -1)
    wide_BRTN = known_BRN[:, :, None].expand(*before_BRT.shape, -1)
    return torch.cat([wide_BRTN, before_BRT[..., None].to(losses_BRH)], -1)


class ValueHead(nn.Module):
    """V(s_t) in float32 from normalised features and the step, small at initialisation; optionally |V| ≤ `bound`."""

    def __init__(
        self,
        features: int,
        steps: int,
        initial: InitialWeights,
        *,
        width: int = 256,
        bound: float | None = None,
        numbers: int = 0,
    ) -> None:
        """`steps` is the longest thought T; with `width` 0 the value is linear in the features plus a bias per step.
        `numbers`: how many `scoring_numbers` the head reads as well."""
        super().__init__()
        self.features, self.bound, self.numbers = features, bound, numbers
        self.project = dense(features, width, initial.of("project")) if width else None
        self.seen = dense(numbers, width, initial.of("seen")) if width and numbers else None
        self.step = nn.Parameter(initial.of("step").normal(steps, width or 1, deviation=0.02))
        self.last = dense(width or features + numbers, 1, initial.of("last"), gain=0.01)

    def hidden(self, features_BRTD: Tensor, step_T: Tensor, numbers_BRTN: Tensor | None = None) -> Tensor:
        """The input of the last layer, `[…, T, E]`: the critic features that the calibration heads read."""
        if (numbers_BRTN is None) == (self.numbers > 0):
            raise ValueError(f"this value head reads {self.numbers or 'no'} numbers of the scoring text")
        normal = F.layer_norm(features_BRTD.to(self.last.weight.dtype), (self.features,))
        numbers = None if numbers_BRTN is None else numbers_BRTN.to(normal)
        if self.project is None:
            return normal if numbers is None else torch.cat([normal, numbers], -1)
        projected = self.project(normal) + self.step[step_T]
        return F.silu(projected if self.seen is None else projected + self.seen(numbers))

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
class BaseActivations:
    """Activations of the frozen base on some trajectories, computed once (`FrozenBase.read`) and read by every
    critic."""

    features_BRTD: Tensor | None = None
    """Hidden states before each action (0 where there is none): final ones, or where a probe stands."""
    lower: Lower | None = None
    """Activations that enter the first adapted block."""

    def to(self, device: torch.device | str) -> BaseActivations:
        """The same on another device, e.g. kept on the host between passes."""
        return self._map(lambda tensor: tensor.to(device))

    def rows(self, index: slice | Tensor) -> BaseActivations:
        """The activations of some texts."""
        return self._map(lambda tensor: tensor[index if isinstance(index, slice) else placed(index, tensor.device)])

    @staticmethod
    def gathered(parts: Sequence[BaseActivations], size: int, index: Tensor) -> BaseActivations:
        """The activations of the texts `index` (ascending) out of micro-batches of `size` texts each."""
        picked = [
            parts[part].rows(index[index // size == part] - part * size) for part in (index // size).unique().tolist()
        ]
        features = [one.features_BRTD for one in picked if one.features_BRTD is not None]
        lower = [one.lower for one in picked if one.lower is not None]
        return BaseActivations(
            torch.cat(features) if features else None,
            replace(lower[0], hidden_BND=torch.cat([one.hidden_BND for one in lower])) if lower else None,
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> BaseActivations:
        return BaseActivations(
            None if self.features_BRTD is None else change(self.features_BRTD),
            None if self.lower is None else replace(self.lower, hidden_BND=change(self.lower.hidden_BND)),
        )


@dataclass(frozen=True)
class CriticOutput:
    """One critic's values and features of every state before an action; masked steps are 0."""

    values_BRT: Tensor
    hidden_BRTE: Tensor
    """The value head's hidden units, which the weight and mean heads read."""


class FrozenBase:
    """The frozen base model below the critics: run without gradients, once per trajectory."""

    def __init__(
        self,
        base: PreTrainedModel,
        plan: ThoughtPlan,
        settings: CriticSettings,
        engine: EngineOptions | None = None,
        policy: TreeModel | None = None,
    ) -> None:
        """With `policy`, it is read instead of the base model: frozen for the length of a window."""
        self.tree = policy or TreeModel(base, plan, engine, _delimiters(base, plan))
        self.first_block = first_block(self.tree.block_count, settings)
        self.probes = settings.adapt == "probe" and self.below is not None
        """Whether critics read what enters `first_block` at the actions alone, and nothing above it."""

    @property
    def below(self) -> int | None:
        """The block whose entering activations critics need; None where they need final states, or run all blocks."""
        return self.first_block if 0 < self.first_block < self.tree.block_count else None

    @torch.no_grad()
    def read(self, texts: TextBatch, thoughts: Thoughts, *, features: bool = True) -> BaseActivations:
        """The activations that critics need; with `features`, the final hidden states even if no critic needs them.

        Features are computed from the lower activations, so the lower blocks run once.
        """
        lower = None if self.below is None else self.tree.lower(texts, thoughts, self.below)
        if lower is not None and self.probes:
            return self.probed(texts, thoughts, lower)
        wanted = features or self.first_block == self.tree.block_count
        return BaseActivations(self.tree.features(texts, thoughts, lower) if wanted else None, lower)

    def probed(self, texts: TextBatch, thoughts: Thoughts, lower: Lower) -> BaseActivations:
        """What probes read of activations that enter their block."""
        return BaseActivations(self.tree.states(texts, thoughts, lower))


class Critic(nn.Module):
    """One critic. Its state dict holds its trained parameters and nothing of the frozen base.

    `base` must stay frozen for as long as the critic lives: `lora` reads its weights in place.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        plan: ThoughtPlan,
        settings: CriticSettings,
        *,
        engine: EngineOptions | None = None,
        reward_clip: float = 3.0,
        initial: InitialWeights,
    ) -> None:
        """`reward_clip` is c_r: returns lie within ±2·c_r, which is the bound of a bounded head."""
        super().__init__()
        self.settings, self.plan = settings, plan
        backbone = Backbone(base)
        self.first_block = first_block(len(backbone.blocks), settings)
        self.body = _body(backbone, self.first_block, settings, initial.of("body"))
        bound = 2 * reward_clip if settings.bounded else None
        width, features = settings.width, backbone.config.hidden_size
        self.sees = settings.sees != "prefix"
        """Whether its values are of the scoring text as well."""
        numbers = settings.numbers_seen(plan.horizon)
        self.head = ValueHead(features, plan.length, initial.of("head"), width=width, bound=bound, numbers=numbers)
        self.head.to(base.device)
        self.tree = None if self.body is None else TreeModel(self.body, plan, engine, _delimiters(base, plan))
        self._own = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        self.register_state_dict_post_hook(_leave_out_frozen)
        self.register_load_state_dict_post_hook(_frozen_is_not_missing)

    def over(self, body: Any, head: nn.Module) -> Critic:
        """This critic with its weights in other modules of the same make: in shards, for passes with gradients."""
        if self.tree is None:
            raise ValueError("a critic that adapts the head alone has no body to replace")
        other = copy.copy(self)
        other._modules = {"body": body, "head": head}
        other.tree = TreeModel(body, self.plan, self.tree.engine.unfused(), self.tree.delimiters)
        return other

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Named parameters for the optimiser: `head.…` and, where there is one, `body.…`."""
        return [(name, parameter) for name, parameter in self.named_parameters() if name in self._own]

    def features(self, texts: TextBatch, thoughts: Thoughts, base: BaseActivations) -> Tensor:
        """Features `[B, R, T, D]` of every state, with gradients to the adapted blocks where there are any.

        During the value-head warm-up it runs under `torch.no_grad()`: only the head is trained then.
        """
        if self.tree is None:
            if base.features_BRTD is None:
                raise ValueError("a critic that adapts the head alone needs base features")
            return base.features_BRTD.to(self.head.last.weight.device)
        lower = base.to(self.tree.device).lower
        if (0 if lower is None else lower.block) != self.first_block:
            raise ValueError(
                f"this critic continues from block {self.first_block}, the frozen base was read up to another one"
            )
        return self.tree.features(texts, thoughts, lower)

    def evaluate(
        self, features_BRTD: Tensor, mask_BRT: Tensor, trajectories: Trajectories | None = None
    ) -> CriticOutput:
        """V(s_t) and critic features from the result of `features`, through which gradients flow on; a critic that sees
        the continuation reads off the `trajectories` what it knows of it."""
        step_T = torch.arange(features_BRTD.shape[-2], device=features_BRTD.device)
        numbers = scoring_numbers(trajectories) if self.sees and trajectories is not None else None
        hidden_BRTE = self.head.hidden(features_BRTD, step_T, numbers)
        mask_BRT = mask_BRT.to(features_BRTD.device)
        return CriticOutput(self.head.read(hidden_BRTE, step_T) * mask_BRT, hidden_BRTE * mask_BRT[..., None])

    def values(self, texts: TextBatch, thoughts: Thoughts, base: BaseActivations) -> Tensor:
        """V(s_t) before every action, `[B, R, T]`, 0 where there is none, with gradients."""
        return self.evaluate(self.features(texts, thoughts, base), thoughts.mask_BRT).values_BRT


def build_pair(
    base: PreTrainedModel,
    plan: ThoughtPlan,
    settings: CriticSettings,
    *,
    engine: EngineOptions | None = None,
    reward_clip: float = 3.0,
    seed: int = 0,
) -> tuple[Critic, Critic]:
    """Two separately parameterised critics; their heads and low-rank updates begin with different weights."""
    first, second = (
        Critic(base, plan, settings, engine=engine, reward_clip=reward_clip, initial=InitialWeights(seed, name))
        for name in ("critic 1", "critic 2")
    )
    return first, second


def first_block(count: int, settings: CriticSettings) -> int:
    """Index of the first of `count` blocks that a critic runs itself, or below which a probe stands: `count` (none) for
    `head`, 0 (all) for `full`."""
    lowest = 1 if settings.adapt == "probe" else 0
    return {"head": count, "full": 0}.get(settings.adapt, max(count - settings.blocks, lowest))


def _delimiters(base: PreTrainedModel, plan: ThoughtPlan) -> Delimiters | None:
    """Learned delimiters at their initial values, frozen: a critic's do not change with the actor's."""
    return Delimiters.from_model(base, plan).requires_grad_(False) if plan.learned else None


def _body(backbone: Backbone, first: int, settings: CriticSettings, initial: InitialWeights) -> PreTrainedModel | None:
    """The base model from block `first` on, copied (`top`, `full`) or sharing its weights under low-rank updates."""
    if settings.adapt in HEADS_ALONE:
        return None
    # The memo of the deep copy: parts that are never run are replaced by stand-ins instead of being copied.
    instead: dict[int, Any] = {id(block): nn.Identity() for block in backbone.blocks[:first]}
    if first:
        instead[id(backbone.embedding)] = nn.Identity()
    if settings.adapt == "lora":
        instead |= {id(weight): nn.Parameter(weight.detach(), False) for weight in backbone.base.parameters()}
    body: PreTrainedModel = copy.deepcopy(backbone.base, instead)
    body.requires_grad_(True)
    if settings.adapt == "lora" and not with_lora(body, settings.lora_rank, LORA_ALPHA, initial):
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
