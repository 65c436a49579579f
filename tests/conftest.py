"""What holds for every test: no network, one thread, and property tests that draw the same examples every time."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("TFIVE_TRACEBACK", None)

from hypothesis import HealthCheck, settings

settings.register_profile(
    "tfive", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tfive")

# A shell that starts jobs in the background lets them ignore Ctrl-C; tests of stopping need it as a person has it.
signal.signal(signal.SIGINT, signal.default_int_handler)
