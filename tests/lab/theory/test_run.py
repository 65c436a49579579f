"""The laboratory as a whole: every label of the plan is there, everything holds, and rows say what a reader needs."""

import math

import pytest

from tfive.errors import UserError
from tfive_lab.theory.run import run, select
from tfive_lab.theory.statement import REGISTRY, at_most, equal
from tfive_lab.theory.statements import statements

LABELS = {
    "prop:checkpoint-decomposition",
    "eq:prediction-risk-split",
    "lem:return-risk",
    "eq:population-prediction-transfer",
    "eq:critic-collapse-example",
    "lem:trajectory-policy-gradient",
    "prop:surrogate-tangency",
    "eq:trajectory-importance-gradient",
    "eq:offpolicy-baseline-cancellation",
    "lem:ppo-nonexpansive",
    "prop:value-gradient-bound",
    "eq:value-risk-confidence",
    "prop:gae-propagation",
    "eq:gae-error-moment",
    "eq:gae-gradient-bound",
    "prop:two-cancellation-conditions",
    "eq:twin-drift-coefficient",
    "eq:twin-mc-special-case",
    "eq:harmful-ppo-example",
    "eq:rare-state-predictive-score",
    "eq:twin-mixture-example-weights",
    "eq:ppo-drift-decomposition",
    "eq:mixture-conditional-mean",
    "lem:moment-duality",
    "eq:sample-square-is-not-mean-square",
    "eq:mean-prediction-residual",
    "eq:auxiliary-information-gap",
    "eq:single-rollout-gradients",
    "prop:population-saddle",
    "prop:signal-retention",
    "prop:population-mixture-comparison",
    "thm:complementary-drift",
    "cor:admission-budget",
    "eq:moment-statistical-bound",
    "prop:fisher-amplification",
    "cor:fisher-clipping",
    "eq:fisher-drift-bound",
    "eq:pointwise-regularization",
    "eq:td-mean-bellman",
    "eq:td-action-weighted-mean",
    "lem:visible-floor",
    "prop:prefix-transfer",
    "eq:prefix-kl-control",
    "eq:grpo-rollout-threshold",
    "eq:total-rollout-budget",
    "eq:repeated-rollout-budget",
}


def test_every_label_is_checked() -> None:
    assert set(statements()) == LABELS


def test_everything_holds() -> None:
    rows = run(worlds=12, seed=11)
    assert [row.label for row in rows if not row.passed] == []
    for row in rows:
        assert row.checks > 0
        assert math.isfinite(row.margin)
        assert row.worlds == (0 if REGISTRY[row.label].on_world is None else 21)


def test_margins() -> None:
    assert equal(1.0, 1.0 + 5e-10) > 0 > equal(1.0, 1.0 + 5e-9)
    assert equal(1e6, 1e6 * (1 + 5e-10)) > 0
    assert at_most(1.0, 1.0) > 0 > at_most(1.0, 1.0 - 1e-8)


def test_not_a_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    label = "lem:visible-floor"
    monkeypatch.setattr(REGISTRY[label], "on_world", lambda world: iter([float("nan"), 1.0]))
    (row,) = run([label], worlds=1)
    assert not row.passed


def test_unknown_labels_and_negative_counts_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"--statement 'eq:pointwise' is unknown; the nearest label is eq:pointwise-reg"
    ):
        select(["eq:pointwise"])
    with pytest.raises(UserError, match="--worlds"):
        run(worlds=-1)
