"""The page of `tfive play` in a real browser: a text is typed, looked at, thought about elsewhere and again."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import browser as browsers
import pytest
import torch
from browser import Opened
from thought_samples import HOSTILE

import tiny
from tfive.cli.play_server import PlayServer
from tfive.inference.thought_model import ThoughtModel
from tfive.rl.gate import PredictionGate
from tfive.tree.settings import ThoughtSettings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(browsers.missing_reason() is not None, reason=str(browsers.missing_reason()))

TEXT = "7 river mill farm ( boat grain"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsers.launched() as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[PlayServer]:
    torch.manual_seed(0)
    shape = ThoughtSettings(length=4, checkpoints=(2, 4), horizon=3)
    with PlayServer(ThoughtModel(tiny.model(), tiny.tokenizer(), shape, gate=PredictionGate(16))) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture(params=[1400, 390])
def opened(browser: Browser, server: PlayServer, request: pytest.FixtureRequest) -> Iterator[Page]:
    with_page = Opened(browser, width=request.param)
    with_page.page.goto(server.address)
    with_page.page.wait_for_selector("html[data-ready]")
    yield with_page.page
    with_page.context.close()
    # A refused question is a failed request; what the page makes of it is tested.
    assert [said for said in with_page.errors if "status of 400" not in said] == []
    assert all(url.startswith(server.address) for url in with_page.requests)


def rest(page: Page) -> None:
    page.wait_for_selector("html:not([data-busy])")


def test_a_text_is_looked_at(opened: Page) -> None:
    assert "Nobody has trained these thoughts" in opened.inner_text("main")
    opened.fill("#text", TEXT)
    opened.press("#text", "Control+Enter")
    opened.wait_for_selector(".piece")
    pieces = opened.locator(".piece")
    thoughts = opened.locator(".had").all_inner_texts()
    assert thoughts
    assert pieces.nth(pieces.count() - 1).get_attribute("aria-pressed") == "true"
    assert opened.locator(".play-detail meter").count() >= 15
    # Again: other thoughts, the same text and places.
    opened.click("text=Again, differently")
    rest(opened)
    assert opened.locator(".had").count() == len(thoughts)
    assert opened.locator(".had").all_inner_texts() != thoughts
    # Another place, by keyboard: the places are now the reader's own.
    pieces.nth(0).focus()
    opened.keyboard.press("Enter")
    assert pieces.nth(0).get_attribute("aria-pressed") == "true"
    opened.click("text=Think here")
    rest(opened)
    assert opened.locator(".had").count() == len(thoughts) + 1
    assert opened.is_checked("input[value=chosen]")
    assert "It thinks here" in opened.inner_text(".play-detail")
    opened.click("text=Do not think here")
    rest(opened)
    assert opened.locator(".had").count() == len(thoughts)
    # Off and on.
    opened.uncheck("input[type=checkbox]")
    assert opened.locator(".had").count() == 0
    assert opened.locator(".play-detail meter").count() <= 10
    opened.check("input[type=checkbox]")
    opened.click("text=Go on")
    rest(opened)
    assert "⟨" in opened.inner_text(".play-written")
    assert opened.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("opened", [390], indirect=True)
def test_hostile_texts_stay_text_and_errors_are_told(opened: Page, server: PlayServer) -> None:
    for text in HOSTILE:
        opened.fill("#text", text[:30])
        opened.click(".act.first")
        rest(opened)
        assert opened.locator("main img, main script").count() == 0
    opened.fill("#text", "river " * 80)
    opened.click(".act.first")
    rest(opened)
    assert "give less text" in opened.inner_text(".play-problem")


@pytest.mark.skipif(importlib.util.find_spec("axe_playwright_python") is None, reason="axe is not installed")
def test_axe_finds_no_serious_violation(browser: Browser, server: PlayServer) -> None:
    import axe_playwright_python

    for theme in ("light", "dark"):
        page = Opened(browser, theme=theme).page
        page.goto(server.address)
        page.fill("#text", TEXT)
        page.click(".act.first")
        page.wait_for_selector(".had")
        page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text("utf-8"))
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [one["id"] for one in found["violations"] if one["impact"] in ("serious", "critical")]
        assert serious == []
