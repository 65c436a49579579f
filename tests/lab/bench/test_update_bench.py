"""The profile of the update: kernels by family, variants within the budget, the same numbers with any part off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tfive.tree.settings import EngineOptions
from tfive_lab.bench import update
from tfive_lab.bench.phases import tree_phases
from tfive_lab.bench.selfcheck import MODELS, WORK
from tfive_lab.bench.work import random_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("_key_slope", "attention"),
        ("_norm_back", "fused norms"),
        ("_rotate_back", "fused rotary"),
        ("_gate", "fused gated products"),
        ("_log_prob_slope", "fused vocabulary"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<8, silu>", "elementwise"),
    ],
)
def test_kernels_have_a_family(kernel: str, family: str) -> None:
    assert update.family(kernel) == family


@pytest.mark.model
def test_a_report_keeps_to_its_budget() -> None:
    model = random_model(MODELS["attention"], CPU, torch.float32)
    saved: list[dict[str, Any]] = []
    report = update.update_profile(model, WORK, repeats=1, budget=0.0, variants=("none", "all"), save=saved.append)
    assert report["left_out"] == ["none", "all"]
    assert set(report["phases"]) == {"sampling", "scoring", "actor"}
    assert saved
    assert "not reached within the budget: none, all" in update.render(report)


@pytest.mark.model
def test_thoughts_that_end_early_are_also_written_and_scored() -> None:
    model = random_model(MODELS["attention"], CPU, torch.float32)
    report = update.update_profile(model, WORK, repeats=1, budget=60.0, used=0.4, variants=("all", "packed"))
    assert report["mean_thought_length"] < 0.6 * WORK.length
    for name in ("all", "packed"):
        assert report["actor"][name]["writing_seconds"] > 0
        assert report["actor"][name]["scoring_seconds"] > 0
        assert report["actor"][name]["writing"]["device_ms"] > 0
    told = update.render(report)
    assert told.count(", writing ") == told.count(" writing: ") == 2
    assert "sampling lists: no use on cpu" in told


@pytest.mark.model
def test_every_variant_computes_the_same() -> None:
    model = random_model(MODELS["attention"], CPU, torch.float32)
    side: Any = tree_phases(model, WORK, EngineOptions(fused_blocks="on", fused_training="on"), variable=True)
    side.thoughts = update.shortened(side.sampling(), 0.4, side.plan.close_ids[0])
    assert 1 <= int(side.thoughts.length_BR.min()) < int(side.thoughts.length_BR.max()) <= WORK.length
    found = [update.variant(side, name).actor() for name in update.VARIANTS]
    for mine in found[1:]:
        torch.testing.assert_close(mine, found[0], rtol=1e-4, atol=1e-4)
    # Given half of its tokens, a thought is gone on with; what was to close later then does not.
    whole = side.thoughts
    side.thoughts = replace(whole, length_BR=whole.length_BR // 2)
    one, other = (update.variant(side, name).writing() for name in ("all", "packed"))
    assert one.tokens_BRT.equal(other.tokens_BRT)
    assert not one.tokens_BRT.equal(whole.tokens_BRT)
    torch.testing.assert_close(one.log_q_BRT, other.log_q_BRT, rtol=1e-4, atol=1e-4)
    side.thoughts = whole
    assert update.variant(side, "packed").writing().closed_BR.equal(whole.closed_BR)
    profile = update.profiled(update.variant(side, "all").actor, update.Clock(CPU))
    assert profile["device_ms"] > 0
    assert profile["kernels"]
