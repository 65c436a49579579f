"""The page's looks: no serious accessibility violation, and pictures at both widths that match the stored ones."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import browser as browsers
import numpy as np
import page_samples as samples
import pytest
from browser import Opened
from PIL import Image

from tfive.report.assembly import page_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(browsers.missing_reason() is not None, reason=str(browsers.missing_reason()))

STORED = Path(__file__).parent / "pictures"
REDUCTION = 5
"""A stored picture is this much smaller: it shows layout and colours, and is a few kilobytes."""
TOLERANCE = 2.0
"""Mean difference, in grey levels of 255, that another version of the browser may make."""
WIDTHS = {"sans": 355, "serif": 359}
"""Pixels that PROBE takes in the fonts of the stored pictures; where they differ, so does every line break."""
PROBE = "the fonts of the stored pictures 0123456789"
VIEWS = [(1400, "light", "#story"), (390, "dark", "#story"), (1400, "dark", "#thoughts"), (390, "light", "#thoughts")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsers.launched() as found:
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("looks") / "run.html"
    path.write_text(page_html(samples.run_page()), "utf-8")
    return path


def reduced(png: bytes) -> Image.Image:
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    return picture.reduce(REDUCTION)


def difference(first: Image.Image, second: Image.Image) -> float:
    """Mean absolute difference of two pictures of one size, after a blur that forgives a shifted line."""
    assert first.size == second.size
    blurred = [np.asarray(one.reduce(4), dtype=np.float64) for one in (first, second)]
    return float(np.abs(blurred[0] - blurred[1]).mean())


def widths(page: Page) -> dict[str, float]:
    """How wide the page's two fonts set PROBE."""
    measure = """text => Object.fromEntries(["sans", "serif"].map((name) => {
        const line = document.body.appendChild(document.createElement("span"));
        line.textContent = text;
        line.style.font = `16px var(--${name})`;
        line.style.position = "absolute";
        const wide = Math.round(line.getBoundingClientRect().width);
        line.remove();
        return [name, wide];
    }))"""
    return dict(page.evaluate(measure, PROBE))


def taken(browser: Browser, path: Path, width: int, theme: str, where: str) -> Image.Image:
    opened = Opened(browser, width=width, theme=theme)
    page = opened.open(path)
    if (found := widths(page)) != WIDTHS:
        opened.close()
        pytest.skip(f"the stored pictures were taken with other fonts: {found} pixels instead of {WIDTHS}")
    page.locator(where).evaluate("one => one.scrollIntoView()")
    picture = reduced(page.screenshot(animations="disabled"))
    opened.close()
    return picture


@pytest.mark.parametrize(("width", "theme", "where"), VIEWS)
def test_pictures_match_the_stored_ones(browser: Browser, file: Path, width: int, theme: str, where: str) -> None:
    stored = Image.open(STORED / f"{where[1:]}-{width}-{theme}.png").convert("RGB")
    assert difference(taken(browser, file, width, theme, where), stored) < TOLERANCE


def test_the_comparison_of_pictures_can_fail(browser: Browser, tmp_path: Path) -> None:
    """A page without its numbers, or in the wrong colours, is told apart from the stored picture."""
    path = tmp_path / "bare.html"
    path.write_text(page_html(samples.bare_page(title="t5 on nano, seed 0")), "utf-8")
    stored = Image.open(STORED / "story-1400-light.png").convert("RGB")
    assert difference(taken(browser, path, 1400, "light", "#story"), stored) > TOLERANCE
    assert difference(taken(browser, path, 1400, "dark", "#story"), stored) > TOLERANCE


@pytest.mark.skipif(
    importlib.util.find_spec("axe_playwright_python") is None, reason="axe is not installed: make test-page installs it"
)
@pytest.mark.parametrize(
    ("name", "theme", "width"),
    [("run", "light", 1400), ("run", "dark", 390), ("study", "light", 390), ("evaluation", "dark", 1400)],
)
def test_axe_finds_no_serious_violation(browser: Browser, tmp_path: Path, name: str, theme: str, width: int) -> None:
    import axe_playwright_python

    data = {"run": samples.run_page, "study": samples.study_page, "evaluation": samples.evaluation_page}[name]()
    path = tmp_path / "page.html"
    path.write_text(page_html(data), "utf-8")
    opened = Opened(browser, theme=theme, width=width)
    page = opened.open(path)
    page.evaluate("openAll()")
    page.evaluate((Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert {"color-contrast", "aria-required-children", "label"} & {one["id"] for one in found["passes"]}
    serious = [
        (one["id"], [node["target"] for node in one["nodes"]][:3])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert serious == []
    opened.close()
