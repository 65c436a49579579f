"""`window.crossed`: the actor's thoughts test the critics, and its halves learn from one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from t5_window import PLAIN, actor_weights, advance_to, changing, goes_on_from, logged, noting, same, t5_of, window
from test_history import critic_weights, drawn_by_role

from stage import assembled
from tfive.rl.calibration.saddle import Candidate, calibrating
from tfive.rl.diagnosis import mean_numbers
from tfive.rl.gae import PilotNormaliser
from tfive.rl.halves import halves
from tfive.rl.trajectory import Trajectories
from tfive.training.build import Assembly
from tfive.tree.fast.side_by_side import Task

pytestmark = pytest.mark.model

CROSSED = ("window.history=true", "window.crossed=true", "critic.passes=2", "window.probe=0", "gate.passes=0")
LEARNED = (*CROSSED, "calibration.cross_fit=false", "window.head_train=0.25")
LATER = ["pilot", "calibrate", "collect", "refit", "refit", *["update"] * 4, "close"]


def second_window(home: Path, *more: str) -> Assembly:
    """A run whose first window, which draws sets of their own, is over."""
    run = assembled(home, *more)
    window(run.method)
    return run


def test_a_later_window_draws_the_actors_thoughts_alone(home: Path, verdicts: Any) -> None:
    run = assembled(home, *CROSSED, *PLAIN)
    method = t5_of(run)
    assert window(method) == ["open", *["fit"] * 3, "qualify", *LATER]
    assert set(drawn_by_role(run, method)) == {"actor"}
    assert window(method) == ["open", "qualify", *LATER]
    assert method.report["actor_updates"]["qualified"] == 4


def test_critics_are_tested_on_the_actors_thoughts(home: Path, verdicts: Any) -> None:
    run = second_window(home, *CROSSED, *PLAIN)
    acted: list[Trajectories] = []
    changing(run, "actor", noting(acted))
    before = critic_weights(run)
    tested: list[Trajectories] = []
    evaluate = run.critics.evaluate  # type: ignore[union-attr]

    def noted(record: Trajectories) -> Any:
        tested.append(record)
        return evaluate(record)

    run.critics.evaluate = noted  # type: ignore[method-assign, union-attr]
    advance_to(run.method, "pilot")
    assert len(acted) == len(tested) == 1
    assert tested[0] is acted[0]
    assert same(critic_weights(run), before), "fitted to the thoughts of earlier windows alone"


@pytest.mark.parametrize("changed", [None, 0, 1])
def test_a_half_is_normalised_by_the_other(changed: int | None, home: Path, verdicts: Any) -> None:
    """Against the definition, and under other outcomes of one half's thoughts."""
    run = second_window(home, *CROSSED, *PLAIN)

    def change(record: Trajectories) -> Trajectories:
        if changed is None:
            return record
        own = halves(len(record.mask_BRT), run.config.run.seed, record.window)[changed].judged
        rewards = record.need("rewards_BRT").clone()
        rewards[own] = (rewards[own] * -2 + 1) * record.mask_BRT[own]
        return record.having(rewards_BRT=rewards)

    changing(run, "actor", change)
    advance_to(run.method, "update")
    acting = run.method.held["actor"]
    first, second = acting.need("gae_2BRT").double()
    parts = halves(len(acting.mask_BRT), run.config.run.seed, run.method.window)
    assert torch.cat([half.judged for half in parts]).sort().values.equal(torch.arange(len(acting.mask_BRT)))
    for half in parts:
        assert not set(half.judged.tolist()) & set(half.teaching.tolist())
        mask = acting.mask_BRT[half.teaching]
        seen = torch.cat([first[half.teaching][mask], second[half.teaching][mask]])
        expected = ((first + second) / 2 - seen.mean()) / (seen.var(unbiased=False) + 1e-8).sqrt()
        expected = torch.where(acting.mask_BRT, expected, torch.zeros_like(expected))
        found = acting.need("advantage_BRT")[half.judged].double()
        assert torch.allclose(found, expected[half.judged], rtol=1e-4, atol=1e-5)
    weight = acting.need("weight_BRT")
    assert weight[acting.mask_BRT].eq(0.5).all()
    assert weight[~acting.mask_BRT].eq(0).all()


def test_heads_learn_and_are_validated_on_the_other_half(
    home: Path, verdicts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = second_window(home, *LEARNED)
    method, calibrator = t5_of(run), t5_of(run).parts.calibrator
    read: list[set[int]] = []
    mixed: list[set[int]] = []
    begun: list[dict[str, torch.Tensor]] = []
    data, advantage = calibrator.data, calibrator.advantage

    def items(record: Trajectories) -> set[int]:
        return set(record.texts.items_BP[record.texts.items_BP >= 0].tolist())

    def noted_data(record: Trajectories, *given: Any) -> Any:
        read.append(items(record))
        return data(record, *given)

    def weights(*heads: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Of both heads; moments of inputs are each half's own."""
        each = zip(("weight", "mean"), heads, strict=True)
        return {f"{of} {name}": w.detach().clone() for of, head in each for name, w in head.named_parameters()}

    def noted_calibrating(*given: Any, **named: Any) -> Task[Candidate]:
        begun.append(weights(*given[:2]))
        # Heads that begin untrained read their inputs by the moments of this half, too.
        assert same(dict(named["fresh"]().named_buffers()), dict(given[1].named_buffers()))
        return calibrating(*given, **named)

    def noted_advantage(record: Trajectories, *given: Any) -> Trajectories:
        mixed.append(items(record))
        return advantage(record, *given)

    fit = PilotNormaliser.fit
    acted: list[Trajectories] = []
    changing(run, "actor", noting(acted))

    def noted_fit(first: torch.Tensor, second: torch.Tensor, mask: torch.Tensor) -> PilotNormaliser:
        # Texts are told by their masks and by what the critics said of them.
        whole = run.critics.advantages(acted[0], evaluate(acted[0])).need("gae_2BRT")[0]  # type: ignore[union-attr]
        rows = [row for row in range(len(whole)) if any(one.equal(whole[row]) for one in first)]
        normalised.append(items(acted[0].rows(torch.tensor(rows))))
        return fit(first, second, mask)

    normalised: list[set[int]] = []
    evaluate = run.critics.evaluate  # type: ignore[union-attr]
    monkeypatch.setattr(PilotNormaliser, "fit", noted_fit)
    monkeypatch.setattr(calibrator, "data", noted_data)
    monkeypatch.setattr("tfive.rl.calibration.calibrator.calibrating", noted_calibrating)
    monkeypatch.setattr(calibrator, "advantage", noted_advantage)
    before = weights(calibrator.weight_head, calibrator.mean_head)
    advance_to(method, "update")
    assert len(mixed) == 2
    assert not mixed[0] & mixed[1]
    assert mixed[0] | mixed[1] == items(method.held["actor"])
    for half, (taught, validated) in enumerate((read[::2], read[1::2])):
        assert taught
        assert validated
        assert not taught & validated
        assert not (taught | validated) & mixed[half], "what mixes a thought has not seen it"
        assert not normalised[half] & (validated | mixed[half])
        assert normalised[half] >= taught
    assert method.report["mixture"] in ("learned", "average", "learned/average", "average/learned")
    # Both halves learn from the heads of the window before.
    assert len(begun) == 2
    assert same(begun[0], before)
    assert same(begun[1], before)
    assert not same(weights(calibrator.weight_head, calibrator.mean_head), before)
    assert sorted(method.validator.used[-2:]) == ["window 2 half 0", "window 2 half 1"]
    for name in ("accepted", "retention", "multiplier", "head_moment", "pilot_deviation", "weight_mean"):
        assert isinstance(method.report[name], float)
    window(method)
    assert method.report["actor_updates"]["qualified"] == 4


def test_offsets_of_a_half_are_measured_by_its_own_moments(
    home: Path, verdicts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = second_window(home, *CROSSED, "window.head_train=0.25")
    calibrator = t5_of(run).parts.calibrator
    offsets, moments = calibrator.offsets, list[torch.Tensor]()

    def noted(*given: Any) -> dict[str, float]:
        moments.append(given[3].prefix.standardize.mean.clone())
        return offsets(*given)

    monkeypatch.setattr(calibrator, "offsets", noted)
    advance_to(run.method, "update")
    assert len(moments) == 2
    assert not moments[0].equal(moments[1])
    assert moments[1].equal(calibrator.mean_head.prefix.standardize.mean)


def test_a_second_test_and_its_fit_draw_sets_of_their_own(home: Path, verdicts: Any) -> None:
    run = second_window(home, *CROSSED, *PLAIN, "qualify.attempts=2", "qualify.on_failure=stop")
    verdicts(False)
    drawn: dict[str, list[Trajectories]] = {role: [] for role in ("qualify", "critic_fit", "actor")}
    for role, records in drawn.items():
        changing(run, role, noting(records))
    assert window(run.method) == ["open", "qualify", "fit", "fit", "qualify", *LATER]
    assert {role: [one.role for one in records] for role, records in drawn.items()} == {
        "qualify": ["qualify/1"], "critic_fit": ["critic_fit/1"], "actor": ["actor"],
    }  # fmt: skip


def test_without_critics_the_thoughts_that_failed_them_are_credited_by_the_batch(home: Path, verdicts: Any) -> None:
    run = second_window(home, *CROSSED, *PLAIN, "qualify.attempts=1", "qualify.on_failure=baseline")
    verdicts(False, True)
    method = t5_of(run)
    assert set(drawn_by_role(run, method)) == {"actor"}
    assert method.report["actor_updates"]["baseline"] == 4
    assert "qualification: baseline" in [what for what, _ in logged(run)]
    window(method)
    assert method.report["actor_updates"]["qualified"] == 4


def test_a_run_goes_on_from_anywhere(tmp_path: Path, verdicts: Any) -> None:
    asked = (*LEARNED, "critic.features=policy", "critic.adapt=probe")

    def held(run: Assembly) -> Any:
        return critic_weights(run), actor_weights(run), t5_of(run).state_dict()["calibrator"]

    goes_on_from(["qualify", "pilot", "calibrate", "collect", "update"], lambda: assembled(tmp_path, *asked), held)


@pytest.mark.parametrize(
    ("items", "learn", "validate", "expected"),
    [
        ([4] * 8, 8, 4, (2, 1)),  # as many as were asked for, and no more
        ([4] * 8, 9, 4, (3, 1)),
        ([4] * 8, 100, 50, (6, 2)),  # of fewer, both their share
        ([4] * 2, 100, 1, (1, 1)),  # never none
        ([4] * 2, 1, 100, (1, 1)),
        ([0, 0, 4, 4], 2, 2, (3, 1)),
    ],
)
def test_texts_that_teach_are_split(items: list[int], learn: int, validate: int, expected: tuple[int, int]) -> None:
    half = halves(2 * len(items), 3, 5)[0]
    counts = torch.zeros(2 * len(items), dtype=torch.long)
    counts[half.teaching] = torch.tensor(items)
    taught, validated = half.split(counts, learn, validate)
    assert (len(taught), len(validated)) == expected
    assert torch.cat([taught, validated]).equal(half.teaching[: sum(expected)])


def test_numbers_of_two_weights_are_told_as_one() -> None:
    first = {
        "retention": 0.1,
        "moment": None,
        "accepted": True,
        "moment_upper": 0.3,
        "delta_spent": 0.01,
        "change_error": 3.0,
    }
    second = {"retention": 0.3, "moment": None, "accepted": False, "moment_upper": 0.2, "delta_spent": 0.005,
              "change_error": 4.0, "more": 1}  # fmt: skip
    assert mean_numbers([first, second]) == {
        "retention": 0.2, "moment": None, "accepted": 0.5, "moment_upper": 0.3, "delta_spent": pytest.approx(0.015),
        "change_error": 2.5, "more": 1.0,
    }  # fmt: skip


def test_halves_are_drawn_anew_in_every_window() -> None:
    first = [halves(9, 0, window)[0].judged.tolist() for window in range(4)]
    assert len({tuple(one) for one in first}) > 1
    assert halves(9, 0, 1)[1].teaching.equal(halves(9, 0, 1)[1].teaching)
    sizes = sorted(len(half.judged) for half in halves(9, 0, 1))
    assert sizes == [4, 5]
