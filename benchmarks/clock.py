"""Seconds of whole windows on a real model, side by side: `python benchmarks/clock.py PRESET --run rlp --run t5`.

All runs in one process, from the same weights and texts, in turns; each later one is compared with the first named. A
run is `METHOD+KEY=VALUE+…`. The file is written after every run, so that what is cut short leaves what it measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tfive.cli.options import script
from tfive_lab.bench.clock import clock, render


def main(given: list[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sources", nargs="+", metavar="PRESET|FILE", help="as for tfive train")
    parser.add_argument("--run", action="append", default=[], metavar="METHOD[+KEY=VALUE…]", dest="labels")
    parser.add_argument("--windows", type=int, default=8, help="of each run; the first two are start-up")
    parser.add_argument("--rounds", type=int, default=2, help="how often all runs are made, in turns")
    parser.add_argument("--profile", action="store_true", help="two windows more of each run: device time, kernels")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    asked = parser.parse_args(given)

    def save(report: dict[str, Any]) -> None:
        if asked.out is not None:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    report = clock(
        asked.sources,
        asked.labels or ["rlp", "t5"],
        windows=asked.windows,
        rounds=asked.rounds,
        overrides=asked.overrides,
        profile=asked.profile,
        keep=save,
    )
    print(render(report))
    return 0


if __name__ == "__main__":
    script(main)
