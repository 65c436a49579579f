"""The modules of the embedded model's recipe can be imported, as when its scripts are run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "recipes" / "nano"))
