"""Probes: continuations of one prefix, numbers in the right context, and an offset that exact ratios cannot induce."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from stage import CLOSE, PLAN, Tally, V, gpt2, llama, rollout_of, texts
from tfive import rng
from tfive.rl.calibration.calibrator import Calibrator
from tfive.rl.calibration.mixture import FixedWeight
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.rl.continuations import at_step, side_by_side
from tfive.rl.critic import FrozenBase, build_pair
from tfive.rl.critics import Critics
from tfive.rl.drift_probe import Probe
from tfive.rl.gae import PilotNormaliser
from tfive.rl.rollout import Rollout
from tfive.rl.sampling import score
from tfive.rl.settings import CriticSettings, RatioSettings
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.settings import SamplingSettings

pytestmark = pytest.mark.model
M = 4
NORMALISER = PilotNormaliser(mean=0.1, deviation=0.7, tokens=10)


@dataclass
class Drawn:
    probe: Probe
    begun: Trajectories
    continued: Trajectories
    tally: Tally


def probe_on(rows: int, law: SamplingSettings | None = None, closing: float = 0.4, **options: Any) -> Probe:
    """A probe of a model that ends some thoughts early."""
    model = llama(seed=4)
    with torch.no_grad():
        model.get_input_embeddings().get_parameter("weight")[CLOSE] *= closing
    rollout = rollout_of(
        TreeModel(model, PLAN), lambda number: texts(rows=rows, seed=number), rows=16, law=law or SamplingSettings()
    )
    base, settings = llama().requires_grad_(False), CriticSettings(adapt="head", width=8)
    pair = build_pair(base, PLAN, settings, seed=1)
    critics = Critics(FrozenBase(base, PLAN, settings), pair, settings, alpha=1.0, seed=2, rows=16)
    narrow = CalibrationSettings(width=4)
    calibrator = Calibrator(rollout.engine, 8, narrow, seed=4, rows=16)
    return Probe(
        rollout, critics, calibrator, continuations=M, clip=(0.8, 1.28), forward=forward_of(rollout.engine), rows=16,
        **options,
    )  # fmt: skip


def forward_of(engine: TreeModel) -> Any:
    """The policy's pass alone, as an update without anchors makes it."""
    return lambda some: engine.policy(some.texts, some.thoughts, features=True)


def draw(probe: Probe, change: Any = lambda begun: begun) -> Drawn:
    """One draw, with the thoughts it began from."""
    kept: list[Trajectories] = []
    collect = probe.rollout.collect

    def watched(*arguments: Any, **options: Any) -> Trajectories:
        kept.append(change(collect(*arguments, **options)))
        return kept[-1]

    probe.rollout.collect = watched  # type: ignore[method-assign]
    continued = probe.draw(1, FixedWeight(), NORMALISER)
    probe.rollout.collect = collect  # type: ignore[method-assign]
    tally = probe.rollout.telemetry
    assert isinstance(tally, Tally)
    return Drawn(probe, kept[0], continued, tally)


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(probe_on(40))


def contexts(drawn: Drawn) -> list[tuple[int, int, int]]:
    """Row, position and step (from 0) of every context whose thought reaches its step."""
    items = drawn.begun.texts.items_BP
    found = []
    for row, place in (items >= 0).nonzero().tolist():
        number = rng.uniforms(drawn.probe.rollout.seed, "probe/step", 1, int(items[row, place]))
        step = int(float(number) * PLAN.length)
        if step < int(drawn.begun.thoughts.length_BR[row, place]):
            found.append((row, place, step))
    return found


def test_continuations_share_the_given_prefix_and_nothing_else(drawn: Drawn) -> None:
    begun, thoughts = drawn.begun.thoughts, drawn.continued.thoughts
    reached = contexts(drawn)
    assert 10 < len(reached) < drawn.begun.count
    assert {step for _, _, step in reached} == set(range(PLAN.length))
    assert drawn.continued.count == len(reached) * M
    differ = 0
    for row, place, step in reached:
        branches = slice(place * M, place * M + M)
        assert thoughts.valid_BR[row, branches].all()
        assert (drawn.continued.texts.positions_BP[row, branches] == drawn.begun.texts.positions_BP[row, place]).all()
        assert (drawn.continued.need("probe_step_BR")[row, branches] == step).all()
        assert (thoughts.length_BR[row, branches] > step).all()
        for branch in range(place * M, place * M + M):
            assert thoughts.tokens_BRT[row, branch, :step].equal(begun.tokens_BRT[row, place, :step])
            assert (thoughts.log_q_BRT[row, branch, :step] == 0).all()
            assert thoughts.log_q_BRT[row, branch, step] < 0
        differ += thoughts.tokens_BRT[row, branches, step].unique().numel() > 1
    assert differ > len(reached) / 2
    kept = {(row, place * M + m) for row, place, _ in reached for m in range(M)}
    assert {tuple(pair) for pair in thoughts.valid_BR.nonzero().tolist()} == kept


def test_numbers_land_in_the_right_context(drawn: Drawn) -> None:
    record, probe = drawn.continued, drawn.probe
    rows, branches, steps = record.mask_BRT.shape
    code_BRT = torch.arange(rows * branches * steps).view(rows, branches, steps)
    found_NM = side_by_side(record, at_step(record, code_BRT), probe.continuations)
    expected = [
        [(row * branches + place * M + m) * steps + step for m in range(M)] for row, place, step in contexts(drawn)
    ]
    assert found_NM.tolist() == expected
    vector = torch.stack([code_BRT, -code_BRT], -1)
    assert side_by_side(record, at_step(record, vector), probe.continuations)[..., 1].tolist() == (-found_NM).tolist()


def test_the_first_report_by_a_loop(drawn: Drawn) -> None:
    record, probe = drawn.continued, drawn.probe
    found = probe.report(record, NORMALISER, "first")
    mixed, average = [], []
    for row, place, step in contexts(drawn):
        some = range(place * M, place * M + M)
        mixed.append([float(record.need("advantage_BRT")[row, branch, step]) for branch in some])
        both = [[(float(gae[row, branch, step]) - 0.1) / 0.7 for branch in some] for gae in record.need("gae_2BRT")]
        average.append([(a + b) / 2 for a, b in zip(*both)])

    def products(rows: list[list[float]]) -> np.ndarray:
        return np.array([np.mean([a * b for i, a in enumerate(r) for j, b in enumerate(r) if i != j]) for r in rows])

    assert found["probe_contexts"] == len(mixed)
    # Sums over the contexts that were reached, divided by all that were drawn: the fixed 1/T_max scale of the paper.
    assert found["offset"] == pytest.approx(products(mixed).sum() / drawn.begun.count, rel=1e-4)
    assert found["offset_average"] == pytest.approx(products(average).sum() / drawn.begun.count, rel=1e-4)
    assert found["offset_change"] == pytest.approx(0, abs=1e-6)
    assert found["probe_clip_fraction_first"] == 0
    other = probe.report(record.having(advantage_BRT=record.need("advantage_BRT") * 2), NORMALISER, "first")
    assert other["offset_change"] == pytest.approx(3 * products(average).sum() / drawn.begun.count, rel=1e-3)
    last = probe.report(record, NORMALISER, "last")
    assert "offset" not in last
    assert last["drift_covariance_last"] == found["drift_covariance_first"]


def test_the_score_is_the_gradient_of_the_recorded_log_probability(drawn: Drawn) -> None:
    record, probe = drawn.continued, drawn.probe
    log_new, score_BRD = probe._scores(record)
    at = record.thoughts.valid_BR
    torch.testing.assert_close(log_new[at], at_step(record, record.need("log_old_BRT"))[at], rtol=1e-4, atol=1e-4)
    row, place, step = contexts(drawn)[0]
    branch, engine = place * M, probe.engine
    state = engine.features(record.texts, record.thoughts)[row, branch, step].detach()
    token = int(record.thoughts.tokens_BRT[row, branch, step])

    def log_p(x: torch.Tensor) -> torch.Tensor:
        logits = engine.model.get_output_embeddings()(x).index_fill(0, torch.tensor(PLAN.forbidden_ids), float("-inf"))
        return logits.log_softmax(-1)[token]

    slope = torch.autograd.functional.jacobian(log_p, state)
    torch.testing.assert_close(score_BRD[row, branch], slope, rtol=1e-3, atol=1e-4)


def test_the_offset_is_that_of_all_thoughts_enumerated() -> None:
    """R of eq:trajectory-occupation, exactly, by scoring every possible thought of two steps; probes must find it."""
    few = (CLOSE, 30, 31, 32, 33, 34)
    plan = replace(
        PLAN, length=2, checkpoints=(1, 2), special_ids=tuple(token for token in range(V) if token not in few)
    )
    engine, one = TreeModel(gpt2(torch.float32, closing=2.0), plan), texts(rows=1, count=1, seed=5)
    rows = 100

    def copies(number: int) -> TextBatch:
        tokens_BS, document_BS, positions_BP = (
            tensor.repeat(rows, 1) for tensor in (one.tokens_BS, one.document_BS, one.positions_BP)
        )
        return TextBatch(tokens_BS, document_BS, positions_BP, torch.arange(rows)[:, None])

    rollout = rollout_of(engine, copies, rows=rows)
    base, settings = llama().requires_grad_(False), CriticSettings(adapt="head", width=8)
    critics = Critics(FrozenBase(base, plan, settings), build_pair(base, plan, settings, seed=1), settings, alpha=1.0,
                      seed=2, rows=8)  # fmt: skip
    calibrator = Calibrator(engine, 8, CalibrationSettings(width=4), seed=4, rows=rows)
    probe = Probe(
        rollout, critics, calibrator, continuations=M, clip=(0.8, 1.28), forward=forward_of(engine), rows=rows
    )

    thoughts = [[CLOSE], *([a, b] for a in few[1:] for b in few)]
    length = torch.tensor([[len(thought) for thought in thoughts]])
    tokens = torch.tensor([[[*thought, 0][:2] for thought in thoughts]])
    closed = torch.tensor([[thought[-1] == CLOSE for thought in thoughts]])
    everything = Thoughts(tokens, length, torch.ones_like(closed), closed, torch.zeros(tokens.shape))
    batch = replace(
        one, positions_BP=one.positions_BP.expand(1, len(thoughts)), items_BP=torch.arange(len(thoughts))[None]
    )
    with torch.no_grad():
        log_pi = engine.policy(batch, everything).need("log_prob_BRT")[0].double()
    snapshots = rollout.snapshots.current("policy", "scorer")
    record = rollout.rewarded(score(engine, Trajectories("probe", 1, batch, everything, snapshots=snapshots), rows=1))
    gae = critics.advantages(record, critics.evaluate(record)).need("gae_2BRT")
    average = ((gae.mean(0) - 0.1) / 0.7)[0].double()
    chance_of = (log_pi * everything.mask_BRT[0]).sum(-1).exp()
    assert float(chance_of.sum()) == pytest.approx(1, abs=1e-4)
    exact = float((chance_of * average[:, 0]).sum()) ** 2
    for first in few[1:]:
        begun = [number for number, thought in enumerate(thoughts) if thought[0] == first]
        reach = chance_of[begun].sum()
        exact += float(reach * ((chance_of[begun] / reach) * average[begun, 1]).sum() ** 2)
    exact /= 2

    found = [probe.report(probe.draw(window, FixedWeight(), NORMALISER), NORMALISER, "first") for window in range(1, 7)]
    assert all(one["probe_contexts"] < 0.95 * rows for one in found)
    mean = np.mean([one["offset_average"] for one in found])
    error = np.sqrt(np.mean([one["offset_error"] ** 2 for one in found]) / len(found))
    assert abs(mean - exact) < 3.5 * error
    # Sharp enough to tell the measure from its normalised form.
    assert error < 0.15 * exact


def significance(found: dict[str, Any], moment: str) -> float:
    return found[f"drift_mean_induced_square_{moment}"] / found[f"drift_mean_induced_square_error_{moment}"]


def test_exact_ratios_induce_nothing_and_clipping_does() -> None:
    """E_q[∇log π | s] = 0: whatever the offset, the mean-induced part vanishes until tokens are clipped."""
    probe = probe_on(120)
    record = draw(probe).continued
    constant = record.having(advantage_BRT=torch.ones_like(record.need("advantage_BRT")) * record.mask_BRT)
    # Advantages that follow the very score they multiply: products of sample means would be biased by what both share.
    _, score_BRD = probe._scores(record)
    aligned_BRT = torch.zeros_like(record.need("advantage_BRT"))
    aligned_BRT.scatter_(2, record.need("probe_step_BR")[..., None], score_BRD[..., :1])
    aligned = record.having(advantage_BRT=aligned_BRT)
    for one in (record, constant, aligned):
        assert abs(significance(probe.report(one, NORMALISER, "first"), "first")) < 4
    assert probe.report(aligned, NORMALISER, "first")["drift_covariance_first"] > 0
    naive = (
        (
            side_by_side(aligned, at_step(aligned, aligned_BRT), probe.continuations).mean(1)
            * side_by_side(aligned, score_BRD, probe.continuations).mean(1).T
        )
        .square()
        .sum(0)
    )
    assert naive.mean() > 4 * naive.std() / len(naive) ** 0.5
    with torch.no_grad():
        for parameter in probe.engine.model.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * parameter
    moved = probe.report(constant, NORMALISER, "last")
    assert moved["probe_clip_fraction_last"] > 0.1
    assert significance(moved, "last") > 4


def test_the_sampler_may_stand_under_the_ratio() -> None:
    law = SamplingSettings(temperature=0.6)
    probe, by_sampler = probe_on(8, law), probe_on(8, law, ratio=RatioSettings(denominator="sampler"))
    record = draw(probe).continued
    assert probe.report(record, NORMALISER, "last")["probe_clip_fraction_last"] == 0
    assert by_sampler.report(record, NORMALISER, "last")["probe_clip_fraction_last"] > 0


def test_a_correction_of_the_ratio_is_part_of_the_update() -> None:
    """Where q is not π_old the correction changes both parts of the drift, and not what is clipped."""
    law = SamplingSettings(temperature=0.6)
    truncated = RatioSettings(correction="truncated", cap=1.05)
    plain, corrected = probe_on(8, law), probe_on(8, law, ratio=truncated)
    drawn = draw(plain)
    record = drawn.continued
    left, right = (probe.report(record, NORMALISER, "last") for probe in (plain, corrected))
    assert left["drift_covariance_last"] != pytest.approx(right["drift_covariance_last"], rel=1e-3)
    assert left["probe_clip_fraction_last"] == right["probe_clip_fraction_last"]
    _, score_BRD = plain._scores(record)
    log_q, log_old = (at_step(record, x) for x in (record.thoughts.log_q_BRT, record.need("log_old_BRT")))
    total = torch.zeros(score_BRD.shape[-1])
    for row, branch in record.thoughts.valid_BR.nonzero().tolist():
        factor = min(float((log_old - log_q)[row, branch].exp()), 1.05)
        step = int(record.need("probe_step_BR")[row, branch])
        total += record.need("advantage_BRT")[row, branch, step] * factor * score_BRD[row, branch]
    parts = corrected.report(record, NORMALISER, "first")
    covariance, induced, cosine = (
        parts[f"drift_{name}_first"] for name in ("covariance", "mean_induced_net", "alignment")
    )
    whole = covariance**2 + induced**2 + 2 * cosine * covariance * induced
    assert float(total.norm() / (drawn.begun.count * M)) == pytest.approx(whole**0.5, rel=1e-3)


def test_probing_is_booked_as_extra_and_moves_nothing(drawn: Drawn) -> None:
    begun, continued = drawn.begun, drawn.continued
    given = sum(step * M for _, _, step in contexts(drawn))
    account = drawn.tally.amounts["extra"]
    assert account["trajectories"] == begun.count + continued.count
    # Of a continuation only what was drawn after the given prefix has been generated.
    assert account["generated_tokens"] == int(begun.mask_BRT.sum()) + int(continued.mask_BRT.sum()) - given
    assert account["actor_tokens"] == 0
    assert set(drawn.tally.amounts) == {"extra"}
    assert drawn.probe.critics._read is None
    assert continued.snapshots == drawn.probe.rollout.snapshots.current("policy", "scorer", "scale")
    before = {name: tensor.clone() for name, tensor in drawn.probe.engine.model.state_dict().items()}
    drawn.probe.report(continued, NORMALISER, "last")
    assert all(tensor.equal(before[name]) for name, tensor in drawn.probe.engine.model.state_dict().items())
    assert all(parameter.grad is None for parameter in drawn.probe.engine.model.parameters())


def test_a_window_whose_thoughts_reach_no_probed_step_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few probes of short thoughts: it can happen that none reaches its step."""

    def ended(begun: Trajectories) -> Trajectories:
        thoughts = begun.thoughts
        return replace(begun, thoughts=replace(thoughts, length_BR=thoughts.valid_BR.long()))

    uniforms = rng.uniforms

    def last_step(seed: int, role: str, *counter: Any) -> Any:
        return uniforms(seed, role, *counter) * (0 if role == "probe/step" else 1) + (
            0.99 if role == "probe/step" else 0
        )

    monkeypatch.setattr(rng, "uniforms", last_step)
    found = draw(probe_on(4), ended)
    assert found.continued.count == 0
    assert found.probe.report(found.continued, NORMALISER, "first") == {"probe_contexts": 0}
    assert found.probe.report(found.continued, NORMALISER, "last") == {}


def test_groups_are_refused() -> None:
    probe = probe_on(4)
    probe.rollout.engine = TreeModel(llama(), replace(PLAN, group=2))
    with pytest.raises(ValueError, match="group must be 1"):
        Probe(probe.rollout, probe.critics, probe.calibrator, continuations=M, clip=(0.8, 1.28),
              forward=probe.forward, rows=16)  # fmt: skip


def test_another_window_draws_other_probes(drawn: Drawn) -> None:
    rollout: Rollout = drawn.probe.rollout
    again = drawn.probe.draw(2, FixedWeight(), NORMALISER)
    assert not again.need("probe_step_BR").equal(drawn.continued.need("probe_step_BR"))
    assert rollout.snapshots.current("policy")["policy"] == again.snapshots["policy"]
