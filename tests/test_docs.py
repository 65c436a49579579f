"""The checker behind `make docs-check`, and the pages it reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import docs_check
from tfive.cli import app as cli
from tfive.config.config import presets, variants

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAKEFILE = ".PHONY: test train\ntest:\n"


def page(*blocks: str) -> str:
    return "\n\ntext between\n\n".join(blocks)


def test_blocks_are_found_with_their_tags_and_lines() -> None:
    text = page("```sh\ntfive doctor\n```", "```toml\na = 1\n```", "````python long\n```\nx = 1\n````")
    found = docs_check.blocks_of("page", text)
    assert [(block.line, block.tags, block.runs) for block in found] == [
        (1, ("sh",), True),
        (13, ("python", "long"), False),
    ]
    assert found[1].text == "```\nx = 1\n"


def test_an_open_block_is_refused() -> None:
    with pytest.raises(SystemExit, match="page:1: this block is never closed"):
        docs_check.blocks_of("page", "```sh\ntfive doctor\n")


def test_commands_are_joined_over_lines_and_comments_dropped() -> None:
    block = docs_check.Block(
        "page", 1, ("sh",), "tfive config show nano \\\n  --set 'a.b=1 2' # why\n\n# only this\nls\n"
    )
    assert docs_check.commands_of(block) == [["tfive", "config", "show", "nano", "--set", "a.b=1 2"], ["ls"]]


@pytest.mark.parametrize(
    ("block", "part"),
    [
        ("```sh gpu\ntfive trian nano\n```", "tfive has no command trian"),
        ("```sh long\ntfive config show nano --sett a.b=1\n```", "tfive config show has no option --sett"),
        ("```sh\nmake tset\n```", "make has no target tset"),
        ("```sh\ntfive config show absent\n```", "absent: no such preset"),
        ("```sh\nfalse\n```", "failed"),
        ("```python\nraise SystemExit('broken')\n```", "broken"),
    ],
)
def test_a_command_that_does_not_work_is_found(block: str, part: str) -> None:
    problems = docs_check.check_page("page", page(block), MAKEFILE)
    assert len(problems) == 1
    assert problems[0].startswith("page:1: ")
    assert part in problems[0]


def test_commands_that_work_pass_and_share_a_folder() -> None:
    text = page(
        "```sh\nmake test\ntfive config show nano > mine.toml\n```",
        "```sh\ntfive config check mine.toml\n```",
        "```python\nfrom pathlib import Path\nassert Path('mine.toml').exists()\n```",
        "```sh hub\npip download nothing-at-all\ntfive doctor nano --json\n```",
    )
    assert docs_check.check_page("page", text, MAKEFILE) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_on_a_page_exists(path: Path) -> None:
    targets = docs_check.make_targets((ROOT / "Makefile").read_text("utf-8"))
    for block in docs_check.blocks_of(path.name, path.read_text("utf-8")):
        if block.tags[0] == "python":
            compile(block.text, f"{path.name}:{block.line}", "exec")
            continue
        for words in docs_check.commands_of(block):
            assert docs_check.parse_error(words, targets) is None, f"{path.name}:{block.line}: {' '.join(words)}"


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), f"{path.name} points to {target}"


def test_the_commands_page_shows_every_command() -> None:
    def below(command: Any, path: str) -> list[str]:
        inner = getattr(command, "commands", None)
        return [path] if inner is None else [found for name in inner for found in below(inner[name], f"{path} {name}")]

    text = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert [command for command in below(get_command(cli.app), "tfive") if f"\n{command}" not in text] == []


def test_the_configuration_page_names_every_preset() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert [name for name in (*presets(), *variants()) if f"`{name}`" not in text] == []
