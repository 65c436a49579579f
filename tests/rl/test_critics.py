"""Twin critics: what they learn, whose half they see, what stays frozen, and what is read once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stage import PLAN, llama, texts, thoughts_for
from tfive.errors import RunFailed
from tfive.rl.critic import FrozenBase, build_pair
from tfive.rl.critics import Critics
from tfive.rl.settings import CriticSettings
from tfive.rl.trajectory import Trajectories

pytestmark = pytest.mark.model
ADAPT = ["head", "top", "lora", "full"]


def twins(adapt: str = "top", *, rows: int = 3, dtype: torch.dtype = torch.float32, **changes: Any) -> Critics:
    base = llama(dtype).requires_grad_(False)
    options = {"blocks": 1, "lora_rank": 2, "width": 8, "lr": 3e-3, "head_lr": 3e-2, "minibatches": 4} | changes
    settings = CriticSettings(adapt=adapt, **options)
    pair = build_pair(base, PLAN, settings, seed=1)
    for critic in pair:
        critic.head.to(dtype)
    return Critics(FrozenBase(base, PLAN, settings), pair, settings, alpha=1.0, seed=2, rows=rows)


def fitting(rows: int = 8, seed: int = 1) -> Trajectories:
    """Returns that a critic can predict: by the step, and by the token before the action."""
    batch = texts(rows=rows, seed=seed)
    thoughts = thoughts_for(batch, seed=seed + 1)
    step_T = torch.arange(PLAN.length)
    before_BRT = torch.cat([torch.zeros_like(thoughts.tokens_BRT[..., :1]), thoughts.tokens_BRT[..., :-1]], -1)
    returns_BRT = (0.5 * step_T - 1 + 0.5 * (before_BRT % 2)) * thoughts.mask_BRT
    noise = torch.randn(returns_BRT.shape, generator=torch.Generator().manual_seed(seed + 2))
    rewards_BRT = noise * thoughts.mask_BRT
    return Trajectories("critic_fit", 1, batch, thoughts, returns_BRT=returns_BRT, rewards_BRT=rewards_BRT)


def fit(critics: Critics, record: Trajectories, passes: int = 1, warmup: bool = True) -> list[list[float]]:
    frozen = critics.evaluate(record).values_2BRT
    return [critics.fit_pass(record, frozen, 1, number, warmup=warmup) for number in range(passes)]


def weights(critics: Critics) -> list[dict[str, Tensor]]:
    return [{name: tensor.clone() for name, tensor in one.state_dict().items()} for one in critics.critics]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(left[name].equal(right[name]) for name in left)


def mean_error(critics: Critics, record: Trajectories) -> list[float]:
    mask = record.mask_BRT
    values = critics.evaluate(record).values_2BRT
    return [float((one - record.need("returns_BRT"))[mask].square().mean() / 2) for one in values]


@pytest.mark.parametrize("adapt", ADAPT)
def test_fitting_lowers_the_loss_on_a_learnable_target(adapt: str) -> None:
    critics, record = twins(adapt), fitting()
    critics.unfreeze()
    before = mean_error(critics, record)
    losses = fit(critics, record, 5)
    after = mean_error(critics, record)
    for number in range(2):
        assert losses[-1][number] < 0.5 * losses[0][number]
        assert after[number] < 0.5 * before[number]
        assert losses[0][number] == pytest.approx(before[number], rel=0.5)


@pytest.mark.parametrize(
    ("target", "warmup", "moves"), [(100.0, False, False), (-100.0, False, True), (100.0, True, True)]
)
def test_the_clipped_loss_pushes_no_further_than_the_clip(target: float, warmup: bool, moves: bool) -> None:
    """A prediction that has come more than ε_v towards its target since the fit began stays (eq:value-loss)."""
    critics, record = twins("head"), fitting()
    before = weights(critics)
    frozen = critics.evaluate(record).values_2BRT - 1.0
    far = record.having(returns_BRT=torch.full_like(record.need("returns_BRT"), target) * record.mask_BRT)
    critics.fit_pass(far, frozen, 1, 0, warmup=warmup)
    assert [not same(*pair) for pair in zip(before, weights(critics))] == [moves, moves]


def test_a_disjoint_critic_never_sees_the_others_half() -> None:
    record = fitting()
    number_B = record.texts.items_BP.amax(1) // 2
    odd_B11 = (number_B % 2 == 1)[:, None, None]
    assert odd_B11.any()
    assert not odd_B11.all()
    harmed = record.having(returns_BRT=torch.where(odd_B11, 50.0, record.need("returns_BRT")) * record.mask_BRT)
    found = []
    for one in (record, harmed):
        critics = twins("top", pair="disjoint")
        critics.unfreeze()
        fit(critics, one, 2)
        found.append(weights(critics))
    assert same(found[0][0], found[1][0])
    assert not same(found[0][1], found[1][1])
    # Both halves are used: the second critic of the undisturbed pair moved as well.
    start = weights(twins("top", pair="disjoint"))
    assert not same(found[0][0], start[0])
    assert not same(found[0][1], start[1])


def test_a_disjoint_pair_with_an_empty_half_stops_before_it_moves() -> None:
    record = fitting()
    even = (record.texts.items_BP.amax(1) // 2) % 2 == 0
    critics = twins("top", pair="disjoint")
    before = weights(critics)
    with pytest.raises(RunFailed, match=r"critic\.pair = disjoint: none of the \d+ fitting texts .* half of critic 2"):
        fit(critics, record.rows(even.nonzero().flatten()))
    assert all(same(*pair) for pair in zip(before, weights(critics)))
    fit(twins("top", pair="same"), record.rows(even.nonzero().flatten()))


def test_the_same_pair_sees_everything() -> None:
    record = fitting()
    harmed = record.having(returns_BRT=record.need("returns_BRT").index_fill(0, torch.tensor([0]), 5.0))
    found = []
    for one in (record, harmed):
        critics = twins("head")
        fit(critics, one)
        found.append(weights(critics))
    assert not same(found[0][0], found[1][0])
    assert not same(found[0][1], found[1][1])


def test_a_bracket_ends_with_ordered_predictions() -> None:
    record = fitting()
    noise = torch.randn(record.mask_BRT.shape, generator=torch.Generator().manual_seed(0))
    record = record.having(returns_BRT=noise * record.mask_BRT)
    critics = twins("head", pair="bracket", expectile=0.9, width=0)
    fit(critics, record, 40)
    low, high = (values[record.mask_BRT] for values in critics.evaluate(record).values_2BRT)
    assert (low < high).float().mean() > 0.95
    target = noise[record.mask_BRT]
    assert low.mean() < target.mean() < high.mean()


def test_fitting_does_not_depend_on_rows_per_pass() -> None:
    found = []
    for rows in (8, 3):
        critics, record = twins("top", rows=rows, dtype=torch.float64, minibatches=1), fitting()
        critics.unfreeze()
        losses = fit(critics, record, 2)
        judged = critics.evaluate(record)
        found.append((torch.tensor(losses), judged.values_2BRT, judged.features_2BRTE))
    for left, right in zip(*found):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adapt", ["top", "lora", "full"])
def test_head_warm_up_leaves_the_blocks_alone(adapt: str) -> None:
    critics, record = twins(adapt), fitting()
    assert critics.head_only
    start = weights(critics)
    fit(critics, record, 2)
    for before, after in zip(start, weights(critics)):
        body = {name for name in before if name.startswith("body.")}
        assert body
        assert all(before[name].equal(after[name]) for name in body)
        assert not any(before[name].equal(after[name]) for name in before if name.startswith("head."))
    critics.unfreeze()
    warm = weights(critics)
    fit(critics, record, 2)
    for before, after in zip(warm, weights(critics)):
        assert any(not before[name].equal(after[name]) for name in before if name.startswith("body."))


def test_a_critic_without_blocks_has_nothing_to_unfreeze() -> None:
    assert not twins("head").head_only
    assert not twins("top", head_passes=0).head_only


@pytest.mark.parametrize("adapt", ADAPT)
def test_shared_features_are_read_once_per_set(adapt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    critics, first, second = twins(adapt), fitting(), fitting(rows=5, seed=9)
    calls: list[int] = []
    read = FrozenBase.read

    def counted(self: FrozenBase, *arguments: Any, **options: Any) -> Any:
        calls.append(len(arguments[0].tokens_BS))
        return read(self, *arguments, **options)

    monkeypatch.setattr(FrozenBase, "read", counted)
    fit(critics, first, 3)
    critics.evaluate(first.having(values_2BRT=torch.zeros(2, 8, 2, 4)))
    assert calls == [3, 3, 2]
    critics.evaluate(second)
    assert calls == [3, 3, 2, 3, 2]
    critics.release()
    critics.evaluate(second)
    assert calls == [3, 3, 2, 3, 2, 3, 2]


@pytest.mark.parametrize("adapt", ["head", "probe", "top"])
def test_what_was_read_is_never_stale(adapt: str) -> None:
    first = fitting()
    others = [
        fitting(seed=9),
        replace(first, texts=texts(rows=8, seed=5)),
        replace(first, thoughts=thoughts_for(first.texts, seed=7)),
    ]
    critics = twins(adapt)
    critics.evaluate(first)
    for other in others:
        found, expected = critics.evaluate(other), twins(adapt).evaluate(other)
        assert found.values_2BRT.equal(expected.values_2BRT)
        assert found.features_2BRTE.equal(expected.features_2BRTE)
        assert not found.values_2BRT.equal(critics.evaluate(first).values_2BRT)


def test_the_two_start_apart_and_stay_separate() -> None:
    critics, record = twins("top"), fitting()
    first, second = critics.evaluate(record).values_2BRT
    assert not first.equal(second)
    shared = {p.data_ptr() for p in critics.critics[0].parameters()} & {
        p.data_ptr() for p in critics.critics[1].parameters() if p.requires_grad
    }
    assert not shared


def test_advantages_are_both_gaes_of_the_same_rewards() -> None:
    critics, record = twins("head"), fitting()
    judged = critics.evaluate(record)
    found = critics.advantages(record, judged)
    assert found.need("values_2BRT").equal(judged.values_2BRT)
    for number in range(2):
        for row, branch in record.thoughts.valid_BR.nonzero().tolist():
            length = int(record.thoughts.length_BR[row, branch])
            trace = 1 - 1 / length
            value = [*judged.values_2BRT[number, row, branch, :length].tolist(), 0.0]
            reward = record.need("rewards_BRT")[row, branch].tolist()
            expected = [0.0] * PLAN.length
            for t in range(length):
                expected[t] = sum(
                    trace ** (k - t) * (reward[k] + value[k + 1] - value[k]) for k in range(t, length)
                )  # fmt: skip
            assert found.need("gae_2BRT")[number, row, branch].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_diverged_critic_stops_the_run() -> None:
    critics, record = twins("head"), fitting()
    frozen = critics.evaluate(record).values_2BRT
    returns = record.need("returns_BRT").clone()
    returns[0, 0, 0] = float("inf")
    with pytest.raises(RunFailed, match="critic 1 diverged in window 3: its gradient is not finite"):
        critics.fit_pass(record.having(returns_BRT=returns), frozen, 3, 0, warmup=True)
    with torch.no_grad():
        critics.critics[1].head.last.bias.fill_(float("nan"))
    with pytest.raises(RunFailed, match="a critic diverged: values of the critic_fit set are not finite"):
        critics.evaluate(record)


def test_a_saved_pair_goes_on_bit_for_bit() -> None:
    record = fitting()
    first, second = twins("lora"), twins("lora")
    first.unfreeze()
    fit(first, record, 2)
    second.evaluate(fitting(seed=9))
    second.load_state_dict(first.state_dict())
    assert not second.head_only
    assert fit(first, record, 2) == fit(second, record, 2)
    assert all(same(*pair) for pair in zip(weights(first), weights(second)))
