"""Admission of gated reading: continuations of a small random layout, computed by the tree and by plain rows.

The plain side reads one continuation at a time: first the row of prefix and thought, whose keys and values are noted,
then the text alone, which from token p on reads them through open gates. Attention is spelled out, so that it shares
nothing with the engine's kernels and masks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tfive.rng import uniforms
from tfive.tree.attention import Attending, TreePass
from tfive.tree.forward import TreeModel
from tfive.tree.gated import ReadingGates
from tfive.tree.grow import grow
from tfive.tree.layout import CLOSE, PADDING, Layout, TextBatch, Thoughts


class _PlainRow(Attending):
    """Attention of one plain row: it notes the keys and values from `note_from` on, or reads them from `read_from`."""

    def __init__(self, gates: ReadingGates) -> None:
        super().__init__("spelled out")
        self.gates = gates
        self.noted: dict[int, tuple[Tensor, Tensor]] = {}
        self.note_from: int | None = None
        self.read_from: int | None = None

    def attend(
        self,
        layer: int,
        query_BYnE: Tensor,
        key_BXnE: Tensor,
        value_BXnE: Tensor,
        scale: float | None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        share, nodes = query_BYnE.shape[1] // key_BXnE.shape[1], query_BYnE.shape[2]
        key, value = key_BXnE.repeat_interleave(share, 1), value_BXnE.repeat_interleave(share, 1)
        scale = query_BYnE.shape[-1] ** -0.5 if scale is None else scale
        if self.note_from is not None:
            self.noted[layer] = (key[:, :, self.note_from :], value[:, :, self.note_from :])
        place_n = torch.arange(nodes, device=key.device)
        apart_nn = place_n[:, None] - place_n
        seen_nn = (apart_nn >= 0) & (apart_nn < (nodes if window is None else window))
        output = _softmax(query_BYnE, key, value, scale, cap, seen_nn)
        first = nodes if self.read_from is None else self.read_from
        if first < nodes and self.noted[layer][0].shape[2]:
            opening = torch.tanh(self.gates.gate_LY[layer]).to(output.dtype)[:, None, None]
            read = _softmax(query_BYnE[:, :, first:], *self.noted[layer], scale, cap)
            output = torch.cat([output[:, :, :first], output[:, :, first:] + opening * read], 2)
        return output.transpose(1, 2)


def _softmax(
    query: Tensor, key: Tensor, value: Tensor, scale: float, cap: float | None, seen: Tensor | None = None
) -> Tensor:
    scores = query @ key.transpose(-1, -2) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype) @ value


def _open_gates(tree: TreeModel) -> ReadingGates:
    """Gates between −1 and 1, a different one for every head."""
    gates = ReadingGates.of(tree.model)
    drawn = torch.from_numpy(uniforms(0, "probe", 2, torch.arange(len(gates.gate)).numpy()))
    gates.gate.data.copy_(2 * drawn - 1)
    return gates


def _chain(layout: Layout, row: int, node: int) -> list[int]:
    """The nodes from the document's start to `node`."""
    found = [node]
    while int(layout.parent_BN[row, found[-1]]) >= 0:
        found.append(int(layout.parent_BN[row, found[-1]]))
    return found[::-1]


def reading_pairs(tree: TreeModel, texts: TextBatch, thoughts: Thoughts, shift: int) -> list[tuple[Tensor, Tensor]]:
    """Final hidden states of every continuation's nodes, `[H, D]`, by the tree and by plain rows; `tree` is an engine
    whose reading may be inline, positions are moved by `shift`."""
    gates = _open_gates(tree)
    gated = TreeModel(tree.model, replace(tree.plan, gated=True), tree.engine, tree.delimiters, gates)
    layout = grow(texts.to(tree.device), gated.plan, thoughts.to(tree.device), "all")
    embeds_BND = gated.embed(layout.token_BN, layout.delimiter_BN)
    one_pass = TreePass(layout, gated.kernel, gates=gates)
    hidden_BND = gated.backbone.run(embeds_BND, layout.position_BN + shift, one_pass)

    def read(row: int, nodes: list[int], plain: _PlainRow) -> Tensor:
        position_1n = torch.arange(len(nodes), device=tree.device)[None] + shift
        return gated.backbone.run(embeds_BND[row, nodes][None], position_1n, plain)[0]

    pairs = []
    width, closing = layout.segment_width, layout.plan.close_width
    for row, branch, segment in layout.segment_mask_BRK.nonzero().tolist():
        prefix = _chain(layout, row, int(layout.position_BR[row, branch]))
        start = layout.thought_start + branch * layout.thought_width
        written = layout.plan.open_width + int(layout.checkpoint_BRK[row, branch, segment])
        own = layout.segment_start + (branch * layout.segment_count + segment) * width
        close = [node for node in range(own, own + closing) if layout.kind_BN[row, node] == CLOSE]
        after = [node for node in range(own + closing, own + width) if layout.kind_BN[row, node] != PADDING]
        plain = _PlainRow(gates)
        plain.note_from = len(prefix)
        read(row, [*prefix, *range(start, start + written), *close], plain)
        plain.note_from, plain.read_from = None, len(prefix) - 1
        pairs.append((hidden_BND[row, after], read(row, prefix[:-1] + after, plain)[len(prefix) - 1 :]))
    return pairs
