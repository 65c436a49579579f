"""The page's files and data as one HTML text."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any

import tfive.report

FOLDER = Path(tfive.report.__file__).parent / "page"


def page_html(data: dict[str, Any], *, live: bool = False) -> str:
    """One document with every style and script inside it and a policy that admits these alone."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inlined(found: re.Match[str]) -> str:
        text = (FOLDER / found[2]).read_text("utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[found[1]].append(f"'sha256-{digest}'")
        return f"<{found[1]}>{text}</{found[1]}>"

    page = re.sub(r"<!--tfive:(style|script) (\S+)-->", inlined, (FOLDER / "page.html").read_text("utf-8"))
    rules = [
        "default-src 'none'", f"script-src {' '.join(hashes['script'])}", f"style-src {' '.join(hashes['style'])}",
        "img-src data:", "base-uri 'none'", "form-action 'none'", *(["connect-src 'self'"] if live else []),
    ]  # fmt: skip
    packed = base64.b64encode(gzip.compress(json.dumps(data, ensure_ascii=False).encode(), 6)).decode()
    parts = {
        "csp": f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">',
        "title": html.escape(data["title"]),
        "plain": "<noscript></noscript>",
        "data": f'<script type="text/plain" id="tfive-data">{packed}</script>',
    }
    for name, text in parts.items():
        page = page.replace(f"<!--tfive:{name}-->", text, 1)
    return page
