"""The heads read what they may, start where they should, and can learn what they must."""

import dataclasses

import pytest
import torch
from torch import Tensor

from tfive.rl.calibration.heads import MeanHead, Standardizer, WeightHead
from tfive.rl.calibration.mixture import MeanInputs, WeightInputs

N, T, D, E, F = 40, 6, 5, 7, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_inputs(seed: int = 0) -> WeightInputs:
    time = (torch.arange(1, T + 1) / T).expand(N, T)
    return WeightInputs(
        prefix_NTD=3 + 10 * draw(N, T, D, seed=seed),
        value_NT2=draw(N, T, 2, seed=seed + 1),
        time_NT=time,
        action_NTE=0.01 * draw(N, T, E, seed=seed + 2),
        log_prob_NT=-draw(N, T, seed=seed + 3).abs(),
    )


def mean_inputs(seed: int = 0) -> MeanInputs:
    weight = weight_inputs(seed)
    return MeanInputs(
        prefix_NTD=weight.prefix_NTD,
        value_NT2=weight.value_NT2,
        time_NT=weight.time_NT,
        remaining_NT=1 - weight.time_NT,
        potential_NT=draw(N, T, seed=seed + 4),
        scoring_NTF=draw(N, T, F, seed=seed + 5),
    )


MASK = torch.ones(N, T, dtype=torch.bool)


@pytest.fixture
def weight_head() -> WeightHead:
    head = WeightHead(D, E, width=16, action_width=4, seed=3)
    head.standardize(weight_inputs(), MASK)
    return head


@pytest.fixture
def mean_head() -> MeanHead:
    head = MeanHead(D, F, width=16, dropout=0.2, seed=3)
    head.standardize(mean_inputs(), MASK)
    return head


def test_weight_starts_near_a_half_and_its_first_layers_learn(weight_head: WeightHead) -> None:
    weight = weight_head(weight_inputs())
    assert weight.shape == (N, T)
    assert (weight - 0.5).abs().max() < 0.05
    assert weight.std() > 0
    weight.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in weight_head.parameters())


def test_weight_stays_in_the_unit_interval(weight_head: WeightHead) -> None:
    with torch.no_grad():
        for parameter in weight_head.parameters():
            parameter.mul_(100)
    weight = weight_head(weight_inputs())
    assert weight.min() >= 0
    assert weight.max() <= 1
    assert weight.std() > 0.1


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(WeightInputs)])
def test_weight_reads_every_input_it_may(weight_head: WeightHead, name: str) -> None:
    inputs = weight_inputs()
    changed = dataclasses.replace(inputs, **{name: getattr(inputs, name) + 0.1 * getattr(inputs, name)})
    assert not weight_head(inputs).equal(weight_head(changed))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(MeanInputs)])
def test_mean_reads_every_input_it_may(mean_head: MeanHead, name: str) -> None:
    mean_head.eval()
    inputs = mean_inputs()
    changed = dataclasses.replace(inputs, **{name: getattr(inputs, name) + 0.1 * getattr(inputs, name)})
    assert not mean_head(inputs).equal(mean_head(changed))


def test_state_only_weight_does_not_know_the_action(weight_head: WeightHead) -> None:
    inputs, other = weight_inputs(), weight_inputs(seed=50)
    swapped = dataclasses.replace(inputs, action_NTE=other.action_NTE, log_prob_NT=other.log_prob_NT)
    assert not weight_head(inputs).equal(weight_head(swapped))
    assert weight_head(inputs.state_only()).equal(weight_head(swapped.state_only()))


def test_visible_mean_does_not_know_the_scoring_text(mean_head: MeanHead) -> None:
    mean_head.eval()
    inputs, other = mean_inputs(), mean_inputs(seed=50)
    swapped = dataclasses.replace(inputs, scoring_NTF=other.scoring_NTF, potential_NT=other.potential_NT)
    assert not mean_head(inputs).equal(mean_head(swapped))
    assert mean_head(inputs.visible()).equal(mean_head(swapped.visible()))


def test_each_step_is_judged_by_itself(weight_head: WeightHead, mean_head: MeanHead) -> None:
    """Changing a later step leaves the earlier outputs bit-equal: no leak along the thought or between rows."""
    mean_head.eval()
    for head, inputs in ((weight_head, weight_inputs()), (mean_head, mean_inputs())):
        later = inputs.map(lambda tensor: torch.cat([tensor[:, :3], tensor[:, 3:] * 2 + 1], dim=1))
        before, after = head(inputs), head(later)
        assert before[:, :3].equal(after[:, :3])
        assert not before[:, 3:].equal(after[:, 3:])
        torch.testing.assert_close(head(inputs.rows(torch.tensor([5, 2]))), before[[5, 2]])


def test_standardisation_is_fixed_and_saved(weight_head: WeightHead) -> None:
    other = weight_inputs(seed=9)
    before = weight_head(other)
    weight_head.train()
    weight_head(weight_inputs(seed=20))
    assert weight_head(other).equal(before)
    twin = WeightHead(D, E, width=16, action_width=4, seed=8)
    twin.load_state_dict(weight_head.state_dict())
    assert twin(other).equal(before)
    twin.standardize(other, MASK)
    assert not twin(other).equal(before)


def test_standardizer_moments_and_constants() -> None:
    features = torch.tensor([[1.0, 7.0], [3.0, 7.0], [1000.0, 8.0]])
    layer = Standardizer(2)
    layer.fix(features, torch.tensor([True, True, False]))
    assert layer(features[:2]).tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    with pytest.raises(ValueError, match="no valid entry"):
        layer.fix(features, torch.zeros(3, dtype=torch.bool))


def test_mean_dropout_bound_and_seed() -> None:
    inputs = mean_inputs()
    bounded = MeanHead(D, F, width=16, bound=0.3, dropout=0.5, seed=1)
    with torch.no_grad():
        bounded.joined.last.weight.mul_(1e4)
    assert bounded(inputs).abs().max() <= 0.3
    assert bounded(inputs).abs().max() > 0.29
    assert not bounded(inputs).equal(bounded(inputs))
    bounded.eval()
    assert bounded(inputs).equal(bounded(inputs))
    torch.manual_seed(7)
    first = MeanHead(D, F, seed=1).state_dict()
    torch.manual_seed(8)
    same, other = MeanHead(D, F, seed=1).state_dict(), MeanHead(D, F, seed=2).state_dict()
    assert all(first[key].equal(same[key]) for key in first)
    assert not all(first[key].equal(other[key]) for key in first)


def test_heads_can_fit_an_action_rule_and_a_hidden_mean(weight_head: WeightHead, mean_head: MeanHead) -> None:
    weight_data, mean_data = weight_inputs(), mean_inputs()
    wanted_weight = (weight_data.action_NTE[..., 0] > 0).float()
    wanted_mean = torch.tanh(mean_data.scoring_NTF[..., 0]) + 0.1 * mean_data.value_NT2[..., 0]
    parameters = [*weight_head.parameters(), *mean_head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(300):
        loss = (weight_head(weight_data) - wanted_weight).square().mean()
        loss = loss + (mean_head(mean_data) - wanted_mean).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean_head.eval()
    assert (weight_head(weight_data) - wanted_weight).square().mean() < 0.05
    assert (mean_head(mean_data) - wanted_mean).square().mean() < 0.15 * wanted_mean.var()
