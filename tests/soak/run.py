"""Kills, full disks and worse, for hours: `python tests/soak/run.py --kills 1000 --work build/soak`.

Runs of every method on the tiny model are killed with SIGKILL at random moments, saves and prunes included, resumed,
and compared bit for bit with a run that nobody disturbed. Counts are kept in the work folder: the same command goes on
where it stopped, so that a thousand kills can be had in parts. `make soak` runs it; `make test` does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "text"))

from soak.conditions import CONDITIONS
from soak.life import FINE, Death, compare, live
from tfive.config.config import Config
from tfive.methods.registry import methods
from tiny import configure

SETTINGS = (
    "run.seed=2", "window.qualify=1.0", "window.windows=3", "critic.head_lr=3e-2", "critic.lr=1e-3",
    "qualify.patience=9", "run.checkpoint_phases=true", "run.keep=2",
)  # fmt: skip
GROUPS = ("thought.group=2", "anchor.conditioned=0.5")
LIVES = 60
"""Kills of one run before it is let live to its end."""


class Progress:
    """Counts that outlive this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        self.kills = {name: Counter[str](counts) for name, counts in known.get("kills", {}).items()}
        self.runs = Counter[str](known.get("runs", {}))
        self.conditions = {name: Counter[str](counts) for name, counts in known.get("conditions", {}).items()}

    @property
    def total(self) -> int:
        return sum(counts.total() for counts in self.kills.values())

    def save(self) -> None:
        content = {"kills": self.kills, "runs": self.runs, "conditions": self.conditions}
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(content, indent=1), "utf-8")
        os.replace(beside, self.path)

    def show(self) -> None:
        """The tables: kills by method and by where they struck; how often each condition ended how."""
        for name, counts in self.kills.items():
            places = ", ".join(f"{place} {count}" for place, count in sorted(counts.items()))
            print(f"{name:16s} {counts.total():5d} kills, {self.runs[name]:4d} runs the same to the bit ({places})")
        everywhere: Counter[str] = sum(self.kills.values(), Counter())
        print("by place: " + ", ".join(f"{place} {count}" for place, count in sorted(everywhere.items())))
        for name, counts in self.conditions.items():
            print(f"{name:16s} " + ", ".join(f"{outcome} {count}" for outcome, count in sorted(counts.items())))
        print(f"{self.total} kills, {self.runs.total()} runs compared, none differs")


def configured(home: Path, method: str) -> Config:
    """The tiny run of a method; groups are kept small."""
    groups = GROUPS if method in ("quiet-star-grpo", "rlp") else ()
    return configure(home, *SETTINGS, f"method={method}", *groups)


def reference(home: Path, method: str) -> tuple[Config, Path, float]:
    """The run of a method that nobody disturbs, made once, and about how many seconds it takes."""
    config, folder, noted = configured(home, method), home / method / "undisturbed", home / method / "seconds"
    if not noted.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        status, where = live(folder, config)
        assert status == FINE, f"{method}: the undisturbed run ended with status {status} in {where}"
        noted.write_text(str(time.monotonic() - began), "utf-8")
    return config, folder, float(noted.read_text("utf-8"))


def soak(method: str, home: Path, progress: Progress, rng: random.Random, kills: int) -> None:
    """One run of a method, killed again and again until it comes to its end, then compared."""
    config, undisturbed, seconds = reference(home, method)
    folder = home / method / "killed"
    counts = progress.kills.setdefault(method, Counter())
    for life in range(LIVES):
        spare = life == LIVES - 1 or progress.total >= kills
        death = None if spare else Death.drawn(rng, seconds / 2)
        status, where = live(folder, config, death=death)
        if status is None:
            counts[where] += 1
            progress.save()
        elif status == FINE:
            break
        else:
            raise SystemExit(f"{method}: a run that was only killed ended with status {status} in {where}: {folder}")
    compare(undisturbed, folder)
    shutil.rmtree(folder)
    progress.runs[method] += 1
    progress.save()


def main() -> int:
    """Kill until that many kills are counted, then try the conditions; 1 at the first difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="kills in all, those of earlier calls included")
    parser.add_argument("--work", type=Path, default=Path("build/soak"), help="folder of runs and counts")
    parser.add_argument("--rounds", type=int, default=5, help="how often each condition is tried")
    parser.add_argument("--seed", type=int, default=None, help="which moments; another at every call unless given")
    asked = parser.parse_args()
    home = asked.work.absolute()
    home.mkdir(parents=True, exist_ok=True)
    progress = Progress(home / "progress.json")
    rng = random.Random(asked.seed)
    trained = [name for name in methods() if name != "base"]
    while progress.total < asked.kills:
        method = min(trained, key=lambda name: progress.kills.get(name, Counter()).total())
        soak(method, home, progress, rng, asked.kills)
        print(f"{progress.total:5d} of {asked.kills} kills; {method}: the same to the bit", flush=True)
    config, undisturbed, _ = reference(home, "t5")
    for name, tried in CONDITIONS.items():
        counts = progress.conditions.setdefault(name, Counter())
        while counts.total() < asked.rounds:
            counts[tried(home / "conditions", config, undisturbed, rng)] += 1
            progress.save()
            print(f"{name}: {dict(counts)}", flush=True)
    progress.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
