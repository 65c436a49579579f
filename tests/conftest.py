"""What holds for every test: no network, one thread, and property tests that draw the same examples every time."""

from __future__ import annotations

import gc
import os
import signal
from functools import cache
from pathlib import Path

import pytest
import typer.main

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("TFIVE_TRACEBACK", None)

from hypothesis import HealthCheck, settings

from forked import share_servers

settings.register_profile(
    "tfive", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tfive")

# Typer builds every command anew for each call, which takes ten times as long as most of what is called here.
typer.main.get_command = cache(typer.main.get_command)

# Background jobs may ignore Ctrl-C, and nohup a closing terminal; tests of stopping need both as a person has them.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

LONGEST = (
    "distributed/test_same_run.py",
    "distributed/test_hung_evaluations.py",
    "distributed/test_nodes.py",
    "distributed/test_launch.py",
    "distributed/test_faults.py",
    "distributed/test_checkpoints.py",
    "distributed/test_shards.py",
    "distributed/test_communication.py",
    "distributed/test_whole_run.py",
    "methods/test_outside_method.py",
    "training/test_resume.py",
)
"""Files that take long, begun before the others, so that none keeps one worker busy in the end; those that mostly wait
beside the one that never does, because processes that exchange much suffer from others on their cores."""


def pytest_configure() -> None:
    """Workers ask the same servers for processes."""
    share_servers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole files, in the order of `LONGEST`; xdist hands them out as they come (`--no-loadscope-reorder`)."""
    here = Path(__file__).parent
    place = {here / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: collections of garbage, some of which the code asks for, pass them over."""
    gc.collect()
    gc.freeze()
