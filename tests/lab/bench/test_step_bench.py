"""The step benchmark on the smallest whole run: declared counts, labelled transitions, honest ratios."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.models.load import load_model
from tfive.models.shape import known_shapes, shape_from
from tfive.rl.qualify import Score
from tfive.training.corpus import corpus_of
from tfive.training.cost import nodes_per_item
from tfive_lab.bench import step as bench_step
from tfive_lab.bench.counted import ONE_BLOCK, POLICY, PROBE, critic_overrides
from tfive_lab.bench.fit import SHARE, fitted, smaller
from tfive_lab.bench.step_budget import Budget, TimeSpent
from tfive_lab.bench.step_report import protocol_hash, ratios, render, witness_of
from tiny import configure

pytestmark = pytest.mark.model


def timed(folder: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    config = configure(folder, f"method={method}", "qualify.eta=0.99", "window.probe=0", "gate.passes=0")
    loaded = load_model(config.model.name, device="cpu", dtype=torch.float32)
    monkeypatch.setattr(bench_step, "_loaded", lambda *_: loaded)
    ticks = count()
    # A clock that advances by a second whenever it is read: durations are counts of readings, the same in every run.
    return bench_step.time_method(
        config, None, corpus_of(config, loaded=loaded), windows=2, clock=lambda: float(next(ticks))
    )


def test_every_phase_runs_at_its_declared_counts_and_forcing_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = (timed(tmp_path, method, monkeypatch) for method in ("t5", "rlp"))
    assert mine["forced_tests"] == 2
    assert sum("forced through" in line for line in mine["events"]) == 2
    assert other["forced_tests"] == 0
    drawn = {role: amounts["trajectories"] for role, amounts in mine["tokens"].items()}
    counts = {role: count / 2 for role, count in drawn.items() if count}
    assert counts == {
        "actor": 16, "critic_fit": 16, "qualify": 4, "pilot": 2, "head_train": 8, "head_validate": 4,
        "scale": pytest.approx(3),
    }  # fmt: skip
    assert mine["auxiliary_per_item"] == sum(value for role, value in counts.items() if role != "actor") / 16
    assert other["tokens"]["actor"]["trajectories"] == 2 * 16 * 8
    assert other["auxiliary_per_item"] == 0
    for found in (mine, other):
        assert len(found["window_s"]) == 2
        whole = sum(value for name, value in found["phases_s"].items() if "/" not in name)
        assert whole == found["window_s"][1] == round(whole)
        assert found["startup_s"] == found["window_s"][0]
        assert found["steady_step_s"] == found["window_s"][1] / 4
        assert found["all_in_step_s"] == sum(found["window_s"]) / 8
        assert 0 < sum(found["verbs_s"].values()) < whole


def test_forced_tests_are_counted_and_sound_ones_are_not() -> None:
    judge = bench_step.Forced(eta=0.1, consecutive=1, patience=2, attempts=5, rule="strict")
    bad, good = Score(-0.2, 1.0, 1.0, 4), Score(0.3, 0.7, 1.0, 4)
    first = judge.test("first", good, bad)
    assert [event.kind for event in first] == ["passed", "admitted"]
    assert "forced through" in first[0].detail
    assert "forced" not in judge.test("second", good, good)[0].detail
    assert judge.forced == 1


def test_ratios_spread_the_start_over_a_run() -> None:
    def row(first: float, steady: float) -> dict[str, Any]:
        window_s = [first, steady, steady]
        return {
            "steady_step_s": steady / 4,
            "all_in_step_s": sum(window_s) / 12,
            "startup_s": first,
            "window_s": window_s,
            "counted_nodes_per_item": {"update": first},
        }

    rows = {"t5": row(30.0, 4.0), "t5, preset critics": row(30.0, 12.0), "rlp": row(8.0, 8.0)}
    assert ratios(rows)["t5, preset critics"]["steady"] == 1.5
    found = ratios(rows)["t5"]
    assert found["steady"] == 0.5
    assert found["counted_nodes"] == 30 / 8
    assert found["all_in_windows_run"] == pytest.approx(38 / 24)
    assert found["all_in_100_windows"] == pytest.approx((30 + 99 * 4) / 800)
    assert ratios({"t5": row(1.0, 1.0)}) == {}


def test_the_digest_covers_how_a_method_is_trained_and_nothing_else() -> None:
    base = bench_step.configure("t5", bench_step.SMALL, [], "cpu", "float32")
    same = bench_step.configure("t5", bench_step.SMALL, ["run.texts_per_pass=2", "window.windows=9"], "cpu", "float32")
    other = bench_step.configure("t5", bench_step.SMALL, ["window.critic_fit=0.5"], "cpu", "float32")
    assert protocol_hash(base) == protocol_hash(same) != protocol_hash(other)
    with pytest.raises(UserError, match="--witness absent"):
        witness_of("absent", base)


def test_both_methods_get_the_largest_passes_that_fit() -> None:
    facts = known_shapes()["Qwen3.5-2B-Base"]
    shape, room = shape_from(facts, "2B"), SHARE * 139 * 2**30
    sizes: dict[tuple[str, int], tuple[int, int]] = {}
    for work in (bench_step.StepWork(), bench_step.StepWork(length=64, steps=2)):
        for method in ("t5", "rlp"):
            config = fitted(bench_step.configure(method, work, [], "cpu", "bfloat16"), shape, room)
            assert not config.engine.activation_checkpointing
            sizes[method, work.length] = config.run.texts_per_pass, config.run.rollout_texts
    assert sizes["rlp", 64] < sizes["rlp", 12] <= sizes["t5", 12]
    # Sampling is not held to the size of the backward pass.
    assert sizes["rlp", 64][1] > sizes["rlp", 64][0]
    with pytest.raises(UserError, match="does not fit"):
        fitted(bench_step.configure("t5", bench_step.StepWork(), [], "cpu", "bfloat16"), shape, 2**30)


def test_counted_nodes_by_hand() -> None:
    work = bench_step.StepWork(items=16, steps=4, length=12, positions=16, tokens=512, horizon=16)
    mine = nodes_per_item(bench_step.configure("t5", work, [], "cpu", "float32"), 24)
    # 32 trunk tokens and 13 thought nodes an item; 3.25 thoughts an item are drawn and read again to be
    # scored, 1 recorded, 3.125 read by critics, 2.125 of them to be judged.
    assert mine["update"] == 3 * 2 * 45
    assert mine["anchor"] == 0
    assert mine["sample"] == 3.25 * 45
    assert mine["score"] == 3.25 * (13 + 3 * 16)
    assert mine["old law"] == 45
    assert mine["lower features"] == pytest.approx(3.125 * 45 * 23 / 24)
    assert mine["critics"] == pytest.approx(2 * (3 * 2 + 2.125) * 45 / 24)
    again = nodes_per_item(bench_step.configure("t5", work, ["window.history=true"], "cpu", "float32"), 24)
    # No thoughts for the critics and none for the scale; critics fit to as many and judge as many as before.
    assert again["sample"] == (3.25 - 1.125) * 45
    assert again["critics"] == mine["critics"]
    other = nodes_per_item(bench_step.configure("rlp", work, [], "cpu", "float32"), 24)
    assert other == {"update": 6 * 136, "anchor": 0, "sample": 136, "score": 8 * 14, "old law": 136, "teacher": 32}
    grouped = nodes_per_item(bench_step.configure("quiet-star-grpo", work, [], "cpu", "float32"), 24)
    assert grouped["score"] == 8 * (13 + 3 * 16)


@pytest.mark.parametrize(("length", "percent"), [(12, (66.9, 56.0, 53.5, 120.2)), (64, (34.5, 28.7, 27.4, 62.9))])
def test_every_kind_of_critics_is_counted(length: int, percent: tuple[float, ...]) -> None:
    """In percent of RLP's step: the timed settings adapt one block of each critic, above the base model's features or
    the policy's, or train heads on the latter alone; the presets adapt whole critics."""
    work = bench_step.StepWork(length=length)

    def nodes(method: str, critics: str = ONE_BLOCK) -> float:
        config = bench_step.configure(method, work, critic_overrides(critics), "cpu", "bfloat16")
        assert (config.critic.adapt == "full") == (critics == "preset")
        return sum(nodes_per_item(config, 24).values())

    found = [100 * nodes("t5", critics) / nodes("rlp") for critics in (ONE_BLOCK, POLICY, PROBE, "preset")]
    assert found == pytest.approx(percent, abs=0.05)
    with pytest.raises(UserError, match="--critics two: not known"):
        critic_overrides("two")


def test_only_what_a_method_reads_is_counted() -> None:
    work = bench_step.StepWork(items=16, steps=4, length=12, positions=16, tokens=512, horizon=16)

    def counted(method: str, *overrides: str) -> dict[str, float]:
        config = bench_step.configure(method, work, ["anchor.conditioned=0.5", *overrides], "cpu", "float32")
        return {name: nodes for name, nodes in nodes_per_item(config, 24).items() if nodes}

    # Next-token training reads the text alone, whatever the anchors of the thought methods are.
    assert counted("ntp") == {"update": 6 * 32}
    assert counted("base") == {}
    assert counted("anchor-only") == {"update": 6 * 45, "anchor": 6 * 16, "sample": 45, "score": 13 + 3 * 16}
    # Gated reading reads the text's last token once more before every continuation.
    gated = counted("anchor-only", "thought.reading=gated")
    assert (gated["anchor"], gated["score"]) == (6 * 17, 13 + 3 * 17)


def test_features_of_critics_are_counted_where_a_pass_is_made_for_them() -> None:
    work = bench_step.StepWork(items=16, steps=4, length=12, positions=16, tokens=512, horizon=16)

    def lower(*overrides: str, layers: int = 24) -> float:
        config = bench_step.configure(
            "t5", work, ["critic.blocks=8", "anchor.conditioned=1", *overrides], "cpu", "float32"
        )
        return nodes_per_item(config, layers)["lower features"]

    whole = lower("critic.adapt=head")
    assert lower("critic.adapt=probe") == pytest.approx(whole * 16 / 24)
    # A probe stands above the first block at least; no block is left out twice.
    assert lower("critic.adapt=probe", layers=4) == pytest.approx(whole / 4)
    assert lower("critic.adapt=top", layers=4) == 0
    policy = ("critic.adapt=probe", "critic.features=policy")
    assert lower(*policy) == 0
    # Neither gated reading nor parity mode leaves activations behind.
    assert lower(*policy, "thought.reading=gated") == lower(*policy, "sampling.parity=true") > 0


def test_running_out_of_memory_halves_the_passes_and_then_recomputes() -> None:
    config = bench_step.configure("t5", bench_step.SMALL, ["run.texts_per_pass=2"], "cpu", "float32")
    once, twice = smaller(config), smaller(smaller(config))
    assert (once.run.texts_per_pass, once.engine.activation_checkpointing) == (1, False)
    assert (twice.run.texts_per_pass, twice.engine.activation_checkpointing) == (1, True)


def test_the_table_shows_ratios_beside_counts() -> None:
    rows = {
        "steady_step_s": 1.0, "all_in_step_s": 2.0, "auxiliary_per_item": 2.25, "forced_tests": 3,
        "phases_s": {"fit": 1.0, "fit/x": 0.5}, "startup_s": 3.0, "window_s": [3.0, 1.0],
        "counted_nodes_per_item": {"update": 1.0}, "law_gaps": {"scored": {"mean": 0.02, "largest": 0.1, "kl": 3e-4}},
        "critics": {"count": 2, "adapt": "top", "blocks": 1, "width": 64},
        "delta_rule": {"name": "torch", "reason": "asked for"},
    }  # fmt: skip
    probe = {"count": 2, "adapt": "probe", "blocks": 8, "width": 64, "features": "policy"}
    methods = {"t5": rows, "rlp": rows, "t5, probe critics": rows | {"critics": probe}}
    work = {"items": 128, "steps": 4, "passes": 2, "length": 12, "positions": 16, "tokens": 512}
    report = {
        "model": "m", "compute": "float32", "device": "cpu", "goal": 0.589, "witness": {"run": None, "note": "none"},
        "works": [{"work": work, "methods": methods, "ratios": ratios(methods)}],
    }  # fmt: skip
    text = render(report)
    assert "steady 100.0%" in text
    assert "2.25" in text
    assert "fit/x" not in text
    assert "mean (largest): scored 0.02 (0.1)" in text
    assert "t5: 2 critics, 1 blocks (top) adapted" in text
    assert "critics: 2 critics, value heads below the last 8 blocks, on the policy's features" in text
    assert text.count("recurrent layers by torch: asked for") == 1


def test_a_budget_lets_nothing_begin_that_it_has_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    limit = Budget(60.0, 3, began=100.0)
    assert limit.allows(1e9), "of the first nothing is known"
    now[0] = 120.0
    limit.book(1000.0, 20.0)
    limit.methods = 2
    assert limit.expected(1500.0) == pytest.approx(30.0)
    assert (limit.allows(2000.0), limit.allows(2001.0)) == (True, False)
    assert limit.share() == pytest.approx(140.0)
    assert limit.end == 160.0
    assert Budget(None, 1).allows(1e9)
    compiled = Budget(60.0, 3, began=100.0)
    compiled.book(1000.0, 20.0, setup=18.0)
    compiled.book(1000.0, 6.0, setup=4.0)
    assert compiled.expected(1500.0) == pytest.approx(4.0 + 3.0), "being built does not grow with the nodes"


def test_a_window_that_is_not_over_in_time_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(tmp_path, "method=ntp", "gate.passes=0")
    loaded = load_model(config.model.name, device="cpu", dtype=torch.float32)
    monkeypatch.setattr(bench_step, "_loaded", lambda *_: loaded)
    ticks = count()
    with pytest.raises(TimeSpent, match="ntp: the time was over"):
        bench_step.time_method(
            config, None, corpus_of(config, loaded=loaded), windows=2, end=3.0, clock=lambda: float(next(ticks))
        )


def test_a_shape_that_is_not_known_is_one_line() -> None:
    with pytest.raises(UserError, match="shape 'gpt-9' is not known"):
        bench_step.step_times("gpt-9", device="cpu")
    assert isinstance(bench_step.configure("rlp", bench_step.SMALL, [], "cpu", "float32"), Config)
