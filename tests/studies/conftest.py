"""The modules of the studies can be imported by their names, as when a script beside them is run; and what tests of
thoughts before answers begin with."""

from __future__ import annotations

import sys
from pathlib import Path

from answer_sheets import place as place
from answer_sheets import render as render

for study in ("answers", "smollm2"):
    sys.path.append(str(Path(__file__).resolve().parents[2] / "studies" / study))
