"""Gated reading of thoughts (`thought.reading = gated`): a thought that can help and, with shut gates, cannot harm.

Continuation nodes keep the positions they have without a thought and attend to prefix and continuation as without it.
To the thought, delimiters included, every head attends by a second softmax over its keys alone, and tanh(g) of what
that gives is added to the head's output before the output projection. g is learned, one number per layer and head; it
starts at 0, where the model predicts what it predicts without thoughts. The thought is read whole: a sliding window
bounds how far text looks back, not what is read here; a soft cap on attention scores holds here too.

Local shape letters beside those of `layout.py` and `attention.py`: L layers, s segments of a row, t = A + C nodes of a
thought with its close.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tfive.tree.layout import CLOSE, Layout

GATES = "reading_gates."
"""What the names of gates begin with among the parameters of a run."""


def recurrent_refusal(name: str) -> str:
    """Why a model with recurrent layers is not read by gates."""
    return (
        f"thought.reading = gated: {name} has recurrent layers, which cannot read a thought through gates; "
        "set thought.reading = inline"
    )


class ReadingGates(nn.Module):
    """g: how far each head of each layer reads thoughts; 0 is shut."""

    def __init__(self, layers: int, heads: int) -> None:
        super().__init__()
        self.layers, self.heads = layers, heads
        # One vector, since gates are no weights that should decay, and the optimizer leaves vectors alone.
        self.gate = nn.Parameter(torch.zeros(layers * heads, dtype=torch.float32))

    @staticmethod
    def of(model: PreTrainedModel) -> ReadingGates:
        """Shut gates for this model, on its device."""
        config: Any = model.base_model.config
        gates = ReadingGates(int(config.num_hidden_layers), int(config.num_attention_heads))
        return gates.to(next(model.parameters()).device)

    @property
    def gate_LY(self) -> Tensor:
        """g by layer and head."""
        return self.gate.view(self.layers, self.heads)

    @property
    def shut(self) -> bool:
        """Whether every gate is exactly 0, so that thoughts change nothing. It waits for the device."""
        return not bool(self.gate.detach().any())

    @property
    def openness(self) -> float:
        """Mean of |tanh(g)|: 0 where all are shut, 1 where all are wide open. It waits for the device."""
        return float(self.gate.detach().tanh().abs().mean())


def read_thought(
    query_BYsHE: Tensor,
    key_BXstE: Tensor,
    value_BXstE: Tensor,
    seen_Bst: Tensor,
    gate_Y: Tensor,
    scale: float,
    cap: float | None = None,
) -> Tensor:
    """What gated heads add to their output, `[B, s, H, Y, E]`: tanh(g) times attention over the thought alone.

    Where there is nothing to see (no delimiters and no tokens) it is 0.
    """
    rows, heads, segments, queries, features = query_BYsHE.shape
    shared = key_BXstE.shape[1]
    folded = query_BYsHE.unflatten(1, (shared, -1)).transpose(2, 3)
    scores = folded.flatten(3, 4) @ key_BXstE.transpose(-1, -2) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    wide, seen = torch.promote_types(scores.dtype, torch.float32), seen_Bst[:, None, :, None]
    # A finite bound, and zeros afterwards: a softmax over nothing would be no number, in its gradient too.
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1, dtype=wide) * seen
    read = (weights.to(value_BXstE.dtype) @ value_BXstE).unflatten(3, (-1, queries))
    read_BsHYE = read.permute(0, 2, 4, 1, 3, 5).reshape(rows, segments, queries, heads, features)
    return (read_BsHYE * torch.tanh(gate_Y)[:, None].to(wide)).to(value_BXstE.dtype)


class GatedReading:
    """How the continuation nodes of one pass over `layout` (from node `start` on) read their thoughts."""

    def __init__(self, layout: Layout, start: int, gates: ReadingGates) -> None:
        self.layout, self.gates = layout, gates
        self.thought, self.segment = layout.thought_start - start, layout.segment_start - start
        self.seen_Bst = self._seen()

    def _seen(self) -> Tensor:
        """bool: which nodes of its thought a segment reads, those up to its checkpoint and the close."""
        layout, plan = self.layout, self.layout.plan
        place_A = torch.arange(layout.thought_width, device=layout.token_BN.device)
        upto_Bs1 = (plan.open_width + layout.checkpoint_BRK).flatten(1)[..., None]
        written_BsA = (place_A < upto_Bs1) & layout.segment_mask_BRK.flatten(1)[..., None]
        kind_BsW = layout.kind_BN[:, layout.segment_start :].unflatten(1, (layout.segments, -1))
        return torch.cat([written_BsA, kind_BsW[..., : plan.close_width] == CLOSE], -1)

    def _of_thoughts(self, node_BXnE: Tensor) -> Tensor:
        """Keys or values of each segment's thought and close, `[B, X, s, t, E]`."""
        layout = self.layout
        thought = node_BXnE[:, :, self.thought : self.segment].unflatten(2, (layout.branch_count, -1))
        own = thought[:, :, :: layout.segment_every].repeat_interleave(layout.segment_count, 2)
        segment = node_BXnE[:, :, self.segment :].unflatten(2, (layout.segments, -1))
        return torch.cat([own, segment[..., : layout.plan.close_width, :]], 3)

    def onto(
        self,
        output_BnYE: Tensor,
        layer: int,
        query_BYnE: Tensor,
        key_BXnE: Tensor,
        value_BXnE: Tensor,
        scale: float | None,
        cap: float | None,
    ) -> Tensor:
        """The pass's attention output with what continuation nodes read of their thoughts."""
        layout, closing = self.layout, self.layout.plan.close_width
        query_BYsWE = query_BYnE[:, :, self.segment :].unflatten(2, (layout.segments, -1))
        read_BsHYE = read_thought(
            query_BYsWE[..., closing:, :],
            self._of_thoughts(key_BXnE),
            self._of_thoughts(value_BXnE),
            self.seen_Bst,
            self.gates.gate_LY[layer],
            query_BYnE.shape[-1] ** -0.5 if scale is None else scale,
            cap,
        )
        plain_BsWYE = output_BnYE[:, self.segment :].unflatten(1, (layout.segments, -1))
        after = torch.cat([plain_BsWYE[:, :, :closing], plain_BsWYE[:, :, closing:] + read_BsHYE], 2)
        return torch.cat([output_BnYE[:, : self.segment], after.flatten(1, 2)], 1)
