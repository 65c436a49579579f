"""The actor's step: gradients of plain rows, the same for any micro-batch, and a halt when they stop being numbers."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, PreTrainedModel

from stage import FIXED, PLAN, PlainModel, gpt2, items_of, texts, thoughts_for
from tfive.errors import RunFailed
from tfive.rl.actor import Actor, StepStats
from tfive.rl.losses import anchor_counts
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.sampling import sample
from tfive.rl.settings import ActorSettings, AnchorSettings, RatioSettings
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel
from tfive.tree.layout import ThoughtPlan
from tfive.tree.outputs import PolicyOutput
from tfive.tree.settings import SamplingSettings

pytestmark = pytest.mark.model
BATCH = texts(rows=8)
NOTHING = AnchorSettings(next_token=0.0)
BOTH = AnchorSettings(next_token=0.7, conditioned=1.3)


def actor_on(
    model: PreTrainedModel,
    *,
    rows: int = 8,
    anchor: AnchorSettings = NOTHING,
    plan: ThoughtPlan = PLAN,
    ratio: RatioSettings | None = None,
    **options: Any,
) -> Actor:
    engine = TreeModel(model, plan)
    optimizer = MasterOptimizer(list(model.named_parameters()), lr=1e-3)
    return Actor(engine, optimizer, ActorSettings(), ratio or RatioSettings(), anchor, seed=3, rows=rows, **options)


def acting(model: GPT2LMHeadModel, distance: float = 0.3, plan: ThoughtPlan = PLAN) -> Trajectories:
    """Thoughts with advantages; the old policy lies `distance` away in log-probability, so that some tokens clip."""
    thoughts, draw = thoughts_for(BATCH, plan), torch.Generator().manual_seed(4)
    repeated = {f.name: getattr(thoughts, f.name).repeat_interleave(plan.group, 1) for f in fields(thoughts)}
    thoughts = replace(thoughts, **repeated)
    with torch.no_grad():
        log_now = TreeModel(model, plan).policy(BATCH, thoughts).need("log_prob_BRT")
    noise = distance * torch.randn(log_now.shape, generator=draw, dtype=torch.float64)
    mask = thoughts.mask_BRT
    advantage = torch.randn(log_now.shape, generator=draw, dtype=torch.float64) * mask
    return Trajectories(
        "actor", 1, BATCH, thoughts, log_old_BRT=(log_now + noise) * mask, advantage_BRT=advantage
    )  # fmt: skip


def policy_pass(actor: Actor, record: Trajectories) -> dict[str, float]:
    return actor._backward(actor.engine, record, aggregate="token", anchored=False).policy


def anchor_pass(actor: Actor, record: Trajectories) -> tuple[float, float]:
    found = actor._backward(actor.reader, actor._first_thoughts(record), aggregate=None, anchored=True)
    return found.text, found.conditioned


def slopes(model: PreTrainedModel) -> dict[str, Tensor]:
    """What `backward` left in every parameter."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def gradients(actor: Actor) -> dict[str, Tensor]:
    found = {name: gradient.clone() for name, gradient in actor.optimizer.gradients()}
    actor.optimizer.zero_grad()
    return found


def close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert left.keys() == right.keys()
    largest = max(float(tensor.abs().max()) for tensor in right.values())
    assert largest > 1e-4
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=tolerance * largest, msg=name)


@pytest.mark.parametrize("plan", [PLAN, FIXED], ids=["variable", "fixed"])
def test_micro_batches_of_one_give_the_gradient_of_eight(plan: ThoughtPlan) -> None:
    model = gpt2()
    record = acting(model, plan=plan)
    passes = {
        "policy": (NOTHING, lambda actor: policy_pass(actor, record)),
        "next token": (AnchorSettings(next_token=1.0), lambda actor: anchor_pass(actor, record)),
        "conditioned": (AnchorSettings(next_token=0.0, conditioned=1.0), lambda actor: anchor_pass(actor, record)),
    }
    for anchor, backward in passes.values():
        found = []
        for rows in (8, 1, 3):
            actor = actor_on(model, rows=rows, anchor=anchor, plan=plan)
            backward(actor)
            found.append(gradients(actor))
            actor.optimizer.release()
        close(found[1], found[0])
        close(found[2], found[0])


@pytest.mark.parametrize(
    ("plan", "anchor", "centre"),
    [
        (PLAN, BOTH, None),
        (FIXED, BOTH, None),
        (replace(FIXED, group=2), BOTH, None),
        (replace(PLAN, group=3), BOTH, None),
        (replace(FIXED, group=2), AnchorSettings(next_token=0.7), None),
        (replace(FIXED, group=2), BOTH.model_copy(update={"mixture": 0.4}), None),
        (PLAN, BOTH, SamplingSettings(temperature=0.7)),
        (replace(FIXED, group=2), BOTH, SamplingSettings(temperature=0.7)),
    ],
    ids=["variable", "fixed", "group", "variable group", "text alone", "mixture", "centred", "centred group"],
)
def test_one_reading_for_policy_and_anchors_gives_the_gradient_of_two(
    plan: ThoughtPlan, anchor: AnchorSettings, centre: SamplingSettings | None
) -> None:
    model = gpt2()
    record = acting(model, plan=plan)
    actor = actor_on(model, rows=3, anchor=anchor, plan=plan, centre=centre)
    assert actor._one_pass
    policy, anchors = policy_pass(actor, record), anchor_pass(actor, record)
    apart = gradients(actor)
    together = actor._backward(actor.engine, record, aggregate="token", anchored=True)
    close(gradients(actor), apart)
    assert together.policy == pytest.approx(policy)
    assert (together.text, together.conditioned) == pytest.approx(anchors)


@pytest.mark.parametrize("parity", [False, True])
def test_parity_keeps_passes_of_their_own(parity: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios must come from rows as they were sampled: without continuations behind the thoughts."""
    honest, asked = TreeModel.policy, []

    def noting(self: TreeModel, *given: Any, **options: Any) -> PolicyOutput:
        asked.append((options["actions"], options["text"], options["continuations"]))
        return honest(self, *given, **{**options, "parity": False})

    record = acting(gpt2())
    monkeypatch.setattr(TreeModel, "policy", noting)
    actor_on(gpt2(), anchor=BOTH, parity=parity).step(record)
    assert asked == ([(True, False, False), (False, True, True)] if parity else [(True, True, True)])


def test_a_whole_step_does_not_depend_on_micro_batches() -> None:
    found, weights = [], []
    for rows in (8, 1):
        model = gpt2()
        found.append(actor_on(model, rows=rows, anchor=BOTH).step(acting(model)))
        weights.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    for name in found[0].__dataclass_fields__:
        assert getattr(found[0], name) == pytest.approx(getattr(found[1], name), rel=1e-9), name
    close(weights[0], weights[1], 1e-9)


def test_the_first_step_is_reinforce_on_the_plain_model() -> None:
    model = gpt2()
    record = acting(model, distance=0.0)
    actor = actor_on(model, rows=3)
    sums = policy_pass(actor, record)
    found = gradients(actor)
    actor.optimizer.release()
    plain, total = PlainModel(model), torch.zeros((), dtype=torch.float64)
    for item in items_of(BATCH, record.thoughts):
        advantage = record.need("advantage_BRT")[item.row, item.branch, : len(item.thought)]
        total = total - (advantage * plain.actions(item)).sum()
    count = int(record.mask_BRT.sum())
    total = total / count
    total.backward()
    close(found, slopes(model), 1e-9)
    # Every ratio is one: nothing is clipped, the policy has not moved, and the loss is minus the mean advantage.
    assert sums["clipped"] == 0
    assert sums["kl_positive"] == pytest.approx(0, abs=1e-12)
    assert sums["loss_sum"] == pytest.approx(-float(record.need("advantage_BRT").sum()))
    assert sums["tokens"] == sums["count"] == count


def test_later_steps_clip_after_mixing_by_a_loop() -> None:
    model = gpt2()
    record = acting(model, distance=0.6)
    stats = actor_on(model, rows=2).step(record)
    plain, loss, clipped, divergence, tokens = PlainModel(model := gpt2()), 0.0, 0, 0.0, 0
    for item in items_of(BATCH, record.thoughts):
        log_now = plain.actions(item).tolist()
        for step in range(len(item.thought)):
            at = (item.row, item.branch, step)
            log_ratio = log_now[step] - float(record.need("log_old_BRT")[at])
            ratio, advantage = math.exp(log_ratio), float(record.need("advantage_BRT")[at])
            bounded = min(max(ratio, 0.8), 1.28)
            loss -= min(ratio * advantage, bounded * advantage)
            clipped += (advantage > 0 and ratio >= 1.28) or (advantage < 0 and ratio <= 0.8)
            divergence += ratio - 1 - log_ratio
            tokens += 1
    assert 0 < clipped < tokens
    assert stats.tokens == tokens
    assert stats.policy_loss == pytest.approx(loss / tokens)
    assert stats.clip_fraction == pytest.approx(clipped / tokens)
    assert stats.policy_kl == pytest.approx(divergence / tokens)
    assert not stats.skipped


def test_anchors_are_the_losses_of_plain_rows() -> None:
    model = gpt2()
    record = acting(model)
    actor = actor_on(model, rows=3, anchor=BOTH)
    text_loss, after_loss = anchor_pass(actor, record)
    found = gradients(actor)
    actor.optimizer.release()
    plain = PlainModel(model)
    documents = [
        BATCH.tokens_BS[row][BATCH.document_BS[row] == document].tolist()
        for row in range(8)
        for document in sorted(set(BATCH.document_BS[row].tolist()) - {-1})
    ]
    text = torch.cat([-plain.log_probs(ids, 1) for ids in documents]).mean()
    after = torch.cat([-plain.after(item) for item in items_of(BATCH, record.thoughts)]).mean()
    (0.7 * text + 1.3 * after).backward()
    assert text_loss == pytest.approx(text.item())
    assert after_loss == pytest.approx(after.item())
    close(found, slopes(model), 1e-9)


@pytest.mark.parametrize("rows", [3, 8])
def test_answers_can_stay_out_of_the_next_token_anchor(rows: int) -> None:
    """The mean over next tokens that follow no position within the horizon, by a loop over plain rows."""
    model = gpt2()
    actor = actor_on(model, rows=rows, anchor=AnchorSettings(next_token=1.0, answers=False))
    text_loss, _ = anchor_pass(actor, acting(model))
    found = gradients(actor)
    actor.optimizer.release()
    plain, kept, left_out = PlainModel(model), [], 0
    for row in range(8):
        documents = BATCH.document_BS[row]
        answers = {p + h for p in BATCH.positions_BP[row].tolist() if p >= 0 for h in range(1, PLAN.horizon + 1)}
        for document in sorted(set(documents.tolist()) - {-1}):
            places = (documents == document).nonzero()[:, 0].tolist()
            losses = -plain.log_probs(BATCH.tokens_BS[row][documents == document].tolist(), 1)
            stay = torch.tensor([place not in answers for place in places[1:]])
            kept.append(losses[stay])
            left_out += int((~stay).sum())
    assert left_out > 0
    mean = torch.cat(kept).mean()
    mean.backward()
    assert text_loss == pytest.approx(mean.item())
    close(found, slopes(model), 1e-9)


@pytest.mark.parametrize("horizon", [1, 3, 12])
def test_the_anchors_denominators_by_a_loop(horizon: int) -> None:
    text = after = 0
    for row in range(8):
        documents = BATCH.document_BS[row].tolist()
        text += sum(a == b >= 0 for a, b in pairwise(documents))
        for p in BATCH.positions_BP[row].tolist():
            if p >= 0:
                after += sum(i < len(documents) and documents[i] == documents[p] for i in range(p + 1, p + 1 + horizon))
    assert anchor_counts(BATCH.document_BS, BATCH.positions_BP, horizon) == (text, after)
    plan = replace(FIXED, horizon=horizon)
    with torch.no_grad():
        read = TreeModel(gpt2(), plan).policy(BATCH, thoughts_for(BATCH, plan), text=True, continuations=True)
    masks = read.need("text_mask_BS"), read.need("continuation_mask_BRH")
    assert [int(mask.sum()) for mask in masks] == [text, after]


def broken(record: Trajectories) -> Trajectories:
    """One advantage is no number: the loss is none either, but the clipped token passes no gradient on."""
    advantage = record.need("advantage_BRT").clone()
    advantage[0, 0, 0] = float("nan")
    return record.having(advantage_BRT=advantage)


@pytest.mark.parametrize("harm", ["loss", "gradient"])
def test_what_is_no_number_is_skipped_and_counted(harm: str) -> None:
    model = gpt2()
    actor, good = actor_on(model), acting(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def bad_step() -> StepStats:
        if harm == "loss":
            return actor.step(broken(good))
        hook = model.get_parameter("transformer.h.0.mlp.c_fc.weight").register_hook(
            lambda gradient: gradient * float("inf")
        )
        stats = actor.step(good)
        hook.remove()
        return stats

    assert bad_step().skipped
    assert (actor.skipped, actor.optimizer.skipped, actor.optimizer.steps) == (1, 1, 0)
    assert bad_step().skipped
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    # Nothing of the skipped updates is left over in the next one.
    fresh = gpt2()
    actor_on(fresh).step(acting(fresh))
    assert not actor.step(good).skipped
    assert (actor.skipped, actor.optimizer.skipped) == (0, 2)
    assert all(tensor.equal(fresh.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert not all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert bad_step().skipped
    assert bad_step().skipped
    with pytest.raises(RunFailed, match="3 actor updates in a row had losses or gradients that are not finite"):
        bad_step()


def test_minibatches_are_a_fresh_partition_of_the_texts_every_pass() -> None:
    actor = actor_on(gpt2())
    passes = [actor.minibatches(11, window, reuse) for window in (1, 2) for reuse in (0, 1)]
    for parts in passes:
        assert len(parts) == 4
        assert sorted(np.concatenate([part.numpy() for part in parts]).tolist()) == list(range(11))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert len({str([part.tolist() for part in parts]) for parts in passes}) == 4
    assert [part.tolist() for part in actor.minibatches(11, 1, 0)] == [part.tolist() for part in passes[0]]
    assert len(actor.minibatches(3, 1, 0)) == 3


def test_in_parity_the_first_ratio_is_exactly_one() -> None:
    model = gpt2(torch.float32)
    drawn = sample(
        TreeModel(model, PLAN), BATCH, SamplingSettings(parity=True), seed=1, role="actor", window=1, rows=8
    )  # fmt: skip
    record = drawn.having(advantage_BRT=torch.ones_like(drawn.thoughts.log_q_BRT) * drawn.mask_BRT)
    sums = policy_pass(actor_on(model, parity=True), record)
    assert sums["mismatch"] == sums["kl"] == sums["kl_positive"] == 0
    assert sums["loss_sum"] == -int(record.mask_BRT.sum())


LAW = SamplingSettings(temperature=0.7, top_k=9)


def sampling_law(logits_V: Tensor) -> Tensor:
    """q of `LAW` by hand: the nine likeliest legal tokens at temperature 0.7."""
    legal = [token for token in range(len(logits_V)) if token not in PLAN.forbidden_ids]
    kept = sorted(legal, key=lambda token: -float(logits_V[token]))[:9]
    weight = {token: math.exp(float(logits_V[token]) / 0.7) for token in kept}
    q_V = torch.zeros(len(logits_V), dtype=torch.float64)
    for token in kept:
        q_V[token] = weight[token] / sum(weight.values())
    return q_V


@pytest.mark.parametrize(
    "ratio",
    [RatioSettings(), RatioSettings(denominator="sampler"), RatioSettings(correction="truncated", cap=1.1)],
    ids=["recomputed", "sampler", "truncated"],
)
def test_score_centring_by_enumeration_of_all_actions(ratio: RatioSettings) -> None:
    """What centring adds to the gradient is Σ Ã·E_q[cρ∇log π_θ | s] / count, each action of each state by itself."""
    model = gpt2()
    record = acting(model)
    actor = actor_on(model, rows=3, ratio=ratio, centre=LAW)
    old = PlainModel(gpt2())
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.data += (
                0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)).double()
            )
    policy_pass(actor, record)
    centred = gradients(actor)
    actor.centring = None
    policy_pass(actor, record)
    plainly = gradients(actor)
    actor.optimizer.release()

    total = torch.zeros((), dtype=torch.float64)
    for item in items_of(BATCH, record.thoughts):
        row = [*item.prefix, *PLAN.open_ids, *item.thought]
        start = len(item.prefix) + len(PLAN.open_ids)
        for step in range(len(item.thought)):
            logits = [m(torch.tensor([row[: start + step]]), use_cache=False).logits[0, -1] for m in (model, old.model)]
            log_new, log_old = (
                x.index_fill(0, torch.tensor(PLAN.forbidden_ids), -math.inf).log_softmax(0) for x in logits
            )
            q_V = sampling_law(logits[1].detach())
            advantage = record.need("advantage_BRT")[item.row, item.branch, step]
            for action in q_V.nonzero().flatten().tolist():
                below = q_V[action].log() if ratio.denominator == "sampler" else log_old[action]
                factor = (log_new[action] - below).exp().detach()
                if ratio.correction == "truncated":
                    factor = factor * min(float(log_old[action].detach().exp() / q_V[action]), ratio.cap)
                total = total + advantage * q_V[action] * factor * log_new[action]
    (total / int(record.mask_BRT.sum())).backward()
    wanted = slopes(model)
    close({name: centred[name] - plainly[name] for name in centred}, wanted, 1e-9)


def test_what_is_centred_is_the_policy_of_the_opening() -> None:
    """Untouched, q is π_old = π_θ and nothing changes; later the old weights are remembered, saved and restored."""
    model = gpt2()
    record = acting(model, distance=0.0)
    actor, plain = actor_on(model, centre=SamplingSettings()), actor_on(gpt2())
    policy_pass(actor, record)
    policy_pass(plain, record)
    close(gradients(actor), gradients(plain), 1e-9)
    assert actor.centring is not None
    opening = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    actor.step(record)
    old = actor.centring.old.model
    assert all(tensor.equal(opening[name]) for name, tensor in old.state_dict().items())
    assert not any(parameter.requires_grad for parameter in old.parameters())
    other = gpt2(seed=9)
    second = actor_on(other, centre=SamplingSettings())
    second.load_state_dict(actor.state_dict())
    assert actor.step(record) == second.step(record)
    assert all(tensor.equal(other.state_dict()[name]) for name, tensor in model.state_dict().items())
    actor.remember()
    assert all(tensor.equal(old.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_saved_actor_goes_on_bit_for_bit() -> None:
    model, other = gpt2(), gpt2(seed=9)
    first, second = actor_on(model, anchor=BOTH), actor_on(other, anchor=BOTH)
    record = acting(model)
    first.step(record)
    first.step(broken(record))
    second.load_state_dict(first.state_dict())
    assert second.skipped == 1
    one, two = first.step(record), second.step(record)
    assert one == two
    assert all(tensor.equal(other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_without_the_policy_only_the_anchors_move_it() -> None:
    model, other = gpt2(), gpt2()
    record = acting(model)
    changed = record.having(advantage_BRT=record.need("advantage_BRT") * -2)
    stats = actor_on(model, anchor=BOTH).step(record, policy=False)
    actor_on(other, anchor=BOTH).step(changed, policy=False)
    assert stats.tokens == 0
    assert all(tensor.equal(other.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert not model.transformer.wte.weight.equal(gpt2().transformer.wte.weight)
