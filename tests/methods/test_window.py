"""What every method owes to a comparison: the same actor items and steps, an honest account, the same measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from stage import Tally, assembled
from tfive.methods.registry import spec_of
from tfive.rl.gate import Experts, Gate
from tfive.training.build import Assembly

pytestmark = pytest.mark.model
METHODS = ("ntp", "anchor-only", "quiet-star-ppo", "quiet-star-grpo", "rlp", "t5")
SMALL = ("thought.group=2",)
QUICK = (
    "calibration.mode=average",
    "window.probe=0.125",
    "qualify.rule=fixed",
    "critic.warmup_rounds=1",
    "window.windows=2",
)
PPO = ("critic.warmup_rounds=2",)


def assembly_of(home: Path, method: str, *more: str) -> Assembly:
    own = {"t5": QUICK, "quiet-star-ppo": PPO}.get(method, SMALL if spec_of(method).group > 1 else ())
    return assembled(home, f"method={method}", "anchor.conditioned=0.5", *own, *more)


def train(run: Assembly, windows: int = 2) -> list[dict[str, Any]]:
    reports = []
    while not run.method.finished(windows):
        run.method.advance()
        if run.method.closed:
            reports.append(run.method.report)
    return reports


@pytest.fixture(scope="module")
def finished(home: Path) -> dict[str, tuple[Assembly, list[dict[str, Any]], list[Tensor]]]:
    """Two windows of every method, with the actor's items as they were drawn."""
    found = {}
    for method in METHODS:
        run = assembly_of(home, method)
        drawn: list[Any] = []
        texts_of = run.method.parts.rollout.texts_of

        def noting(numbers: Any, texts_of: Any = texts_of, drawn: list[Any] = drawn) -> Any:
            drawn.append((len(drawn), texts_of(numbers)))
            return drawn[-1][1]

        run.method.parts.rollout.texts_of = noting
        reports = train(run)
        roles = [row["role"] for row in run.ledger.rows()]
        found[method] = (run, reports, [batch.items_BP for n, batch in drawn if roles[n] == "actor"])
    return found


def test_all_methods_meet_the_same_actor_items_in_the_same_order(finished: Any) -> None:
    items = {method: batches for method, (_, _, batches) in finished.items()}
    assert all(len(batches) == 2 for batches in items.values())
    for method in METHODS:
        assert all(a.equal(b) for a, b in zip(items[method], items["t5"])), method
    assert not items["t5"][0].equal(items["t5"][1])


def test_all_methods_take_the_same_number_of_steps(finished: Any) -> None:
    steps = {method: run.actor.optimizer.steps for method, (run, _, _) in finished.items()}
    assert set(steps.values()) == {2 * finished["t5"][0].config.window.actor_steps}


def test_the_account_counts_every_thought_of_a_group(finished: Any) -> None:
    for method, (run, _, batches) in finished.items():
        tally = run.method.parts.telemetry
        assert isinstance(tally, Tally)
        count = sum(int((batch >= 0).sum()) for batch in batches)
        booked: dict[str, Any] = tally.amounts.get("actor", {})
        assert booked.get("trajectories", 0) == (0 if method == "ntp" else count * run.config.group), method
        extra = set(tally.amounts) - {"actor"}
        assert (
            extra
            == {
                "ntp": set(),
                "anchor-only": set(),
                "rlp": set(),
                "quiet-star-grpo": {"scale"},
                "quiet-star-ppo": {"scale", "critic_fit"},
                "t5": {"scale", "critic_fit", "qualify", "pilot", "extra"},
            }[method]
        )
        # RLP judges a thought by one token, the others by the whole continuation at every checkpoint.
        if method == "rlp":
            assert booked["scored_tokens"] == 2 * booked["trajectories"]


def test_every_thought_method_reports_the_same(finished: Any) -> None:
    common = {
        "window", "anchor_loss", "conditioned_loss", "gradient_norm", "skipped_updates", "actor_gain", "gate_loss",
        "mean_thought_length", "policy_loss", "policy_kl_last", "clip_fraction", "mismatch_kl",
    }  # fmt: skip
    for method, (_, reports, _) in finished.items():
        missing = common - set(reports[-1])
        assert missing == ({"actor_gain", "gate_loss", "mean_thought_length"} if method == "ntp" else set()), method
        moved = reports[-1]["policy_loss"] != 0
        assert moved == (method not in ("ntp", "anchor-only")), method


@pytest.mark.parametrize("method", ["ntp", "anchor-only"])
def test_windows_of_reading_change_nothing_where_nothing_is_rewarded(
    home: Path, method: str, finished: dict[str, tuple[Assembly, list[dict[str, Any]], list[Tensor]]]
) -> None:
    run = assembly_of(home, method, "window.reading=1")
    assert train(run) == finished[method][1]
    if method == "ntp":
        assert "actor" not in run.method.parts.telemetry.amounts


@pytest.mark.parametrize("method", ["t5", "quiet-star-ppo", "quiet-star-grpo", "rlp"])
def test_a_window_of_reading_is_one_of_the_control_and_what_follows_is_the_first(home: Path, method: str) -> None:
    run, control = assembly_of(home, method, "window.reading=1", "window.windows=3"), assembly_of(home, "anchor-only")
    done, gain_square = [], 0.0
    while not run.method.finished(1):
        done.append(run.method.advance())
        if acting := run.method.held.get("actor"):
            gain_square = float(acting.gain_BR[acting.thoughts.valid_BR].double().square().mean())
    assert done == ["open", "collect", *["update"] * run.config.window.actor_steps, "close"]
    train(control, 1)
    mine, theirs = (one.actor.engine.model.state_dict() for one in (run, control))
    # A group draws more thoughts than the control, but the first of each is the same.
    assert all(mine[name].allclose(theirs[name], rtol=0, atol=1e-5) for name in mine)
    assert run.method.report["policy_loss"] == 0
    if method != "rlp":
        # What was read sets the scale outright; the gains before it are another model's.
        assert run.method.parts.rollout.scale.updates == 1
        assert run.method.parts.rollout.scale.moment == pytest.approx(gain_square, rel=1e-6)
    assert set(run.method.parts.telemetry.amounts) <= {"actor", "scale"}
    alone = assembly_of(home, method, "window.windows=3")
    phases = []
    for one in (run, alone):
        window, done = one.method.window + 1, []
        while not one.method.finished(window):
            done.append(one.method.advance())
        phases.append(done)
    assert phases[0] == phases[1], "warm-up belongs to the first window that is rewarded"
    assert run.method.report["policy_loss"] != 0


def test_development_is_measured_with_one_thought_whatever_the_group(finished: Any) -> None:
    counts = set()
    for method, (run, _, _) in finished.items():
        assert run.reader.plan.group == run.base.plan.group == 1
        assert run.actor.engine.plan.group == (2 if spec_of(method).group > 1 else 1)
        found, _ = run.development.measure(run.reader, run.gate)
        counts.add((found["items"], found["texts"]))
        assert ("mixed_gain" in found) == (method != "ntp")
        assert {"thought_gain", "content_gain", "empty_gain", "random_gain", "gain_vs_base"} <= set(found)
    assert len(counts) == 1


def test_the_gate_learns_from_one_thought_an_item(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Experts] = []
    fit = Gate.fit

    def noted(self: Gate, found: Experts, *more: Any) -> Any:
        seen.append(found)
        return fit(self, found, *more)

    monkeypatch.setattr(Gate, "fit", noted)
    for method in ("anchor-only", "quiet-star-grpo"):
        train(assembly_of(home, method), 1)
    single, grouped = seen
    assert len(single.text_I) == len(grouped.text_I) > 8
    assert single.text_I.equal(grouped.text_I)


def test_the_untrained_row_is_over_before_it_begins(home: Path) -> None:
    run = assembly_of(home, "base")
    before = {name: tensor.clone() for name, tensor in run.reader.model.state_dict().items()}
    assert train(run) == []
    assert run.ledger.rows() == []
    assert run.gate is run.critics is None
    found, _ = run.development.measure(run.reader, None)
    assert found["gain_vs_base"] == pytest.approx(found["thought_gain"], abs=1e-7)
    assert all(tensor.equal(before[name]) for name, tensor in run.reader.model.state_dict().items())
