"""Whether a finished run trained anything and left a language model: numbers of one that did not mean nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tfive.config.config import Config
from tfive.tree.low_rank import low_rank_parts

LOST_NATS = 1.0
"""A rise of the loss without thoughts that no mid-training costs: every token e times less likely than before."""
LEAST_PUSH = 1e-5
"""Advantages are of the order of 1, or of a gain in nats; what is left of equal rewards is rounding below this."""
LEAST_CHANGE = 1e-7
"""Relative change of all weights below which nothing moved: float32 holds no smaller one."""


def relative_change(
    weights: Iterable[tuple[str, Tensor]], base: Mapping[str, Tensor], model: nn.Module | None = None
) -> float:
    """‖θ − θ₀‖ / ‖θ₀‖ over the weights that both name, and those that have low-rank updates in `model`."""
    changes = [] if model is None else [part.change() for _, part in low_rank_parts(model)]
    moved, size = sum(update for update, _ in changes), sum(frozen for _, frozen in changes)
    for name, weight in weights:
        if name in base:
            before = base[name].detach().float()
            moved += float((weight.detach().to(before.device).float() - before).square().sum())
            size += float(before.square().sum())
    return math.sqrt(moved / size) if size else 0.0


def problems(
    config: Config,
    history: Sequence[Mapping[str, Any]],
    change: float,
    vocabulary: int,
    largest_push: float | None = None,
) -> list[str]:
    """One line for each reason not to trust the numbers of a run; empty for a sound one. `largest_push` is the largest
    advantage that any actor token had, None where nothing was rewarded."""
    first, last = (float(entry["no_thought_loss"]) for entry in (history[0], history[-1]))
    found = []
    if not math.isfinite(last):
        found.append(f"the model is destroyed: its loss without thoughts ended at {last}; lower optimizer.lr")
    elif last - first >= LOST_NATS or (last >= 0.95 * math.log(vocabulary) and last - first >= LOST_NATS / 4):
        found.append(
            f"the model is destroyed: its loss without thoughts rose from {first:.2f} to {last:.2f} nats (a uniform "
            f"guess costs {math.log(vocabulary):.2f}); lower optimizer.lr"
        )
    if config.spec.trains and config.window.windows and not change >= LEAST_CHANGE:
        found.append(
            f"the model did not move: its weights changed by {change:.1g} of their size in {len(history) - 1} measured "
            "windows; raise optimizer.lr or optimizer.clip_norm, or let the actor take steps"
        )
    if largest_push is not None and not largest_push > LEAST_PUSH:
        found.append(
            f"no reward could move the actor: the largest advantage of all its tokens was {largest_push:.1g}, so the "
            f"anchors alone trained it and this is no result of {config.method}; let the thoughts of a position differ "
            "(sampling.top_k, sampling.top_p, sampling.temperature) and the ratio's correction leave some (ratio.cap)"
        )
    return found
