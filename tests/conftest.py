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

# Background jobs may ignore Ctrl-C, and nohup a closing terminal; tests of stopping need both as a person has them.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
