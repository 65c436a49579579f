"""Whether a run gives the same numbers again: once undisturbed, once more, and stopped in the middle and resumed.

    python benchmarks/repetition.py nano --set window.windows=2 --set run.deterministic=true --set model.device=cuda

Compared are every development measurement and the final weights, bit for bit. Exit status 1 where they differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch

from tfive.cli.options import script
from tfive.config.config import Config
from tfive.training.checkpoint import CheckpointStore
from tfive.training.loop import Stopped
from tfive.training.run_folder import CHECKPOINTS
from tfive.training.start import resume, train


def outcome(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """What two runs must share: measurements without costs, and a digest of the actor's last weights."""
    measured = [{name: value for name, value in one.items() if name != "cost"} for one in summary["history"]]
    found = CheckpointStore(folder / CHECKPOINTS).newest().checkpoint
    if found is None:
        raise RuntimeError(f"{folder}: a finished run without a checkpoint")
    sha = hashlib.sha256()
    for name, weight in sorted(found.tree["method"]["actor"]["model"].items()):
        sha.update(name.encode())
        sha.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {"history": measured, "weights": sha.hexdigest()}


def stopped_and_resumed(config: Config, folder: Path) -> dict[str, Any]:
    """The summary of a run that is interrupted after its first window and resumed."""

    def interrupt(report: dict[str, Any]) -> None:
        if report["window"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        return train(config, folder, on_window=interrupt, quiet=True)
    except Stopped:
        return resume(folder, quiet=True)


def repetition(config: Config, folder: Path) -> dict[str, Any]:
    """Whether the second and the resumed run equal the first, and where the run computed."""
    first, again = (train(config, folder / name, quiet=True) for name in ("first", "again"))
    resumed = stopped_and_resumed(config, folder / "resumed")
    wanted = outcome(folder / "first", first)
    return {
        "place": first["place"],
        "windows": first["windows"],
        "thought_gain_end": first["dev_thought_gain_end"],
        "again": outcome(folder / "again", again) == wanted,
        "resumed": outcome(folder / "resumed", resumed) == wanted,
    }


def main(given: list[str] | None = None) -> int:
    """Run three times, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sources", nargs="*", default=["nano"], help="preset or TOML files")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    asked = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        found = repetition(Config.load(*asked.sources, overrides=asked.overrides), Path(folder))
    print(json.dumps(found, indent=1))
    return 0 if found["again"] and found["resumed"] else 1


if __name__ == "__main__":
    script(main)
