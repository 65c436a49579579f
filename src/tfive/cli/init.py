"""What `tfive init` does: ask a few questions, look at the text, write a configuration."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from tfive.cli.doctor import find_devices, speed_of
from tfive.errors import UserError
from tfive.models.precision import choose_device
from tfive.models.shape import ModelShape, find_shape
from tfive.training.first_run import Plan, TextFacts, look_at, plan
from tfive.training.inputs import model_needed


def init_command(
    out: str,
    *,
    model: str | None,
    text: Sequence[str],
    device: str | None,
    minutes: float | None,
    pattern: str | None,
    speed: float | None = None,
) -> str:
    """Write the file and return what to print; what no option says is asked for on a terminal."""
    path = Path(out)
    if path.suffix != ".toml":
        raise UserError(f"{out}: give a name that ends in .toml, such as mine.toml")
    if path.exists():
        raise UserError(f"{out}: already there, and never overwritten; give another name, or remove it")
    chosen = model or _ask("Model (nano, a folder, a hub id or a .gguf file)", "nano")
    texts = list(text) or [_ask("Text (a .txt, .jsonl or .parquet file, or a folder)", "")]
    if not texts[0]:
        raise UserError("--text: name a file or folder of text")
    where = device or _ask("Device (auto, cpu, cuda)", "auto")
    long = _number(_ask("Minutes to train", "10")) if minutes is None else minutes
    if not long > 0:
        raise UserError(f"--minutes {long:g}: give a number above 0")
    shape = find_shape(chosen, (Path(__file__).parents[1] / "data" / chosen,))
    _require_usable(chosen, shape, pattern or "")
    kind = choose_device(where).type
    facts = look_at(texts, chosen)
    place = next((one for one in find_devices() if one.kind == kind), find_devices()[-1])
    found = plan(facts, chosen, shape, where, kind, long, speed or speed_of(place), pattern or "")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(found.toml)
    return told(path, facts, found)


def _require_usable(model: str, shape: ModelShape | None, pattern: str) -> None:
    """Refuse what could only be refused again by the run: a name behind which no model is, a pattern that is none."""
    path = Path(model).expanduser()
    elsewhere = "/" in model or path.suffix in (".gguf", ".whl")
    if shape is None and not elsewhere and not path.exists():
        raise UserError(
            f"--model {model}: no such folder here, and no model of that name in the local cache; give nano, a folder, "
            "a hub id (OWNER/NAME) or a .gguf file"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        at = "" if error.pos is None else f" at character {error.pos + 1}"
        raise UserError(f"--pattern {pattern!r}: no regular expression, {error.msg}{at}") from error


def _ask(question: str, default: str) -> str:
    """The answer of a person at a terminal; elsewhere the default."""
    if not sys.stdin.isatty():
        return default
    return str(typer.prompt(question, default or None, err=True))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UserError(f"minutes {text!r}: give a number, such as 10") from error


def told(path: Path, facts: TextFacts, found: Plan) -> str:
    """What was written, how long it takes, what to do next."""
    config = found.config
    run = Path("runs") / path.stem
    lines = [
        f"{path}: {config.method} on {config.model.name}; {facts.shown()}",
        f"{config.window.windows} windows of {config.window.items} thoughts"
        + (f", {found.duration.shown()}" if found.duration else ""),
        *(f"warning: {line}" for line in found.warnings),
    ]
    model = model_needed(config.model.name)
    if not model.there:
        lines.append(f"still missing: {model.shown()}")
    lines.append(f"next: tfive train {path} --out {run}, then tfive export {run} out")
    return "\n".join(lines)
