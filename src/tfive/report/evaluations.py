"""Evaluations as a page shows them: scores with intervals, paired differences, and every answer with its verdict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfive.errors import UserError
from tfive.report.runs import read_json
from tfive.report.statistics import mean_interval

RUN, SCORES = "run.json", "scores.json"
LONGEST = 4000
"""Characters of an output that a page keeps: its beginning and its end."""
CHARACTERS = 3_000_000
"""Characters of all questions and outputs of a page; items beyond them are left out and counted."""
LENGTHS = ("tokens", "thought tokens", "log-likelihood thought tokens")
"""Measures that count tokens; all others are shares."""

Records = dict[str, list[dict[str, Any]]]


def evaluation_data(folders: Sequence[Path]) -> dict[str, Any]:
    """The entry `evaluation` of a page; models in the order of their folders."""
    runs = [read_json(folder / RUN) for folder in folders]
    tasks = list(dict.fromkeys(task for run in runs for task in run["tasks"]))
    for task in tasks:
        if len({run["tasks"][task]["sha256"] for run in runs if task in run["tasks"]}) > 1:
            raise UserError(f"{task}: these evaluations asked different items; compare those on the same frozen items")
    scores = [read_json(folder / SCORES)["tasks"] if (folder / SCORES).is_file() else {} for folder in folders]
    answers = [{task: _answers(folder, task) for task in tasks} for folder in folders]
    items, columns, left_out = _items(tasks, answers)
    return {
        "models": [_model(run, folder) for run, folder in zip(runs, folders)],
        "tasks": [_task(task, runs, scores, [one[task] for one in answers]) for task in tasks],
        "items": items | {"answers": columns},
        "left_out": left_out,
    }


def _model(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    facts = run["model"]
    settings = f"{facts.get('precision', '')}, thoughts: {facts.get('thoughts', 'none')}, seed {run.get('seed', 0)}"
    return {"name": facts["name"], "folder": folder.name, "when": facts.get("thoughts", "none"), "settings": settings}


def _answers(folder: Path, task: str) -> Records:
    return {way: list(_lines(folder / f"{task}.{way}.jsonl")) for way in ("generated", "options")}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The answers of a file, without a last line that was cut off."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _values(records: Records) -> dict[str, dict[str, float]]:
    """Measure → item → value: what two models are compared by."""
    found: dict[str, dict[str, float]] = {}
    by_item: dict[str, list[float]] = {}
    for record in records["generated"]:
        by_item.setdefault(record["id"], []).append(float(bool(record["correct"])))
    if by_item:
        found["pass@1"] = {item: sum(own) / len(own) for item, own in by_item.items()}
    for way in ("raw", "per_character"):
        own = {record["id"]: float(record[way]) for record in records["options"] if way in record}
        if own:
            found[f"log-likelihood {way}"] = own
    return found


def _task(
    task: str, runs: Sequence[dict[str, Any]], scores: Sequence[dict[str, Any]], answers: Sequence[Records]
) -> dict[str, Any]:
    facts = next(run["tasks"][task] for run in runs if task in run["tasks"])
    values = [_values(records) for records in answers]
    if facts["kind"] == "choice":
        values = [{"accuracy" if n == "pass@1" else n: own for n, own in one.items()} for one in values]
    known = [one.get(task, {}).get("scores", {}) for one in scores]
    names = dict.fromkeys(name for one in (*known, *values) for name in one)
    primary = next((one[task]["primary"] for one in scores if task in one), next(iter(names), None))
    return {
        "name": task,
        "kind": facts["kind"],
        "items": facts["items"],
        "measures": [
            {
                "name": name,
                "primary": name == primary,
                "share": name not in LENGTHS,
                "values": [_ends(own.get(name), one.get(name)) for own, one in zip(known, values)],
                "difference": _difference(values, name),
            }
            for name in names
        ],
    }


def _ends(score: dict[str, Any] | None, values: dict[str, float] | None) -> dict[str, float] | None:
    """A score as it was written; of an evaluation that is not finished, over the answers so far."""
    if score is not None:
        return {key: score[key] for key in ("mean", "low", "high")}
    return None if not values else _interval(list(values.values()))


def _interval(values: Sequence[float], least: float = 0.0) -> dict[str, float]:
    """Mean and 95 % bootstrap interval over items, widened for few of them; values lie between `least` and 1."""
    value_I = np.asarray(values, np.float64)
    if value_I.min() == value_I.max():
        # Items that all agree show no spread; the exact bound on how many others there may be does.
        mean, reach = float(value_I[0]), 1 - 0.025 ** (1 / len(value_I))
        return {"mean": mean, "low": mean - reach * (mean - least), "high": mean + reach * (1 - mean)}
    # Each item is drawn as a seed is, so that few items widen the interval as few seeds do.
    found = mean_interval(value_I[:, None], np.zeros(1, np.int64))
    return {"mean": found.mean, "low": max(found.low, least), "high": min(found.high, 1.0)}


def _difference(values: Sequence[dict[str, dict[str, float]]], name: str) -> dict[str, float] | None:
    """The second model minus the first on the items both have answered, resampled in pairs."""
    if len(values) != 2 or any(name not in one for one in values):
        return None
    first, second = (one[name] for one in values)
    shared = [item for item in first if item in second]
    return _interval([second[item] - first[item] for item in shared], -1.0) if shared else None


def _items(
    tasks: Sequence[str], answers: Sequence[dict[str, Records]]
) -> tuple[dict[str, Any], list[dict[str, list[Any]]], int]:
    """Every item once, and every model's answers to it, as columns; and how many items did not fit."""
    names = ("item", "sample", "correct", "extracted", "output", "cut", "tokens", "thoughts", "thought_tokens", "ended",
             "way", "steps")  # fmt: skip
    columns: list[dict[str, list[Any]]] = [{name: [] for name in names} for _ in answers]
    items: dict[str, list[Any]] = {name: [] for name in ("task", "id", "question", "choices", "gold")}
    spent = left_out = 0
    for number, task in enumerate(tasks):
        grouped = [_by_item(one[task]) for one in answers]
        for item in dict.fromkeys(name for one in grouped for name in one):
            rows = [[_row(*answer) for answer in one.get(item, [])] for one in grouped]
            first = next(answer for one in grouped for _, answer in one.get(item, []))
            spent += len(str(first.get("question", ""))) + sum(len(row["output"]) for one in rows for row in one)
            if spent > CHARACTERS:
                left_out += 1
                continue
            for column, own in zip(columns, rows):
                for row in own:
                    for name, value in (row | {"item": len(items["id"])}).items():
                        column[name].append(value)
            for name, value in (("task", number), ("id", item), ("question", first.get("question", ""))):
                items[name].append(value)
            items["choices"].append(first.get("choices", []))
            items["gold"].append(str(first.get("gold", "")))
    return items, columns, left_out


def _by_item(records: Records) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for way, some in records.items():
        for record in some:
            found.setdefault(record["id"], []).append((way, record))
    return found


def _row(way: str, answer: dict[str, Any]) -> dict[str, Any]:
    """One answer; of compared options the letter taken, and every option's log-likelihood as its output."""
    if way == "options":
        pairs = zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", answer["log_likelihood"])
        shown = {
            "correct": int(bool(answer["raw"])),
            "extracted": answer["taken"].get("raw"),
            "output": "\n".join(f"{letter} {value:.3f}" for letter, value in pairs),
            "tokens": sum(answer["tokens"]),
            "steps": [],
        }
    else:
        shown = {key: answer.get(key) for key in ("extracted", "output", "tokens", "steps")}
        shown["correct"] = None if answer.get("correct") is None else int(bool(answer["correct"]))
    output = str(shown["output"] or "")
    cut = len(output) > LONGEST
    thoughts = answer.get("thoughts", 0)
    return shown | {
        "sample": answer.get("sample", 0),
        "output": f"{output[: LONGEST // 2]}\n…\n{output[-LONGEST // 2 :]}" if cut else output,
        "cut": int(cut),
        "thoughts": len(thoughts) if isinstance(thoughts, list) else thoughts,
        "thought_tokens": answer.get("thought_tokens", 0),
        "ended": answer.get("ended"),
        "way": way,
    }


def evaluation_story(found: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one evaluation, or on the difference of two; no word of better where an interval holds zero."""
    models, tasks = found["models"], found["tasks"]
    primary = [(task["name"], one) for task in tasks for one in task["measures"] if one["primary"]]
    limits = ["Benchmarks say nothing of other tasks; items may have been seen in pretraining."]
    if len(models) != 2:
        scores = "; ".join(f"{name} {', '.join(_percent(value) for value in one['values'])}" for name, one in primary)
        return _story("unclear", f"Scores of {models[0]['name']}.", scores or "Nothing has been answered yet.", limits)
    told: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": []}
    for name, one in primary:
        ends = one["difference"]
        if ends is not None:
            kind = "better" if ends["low"] > 0 else "worse" if ends["high"] < 0 else "not told apart"
            told[kind].append(
                f"{name} ({100 * ends['mean']:+.1f}, {100 * ends['low']:+.1f} … {100 * ends['high']:+.1f})"
            )
    parts = [f"{kind}: {', '.join(names)}" for kind, names in told.items() if names]
    code = "harmed" if told["worse"] else "learned" if told["better"] else "not_learned"
    second = models[1]["name"]
    headline = {
        "harmed": f"{second} is worse on {len(told['worse'])} of {len(primary)} tasks.",
        "learned": f"{second} is better on {len(told['better'])} of {len(primary)} tasks.",
        "not_learned": f"{second} and {models[0]['name']} cannot be told apart.",
    }[code]
    return _story(code, headline, f"Second minus first, points, 95 % interval over items: {'; '.join(parts)}.", limits)


def _percent(value: dict[str, float] | None) -> str:
    return "–" if value is None else f"{100 * value['mean']:.1f} ({100 * value['low']:.1f} … {100 * value['high']:.1f})"


def _story(code: str, headline: str, sentence: str, limits: list[str]) -> dict[str, Any]:
    return {
        "verdict": {"code": code, "headline": headline, "sentence": sentence},
        "numbers": [],
        "limits": limits,
    }
