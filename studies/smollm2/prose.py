"""Gated reading on ordinary text, several seeds of a method and of its control: run folders into JSON and tables.

    python studies/smollm2/prose.py --runs runs/prose --code COMMIT   # results/smollm2-prose.json and the page's tables
    python studies/smollm2/prose.py --runs runs/warm --pilots runs/pilot --code COMMIT   # the same from a warm start
    python studies/smollm2/prose.py --headroom headroom --code COMMIT   # thoughts before training
    python studies/smollm2/prose.py --open runs/open --code COMMIT   # open reading after hindsight
    python studies/smollm2/prose.py --lookahead runs/lookahead --code COMMIT   # guesses of the next sentence
    python studies/smollm2/prose.py                                   # the tables alone, from the committed results

Runs are those of `gated.toml`, each in a folder of its own; README.md beside this file has the commands. Those that
began with a warm start are a study of their own, results/smollm2-prose-warm.json. A place in the page is
`<!-- table: NAME -->` … `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import prose_headroom
import prose_lookahead
import prose_open
from safetensors.numpy import load_file

from tfive.cli.options import script
from tfive.errors import UserError
from tfive.report.runs import read_json
from tfive.training.status_files import COSTS
from tfive.training.summary import SUMMARY
from tfive_lab.estimates import Estimate, Sums, over_clusters, over_seeds, ratio
from tfive_lab.study_files import write_json
from tfive_lab.study_tables import PLACE, drawn, filled

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"t5": "T⁵", "anchor-only": "anchors alone"}
MEASURES = ("thought_gain", "content_gain", "gain_vs_base", "mixed_gain", "mixed_gain_other", "empty_gain",
            "random_gain", "no_thought_loss")  # fmt: skip
SHOWN = {"thought_gain": "thought gain", "content_gain": "content gain", "mixed_gain": "mixed gain, own",
         "mixed_gain_other": "mixed gain, another's", "empty_gain": "empty", "random_gain": "random tokens",
         "no_thought_loss": "loss without"}  # fmt: skip
"""What a row of the test texts shows."""
STARTED = ("thought_gain", "content_gain", "no_thought_loss")
"""What is shown of a start."""
PLACED = ("device_name", "compute", "torch", "transformers")
"""What a run says of where it ran."""
DECAY = 0.9
"""`reward.decay` of these runs: how much of the mean square that rewards are scaled by stays from window to window."""
UNIT = 1e5
"""Sums over a text's items are kept in these parts of a nat."""
Found = dict[str, Any]


def cell_of(folder: Path) -> Found:
    """One run that has ended: what it measured on development texts, its windows, and its test texts one by one."""
    if not (folder / SUMMARY).is_file():
        raise UserError(f"{folder}: no {SUMMARY}; only a run that has ended can be tabulated")
    config = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    if config["method"] not in NAMES:
        raise UserError(f"{folder}: method = {config['method']}; this study has {', '.join(NAMES)}")
    summary = read_json(folder / SUMMARY)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    costs = [json.loads(line) for line in (folder / COSTS).read_text("utf-8").splitlines()]
    windows = [line for line in lines if "policy_kl" in line or "anchor_loss" in line]
    measured = [line for line in lines if "development.thought_gain" in line and "anchor_loss" not in line]
    return {
        "method": config["method"],
        "seed": config["run"]["seed"],
        "place": {key: summary["place"][key] for key in PLACED},
        "windows": summary["windows"],
        "actor_thoughts": summary["windows"] * config["window"]["items"],
        "thoughts": costs[-1]["trajectories"],
        "seconds": round(sum(taken for phase, taken in costs[-1]["seconds"].items() if "/" not in phase)),
        "measured": [
            {"window": line["step"]}
            | {name: _with_interval(line, f"development.{name}") for name in MEASURES if f"development.{name}" in line}
            for line in measured
        ],
        "critics": [_critics(line) for line in windows if "r2.1" in line],
        "start": {"no_thought_loss": _short(summary["test_no_thought_loss_start"])},
        "test": by_text(folder / "test" / f"window-{summary['windows']:05d}.safetensors"),
        **({"warmstart": warmed_by(folder)} if "warmstart" in summary else {}),
        **({"openness": openness} if (openness := _openness(windows)) else {}),
    }


def _openness(windows: Sequence[Found]) -> dict[str, float]:
    """How far gates were open after each window, by its number, where runs tell it."""
    return {str(line["step"]): _short(line["reading_openness"]) for line in windows if "reading_openness" in line}


def warmed_by(folder: Path) -> Found:
    """What a run's warm start was asked for, and what came of it on development texts."""
    config = tomllib.loads((folder / "config.toml").read_text("utf-8"))
    found = read_json(folder / SUMMARY).get("warmstart")
    if found is None:
        raise UserError(f"{folder}: no warm start in its {SUMMARY}; pilots are runs with one")
    asked = {key: config["warmstart"][key] for key in ("rounds", "items", "samples", "steps", "lr", "reading")}
    short = [{name: _short(value) for name, value in one.items()} for one in (*found["rounds"], found["after"])]
    return {"seed": config["run"]["seed"], "asked": asked, "rounds": short[:-1], "after": short[-1]}


def _critics(line: Found) -> Found:
    kept: Found = {key: _short(line[key]) for key in ("r2.1", "r2.2", "reward_scale", "policy_kl") if key in line}
    return {"window": line["step"], **kept, "admitted": bool(line.get("actor_updates.qualified"))}


def _with_interval(line: Found, key: str) -> list[float]:
    ends = [f"{key}_interval.{end}" for end in (1, 2)]
    return [_short(line[one]) for one in (key, *ends) if one in line]


def _short(value: float) -> float:
    """Five places, a tenth of what these numbers are known to."""
    return round(float(value), 5)


def by_text(path: Path) -> dict[str, str]:
    """Items of every test text and the sums of their measures, as numbers in a string."""
    kept = load_file(path)
    _, texts, counts = np.unique(kept["text"], return_inverse=True, return_counts=True)
    sums = {name: np.bincount(texts, kept[name].astype(np.float64)) for name in MEASURES if name in kept}
    told = {name: " ".join(str(round(UNIT * float(one))) for one in sums[name]) for name in sums}
    return {"items": " ".join(map(str, counts)), **told}


def sums_of(cell: Found, measure: str, less: str | None = None, other: Found | None = None) -> Sums:
    """A measure of each test text of a cell; minus another measure of it, or minus the same one of another cell."""
    test = cell["test"]
    items, own = (_numbers(test[name]) for name in ("items", measure))
    taken = _numbers(test[less]) if less else _numbers(other["test"][measure]) if other else [0] * len(own)
    if other is not None and other["test"]["items"] != test["items"]:
        raise UserError(
            f"seed {cell['seed']}: {cell['method']} and {other['method']} measured other items of the test texts"
        )
    return {text: ((a - b) / UNIT, n) for text, (a, b, n) in enumerate(zip(own, taken, items, strict=True))}


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def signed(value: float) -> str:
    """A gain with its sign and four decimals."""
    return f"{value:+.4f}".replace("-", "−")


def _interval(found: Estimate) -> str:
    mean, half = found
    return "–" if half is None else f"{signed(mean - half)} … {signed(mean + half)}"


def told(each: Sequence[Sums]) -> str:
    """The mean over seeds with its interval over texts, and over seeds where there are several."""
    mean, _ = found = over_clusters(each)
    seeds = f"; over seeds {_interval(over_seeds([ratio(one) for one in each]))}" if len(each) > 1 else ""
    return f"{signed(mean)} ({_interval(found)}{seeds})"


def methods(found: Found) -> dict[str, list[Found]]:
    """The cells of each method in the order of seeds."""
    groups = {key: [one for one in found["cells"] if one["method"] == key] for key in NAMES}
    return {key: sorted(cells, key=lambda one: int(one["seed"])) for key, cells in groups.items() if cells}


def ends(found: Found) -> str:
    """The test texts: a row for each run, then one for each method, with its intervals."""
    rows = []
    for key, cells in methods(found).items():
        for cell in cells:
            spent = (f"{cell['actor_thoughts']:,}", f"{cell['thoughts']:,}", f"{cell['seconds']:,}")
            rows.append([NAMES[key], str(cell["seed"]), *spent, *(_shown(cell, name) for name in SHOWN)])
        if len(cells) > 1:
            shared = [told([sums_of(one, name) for one in cells]) for name in list(SHOWN)[:-1]]
            loss = over_clusters([sums_of(one, "no_thought_loss") for one in cells])[0]
            rows.append([NAMES[key], ", ".join(str(one["seed"]) for one in cells), *["–"] * 3, *shared, f"{loss:.3f}"])
    return drawn(("method", "seed", "actor thoughts", "of every role", "seconds", *SHOWN.values()), rows)


def _shown(cell: Found, measure: str) -> str:
    if measure not in cell["test"]:
        return "–"
    if measure == "no_thought_loss":
        return f"{ratio(sums_of(cell, measure)):.3f} (before {cell['start']['no_thought_loss']:.3f})"
    return told([sums_of(cell, measure)])


def apart(found: Found) -> str:
    """What the goals ask of the test texts: the method minus its control, and own thoughts mixed in minus another's."""
    groups = methods(found)
    rows = []
    for key, cells in groups.items():
        mixed = [sums_of(one, "mixed_gain", less="mixed_gain_other") for one in cells]
        rows.append([NAMES[key], "mixed gain, own minus another's", str(len(cells)), told(mixed)])
    own, control = ({one["seed"]: one for one in groups.get(key, [])} for key in NAMES)
    seeds = sorted(own.keys() & control.keys())
    for name in ("thought_gain", "content_gain", "gain_vs_base", "no_thought_loss") if seeds else ():
        each = [sums_of(own[seed], name, other=control[seed]) for seed in seeds]
        shown = {**SHOWN, "gain_vs_base": "gain against the base model"}[name]
        rows.append([f"{NAMES['t5']} minus {NAMES['anchor-only']}", shown, str(len(seeds)), told(each)])
    return drawn(("of", "what", "seeds", "nats a token, 95 % over texts"), rows)


def course(found: Found) -> str:
    """Development texts as training goes on, mean over seeds and Student's interval."""
    names = ("thought_gain", "content_gain", "mixed_gain", "mixed_gain_other", "no_thought_loss")
    opened = any("openness" in one for one in found["cells"])
    rows = []
    for key, cells in methods(found).items():
        shared = set.intersection(*({one["window"] for one in cell["measured"]} for cell in cells))
        for window in sorted(shared):
            lines = [next(one for one in cell["measured"] if one["window"] == window) for cell in cells]
            thoughts = window * cells[0]["actor_thoughts"] // cells[0]["windows"]
            known = (cell.get("openness", {}).get(str(window)) for cell in cells)
            told_by = [one for one in known if one is not None]
            gates = [f"{statistics.fmean(told_by):.3f}" if told_by else "–"] if opened else []
            rows.append([NAMES[key], f"{thoughts:,}", *(_over(lines, name) for name in names), *gates])
    head = ("method", "actor thoughts", *(SHOWN[name] for name in names), *(["gates open"] if opened else []))
    return drawn(head, rows)


def _over(lines: Sequence[Found], name: str) -> str:
    values = [line[name][0] for line in lines if name in line]
    if len(values) < len(lines):
        return "–"
    if name == "no_thought_loss":
        return f"{statistics.fmean(values):.3f}"
    mean, half = over_seeds(values)
    return signed(mean) if half is None else f"{signed(mean)} ± {half:.4f}"


def critics(found: Found) -> str:
    """How often the critics were admitted, and what they foresaw of fresh thoughts."""
    rows = []
    for cell in methods(found).get("t5", []):
        known = cell["critics"]
        foreseen = [min(one["r2.1"], one.get("r2.2", one["r2.1"])) for one in known]
        half = len(foreseen) // 2
        medians = (f"{statistics.median(part):+.3f}".replace("-", "−") for part in (foreseen[:half], foreseen[half:]))
        admitted = f"{sum(one['admitted'] for one in known)} of {len(known)}"
        scales = [one["reward_scale"] for one in known if "reward_scale" in one]
        scale = f"{scales[0]:.3f} → {scales[-1]:.3f}" if scales else "–"
        rows.append([str(cell["seed"]), admitted, *medians, scale, *_loudness(scales)])
    head = (
        "seed",
        "windows admitted",
        "median R² of the weaker, first half",
        "second half",
        "scale of rewards, first and last",
        "largest gain of a window",
        "windows above 0.1",
        "above 0.06",
    )
    return drawn(head, rows)


def _loudness(scales: Sequence[float]) -> list[str]:
    """The root mean square gains of windows, which the scale averages: the largest, and how many are above a bound. The
    first is the scale itself, as it begins afresh when thoughts are rewarded."""
    squares = [now**2 - DECAY * before**2 for before, now in pairwise(scales)]
    gains = [*scales[:1], *((max(0.0, one) / (1 - DECAY)) ** 0.5 for one in squares)]
    return (
        [f"{max(gains):.3f}", *(str(sum(one > bound for one in gains)) for bound in (0.1, 0.06))]
        if gains
        else ["–"] * 3
    )


def starts(found: Found) -> str:
    """Warm starts, pilots first: what was asked for, what kept thoughts of each round were worth, what came of it."""
    rows = []
    warmed = {json.dumps(cell["warmstart"]): cell["warmstart"] for cell in found["cells"]}
    for one in (*found["pilots"], *sorted(warmed.values(), key=lambda one: int(one["seed"]))):
        asked, rounds = one["asked"], [part for part in one["rounds"] if "kept" in part]
        kept = ", ".join(f"{part['kept']:,.0f} ({signed(part['content_gain'])})" for part in rounds)
        after = (one["after"][name] for name in STARTED[:-1])
        words = (str(one["seed"]), *(f"{asked[key]:g}" for key in ("samples", "steps", "lr", "reading")), kept)
        rows.append([*words, *map(signed, after), f"{one['after']['no_thought_loss']:.3f}"])
    head = ("seed", "drawn a position", "updates a round", "rate", "careful updates", "kept of each round (gain)")
    return drawn((*head, *(SHOWN[name] for name in STARTED)), rows)


_SHARED: dict[str, Callable[[Found], str]] = {"ends": ends, "apart": apart, "course": course, "critics": critics}
STUDIES: dict[str, dict[str, Callable[[Found], str]]] = {
    "smollm2-prose.json": {f"prose_{name}": table for name, table in _SHARED.items()},
    "smollm2-prose-warm.json": {"warm_starts": starts, **{f"warm_{name}": table for name, table in _SHARED.items()}},
    prose_headroom.RESULTS: {"headroom": prose_headroom.headrooms, "headroom_critics": prose_headroom.critics},
    prose_open.RESULTS: {"open": prose_open.course},
    prose_lookahead.RESULTS: {"lookahead_worth": prose_lookahead.worth, "lookahead": prose_lookahead.course},
}
"""The tables of each file of results."""
COMMAND = "tfive train smollm2-135m-study studies/smollm2/gated.toml --set method=METHOD --set run.seed=SEED"


def collected(asked: argparse.Namespace) -> tuple[str, Found]:
    """The name of a study's results, and what its run folders and its pilots' hold."""
    folders = sorted(path.parent for path in asked.runs.glob("*/metrics.jsonl"))
    if not folders:
        raise UserError(f"--runs {asked.runs}: no run in it; give the folder that holds the runs' folders")
    cells = [cell_of(folder) for folder in folders]
    if len({"warmstart" in cell for cell in cells}) > 1:
        raise UserError(f"--runs {asked.runs}: runs with a warm start and without one; give a folder of one kind")
    settings = {"model": "SmolLM2-135M-Instruct (Q4_1, de-quantised)", "code": asked.code, "command": COMMAND}
    if "warmstart" not in cells[0]:
        return "smollm2-prose.json", {**settings, "cells": cells}
    given = cells[0]["warmstart"]["asked"] | {"source": "hindsight"}
    settings["command"] += "".join(f" --set warmstart.{key}={value}" for key, value in given.items())
    tried = [] if asked.pilots is None else sorted(asked.pilots.glob(f"*/{SUMMARY}"))
    pilots = [warmed_by(path.parent) for path in tried]
    return "smollm2-prose-warm.json", {**settings, "pilots": pilots, "cells": cells}


def page_tables(results: Path) -> dict[str, Callable[[Found], str]]:
    """By their names all tables of the studies whose results are there, each drawn from its own."""
    known = {name: read_json(results / name) for name in STUDIES if (results / name).is_file()}
    return {
        title: partial(lambda table, found, _: table(found), table, found)
        for name, found in known.items()
        for title, table in STUDIES[name].items()
    }


def main(given: list[str] | None = None) -> int:
    """Tabulate run folders where they are given, then fill the page's tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, help="folder of run folders; none: the committed results")
    parser.add_argument("--pilots", type=Path, help="folder of runs that tried a warm start alone")
    parser.add_argument("--headroom", type=Path, help="folder of outputs of tfive eval headroom, one file a model")
    parser.add_argument("--open", type=Path, help="folder of the three runs that read openly after hindsight")
    parser.add_argument("--lookahead", type=Path, help="folder of the runs that guess words of the next sentence")
    parser.add_argument("--code", default="", help="the commit of the code that ran")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the folder of results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "studies" / "smollm2-study.md")
    asked = parser.parse_args(given)
    if asked.runs is not None:
        name, found = collected(asked)
        write_json(asked.results / name, found)
    if asked.headroom is not None:
        path = asked.results / prose_headroom.RESULTS
        known = read_json(path) if path.is_file() else {}
        write_json(path, prose_headroom.collected(asked.headroom, asked.code, known))
    if asked.open is not None:
        write_json(asked.results / prose_open.RESULTS, prose_open.collected(asked.open, asked.code))
    if asked.lookahead is not None:
        found = prose_lookahead.collected(asked.lookahead, asked.code)
        write_json(asked.results / prose_lookahead.RESULTS, found)
    page, tables = asked.page.read_text("utf-8"), page_tables(asked.results)
    if unknown := [place[1] for place in PLACE.findall(page) if place[1] not in tables]:
        raise UserError(
            f"--results {asked.results}: nothing to fill table {unknown[0]} of {asked.page} from; give --runs"
        )
    asked.page.write_text(filled(page, tables, {}), "utf-8")
    return 0


if __name__ == "__main__":
    script(main)
