"""Configuration: layers and origins, refusals that name the key and the remedy, rules across sections, round trips."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfive.config import layers, rules
from tfive.config.config import Config, meanings, presets, resolve
from tfive.errors import UserError


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A file that sets nothing: the defaults alone."""
    path = tmp_path / "bare.toml"
    path.write_text("")
    return str(path)


def refusal(*overrides: str, source: str = "nano") -> str:
    with pytest.raises(UserError) as caught:
        resolve([source], overrides).checked()
    message = str(caught.value)
    assert "\n" not in message
    return message


def refused(source: str, *overrides: str) -> str | None:
    """The refusal, or None where the input is good; anything else that is raised fails the test."""
    try:
        resolve([source], overrides)
    except UserError as error:
        return str(error)
    return None


# --- layers and origins


def test_later_layers_win_and_every_value_knows_its_origin(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text('method = "ntp"\n\n[thought]\nlength = 6\ncheckpoints = [3, 6] # both\n')
    second.write_text("thought.length = 8\nthought.checkpoints = [\n  4,\n  8,\n]\n")
    resolved = resolve(["qwen3.5-2b", str(first), str(second)], ["thought.horizon=5"])
    assert resolved.config.thought.length == 8
    assert resolved.config.thought.checkpoints[-1] == 8
    expected = {
        "method": f"{first}:1",
        "thought.length": f"{second}:1",
        "thought.checkpoints": f"{second}:2",
        "thought.horizon": "--set",
        "model.name": "preset qwen3.5-2b",
        "text.sources": "preset qwen3.5-2b",
        "gae.alpha": "default",
    }
    assert {key: resolved.origins[key] for key in expected} == expected
    assert set(resolved.origins) == set(layers.leaf_fields(Config))


def test_nano_is_taken_when_nothing_is_named() -> None:
    assert resolve([]).config == resolve(["nano"]).config


def test_none_empties_a_key_and_stays_a_word_where_it_is_one(bare: str) -> None:
    config = resolve([bare], ["optimizer.clip_norm=none", "ratio.correction=none", "text.end_of_document=none"]).config
    assert config.optimizer.clip_norm is None
    assert config.ratio.correction == "none"
    assert config.text.end_of_document == "none"


def test_values_of_set_are_toml_and_bare_words_are_text(bare: str) -> None:
    config = resolve(
        [bare],
        ["run.project = my project", "critic.start='a=b'", "optimizer.lr=3e-6", "thought.variable_length= true",
         'thought.open=" ["'],
    ).config  # fmt: skip
    assert (config.run.project, config.critic.start, config.optimizer.lr) == ("my project", "a=b", 3e-6)
    assert config.thought.open == " ["
    assert config.thought.variable_length


# --- refusals


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("thougt.length=3", ["thougt.length (--set)", "did you mean thought.length?"]),
        ("length=3", ["did you mean thought.length?"]),
        ("thought.lenght=3", ["did you mean thought.length?"]),
        ("text.positions.pertext=3", ["did you mean text.positions.per_text?"]),
        ("thought=3", ["thought = 3", "section"]),
        ("thought.length=-3", ["thought.length = -3 (--set)", "greater than or equal to 1"]),
        ("thought.length=twelve", ['thought.length = "twelve"', "valid integer"]),
        ("thought.length=12.5", ["thought.length = 12.5", "valid integer"]),
        ("thought.length='12'", ['thought.length = "12"', "valid integer"]),
        ("critic.bounded=1", ["critic.bounded = 1", "valid boolean"]),
        ("method=t6", ['method = "t6" (--set)', "must be one of base, ntp", "rlp, t5"]),
        ("qualify.eta=1.0", ["qualify.eta = 1.0", "less than 1"]),
        ("qualify.eta=-0.1", ["qualify.eta = -0.1", "greater than or equal to 0"]),
        ("calibration.kappa=1", ["calibration.kappa = 1", "less than 1"]),
        ("calibration.kappa=nan", ["calibration.kappa = NaN"]),
        ("thought.checkpoints=[4, 4, 12]", ["thought.checkpoints = [4, 4, 12]", "rising"]),
        ("thought.checkpoints=[4, 8]", ["checkpoints", "12"]),
        ("text.sources=[{name = 'a', pth = 'x'}]", ["text.sources.0.pth", "did you mean path?"]),
        ("text.sources.0.share=2", ["text.sources is one value"]),
        ("thought.length", ["write KEY=VALUE"]),
        ("=3", ["write KEY=VALUE"]),
        ("thought.length=", ["write KEY=VALUE"]),
        ("thought.checkpoints=[4,", ["is not a TOML value"]),
        ("thought.open= (", ['quote a text that begins or ends with a space: thought.open=" ("']),
        ("run.project=mine ", ['run.project="mine "']),
    ],
)
def test_bad_overrides_name_key_value_and_remedy(override: str, parts: list[str]) -> None:
    message = refusal(override)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"[thought\nlength = 3", ["not valid TOML", "line 1"]),
        (b"\xff\xfe\x00junk", ["not a UTF-8 text file"]),
        (b"[thought]\n\nlenght = 3", ["my.toml:3", "did you mean thought.length?"]),
        (b"model = 'nano'", ["my.toml:1", "section", "model.name"]),
        (b"thought.length = 1979-05-27", ["thought.length", "my.toml:1"]),
    ],
)
def test_bad_files_are_refused_with_their_line(tmp_path: Path, content: bytes, parts: list[str]) -> None:
    path = tmp_path / "my.toml"
    path.write_bytes(content)
    message = refusal(source=str(path))
    for part in parts:
        assert part in message


def test_missing_files_folders_and_unknown_presets_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(source=str(tmp_path / "absent.toml"))
    assert "Is a directory" in refusal(source=str(tmp_path))
    assert "did you mean qwen3.5-2b?" in refusal(source="qwen3.5-2")


# --- rules across sections


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["gae.alpha=0.05"], ["gae.alpha = 0.05", "-0.667", "length 12", "≥ 0.0834"]),
        (["gae.alpha=0.5", "thought.variable_length=true"], ["gae.alpha = 0.5", "length 1", "≥ 1"]),
        (["thought.variable_length=true", "thought.delimiters=none"], ["variable_length", "delimiters"]),
        (["thought.horizon=600"], ["thought.horizon = 600", "p + H ≤ S", "≤ 31"]),
        (["text.positions.per_text=64"], ["text.positions.per_text = 64", "at most 31"]),
        (["window.items=200000"], ["window.items = 200000", "37892 training sequences"]),
        (["window.qualify=10"], ["window.qualify = 10", "1280 calibration sequences"]),
        (["run.develop_items=100000"], ["run.develop_items = 100000", "16384 items"]),
        (["window.pilot=0"], ["window.pilot = 0", "t5"]),
        (["thought.group=8"], ["window.probe = 0.03125", "groups of 8", "window.probe = 0"]),
        (["critic.sees=group"], ["critic.sees = group", "thought.group = 8"]),
        (["gae.unit=position"], ["gae.unit = position", "3 thoughts", "thought.group = 8"]),
        (["gae.unit=position", "thought.group=2", "window.probe=0"], ["gae.unit = position", "3 thoughts"]),
        (["method=rlp", "thought.group=1"], ["thought.group = 1", "method rlp", "thought.group = 8"]),
        (["method=quiet-star-ppo", "critic.pair=disjoint"], ["critic.pair = disjoint", "one critic", "same"]),
        (["method=quiet-star-ppo", "ppo.frozen_windows=100"], ["ppo.frozen_windows = 100", "≤ 99"]),
        (["window.crossed=true"], ["window.crossed = true", "use window.history = true"]),
        (["method=rlp", "calibration.mode=minimum"], ["calibration.mode = minimum", "method rlp"]),
        (["method=rlp", "calibration.score_centering=true"], ["calibration.score_centering = true", "method rlp"]),
        (["method=quiet-star-ppo", "qualify.rule=fixed"], ["qualify.rule = fixed", "use method = t5"]),
        (["actor.minibatches=500"], ["actor.minibatches = 500", "128 texts"]),
        (["window.actor_steps=9"], ["window.actor_steps = 9", "give 8"]),
        (["optimizer.warmup_steps=800"], ["optimizer.warmup_steps = 800", "800 steps"]),
        (["ratio.correction=mask", "ratio.cap=1.0"], ["ratio.cap = 1", "above 1"]),
        (["optimizer.bf16_update=stochastic", "model.compute=float32"], ["bf16_update", "model.compute"]),
        (["calibration.bounds=enforce"], ["calibration.bounds = enforce", "critic.bounded"]),
        (["method=ntp", "anchor.next_token=0"], ["anchor.next_token = 0", "ntp"]),
        (["method=anchor-only", "anchor.next_token=0"], ["anchor.next_token = 0", "anchor-only"]),
        (["anchor.mixture=0.5", "anchor.conditioned=0"], ["anchor.mixture = 0.5", "anchor.conditioned"]),
        (["window.reading=4", "window.windows=4"], ["window.reading = 4", "anchor-only"]),
        (["method=rlp", "reward.reference=foreign"], ["reward.reference = foreign", "rlp"]),
        (["window.reading=1", "anchor.conditioned=0"], ["window.reading = 1", "anchor.conditioned"]),
        (["thought.reading=gated", "anchor.conditioned=0"], ["thought.reading = gated", "anchor.conditioned = 1"]),
        (["text.sources=[]"], ["text.sources = []", "no text"]),
        (["calibration.certified=true"], ["certified", "approximation_bound"]),
    ],
)
def test_a_broken_rule_names_key_value_and_remedy(overrides: list[str], parts: list[str]) -> None:
    message = refusal(*overrides, source="qwen3.5-2b")
    for part in parts:
        assert part in message


def test_several_broken_rules_are_counted() -> None:
    assert "(and 1 more" in refusal("gae.alpha=0.05", "window.actor_steps=9", source="qwen3.5-2b")


@pytest.mark.parametrize(
    "overrides",
    [
        ["gae.alpha=0.0834"],
        ["gae.alpha=1.0", "thought.variable_length=true"],
        ["thought.horizon=511", "text.positions.per_text=1"],
        ["qualify.eta=0"],
        ["calibration.kappa=0"],
        ["method=rlp", "thought.group=2"],
        ["calibration.mode=average", "window.head_train=0"],
    ],
)
def test_the_edge_of_a_rule_is_allowed(overrides: list[str]) -> None:
    resolve(["qwen3.5-2b"], overrides).checked()


@given(alpha=st.floats(0.01, 3.0), length=st.integers(1, 40), variable=st.booleans())
def test_the_trace_rule_is_the_formula_over_all_reachable_lengths(alpha: float, length: int, variable: bool) -> None:
    chosen = [f"gae.alpha={alpha!r}", f"thought.length={length}", f"thought.checkpoints=[{length}]"]
    config = resolve(["qwen3.5-2b"], [*chosen, f"thought.variable_length={str(variable).lower()}"]).config
    lengths = range(1, length + 1) if variable else [length]
    sound = all(0 <= 1 - 1 / (alpha * reached) <= 1 for reached in lengths)
    assert (rules.trace_decay_lies_between_0_and_1(config) is None) == sound


def test_every_rule_has_a_name_and_can_break() -> None:
    broken = set()
    for overrides in (
        [
            "anchor.lr=1e-5",
            "anchor.next_token=0",
            "warmstart.source=given",
            "warmstart.path=worked.jsonl",
            "actor.adapt=lora",
        ],
        ["gae.alpha=0.05", "window.items=300000", "window.actor_steps=9", "thought.group=8", "run.develop_items=99999"],
        [
            "thought.horizon=600",
            "text.positions.per_text=1",
            "ratio.correction=mask",
            "ratio.cap=1.0",
            "window.pilot=0",
        ],
        [
            "text.positions.per_text=64",
            "optimizer.warmup_steps=999999",
            "actor.minibatches=999",
            "calibration.bounds=enforce",
            "sampling.parity=true",
        ],
        [
            "method=ntp",
            "reward.reference=foreign",
            "anchor.next_token=0",
            "optimizer.bf16_update=stochastic",
            "model.compute=float32",
            "run.develop_items=1",
        ],
        ["method=quiet-star-ppo", "critic.pair=bracket", "window.reading=100", "qualify.rule=fixed"],
        ["text.sources=[]"],
        ["thought.reading=gated", "anchor.conditioned=0", "text.positions.variance=1"],
        ["text.sequence_length=9", "window.curriculum=999999", "run.seconds=9", "optimizer.schedule=linear"],
        ["critic.features=policy", "critic.adapt=full", "distributed.profile=compact"],
        ["method=quiet-star-ppo", "critic.sees=group"],
        ["method=rlp", "thought.group=1"],
    ):
        config = resolve(["qwen3.5-2b"], overrides).config
        broken |= {check.__name__ for check in rules.RULES if check(config) is not None}
    assert broken == {check.__name__ for check in rules.RULES}


def test_every_key_says_what_it_means() -> None:
    assert [key for key, meaning in meanings().items() if not meaning] == []


# --- round trips


@pytest.mark.parametrize("name", presets())
def test_toml_and_json_round_trip(name: str, tmp_path: Path) -> None:
    resolved = resolve([name], ["optimizer.clip_norm=none", "critic.start='a \"quoted\" \\ name ü'"])
    with_origins, plain = tmp_path / "origins.toml", tmp_path / "plain.toml"
    with_origins.write_text(resolved.to_toml(explain=True), encoding="utf-8")
    plain.write_text(resolved.config.to_toml(), encoding="utf-8")
    assert Config.load(with_origins) == Config.load(plain) == resolved.config
    assert Config.model_validate_json(resolved.config.model_dump_json()) == resolved.config
    shown = json.loads(json.dumps(resolved.to_dict()))
    assert shown["optimizer.clip_norm"] == {"value": None, "origin": "--set"}


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars.filter(lambda value: value is not None),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(values)
def test_written_toml_reads_back_the_same(value: Any) -> None:
    assert tomllib.loads(f"value = {layers.toml_item(value).as_string()}")["value"] == value


@given(st.text(max_size=60))
@settings(max_examples=200)
def test_any_override_is_taken_or_refused_in_one_line(text: str) -> None:
    assert refused("qwen3.5-2b", text) != ""


@given(st.sampled_from(sorted(layers.leaf_fields(Config))), values)
@settings(max_examples=200)
def test_any_value_for_any_key_is_taken_or_refused_by_name(key: str, value: Any) -> None:
    message = refused("qwen3.5-2b", f"{key}={layers.toml_item(value).as_string()}")
    assert message is None or key in message or key.rpartition(".")[0] in message


@given(st.binary(max_size=80))
def test_any_bytes_as_a_file_are_taken_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_bytes(content)
    message = refused(str(path))
    assert message is None or "fuzz.toml" in message
