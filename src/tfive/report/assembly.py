"""One HTML file of a page's data and the files of `report/page`: no request, a strict content security policy.

Scripts and styles stand inside the file and are named in the policy by their hashes, so that nothing else can run. The
data is gzip and base64: no text of a run can be anything but text.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

TEMPLATE, PLAY = "page.html", "play.html"
MARK = re.compile(r"<!--tfive:(\w+)(?: ([\w.-]+))?-->")
UNSAFE = re.compile(r"</script|</style|<!--", re.IGNORECASE)
"""What would end or change the element that a file is put into."""

LIVE = {"every": 2}
"""What a served page is told: seconds between two questions whether there is something new."""


def packed(data: dict[str, Any]) -> bytes:
    """The data as gzip of JSON; the same data gives the same bytes."""
    content = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate, which a damaged text may hold, has no UTF-8 form.
    return gzip.compress(content.encode("utf-8", "replace"), 6, mtime=0)


def page_html(data: dict[str, Any], *, live: bool = False) -> str:
    """The page as one file. `live`: it is served, and may ask its server for newer data, and nobody else."""
    shown = data | {"live": LIVE if live else None}
    content = {
        "csp": f'<meta http-equiv="Content-Security-Policy" content="{policy(live=live)}">',
        "title": html.escape(str(data["title"])),
        "data": f'<script type="text/plain" id="tfive-data">{base64.b64encode(packed(shown)).decode()}</script>',
        "plain": f"<noscript>{plain(data)}</noscript>",
    }
    return _filled(TEMPLATE, content)


def play_html(model: dict[str, Any]) -> str:
    """The page of `tfive play`, told what model it is about; it asks its server for everything else."""
    described = json.dumps(model, ensure_ascii=True, allow_nan=False).encode()
    return _filled(
        PLAY,
        {
            "csp": f'<meta http-equiv="Content-Security-Policy" content="{policy(live=True, template=PLAY)}">',
            "data": f'<script type="text/plain" id="tfive-data">{base64.b64encode(described).decode()}</script>',
        },
    )


def _filled(template: str, content: dict[str, str]) -> str:
    """A template with its files and what data replaces."""
    return MARK.sub(lambda mark: _element(mark) or content[mark[1]], _asset(template))


def policy(*, live: bool = False, template: str = TEMPLATE) -> str:
    """The content security policy: the page's own scripts and styles by their hashes, and nothing else."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}
    for mark in MARK.finditer(_asset(template)):
        if mark[1] in hashes:
            digest = hashlib.sha256(_asset(mark[2]).encode()).digest()
            hashes[mark[1]].append(f"'sha256-{base64.b64encode(digest).decode()}'")
    parts = ["default-src 'none'", *(f"{kind}-src {' '.join(found)}" for kind, found in hashes.items())]
    parts += ["img-src data:", "base-uri 'none'", "form-action 'none'", *(["connect-src 'self'"] if live else [])]
    return "; ".join(parts)


def _element(mark: re.Match[str]) -> str | None:
    """A style or script with its file inside; None for the marks that data replaces."""
    return f"<{mark[1]}>{_asset(mark[2])}</{mark[1]}>" if mark[1] in ("style", "script") else None


@cache
def _asset(name: str) -> str:
    """A file of the page; one that would break out of its element is refused."""
    text = (files("tfive.report") / "page" / name).read_text("utf-8")
    if name not in (TEMPLATE, PLAY) and (found := UNSAFE.search(text)):
        raise ValueError(f"report/page/{name} holds {found[0]!r}, which would end the element around it")
    return text


def plain(data: dict[str, Any]) -> str:
    """The story without scripts: title, verdict and the sentences of its numbers."""
    story = data["story"]
    lines = [story["verdict"]["headline"], story["verdict"]["sentence"]]
    lines += [f"{one['title']} {one['sentence']}" for one in story["numbers"]]
    paragraphs = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return f"<h1>{html.escape(str(data['title']))}</h1>{paragraphs}<p>The rest of this page needs JavaScript.</p>"
