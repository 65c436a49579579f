"""Optional packages: how to install what an extra brings, from a clone, a wheel or a registry alike."""

from __future__ import annotations

import importlib.metadata
import re
import shlex


def install_hint(extra: str) -> str:
    """The command that installs an extra's packages by their own names: it needs no published tfive.

    `importlib.metadata` knows the requirements of the installed distribution; where tfive only lies on the path, the
    extra itself is named.
    """
    try:
        declared = importlib.metadata.requires("tfive") or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    marked = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    wanted = [line.split(";")[0].strip() for line in declared if marked.search(line)]
    return "pip install " + " ".join(shlex.quote(name) for name in wanted or [f"tfive[{extra}]"])
