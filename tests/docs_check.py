"""Runs every command shown in the README and the docs and follows their links: no page promises what does not work.

Fenced blocks tagged `sh` or `python` run in one empty folder per page, one after the other, as a reader of that page
would. A block whose tag line also says `gpu`, `hub` or `long` (```` ```sh long ````) is only parsed: every `tfive`
command in it must exist and know its options. Blocks with other tags are text. `make` targets must exist; they are not
run again from here. With `--short` every command is parsed, but only the first block of a page that can run does.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tfive.cli.app import _call

ROOT = Path(__file__).resolve().parents[1]
PARSED_ONLY = {"gpu", "hub", "long"}
RUNNABLE = {"sh", "bash", "python"}
LIMIT_SECONDS = 600
_FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<tag>[^`]*)$")
_FENCED = re.compile(r"^(`{3,})[^\n]*\n.*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_OUTSIDE = re.compile(r"https?:|mailto:")


def pages() -> list[Path]:
    """Every page a reader may open: README, CONTRIBUTING and all of docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    tags: tuple[str, ...]
    text: str

    @property
    def runs(self) -> bool:
        """Whether the block is meant to be run rather than only parsed."""
        return not PARSED_ONLY & set(self.tags)


def blocks_of(page: str, text: str) -> list[Block]:
    """The runnable fenced blocks of a Markdown text, in order."""
    found: list[Block] = []
    fence, start = "", 0
    tags: tuple[str, ...] = ()
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        mark = _FENCE.match(line.strip())
        if not fence and mark:
            fence, tags, start, lines = mark["ticks"], tuple(mark["tag"].split()), number, []
        elif fence and line.strip() == fence:
            if tags and tags[0] in RUNNABLE:
                found.append(Block(page, start, tags, "\n".join(lines) + "\n"))
            fence = ""
        elif fence:
            lines.append(line)
    if fence:
        raise SystemExit(f"{page}:{start}: this block is never closed")
    return found


def anchors_of(text: str) -> set[str]:
    """Names of a page's headings in links: lower case, words joined by hyphens, a number where a name comes again."""
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", _FENCED.sub("", text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = seen.get(name, 0)
        seen[name] = count + 1
        if count:
            seen[f"{name}-{count}"] = 1
    return set(seen)


def link_problems(path: Path) -> list[str]:
    """One line per relative link of a page that leads to no file, or to no heading of a page."""
    problems: list[str] = []
    for link in _LINK.findall(_FENCED.sub("", path.read_text("utf-8"))):
        if _OUTSIDE.match(link):
            continue
        target, _, anchor = link.partition("#")
        there = (path.parent / target).resolve() if target else path
        if not there.exists():
            problems.append(f"{path.name} points to {link}, which is not there")
        elif anchor and there.suffix == ".md" and anchor not in anchors_of(there.read_text("utf-8")):
            problems.append(f"{path.name} points to {link}, but {there.name} has no such heading")
    return problems


def commands_of(block: Block) -> list[list[str]]:
    """The words of every shell command of a block; continued lines are joined, comments dropped."""
    joined = block.text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def make_targets(makefile: str) -> set[str]:
    """Targets a Makefile declares phony."""
    phony = re.search(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    return set(phony[1].split()) if phony else set()


def parse_error(words: list[str], targets: set[str]) -> str | None:
    """What is wrong with one command without running it, else None."""
    if words[0] == "make":
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"make has no target {unknown[0]}" if unknown else None
    if words[0] != "tfive":
        return None
    path = [word for word in words[1:] if not word.startswith("-")]
    for depth in (2, 1):
        shown = _help(*path[:depth])
        if shown is not None:
            offered = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", shown))
            options = [word.partition("=")[0] for word in words[1:] if re.match(r"--?[A-Za-z]", word)]
            unknown = [option for option in options if option not in offered]
            return f"{' '.join(words[: depth + 1])} has no option {unknown[0]}" if unknown else None
    return f"tfive has no command {path[0] if path else ''}"


@functools.cache
def _help(*path: str) -> str | None:
    """What `tfive PATH --help` prints; None if there is no such command. Called, not started: there are many."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = _call([*path, "--help"])
    return out.getvalue() if status == 0 else None


def run(block: Block, folder: Path) -> str | None:
    """Run one block in `folder`; the end of its output if it failed, else None."""
    if block.tags[0] == "python":
        command = [sys.executable, "-c", block.text]
    else:
        lines = "\n".join(line for line in block.text.splitlines() if not line.startswith("make "))
        command = ["bash", "-euo", "pipefail", "-c", lines]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "TFIVE_CACHE": str(folder / ".cache")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    said = (done.stdout + done.stderr).strip()[-400:]
    return None if done.returncode == 0 else f"exit status {done.returncode}: {said}"


def check_page(page: str, text: str, makefile: str, *, short: bool = False) -> list[str]:
    """One line per problem of a page; a short check runs one block of it."""
    problems: list[str] = []
    ran = False
    targets = make_targets(makefile)
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks_of(page, text):
            where = f"{page}:{block.line}"
            if block.tags[0] != "python":
                wrong = [f"{where}: {error}" for words in commands_of(block) if (error := parse_error(words, targets))]
                problems += wrong
                if wrong:
                    continue
            else:
                compile(block.text, where, "exec")
            if not block.runs or (short and ran):
                continue
            ran = True
            if failure := run(block, Path(folder)):
                problems.append(f"{where}: failed: {failure}")
    return problems


def main() -> int:
    """Check every page; 1 if a command does not work or a link leads nowhere."""
    short = sys.argv[1:] == ["--short"]
    if sys.argv[1:] and not short:
        raise SystemExit(f"{sys.argv[1]}: the only option is --short")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    found = pages()
    problems: list[str] = []
    for page in found:
        problems += link_problems(page)
        problems += check_page(str(page.relative_to(ROOT)), page.read_text("utf-8"), makefile, short=short)
    done = "every command exists" if short else "every command works"
    print("\n".join(problems) if problems else f"{len(found)} pages, {done}, every link leads somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
