"""From texts and thoughts to a layout: each part of the row (trunk, thoughts, segments) is built whole, then joined."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor

from tfive.tree.layout import (
    CLOSE,
    CONTINUATION,
    OPEN,
    PADDING,
    TEXT,
    THOUGHT,
    Layout,
    TextBatch,
    ThoughtPlan,
    Thoughts,
)


@dataclass(frozen=True)
class _Nodes:
    """Nodes of one part of the row before they are joined: every field is `[B, n]`, named as in `Layout`."""

    token: Tensor
    delimiter: Tensor
    kind: Tensor
    document: Tensor
    position: Tensor
    parent: Tensor
    trunk_limit: Tensor
    branch: Tensor
    place: Tensor
    step_limit: Tensor
    segment: Tensor

    @staticmethod
    def of(exists: Tensor, token: Tensor, kind: Tensor, position: Tensor, **values: Tensor | None) -> _Nodes:
        """Flat nodes from broadcastable attributes; whatever does not exist becomes padding."""

        def flat(value: Tensor | None, otherwise: int) -> Tensor:
            if value is None:
                return exists.new_full(exists.shape, otherwise, dtype=torch.int64).flatten(1)
            return torch.where(exists, value, otherwise).flatten(1)

        nodes = {f.name: flat(values.get(f.name), -1) for f in fields(_Nodes)}
        nodes |= {"token": flat(token, 0), "kind": flat(kind, PADDING), "position": flat(position, 0)}
        return _Nodes(**nodes)


def _trunk(texts: TextBatch) -> _Nodes:
    index_S = torch.arange(texts.tokens_BS.shape[1], device=texts.tokens_BS.device)
    starts = torch.ones_like(texts.document_BS, dtype=torch.bool)
    starts[:, 1:] = texts.document_BS[:, 1:] != texts.document_BS[:, :-1]
    start_BS = torch.where(starts, index_S, 0).cummax(1).values
    return _Nodes.of(
        texts.document_BS >= 0,
        texts.tokens_BS,
        torch.full_like(texts.tokens_BS, TEXT),
        index_S - start_BS,
        document=texts.document_BS,
        parent=torch.where(starts, -1, index_S - 1),
        trunk_limit=index_S,
        place=index_S,
    )


def no_thoughts(rows: int, branches: int, plan: ThoughtPlan, device: torch.device | str) -> Thoughts:
    """Valid empty thoughts: the shape to sample into, and the *empty thought* of the controls."""
    length_BR = torch.zeros(rows, branches, dtype=torch.int64, device=device)
    tokens_BRT = length_BR.new_zeros(rows, branches, plan.length)
    log_q_BRT = torch.zeros(tokens_BRT.shape, device=device)
    return Thoughts(tokens_BRT, length_BR, length_BR == 0, length_BR != 0, log_q_BRT)


def full_thoughts(texts: TextBatch, plan: ThoughtPlan) -> Thoughts:
    """Thoughts of full length at every position, not written yet."""
    rows, count = texts.positions_BP.shape
    empty = no_thoughts(rows, count * plan.group, plan, texts.positions_BP.device)
    return replace(empty, length_BR=torch.full_like(empty.length_BR, plan.length))


def small_texts(vocabulary: int) -> TextBatch:
    """Two short texts without positions, to try a model on."""
    tokens_BS = torch.arange(48).view(2, 24) % vocabulary
    return TextBatch(tokens_BS, torch.zeros_like(tokens_BS), tokens_BS[:, :0], tokens_BS[:, :0])


def grow(
    texts: TextBatch,
    plan: ThoughtPlan,
    thoughts: Thoughts | None = None,
    segments: str = "none",
    position_BR: Tensor | None = None,
) -> Layout:
    """The layout of `texts` with the branches of `thoughts` (none: the trunk alone) and the segments asked for.

    `segments` is `none` (actor and critics: no scoring text in the row), `last` (only after the whole thought), `first`
    (the same, behind the first thought of each group alone) or `all` (every checkpoint τ < L and L itself).
    `position_BR` overrides the trunk index of each branch, for rows that carry only some of the branches.
    """
    device, (rows, width) = texts.tokens_BS.device, texts.tokens_BS.shape
    if thoughts is None:
        thoughts = no_thoughts(rows, 0, plan, device)
        position_BR = thoughts.length_BR
    if position_BR is None:
        position_BR = texts.positions_BP.repeat_interleave(plan.group, 1)
    if position_BR.shape != thoughts.length_BR.shape or thoughts.tokens_BRT.shape[-1] != plan.length:
        raise ValueError(f"branches {tuple(position_BR.shape)} and thoughts {tuple(thoughts.tokens_BRT.shape)} differ")
    position_BR = torch.where(thoughts.valid_BR, position_BR, -1)
    trunk = _trunk(texts)
    thought_nodes, action_reads = _thoughts(trunk, plan, thoughts, position_BR)
    every = plan.group if segments == "first" else 1
    segment_nodes, loss_reads = _segments(trunk, plan, thoughts, position_BR, segments, every)
    parts = (trunk, thought_nodes, segment_nodes)
    columns = {f"{f.name}_BN": torch.cat([getattr(part, f.name) for part in parts], 1) for f in fields(_Nodes)}
    return Layout(
        plan=plan,
        trunk_width=width,
        branch_count=position_BR.shape[1],
        segment_count=loss_reads["checkpoint_BRK"].shape[-1],
        segment_every=every,
        position_BR=position_BR,
        length_BR=torch.where(position_BR >= 0, thoughts.length_BR, 0),
        **columns,
        **action_reads,
        **loss_reads,
    )


def _at(values_BS: Tensor, index: Tensor) -> Tensor:
    """`values_BS[b, index[b, …]]`, negative indices read at 0."""
    return values_BS.gather(1, index.clamp(min=0).flatten(1)).view(index.shape)


@cache
def _numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """These numbers on the device; kept, since moving them there waits for the host. Nobody may change them."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def _delimiter_tokens(ids: tuple[int, ...], learned: bool, device: torch.device) -> Tensor:
    return _numbers(ids[:1] if learned else ids, device)


def _thoughts(
    trunk: _Nodes, plan: ThoughtPlan, thoughts: Thoughts, position_BR: Tensor
) -> tuple[_Nodes, dict[str, Tensor]]:
    device, (rows, branches) = position_BR.device, position_BR.shape
    opening, width, steps = plan.open_width, plan.open_width + plan.length, plan.length
    place_A = torch.arange(width, device=device)
    branch_R1 = torch.arange(branches, device=device)[:, None]
    present_BR1, length_BR1 = (position_BR >= 0)[..., None], thoughts.length_BR[..., None]
    own_node_RA = trunk.token.shape[1] + branch_R1 * width + place_A
    open_O = _delimiter_tokens(plan.open_ids, plan.learned, device).expand(rows, branches, -1)
    is_close = thoughts.closed_BR[..., None] & (place_A - opening == length_BR1 - 1)
    learned = torch.where(place_A < opening, 0, torch.where(is_close, 1, -1)) if plan.learned else None
    previous_BRA = torch.where(place_A == 0, position_BR[..., None], own_node_RA - 1)
    nodes = _Nodes.of(
        present_BR1 & (place_A < opening + length_BR1),
        torch.cat([open_O, thoughts.tokens_BRT], -1),
        torch.where(place_A < opening, OPEN, THOUGHT),
        _at(trunk.position, position_BR)[..., None] + 1 + place_A,
        delimiter=learned,
        document=_at(trunk.document, position_BR)[..., None],
        parent=previous_BRA,
        trunk_limit=position_BR[..., None],
        branch=branch_R1,
        place=place_A,
        step_limit=place_A,
    )
    action_mask_BRT = present_BR1 & (torch.arange(steps, device=device) < length_BR1)
    action_node_BRT = torch.where(action_mask_BRT, previous_BRA[..., opening:], 0)
    return nodes, {"action_node_BRT": action_node_BRT, "action_mask_BRT": action_mask_BRT}


def _checkpoints(plan: ThoughtPlan, length_BR: Tensor, segments: str) -> tuple[Tensor, Tensor]:
    """τ of every segment and whether it exists: the configured τ < L, then L."""
    if segments == "none":
        return length_BR[..., None][..., :0], length_BR[..., None][..., :0].bool()
    if segments in ("last", "first"):
        return length_BR[..., None], torch.ones_like(length_BR, dtype=torch.bool)[..., None]
    if segments != "all":
        raise ValueError(f"segments must be none, last, first or all, not {segments!r}")
    planned_K = _numbers(plan.checkpoints, length_BR.device)
    before_K = _numbers((-1, *plan.checkpoints[:-1]), length_BR.device)
    return torch.minimum(planned_K, length_BR[..., None]), before_K < length_BR[..., None]


def segment_counts(plan: ThoughtPlan, length_BR: Tensor, segments: str) -> Tensor:
    """int64 `[B, R]`: how many segments stand behind thoughts of these lengths at positions that exist."""
    return _checkpoints(plan, length_BR, segments)[1].sum(-1)


def _continuations(
    token_BS: Tensor, document_BS: Tensor, position_BR: Tensor, horizon: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The trunk node before each of the `horizon` tokens after a position, the token, and whether it is one of the
    position's document, each `[B, R, H]` (0 where it is not)."""
    width = token_BS.shape[1]
    ahead_BRH = position_BR[..., None] + 1 + torch.arange(horizon, device=position_BR.device)
    inside = ahead_BRH.clamp(max=width - 1)
    own_BR1 = _at(document_BS, position_BR)[..., None]
    keep_BRH = (position_BR >= 0)[..., None] & (ahead_BRH < width) & (_at(document_BS, inside) == own_BR1)
    return torch.where(keep_BRH, ahead_BRH - 1, 0), torch.where(keep_BRH, _at(token_BS, inside), 0), keep_BRH


def without_thoughts(texts: TextBatch, horizon: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where the trunk alone predicts each position's continuation: its nodes, the tokens, and which exist, `[B, P, H]`.

    The same as in the layout of any thoughts at these positions, without growing one.
    """
    document_BS = torch.where(texts.document_BS >= 0, texts.document_BS, -1)
    return _continuations(texts.tokens_BS, document_BS, texts.positions_BP, horizon)


def _segments(
    trunk: _Nodes, plan: ThoughtPlan, thoughts: Thoughts, position_BR: Tensor, segments: str, every: int
) -> tuple[_Nodes, dict[str, Tensor]]:
    """The segments of the branches 0, `every`, 2·`every`, …; R counts those branches alone."""
    start = trunk.token.shape[1] + position_BR.shape[1] * (plan.open_width + plan.length)
    owner_R1 = torch.arange(0, position_BR.shape[1], every, device=position_BR.device)[:, None]
    thoughts, position_BR = thoughts.branches(0, None, every), position_BR[:, ::every]
    device, (rows, branches), width = position_BR.device, position_BR.shape, trunk.token.shape[1]
    opening, closing, horizon = plan.open_width, plan.close_width, plan.horizon
    present_BR = position_BR >= 0
    checkpoint_BRK, exists_BRK = _checkpoints(plan, thoughts.length_BR, segments)
    exists_BRK = exists_BRK & present_BR[..., None]
    count, span = exists_BRK.shape[-1], plan.segment_width

    before_BRH, target_BRH, loss_mask_BRH = _continuations(trunk.token, trunk.document, position_BR, horizon)
    document_BR1 = _at(trunk.document, position_BR)[..., None]
    branch_R1, place_W = torch.arange(branches, device=device)[:, None], torch.arange(span, device=device)
    segment_RK = branch_R1 * count + torch.arange(count, device=device)
    own_node_RKW = start + segment_RK[..., None] * span + place_W
    last_BRK = opening + checkpoint_BRK - 1
    thought_node_BRK = width + owner_R1 * (opening + plan.length) + last_BRK
    fork_BRK = torch.where(last_BRK >= 0, thought_node_BRK, position_BR[..., None])
    needs_close_BRK = ~(thoughts.closed_BR[..., None] & (checkpoint_BRK == thoughts.length_BR[..., None]))
    close_BRK1 = (needs_close_BRK & (closing > 0))[..., None]
    is_close_W = place_W < closing

    def after_close(closes: Tensor, continuation_BRx: Tensor) -> Tensor:
        ahead_BRKx = continuation_BRx[:, :, None].expand(-1, -1, count, -1)
        return torch.cat([closes.expand(rows, branches, count, closing), ahead_BRKx], -1)

    parent = torch.where((place_W == 0) | ((place_W == closing) & ~close_BRK1), fork_BRK[..., None], own_node_RKW - 1)
    skipped = torch.where(close_BRK1, 0, closing)
    at_p_BR11 = _at(trunk.position, position_BR)[..., None, None]
    position = at_p_BR11 + 2 + last_BRK[..., None] + place_W - skipped
    trunk_limit, step_limit = position_BR[..., None, None], last_BRK[..., None]
    token_BRx, read_BRx = target_BRH[..., :-1], loss_mask_BRH[..., :-1]
    if plan.gated:
        # As without a thought, from token p on: it is read once more, so that the first prediction can use the thought.
        token_BRx, read_BRx = torch.cat([_at(trunk.token, position_BR)[..., None], token_BRx], -1), loss_mask_BRH
        parent = torch.where(place_W == closing, _at(trunk.parent, position_BR)[..., None, None], parent)
        position = torch.where(is_close_W, position, at_p_BR11 + place_W - closing)
        trunk_limit = torch.where(is_close_W, trunk_limit, trunk_limit - 1)
        step_limit = torch.where(is_close_W, step_limit, -1)
    nodes = _Nodes.of(
        exists_BRK[..., None] & after_close(close_BRK1, read_BRx),
        after_close(_delimiter_tokens(plan.close_ids, plan.learned, device), token_BRx),
        torch.where(is_close_W, CLOSE, CONTINUATION),
        position,
        delimiter=torch.where(is_close_W & plan.learned, 1, -1),
        document=document_BR1[..., None],
        parent=parent,
        trunk_limit=trunk_limit,
        branch=owner_R1[..., None],
        place=place_W,
        step_limit=step_limit,
        segment=segment_RK[..., None],
    )
    loss_node_BRKH = own_node_RKW[..., closing:].expand(rows, -1, -1, -1)
    if not plan.gated:
        first = torch.where(close_BRK1, own_node_RKW[..., :1] + closing - 1 if span else 0, fork_BRK[..., None])
        loss_node_BRKH = torch.cat([first, loss_node_BRKH], -1)
    kept = exists_BRK[..., None] & loss_mask_BRH[:, :, None]
    return nodes, {
        "checkpoint_BRK": torch.where(exists_BRK, checkpoint_BRK, 0),
        "segment_mask_BRK": exists_BRK,
        "loss_node_BRKH": torch.where(kept, loss_node_BRKH, 0),
        "trunk_loss_node_BRH": before_BRH,
        "loss_target_BRH": target_BRH,
        "loss_mask_BRH": loss_mask_BRH,
    }
