"""The pass of a sampling step: one query of every branch, keys and values in slots that stay where they are.

Local shape letters: m slots, the S trunk nodes followed by the R·A branch nodes; X key/value heads, E head features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfive.tree.attention import SHORT, Attending, KeysValues
from tfive.tree.fast.delta_step import BranchSteps
from tfive.tree.fast.fused import Heads, Ops
from tfive.tree.fast.hf_fused import Fusion
from tfive.tree.fast.listed import Listed
from tfive.tree.fast.replayed import copy_all
from tfive.tree.layout import Layout
from tfive.tree.outputs import Reading
from tfive.tree.recurrent.deltanet import StepRecurrence


class StepPass(Attending):
    """The pass of one sampling step: one query per branch, keys and values in fixed slots."""

    def __init__(
        self, layout: Layout, reading: Reading, kernel: str, fusion: Fusion | None = None, lists: bool = False
    ) -> None:
        """`lists`: steps may be of listed branches."""
        recurrence: BranchSteps | StepRecurrence | None = None
        if reading.recurrent:
            asked = (reading.recurrent, layout.position_BR.numel(), layout.thought_width)
            recurrence = (None if fusion is None else fusion.steps(*asked)) or StepRecurrence(*asked)
        super().__init__(kernel, recurrence)
        self.states = recurrence
        own = layout.branch_count * layout.thought_width
        self.width, self.stride = layout.trunk_width, layout.thought_width
        self.slots = {i: (_room(k, own, lists), _room(v, own, lists)) for i, (k, v) in reading.attention.items()}
        rows, device = len(layout.token_BN), layout.token_BN.device
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.first_slot_R = self.width + torch.arange(layout.branch_count, device=device) * self.stride
        self.slot_place_m = torch.cat(
            [
                torch.full((self.width,), -1, device=device),
                torch.arange(self.stride, device=device).repeat(layout.branch_count),
            ]
        )
        self.slot_position_Bm = torch.zeros(rows, len(self.slot_place_m), dtype=torch.int64, device=device)
        self.position_BR, self.first_BR, self.stop_BR = (
            torch.zeros(layout.position_BR.shape, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.listed: Listed | None = None
        """The branches that a step of fused blocks computes, where not all."""
        self.trunk_BRS = torch.zeros(*layout.position_BR.shape, self.width, dtype=torch.bool, device=device)
        self.exists_BR = torch.zeros(layout.position_BR.shape, dtype=torch.bool, device=device)

    def begin(self, layout: Layout, reading: Reading) -> None:
        """Take over a freshly read trunk of the same shape; every branch stands at its trunk node again, and all are
        computed."""
        self.listed = None
        slots = [buffer[:, :, : self.width] for buffers in self.slots.values() for buffer in buffers]
        copy_all(slots, (trunk for index in self.slots for trunk in reading.attention[index]))
        if self.states is not None:
            self.states.begin(reading.recurrent)
        # All nodes of a branch see the same of the trunk; documents are contiguous, so it is one stretch.
        index_S = torch.arange(self.width, device=self.place.device)
        self.trunk_BRS.copy_(layout.mask_of(self.first_slot_R, None, index_S))
        self.exists_BR.copy_(layout.position_BR >= 0)
        self.first_BR.copy_(torch.where(self.trunk_BRS, index_S, self.width).amin(-1))
        self.stop_BR.copy_(torch.where(self.trunk_BRS, index_S + 1, 0).amax(-1))
        self.slot_position_Bm.copy_(layout.position_BN)
        self.position_BR.copy_(layout.position_BN[:, self.first_slot_R])
        self.place.zero_()

    def visible(self, window: int | None) -> Tensor:
        trunk_BRS, own_BRA = self._seen(window)
        branches = len(self.first_slot_R)
        mine_BRRA = torch.eye(branches, dtype=torch.bool, device=trunk_BRS.device)[..., None] & own_BRA[:, :, None]
        return _some(torch.cat([trunk_BRS, mine_BRRA.flatten(2)], -1))[:, None]

    def _seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """What each branch sees of the trunk `[B, R, S]` and of its own slots `[B, R, A]`."""
        trunk_BRS = self.trunk_BRS
        own_BRA = self.exists_BR[..., None] & (torch.arange(self.stride, device=self.place.device) <= self.place)
        if window is not None:
            depth_BR1, position_Bm = (self.position_BR + self.place)[..., None], self.slot_position_Bm
            trunk_BRS = trunk_BRS & (depth_BR1 - position_Bm[:, None, : self.width] < window)
            position_BRA = position_Bm[:, self.width :].unflatten(1, (len(self.first_slot_R), self.stride))
            own_BRA = own_BRA & (depth_BR1 - position_BRA < window)
        return trunk_BRS, own_BRA

    def _attend_masked(
        self, query_BYnE: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """As all passes do it; many branches by two products, with the trunk's keys and with each branch's own, so that
        no branch is asked for the slots of the others."""
        count, heads = len(self.first_slot_R), key.shape[1]
        if count * self.stride <= max(2 * self.width, SHORT):
            return super()._attend_masked(query_BYnE, key, value, scale, window, cap)
        seen_BRm = self._once(("apart", window), lambda: _some(torch.cat(self._seen(window), -1)))
        query_BXFRE = query_BYnE.unflatten(1, (heads, -1))
        fold = query_BXFRE.shape[2]

        def own(slots: Tensor) -> Tensor:
            """A branch's own slots, `[B, X, R, A, E]`."""
            return slots[:, :, self.width :].unflatten(2, (count, self.stride))

        of_trunk = query_BXFRE.flatten(2, 3) @ key[:, :, : self.width].transpose(-1, -2)
        of_own = (query_BXFRE.transpose(2, 3) @ own(key).transpose(-1, -2)).transpose(2, 3)
        scores = torch.cat([of_trunk.unflatten(2, (fold, count)), of_own], -1) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weight = scores.masked_fill(~seen_BRm[:, None, None], float("-inf")).softmax(-1, dtype=wide).to(value.dtype)
        on_trunk, on_own = weight[..., : self.width], weight[..., self.width :]
        read = (on_trunk.flatten(2, 3) @ value[:, :, : self.width]).unflatten(2, (fold, count))
        read = read + (on_own.transpose(2, 3) @ own(value)).transpose(2, 3)
        return read.flatten(1, 2).transpose(1, 2)

    def extend(self, layer: int, key_BXRE: Tensor, value_BXRE: Tensor) -> KeysValues:
        key, value = self.slots[layer]
        key.index_copy_(2, self._taken_R(), key_BXRE.to(key.dtype))
        value.index_copy_(2, self._taken_R(), value_BXRE.to(value.dtype))
        return key, value

    def _taken_R(self) -> Tensor:
        """The slots this step writes."""
        return self._once("taken", lambda: self.first_slot_R + self.place)

    def room(self, layer: int, like_BnD: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query_BRYE = like_BnD.new_empty(*like_BnD.shape[:2], heads.queries, heads.features)
        key, value = self.slots[layer]
        if self.listed is None:
            return query_BRYE, key, value, self._taken_R()
        index_x, branches = self.listed.index_x, len(self.first_slot_R)
        slot_x = self._once(
            "listed", lambda: index_x // branches * len(self.slot_place_m) + self._taken_R()[index_x % branches]
        )
        return query_BRYE, _joined(key), _joined(value), slot_x

    def attend_written(
        self, ops: Ops, layer: int, query_BnYE: Tensor, key: Tensor, value: Tensor, scale: float, gate_xq: Tensor | None
    ) -> Tensor:
        seen = (self.first_BR, self.stop_BR, self.place, self.width)
        if self.listed is not None:
            key, value = self.slots[layer]
        return ops.attend(query_BnYE, key, value, *seen, scale, gate_xq, self.listed)

    def advance(self) -> None:
        """On to the next place; outside the captured step."""
        self.place.add_(1)
        if self.states is not None:
            self.states.advance()

    def forget_masks(self) -> None:
        """The next step's masks and slots differ: they depend on the place."""
        self._masks.clear()


def _some(seen_BRm: Tensor) -> Tensor:
    """A branch that does not exist still asks: it sees one slot rather than none."""
    first_m = torch.arange(seen_BRm.shape[-1], device=seen_BRm.device) == 0
    return seen_BRm | (~seen_BRm.any(-1, keepdim=True) & first_m)


def _room(trunk_BXSE: Tensor, own: int, lists: bool) -> Tensor:
    """Slots of a layer, `[B, X, m, E]`; for lists head by head, so that `_joined` copies nothing."""
    rows, heads, width, features = trunk_BXSE.shape
    if not lists:
        return trunk_BXSE.new_zeros(rows, heads, width + own, features)
    text = (width + own) * features
    shape, strides = (rows, heads, width + own, features), (text, rows * text, features, 1)
    # No view of another tensor, so that steps may write to it in any mode of autograd.
    return trunk_BXSE.new_empty_strided(shape, strides).zero_()


def _joined(slots_BXmE: Tensor) -> Tensor:
    """The same as slots of one text, `[1, X, B·m, E]`."""
    return slots_BXmE.transpose(0, 1).flatten(1, 2)[None]
