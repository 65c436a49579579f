"""One HTML file: its own scripts and styles alone may run, and whatever a run wrote stays text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import kept_thoughts
import pytest

from recorded import run
from tfive.report import assembly
from tfive.report.assembly import packed, page_html
from tfive.report.page_data import run_page

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\N{SNOWMAN}<!--"


class Elements(HTMLParser):
    """Every element of a page with what it holds."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attrs, text = self.found[-1]
            self.found[-1] = (tag, attrs, text + data)

    def handle_endtag(self, tag: str) -> None:
        self.found.append((f"/{tag}", {}, ""))

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attrs, text) for name, attrs, text in self.found if name == tag]


@pytest.fixture
def page(tmp_path: Path) -> dict[str, Any]:
    folder = kept_thoughts.keep(run(tmp_path / "r", "t5", 0, 0.2, model=HOSTILE))
    line = {"step": 1, "seconds": 1.0, "event": HOSTILE, "detail": HOSTILE}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n", "utf-8")
    return run_page(folder)


def data_of(elements: Elements) -> Any:
    (text,) = [text for attrs, text in elements.of("script") if attrs.get("id") == "tfive-data"]
    return json.loads(gzip.decompress(base64.b64decode(text)))


def test_the_policy_names_exactly_what_stands_in_the_page(page: dict[str, Any]) -> None:
    elements = Elements(page_html(page))
    (policy,) = [a["content"] for a, _ in elements.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "connect-src" not in rules
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        inside = [text for attrs, text in elements.of(tag) if "type" not in attrs]
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside]
        assert rules[f"{tag}-src"].split() == [f"'sha256-{one}'" for one in hashes]
        assert inside
    assert "connect-src 'self'" in page_html(page, live=True)


def test_text_stays_text(page: dict[str, Any]) -> None:
    html = page_html(page)
    elements = Elements(html)
    assert elements.of("img") == []
    assert HOSTILE not in html
    back = data_of(elements)
    assert back["events"]["detail"] == [HOSTILE]
    assert back["title"] == f"t5 on {HOSTILE}, seed 0"
    assert kept_thoughts.WORDS[3] in back["explorers"][0]["pieces"]
    assert (back["live"], data_of(Elements(page_html(page, live=True)))["live"]) == (None, assembly.LIVE)
    (plain,) = [text for _, text in elements.of("h1")]
    assert "<img src=x" in plain


def test_nothing_is_asked_of_anybody(page: dict[str, Any]) -> None:
    elements = Elements(page_html(page))
    for _, attrs, _ in elements.found:
        assert not {"src", "srcset", "action"} & set(attrs)
        assert attrs.get("href", "#").startswith("#")  # type: ignore[union-attr]
        assert not [name for name in attrs if name.startswith("on") or name == "style"]


def test_the_same_data_gives_the_same_file(page: dict[str, Any]) -> None:
    assert page_html(page) == page_html(json.loads(json.dumps(page)))
    assert b"?" in gzip.decompress(packed({"broken": "\ud800"}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        packed({"number": float("nan")})


def test_a_file_that_breaks_out_of_its_element_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "page.html").write_text("<!--tfive:script bad.js-->", "utf-8")
    (folder / "bad.js").write_text("'</SCRIPT >'", "utf-8")
    monkeypatch.setattr(assembly, "files", lambda _: tmp_path)
    assembly._asset.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"bad\.js holds"):
            assembly.policy()
    finally:
        assembly._asset.cache_clear()


def test_every_asset_is_in_the_package_and_in_the_page() -> None:
    folder = Path(assembly.__file__).parent / "page"
    templates = "".join(path.read_text("utf-8") for path in folder.glob("*.html"))
    named = set(re.findall(r"<!--tfive:(?:style|script) ([\w.-]+)-->", templates))
    assert named == {path.name for path in folder.iterdir() if path.suffix in (".js", ".css")}
    template = (folder / "page.html").read_text("utf-8")
    for mark in ("csp", "title", "data", "plain"):
        assert template.count(f"<!--tfive:{mark}-->") == 1
