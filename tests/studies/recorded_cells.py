"""Cells of the SmolLM2 study as their folders would look, made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recorded import run


def cell(runs: Path, study: str, label: str, seed: int, level: float = 0.1, **more: Any) -> Path:
    """A cell as its folder would look."""
    folder = runs / study / f"{label}-seed{seed}"
    if "failure" in more:
        folder.mkdir(parents=True)
    else:
        run(folder, label.partition("+")[0], seed, level, seconds=more.pop("window_seconds", 10.0))
    result = {"label": label, "seed": seed, "study": study, "disturbed": True, "seconds": 60.0, **more}
    (folder / "cell.json").write_text(json.dumps(result), "utf-8")
    return folder
