"""Build text like that of the study from the repositories it was read from, each at the commit the study names.

    python studies/smollm2/corpora.py --out corpora                    # clones what is needed (git, network)
    python studies/smollm2/corpora.py --out corpora --clones clones    # clones that lie there already are taken

Writes `web_curated`, `web_crawl`, `arxiv`, `math` as `.jsonl.gz` (rows of `id`, `text`, `source`) and `sources.toml`,
to be named after the preset: `tfive train smollm2-135m-study corpora/sources.toml`. The study's own files were cut and
cleaned by hand here and there, so these are of the same origin and not the same bytes; `sources.toml` has their sha256.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tfive.cli.options import script
from tfive.errors import RunFailed
from tfive.text.cutting import documents_of
from tfive.text.files import sha256

FEWEST = 250
"""Characters of the shortest document kept."""

Reader = Callable[[Path], Iterator[str]]


def json_rows(*fields: str, joint: str = "\n\n") -> Reader:
    """Rows of a JSON-lines file or of one JSON list, these fields of each joined."""

    def read(path: Path) -> Iterator[str]:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
        rows = (
            json.loads(text) if text.lstrip().startswith("[") else map(json.loads, filter(str.strip, text.split("\n")))
        )
        for row in rows:
            yield joint.join(str(row[field]) for field in fields if row.get(field)).strip()

    return read


def plain(path: Path) -> Iterator[str]:
    """A text file, cut as `.txt` sources are."""
    return (part.decode("utf-8", "replace") for part in documents_of(path.read_bytes().split(b"\n")))


def marked_up(path: Path) -> Iterator[str]:
    """One document: an XML file of paragraphs and headings without its tags."""
    text = re.sub(r"</(?:p|head|item|caption)>", "\n\n", path.read_text("utf-8", "replace"))
    text = html.unescape(re.sub(r"<[^>]+>", "", text))
    yield "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip())


def latex(path: Path) -> Iterator[str]:
    """The sections of a LaTeX file, without comments, labels, index marks and figures."""
    text = re.sub(r"(?<!\\)%.*", "", path.read_text("utf-8", "replace"))
    text = re.sub(r"\\begin\{(figure|tikzpicture|center|asy)\*?\}.*?\\end\{\1\*?\}", "", text, flags=re.DOTALL)
    text = re.sub(r"\\(?:label|index|sindex|myindex)\{[^{}]*\}", "", text)
    for part in re.split(r"(?=\\section\{)", text):
        yield re.sub(r"\n\s*\n+", "\n\n", part).strip()


def wiki_page(path: Path) -> Iterator[str]:
    """One page of Markdown without its menus, links and reference list."""
    text = re.split(r"\n##+ *References", path.read_text("utf-8", "replace"))[0]
    text = re.sub(r"\[\[!.*?\]\]", "", text, flags=re.DOTALL)
    text = re.sub(r"\[\[(?:[^\]|]*\|)?([^\]]*)\]\]", r"\1", text)
    yield re.sub(r"\n\s*\n+", "\n\n", text).strip()


@dataclass(frozen=True)
class Origin:
    """Files of one repository at one commit, and how they are read."""

    repository: str
    commit: str
    files: tuple[str, ...]
    read: Reader
    source: str
    most: int | None = None
    """Documents taken, drawn by a fixed seed; none means all."""


FACTORY = ("hiyouga/LLaMA-Factory", "ff6d4d12eeb0")
ABSTRACTS = json_rows("title", "summary")
CUT_IN_TWO = json_rows("prefix", "gold_completion", joint="")
ORIGINALS = ("data/20[0-9][0-9]-[0-9][0-9]-[0-9][0-9].jsonl",)
"""The abstracts as they were; files with a longer name hold summaries that a model wrote."""

CORPORA: dict[str, tuple[Origin, ...]] = {
    "web_curated": (
        Origin("gucorpling/amalgum", "a2dbd33e757f", ("out/*/*.xml",), marked_up, "amalgum"),
        Origin(*FACTORY, ("data/wiki_demo.txt",), plain, "wikipedia"),
    ),
    "web_crawl": (
        Origin("XuandongZhao/pf-decoding", "dbcef09aa9dc", ("data/c4.jsonl",), CUT_IN_TWO, "c4"),
        Origin(*FACTORY, ("data/c4_demo.jsonl",), json_rows("text"), "c4"),
        Origin("mlfoundations/dclm", "361714bdd60b", ("data/*_data.jsonl",), json_rows("text"), "crawl"),
        Origin("THU-BPM/MarkLLM", "112fa7419b11", ("dataset/cnn_dailymail/*.jsonl",), json_rows("article"), "news"),
        Origin("sdrshn-nmbr/gpt-2.x", "5c89630697f1", ("**/fineweb_sample.txt",), plain, "fineweb_edu"),
        Origin("allenai/dolma", "669f534823b0", ("tests/data/multiple_files/*.jsonl.gz",), json_rows("text"), "dolma"),
    ),
    "arxiv": (
        Origin("dw-dengwei/daily-arXiv-ai-enhanced", "b4c542b7d61b", ORIGINALS, ABSTRACTS, "arxiv", 3_600),
        Origin("Straw674/daily-arXiv-astro-ph", "fbcd8074604d", ORIGINALS, ABSTRACTS, "arxiv", 2_400),
        Origin("peiyade/daily-arXiv-ai-enhanced", "94f191ed3a45", ORIGINALS, ABSTRACTS, "arxiv", 2_100),
    ),
    "math": (
        Origin("ncatlab/nlab-content", "8fdb981e6afc", ("pages/**/content.md",), wiki_page, "nlab", 820),
        Origin("vEnhance/napkin", "3b108731587d", ("tex/**/*.tex",), latex, "napkin", 605),
        Origin("stacks/stacks-project", "4ac4815d5a00", ("*.tex",), latex, "stacks_project", 400),
        Origin("jirilebl/ra", "e21ec524ca7d", ("ch-*.tex",), latex, "basic_analysis"),
        Origin("jirilebl/diffyqs", "afd4bb788c72", ("ch-*.tex",), latex, "diffyqs"),
        Origin("OpenIntroStat/openintro-statistics", "fee25091fb24", ("ch_*/TeX/*.tex",), latex, "openintro"),
    ),
}
SHARES = {"web_curated": 68, "web_crawl": 17, "arxiv": 10, "math": 5}


def checked_out(origin: Origin, clones: Path) -> Path:
    """The repository's files at the commit: cloned if they are not there; a clone that stands elsewhere is moved."""
    folder = clones / origin.repository.replace("/", "+")
    if not folder.is_dir():
        address = f"https://github.com/{origin.repository}"
        _git("clone", "--quiet", "--filter=blob:none", "--no-checkout", address, str(folder))
    if (folder / ".git").exists():
        _git("-C", str(folder), "checkout", "--quiet", origin.commit)
    return folder


def _git(*words: str) -> None:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"git {' '.join(words)}: {' '.join(done.stderr.split())[-300:]}")


def documents(origin: Origin, folder: Path) -> list[str]:
    """The documents of one origin that are long enough, those asked for drawn by a fixed seed."""
    paths = sorted({path for pattern in origin.files for path in folder.glob(pattern) if path.is_file()})
    if not paths:
        raise RunFailed(f"{origin.repository} @ {origin.commit}: no file {', '.join(origin.files)}; has it moved?")
    found = [text for path in paths for text in origin.read(path) if len(text) >= FEWEST]
    if origin.most is not None and len(found) > origin.most:
        found = random.Random(0).sample(found, origin.most)
    return found


def build(name: str, clones: Path, out: Path) -> Path:
    """Write one corpus: all its documents once, in an order of a fixed seed; returns the file."""
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    for origin in CORPORA[name]:
        kept = 0
        for text in documents(origin, checked_out(origin, clones)):
            beginning = re.sub(r"\W", "", text)[:200].lower()
            if beginning not in seen:
                seen.add(beginning)
                rows.append({"id": f"{origin.source}-{len(rows)}", "text": text, "source": origin.source})
                kept += 1
        print(f"  {name}: {kept:,} documents of {origin.repository} @ {origin.commit}", file=sys.stderr)
    random.Random(1).shuffle(rows)
    target = out / f"{name}.jsonl.gz"
    with target.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
        for row in rows:
            packed.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return target


def sources_toml(files: dict[str, Path]) -> str:
    """The layer that takes these files in place of the study's."""
    parts = []
    for name, path in files.items():
        lines = (f'name = "{name.replace("_", "-")}"', f'path = "{path}"', f'sha256 = "{sha256(path)}"')
        parts.append("\n".join(("[[text.sources]]", *lines, f"share = {SHARES[name]}", "")))
    return "\n".join(parts)


def main() -> int:
    """Build all corpora, or those named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*CORPORA, []], help="which (all)")
    parser.add_argument("--out", type=Path, default=Path("corpora"))
    parser.add_argument("--clones", type=Path, default=Path("clones"), help="folder of the repositories")
    asked = parser.parse_args()
    for folder in (asked.out, asked.clones):
        folder.mkdir(parents=True, exist_ok=True)
    files = {name: build(name, asked.clones, asked.out) for name in asked.names or CORPORA}
    if len(files) == len(CORPORA):
        (asked.out / "sources.toml").write_text(sources_toml(files), "utf-8")
    print("\n".join(str(path) for path in files.values()))
    return 0


if __name__ == "__main__":
    script(main)
