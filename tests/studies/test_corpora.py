"""The study's corpora from clones: every reader on a made-up file of its kind, every document once, the same bytes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import ModuleType

import pytest

from scripts import script as load
from tfive.config.config import resolve
from tfive.errors import RunFailed

LONG = "A sentence of the made-up document that is long enough to be kept by the script. " * 4


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("studies/smollm2/corpora.py")


def clone(clones: Path, repository: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = clones / repository.replace("/", "+") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, "utf-8")


def made_up(clones: Path) -> None:
    def rows(*rows: dict[str, str]) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    xml = f"<text id='x'><head>Title</head>\n<p>First &amp; {LONG}</p>\n\n<p>Last.</p></text>"
    clone(clones, "gucorpling/amalgum", {"out/news/a.xml": xml})
    clone(clones, "hiyouga/LLaMA-Factory", {
        "data/wiki_demo.txt": f"Wiki {LONG}", "data/c4_demo.jsonl": rows({"text": f"Demo {LONG}"}),
    })  # fmt: skip
    clone(clones, "XuandongZhao/pf-decoding", {
        "data/c4.jsonl": rows({"prefix": f"Cut in the mid {LONG}bro", "gold_completion": "ken word"})
    })  # fmt: skip
    pages = rows({"text": f"Page {LONG}"}, {"text": "short"})
    clone(clones, "mlfoundations/dclm", {"data/agreement_data.jsonl": pages})
    clone(clones, "THU-BPM/MarkLLM", {"dataset/cnn_dailymail/test.jsonl": rows({"article": f"News {LONG}"})})
    clone(clones, "sdrshn-nmbr/gpt-2.x", {"fineweb_sample.txt": f"Fine {LONG}"})
    clone(clones, "allenai/dolma", {"tests/data/multiple_files/a.jsonl.gz": rows({"text": f"Demo {LONG}"})})
    for repository in ("dw-dengwei/daily-arXiv-ai-enhanced", "Straw674/daily-arXiv-astro-ph"):
        clone(clones, repository, {
            "data/2025-06-06.jsonl": rows({"title": f"On {repository}", "summary": LONG}),
            "data/2025-06-06_AI_enhanced_Chinese.jsonl": rows({"title": "written by a model", "summary": LONG}),
        })  # fmt: skip
    clone(clones, "peiyade/daily-arXiv-ai-enhanced", {"data/2025-06-06.jsonl": rows({"title": "On", "summary": LONG})})
    figure = "\\begin{figure}gone\\end{figure}"
    tex = f"Before % a comment\n\\section{{One}}\n{LONG}\\label{{x}}\n{figure}\n\\section{{Two}} short"
    page = f"[[!menu]]\nSee [[topos|a topos]]. {LONG}\n## References\n* B"
    clone(clones, "ncatlab/nlab-content", {"pages/1/content.md": page})
    for repository, name in (
        ("vEnhance/napkin", "tex/a/b.tex"), ("stacks/stacks-project", "sets.tex"), ("jirilebl/ra", "ch-one.tex"),
        ("jirilebl/diffyqs", "ch-one.tex"), ("OpenIntroStat/openintro-statistics", "ch_one/TeX/one.tex"),
    ):  # fmt: skip
        clone(clones, repository, {name: tex.replace("One", repository)})


def test_corpora_are_built_and_take_the_place_of_the_study_s(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made_up(tmp_path / "clones")
    monkeypatch.setattr("sys.argv", ["corpora.py"])
    assert script.main() == 0
    texts: dict[str, list[str]] = {}
    for name in script.CORPORA:
        with gzip.open(tmp_path / "corpora" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            texts[name] = sorted(json.loads(line)["text"] for line in file)
    assert [len(found) for found in texts.values()] == [2, 5, 3, 6]
    assert texts["web_curated"][0].startswith("Title\n\nFirst & A sentence")
    assert texts["web_curated"][0].endswith("Last.")
    assert texts["web_crawl"][0].endswith("broken word")
    assert all("written by a model" not in text for text in texts["arxiv"])
    assert texts["math"][0].startswith("See a topos.")
    gone = ("comment", "label", "gone", "menu", "References")
    assert not any(mark in text for text in texts["math"] for mark in gone)
    config = resolve(["smollm2-135m-study", tmp_path / "corpora" / "sources.toml"]).config
    assert [(source.name, source.share) for source in config.text.sources] == [
        ("web-curated", 68), ("web-crawl", 17), ("arxiv", 10), ("math", 5),
    ]  # fmt: skip
    first = {path.name: path.read_bytes() for path in (tmp_path / "corpora").iterdir()}
    script.main()
    assert {path.name: path.read_bytes() for path in (tmp_path / "corpora").iterdir()} == first
    assert "math: 1 documents of jirilebl/ra @ e21ec524ca7d" in capsys.readouterr().err


def test_a_repository_without_the_files_is_named(script: ModuleType, tmp_path: Path) -> None:
    clone(tmp_path, "gucorpling/amalgum", {"README.md": "moved"})
    with pytest.raises(RunFailed, match=r"gucorpling/amalgum @ a2dbd33e757f: no file out/\*/\*\.xml; has it moved\?"):
        script.build("web_curated", tmp_path, tmp_path)
