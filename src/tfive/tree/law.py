"""The sampling law of thought tokens: logits under temperature, top-k and top-p, and the draw from a uniform number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tfive.tree.head import OUT_OF_REACH, Reduced, Reducer, target_log_prob
from tfive.tree.running_sum import running_sum
from tfive.tree.settings import SamplingSettings

BLOCK = 512
"""Vocabulary entries per block of the two-level inverse of the distribution function."""


def law_logits(logits_xV: Tensor, law: SamplingSettings) -> Tensor:
    """Logits of the sampling law q: temperature, then top-k, then top-p; ties at a threshold are all kept."""
    if law.temperature != 1.0:
        logits_xV = logits_xV / law.temperature
    if 0 < law.top_k < logits_xV.shape[-1]:
        threshold_x1 = logits_xV.topk(law.top_k, -1).values[..., -1:]
        logits_xV = logits_xV.masked_fill(logits_xV < threshold_x1, float("-inf"))
    if law.top_p < 1.0:
        ordered_xV = logits_xV.sort(-1, descending=True).values
        above_xV = running_sum(ordered_xV.softmax(-1)) - ordered_xV.softmax(-1)
        least_x1 = ordered_xV.masked_fill(above_xV >= law.top_p, float("inf")).amin(-1, keepdim=True)
        logits_xV = logits_xV.masked_fill(logits_xV < least_x1, float("-inf"))
    return logits_xV


def law_log_prob(law: SamplingSettings) -> Reducer:
    """A reducer: `log_prob` of `target` under the sampling law."""

    def reducer(logits: Sequence[Tensor], rows: Mapping[str, Tensor]) -> Reduced:
        return target_log_prob([law_logits(logits[0], law)], rows)

    return reducer


def draw(logits_xV: Tensor, uniform_x: Tensor) -> tuple[Tensor, Tensor]:
    """The token at which the distribution function of softmax(logits) passes `uniform_x`, and its log-probability.

    A running sum over 250,000 entries in float32 loses the rare ones, and in float64 it is slow. Blocks are summed in
    float64 instead, the block is chosen, and only inside it is the sum run again. No step waits for the host.
    """
    rows, vocabulary = logits_xV.shape
    peak_x1 = logits_xV.amax(-1, keepdim=True)
    weight_xV = F.pad(logits_xV - peak_x1, (0, -vocabulary % BLOCK), value=float("-inf")).exp()
    weight_xbw = weight_xV.view(rows, -1, BLOCK)
    sum_xb = weight_xbw.sum(-1, dtype=torch.float64)
    until_xb = running_sum(sum_xb)
    goal_x1 = uniform_x[:, None].double() * until_xb[:, -1:]
    block_x1 = torch.minimum((until_xb <= goal_x1).sum(-1, keepdim=True), _last_positive(sum_xb))
    rest_x1 = goal_x1 - (until_xb - sum_xb).gather(1, block_x1)
    inside_xw = weight_xbw.gather(1, block_x1[..., None].expand(-1, -1, BLOCK))[:, 0].double()
    place_x1 = torch.minimum((running_sum(inside_xw) <= rest_x1).sum(-1, keepdim=True), _last_positive(inside_xw))
    token_x1 = block_x1 * BLOCK + place_x1
    log_q_x = logits_xV.gather(1, token_x1)[:, 0] - logits_xV.logsumexp(-1)
    return token_x1[:, 0], log_q_x


Draw = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""`draw`, or a kernel that computes the same."""


def draw_token(
    logits_xV: Tensor, law: SamplingSettings, uniform_x: Tensor, forbidden: Tensor | None = None, by: Draw = draw
) -> tuple[Tensor, Tensor]:
    """The next token of each row and its log q: forbidden entries (their ids) out of reach, in place, then the law."""
    if forbidden is not None:
        logits_xV.index_fill_(1, forbidden, OUT_OF_REACH)
    return by(law_logits(logits_xV, law), uniform_x)


def _last_positive(weight_xw: Tensor) -> Tensor:
    """Index of the last entry that can be drawn, `[x, 1]`: rounding at the very end must not pass it."""
    index_w = torch.arange(weight_xw.shape[-1], device=weight_xw.device)
    return torch.where(weight_xw > 0, index_w, 0).amax(-1, keepdim=True)
