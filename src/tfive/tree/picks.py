"""Which nodes to read and what they should predict: rows taken out of a pass, and numbers put back in shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.tree.layout import Layout

_SIZES = 8
"""In how many sizes padded picks of one full shape come."""
_ALIGNED = 16
"""Sizes are multiples of this many picks, as kernels like them."""

Count = int | None | Literal["every"]
"""How many picks exist, where the host knows; `every`: take those that do not exist as well, as padding, so that nobody
need know; None: ask the device, and wait for it."""


def standing(keep_n: Tensor, size: int) -> Tensor:
    """int64 `[size]`: where the true entries stand, ascending, as `nonzero` gives them. Nothing waits for the device:
    the host knows that there are exactly `size`."""
    slot_n = torch.where(keep_n, keep_n.cumsum(0) - 1, size)
    found = torch.full((size + 1,), len(keep_n), device=keep_n.device)
    return found.scatter_(0, slot_n, torch.arange(len(keep_n), device=keep_n.device))[:size]


@dataclass(frozen=True)
class Picks:
    """Nodes picked from `[B, N]`, only those that exist but for padding."""

    index: Tensor
    """int64 `[x]` into the flattened nodes."""
    target: Tensor
    """int64 `[x]` token each one should predict."""
    keep: Tensor
    """bool: where in the full shape the picked ones stand."""
    place: Tensor
    """int64 `[x]`: the same as indices into the flattened full shape; one beyond it for padding."""
    padding: bool = False
    """Whether some may be padding, which stands nowhere and gets no gradient."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All that a pass reads of the picks."""
        return self.index, self.target, self.keep, self.place

    def on(self, tensors: Sequence[Tensor]) -> Picks:
        """The same picks by other `tensors` of the same shapes."""
        index, target, keep, place = tensors
        return Picks(index, target, keep, place, self.padding)

    def padded(self) -> Picks:
        """The same, padded to one of a few sizes: what is captured for a size serves every number of picks up to it.
        Padding asks the first node for entry 0."""
        if self.padding:
            return self
        full, count = self.keep.numel(), len(self.place)
        step = -(-full // (_SIZES * _ALIGNED)) * _ALIGNED
        more = (0, max(step, -(-count // step) * step) - count) if full else (0, 0)
        place = F.pad(self.place, more, value=full)
        return replace(self, index=F.pad(self.index, more), target=F.pad(self.target, more), place=place, padding=True)

    @staticmethod
    def of(node: Tensor, target: Tensor, keep: Tensor, node_count: int, count: Count = None) -> Picks:
        """Picks of `node` (`[B, …]`, indices inside a row) where `keep`, of which there are `count`."""
        row = torch.arange(len(node), device=node.device).view(-1, *[1] * (node.ndim - 1)) * node_count
        kept = keep.flatten()
        if count == "every":
            place = torch.where(kept, torch.arange(len(kept), device=kept.device), len(kept))
            index, asked = (torch.where(keep, value, 0).flatten() for value in (node + row, target))
            return Picks(index, asked, keep, place, padding=True)
        at = kept.nonzero()[:, 0] if count is None else standing(kept, count)  # the former waits for the device
        return Picks((node + row).flatten()[at], target.expand_as(node).flatten()[at], keep, at)

    @staticmethod
    def actions(layout: Layout, tokens_BRT: Tensor, of_B: Tensor | None = None, count: Count = None) -> Picks:
        """The node before each action, and the action; of some texts (bool `of_B`) or of all."""
        keep_BRT = layout.action_mask_BRT
        if of_B is not None:
            keep_BRT = keep_BRT & of_B[:, None, None]
        return Picks.of(layout.action_node_BRT, tokens_BRT, keep_BRT, layout.node_count, count)

    @staticmethod
    def continuations(layout: Layout, count: Count = None) -> Picks:
        """The nodes that predict each continuation after each checkpoint, `[B, R, K, H]`."""
        keep_BRKH = layout.segment_mask_BRK[..., None] & layout.loss_mask_BRH[:, :, None]
        return Picks.of(layout.loss_node_BRKH, layout.loss_target_BRH[:, :, None], keep_BRKH, layout.node_count, count)

    @staticmethod
    def last_continuations(layout: Layout, count: Count = None) -> Picks:
        """Those after the whole thought, `[B, R, H]`."""
        last_BR11 = (layout.segment_mask_BRK.sum(-1) - 1).clamp(min=0)[..., None, None]
        node_BRH = layout.loss_node_BRKH.take_along_dim(last_BR11, 2)[:, :, 0]
        keep_BRH = layout.segment_mask_BRK.any(-1)[..., None] & layout.loss_mask_BRH
        return Picks.of(node_BRH, layout.loss_target_BRH, keep_BRH, layout.node_count, count)

    def without_thought(self, layout: Layout, count: Count = None) -> Picks:
        """Of picked continuations `[B, R, H]`: the trunk nodes that predict the same tokens."""
        return Picks.of(layout.trunk_loss_node_BRH, layout.loss_target_BRH, self.keep, layout.node_count, count)

    @staticmethod
    def text(layout: Layout, count: Count = None) -> Picks:
        """The trunk nodes with a next token in their document, `[B, S]`."""
        target_BS = layout.text_target_BS
        node_BS = torch.arange(layout.trunk_width, device=target_BS.device).expand_as(target_BS)
        return Picks.of(node_BS, target_BS, target_BS >= 0, layout.node_count, count)

    def rows(self, hidden_BND: Tensor) -> Tensor:
        """Hidden states of the picked nodes, `[x, D]`."""
        return hidden_BND.flatten(0, 1).index_select(0, self.index)

    def spread(self, values: Tensor) -> Tensor:
        """Values of the picked nodes (`[x]` or `[x, D]`) in the full shape, 0 elsewhere."""
        full = values.new_zeros(self.keep.numel() + self.padding, *values.shape[1:])
        # Not by the mask: its backward pass would count it, and wait for the device.
        found = full.index_copy(0, self.place, values)
        found = found[:-1] if self.padding else found
        return found.view(*self.keep.shape, *values.shape[1:])
