"""How soon a page of many thoughts is ready in a browser, and how long its slowest answers take.

    python benchmarks/page_ready.py --items 20000

needs playwright and Chromium (make test-page installs both). Writes a page of made-up thoughts, opens it several times
in a fresh browser context, and prints one JSON document: bytes, milliseconds from navigation until everything in sight
is drawn (median and worst), and the milliseconds of a filter, a first and a later search, a step of the slider and the
longest frame while the list is scrolled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tfive.report.assembly import page_html

ACTIONS = {
    "filter": "page.explorer.set({filter: 'harm'})",
    "first search": "page.explorer.set({filter: 'content', search: 'box'})",
    "later search": "page.explorer.set({search: 'boxes'})",
    "slider": "page.explorer.set({search: '', snapshot: 0})",
    "next thought": "page.explorer.list.pick(1)",
}
SCROLL = """async () => {
    let longest = 0, before = performance.now();
    for (let step = 0; step < 60; step++) {
        page.explorer.list.box.scrollTop += 2500;
        await new Promise(requestAnimationFrame);
        longest = Math.max(longest, performance.now() - before);
        before = performance.now();
    }
    return longest;
}"""


def measured(path: Path, repeats: int) -> dict[str, Any]:
    """Milliseconds of opening the page and of what a reader does on it."""
    from browser import Opened, launched

    ready = []
    with launched() as browser:
        for _ in range(repeats):
            opened = Opened(browser)
            page = opened.open(path)
            ready.append(page.evaluate("performance.getEntriesByName('ready')[0].startTime"))
            actions = {
                name: page.evaluate(
                    f"(() => {{ const start = performance.now(); {code}; return performance.now() - start; }})()"
                )
                for name, code in ACTIONS.items()
            }
            actions["longest frame of scrolling"] = page.evaluate(SCROLL)
            opened.close()
    return {"ready_ms": round(statistics.median(ready)), "ready_worst_ms": round(max(ready)), "repeats": repeats} | {
        f"{name}, ms": round(value, 1) for name, value in actions.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--detailed", type=int, default=2_000, help="items with token-level numbers")
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    # The made-up thoughts are those of the page's tests.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "report"))
    from page_samples import run_page
    from thought_samples import explorer

    data = run_page(explorers=[explorer(chosen.items, 3, chosen.detailed)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        start = time.perf_counter()
        path.write_text(page_html(data), "utf-8")
        written = time.perf_counter() - start
        result = {"items": chosen.items, "detailed": chosen.detailed, "bytes": path.stat().st_size}
        print(json.dumps(result | {"assembly_s": round(written, 2)} | measured(path, chosen.repeats), indent=1))


if __name__ == "__main__":
    main()
