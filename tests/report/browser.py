"""A real browser for the page's tests, or why there is none; a page that keeps its errors and requests."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing_reason() -> str | None:
    """Why the browser tests cannot run here, or None."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: make test-page installs it"
    return None


@contextmanager
def launched() -> Iterator[Browser]:
    """The system's Chromium, else the one that playwright installed; skips the test where there is neither."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        system = next((found for name in NAMES if (found := shutil.which(name))), None)
        if system is None and not Path(tools.chromium.executable_path).exists():
            pytest.skip("Chromium is not installed: make test-page installs it")
        browser = tools.chromium.launch(executable_path=system, args=["--no-sandbox", "--font-render-hinting=none"])
        yield browser
        browser.close()


class Opened:
    """A page that was opened from a file, with everything that went wrong on it."""

    def __init__(self, browser: Browser, *, width: int = 1400, height: int = 900, theme: str = "light") -> None:
        options: dict[str, Any] = {"viewport": {"width": width, "height": height}, "color_scheme": theme}
        self.context = browser.new_context(**options, reduced_motion="reduce", locale="en-GB")
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, path: Path, fragment: str = "") -> Page:
        """Opens a file and waits until the page has drawn itself."""
        self.page.goto(path.as_uri() + fragment)
        self.page.wait_for_selector("html[data-ready]", timeout=20_000)
        return self.page

    def close(self) -> None:
        """Closes the page; nothing may have gone wrong, and nothing but the file itself may have been asked for."""
        self.context.close()
        asked = [url for url in self.requests if not url.startswith("file:")]
        assert self.errors == []
        assert asked == []
