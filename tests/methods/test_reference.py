"""Every method's credit and loss against small cases worked out by plain loops, one row per thought."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from scene import ANCHOR, GROUP, STEPS, play, until, weights, writer
from torch import Tensor

from stage import PLAN, Item, PlainModel, Tally, items_of, texts, thoughts_for
from tfive.methods.method import Method
from tfive.rl.groups import with_group_advantages
from tfive.rl.settings import ActorSettings, AnchorSettings
from tfive.rl.teacher import Teacher
from tfive.rl.trajectory import Trajectories
from tfive.rl.weight_slots import wide
from tfive.tree.forward import TreeModel

pytestmark = pytest.mark.model
NOTHING = AnchorSettings(next_token=0.0)


def gradient(method: Method[Any], acting: Trajectories) -> dict[str, Tensor]:
    """What one update of the method would give its optimizer."""
    optimizer = method.parts.actor.optimizer
    kept: dict[str, Tensor] = {}

    def keep(*, counted: bool = True) -> Any:
        kept.update({name: tensor.clone() for name, tensor in optimizer.gradients()})
        return optimizer.skip(0.0)

    optimizer.step = keep
    method.learn(acting)
    return kept


def close(found: dict[str, Tensor], model: torch.nn.Module, loss: Tensor) -> None:
    """The gradients are those of `loss` in the plain model."""
    named = dict(model.named_parameters())
    wanted = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    for (name, parameter), slope in zip(named.items(), wanted):
        expected = torch.zeros_like(parameter) if slope is None else slope
        torch.testing.assert_close(found.get(name, torch.zeros_like(parameter)), expected, rtol=1e-6, atol=1e-9)
    assert max(float(tensor.abs().max()) for tensor in found.values()) > 1e-4


def items(method: Method[Any], acting: Trajectories) -> list[Item]:
    return list(items_of(acting.texts, acting.thoughts, method.parts.actor.engine.plan))


def moved(method: Method[Any], by: float = 0.05) -> None:
    """Let the policy differ from the one that sampled, so that ratios leave 1."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in method.parts.actor.engine.model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """min{ρA, clip(ρ)A} as the paper writes it (eq:ppo)."""
    return torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def ratios(method: Method[Any], acting: Trajectories) -> list[Tensor]:
    """Per thought, π_θ/π_old of its tokens: the plain model as it is now against what was recorded."""
    engine = method.parts.actor.engine
    plain, old = PlainModel(engine.model, engine.plan), acting.need("log_old_BRT")
    found = items(method, acting)
    return [(plain.actions(item) - old[item.row, item.branch, : len(item.thought)]).exp() for item in found]


def surrogates(method: Method[Any], acting: Trajectories) -> list[Tensor]:
    """Per thought, the clipped terms of its tokens; some are clipped, so that clipping is part of what is compared."""
    rule, found, outside = method.parts.actor.settings, [], 0
    for item, ratio in zip(items(method, acting), ratios(method, acting)):
        advantage = acting.need("advantage_BRT")[item.row, item.branch].tolist()
        terms = [clipped(r, a, rule.clip_low, rule.clip_high) for r, a in zip(ratio, advantage)]
        outside += sum(not rule.clip_low < r < rule.clip_high for r in ratio.tolist())
        found.append(torch.stack(terms))
    assert 0 < outside < sum(map(len, found))
    return found


# --- group-relative credit


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        ("none", (-2.0, -1.0, 3.0)),
        ("leave_one_out", (1 - 4.0, 2 - 3.5, 6 - 1.5)),
        ("std", tuple(x / (math.sqrt(7) + 1e-6) for x in (-2.0, -1.0, 3.0))),
    ],
)
def test_a_thought_is_compared_with_its_own_position_alone(baseline: Any, expected: tuple[float, ...]) -> None:
    batch = texts(rows=2, count=2)
    thoughts = thoughts_for(batch)
    wide_ = thoughts.branches(0, None)
    tripled = type(thoughts)(*(getattr(wide_, n).repeat_interleave(3, 1) for n in thoughts.__dataclass_fields__))
    # Three different thoughts at every position.
    tripled = replace(tripled, tokens_BRT=tripled.tokens_BRT + torch.arange(6)[:, None])
    acting = Trajectories("actor", 1, batch, tripled)
    reward_BR = torch.tensor([[1.0, 2, 6, 5, 5, 5], [1, 2, 6, 100, 200, 600]], dtype=torch.float64)
    found = with_group_advantages(acting, reward_BR, 3, baseline).need("advantage_BRT")
    assert found.shape == tripled.tokens_BRT.shape
    for row, start, wanted in ((0, 0, expected), (0, 3, (0.0, 0.0, 0.0)), (1, 0, expected)):
        for member, value in enumerate(wanted):
            length = int(tripled.length_BR[row, start + member])
            tokens = found[row, start + member].tolist()
            assert tokens[:length] == pytest.approx([value] * length, abs=1e-12)
            assert tokens[length:] == [0.0] * (PLAN.length - length)
    # The last row's second position holds no item.
    assert not found[1, 3:].any()


def test_equal_thoughts_of_a_group_have_equal_credit() -> None:
    batch = texts(rows=2, count=2)
    one = thoughts_for(batch)
    group = type(one)(*(getattr(one, n).repeat_interleave(4, 1) for n in one.__dataclass_fields__))
    tokens_BRT = group.tokens_BRT.clone()
    tokens_BRT[0, 3, 0] += 1
    acting = Trajectories("actor", 1, batch, replace(group, tokens_BRT=tokens_BRT))
    # Coarse rounding, as in bfloat16: the same thought scored at four places of a row.
    noise_BR = 0.01 * torch.randn(tokens_BRT.shape[:2], generator=torch.Generator().manual_seed(0))
    reward_BR = (0.5 + noise_BR).double()
    found_BR = with_group_advantages(acting, reward_BR, 4, "std").need("advantage_BRT")[..., 0]
    first = reward_BR[0, :4].clone()
    first[:3] = first[:3].mean()
    assert found_BR[0, :4].tolist() == pytest.approx(((first - first.mean()) / (first.std() + 1e-6)).tolist(), abs=1e-6)
    assert not found_BR[0, 4:].any()
    assert not found_BR[1].any()


# --- Quiet-STaR with GRPO


@pytest.mark.parametrize("normalisation", ["std", "none", "leave_one_out"])
def test_grpo_credits_the_whole_thought(normalisation: str) -> None:
    method = play("quiet-star-grpo", normalisation=normalisation)
    until(method, "update")
    acting, plain = method.held["actor"], PlainModel(writer(), method.parts.actor.engine.plan)
    found = items(method, acting)
    sigma = method.report["reward_scale"]
    for first in range(0, len(found), GROUP):
        group = found[first : first + GROUP]
        with torch.no_grad():
            gain = [float(plain.after(item).mean() - plain.without(item).mean()) for item in group]
        reward = [max(-3.0, min(3.0, value / sigma)) for value in gain]
        mean = fmean(reward)
        deviation = math.sqrt(sum((r - mean) ** 2 for r in reward) / (GROUP - 1))
        wanted = {
            "none": [r - mean for r in reward],
            "std": [(r - mean) / (deviation + 1e-6) for r in reward],
            "leave_one_out": [r - (sum(reward) - r) / (GROUP - 1) for r in reward],
        }[normalisation]
        for item, value in zip(group, wanted):
            tokens = acting.need("advantage_BRT")[item.row, item.branch].tolist()
            assert tokens == pytest.approx([value] * len(item.thought) + [0.0] * (4 - len(item.thought)), abs=1e-6)
    assert len({len(item.thought) for item in found}) > 1


@pytest.mark.parametrize("name", ["quiet-star-grpo", "rlp"])
def test_a_group_has_the_anchors_of_a_single_thought(name: str) -> None:
    method = play(name, actor=ActorSettings(minibatches=1))
    until(method, "update")
    acting, model = method.held["actor"], method.parts.actor.engine.model
    plain = PlainModel(model, method.parts.actor.engine.plan)
    silent = acting.having(advantage_BRT=torch.zeros_like(acting.need("advantage_BRT")))
    firsts = [item for item in items(method, acting) if item.branch % GROUP == 0]
    after = torch.cat([-plain.after(item) for item in firsts]).mean()
    loss = ANCHOR.next_token * likelihood(model, acting) + ANCHOR.conditioned * after
    close(gradient(method, silent), model, loss)


def test_grpo_averages_over_tokens() -> None:
    method = play("quiet-star-grpo", anchor=NOTHING, actor=ActorSettings(clip_low=0.9, clip_high=1.1, minibatches=1))
    until(method, "update")
    moved(method)
    acting = method.held["actor"]
    terms = torch.cat(surrogates(method, acting))
    model = method.parts.actor.engine.model
    close(gradient(method, acting), model, -terms.mean())


# --- RLP


def test_rlp_rewards_the_next_token_against_the_teacher() -> None:
    method = play("rlp", decay=0.5)
    until(method, "open")
    student, teacher = (copy.deepcopy(method.parts.actor.engine.model) for _ in range(2))
    method.parts.teacher.average.copy_to(teacher.named_parameters())
    until(method, "update")
    acting, plan = method.held["actor"], method.parts.actor.engine.plan
    found, gains = items(method, acting), []
    for first in range(0, len(found), GROUP):
        group = found[first : first + GROUP]
        with torch.no_grad():
            reward = [
                float(PlainModel(student, plan).after(item)[0] - PlainModel(teacher, plan).without(item)[0])
                for item in group
            ]
        gains += reward
        for item, r in zip(group, reward):
            value = GROUP / (GROUP - 1) * (r - fmean(reward))
            tokens = acting.need("advantage_BRT")[item.row, item.branch].tolist()
            assert tokens[: len(item.thought)] == pytest.approx([value] * len(item.thought), abs=1e-6)
    assert method.report["information_gain"] == pytest.approx(fmean(gains), abs=1e-6)
    # A teacher that had not followed would be the student itself.
    assert not torch.equal(teacher.lm_head.weight, student.lm_head.weight)


def test_rlp_averages_over_each_thought_and_then_over_thoughts() -> None:
    method = play("rlp", anchor=NOTHING, actor=ActorSettings(clip_low=0.9, clip_high=1.1, minibatches=1))
    until(method, "update")
    moved(method)
    acting = method.held["actor"]
    thoughts = surrogates(method, acting)
    assert len({len(terms) for terms in thoughts}) > 1
    loss = -torch.stack([terms.mean() for terms in thoughts]).mean()
    by_token = -torch.cat(thoughts).mean()
    assert loss.item() != pytest.approx(by_token.item(), rel=1e-3)
    model = method.parts.actor.engine.model
    close(gradient(method, acting), model, loss)


def test_the_teacher_starts_at_the_model_and_follows_every_step() -> None:
    method = play("rlp", decay=0.9)
    start = weights(method)
    until(method, "update")

    def teacher() -> Tensor:
        average = method.parts.teacher.average.average
        return torch.cat([average[name].flatten() for name, _ in method.parts.actor.engine.model.named_parameters()])

    assert teacher().equal(start)
    wanted = start
    for _ in range(STEPS):
        method.advance()
        wanted = 0.9 * wanted + 0.1 * weights(method)
        torch.testing.assert_close(teacher(), wanted, rtol=0, atol=1e-14)
    until(method, "update")
    # The second window goes on with the average; it does not start again.
    torch.testing.assert_close(teacher(), wanted, rtol=0, atol=1e-14)
    assert not wanted.equal(weights(method))


def test_a_bfloat16_model_has_a_float32_teacher() -> None:
    model = writer().bfloat16()
    teacher = Teacher(TreeModel(copy.deepcopy(model), PLAN), decay=0.999, rows=2)
    masters = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    teacher.follow(masters)
    step = {name: tensor + 1e-3 for name, tensor in masters.items()}
    teacher.follow(step)
    for name, average in teacher.average.average.items():
        assert average.dtype == wide(torch.bfloat16) == torch.float32
        torch.testing.assert_close(average, masters[name] + 1e-6, rtol=0, atol=2e-7)
    saved = copy.deepcopy(teacher.state_dict())
    again = Teacher(TreeModel(copy.deepcopy(model), PLAN), decay=0.5, rows=2)
    again.load_state_dict(saved)
    batch = texts()
    assert again.average.decay == 0.999
    assert again.losses(batch).equal(teacher.losses(batch))


# --- Quiet-STaR with PPO


def test_ppo_credits_tokens_by_one_critic_and_its_own_batch() -> None:
    method = play("quiet-star-ppo")
    until(method, "update")
    acting = method.held["actor"]
    values, rewards = acting.need("values_2BRT"), acting.need("rewards_BRT")
    assert len(values) == 1
    raw: dict[tuple[int, int], list[float]] = {}
    for item in items(method, acting):
        place, length = (item.row, item.branch), len(item.thought)
        value = [*values[0][place][:length].tolist(), 0.0]
        reward, trace = rewards[place].tolist(), 1 - 1 / length
        advantage = [0.0] * (length + 1)
        for t in reversed(range(length)):
            advantage[t] = reward[t] + value[t + 1] - value[t] + trace * advantage[t + 1]
        raw[place] = advantage[:length]
    pooled = [x for one in raw.values() for x in one]
    mean = fmean(pooled)
    deviation = math.sqrt(fmean([(x - mean) ** 2 for x in pooled]) + 1e-6)
    for place, advantage in raw.items():
        found = acting.need("advantage_BRT")[place].tolist()
        assert found[: len(advantage)] == pytest.approx([(x - mean) / deviation for x in advantage], abs=1e-6)
        assert not any(found[len(advantage) :])
    returns = [r for place, one in raw.items() for r in acting.need("returns_BRT")[place][: len(one)].tolist()]
    guess = [v for place, one in raw.items() for v in values[0][place][: len(one)].tolist()]
    middle = fmean(returns)
    missed, spread = (sum((r - g) ** 2 for r, g in zip(returns, other)) for other in (guess, [middle] * len(guess)))
    assert method.report["r2"] == [pytest.approx(1 - missed / spread, abs=1e-6)]


def test_ppo_warms_up_for_a_fixed_time_and_never_asks() -> None:
    method = play("quiet-star-ppo", warmup_rounds=3)
    done = []
    for _ in range(2):
        done.append([method.advance()])
        while method.phase != "open":
            done[-1].append(method.advance())
    # Three rounds of one pass, the first with its value-head pass before; then one a window.
    assert done[0] == ["open", *["fit"] * 4, "collect", *["update"] * STEPS, "close"]
    assert done[1] == ["open", "fit", "collect", *["update"] * STEPS, "close"]
    tally = method.parts.telemetry
    assert isinstance(tally, Tally)
    assert set(tally.amounts) == {"critic_fit", "actor"}
    assert tally.events == []


def test_ppo_can_leave_the_actor_frozen_for_some_windows() -> None:
    method = play("quiet-star-ppo", frozen_windows=1, warmup_rounds=1)
    start = weights(method)
    critic = copy.deepcopy(method.parts.critics.state_dict()["critics"][0])
    until(method, "open")
    assert weights(method).equal(start)
    assert "policy_loss" not in method.report
    assert "actor_gain" in method.report
    later = method.parts.critics.state_dict()["critics"][0]
    assert any(not later[name].equal(critic[name]) for name in critic)
    until(method, "open")
    assert not weights(method).equal(start)


# --- likelihood alone


def likelihood(model: torch.nn.Module, acting: Trajectories) -> Tensor:
    """Mean next-token loss inside documents, one document a row."""
    losses = []
    for tokens, documents in zip(acting.texts.tokens_BS.tolist(), acting.texts.document_BS.tolist()):
        for number in sorted(set(documents) - {-1}):
            row = torch.tensor([[t for t, d in zip(tokens, documents) if d == number]])
            log_p = model(row, use_cache=False).logits[0, :-1].log_softmax(-1)
            losses.append(-log_p.gather(1, row[0, 1:, None])[:, 0])
    return torch.cat(losses).mean()


def test_ntp_is_the_likelihood_of_the_texts() -> None:
    method = play("ntp")
    until(method, "update")
    acting, model = method.held["actor"], method.parts.actor.engine.model
    assert acting.count == 0
    close(gradient(method, acting), model, ANCHOR.next_token * likelihood(model, acting))


def test_anchor_only_reads_thoughts_and_rewards_none() -> None:
    method = play("anchor-only")
    until(method, "update")
    acting, model = method.held["actor"], method.parts.actor.engine.model
    plain = PlainModel(model, method.parts.actor.engine.plan)
    # Nothing is computed that a policy gradient alone would need: the control's seconds are its own.
    assert acting.advantage_BRT is None
    assert acting.log_old_BRT is None
    after = torch.cat([-plain.after(item) for item in items(method, acting)]).mean()
    loss = ANCHOR.next_token * likelihood(model, acting) + ANCHOR.conditioned * after
    close(gradient(method, acting), model, loss)
