"""What `tfive theory` does: check the paper's claims on finite worlds and report by what margin each one holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from tfive.training.recorder import Recorder
from tfive_lab.theory.run import Row, run


def theory(
    labels: Sequence[str] | None, worlds: int, seed: int, *, as_json: bool = False, quiet: bool = False
) -> tuple[str, bool]:
    """Runs the chosen statements (all for None); returns what to print and whether every one held."""
    with Recorder(None, quiet=quiet or as_json) as recorder:
        rows = run(labels or None, worlds, seed, recorder)
    passed = all(row.passed for row in rows)
    return json.dumps([asdict(row) for row in rows], indent=1) if as_json else _table(rows), passed


def _table(rows: list[Row]) -> str:
    """Label, claim, worlds, smallest margin and verdict, one line a statement, and a last line that counts."""
    wide = max(len(row.label) for row in rows)
    say = max(len(row.says) for row in rows)
    head = f"{'statement':<{wide}}  {'says':<{say}}  {'worlds':>6}  {'margin':>9}  verdict"
    lines = [
        f"{row.label:<{wide}}  {row.says:<{say}}  {row.worlds or 'named':>6}  {row.margin:9.1e}  "
        + ("holds" if row.passed else f"FAILS at {row.tightest}")
        for row in rows
    ]
    held = sum(row.passed for row in rows)
    return "\n".join([head, *lines, f"{held} of {len(rows)} statements hold"])
