"""Thoughts as careful reading takes them: cut at checkpoints, where rewards read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case, lifted, random_case
from exact import apart
from families import tiny

from tfive.rl.hindsight import as_rewarded
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.settings import EngineOptions

pytestmark = pytest.mark.model


def long_case(rows: int = 2, count: int = 3, kind: str = "text2", variable: bool = True) -> Case:
    """Thoughts of up to six tokens, scored after 2, 4 and 6."""
    case = random_case(3, kind, variable=variable, rows=rows, width=30, count=count, length=6)
    return replace(case, plan=replace(case.plan, checkpoints=(2, 4, 6)))


KINDS = [("text2", True), ("text3", False), ("learned", True), ("none", False)]


@pytest.mark.parametrize(("kind", "variable"), KINDS)
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_what_follows_a_cut_thought_is_what_the_checkpoint_scores(family: str, kind: str, variable: bool) -> None:
    case, model = long_case(rows=4, kind=kind, variable=variable), tiny(family)
    with lifted():
        delimiters = Delimiters.from_model(model, case.plan) if case.plan.learned else None
        engine = TreeModel(model, case.plan, EngineOptions(), delimiters)
        scores = engine.score(case.texts, case.thoughts)
        compared = 0
        for seed in range(6):
            cut = as_rewarded(case.thoughts, case.plan.checkpoints, seed)
            read = engine.policy(case.texts, cut, actions=False, continuations=True)
            mask_BRH = read.need("continuation_mask_BRH")
            loss_BR = -(read.need("continuation_log_prob_BRH") * mask_BRH).sum(-1) / mask_BRH.sum(-1).clamp(min=1)
            here_BRK = scores.mask_BRK & (scores.checkpoint_BRK == cut.length_BR[..., None])
            wanted_BR = (scores.losses_BRK * here_BRK).sum(-1)
            chosen_BR = here_BRK.any(-1) & (cut.length_BR < case.thoughts.length_BR)
            compared += int(chosen_BR.sum())
            assert apart(loss_BR[chosen_BR], wanted_BR[chosen_BR]) < 1e-9
        assert compared > 6


def test_half_of_the_thoughts_that_go_on_are_cut_and_the_others_stay() -> None:
    case = long_case(rows=200, count=5)
    before, plan = replace(case.thoughts, log_q_BRT=-torch.ones_like(case.thoughts.log_q_BRT)), case.plan
    cut = as_rewarded(before, plan.checkpoints, seed=0)
    assert torch.equal(cut.log_q_BRT, -cut.mask_BRT.float())
    moved_BR = cut.length_BR != before.length_BR
    assert not moved_BR[(before.length_BR <= 2) | ~before.valid_BR].any()
    assert not (cut.closed_BR & moved_BR).any()
    assert torch.equal(cut.closed_BR[~moved_BR], before.closed_BR[~moved_BR])
    assert torch.equal(cut.tokens_BRT, before.tokens_BRT)
    for length, steps in ((3, [2]), (4, [2]), (5, [2, 4]), (6, [2, 4])):
        chosen = cut.length_BR[(before.length_BR == length) & before.valid_BR]
        shares = [float((chosen == step).double().mean()) for step in (*steps, length)]
        assert sum(shares) == pytest.approx(1)
        assert shares[-1] == pytest.approx(0.5, abs=0.15)
        assert shares[:-1] == pytest.approx([0.5 / len(steps)] * len(steps), abs=0.15)
    again, other = (as_rewarded(before, plan.checkpoints, seed) for seed in (0, 1))
    assert torch.equal(cut.length_BR, again.length_BR)
    assert not torch.equal(cut.length_BR, other.length_BR)


def test_without_a_checkpoint_on_the_way_thoughts_are_read_whole() -> None:
    case = long_case()
    read = as_rewarded(case.thoughts, (6,), seed=0)
    assert torch.equal(read.length_BR, case.thoughts.length_BR)
    assert torch.equal(read.closed_BR, case.thoughts.closed_BR)
