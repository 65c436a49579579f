"""The JSON schema of configuration files: it takes what the loader takes and describes every key."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfive.config import layers
from tfive.config.config import Config, meanings, presets, resolve, variants
from tfive.config.json_schema import json_schema
from tfive.errors import UserError

SCHEMA = json_schema()
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
DESCRIBING = {"$schema", "title", "description", "default", "type", "required", "properties", "additionalProperties"}


def complaints(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """What draft 7 says against `value`; a keyword this reader does not know is a failure of the test."""
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, TYPES[kind]) or (kind != "boolean" and isinstance(value, bool))):
        return [f"{where}: not of type {kind}"]
    found: list[str] = []
    for keyword, content in schema.items():
        match keyword:
            case "const":
                found += [] if value == content else [f"{where}: not {content}"]
            case "enum":
                found += [] if value in content else [f"{where}: not one of {content}"]
            case "anyOf":
                found += [] if any(not complaints(value, one, where) for one in content) else [f"{where}: fits none"]
            case "items":
                inner = content if isinstance(content, list) else [content] * len(value)
                found += [line for part, one in zip(value, inner) for line in complaints(part, one, f"{where}[]")]
            case "minItems":
                found += [] if len(value) >= content else [f"{where}: too few"]
            case "maxItems":
                found += [] if len(value) <= content else [f"{where}: too many"]
            case "minLength":
                found += [] if len(value) >= content else [f"{where}: too short"]
            case "pattern":
                found += [] if re.search(content, value) else [f"{where}: not like {content}"]
            case "minimum":
                found += [] if value >= content else [f"{where}: below {content}"]
            case "maximum":
                found += [] if value <= content else [f"{where}: above {content}"]
            case "exclusiveMinimum":
                found += [] if value > content else [f"{where}: not above {content}"]
            case "exclusiveMaximum":
                found += [] if value < content else [f"{where}: not below {content}"]
            case _:
                assert keyword in DESCRIBING, f"{where}: unknown keyword {keyword}"
    if kind == "object":
        found += [f"{where}.{name}: missing" for name in schema.get("required", ()) if name not in value]
        for name, inner in value.items():
            known = schema.get("properties", {}).get(name, schema.get("additionalProperties", True))
            path = f"{where}.{name}".lstrip(".")
            found += complaints(inner, known, path) if isinstance(known, dict) else [] if known else [f"{path}: no key"]
    return found


def described(key: str) -> dict[str, Any]:
    """The schema of one dotted key."""
    node = SCHEMA
    for part in key.split("."):
        node = node["properties"][part]
    return node


@pytest.mark.parametrize("name", [*presets(), *variants()])
def test_every_preset_fits_the_schema_as_written_and_as_resolved(name: str) -> None:
    text = {**presets(), **variants()}[name]
    assert complaints(tomllib.loads(text), SCHEMA) == []
    sources = [name] if name in presets() else ["nano", name]
    assert complaints(tomllib.loads(resolve(sources).to_toml(explain=True)), SCHEMA) == []


def test_every_key_has_its_meaning_and_a_default_that_fits() -> None:
    for key, meaning in meanings().items():
        node = described(key)
        assert node["description"] == meaning
        assert complaints(node["default"], node, key) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[thought]\nlenght = 8", "thought.lenght: no key"),
        ("[thought]\nlength = 0", "thought.length: below 1"),
        ("[thought]\nlength = 'eight'", "thought.length: not of type integer"),
        ("[text]\nsources = [{ path = 'a.txt' }]", "text.sources[].name: missing"),
        ("thought = 3", "thought: not of type object"),
    ],
)
def test_a_mistake_is_marked_where_it_is(text: str, where: str) -> None:
    assert complaints(tomllib.loads(text), SCHEMA) == [where]


scalars = st.booleans() | st.integers(-5, 5000) | st.floats(-2, 2) | st.sampled_from(["none", "auto", "t5", "x"])


@given(st.sampled_from(sorted(layers.leaf_fields(Config))), scalars | st.lists(scalars, max_size=3))
@settings(max_examples=300)
def test_what_the_loader_takes_fits_the_schema(key: str, value: Any) -> None:
    try:
        resolve(["nano"], [f"{key}={layers.toml_item(value).as_string()}"])
    except UserError:
        return
    assert complaints(value, described(key), key) == []


def test_the_command_prints_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tfive", "config", "schema"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == SCHEMA
