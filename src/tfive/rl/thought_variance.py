"""Where thoughts differ: the variance of the gain between thoughts of one position, measured there or foreseen.

Measured: several thoughts at each position of a pilot, the unbiased variance of their gains. Foreseen: a ridge
regression of its logarithm on the model's final hidden state after the text up to the position, so that nothing after a
position has a say in its choice. How well that carries over to other texts is measured by leaving texts out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tfive.distributed.world import SINGLE, World
from tfive.rl.sampling import micro_batches, sample
from tfive.rl.trajectory import last_loss
from tfive.tree.forward import TreeModel
from tfive.tree.head import Source, log_normaliser, reduce_vocabulary
from tfive.tree.layout import TextBatch
from tfive.tree.settings import SamplingSettings

THOUGHTS = 8
"""Thoughts at every position of a pilot: enough that two halves tell noise from difference, few enough to pay for."""
FOLDS = 5
PENALTIES = (0.01, 0.1, 1.0, 10.0, 100.0)
"""Ridge penalties that are tried, in units of the features' mean square."""
FLOOR = 0.01
"""Part of the mean variance that is added to every variance before its logarithm is taken."""


@torch.no_grad()
def pilot_gains(
    engine: TreeModel,
    texts: TextBatch,
    law: SamplingSettings,
    *,
    seed: int,
    role: str,
    rows: int,
    world: World = SINGLE,
) -> tuple[Tensor, int]:
    """ℓ_0 − ℓ_T of every thought, `[B, P, G]`, and how many tokens the thoughts have; `engine`'s group is G. The
    processes of `world` draw for a share of the texts each, and every one gets all gains."""
    gains, lengths, count = [], [], len(texts.tokens_BS)
    for part in world.beating(micro_batches(world.computed(count), rows)):
        some = texts.rows(part.start, part.stop)
        thoughts = sample(engine, some, law, seed=seed, role=role, window=0, rows=rows, record_old=False).thoughts
        scores = engine.score(some, thoughts, whole=True)
        gain_BR = (scores.no_thought_BR - last_loss(scores.losses_BRK, scores.mask_BRK)).float()
        gains.append(gain_BR.unflatten(1, (-1, engine.plan.group)).cpu())
        lengths.append(thoughts.mask_BRT.sum((1, 2)).cpu())
    gain_BPG, length_B = world.gather_all([(torch.cat(gains), 0), (torch.cat(lengths), 0)], count)
    return gain_BPG, int(length_B.sum())


@torch.no_grad()
def entropies(engine: TreeModel, states_ND: Tensor) -> Tensor:
    """Entropy of the next token after each of these final hidden states."""
    source = Source(engine.head, states_ND)
    return reduce_vocabulary([source], _entropy, None, engine.engine.head_bytes)["entropy"].float()


def _entropy(logits: Sequence[Tensor], rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    normaliser_x = log_normaliser(logits[0])
    return {"entropy": normaliser_x - ((logits[0] - normaliser_x[:, None]).exp() * logits[0]).sum(-1)}


@dataclass(frozen=True)
class Foresight:
    """The regression: from the features of a token to a weight in proportion to the variance foreseen there."""

    mean_F: Tensor
    deviation_F: Tensor
    slope_F: Tensor
    centre: float
    ends: tuple[float, float]
    """Least and greatest logarithm foreseen in the pilot; beyond them nothing is known."""

    def variance(self, features_xF: Tensor) -> Tensor:
        """The variance foreseen after each token, float64, in nats² a token."""
        features_xF = features_xF.double()
        standard_xF = (features_xF - self.mean_F.to(features_xF)) / self.deviation_F.to(features_xF)
        return (standard_xF @ self.slope_F.to(features_xF) + self.centre).clamp(*self.ends).exp()


@dataclass(frozen=True)
class Fit:
    """The regression and how it does on texts that it was not fitted on."""

    foresight: Foresight
    penalty: float
    r2: float
    """Share of the variance of the logarithm that is foreseen."""
    lift: float
    """Mean variance at places drawn by it over that at places drawn at random."""


def fit(features_NF: Tensor, gain_NG: Tensor, text_N: Tensor) -> Fit:
    """Ridge regression with the penalty that errs least on texts left out; the gains must not all be equal."""
    variance_N = gain_NG.double().var(-1)
    target_N = (variance_N + FLOOR * variance_N.mean()).log()
    mean_F = features_NF.double().mean(0)
    deviation_F = features_NF.double().std(0).clamp(min=1e-9)
    standard_NF = (features_NF.double() - mean_F) / deviation_F
    scale = float(standard_NF.square().sum() / len(standard_NF))
    fold_N = text_N % FOLDS
    aside = {penalty: _left_out(standard_NF, target_N, fold_N, penalty * scale) for penalty in PENALTIES}
    penalty = min(PENALTIES, key=lambda one: float((aside[one] - target_N).square().sum()))
    slope_F, centre = _ridge(standard_NF, target_N, penalty * scale)
    foreseen_N = standard_NF @ slope_F + centre
    ends = float(foreseen_N.min()), float(foreseen_N.max())
    foresight = Foresight(mean_F.cpu(), deviation_F.cpu(), slope_F.cpu(), centre, ends)
    weight_N = aside[penalty].clamp(*ends).exp()
    spread = (target_N - target_N.mean()).square().sum()
    error = (aside[penalty] - target_N).square().sum()
    return Fit(foresight, penalty, float(1 - error / spread), lift_of(weight_N, variance_N))


def _ridge(x_NF: Tensor, y_N: Tensor, penalty: float) -> tuple[Tensor, float]:
    """Slope and intercept. Solved over the N positions, which are fewer than the features of a large model."""
    mean_F, centre = x_NF.mean(0), float(y_N.mean())
    x_NF = x_NF - mean_F
    gram_NN = x_NF @ x_NF.T + penalty * torch.eye(len(x_NF), dtype=x_NF.dtype, device=x_NF.device)
    slope_F = x_NF.T @ torch.linalg.solve(gram_NN, y_N - centre)
    return slope_F, centre - float(mean_F @ slope_F)


def _left_out(x_NF: Tensor, y_N: Tensor, fold_N: Tensor, penalty: float) -> Tensor:
    """What a regression on the other folds foresees of each."""
    found_N = torch.full_like(y_N, float(y_N.mean()))
    for fold in fold_N.unique():
        held_N = fold_N == fold
        if not bool((~held_N).any()):
            continue
        slope_F, centre = _ridge(x_NF[~held_N], y_N[~held_N], penalty)
        found_N[held_N] = x_NF[held_N] @ slope_F + centre
    return found_N


def lift_of(weight_N: Tensor, variance_N: Tensor) -> float:
    """Mean variance of places drawn in proportion to `weight_N`, over their plain mean."""
    return float((weight_N * variance_N).sum() / weight_N.sum() / variance_N.mean())


def repeated(gain_NG: Tensor) -> tuple[float, float]:
    """Two halves of the thoughts, each with a variance of its own: their correlation over positions, and the lift of
    drawing places by their true variance, free of sampling noise because E[s_a²·s_b²] = E[σ⁴]."""
    first_N, second_N = (half.double().var(-1) for half in gain_NG.chunk(2, -1))
    pair = torch.stack([first_N, second_N])
    alike = float(torch.corrcoef(pair)[0, 1]) if bool((pair.var(-1) > 0).all()) else 0.0
    product = float((first_N * second_N).mean() / (first_N.mean() * second_N.mean()))
    return alike, product
