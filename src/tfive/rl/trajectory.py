"""The record that passes through a window: thoughts with their log-probabilities, losses, rewards and advantages.

A `Trajectories` object holds one thought per branch for a set of texts. Each phase adds to it: sampling the actions and
log q, the training forward log π_old, scoring the losses, then rewards, values, advantages and weights. It names the
snapshots that made it; using it with others is an error (`rl/snapshots.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from tfive.distributed.world import World
from tfive.tree.layout import TextBatch, Thoughts

_TEXT_FIELDS = ("tokens_BS", "document_BS", "positions_BP", "items_BP")
_THOUGHT_FIELDS = ("tokens_BRT", "length_BR", "valid_BR", "closed_BR", "log_q_BRT")


def last_loss(losses_BRK: Tensor, mask_BRK: Tensor) -> Tensor:
    """The loss at each thought's last checkpoint, `[B, R]`; valid checkpoints come first."""
    last_BR = mask_BRK.sum(-1).clamp(min=1) - 1
    return losses_BRK.gather(-1, last_BR[..., None]).squeeze(-1)


def placed(index: Tensor, device: torch.device) -> Tensor:
    """Row numbers where the rows are. Those of the host are sent once and without waiting; a tensor that is asked for
    rows by numbers of the host would send them itself, every time, and wait."""
    return index.to(device, non_blocking=True) if index.device.type == "cpu" else index


@dataclass(frozen=True)
class Trajectories:
    """Thoughts of one role and window. Fields that a later phase computes are None until then.

    Per-critic tensors carry a leading axis of two (suffix 2). Masked entries are zero.
    """

    role: str
    window: int
    texts: TextBatch
    thoughts: Thoughts
    log_old_BRT: Tensor | None = None
    no_thought_BR: Tensor | None = None
    no_thought_token_BRH: Tensor | None = None
    """The losses of the continuation's tokens without a thought, whose mean is ℓ_0."""
    foreign_BR: Tensor | None = None
    """The loss after a whole thought of another text; only with reward.reference = foreign."""
    losses_BRK: Tensor | None = None
    checkpoint_BRK: Tensor | None = None
    checkpoint_mask_BRK: Tensor | None = None
    potentials_BRT: Tensor | None = None
    rewards_BRT: Tensor | None = None
    returns_BRT: Tensor | None = None
    values_2BRT: Tensor | None = None
    gae_2BRT: Tensor | None = None
    weight_BRT: Tensor | None = None
    advantage_BRT: Tensor | None = None
    probe_step_BR: Tensor | None = None
    """Of independent continuations: the step (from 0) of the first action that was drawn anew after the shared
    prefix."""
    states_BRTD: Tensor | None = None
    """The policy's hidden states before each action, from the pass that recorded log π_old."""
    scoring_BRF: Tensor | None = None
    """The scorer's features of the continuation without a thought (`rl.sampling.scoring_features`)."""
    others_BRN: Tensor | None = None
    """What the other thoughts at the position came to (`rl/siblings.py`), where critics see it."""
    lower_BND: Tensor | None = None
    """The policy's activations that enter the critics' first block, where critics stand on them."""
    snapshots: dict[str, str] = field(default_factory=dict)

    @property
    def mask_BRT(self) -> Tensor:
        """True where an action was taken."""
        return self.thoughts.mask_BRT

    @property
    def final_loss_BR(self) -> Tensor:
        """Continuation loss after the whole thought (the last checkpoint), zero where there is no item."""
        return last_loss(self.need("losses_BRK"), self.need("checkpoint_mask_BRK")) * self.thoughts.valid_BR

    @property
    def gain_BR(self) -> Tensor:
        """Utility U = ℓ_0 − ℓ_T of each thought in nats per token (eq:continuation-ce), zero where there is no item."""
        return (self.need("no_thought_BR") - self.final_loss_BR) * self.thoughts.valid_BR

    @property
    def reference_BR(self) -> Tensor:
        """The loss that rewards compare with: ℓ_0, or the loss after another text's thought."""
        return self.need("no_thought_BR") if self.foreign_BR is None else self.foreign_BR

    def need(self, name: str) -> Tensor:
        """The named tensor, or an error that says which phase has not run yet."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"{name} of the {self.role} trajectories of window {self.window} has not been computed yet"
            )
        return value

    def having(self, *, snapshots: dict[str, str] | None = None, **values: Tensor) -> Trajectories:
        """A copy with the given tensors set; snapshot ids are added to those already named."""
        changes: dict[str, Any] = dict(values)
        return replace(self, snapshots={**self.snapshots, **(snapshots or {})}, **changes)

    def without_states(self) -> Trajectories:
        """A copy without what only critics and calibration heads read: it is large, and no later phase needs it."""
        return replace(self, states_BRTD=None, scoring_BRF=None, lower_BND=None)

    def rows(self, index: Tensor | slice) -> Trajectories:
        """The trajectories of some texts: a micro-batch."""
        sent: dict[torch.device, Tensor | slice] = {}

        def change(name: str, tensor: Tensor) -> Tensor:
            if tensor.device not in sent:
                sent[tensor.device] = index if isinstance(index, slice) else placed(index, tensor.device)
            chosen = sent[tensor.device]
            return tensor[:, chosen] if name.endswith("_2BRT") else tensor[chosen]

        return self._map(change)

    def to(self, device: torch.device | str) -> Trajectories:
        return self._map(lambda _, tensor: tensor.to(device))

    def gathered(self, world: World, texts: TextBatch) -> Trajectories:
        """The trajectories of all `texts`, of which these are the rows that this process computed."""
        if world.size == 1:
            return self
        own = [(f.name, v) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)]
        parts = [(v, 1 if name.endswith("_2BRT") else 0) for name, v in own]
        parts += [(getattr(self.thoughts, name), 0) for name in _THOUGHT_FIELDS]
        found = world.gather_all(parts, len(texts.tokens_BS))
        whole: dict[str, Any] = {name: value for (name, _), value in zip(own, found)}
        return replace(self, texts=texts, thoughts=Thoughts(*found[len(own) :]), **whole)

    def _map(self, change: Any) -> Trajectories:
        own = {
            f.name: change(f.name, value) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        texts = TextBatch(**{name: change(name, getattr(self.texts, name)) for name in _TEXT_FIELDS})
        thoughts = Thoughts(**{name: change(name, getattr(self.thoughts, name)) for name in _THOUGHT_FIELDS})
        return replace(self, texts=texts, thoughts=thoughts, **own)

    @property
    def count(self) -> int:
        """How many thoughts there are."""
        return int(self.thoughts.valid_BR.sum())

    def state_dict(self) -> dict[str, Any]:
        tensors = {f"texts.{n}": getattr(self.texts, n) for n in _TEXT_FIELDS}
        tensors |= {f"thoughts.{n}": getattr(self.thoughts, n) for n in _THOUGHT_FIELDS}
        tensors |= {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return {"role": self.role, "window": self.window, "snapshots": dict(self.snapshots), "tensors": tensors}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trajectories:
        tensors = state["tensors"]
        return cls(
            role=state["role"],
            window=state["window"],
            snapshots=dict(state["snapshots"]),
            texts=TextBatch(**{n: tensors[f"texts.{n}"] for n in _TEXT_FIELDS}),
            thoughts=Thoughts(**{n: tensors[f"thoughts.{n}"] for n in _THOUGHT_FIELDS}),
            **{n: t for n, t in tensors.items() if "." not in n},
        )
