"""Attention of one pass over tree rows: its queries, the keys they see, the kernel that computes it.

A pass is handed through every layer of the model. `Attending` is what all passes share; `TreePass` covers whole rows,
the trunk alone, or the branches of a trunk that was read before. The sampling step has its own pass, `step_pass.py`.

Local shape letters: Y query heads, X key/value heads, E head features, n queries, m keys, F = Y / X the fold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.tree.fast.fused import Heads, Ops, output_gate
from tfive.tree.fast.replayed import copy_all
from tfive.tree.fast.tiled import Tiles, tiled
from tfive.tree.gated import GatedReading, ReadingGates
from tfive.tree.layout import Layout

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, each `[B, X, m, E]`."""


class Recurrence(Protocol):
    """What recurrent layers need of a pass; see `recurrent/deltanet.py`."""

    def mix(self, parts: Any, hidden_BND: Tensor) -> Tensor:
        """The recurrent layer's output for the pass's nodes."""


class Attending:
    """A pass as attention layers see it. Masks are built once a pass and window, and shared by all layers."""

    angles: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of its nodes, each `[B, n, t]`, where the model need not compute them."""

    def __init__(self, kernel: str, recurrence: Recurrence | None = None) -> None:
        self.kernel, self.recurrence = kernel, recurrence
        self._masks: dict[Any, Any] = {}

    def visible(self, window: int | None) -> Tensor:
        """bool `[B, 1, n, m]`: which keys each query sees."""
        raise TypeError("this pass has no mask: override visible")

    def tiles(self, window: int | None) -> Tiles:
        """The same as tiled attention reads it."""
        return Tiles.of(self.visible(window)[:, 0])

    def blocks(self, window: int | None) -> Any:
        """The same as a FlexAttention block mask."""
        raise TypeError("this pass has no block mask")

    def extend(self, layer: int, key_BXnE: Tensor, value_BXnE: Tensor) -> KeysValues:
        """All keys and values the queries may see, given those of the pass's own nodes."""
        raise TypeError("this pass has no keys: override extend")

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
        """Attention output `[B, n, Y, E]`; `window` bounds the depth apart, `cap` soft-caps the scores."""
        return self.among(query_BYnE, *self.extend(layer, key_BXnE, value_BXnE), scale, window, cap)

    def among(
        self,
        query_BYnE: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """The same given all keys and values that the queries may see."""
        if scale is None:
            scale = query_BYnE.shape[-1] ** -0.5
        if self.kernel == "flex":
            blocks = self._once(("blocks", window), lambda: self.blocks(window))
            output: Tensor = _flex(query_BYnE, key, value, blocks, scale, cap).transpose(1, 2)
            return output
        if cap is None and self.kernel == "tiled":
            tiles = self._once(("tiles", window), lambda: self.tiles(window))
            return tiled(query_BYnE, key, value, tiles, scale)
        return self._attend_masked(query_BYnE, key, value, scale, window, cap)

    def _attend_masked(
        self, query_BYnE: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """Attention output `[B, n, Y, E]` by kernels that ask every query for every key, seen or not."""
        return self.masked(query_BYnE, key, value, scale, cap, window, lambda: self.visible(window))

    def masked(
        self,
        query_BYnE: Tensor,
        key_BXmE: Tensor,
        value_BXmE: Tensor,
        scale: float,
        cap: float | None,
        name: Any,
        seen: Callable[[], Tensor],
    ) -> Tensor:
        """Attention output `[B, n, Y, E]` of queries that see the keys `seen`, bool `[B, 1, n, m]`, which is asked for
        once a pass under this name."""
        fold, dtype = query_BYnE.shape[1] // key_BXmE.shape[1], query_BYnE.dtype
        if cap is None and self.kernel == "sdpa":
            key, value = key_BXmE.repeat_interleave(fold, 1), value_BXmE.repeat_interleave(fold, 1)
            return _masked(query_BYnE, key, value, self._once(("seen", name), seen), scale).transpose(1, 2)
        bias = self._once(("bias", name, fold, dtype), lambda: additive(seen(), dtype, fold))
        if cap is not None:
            return _capped(query_BYnE, key_BXmE, value_BXmE, bias, scale, cap).transpose(1, 2)
        return _folded(query_BYnE, key_BXmE, value_BXmE, bias, scale).transpose(1, 2)

    def room(self, layer: int, like_BnD: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Where fused blocks write what they project: queries `[B, n, Y, E]`, keys and values `[B, X, m, E]`, and the
        slots `[n]` of the pass's nodes in the latter."""
        (rows, nodes), features = like_BnD.shape[:2], heads.features
        slot_n = self._once("slots", lambda: torch.arange(nodes, device=like_BnD.device))
        # Head by head, so that folding queries onto their keys copies nothing.
        query_BYnE = like_BnD.new_empty(rows, heads.queries, nodes, features)
        key, value = (like_BnD.new_empty(rows, heads.keys, nodes, features) for _ in range(2))
        return query_BYnE.transpose(1, 2), key, value, slot_n

    def attend_written(
        self, ops: Ops, layer: int, query_BnYE: Tensor, key: Tensor, value: Tensor, scale: float, gate_xq: Tensor | None
    ) -> Tensor:
        """Attention output `[B, n, Y, E]` once queries, keys and values are in their `room`."""
        return _opened(self.attend(layer, query_BnYE.transpose(1, 2), key, value, scale), gate_xq)

    def _once(self, name: Any, make: Callable[[], Any]) -> Any:
        if name not in self._masks:
            self._masks[name] = make()
        return self._masks[name]


def additive(seen_B1nm: Tensor, dtype: torch.dtype, fold: int = 1) -> Tensor:
    """0 where seen, −∞ elsewhere, rows repeated `fold` times.

    Rows are laid out 16 entries apart: fused kernels copy a mask whose rows are not aligned, once per layer.
    """
    rows, _, queries, keys = seen_B1nm.shape
    bias = torch.full((rows, fold, queries, -(-keys // 16) * 16), float("-inf"), dtype=dtype, device=seen_B1nm.device)
    bias[..., :keys].masked_fill_(seen_B1nm, 0)
    return bias.view(rows, 1, fold * queries, -1)[..., :keys]


def _fold(query_BYnE: Tensor, heads: int) -> Tensor:
    """Queries of the Y / X heads that share a key head, laid one after the other, `[B, X, F·n, E]`."""
    rows, total, queries, features = query_BYnE.shape
    return query_BYnE.reshape(rows, heads, total // heads * queries, features)


def _masked(query_BYnE: Tensor, key_BYmE: Tensor, value_BYmE: Tensor, mask_B1nm: Tensor, scale: float) -> Tensor:
    """Masked attention by the kernel that torch takes for it, but never by one whose gradient can be no number."""
    # On Hopper torch 2.11 and later prefer cuDNN. With a mask and half a tile of 128 keys left over, its backward pass
    # (cuDNN 9.20, pytorch issue 196678) gives NaN in the queries of rows whose scores are all below about −89, and
    # trained models have such rows.
    if torch.is_grad_enabled() and key_BYmE.shape[2] % 128 == 64:
        with without_cudnn():
            return F.scaled_dot_product_attention(query_BYnE, key_BYmE, value_BYmE, attn_mask=mask_B1nm, scale=scale)
    return F.scaled_dot_product_attention(query_BYnE, key_BYmE, value_BYmE, attn_mask=mask_B1nm, scale=scale)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Attention is not computed by cuDNN inside; every other kernel stays as the process has it."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


def _folded(query_BYnE: Tensor, key_BXmE: Tensor, value_BXmE: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Masked attention in which grouped queries share their keys and values instead of repeating them."""
    folded = _fold(query_BYnE, key_BXmE.shape[1])
    output = _masked(folded, key_BXmE, value_BXmE, bias, scale)
    return output.reshape(*query_BYnE.shape[:-1], -1)


def _capped(query_BYnE: Tensor, key_BXmE: Tensor, value_BXmE: Tensor, bias: Tensor, scale: float, cap: float) -> Tensor:
    """Masked attention with soft-capped scores, spelled out (no fused kernel takes a cap)."""
    folded = _fold(query_BYnE, key_BXmE.shape[1])
    scores = cap * torch.tanh(folded @ key_BXmE.transpose(-1, -2) * (scale / cap)) + bias
    wide = torch.promote_types(scores.dtype, torch.float32)
    output = scores.softmax(-1, dtype=wide).to(value_BXmE.dtype) @ value_BXmE
    return output.reshape(*query_BYnE.shape[:-1], -1)


_compiled_flex: list[Callable[..., Tensor]] = []


def _flex(query: Tensor, key: Tensor, value: Tensor, blocks: Any, scale: float, cap: float | None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    attention: Callable[..., Any] = flex_attention
    if query.device.type == "cuda":
        if not _compiled_flex:
            _compiled_flex.append(torch.compile(flex_attention, dynamic=False))
        attention = _compiled_flex[0]

    def soften(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)  # type: ignore[operator]

    grouped = query.shape[1] != key.shape[1]
    return attention(
        query, key, value, score_mod=soften if cap else None, block_mask=blocks, scale=scale, enable_gqa=grouped
    )


SHORT, PART = 1024, 256
"""Rows with fewer nodes beside their text are not worth parts; parts have at least so many, or twice their text's."""

Nodes = tuple[slice, ...]
"""Stretches of a row's nodes."""


def branch_parts(layout: Layout, most: int) -> list[Nodes]:
    """The nodes of all branches, thoughts and segments, in parts of at most `most` nodes each, but of one branch at
    least (of one group, where only its first branch has segments)."""
    count, wide, every = layout.branch_count, layout.thought_width, layout.segment_every
    scored = layout.segment_count * layout.segment_width
    step = max(1, most // (every * wide + scored)) * every
    parts: list[Nodes] = []
    for first in range(0, count, step):
        last = min(count, first + step)
        nodes = [slice(layout.thought_start + first * wide, layout.thought_start + last * wide)]
        if scored:
            one, two = (layout.segment_start + -(-at // every) * scored for at in (first, last))
            nodes.append(slice(one, two))
        parts.append(tuple(nodes))
    return parts


def _opened(output_BnYE: Tensor, gate_xq: Tensor | None) -> Tensor:
    """Attention's output through the gate of layers that have one."""
    if gate_xq is None:
        return output_BnYE
    return output_BnYE * output_gate(gate_xq, output_BnYE.shape[2]).view(output_BnYE.shape)


class TreePass(Attending):
    """A pass over all nodes of a layout, or, given the trunk's keys and values, over its branches alone.

    With `keep`, the trunk's keys and values of every attention layer are left in `kept`. `gates` are needed where the
    plan's reading is gated and there are continuations.
    """

    def __init__(
        self,
        layout: Layout,
        kernel: str = "folded",
        trunk: dict[int, KeysValues] | None = None,
        keep: bool = False,
        recurrence: Recurrence | None = None,
        gates: ReadingGates | None = None,
    ) -> None:
        super().__init__(kernel, recurrence)
        self.layout, self.trunk, self.keep = layout, trunk, keep
        self.start = layout.trunk_width if trunk is not None else 0
        self.kept: dict[int, KeysValues] = {}
        self.reading: GatedReading | None = None
        if layout.plan.gated and layout.segments:
            if gates is None:
                raise ValueError("gated reading of continuations needs a ReadingGates module")
            self.reading = GatedReading(layout, self.start, gates)

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
        output_BnYE = super().attend(layer, query_BYnE, key_BXnE, value_BXnE, scale, window, cap)
        if self.reading is None:
            return output_BnYE
        return self.reading.onto(output_BnYE, layer, query_BYnE, key_BXnE, value_BXnE, scale, cap)

    def _attend_masked(
        self, query_BYnE: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """As all passes do it; a row with many branches a few branches at a time, so that time and memory grow with
        their number and not with its square."""
        twice = 2 * self.layout.trunk_width
        parts = branch_parts(self.layout, most=max(twice, min(SHORT, PART)))
        if len(parts) <= 1 or self.layout.node_count - self.layout.trunk_width <= max(twice, SHORT):
            return super()._attend_masked(query_BYnE, key, value, scale, window, cap)
        width, start = self.layout.trunk_width, self.start
        node_N = torch.arange(self.layout.node_count, device=query_BYnE.device)

        def of(nodes: Nodes, window: int | None = window) -> Tensor:
            """Attention output of these nodes, which see the trunk and one another."""
            asked, beside = [node_N[one] for one in nodes], [] if nodes[0].start == 0 else [slice(0, width)]
            query_n, seen_m = torch.cat(asked), torch.cat([node_N[one] for one in (*beside, *nodes)])
            own = torch.cat([query_BYnE[:, :, one.start - start : one.stop - start] for one in nodes], 2)
            keys, values = (torch.cat([x[:, :, one] for one in (*beside, *nodes)], 2) for x in (key, value))
            name = (window, nodes[0].start)
            return self.masked(
                own, keys, values, scale, cap, name, lambda: self.layout.mask_of(query_n, window, seen_m)[:, None]
            )

        trunk = [] if start else [of((slice(0, width),))]
        found = [of(part).split([one.stop - one.start for one in part], 1) for part in parts]
        thoughts, segments = [some[0] for some in found], [some[1] for some in found if len(some) > 1]
        return torch.cat([*trunk, *thoughts, *segments], 1)

    def visible(self, window: int | None) -> Tensor:
        return self.layout.mask(self.start, window)

    def tiles(self, window: int | None) -> Tiles:
        return Tiles.between(self.layout, self.start, window)

    def room(self, layer: int, like_BnD: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.trunk is None or self.reading is not None:
            return super().room(layer, like_BnD, heads)
        # Behind the trunk's, so that only those are copied.
        (rows, nodes), kept = like_BnD.shape[:2], self.trunk[layer]
        joined = [like_BnD.new_empty(rows, heads.keys, self.start + nodes, heads.features) for _ in kept]
        copy_all((one[:, :, : self.start] for one in joined), kept)
        slot_n = self._once("behind", lambda: self.start + torch.arange(nodes, device=like_BnD.device))
        query_BYnE = like_BnD.new_empty(rows, heads.queries, nodes, heads.features)
        return query_BYnE.transpose(1, 2), joined[0], joined[1], slot_n

    def attend_written(
        self, ops: Ops, layer: int, query_BnYE: Tensor, key: Tensor, value: Tensor, scale: float, gate_xq: Tensor | None
    ) -> Tensor:
        if self.trunk is None or self.reading is not None:
            return super().attend_written(ops, layer, query_BnYE, key, value, scale, gate_xq)
        return _opened(self.among(query_BnYE.transpose(1, 2), key, value, scale), gate_xq)

    def blocks(self, window: int | None) -> Any:
        return self.layout.block_mask(self.start, window)

    def extend(self, layer: int, key_BXnE: Tensor, value_BXnE: Tensor) -> KeysValues:
        if self.trunk is not None:
            trunk_key, trunk_value = self.trunk[layer]
            return torch.cat([trunk_key, key_BXnE], 2), torch.cat([trunk_value, value_BXnE], 2)
        if self.keep:
            width = self.layout.trunk_width
            self.kept[layer] = (key_BXnE[:, :, :width], value_BXnE[:, :, :width])
        return key_BXnE, value_BXnE
