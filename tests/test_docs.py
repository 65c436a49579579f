"""The checker behind `make docs-check`, and the pages it reads."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

import docs_check
from tfive.cli import app as cli
from tfive.config.config import presets, variants

ROOT = Path(__file__).resolve().parents[1]
PAGES = docs_check.pages()
MAKEFILE = ".PHONY: test train\ntest:\n"


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


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


def test_a_short_check_runs_the_first_block_and_parses_the_others() -> None:
    text = page("```sh long\ntfive doctor\n```", "```sh\ntrue\n```", "```sh\nfalse\n```", "```sh\ntfive trian\n```")
    assert docs_check.check_page("page", text, MAKEFILE, short=True) == ["page:19: tfive has no command trian"]


@pytest.mark.parametrize("path", PAGES, ids=shown)
def test_every_command_on_a_page_exists(path: Path) -> None:
    targets = docs_check.make_targets((ROOT / "Makefile").read_text("utf-8"))
    for block in docs_check.blocks_of(path.name, path.read_text("utf-8")):
        if block.tags[0] == "python":
            compile(block.text, f"{path.name}:{block.line}", "exec")
            continue
        for words in docs_check.commands_of(block):
            assert docs_check.parse_error(words, targets) is None, f"{path.name}:{block.line}: {' '.join(words)}"


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=shown)
def test_links_lead_somewhere(path: Path) -> None:
    assert docs_check.link_problems(path) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Two words, `T = 1`\n\n## Again\n\n## Again\n\n```sh\n# no heading\n```\n")
    here = tmp_path / "page.md"
    here.write_text(
        "# Here\n[a](other.md#two-words-t--1) [b](other.md#again-1) [c](#here) [d](https://example.org)\n"
        "[e](absent.md) [f](other.md#no-heading) [g](#there)\n```text\n[h](absent.md)\n```\n"
    )
    assert [problem.split(" points to ")[1].split(",")[0] for problem in docs_check.link_problems(here)] == [
        "absent.md",
        "other.md#no-heading",
        "#there",
    ]


def test_the_site_has_every_page_in_its_menu() -> None:
    menu = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))
    assert menu == {str(path.relative_to(ROOT / "docs")) for path in PAGES if path.is_relative_to(ROOT / "docs")}


def test_the_reference_is_what_the_source_says() -> None:
    # A process of its own: the pages must not depend on what other tests imported or registered.
    script = ROOT / "docs" / "tools" / "reference.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run make reference"


@pytest.mark.parametrize("words", [["--help"], ["--check", "now"]])
def test_the_reference_is_not_written_for_a_word_it_does_not_know(words: list[str]) -> None:
    command = [sys.executable, str(ROOT / "docs" / "tools" / "reference.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{words[-1]}: ")


def test_the_picture_is_what_its_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "tools" / "thought_gain.py"))["picture"]()
    assert (ROOT / "docs" / "figures" / "thought-gain.svg").read_text("utf-8") == drawn


def test_the_site_shows_paths_that_it_has_no_page_for() -> None:
    on_page = runpy.run_path(str(ROOT / "docs" / "tools" / "site.py"))["on_page_markdown"]
    text = (
        "[results/a.json](../../results/a.json) [why](../../tests/x.py) [in](../howto/tune.md#a)\n```sh long\nls\n```\n"
    )
    page = SimpleNamespace(file=SimpleNamespace(src_uri="studies/nano.md"))
    assert on_page(text, page=page) == (
        "`results/a.json` why (`tests/x.py`) [in](../howto/tune.md#a)\n```sh\nls\n```\n"
    )


@pytest.mark.parametrize("name", ["howto/commands.md", "reference/commands.md"])
def test_both_pages_of_commands_show_every_command(name: str) -> None:
    def below(command: Any, path: str) -> list[str]:
        inner = getattr(command, "commands", None)
        return [path] if inner is None else [found for name in inner for found in below(inner[name], f"{path} {name}")]

    text = (ROOT / "docs" / name).read_text("utf-8")
    assert [command for command in below(get_command(cli.app), "tfive") if f"\n{command}" not in text] == []


def test_the_configuration_page_names_every_preset() -> None:
    text = (ROOT / "docs" / "howto" / "configure.md").read_text("utf-8")
    assert [name for name in (*presets(), *variants()) if f"`{name}`" not in text] == []
