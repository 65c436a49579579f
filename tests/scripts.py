"""The scripts of benchmarks/ and studies/ as modules, for the tests of what they compute."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


@cache
def script(path: str) -> ModuleType:
    """The script at `path` from the root, loaded once; its folder comes first on the path, as when it is run."""
    file = ROOT / path
    name = f"{file.parent.name}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module
