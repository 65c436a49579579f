"""Where thoughts differ: the pilot's gains, the regression on texts left out, positions drawn by weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stage
from tfive.rl.sampling import sample
from tfive.rl.thought_variance import entropies, fit, lift_of, pilot_gains, repeated
from tfive.text.placing import redrawn
from tfive.tree.forward import TreeModel


def test_a_pilot_gives_the_gain_of_every_thought_whatever_its_batches() -> None:
    engine, texts = TreeModel(stage.gpt2(), replace(stage.PLAN, group=4)), stage.texts(rows=5)
    gain_BPG, tokens = pilot_gains(engine, texts, stage.LAW, seed=3, role="positions", rows=2)
    whole = sample(engine, texts, stage.LAW, seed=3, role="positions", window=0, rows=5, scored=True)
    assert torch.allclose(gain_BPG.flatten(1), whole.gain_BR.float(), atol=1e-6)
    assert tokens == int(whole.mask_BRT.sum())


def test_entropies_are_those_of_the_plain_model() -> None:
    model = stage.gpt2()
    engine, tokens_BS = TreeModel(model, stage.PLAN), stage.texts().tokens_BS
    with torch.no_grad():
        state_BSD, log_p = model.transformer(tokens_BS).last_hidden_state, model(tokens_BS).logits.log_softmax(-1)
    found = entropies(engine, state_BSD.flatten(0, 1))
    assert torch.allclose(found, -(log_p.exp() * log_p).sum(-1).flatten().float(), atol=1e-5)


def drawn_gains(features_NF: torch.Tensor, thoughts: int, seed: int) -> torch.Tensor:
    """Gains whose log-variance is twice the first feature."""
    draw = torch.Generator().manual_seed(seed)
    noise_NG = torch.randn(len(features_NF), thoughts, generator=draw, dtype=torch.float64)
    return noise_NG * features_NF[:, :1].double().exp()


def test_the_regression_foresees_what_the_features_tell_and_its_lift_holds_on_fresh_positions() -> None:
    features_NF = torch.randn(600, 12, generator=torch.Generator().manual_seed(0))
    features_NF[:, 0] *= 0.5
    text_N = torch.arange(600) // 6
    found = fit(features_NF[:400], drawn_gains(features_NF, 8, 1)[:400], text_N[:400])
    fresh, true_N = features_NF[400:], (2 * features_NF[400:, 0].double()).exp()
    weight_N = found.foresight.variance(fresh)
    assert torch.corrcoef(torch.stack([weight_N.log(), true_N.log()]))[0, 1] > 0.9
    assert found.r2 > 0.4
    assert found.lift == pytest.approx(lift_of(weight_N, true_N), rel=0.25)
    # What says nothing lifts nothing, and says so.
    silent = fit(features_NF[:400, 5:], drawn_gains(features_NF, 8, 1)[:400], text_N[:400])
    assert silent.r2 < 0.05
    assert silent.lift < 1.3


def test_a_fit_is_ridge_regression_of_the_logarithm() -> None:
    features_NF = torch.randn(50, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gain_NG = drawn_gains(features_NF, 6, 3)
    found = fit(features_NF, gain_NG, torch.arange(50) // 5)
    variance_N = gain_NG.var(-1)
    target_N = (variance_N + 0.01 * variance_N.mean()).log()
    x_NF = (features_NF - features_NF.mean(0)) / features_NF.std(0)
    penalty = found.penalty * float(x_NF.square().sum()) / 50
    slope_F = torch.linalg.solve(x_NF.T @ x_NF + penalty * torch.eye(3), x_NF.T @ (target_N - target_N.mean()))
    wanted_N = (x_NF @ slope_F + target_N.mean()).exp()
    assert torch.allclose(found.foresight.variance(features_NF), wanted_N, rtol=1e-9)


def test_the_lift_of_the_true_variance_is_free_of_sampling_noise() -> None:
    log_N = 0.8 * torch.randn(20_000, 1, generator=torch.Generator().manual_seed(4))
    alike, lift = repeated(drawn_gains(log_N, 8, 5))
    true_N = (2 * log_N[:, 0].double()).exp()
    assert lift == pytest.approx(lift_of(true_N, true_N), rel=0.25)
    noisy = drawn_gains(log_N, 8, 5).var(-1)
    assert lift < lift_of(noisy, noisy)
    assert 0.3 < alike < 1
    alike, lift = repeated(drawn_gains(torch.zeros(20_000, 1), 8, 6))
    assert alike == pytest.approx(0, abs=0.03)
    assert lift == pytest.approx(1, abs=0.03)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gap=st.integers(1, 6),
    staying=st.integers(0, 2),
    moving=st.integers(0, 3),
    zeros=st.floats(0, 0.9),
)
def test_drawn_positions_keep_their_distance_and_number(
    seed: int, gap: int, staying: int, moving: int, zeros: float
) -> None:
    draw = np.random.default_rng(seed)
    spots = sorted(draw.choice(8, staying + moving, replace=False) * 5)
    positions_P = np.array([*spots, *[-1] * (6 - len(spots))], dtype=np.int32)
    moving_P = np.zeros(6, dtype=bool)
    moving_P[draw.choice(staying + moving, moving, replace=False) if moving else []] = True
    kinds_P = np.where(positions_P < 0, -1, np.where(moving_P, 3, 0)).astype(np.int8)
    weight_S = draw.random(40) * (draw.random(40) >= zeros)
    found_P, found_kinds_P = redrawn(positions_P, kinds_P, moving_P, weight_S, draw.random(40), gap)
    if np.array_equal(found_P, positions_P):
        return
    assert (found_P >= 0).sum() == len(spots)
    assert sorted(found_kinds_P.tolist()) == sorted(kinds_P.tolist())
    kept = set(positions_P[~moving_P & (positions_P >= 0)].tolist())
    assert kept == set(found_P[found_kinds_P == 0].tolist())
    moved = found_P[found_kinds_P == 3]
    assert (weight_S[moved] > 0).all()
    chosen = np.sort(found_P[found_P >= 0])
    apart = [abs(int(a) - int(b)) for a in moved for b in chosen if a != b]
    assert min(apart, default=gap) >= gap
    assert (np.diff(chosen) > 0).all()


def test_positions_come_in_proportion_to_their_weights() -> None:
    weight_S = np.array([0.0, 1.0, 2.0, 5.0])
    draw, counts = np.random.default_rng(0), np.zeros(4)
    at, kind, moving = np.array([0], np.int32), np.array([3], np.int8), np.array([True])
    for _ in range(4000):
        found_P, _ = redrawn(at, kind, moving, weight_S, draw.random(4), 1)
        counts[found_P[0]] += 1
    assert counts / 4000 == pytest.approx(weight_S / 8, abs=0.03)
