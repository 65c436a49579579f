"""Write `hashes.txt`: every pin of `constraints.txt` but torch's, with the sha256 of the file that pip takes for it.

    pip install --dry-run --ignore-installed --no-deps --report report.json -r constraints.txt
    python .ci/hashes.py report.json > hashes.txt

The hashes are those of one platform and version of Python, the one that pip runs on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = """\
# The files of constraints.txt (Linux, x86-64, Python 3.11), by sha256: make HASHED=1 test. Written by .ci/hashes.py.
# torch is not among them: which wheel stands for its version depends on the machine.
"""


def lines(report: dict[str, Any]) -> list[str]:
    """One requirement a line, in the order of their names."""
    found = {}
    for entry in report["install"]:
        name, digest = entry["metadata"]["name"], entry["download_info"]["archive_info"]["hashes"]["sha256"]
        if name.lower() != "torch":
            found[name.lower()] = f"{name}=={entry['metadata']['version']} --hash=sha256:{digest}"
    return [found[name] for name in sorted(found)]


if __name__ == "__main__":
    print(HEAD + "\n".join(lines(json.loads(Path(sys.argv[1]).read_text("utf-8")))))
