"""Every rank killed in every phase: `python tests/soak/ranks.py --work build/soak/ranks`.

A run by two processes is let live once, and notes every place that each rank passes: phases and parts of phases,
exchanges, points of a save, each at its beginning and its end. Then it is run again, and each rank is killed with
SIGKILL at each of those places, one death an attempt; the launcher starts all ranks again, and the run that comes of it
must be the undisturbed one to the bit. What was done is kept in the work folder, and the same command goes on from it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "text"))

from forked import forked
from soak.life import compare
from soak.rank import RESTORED, STARTED
from tiny import OVERRIDES, configure

SIZE = 2
DEATHS = 40
"""Deaths of one run before it is let live to its end."""
LIMIT = 3600.0
"""Seconds after which a launch counts as hanging."""
RESTORING = ("restore: begin", RESTORED)
"""Places that an undisturbed run does not pass."""

CLOCKED = (".launch", "costs.jsonl", "manifest.json", "metrics.jsonl", "status.json", "summary.json", "tree.json")
"""Files that hold clocks, or the launch's name."""

SETTINGS = (
    "run.seed=2", "window.windows=2", "window.actor_steps=2", "qualify.rule=fixed", "critic.warmup_rounds=1",
    "calibration.cross_fit=true", "run.checkpoint_phases=true", "benchmarks.every=2", 'benchmarks.gains=["colours"]',
    'benchmarks.scores=["colours"]',
)  # fmt: skip
CASES: dict[str, tuple[str, ...]] = {"copies": (), "shards": ("distributed.shard=0",)}
"""Weights whole in every process, and in shards over all."""

TASK = """name = "colours"
kind = "choice"
count = 4
file = "colours.jsonl"
prompt = "options-v1"
context = "{question}"
continuation = "text"
"""
LAUNCH = """
import json, sys
from tfive.cli.launch import launch
arguments, restarts, program = json.loads(sys.argv[1])
sys.exit(launch(arguments, processes=2, restarts=restarts, patience=60, program=program))
"""

Death = tuple[str, int]
"""A place and a rank."""


def configured(home: Path) -> None:
    """The tiny model and its text, and a benchmark of four questions."""
    configure(home)
    rows = [{"id": str(n), "question": f"{n} boat", "choices": ["river", "mill"], "answer": n % 2} for n in range(4)]
    (home / "colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (home / "colours.task.toml").write_text(TASK, "utf-8")


def launched(home: Path, folder: Path, case: str, deaths: list[Death]) -> list[dict[str, Any]]:
    """One launch, from a new folder to its end; what its ranks noted, in the order of attempts."""
    log = folder.with_suffix(".log")
    for path in (folder, log):
        shutil.rmtree(path, ignore_errors=True)
    log.mkdir(parents=True)
    overrides = (*OVERRIDES, *SETTINGS, f"benchmarks.data={home}", *CASES[case])
    words = ["train", str(home / "tiny.toml"), *(word for one in overrides for word in ("--set", one))]
    told = json.dumps([[*words, "--out", str(folder)], len(deaths), forked("soak.rank:rank")[1:]])
    sweep = {"SWEEP": json.dumps({"log": str(log), "deaths": deaths})}
    with (log / "said.txt").open("wb") as said:
        done = subprocess.run(
            [sys.executable, "-c", LAUNCH, told],
            stdout=said, stderr=said, timeout=LIMIT, check=False, env=os.environ | sweep,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{case}: status {done.returncode} after {len(deaths)} planned deaths: {log}/said.txt")
    return [json.loads(line) for rank in range(SIZE) for line in _lines(log / f"rank-{rank}.jsonl")]


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def places(noted: list[dict[str, Any]]) -> list[Death]:
    """Every place of every rank, in the order in which an undisturbed run passes them; restoring comes after the first
    window, where there is something to go on from."""
    found = sorted((line["time"], line["place"], line["rank"]) for line in noted)
    deaths = [(place, rank) for _, place, rank in found]
    middle = deaths.index(("close of window 1: end", 0))
    restoring = [(place, rank) for place in RESTORING for rank in range(SIZE)]
    return [*deaths[:middle], *restoring, *deaths[middle:]]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run but those that hold clocks, which are compared by what else they hold."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: b"" if path.name in CLOCKED else path.read_bytes() for name, path in found.items()}


def judged(home: Path, case: str, noted: list[dict[str, Any]]) -> dict[str, Any]:
    """Who died where in a launch that came to its end, and how long it took to be there again; the launcher must have
    named the very ranks that died, and the run must be the undisturbed one."""
    killed = sorted((line for line in noted if line["killed"]), key=lambda line: int(line["attempt"]))
    said = _lines(home / case / "killed.log" / "said.txt")
    named = [line.partition(";")[0] for line in said if "starting all ranks again" in line]
    assert named == [f"rank {line['rank']} was ended by SIGKILL" for line in killed], named
    compare(home / case / "undisturbed", home / case / "killed")
    assert contents(home / case / "undisturbed") == contents(home / case / "killed"), "files"
    begun = {
        attempt: max(line["time"] for line in noted if line["attempt"] == attempt and line["place"] == STARTED)
        for attempt in {line["attempt"] for line in noted}
    }
    seconds = [begun[line["attempt"] + 1] - line["time"] for line in killed]
    return {"deaths": [[line["place"], line["rank"]] for line in killed], "seconds": seconds}


def swept(home: Path, case: str, progress: Path) -> dict[str, Any]:
    """Kill at every place of a case that was not struck before; counts are kept after each run that was compared."""
    known: dict[str, Any] = json.loads(progress.read_text("utf-8")) if progress.is_file() else {}
    own = known.setdefault(case, {})
    if not own:
        noted = launched(home, home / case / "undisturbed", case, [])
        own |= {"planned": [list(one) for one in places(noted)], "deaths": [], "seconds": [], "runs": 0}
    while left := [one for one in own["planned"] if one not in own["deaths"]]:
        noted = launched(home, home / case / "killed", case, [(place, rank) for place, rank in left[:DEATHS]])
        found = judged(home, case, noted)
        if not found["deaths"]:
            raise SystemExit(f"{case}: a run ended before any rank came to {left[0]}")
        own["deaths"] += found["deaths"]
        own["seconds"] += found["seconds"]
        own["runs"] += 1
        progress.write_text(json.dumps(known), "utf-8")
        print(f"{case}: {len(own['deaths'])} of {len(own['planned'])} deaths, the same to the bit", flush=True)
    return dict(own)


def shown(case: str, own: dict[str, Any]) -> str:
    """Deaths by place, of each rank."""
    by_place: dict[str, Counter[int]] = {}
    for place, rank in own["deaths"]:
        by_place.setdefault(place.partition(": ")[0], Counter())[rank] += 1
    rows = [
        f"  {place:24s} " + ", ".join(f"rank {rank}: {count}" for rank, count in sorted(counts.items()))
        for place, counts in by_place.items()
    ]
    times = own["seconds"]
    return "\n".join(
        [
            f"{case}: {len(own['deaths'])} deaths in {own['runs']} runs, none differs",
            *rows,
            f"  ranks were there again after {statistics.median(times):.1f} s (median), {max(times):.1f} s at most",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("build/soak/ranks"), help="folder of runs and counts")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    asked = parser.parse_args()
    home = asked.work.absolute()
    home.mkdir(parents=True, exist_ok=True)
    configured(home)
    for case in asked.cases:
        print(shown(case, swept(home, case, home / "progress.json")), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
