"""Methods with critics that draw several thoughts at a position: what critics see of the others, and what is credited
where no critic is good enough."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from t5_window import QUICK, advance_to, same, t5_of, window
from torch import Tensor

from stage import assembled
from tfive.config.config import Config
from tfive.rl.actor import under
from tfive.rl.batch_baseline import with_batch_advantages
from tfive.rl.critic import scoring_numbers
from tfive.rl.critics import Critics
from tfive.rl.diagnosis import others_score
from tfive.rl.gae import PilotNormaliser
from tfive.rl.siblings import numbers_of_others, unit_of_others
from tfive.rl.trajectory import Trajectories

pytestmark = pytest.mark.model
GROUP = 3
METHODS = ("t5", "quiet-star-ppo", "quiet-star-grpo", "rlp", "anchor-only", "ntp")
GROUPS = (f"thought.group={GROUP}", "critic.sees=group", "window.probe=0", *QUICK)


def test_others_are_those_of_the_same_position_that_are_there() -> None:
    draw = torch.Generator().manual_seed(0)
    return_BR, valid_BR = torch.randn(4, 6, generator=draw), torch.rand(4, 6, generator=draw) < 0.7
    found = numbers_of_others(return_BR, valid_BR, GROUP)
    alone = 0
    for b in range(4):
        for r in range(6):
            first = r // GROUP * GROUP
            others = [float(return_BR[b, o]) for o in range(first, first + GROUP) if o != r and valid_BR[b, o]]
            if not valid_BR[b, r] or not others:
                alone += 1
                assert found[b, r].tolist() == [0, 0]
                continue
            mean = sum(others) / len(others)
            deviation = math.sqrt(sum((one - mean) ** 2 for one in others) / len(others))
            assert found[b, r].tolist() == pytest.approx([mean, deviation], abs=1e-6)
    assert 0 < alone < 24


def test_a_position_has_the_unit_of_its_other_thoughts() -> None:
    draw = torch.Generator().manual_seed(1)
    return_BR, valid_BR = torch.randn(5, 6, generator=draw, dtype=torch.float64), torch.ones(5, 6, dtype=torch.bool)
    valid_BR[0, 1:3] = valid_BR[1, 0] = False
    return_BR[2, :3] = 0.7
    found = unit_of_others(return_BR, valid_BR, GROUP)
    for b, r in valid_BR.nonzero().tolist():
        first = r // GROUP * GROUP
        others = [float(return_BR[b, o]) for o in range(first, first + GROUP) if o != r and valid_BR[b, o]]
        mean = sum(others) / max(len(others), 1)
        squares = sum((one - mean) ** 2 for one in others)
        assert float(found[b, r]) == pytest.approx(math.sqrt((squares + 1) / (len(others) + 1)), abs=1e-9)
        moved = return_BR.clone()
        moved[b, r] += 3
        assert float(unit_of_others(moved, valid_BR, GROUP)[b, r]) == pytest.approx(float(found[b, r]), abs=1e-12)
    assert found[0, 0] == 1, "nobody else is there"
    torch.testing.assert_close(found[2, :3], torch.full((3,), GROUP**-0.5, dtype=torch.float64))


def drawn(home: Path, *asked: str) -> tuple[Any, Trajectories]:
    """A run that has fitted its critics, and a fresh set."""
    run = assembled(home, *GROUPS, *asked)
    method = t5_of(run)
    advance_to(method, "qualify")
    return run, method.parts.rollout.collect("qualify", method.window)


def test_what_a_critic_sees_is_not_of_its_own_thought(home: Path) -> None:
    run, fresh = drawn(home)
    whole_BR, valid_BR = fresh.need("returns_BRT")[..., 0], fresh.thoughts.valid_BR
    seen_BRN = fresh.need("others_BRN")
    assert float(seen_BRN[valid_BR].abs().max()) > 0
    b, r = map(int, valid_BR.nonzero()[0])
    moved_BR = whole_BR.clone()
    moved_BR[b, r] += 1
    again_BRN = numbers_of_others(moved_BR, valid_BR, run.actor.engine.plan.group)
    changed = (again_BRN != seen_BRN).any(-1)
    assert not changed[b, r]
    assert sorted(map(tuple, changed.nonzero().tolist())) == [
        (b, o) for o in range(r // GROUP * GROUP, r // GROUP * GROUP + GROUP) if o != r and valid_BR[b, o]
    ]
    numbers_BRTN = scoring_numbers(fresh)
    horizon = run.actor.engine.plan.horizon
    assert numbers_BRTN.shape[-1] == run.config.critic.numbers_seen(horizon) == horizon + 4
    torch.testing.assert_close(numbers_BRTN[..., 0, horizon + 1 : horizon + 3], seen_BRN)


def test_what_the_mean_of_the_others_alone_foresees_is_told(home: Path) -> None:
    _, fresh = drawn(home)
    returns_BRT, mask_BRT = fresh.need("returns_BRT"), fresh.mask_BRT
    errors, spread = 0.0, 0.0
    mean = float(returns_BRT[mask_BRT].double().mean())
    for b, r, t in mask_BRT.nonzero().tolist():
        first, before = r // GROUP * GROUP, float(fresh.need("rewards_BRT")[b, r, :t].double().sum())
        others = [o for o in range(first, first + GROUP) if o != r and fresh.thoughts.valid_BR[b, o]]
        baseline = sum(float(fresh.need("rewards_BRT")[b, o].double().sum()) for o in others) / len(others) - before
        errors += (float(returns_BRT[b, r, t]) - baseline) ** 2
        spread += (float(returns_BRT[b, r, t]) - mean) ** 2
    assert others_score(fresh)["r2_of_others"] == pytest.approx(1 - errors / spread, abs=1e-4)
    assert others_score(replace(fresh, others_BRN=None)) == {}
    again = assembled(home, *GROUPS, "qualify.rule=fixed")
    window(again.method)
    assert "r2_of_others" in again.method.report


@pytest.mark.parametrize(
    "asked",
    [
        ("critic.adapt=top", "critic.blocks=1", "critic.features=policy"),
        ("critic.adapt=probe", "critic.blocks=1", "critic.features=policy"),
        ("critic.adapt=full",),
        ("critic.adapt=head",),
    ],
)
def test_values_are_those_of_each_thought_alone(home: Path, asked: tuple[str, ...]) -> None:
    """The same critics on the same thoughts, one at each position."""
    run, fresh = drawn(home, *asked)
    together_2BRT = run.critics.evaluate(fresh).values_2BRT
    run.critics.release()
    single = alone(run.critics)
    for member in range(GROUP):
        values_2BRT = single.evaluate(member_of(fresh, member)).values_2BRT
        single.release()
        torch.testing.assert_close(values_2BRT, together_2BRT[:, :, member::GROUP], rtol=1e-4, atol=1e-5)
    assert float(together_2BRT.abs().max()) > 0


def alone(critics: Critics) -> Critics:
    """The critics with passes of one thought a position."""
    base = critics.base
    base.tree = under(base.tree, replace(base.tree.plan, group=1))
    for critic in critics.critics:
        if critic.tree is not None:
            critic.tree = under(critic.tree, replace(critic.tree.plan, group=1))
    return critics


def member_of(fresh: Trajectories, member: int) -> Trajectories:
    """One thought of each group; its activations are computed anew."""
    branches = {name: getattr(fresh, name) for name in fresh.__dataclass_fields__}
    kept: dict[str, Any] = {
        name: value[:, member::GROUP] for name, value in branches.items() if isinstance(value, Tensor) and "_BR" in name
    }
    thoughts = fresh.thoughts.branches(member, None, GROUP)
    return replace(fresh, **kept, thoughts=thoughts, lower_BND=None, states_BRTD=None, scoring_BRF=None)


@pytest.mark.parametrize(
    "asked",
    [
        ("critic.adapt=top", "critic.blocks=1", "critic.features=policy", "qualify.rule=fixed"),
        ("qualify.eta=0.99", "qualify.attempts=1", "qualify.on_failure=baseline", "critic.sees=prefix"),
        ("method=quiet-star-ppo", "gae.unit=position"),
    ],
)
def test_a_window_of_groups_resumes(asked: tuple[str, ...], tmp_path: Path) -> None:
    given = (*GROUPS, *asked)
    run, again = assembled(tmp_path, *given), assembled(tmp_path, *given)
    before = {name: weight.clone() for name, weight in run.actor.engine.model.state_dict().items()}
    advance_to(run.method, "collect")
    again.method.load_state_dict(run.method.state_dict())
    again.ledger.load_state_dict(run.ledger.state_dict())
    for one in (run, again):
        window(one.method)
    after = [one.actor.engine.model.state_dict() for one in (run, again)]
    assert same(*after)
    assert not same(before, after[0])


def test_without_critics_a_thought_is_held_against_its_group(home: Path) -> None:
    _, fresh = drawn(home)
    found_BRT = with_batch_advantages(fresh, GROUP).need("advantage_BRT")
    whole_BR, valid_BR = fresh.need("returns_BRT")[..., 0].double(), fresh.thoughts.valid_BR
    raw = torch.zeros(fresh.mask_BRT.shape, dtype=torch.float64)
    for b, r in valid_BR.nonzero().tolist():
        first = r // GROUP * GROUP
        others = [float(whole_BR[b, o]) for o in range(first, first + GROUP) if o != r and valid_BR[b, o]]
        raw[b, r] = (float(whole_BR[b, r]) - sum(others) / len(others) if others else 0.0) * fresh.mask_BRT[b, r]
    scale = math.sqrt(float(raw[fresh.mask_BRT].var(unbiased=False)) + 1e-6)
    torch.testing.assert_close(found_BRT.double(), raw / scale, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("credit", ["critics", "baseline"])
def test_advantages_of_a_position_are_in_its_unit(home: Path, credit: str) -> None:
    """Only the unit differs: those of the run, over the position's unit, up to the deviation both are divided by."""
    run, fresh = drawn(home, "gae.unit=position")
    unit_BR = unit_of_others(fresh.need("returns_BRT")[..., 0].double(), fresh.thoughts.valid_BR, GROUP)
    if credit == "critics":
        values = run.critics.evaluate(fresh)
        found = run.critics.advantages(fresh, values).need("gae_2BRT")
        run.critics.siblings = 1
        plain = run.critics.advantages(fresh, values).need("gae_2BRT")
        expected = plain / unit_BR[..., None]
    else:
        found = with_batch_advantages(fresh, GROUP, by_position=True).need("advantage_BRT")
        raw = with_batch_advantages(fresh, GROUP).need("advantage_BRT") / unit_BR[..., None]
        expected = raw * (found[fresh.mask_BRT].std() / raw[fresh.mask_BRT].std())
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)
    assert float(unit_BR.std()) > 0.01


@pytest.mark.parametrize("asked", [(), ("qualify.eta=0.99", "qualify.attempts=1", "qualify.on_failure=baseline")])
def test_a_window_takes_the_unit_it_is_asked_for(tmp_path: Path, asked: tuple[str, ...]) -> None:
    """The actor's set is the same thoughts by the same critics; what they are credited with is not."""
    acting = []
    for unit in ("run", "position"):
        run = assembled(tmp_path, *GROUPS, f"gae.unit={unit}", *(asked or ("qualify.rule=fixed",)))
        advance_to(run.method, "update")
        acting.append(run.method.held["actor"])
    plain, own = acting
    assert torch.equal(plain.thoughts.tokens_BRT, own.thoughts.tokens_BRT)
    mask = plain.mask_BRT
    unit_BR = unit_of_others(plain.need("returns_BRT")[..., 0], plain.thoughts.valid_BR, GROUP)
    if asked:
        ratio = (own.need("advantage_BRT") * unit_BR[..., None] / plain.need("advantage_BRT"))[mask]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-3, atol=1e-4)
    assert not torch.equal(plain.need("advantage_BRT")[mask], own.need("advantage_BRT")[mask])


def test_a_positions_unit_widens_bounds_and_rounding(home: Path) -> None:
    """The largest advantage of all: bounded values at both ends and others that came to the same."""
    bounded = ("critic.bounded=true", "calibration.mean_bound=6", "gae.unit=position", "qualify.rule=fixed")
    run = assembled(home, *GROUPS, *bounded)
    method = t5_of(run)
    advance_to(method, "calibrate")
    method.normaliser = PilotNormaliser(0.5, 2.0, 10)
    clip, alike = run.config.reward.clip, torch.zeros(1, GROUP)
    unit = float(unit_of_others(alike, torch.ones_like(alike, dtype=torch.bool), GROUP)[0, 0])
    found = method._signal_bounds()
    assert found is not None
    assert found.signal == pytest.approx((6 * clip / unit + 0.5) / 2)
    data = method._calibration_data("head_train")
    steps, values = run.actor.engine.plan.length, float(data.weight_inputs.value_NT2.abs().max())
    widest = torch.finfo(torch.float32).eps * steps * (2 * clip + 2 * values) / unit / 2
    assert method._rounding(data) == pytest.approx(widest)


def test_a_configuration_with_groups_has_its_controls() -> None:
    drawn_by = {method: Config.load("worked-answers", overrides=[f"method={method}"]).group for method in METHODS}
    assert drawn_by == {"t5": 8, "quiet-star-ppo": 8, "quiet-star-grpo": 8, "rlp": 8, "anchor-only": 1, "ntp": 1}
