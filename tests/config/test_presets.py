"""Presets and defaults: every one resolves and keeps the rules, and those of the paper hold the paper's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfive.config.config import Config, presets, resolve, variants
from tfive.errors import UserError
from tfive.models.shape import find_shape
from tfive.rl.gae import PILOT_EPSILON
from tfive.rl.reward import SCALE_EPSILON
from tfive.rl.settings import TRAINING_ROLES, WindowSettings
from tfive.training.memory import estimate


@pytest.mark.parametrize("name", presets())
def test_every_preset_resolves_and_keeps_every_rule(name: str) -> None:
    resolve([name]).checked()


@pytest.mark.parametrize("name", variants())
def test_every_variant_keeps_every_rule_after_a_whole_run(name: str) -> None:
    base = "qwen3.5-2b" if name == "rlp-native" else "nano"
    plain, changed = resolve([base]), resolve([base, name])
    changed.checked()
    touched = {key for key, origin in changed.origins.items() if origin == f"preset {name}"}
    assert touched
    # An ablation changes one thing; the paper's own pair is written down although it is the default.
    if name.startswith("ablation-"):
        assert len(touched) == 1
        assert (plain.config == changed.config) == (name == "ablation-pair-same")
    assert "text.sources" not in touched
    with pytest.raises(UserError, match=rf"{name} is a variant .*: nano {name}"):
        resolve([name])


def test_the_presets_people_are_promised_exist() -> None:
    promised = {"nano", "smollm2-135m-toy", "smollm2-135m-study", "qwen3-1.7b", "qwen3.5-2b", "qwen3.5-9b"}
    assert promised <= set(presets())


def test_the_study_s_preset_holds_the_paper_s_shares_and_a_hundred_steps() -> None:
    config = Config.load("smollm2-135m-study")
    shares: dict[str, float] = {}
    for source in config.text.sources:
        shares[source.name.partition("-")[0]] = shares.get(source.name.partition("-")[0], 0) + source.share
        assert source.sha256 is not None
    assert shares == {"web": 85, "arxiv": 10, "math": 5}
    assert config.window.windows * config.window.actor_steps == 100
    assert config.window.items * config.window.windows == 100 * 128


@pytest.mark.parametrize("name", ["qwen3.5-2b", "qwen3.5-9b"])
def test_paper_presets_hold_the_paper_s_corpus_and_settings(name: str) -> None:
    config = Config.load(name)
    assert config.model.name == f"Qwen/Qwen3.5-{name[-2:].upper()}-Base"
    shares = {source.name: source.share for source in config.text.sources}
    assert shares == {"fineweb": 85, "arxiv": 10, "openwebmath": 5}
    assert config.text.sources[0].configs == tuple(f"CC-MAIN-2025-{week}" for week in (13, 18, 21, 26))
    splits = config.text.sequences
    assert (splits.train, splits.calibration, splits.development) == (12_800, 1_024, 1_024)
    assert config.text.sequence_length == 512
    assert (config.thought.length, tuple(config.thought.checkpoints), config.thought.horizon) == (12, (4, 8, 12), 16)
    assert (config.method, config.group, config.critic.pair) == ("t5", 1, "same")
    # Whole weights of a 9B model and of two critics fit no device; the preset says so.
    adapted = "full" if name == "qwen3.5-2b" else "lora"
    assert (config.actor.adapt, config.critic.adapt) == (adapted, adapted)


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3.5-2b", "qwen3.5-9b"])
def test_no_document_of_a_paper_preset_may_hold_a_benchmark_s_item(name: str) -> None:
    """app:evaluation-protocol: all primary benchmarks are excluded from training, and overlap is checked."""
    config = Config.load(name)
    assert config.text.decontaminate.tasks == ("primary",)
    assert all(source.hub is not None for source in config.text.sources)


def test_native_rlp_fits_a_device() -> None:
    """Sixteen thoughts of 2,048 tokens at one position of one text a pass, where sixteen positions of eight texts once
    asked for 19,068 GiB."""
    config = Config.load("qwen3.5-2b", "rlp-native")
    assert (config.method, config.group, config.thought.length) == ("rlp", 16, 2048)
    shape = find_shape(config.model.name)
    assert shape is not None
    assert estimate(config, shape, True).total < 80 * 2**30
    # Every training text is drawn once.
    assert config.window.items * config.window.windows == config.text.sequences.train


def test_defaults_are_those_of_the_specification(tmp_path: Path) -> None:
    bare = tmp_path / "bare.toml"
    bare.write_text("")
    config = resolve([str(bare)]).config
    assert (config.qualify.eta, config.qualify.consecutive, config.qualify.patience, config.qualify.attempts) == (
        0.1,
        2,
        2,
        5,
    )
    assert (config.qualify.rule, config.qualify.on_failure) == ("strict", "baseline")
    assert (config.calibration.kappa, config.reward.clip, config.reward.decay, SCALE_EPSILON) == (0.1, 3, 0.9, 1e-8)
    assert (PILOT_EPSILON, config.gae.alpha) == (1e-6, 1)
    assert (config.actor.clip_low, config.actor.clip_high) == (0.8, 1.28)
    assert (config.actor.reuse_passes, config.actor.minibatches) == (2, 4)
    assert (config.ratio.denominator, config.ratio.correction) == ("recomputed", "none")


def test_roles_share_a_window_as_specified() -> None:
    window = WindowSettings(items=1024)
    counts = {role: window.count(role) for role in (*TRAINING_ROLES, "qualify")}
    assert counts == {
        "critic_fit": 1024,
        "pilot": 128,
        "head_train": 512,
        "head_validate": 256,
        "actor": 1024,
        "scale": 128,
        "probe": 32,
        "qualify": 256,
    }
    assert WindowSettings(items=2).count("pilot") == 1
    none = WindowSettings(items=2, pilot=0, head_train=0)
    assert [none.count(role) for role in ("pilot", "scale", "head_train", "head_validate")] == [0, 0, 0, 0]
