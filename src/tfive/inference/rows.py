"""Rows of tokens of any lengths as one batch, and their predictions without thoughts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tfive.tree.forward import TreeModel
from tfive.tree.head import Source, reduce_vocabulary, target_log_prob_and_entropy
from tfive.tree.layout import TextBatch
from tfive.tree.outputs import Reading


def token_rows(rows: Sequence[Sequence[int]], positions: Sequence[Sequence[int]], device: torch.device) -> TextBatch:
    """Rows of any lengths, and any number of positions, as one batch."""

    def padded(lists: Sequence[Sequence[int]], filler: int) -> Tensor:
        width = max(len(values) for values in lists)
        return torch.tensor(
            [[*values, *[filler] * (width - len(values))] for values in lists], dtype=torch.int64, device=device
        )

    positions_BP = padded(positions, -1)
    return TextBatch(padded(rows, 0), padded([[0] * len(ids) for ids in rows], -1), positions_BP, positions_BP)


def plain_predictions(engine: TreeModel, texts: TextBatch, reading: Reading) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy `[B, S−1]` of every token's plain prediction."""
    target_BS = texts.tokens_BS[:, 1:]
    source, target = Source(engine.head, reading.hidden_BSD[:, :-1].flatten(0, 1)), {"target": target_BS.flatten()}
    found = reduce_vocabulary([source], target_log_prob_and_entropy, target, engine.engine.head_bytes)
    return found["log_prob"].view(target_BS.shape).cpu(), found["entropy"].view(target_BS.shape).cpu()
