"""What a branch may depend on, and the ways to spend less: readings, few branches at a time, frozen lower blocks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from cases import Case, lifted, random_case
from exact import StepValue, apart
from families import DENSE, HYBRID, VOCABULARY, WINDOWED, tiny
from plain import PlainModel, branches_of
from torch import Tensor

from tfive.errors import UserError
from tfive.rl.losses import anchor_loss, centering_term
from tfive.rl.trajectory import last_loss
from tfive.tree.forward import Centring, Delimiters, TreeModel
from tfive.tree.grow import no_thoughts
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.settings import EngineOptions, SamplingSettings

pytestmark = pytest.mark.model


def outputs(tree: TreeModel, texts: TextBatch, thoughts: Thoughts) -> dict[str, Tensor]:
    head = StepValue(tree.model.config.hidden_size, tree.plan.length, tree.model.dtype)
    with torch.no_grad():
        policy = tree.policy(texts, thoughts, entropy=True, continuations=True)
        values = tree.values(texts, thoughts, head)
    scores = tree.score(texts, thoughts)
    return {
        "log_prob": policy.need("log_prob_BRT"),
        "entropy": policy.need("entropy_BRT"),
        "value": values,
        "loss": scores.losses_BRK,
        "no_thought": scores.no_thought_BR,
    }


def changed(tokens: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, (tokens - 10 + 7) % (VOCABULARY - 10) + 10, tokens)


@pytest.mark.parametrize("family", DENSE + WINDOWED)
def test_a_branch_sees_no_other_branch(family: str) -> None:
    case = random_case(1, "text", group=2)
    tree = TreeModel(tiny(family), case.plan)
    others = torch.ones(case.thoughts.tokens_BRT.shape, dtype=torch.bool)
    others[:, 1] = False
    moved = replace(case.thoughts, tokens_BRT=changed(case.thoughts.tokens_BRT, others))
    before, after = outputs(tree, case.texts, case.thoughts), outputs(tree, case.texts, moved)
    for name, value in before.items():
        assert torch.equal(value[:, 1], after[name][:, 1]), name
        assert name == "no_thought" or not torch.equal(value[:, 0], after[name][:, 0]), name


@pytest.mark.parametrize("family", DENSE + WINDOWED)
def test_actor_and_critic_see_no_text_after_their_position(family: str) -> None:
    case = random_case(2, "text2")
    tree = TreeModel(tiny(family), case.plan)
    p = case.texts.positions_BP[:, 1]
    hidden = torch.arange(case.texts.tokens_BS.shape[1]) > p[:, None]
    moved = replace(case.texts, tokens_BS=changed(case.texts.tokens_BS, hidden))
    before, after = outputs(tree, case.texts, case.thoughts), outputs(tree, moved, case.thoughts)
    for name in ("log_prob", "entropy", "value"):
        assert torch.equal(before[name][:, :2], after[name][:, :2]), name
    assert not torch.equal(before["loss"][:, 1], after["loss"][:, 1])


def test_documents_of_a_row_do_not_see_each_other() -> None:
    case = random_case(3, "text")
    tree = TreeModel(tiny("llama"), case.plan)
    first = case.texts.document_BS == 0
    first[1] = False
    moved = replace(case.texts, tokens_BS=changed(case.texts.tokens_BS, first))
    later = case.texts.document_BS.gather(1, case.texts.positions_BP.clamp(min=0)) == 1
    before, after = outputs(tree, case.texts, case.thoughts), outputs(tree, moved, case.thoughts)
    assert later[0].any()
    for name, value in before.items():
        assert torch.equal(value[0, later[0]], after[name][0, later[0]]), name


def same(some: Any, other: Any, bound: float = 1e-12) -> None:
    for f in fields(some):
        mine, theirs = getattr(some, f.name), getattr(other, f.name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.shape == theirs.shape
            assert apart(mine, theirs) < bound, f.name


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_5"])
def test_few_branches_at_a_time_and_a_shared_reading(family: str) -> None:
    case = random_case(4, "text2", variable=True, group=2)
    model = tiny(family)
    bound = 1e-12 if family != "qwen3_5" else 1e-5
    whole = TreeModel(model, case.plan).score(case.texts, case.thoughts, features=True)
    few = TreeModel(model, case.plan, EngineOptions(max_nodes=1))
    same(few.score(case.texts, case.thoughts, reading=few.read(case.texts), features=True), whole, bound)


@pytest.mark.parametrize("variable", [False, True], ids=["fixed", "variable"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_5"])
def test_continuations_behind_the_first_of_a_group_are_those_of_one_thought(family: str, variable: bool) -> None:
    case = random_case(4, "text2", variable=variable, group=2)
    model = tiny(family)
    tree, alone = TreeModel(model, case.plan), TreeModel(model, replace(case.plan, group=1))
    first = case.thoughts.branches(0, None, 2)
    found = []
    for engine, thoughts in ((tree, case.thoughts), (alone, first)):
        output = engine.policy(case.texts, thoughts, text=True, continuations=True, of_first=True)
        loss = (
            output.need("continuation_log_prob_BRH").sum() + output.need("log_prob_BRT")[:, :: engine.plan.group].sum()
        )
        gradients = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        found.append((output, [slope for slope in gradients if slope is not None]))
    (mine, slopes), (theirs, wanted) = found
    bound = 1e-9 if family != "qwen3_5" else 1e-5
    assert torch.equal(mine.need("continuation_mask_BRH"), theirs.need("continuation_mask_BRH"))
    assert apart(mine.need("continuation_log_prob_BRH"), theirs.need("continuation_log_prob_BRH")) < bound
    assert apart(mine.need("log_prob_BRT")[:, ::2], theirs.need("log_prob_BRT")) < bound
    for slope, other in zip(slopes, wanted, strict=True):
        assert apart(slope, other) < bound


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_mixture_trains_its_share_of_the_prediction_after_the_thought(family: str, group: int) -> None:
    """Against plain rows: −log((1 − g)·p_without + g·p_after), where p_without gets no gradient."""
    case, share = random_case(4, "text2", variable=True, group=group), 0.3
    model = tiny(family)
    with lifted():
        output = TreeModel(model, case.plan).policy(
            case.texts, case.thoughts, continuations=True, no_thought=True, of_first=True
        )
        plan = replace(case.plan, group=1)
        first, plain = case.thoughts.branches(0, None, group), PlainModel(model, plan)
        wanted = torch.zeros((), dtype=torch.float64)
        for branch, after in zip(
            branches_of(case.texts, plan, first), plain(case.texts, first).conditioned, strict=True
        ):
            without = plain._loss(plain._embed(branch.prefix), branch.continuation).detach()
            wanted = wanted - ((1 - share) * (-without).exp() + share * (-after).exp()).log().sum()
    after_BRH, without_BRH = output.need("continuation_log_prob_BRH"), output.need("no_thought_log_prob_BRH")
    assert not without_BRH.requires_grad
    mine = anchor_loss(after_BRH, output.need("continuation_mask_BRH"), without_BRH, share)
    assert apart(mine, wanted) < 1e-9
    parameters = [*model.parameters()]
    slopes = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (mine, wanted)]
    compared = [(one, other) for one, other in zip(*slopes) if other is not None]
    assert max(float(other.abs().max()) for _, other in compared) > 1e-3
    for one, other in compared:
        assert apart(one, other) < 1e-9


@pytest.mark.parametrize("empty", [False, True], ids=["thoughts", "empty"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_5"])
def test_scores_after_the_whole_thought_alone_are_the_last_of_all(family: str, empty: bool) -> None:
    case = random_case(4, "text2", variable=True, group=2)
    tree, thoughts = TreeModel(tiny(family), case.plan), case.thoughts
    if empty:
        rows, branches = thoughts.length_BR.shape
        thoughts = replace(no_thoughts(rows, branches, case.plan, "cpu"), valid_BR=thoughts.valid_BR)
    bound = 1e-12 if family != "qwen3_5" else 1e-5
    every = tree.score(case.texts, thoughts, features=True)
    alone = tree.score(case.texts, thoughts, features=True, whole=True)
    assert alone.losses_BRK.shape[-1] == 1
    assert apart(last_loss(alone.losses_BRK, alone.mask_BRK), last_loss(every.losses_BRK, every.mask_BRK)) < bound
    for name in ("token_BRH", "features_BRHD", "no_thought_BR", "no_thought_token_BRH", "no_thought_features_BRHD"):
        assert apart(getattr(alone, name), getattr(every, name)) < bound, name
    assert torch.equal(alone.token_mask_BRH, every.token_mask_BRH)


def test_features_of_scores_are_what_the_head_reads() -> None:
    case = random_case(5, "text")
    tree = TreeModel(tiny("llama"), case.plan)
    scores = tree.score(case.texts, case.thoughts, features=True)
    target_BRH = (
        case.texts.tokens_BS[:, None]
        .expand(-1, 3, -1)
        .gather(2, (case.texts.positions_BP[..., None] + 1 + torch.arange(case.plan.horizon)).clamp(min=0))
    )
    for hidden, loss in (
        (scores.features_BRHD, scores.token_BRH),
        (scores.no_thought_features_BRHD, scores.no_thought_token_BRH),
    ):
        log_p = tree.head.module(hidden).log_softmax(-1).gather(-1, target_BRH[..., None])[..., 0]
        assert apart(-log_p[scores.token_mask_BRH], loss[scores.token_mask_BRH]) < 1e-9


def test_empty_thoughts_of_a_fixed_length_plan() -> None:
    case = random_case(6, "text2")
    empty = replace(no_thoughts(2, 3, case.plan, "cpu"), valid_BR=case.thoughts.valid_BR)
    model = tiny("qwen3")
    with lifted():
        scores = TreeModel(model, case.plan).score(case.texts, empty)
        plain = PlainModel(model, case.plan)(case.texts, empty)
    assert scores.checkpoint_BRK[scores.mask_BRK].tolist() == [0] * 5
    assert apart(scores.losses_BRK[scores.mask_BRK], torch.stack([x[0] for x in plain.losses])) < 1e-9


@pytest.mark.parametrize("family", DENSE + HYBRID)
def test_upper_blocks_from_frozen_lower_activations(family: str) -> None:
    case = random_case(7, "text2", variable=True)
    model = tiny(family)
    tree, head = TreeModel(model, case.plan), StepValue(24, case.plan.length, torch.float64)
    whole = tree.values(case.texts, case.thoughts, head)
    top = dict(tree.backbone.blocks[1].named_parameters())
    wanted = torch.autograd.grad(whole.sin().sum(), list(top.values()))
    lower = tree.lower(case.texts, case.thoughts, 1)
    for _ in range(2):
        again = tree.values(case.texts, case.thoughts, head, lower)
        assert torch.equal(again, whole)
        for some, other in zip(torch.autograd.grad(again.sin().sum(), list(top.values())), wanted):
            assert torch.equal(some, other)
    for block in (0, tree.block_count):
        with pytest.raises(ValueError, match="block"):
            tree.lower(case.texts, case.thoughts, block)


def test_reading_texts_needs_no_thoughts() -> None:
    case = random_case(8)
    tree = TreeModel(tiny("llama"), case.plan)
    alone = tree.policy(case.texts, text=True)
    beside = tree.policy(case.texts, case.thoughts, actions=False, text=True)
    assert alone.log_prob_BRT is None
    assert beside.log_prob_BRT is None
    assert apart(alone.need("text_log_prob_BS"), beside.need("text_log_prob_BS")) < 1e-12
    assert int(alone.need("text_mask_BS").sum()) == sum(len(d) - 1 for d in documents(case))


def documents(case: Case) -> list[list[int]]:
    found = []
    for row in range(len(case.texts.tokens_BS)):
        for number in set(case.texts.document_BS[row].tolist()) - {-1}:
            found.append(case.texts.tokens_BS[row][case.texts.document_BS[row] == number].tolist())
    return found


def test_plain_use_of_the_model_is_untouched() -> None:
    case = random_case(9)
    model = tiny("llama")
    tokens = case.texts.tokens_BS[1:]
    before = model(tokens).logits
    TreeModel(model, case.plan).policy(case.texts, case.thoughts)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(tokens).logits, before)
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_dropout_is_off() -> None:
    case = random_case(10)
    model = tiny("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    tree = TreeModel(model, case.plan)
    quiet = tree.policy(case.texts, case.thoughts).need("log_prob_BRT")
    model.train()
    assert torch.equal(tree.policy(case.texts, case.thoughts).need("log_prob_BRT"), quiet)


def test_positions_beyond_the_table_are_refused() -> None:
    case = random_case(10)
    with pytest.raises(UserError, match="has 20"):
        TreeModel(tiny("gpt2", n_positions=20), case.plan).policy(case.texts, case.thoughts)


def test_learned_delimiters_start_from_their_text() -> None:
    case = random_case(11, "learned")
    model = tiny("llama")
    with pytest.raises(ValueError, match="learned"):
        TreeModel(model, case.plan)
    table = model.get_input_embeddings().get_parameter("weight")
    delimiters = Delimiters.from_model(model, case.plan)
    assert torch.equal(delimiters.weight_2D, torch.stack([table[[7, 8]].mean(0), table[9]]).float())


def test_the_centre_is_the_mean_score_under_the_sampling_law() -> None:
    case = random_case(12, "text")
    new, old = TreeModel(tiny("llama"), case.plan), TreeModel(tiny("llama", seed=1), case.plan)
    law = SamplingSettings(temperature=0.7, top_k=9)
    weight = new.backbone.blocks[0].get_parameter("mlp.up_proj.weight")

    def log_p(tree: TreeModel) -> Tensor:
        logits = tree.head.module(tree.features(case.texts, case.thoughts)[0, 0, 1])
        return logits.masked_fill(tree.forbidden_V, float("-inf")).log_softmax(-1)

    with lifted():
        centre = new.policy(case.texts, case.thoughts, centring=Centring(old, law, centering_term)).need("centre_BRT")
        (found,) = torch.autograd.grad(centre[0, 0, 1], weight)
        matched = Centring(new, SamplingSettings(), centering_term)
        itself = new.policy(case.texts, case.thoughts, centring=matched).need("centre_BRT")
        (nothing,) = torch.autograd.grad(itself[0, 0, 1], weight)
        log_new, log_old = log_p(new), log_p(old).detach()
        kept = log_old.topk(9).indices
        q = torch.zeros(VOCABULARY, dtype=torch.float64)
        q[kept] = (log_old[kept] / 0.7).softmax(-1)
        wanted = torch.zeros_like(weight)
        for action in kept.tolist():
            (score,) = torch.autograd.grad(log_new[action], weight, retain_graph=True)
            wanted += q[action] * (log_new[action] - log_old[action]).exp().detach() * score
    assert apart(found, wanted) < 1e-9
    assert nothing.abs().max() < 1e-12


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", *HYBRID])
def test_fused_norms_compute_what_the_modules_compute(family: str) -> None:
    case = random_case(5)
    stock = TreeModel(tiny(family, torch.float64), case.plan, EngineOptions(fused_norms="off"))
    fused = TreeModel(stock.model, case.plan, EngineOptions(fused_norms="on"))
    with fused.backbone._attached():
        pass
    assert fused.backbone._fused, "no norm of this family was recognised"
    left, right = outputs(stock, case.texts, case.thoughts), outputs(fused, case.texts, case.thoughts)
    assert any(not torch.equal(left[name], right[name]) for name in left), "the fused kernel was never used"
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=2e-6, atol=2e-6)


def test_other_norms_are_left_alone() -> None:
    backbone = TreeModel(tiny("gpt2"), random_case(5).plan, EngineOptions(fused_norms="on")).backbone
    with backbone._attached():
        pass
    assert backbone._fused == []
