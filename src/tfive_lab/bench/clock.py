"""Seconds of whole windows of several runs on a real model and its text, in one process on one device.

Every run is the code of `tfive train` without checkpoints and measurements, and begins with the same weights and texts.
Runs take turns over several rounds, so that what was compiled by one serves all, and what the machine does besides
falls on all. Unlike `tfive bench step`, nothing is forced through: critics qualify or do not.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.models.load import Loaded, load_model
from tfive.text.prepared import PreparedCorpus
from tfive.training.build import Assembly, build
from tfive.training.corpus import corpus_of
from tfive.training.devices import place
from tfive_lab.bench.profile import profiled
from tfive_lab.bench.step import means
from tfive_lab.bench.timed import Timed

START_UP = 2
"""First windows of a run that are left out of its steady state: warm-up rounds, compiling, captured graphs."""


@dataclass(frozen=True)
class Entry:
    """One of the runs: `METHOD+KEY=VALUE+…`, and its configuration."""

    label: str
    config: Config

    @classmethod
    def of(cls, label: str, sources: Sequence[str], overrides: Sequence[str]) -> Entry:
        method, *own = label.split("+")
        return cls(label, Config.load(*sources, overrides=[f"method={method}", *overrides, *own]))


def clock(
    sources: Sequence[str],
    labels: Sequence[str],
    *,
    windows: int = 8,
    rounds: int = 2,
    overrides: Sequence[str] = (),
    profile: bool = False,
    keep: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """All runs, round after round; `keep` gets the report after each, so that none is lost. With `profile` the last
    round's runs go on for two windows more, one to be timed and one to be profiled."""
    if windows <= START_UP or rounds < 1:
        raise UserError(f"--windows {windows} --rounds {rounds}: give {START_UP + 1} and 1 or more")
    if len(set(labels)) != len(labels):
        raise UserError(f"--run: {', '.join(labels)}: give every run once; --rounds repeats them all")
    planned = [f"window.windows={windows + 2 * profile}", *overrides]
    runs = [Entry.of(label, sources, planned) for label in labels]
    first = runs[0].config
    for run in runs[1:]:
        other = next((key for key in ("model", "text") if getattr(run.config, key) != getattr(first, key)), None)
        if other is not None:
            raise UserError(f"{run.label}: it changes {other}, and all runs share model and text; use --set for all")
    placement = place(first.model.device, first.model.compute)
    placement.apply(first.run.seed)
    loaded = load_model(
        first.model.name, device=placement.device, dtype=placement.compute, revision=first.model.revision
    )
    corpus = corpus_of(first, loaded=loaded)
    device = placement.device
    report: dict[str, Any] = {
        "model": loaded.name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "compute": str(placement.compute).removeprefix("torch."),
        "versions": {"torch": torch.__version__},
        "windows": windows,
        "runs": {run.label: [] for run in runs},
    }
    for number in range(rounds):
        for run in runs:
            last = number == rounds - 1
            found = time_run(run.config, loaded, corpus, windows=windows, profile=profile and last, device=device)
            report["runs"][run.label].append(found)
            report["ratios"] = ratios(report["runs"])
            if keep is not None:
                keep(report)
    return report


def time_run(
    config: Config, loaded: Loaded, corpus: PreparedCorpus, *, windows: int, profile: bool, device: torch.device
) -> dict[str, Any]:
    """One run's seconds, window by window and by phase, how its critics fared, and what a window asks of the device."""
    # A clock that does not wait for the device, as training has none.
    with Timed(time.perf_counter) as recorder:
        assembly = build(config, replace(loaded, model=copy.deepcopy(loaded.model)), corpus, recorder)
        rows = [_window(assembly, recorder) for _ in range(windows)]
        found = {
            "windows_s": [round(sum(spent for name, spent in row.items() if "/" not in name), 4) for row in rows],
            "thoughts": recorder.trajectories,
            "phases_s": means(rows[START_UP:]),
            "tests": [event for event in recorder.events if event.startswith("qualification")],
            "launched": [event for event in recorder.events if "cannot be captured" in event],
        }
        if profile:
            found["profile"] = profiled(partial(_window, assembly, recorder), device)
    # Nothing of it stays on the device beside the next run.
    del assembly
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _window(assembly: Assembly, recorder: Timed) -> dict[str, float]:
    """Seconds by phase of one window."""
    before = recorder.phases()
    assembly.method.advance()
    while not assembly.method.closed:
        assembly.method.advance()
    return {name: spent - before.get(name, 0.0) for name, spent in recorder.phases().items() if name != "admit"}


def steady(rounds: Sequence[dict[str, Any]]) -> float:
    """Median seconds of a run's windows after its start-up, of all rounds."""
    return statistics.median(seconds for one in rounds for seconds in one["windows_s"][START_UP:])


def ratios(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Each run's seconds over those of the first: steady windows, and all windows of the last round."""
    base, *others = [(label, rounds) for label, rounds in runs.items() if rounds]
    whole = {label: sum(rounds[-1]["windows_s"]) for label, rounds in (base, *others)}
    return {
        label: {"steady": steady(rounds) / steady(base[1]), "all_in": whole[label] / whole[base[0]]}
        for label, rounds in others
    }


def render(report: dict[str, Any]) -> str:
    """The report as a table: a row a run."""
    lines = [f"{report['model']}, {report['device']}, {report['compute']}", ""]
    lines += [
        "| run | start-up, each round | steady window, s | of the first's | all in | phases of a steady window, s |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for label, rounds in report["runs"].items():
        if not rounds:
            continue
        begun = "; ".join(", ".join(f"{s:.2f}" for s in one["windows_s"][:START_UP]) for one in rounds)
        apart = report["ratios"].get(label)
        shares = (f"{100 * apart[kind]:.1f} %" if apart else "–" for kind in ("steady", "all_in"))
        phases = ", ".join(f"{name} {s:.3f}" for name, s in rounds[-1]["phases_s"].items() if s >= 0.0005)
        lines.append(f"| {label} | {begun} | {steady(rounds):.3f} | {' | '.join(shares)} | {phases} |")
    for label, rounds in report["runs"].items():
        events = dict.fromkeys(event for one in rounds for event in one["launched"])
        lines += [f"{label}: {event}" for event in events]
    for label, rounds in report["runs"].items():
        if rounds and (seen := rounds[-1].get("profile")):
            busy, host = seen["device_ms"] / 1e3, seen["host_ms"] / 1e3
            lines += ["", f"{label}: a window of {host:.3f} s has {busy:.3f} s of {seen['launches']:,} kernels"]
            lines += [f"  {title}: {ms:.0f} ms" for title, ms in seen["families_ms"].items() if ms >= 0.5]
            lines += ["", "| part | calls | ms, profiled | device at work | kernels | graphs | waits |"]
            lines += ["|---|---|---|---|---|---|---|"]
            for name, row in seen["parts"].items():
                counts = " | ".join(f"{row[kind]:,}" for kind in ("kernels", "graphs", "waits"))
                lines.append(f"| {name} | {row['calls']} | {row['ms']:.1f} | {row['busy_ms']:.1f} | {counts} |")
    return "\n".join(lines)
