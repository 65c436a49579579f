"""Deliberate faults in the trainer's mathematics, and the test that each of them turns red.

`FAULTS` is the table: what is broken, how, and which test notices. Every one is put into the real code, the named test
is called in this process, and it must raise AssertionError; the same call passes on the sound code. Faults that a
guard of the trainer would stop by itself have that guard taken out, so that the test is what notices.
`python tests/faults/test_trainer_faults.py` prints the table.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tfive.methods.method import Method
from tfive.methods.t5 import T5
from tfive.rl import gae, gate, losses, reward, sampling
from tfive.rl.actor import Actor
from tfive.rl.calibration.calibrator import Calibrator
from tfive.rl.calibration.mixture import LearnedWeight, mix
from tfive.rl.calibration.moments import displacement
from tfive.rl.calibration.validation import Validator
from tfive.rl.critics import Critics
from tfive.rl.gae import PilotNormaliser
from tfive.rl.roles import Ledger
from tfive.rl.teacher import Teacher
from tfive.tree.forward import TreeModel

TESTS = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.model

Inject = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """One fault: `inject` breaks the code, and the function `caught_by` (FILE::TEST, below tests/) must fail on it.

    `arguments` are the values of the test's parameters; the fixtures it asks for are supplied by `call`.
    """

    what: str
    inject: Inject
    caught_by: str
    arguments: dict[str, Any] = field(default_factory=dict)


def everywhere(original: Any, broken: Any) -> Inject:
    """Put `broken` in the place of a function wherever the package or a test has imported it."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        for module in list(sys.modules.values()):
            ours = getattr(module, "__name__", "").startswith("tfive") or str(TESTS) in str(
                getattr(module, "__file__", "")
            )
            if not ours or module.__name__ == __name__:
                continue
            for name, value in list(vars(module).items()):
                if value is original:
                    patch.setattr(module, name, broken)

    return inject


def method(owner: type, name: str, broken: Callable[..., Any]) -> Inject:
    """Put `broken` in the place of a method; it gets the original as its first argument."""
    original = inspect.getattr_static(owner, name)

    def replaced(*arguments: Any, **options: Any) -> Any:
        return broken(original, *arguments, **options)

    return lambda patch: patch.setattr(owner, name, replaced)


def both(*injects: Inject) -> Inject:
    def inject(patch: pytest.MonkeyPatch) -> None:
        for one in injects:
            one(patch)

    return inject


# --- the policy's loss

_SURROGATE, _TERMS, _SHARES = losses.clipped_surrogate, losses.policy_terms, losses.token_shares


def _attached_surrogate(ratio: Any, advantage: Any, low: float, high: float) -> Any:
    active = losses.active_mask(ratio.detach(), advantage, low, high)
    return torch.where(active, ratio, ratio.detach().clamp(low, high)) * advantage


def _attached_weight(self: LearnedWeight, inputs: Any, first: Any, second: Any) -> Any:
    return mix(self.head(inputs.state_only() if self.state_only else inputs).to(first.dtype), first, second)


def _shifted_mask(log_prob: Any, log_old: Any, log_sampler: Any, advantage: Any, mask: Any, **options: Any) -> Any:
    return _TERMS(log_prob, log_old, log_sampler, advantage, mask.roll(1, -1), **options)


def _ratio_to_the_sampler(log_prob: Any, log_old: Any, log_sampler: Any, *rest: Any, **options: Any) -> Any:
    return _TERMS(log_prob, log_sampler, log_sampler, *rest, **options)


def _ratio_to_itself(log_prob: Any, log_old: Any, *rest: Any, **options: Any) -> Any:
    return _TERMS(log_prob, log_prob.detach(), *rest, **options)


def _negated(log_prob: Any, log_old: Any, log_sampler: Any, advantage: Any, *rest: Any, **options: Any) -> Any:
    return _TERMS(log_prob, log_old, log_sampler, -advantage, *rest, **options)


def _clip_of_the_other_sign(ratio: Any, advantage: Any, low: float, high: float) -> Any:
    return ((advantage < 0) & (ratio < high)) | ((advantage > 0) & (ratio > low)) | (advantage == 0)


def _inverted_correction(log_old: Any, log_sampler: Any, correction: Any, cap: float) -> Any:
    return _CORRECTION(log_sampler, log_old, correction, cap)


def _by_token(mask: Any, aggregate: Any, dtype: Any) -> Any:
    return _SHARES(mask, "token", dtype)


_CORRECTION = losses.correction_weight


def _anchors_again(original: Any, self: Actor, engine: Any, some: Any, *, aggregate: Any, anchored: bool) -> Any:
    sums = original(self, engine, some, aggregate=aggregate, anchored=anchored)
    if aggregate is not None and anchored:
        original(self, self.reader, self._first_thoughts(some), aggregate=None, anchored=True)
    return sums


def _anchors_of_all(original: Any, self: TreeModel, *arguments: Any, **options: Any) -> Any:
    return original(self, *arguments, **options | {"of_first": False})


# --- advantages, rewards and values

_TRACE, _REWARDS, _GAE, _GROUP = gae.trace, reward.checkpoint_rewards, gae.masked_gae, losses.group_advantages


def _trace_of_the_longest(length: Any, alpha: float) -> Any:
    return _TRACE(torch.full_like(length, int(length.max())), alpha)


def _value_beyond_the_end(rewards: Any, value: Any, mask: Any, lam: Any, discount: float = 1.0) -> Any:
    """Bootstraps from the position behind the last action."""
    whole = _GAE(rewards, value, torch.ones_like(mask), lam, discount)
    return torch.where(mask, whole, torch.zeros_like(whole))


def _late_rewards(potential: Any, checkpoint: Any, mask: Any, steps: int) -> Any:
    return _REWARDS(potential, checkpoint, mask, steps).roll(1, -1)


def _undifferenced(potential: Any, checkpoint: Any, mask: Any, steps: int) -> Any:
    good = _REWARDS(potential, checkpoint, mask, steps)
    return good.cumsum(-1) * (good != 0)


def _returns_so_far(rewards: Any, mask: Any) -> Any:
    return torch.where(mask, rewards.cumsum(-1), torch.zeros_like(rewards))


def _lenient_value_loss(value: Any, return_: Any, frozen: Any, mask: Any, clip: float) -> Any:
    near = frozen.detach() + (value - frozen.detach()).clamp(-clip, clip)
    loss = 0.5 * torch.minimum((value - return_).square(), (near - return_).square())
    return torch.where(mask, loss, torch.zeros_like(loss)).sum(), mask.sum()


def _member_in_its_baseline(returns: Any, baseline: Any, *rest: Any, **options: Any) -> Any:
    return _GROUP(returns, "none" if baseline == "leave_one_out" else baseline, *rest, **options)


def _swapped_critics(original: Any, self: Critics, trajectories: Any, judged: Any) -> Any:
    found = original(self, trajectories, judged)
    return found.having(gae_2BRT=found.need("gae_2BRT").flip(0))


# --- roles and phases


def _own_batch(original: Any, self: Calibrator, acting: Any, judged: Any, normaliser: Any, mixture: Any) -> Any:
    first, second = acting.need("gae_2BRT")
    return original(self, acting, judged, PilotNormaliser.fit(first, second, acting.mask_BRT, 1e-6), mixture)


def _validation_on_training_texts(original: Any, self: T5, role: str) -> Any:
    if role == "head_train":
        self.seen = original(self, role)  # type: ignore[attr-defined]
    return self.seen  # type: ignore[attr-defined]


def _moving_critics(original: Any, self: Any, acting: Any) -> Any:
    with torch.no_grad():
        self.parts.critics.critics[1].head.last.bias += 1e-3
    return original(self, acting)


def _leaking(original: Any, self: Ledger, role: str, window: int) -> Any:
    own = original(self, role, window)
    return (*own, "head_train") if role == "head_validate" else own


def _scale_of_the_actors_set(original: Any, self: Any) -> Any:
    if "scale" in self.held:
        self.held["scale"] = self.held["actor"]
    return original(self)


def _numbers_of_window_one(original: Any, *arguments: Any, window: int, **options: Any) -> Any:
    return original(*arguments, window=1, **options)


def _teacher_that_stays(original: Any, self: Teacher, weights: Any) -> None:
    if not self.started:
        original(self, weights)


# --- gate and calibration


def _mixed_logits(gate_logit: Any, log_with: Any, log_without: Any) -> Any:
    beta = torch.sigmoid(gate_logit)
    return beta * log_with + (1 - beta) * log_without


def _swapped_gate(gate_logit: Any, log_with: Any, log_without: Any) -> Any:
    return torch.logaddexp(F.logsigmoid(-gate_logit) + log_with, F.logsigmoid(gate_logit) + log_without)


def _displaced_from_one(weight: Any, first: Any, second: Any) -> Any:
    return (weight - 1).square() * (first - second).square()


_POLICY, _REFERENCE = "rl/test_policy_loss.py", "methods/test_reference.py"
_ROLES, _MIXTURES = "methods/test_t5_roles.py", "methods/test_t5_mixtures.py"

FAULTS = (
    Fault("the advantage has the wrong sign", everywhere(losses.policy_terms, _negated),
          f"{_REFERENCE}::test_grpo_averages_over_tokens"),
    Fault("the loss follows the advantage's gradient", everywhere(losses.clipped_surrogate, _attached_surrogate),
          f"{_POLICY}::test_advantage_and_old_probabilities_carry_no_gradient"),
    Fault("the mixture's weight is not detached", lambda p: p.setattr(LearnedWeight, "mixed", _attached_weight),
          "rl/calibration/test_mixture.py::test_a_mixed_advantage_passes_no_gradient_on", {"mixture": "learned"}),
    Fault("the mask of actions is shifted by one", everywhere(losses.policy_terms, _shifted_mask),
          f"{_REFERENCE}::test_rlp_averages_over_each_thought_and_then_over_thoughts"),
    Fault("the ratio divides by the sampler's law", everywhere(losses.policy_terms, _ratio_to_the_sampler),
          "rl/test_actor_reference.py::test_the_ratio_is_taken_against_the_law_that_the_settings_name",
          {"denominator": "recomputed"}),
    Fault("the ratio divides by the policy as it is now", everywhere(losses.policy_terms, _ratio_to_itself),
          f"{_REFERENCE}::test_grpo_averages_over_tokens"),
    Fault("a token is clipped on the other advantage's side", everywhere(losses.active_mask, _clip_of_the_other_sign),
          f"{_POLICY}::test_value_and_gradient_on_a_grid_including_the_boundaries"),
    Fault("the correction divides q by the old policy", everywhere(losses.correction_weight, _inverted_correction),
          f"{_POLICY}::test_loss_and_statistics_match_a_loop",
          {"denominator": "recomputed", "correction": "truncated", "aggregate": "token"}),
    Fault("RLP averages over tokens", everywhere(losses.token_shares, _by_token),
          f"{_REFERENCE}::test_rlp_averages_over_each_thought_and_then_over_thoughts"),
    Fault("the anchors are counted twice", method(Actor, "_backward", _anchors_again),
          f"{_REFERENCE}::test_a_group_has_the_anchors_of_a_single_thought", {"name": "rlp"}),
    Fault("the anchors read every thought of a group", method(TreeModel, "policy", _anchors_of_all),
          f"{_REFERENCE}::test_a_group_has_the_anchors_of_a_single_thought", {"name": "rlp"}),
    Fault("GAE takes λ of the longest thought for all", everywhere(gae.trace, _trace_of_the_longest),
          "rl/test_gae.py::test_adaptive_trace_uses_each_realised_length"),
    Fault("GAE bootstraps beyond the end of a thought", everywhere(gae.masked_gae, _value_beyond_the_end),
          "rl/test_gae.py::test_matches_the_explicit_sum", {"gamma": 1.0}),
    Fault("rewards come one step after their checkpoint", everywhere(reward.checkpoint_rewards, _late_rewards),
          "rl/test_reward.py::test_rewards_potentials_and_returns_match_the_definition"),
    Fault("every checkpoint pays the whole potential", everywhere(reward.checkpoint_rewards, _undifferenced),
          "rl/test_reward.py::test_rewards_potentials_and_returns_match_the_definition"),
    Fault("returns sum what was earned so far", everywhere(reward.returns_to_go, _returns_so_far),
          "rl/test_reward.py::test_rewards_potentials_and_returns_match_the_definition"),
    Fault("the value loss takes the better of both errors", everywhere(losses.clipped_value_loss, _lenient_value_loss),
          "rl/test_value_loss.py::test_clipped_loss_value_and_gradient"),
    Fault("a member counts in its own leave-one-out baseline",
          everywhere(losses.group_advantages, _member_in_its_baseline),
          f"{_REFERENCE}::test_rlp_rewards_the_next_token_against_the_teacher"),
    Fault("the critics' GAEs are exchanged", method(Critics, "advantages", _swapped_critics),
          "rl/test_critics.py::test_advantages_are_both_gaes_of_the_same_rewards"),
    Fault("the normaliser is fitted on the actor's own batch", method(Calibrator, "advantage", _own_batch),
          f"{_MIXTURES}::test_fixed_mixtures_need_no_heads", {"mode": "average", "weight": 0.5}),
    Fault("validation reads head_train's texts", method(T5, "_calibration_data", _validation_on_training_texts),
          f"{_ROLES}::test_validation_outcomes_do_not_reach_the_candidate"),
    Fault("the critics move while the actor is updated", method(Method, "learn", _moving_critics),
          f"{_ROLES}::test_only_the_actor_moves_while_it_is_updated"),
    Fault("the next reward scale comes from the actor's set", method(Method, "close", _scale_of_the_actors_set),
          f"{_ROLES}::test_the_next_scale_comes_from_its_own_disjoint_set"),
    Fault("validation draws texts of head_train as well",
          method(Ledger, "_groups", _leaking),
          "rl/test_roles.py::test_texts_come_from_their_role_and_hold_the_items"),
    Fault("sampling reuses the uniforms of an earlier window",
          everywhere(sampling.branch_uniforms, partial(_numbers_of_window_one, sampling.branch_uniforms)),
          "rl/test_sampling.py::test_thoughts_follow_seed_role_and_window_alone"),
    Fault("the teacher does not follow", method(Teacher, "follow", _teacher_that_stays),
          f"{_REFERENCE}::test_the_teacher_starts_at_the_model_and_follows_every_step"),
    Fault("the gate mixes log-probabilities", everywhere(gate.mixed_log_prob, _mixed_logits),
          "rl/test_gate_loss.py::test_gate_mixes_probabilities_and_its_loss_matches_a_loop"),
    Fault("the gate trusts the wrong prediction", everywhere(gate.mixed_log_prob, _swapped_gate),
          "rl/test_gate_loss.py::test_gate_mixes_probabilities_and_its_loss_matches_a_loop"),
    Fault("displacement is measured from one critic", everywhere(displacement, _displaced_from_one),
          "rl/calibration/test_moments.py::test_integrand_on_the_occupation_measure_and_its_gradients"),
    Fault("validation accepts whatever was learned", method(Validator, "_reason", lambda *_: "retained"),
          f"{_MIXTURES}::test_a_candidate_that_keeps_too_little_signal_is_replaced_by_the_average"),
)  # fmt: skip


def table() -> str:
    """Fault and test, one row each, as Markdown."""
    rows = [f"| {fault.what} | `tests/{fault.caught_by}` |" for fault in FAULTS]
    return "\n".join(["| fault | turns red |", "|---|---|", *rows])


def test_of(path: str) -> Callable[..., None]:
    """The function behind FILE::TEST."""
    file, name = path.split("::")
    folder = str((TESTS / file).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    found: Callable[..., None] = getattr(importlib.import_module(Path(file).stem), name)
    return found


test_of.__test__ = False  # type: ignore[attr-defined]


def call(fault: Fault, home: Path, patch: pytest.MonkeyPatch) -> None:
    """Run the fault's test in this process, with the fixtures that it names."""
    check = test_of(fault.caught_by)
    from t5_window import decide_tests  # found once the methods' tests are on the path

    module = sys.modules[check.__module__]
    made: dict[str, Callable[[], Any]] = {
        "home": lambda: home,
        "verdicts": lambda: decide_tests(patch),
        "engine": lambda: module.TreeModel(module.gpt2(), module.PLAN),
        "mixture": lambda: module.LearnedWeight(module._Head()),
    }
    wanted = inspect.signature(check).parameters
    check(**{name: made[name]() if name in made else fault.arguments[name] for name in wanted})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest run's files, for every fault of a whole window."""
    sys.path.append(str(TESTS / "methods"))
    return tmp_path_factory.mktemp("tiny")


CONTROLS = {(fault.caught_by, repr(fault.arguments)): fault for fault in FAULTS}


@pytest.mark.parametrize("fault", CONTROLS.values(), ids=lambda fault: fault.caught_by)
def test_on_the_sound_code_the_test_passes(fault: Fault, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(fault, home, monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_fault_turns_its_test_red(fault: Fault, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_of(fault.caught_by)
    fault.inject(monkeypatch)
    with pytest.raises(AssertionError):
        call(fault, home, monkeypatch)


if __name__ == "__main__":
    print(table())
