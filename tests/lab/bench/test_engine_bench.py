"""`tfive bench`: both sides do the same work, differences are found, and the report has what it promises."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import scripts
from taped_graphs import TapedGraphs
from tfive.errors import UserError
from tfive.tree.settings import EngineOptions
from tfive_lab.bench import engine as bench
from tfive_lab.bench import selfcheck as bench_selfcheck
from tfive_lab.bench.checks import relative
from tfive_lab.bench.phases import PHASES, Clock, PlainPhases, tree_phases
from tfive_lab.bench.plain_rows import PlainRows
from tfive_lab.bench.replayed_checks import _losses_apart, updated
from tfive_lab.bench.roofline import floors
from tfive_lab.bench.selfcheck import MODELS
from tfive_lab.bench.work import Work, find_model, make_plan, make_texts, make_uniforms, random_model

pytestmark = pytest.mark.model
TINY = Work(texts=2, tokens=40, positions=3, length=3, checkpoints=(1, 3), horizon=4, group=2)
CPU = torch.device("cpu")


def tiny(kind: str) -> PreTrainedModel:
    changes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 67, "head_dim": 16, "num_hidden_layers": 4}
    if kind == "hybrid":
        changes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    return random_model({**MODELS[kind], **changes}, CPU, torch.float32)


def every(*sizes: int) -> dict[str, tuple[int, ...]]:
    """The same batch sizes for all phases."""
    return dict.fromkeys(PHASES, sizes)


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_both_sides_give_the_same_outputs(kind: str) -> None:
    report = bench.measure(tiny(kind), kind, TINY, repeats=1, batch_sizes=every(4, 100), extras=True, replayed=True)
    assert report["max_abs_logprob_diff"] < 1e-4
    assert all(report["apart"][name]["max"] < 1e-4 for name in ("no_thought_loss", "checkpoint_loss", "value"))
    assert report["apart"]["gradient_relative"] < 1e-3
    assert report["mismatch_kl"] < 1e-8
    assert set(report["plain_s"]) == set(report["tree_s"]) == {*PHASES, "whole", "without_values"}
    assert report["speedup"] == pytest.approx(report["plain_s"]["whole"] / report["tree_s"]["whole"])
    assert (report["delta_rule"] is None) == (kind == "attention")
    assert report["peak_bytes"] > 0
    assert max(report["plain_rows"].values()) <= TINY.branches
    assert json.loads(json.dumps(report))["work"]["group"] == 2
    both = report["replayed"]
    assert set(both["launched_s"]) == set(both["replayed_s"]) == set(report["tree_s"])
    assert both["captured"] == 0, "nothing is captured on a processor"
    assert both["captured_updates"] == 0
    assert both["loss_apart"] == both["log_prob_apart"] == both["gradient_apart"] == 0.0
    assert "speed-up" in bench.render(report)
    assert "three phases: " in bench.render(report)


FUSED = EngineOptions(fused_blocks="on", fused_training="on")


def test_a_replayed_actor_phase_is_the_launched_one() -> None:
    model = tiny("attention")
    launched = tree_phases(model, TINY, FUSED)
    replayed = tree_phases(model, TINY, replace(FUSED, replayed_passes=True))
    graphs = replayed.updates.graphs = TapedGraphs()
    for round in range(4):
        launched.uniforms_BRT = launched.uniforms_BRT.roll(round, 1)
        replayed.thoughts = launched.sampling()
        found = []
        for side in (replayed, launched):
            log_prob = side.actor()
            found.append([log_prob, *(p.grad for p in model.parameters() if p.grad is not None)])
        assert len(found[0]) == 1 + len(list(model.parameters()))
        for mine, other in zip(*found, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
    assert [graph.replays for graph in graphs.graphs] == [3]
    assert replayed.updates.reason == ""


def test_updates_that_the_self_check_compares_are_the_same() -> None:
    side = tree_phases(tiny("attention"), TINY, FUSED)
    side.sampling()
    found = [updated(side, replace(FUSED, replayed_passes=replayed)) for replayed in (False, True)]
    assert relative(found[1][2], found[0][2]) < 1e-4
    assert _losses_apart(found[1][1], found[0][1]) < 1e-4
    louder = [replace(stats, conditioned_loss=1.1 * stats.conditioned_loss) for stats in found[0][1]]
    assert _losses_apart(louder, found[0][1]) == pytest.approx(0.1)


def test_a_wrong_tree_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfive.tree import reader

    honest = reader.grow

    def wrong(*args: Any, **kwargs: Any) -> Any:
        layout = honest(*args, **kwargs)
        layout.position_BN[:, layout.trunk_width :] += 1
        return layout

    monkeypatch.setattr(reader, "grow", wrong)
    report = bench.measure(tiny("attention"), "wrong", TINY, repeats=1, batch_sizes=every(8))
    assert report["max_abs_logprob_diff"] > 1e-3


def test_plain_rows_do_not_depend_on_batching() -> None:
    model, work = tiny("attention"), TINY
    texts, plan = make_texts(work, 67), make_plan(work, 67)
    path = PlainRows(model, texts, plan)
    tokens = torch.randint(60, (work.branches, plan.length), generator=torch.Generator().manual_seed(0))
    for one, other in zip(path.score(tokens, 1), path.score(tokens, 5)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(path.policy(tokens, 1), path.policy(tokens, 5), rtol=1e-4, atol=1e-5)
    written = path.sample(5)
    assert written.shape == (work.branches, plan.length)
    assert not torch.isin(written, torch.tensor(plan.forbidden_ids)).any()


def test_a_position_without_room_is_refused() -> None:
    work = Work(texts=1, tokens=20, positions=1, horizon=4)
    texts = make_texts(work, 67)
    texts.positions_BP[0, 0] = 17
    with pytest.raises(ValueError, match="fewer than 4"):
        PlainRows(tiny("attention"), texts, make_plan(work, 67))


def test_sweep_stops_where_memory_ends() -> None:
    side = tree_phases(tiny("attention"), TINY, EngineOptions())
    path = PlainRows(side.model, side.texts, side.plan)

    class Cramped(PlainRows):
        def policy(self, tokens_QT: Tensor, rows: int, scale: float | None = None) -> Tensor:
            if rows > 4:
                raise torch.OutOfMemoryError
            return path.policy(tokens_QT, rows, scale)

    other = PlainPhases(Cramped(side.model, side.texts, side.plan), side.sampling().tokens_BRT.flatten(0, 1), {})
    found = other.sweep(every(4, 8), Clock(CPU))
    assert set(found["actor"]) == {4}
    assert other.rows["actor"] == 4
    with pytest.raises(UserError, match="does not fit"):
        other.sweep(every(8), Clock(CPU))


def test_work_is_a_function_of_its_seed() -> None:
    texts, plan = make_texts(TINY, 67, seed=3), make_plan(TINY, 67)
    assert torch.equal(texts.tokens_BS, make_texts(TINY, 67, seed=3).tokens_BS)
    assert int(texts.positions_BP.max()) + TINY.horizon < TINY.tokens
    uniforms = make_uniforms(texts, plan)
    assert uniforms.shape == (2, 6, 3)
    assert len(uniforms.unique()) == uniforms.numel()


def test_unknown_shape_and_unknown_peaks() -> None:
    with pytest.raises(UserError, match=r"qwen3\.5-2b"):
        find_model("qwen4", CPU, torch.float32)
    assert floors(tiny("attention"), TINY, make_plan(TINY, 67), CPU) is None


def test_floors_count_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfive_lab.bench.roofline.peaks", lambda device: (1e12, 1e9))
    model = tiny("attention")
    blocks = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
    got = floors(model, TINY, make_plan(TINY, 67), CPU)
    assert got is not None
    assert got["sampling_step"] == pytest.approx((blocks + 67 * 32) * 4 / 1e9)
    nodes = 12 * (1 + 3 + 2 * 4)
    assert got["scoring"] == pytest.approx((2 * blocks * nodes + 2 * 67 * 32 * 12 * 4 * 3) / 1e12)


def test_selfcheck_passes_here_and_fails_when_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_selfcheck, "WORK", TINY)
    seen = list[tuple[int, bool]]()
    report = bench_selfcheck.selfcheck("cpu", lambda found: seen.append((len(found["checks"]), found["ok"])))
    assert report["ok"], bench_selfcheck.render(report)
    assert seen == [(count, False) for count in range(1, len(report["checks"]) + 1)], "one that is cut short is not ok"
    assert {check["model"] for check in report["checks"]} == {
        "delta rule",
        "heads",
        "attention",
        "hybrid",
        "recurrent layers",
    }
    assert "flex attention: no backward" in bench_selfcheck.render(report)
    bad = bench_selfcheck.Check("attention", "folded attention", 1.0, 1e-4)
    assert not bad.ok


def test_the_tree_alone() -> None:
    report = bench.measure(tiny("attention"), "alone", TINY, repeats=1, plain=False)
    assert "plain_s" not in report
    assert "sampling step" in bench.render(report)


def script() -> ModuleType:
    return scripts.script("benchmarks/engine.py")


def test_script_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--texts", "1", "--tokens", "40", "--positions", "1", "--repeats", "1", "--device", "cpu"]
    assert script().main(["--shape", "nano", "--profile", "--out", str(tmp_path), *small]) == 0
    report = json.loads((tmp_path / "engine-nano.json").read_text(encoding="utf-8"))
    assert report["max_abs_logprob_diff"] < 1e-4
    profile = json.loads((tmp_path / "engine-nano-profile.json").read_text(encoding="utf-8"))
    assert list(profile) == ["sampling", "scoring", "actor", "values", "ten_steps"]
    assert profile["actor"]["launches"] > 100
    assert sum(profile["actor"]["families_ms"].values()) == pytest.approx(profile["actor"]["device_ms"])
    assert "random weights" in capsys.readouterr().out


def test_plain_sizes_of_an_earlier_report_are_taken(tmp_path: Path) -> None:
    best = {"sampling": 128, "scoring": 64, "actor": 32, "values": 64}
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({"plain_rows": best}), encoding="utf-8")
    assert script().plain_sizes(str(path)) == {phase: (size,) for phase, size in best.items()}
    assert script().plain_sizes("8,16") == every(8, 16)
    assert script().plain_sizes(None) is None
