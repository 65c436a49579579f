"""Every function and key that a page names is there, and every number that a run reports is explained."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import tfive
from tfive.config.config import Config

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(tfive.__file__).parent
ROOMS = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
PAGES = [
    ROOT / "docs" / name
    for name in ("explanation/algorithm.md", "explanation/paper.md", "howto/diagnostics.md", "howto/tune.md")
]
PAGES += sorted((ROOT / "docs" / "explanation" / "methods").glob("*.md"))


def quoted(page: Path) -> list[str]:
    """What stands between single backticks outside fenced blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def resolve(name: str) -> Any:
    """The object a dotted name inside the package stands for."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        module = SOURCE.joinpath(*parts[:cut])
        if module.with_suffix(".py").is_file():
            found: Any = importlib.import_module(".".join(["tfive", *parts[:cut]]))
            for attribute in parts[cut:]:
                found = getattr(found, attribute)
            return found
    raise AttributeError(f"no module {name}")


def is_name(text: str) -> bool:
    return re.fullmatch(r"\w+(\.\w+)+", text) is not None and text.split(".")[0] in ROOMS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_function_named_exists(page: Path) -> None:
    keys = set(Config().leaves())
    names = [text for text in quoted(page) if is_name(text) and text not in keys]
    assert names or page.stem != "algorithm"
    for name in names:
        assert getattr(resolve(name), "__doc__", None) or ".T5._" in name, f"{page.name}: {name} says nothing of itself"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_named_exists(page: Path) -> None:
    keys = set(Config().leaves())
    sections = {key.split(".")[0] for key in keys if "." in key} - ROOMS
    named = [text.split(" = ")[0] for text in quoted(page)]
    wrong = [
        name
        for name in named
        if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", name) and name.split(".")[0] in sections and name not in keys
    ]
    assert wrong == []


def test_resolution_can_fail() -> None:
    with pytest.raises(AttributeError):
        resolve("credit.reward.no_such_function")
    with pytest.raises(AttributeError):
        resolve("credit.no_such_module.anything")


def test_the_algorithm_page_covers_every_phase_and_paper_line() -> None:
    from tfive.methods.registry import spec_of

    text = (ROOT / "docs" / "explanation" / "algorithm.md").read_text("utf-8")
    assert [phase for phase in spec_of("t5").phases if f"`methods.t5.T5.{phase}`" not in text] == []
    labels = set(re.findall(r"`((?:eq|alg|app|sec|prop|lem|thm|cor):[a-z0-9-]+)`", text))
    assert {"alg:t5-training", "eq:value-loss", "eq:holdout-r2", "eq:calibrated-weight", "eq:twin-advantage"} <= labels
