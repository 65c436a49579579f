"""Thoughts that grow: how long they may be in a window, that all methods keep to it, that going on changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import stage
import tiny
from tfive.rl.rollout import Rollout
from tfive.rl.sampling import branch_uniforms
from tfive.rl.settings import WindowSettings
from tfive.rl.trajectory import Trajectories
from tfive.training.run_folder import CHECKPOINTS
from tfive.training.start import resume, train
from tfive.training.summary import SUMMARY
from tfive.tree.forward import TreeModel
from tfive.tree.settings import SamplingSettings

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    ("windows", "checkpoints", "lengths"),
    [
        (0, (4, 8, 12), [12, 12, 12]),
        (1, (4, 8, 12), [4, 12, 12]),
        (2, (4, 8, 12), [4, 8, 12, 12]),
        (4, (4, 8, 12), [4, 4, 8, 8, 12]),
        (3, (2, 6), [2, 2, 2, 6]),
        (5, (1, 2, 3, 4), [1, 1, 2, 2, 3, 4]),
    ],
)
def test_thoughts_grow_from_checkpoint_to_checkpoint(
    windows: int, checkpoints: tuple[int, ...], lengths: list[int]
) -> None:
    settings = WindowSettings(curriculum=windows)
    assert [settings.longest_thought(number, checkpoints) for number in range(1, len(lengths) + 1)] == lengths


@pytest.mark.parametrize("parity", [False, True])
def test_a_shorter_thought_is_the_beginning_of_the_longer_one(parity: bool) -> None:
    engine, texts = TreeModel(stage.gpt2(closing=3.0), stage.PLAN), stage.texts(seed=4)
    law = SamplingSettings(parity=parity)
    numbers_BRT = branch_uniforms(
        texts, group=engine.plan.group, steps=engine.plan.length, seed=3, role="actor", window=1
    )
    whole, short = (engine.sample(texts, numbers_BRT[..., :steps], law) for steps in (engine.plan.length, 2))
    assert short.tokens_BRT.shape == whole.tokens_BRT.shape
    assert {1, 2, 4} <= set(whole.length_BR.flatten().tolist())
    assert torch.equal(short.length_BR, whole.length_BR.clamp(max=2))
    assert torch.equal(short.closed_BR, whole.closed_BR & (whole.length_BR <= 2))
    assert torch.equal(short.tokens_BRT, whole.tokens_BRT * short.mask_BRT)
    assert torch.allclose(short.log_q_BRT, whole.log_q_BRT * short.mask_BRT, atol=1e-6)


def actor_lengths(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], int]:
    """The longest thought of every role and window, filled in while a run works."""
    seen: dict[tuple[str, int], int] = {}
    collect = Rollout.collect

    def watched(self: Rollout, role: str, window: int, *rest: Any, **options: Any) -> Trajectories:
        found = collect(self, role, window, *rest, **options)
        seen[role, window] = max(seen.get((role, window), 0), int(found.thoughts.length_BR.max()))
        return found

    monkeypatch.setattr(Rollout, "collect", watched)
    return seen


@pytest.mark.parametrize("method", ["t5", "quiet-star-grpo", "rlp"])
def test_every_role_of_a_method_keeps_to_the_length_and_a_stopped_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    config = tiny.configure(
        tmp_path, f"method={method}", "window.curriculum=1", "thought.variable_length=false", "window.actor_steps=1",
        "critic.warmup_rounds=1", "run.keep=3", *(("qualify.rule=fixed",) if method == "t5" else ()),
    )  # fmt: skip
    seen = actor_lengths(monkeypatch)
    reports: list[dict[str, Any]] = []
    whole = train(config, tmp_path / "run", on_window=reports.append, quiet=True)
    assert {role for role, _ in seen} >= ({"actor", "critic_fit", "probe", "scale"} if method == "t5" else {"actor"})
    # The scale of a window is set by thoughts of the length that it rewards.
    assert all(length == (2 if window == 1 else 4) for (_, window), length in seen.items())
    assert [report.get("longest_thought") for report in reports] == [2, 4]
    assert whole["history"][0]["mean_thought_length"] == 4.0
    said = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8")
    assert sum(json.loads(line).get("event") == "curriculum" for line in said.splitlines()) == 2
    if method == "t5":
        (tmp_path / "run" / SUMMARY).unlink()
        shutil.rmtree(sorted((tmp_path / "run" / CHECKPOINTS).glob("checkpoint-*"))[-1])
        again = resume(tmp_path / "run", quiet=True)
        assert again["account"]["roles"] == whole["account"]["roles"]
        assert again["weight_change"] == whole["weight_change"]
        assert again["dev_thought_gain_end"] == whole["dev_thought_gain_end"]


def test_the_reward_scale_of_longer_thoughts_owes_nothing_to_shorter_ones() -> None:
    engine = TreeModel(stage.gpt2(), stage.PLAN)
    fixed, growing = stage.rollout_of(engine), stage.rollout_of(engine)
    growing.longest = lambda window: 2 if window == 1 else engine.plan.length
    for rollout in (fixed, growing):
        rollout.update_scale(rollout.collect("scale", 2, rewarded=False))
    assert fixed.scale.updates == 2
    assert growing.scale.updates == 1
    assert growing.scale.value != fixed.scale.value
