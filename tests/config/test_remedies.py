"""What an error recommends is accepted: every remedy is applied by machine, and following them ends in a sound run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import pytest

from tfive.config.config import Config, resolve
from tfive.config.rules import RULES, problems, there_is_text
from tfive.errors import UserError

BROKEN: tuple[tuple[str, ...], ...] = (
    ("gae.alpha=0.01",),
    ("text.sequence_length=2",),
    ("text.sequence_length=13", "thought.horizon=40", "text.positions.per_text=1"),
    ("thought.horizon=4000",),
    ("thought.horizon=200", "text.positions.min_gap=3"),
    ("text.positions.per_text=64",),
    ("text.positions.min_gap=100",),
    ("window.items=4000",),
    ("window.items=1000000", "text.positions.per_text=1"),
    ("text.sequences.train=1",),
    ("window.qualify=40",),
    ("text.sequences.calibration=1",),
    ("run.develop_items=1000000",),
    ("text.sequences.development=1",),
    ("run.develop_items=1",),
    *((f"window.{share}=0",) for share in ("critic_fit", "qualify", "pilot", "head_train")),
    ("thought.group=4",),
    ("thought.group=4", "calibration.mode=repeated", "window.probe=0"),
    ("critic.sees=group",),
    ("gae.unit=position",),
    ("method=rlp", "thought.group=1"),
    ("method=quiet-star-ppo", "critic.pair=disjoint"),
    ("critic.features=policy", "critic.adapt=full"),
    ("critic.features=policy", "critic.adapt=top", "critic.blocks=1", "distributed.profile=compact"),
    ("window.reading=50", "anchor.conditioned=1"),
    ("window.windows=1", "window.reading=1", "anchor.conditioned=1"),
    ("window.windows=1", "thought.reading=gated", "anchor.conditioned=1"),
    ("thought.reading=gated", "window.windows=1", "window.reading=3"),
    ("method=rlp", "calibration.mode=single"),
    ("method=rlp", "calibration.score_centering=true", "qualify.rule=fixed"),
    ("method=rlp", "reward.reference=foreign"),
    ("thought.group=4", "window.probe=0", "reward.reference=foreign"),
    ("actor.minibatches=90000",),
    ("window.actor_steps=90000",),
    ("optimizer.warmup_steps=900000000",),
    ("run.seconds=60", "optimizer.schedule=cosine"),
    ("ratio.correction=mask", "ratio.cap=1"),
    ("optimizer.bf16_update=stochastic", "model.compute=float32"),
    ("anchor.mixture=0.5", "anchor.conditioned=0"),
    ("window.reading=1", "anchor.conditioned=0"),
    ("method=ntp", "anchor.next_token=0"),
    ("method=anchor-only", "anchor.next_token=0", "anchor.conditioned=0"),
    ("thought.reading=gated", "anchor.conditioned=0"),
    ("sampling.parity=true",),
    ("sampling.parity=true", "calibration.mode=repeated", "window.probe=0"),
    ("calibration.bounds=enforce",),
    ("window.crossed=true",),
    ("window.crossed=true", "window.history=true", "calibration.mode=repeated", "window.probe=0"),
    ("window.crossed=true", "window.history=true", "window.items=18"),
    ("window.crossed=true", "window.history=true", "reward.reference=foreign"),
    ("method=quiet-star-ppo", "ppo.frozen_windows=900"),
    ("method=quiet-star-ppo", "ppo.frozen_windows=1", "window.windows=1"),
    ("ratio.denominator=sampler", "ratio.correction=mask"),
    ("calibration.certified=true",),
    ("calibration.bounds=enforce", "calibration.mode=repeated"),
    ("thought.length=9",),
    ("thought.length=2",),
    ("thought.delimiters=none", "thought.variable_length=true"),
    ("thought.open=''",),
    ("warmstart.source=given", "warmstart.path=a.jsonl", "text.positions.pattern=''", "text.positions.match=0"),
    ("anchor.lr=1e-5", "anchor.next_token=0", "anchor.conditioned=0"),
    ("actor.adapt=lora", "warmstart.source=hindsight"),
    ("text.positions.variance=1", "thought.reading=gated", "text.positions.uniform=0", "text.positions.match=0"),
    ("window.curriculum=6",),
    ("window.curriculum=1", "window.windows=1"),
    ("window.curriculum=2", "thought.checkpoints=[12]"),
    ("window.curriculum=2", "thought.checkpoints=[1]", "thought.length=1"),
    ("window.curriculum=2", "gae.alpha=0.2", "thought.variable_length=false"),
)
_STEP = re.compile(r"(?P<key>[a-z_0-9]+(?:\.[a-z_0-9]+)*) (?P<sign>[=≤≥]) (?P<value>\[[^\]]*\]|[^\s;]+)")


def broken(overrides: Iterable[str]) -> list[str]:
    """What is wrong with nano and these values, one line each."""
    try:
        return problems(resolve(["nano"], list(overrides)).config)
    except UserError as error:
        return str(error).split(" (and ")[:1]


def alternatives(line: str) -> list[list[str]]:
    """Every way out that a line names, as overrides; a section's own line ends with what its first key means."""
    said = re.split(r"; use ", line)[-1] if "; use " in line else ""
    return [
        [f"{step['key']}={step['value'].rstrip(',')}" for step in _STEP.finditer(way)] for way in said.split(" or ")
    ]


@pytest.mark.parametrize("overrides", BROKEN, ids=" ".join)
def test_every_remedy_is_accepted_and_leads_to_a_sound_configuration(overrides: tuple[str, ...]) -> None:
    first = broken(overrides)
    assert first
    for line in first:
        ways = alternatives(line)
        assert ways, f"no remedy that a machine finds: {line}"
        for way in ways:
            assert way, f"no remedy that a machine finds: {line}"
            left = broken((*overrides, *way))
            assert not any(_same_rule(line, other) for other in left), f"{way} does not mend: {line}\n{left}"
            _follow((*overrides, *way))


def _same_rule(line: str, other: str) -> bool:
    return line.partition(" = ")[0] == other.partition(" = ")[0] and line.split(":")[1][:12] == other.split(":")[1][:12]


def _follow(overrides: tuple[str, ...]) -> None:
    """First remedies, one after the other, end within a few steps."""
    seen = [overrides]
    for _ in range(12):
        left = broken(overrides)
        if not left:
            return
        overrides = (*overrides, *alternatives(left[0])[0])
        seen.append(overrides)
    raise AssertionError(f"remedies go round in circles: {seen[-1]}: {broken(overrides)}")


def test_every_rule_is_among_them() -> None:
    met: set[object] = set()
    for overrides in BROKEN:
        try:
            config = resolve(["nano"], list(overrides)).config
        except UserError:
            continue
        met |= {rule for rule in RULES if rule(config) is not None}
    # Text has to come from somewhere; no value that could be named gives it.
    assert set(RULES) - met == {there_is_text}


def test_numbers_have_two_bounds_and_are_finite() -> None:
    """Beyond its bounds a number means nothing; `inf` and `nan` are refused by every key that takes a number."""
    unbounded = []
    for key, (kinds, low, high) in _numbers().items():
        if low is None or high is None:
            unbounded.append(key)
        for word in ("inf", "-inf", "nan") if "number" in kinds else ("inf",):
            with pytest.raises(UserError, match=re.escape(key)):
                resolve(["nano"], [f"{key}={word}"])
    assert not unbounded


def _numbers() -> dict[str, tuple[set[str], object, object]]:
    """Dotted key → kinds and bounds of every number of the schema."""
    from tfive.config.json_schema import json_schema

    found: dict[str, tuple[set[str], object, object]] = {}

    def walk(node: dict[str, object], prefix: str) -> None:
        properties = node.get("properties")
        if isinstance(properties, dict):
            for name, inner in properties.items():
                walk(inner, f"{prefix}.{name}" if prefix else name)
            return
        choices = node.get("anyOf", [node])
        assert isinstance(choices, list)
        for one in choices:
            if one.get("type") in ("integer", "number"):
                bounds = [next((one[word] for word in words if word in one), None) for words in _BOUNDS]
                found[prefix] = ({one["type"]}, bounds[0], bounds[1])

    walk(json_schema(), "")
    assert len(found) > 60
    return found


_BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))


@pytest.mark.parametrize(
    "text",
    ["a = " + "[" * 3000, "[" + "a." * 3_000 + "a]\nb = 1", "a" * 200_000 + " = 1", "run.seed = " + "9" * 5000,
     "[text.positions]\npattern = 'a{99999999999}'", "text = 3", 'text.cache = "\\u0000"', "window.pilot = inf",
     "[run]\nseed = 1\n" + "x" * 5000 + " = 2", '[[text.sources]]\nname = "x"\n' + "a." * 1500 + "b = 1",
     "a." * 50_000 + "b = 1", '"a" . ' * 50_000 + "b = 1"],
    ids=["brackets", "tables", "key", "digits", "pattern", "section", "nul", "infinite", "inner-key", "inner-tables",
         "tower", "quoted-tower"],
)  # fmt: skip
def test_a_file_of_nonsense_is_one_short_line(tmp_path: object, text: str) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "odd.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(UserError) as error:
        Config.load("nano", path)
    assert len(str(error.value)) < 1000
    assert "\n" not in str(error.value)


def test_alternatives_are_read_from_a_line() -> None:
    line = "a.b = 3: it is; use c.d ≤ 4 and e.f = [1, 2] or g = none"
    assert alternatives(line) == [["c.d=4", "e.f=[1, 2]"], ["g=none"]]
    assert list(itertools.chain(*alternatives("a = 1: no remedy"))) == []
