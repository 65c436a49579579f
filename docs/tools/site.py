"""A hook of the documentation site (mkdocs.yml): makes of the pages, as they read in the repository, pages of a site.

Links that leave docs/ (results, tests, source) have no page on the site: their path is shown instead. The words after
the language of a code block (`sh long`) are for `make docs-check` and are left out.
"""

from __future__ import annotations

import os
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.?/[^)#\s]+)(?:#[^)\s]*)?\)")
_TAGGED_FENCE = re.compile(r"^(`{3,})(\w+) [^`\n]+$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of a page as the site shows it."""
    folder = os.path.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join("docs", folder, link[2]))
        if path.startswith(f"docs{os.sep}"):
            return link[0]
        label = link[1].strip("`")
        return f"`{path}`" if label == path else f"{link[1]} (`{path}`)"

    return _TAGGED_FENCE.sub(r"\1\2", _LINK.sub(shown, markdown))
