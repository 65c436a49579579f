"""What thoughts are worth on ordinary text before anything is trained, by size of the model: what `tfive eval headroom`
printed into one file of results, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfive.errors import UserError
from tfive.report.runs import read_json
from tfive_lab.study_tables import drawn

RESULTS = "prose-headroom.json"
COMMAND = (
    "tfive eval headroom MODEL --corpus web_curated.jsonl.gz --corpus web_crawl.jsonl.gz --corpus arxiv.jsonl.gz "
    "--corpus math.jsonl.gz --config studies/smollm2/headroom.toml --texts 192 --tokens 512 --positions 8 "
    "--compute bfloat16 --json"
)
GAINS = {"own": "own", "other": "another's", "empty": "empty", "best": "best of all drawn", "content": "content gain"}
LATER = {"best_or_none": "best or none"}
"""What the command has printed since."""
CRITIC = ("r2", "r2_within", "within_share", "taking_the_guessed_best", "taking_the_best")
Found = dict[str, Any]


def collected(folder: Path, code: str, known: Found) -> Found:
    """The outputs of the command in a folder, one file a model and called after it, beside those that are `known`."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise UserError(f"--headroom {folder}: no .json in it; give the folder of what tfive eval headroom printed")
    fresh = {path.stem: {"code": code, **_short(read_json(path), path)} for path in paths}
    return {"command": COMMAND, "models": dict(sorted((known.get("models", {}) | fresh).items()))}


def _short(printed: Found, path: Path) -> Found:
    """What is kept of one output, five places of each number."""
    if "by_source" not in printed or "critic" not in printed:
        raise UserError(f"{path}: not what tfive eval headroom --json prints; give its output")
    parts = {"every text": printed["all"], **printed["by_source"]}
    rows = {
        name.removesuffix(".jsonl.gz"): {"items": row["items"], "texts": row["texts"]}
        | {key: [round(value, 5) for value in row[key]] for key in ("loss", *GAINS, *LATER) if key in row}
        for name, row in parts.items()
    }
    critic = {key: None if (value := printed["critic"][key]) is None else round(value, 5) for key in CRITIC}
    return {"thoughts": printed["thoughts"], "length": printed["thought"]["length"], "rows": rows, "critic": critic}


def headrooms(found: Found) -> str:
    """A row for each model and kind of text, nats a token with 95 % over texts."""
    rows = []
    for model, kept in found["models"].items():
        for text, row in kept["rows"].items():
            gains = [_told(row[key]) if key in row else "–" for key in (*GAINS, *LATER)]
            rows.append([model, text.replace("_", " "), f"{row['items']:,}", f"{row['loss'][0]:.3f}", *gains])
    return drawn(("model", "text", "items", "loss without", *GAINS.values(), *LATER.values()), rows)


def critics(found: Found) -> str:
    """What a critic of prefix and thought, fitted to half of the texts, foresees on the other half."""
    head = ("model", "R² of a thought's gain", "R² within a position", "share of the variance within positions")
    rows = []
    for model, kept in found["models"].items():
        known: Mapping[str, Any] = kept["critic"]
        signs = ("–" if known[key] is None else _signed(known[key]) for key in ("r2", "r2_within"))
        worth = (_signed(known[key]) for key in ("taking_the_guessed_best", "taking_the_best"))
        rows.append([model, *signs, f"{known['within_share']:.2f}", *worth])
    return drawn((*head, "taking the one it likes best, against the mean", "taking the best"), rows)


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _told(value: list[float]) -> str:
    return f"{_signed(value[0])} ({_signed(value[1])} … {_signed(value[2])})"
