"""The modules of the SmolLM2 study can be imported, as when its script is run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "studies" / "smollm2"))
