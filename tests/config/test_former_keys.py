"""Every key that went is refused by one line that says what became of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tfive.config import layers
from tfive.config.config import Config, resolve
from tfive.config.former_keys import FORMER_KEYS
from tfive.errors import UserError

KEYS = set(layers.leaf_fields(Config))
SECTIONS = {key.partition(".")[0] for key in KEYS}


def refusal(sources: list[str], overrides: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        resolve(sources, overrides)
    return str(caught.value)


@pytest.mark.parametrize("key", FORMER_KEYS)
def test_a_former_key_is_refused_with_what_became_of_it(key: str, tmp_path: Path) -> None:
    section, _, name = key.rpartition(".")
    file = tmp_path / "mine.toml"
    file.write_text(f"# one\n[{section}]\n# three\n{name} = 1\n")
    assert refusal(["nano", str(file)], []) == f"{key} ({file}:4): {FORMER_KEYS[key]}"
    assert refusal(["nano"], [f"{key}=1"]) == f"{key} (--set): {FORMER_KEYS[key]}"


@pytest.mark.parametrize("key", FORMER_KEYS)
def test_it_is_gone_and_what_it_points_to_is_there(key: str) -> None:
    assert key not in KEYS
    message = FORMER_KEYS[key]
    assert "\n" not in message
    named = {word for word in re.findall(r"[a-z]+(?:\.[a-z_]+)+", message) if word.partition(".")[0] in SECTIONS}
    assert named <= KEYS
    assert named or not message.startswith("now")
