"""Files of an evaluation: `run.json` with the settings, and one JSON line per answer.

Lines are appended as answers come, so a stopped run resumes where it was. A folder belongs to one set of settings;
`run.json` records it, and a run with other settings is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tfive.errors import UserError

RUN = "run.json"
SCORES = "scores.json"
GENERATED, OPTIONS = "generated", "options"
"""Kinds of answers: written by the model, or options compared by log-likelihood."""


def write_text(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, "utf-8")
    os.replace(beside, path)


def answers_file(folder: Path, task: str, kind: str) -> Path:
    """Where the answers of one task lie."""
    return folder / f"{task}.{kind}.jsonl"


class Answers:
    """The answers of one task and kind: those of an earlier run, and the new ones as they are added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: list[dict[str, Any]] = list(read_answers(path)) if path.is_file() else []
        self._file: IO[str] | None = None

    def __enter__(self) -> Answers:
        if self.path.is_file():
            # Drop a last line that was cut off when its process ended, before new ones are appended.
            write_text(self.path, "".join(_line(record) for record in self.known))
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def add(self, record: dict[str, Any]) -> None:
        """Append an answer and flush it to disk."""
        if self._file is None:
            raise ValueError("answers are added inside a with block")
        self._file.write(_line(record))
        self._file.flush()
        self.known.append(record)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def read_answers(path: Path) -> Iterator[dict[str, Any]]:
    """The answers of a file, without a last line that was cut off."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); name a folder that tfive eval wrote") from error
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines) - 1:
                return
            raise UserError(f"{path}: line {number + 1} is not JSON; remove the file to ask again") from error
        if not isinstance(record, dict) or "id" not in record:
            raise UserError(f"{path}: line {number + 1} is no answer; remove the file to ask again")
        yield record


def open_folder(folder: Path, asked: dict[str, Any]) -> None:
    """Create the folder of a run, or resume in it when its settings are the same."""
    path = folder / RUN
    if path.is_file():
        found = read_run(folder)
        for key, value in _flat(asked):
            before = dict(_flat(found)).get(key)
            if before != value:
                raise UserError(f"{folder}: was asked with {key} = {before!r}, now it is {value!r}; use another --out")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} already exists and holds no evaluation; use another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(asked, indent=1, ensure_ascii=False) + "\n")


def _flat(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, content


def read_run(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings of a run, from `run.json`."""
    return _read(Path(folder) / RUN, "no evaluation here")


def read_scores(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The scores of a finished run."""
    return _read(Path(folder) / SCORES, "no finished evaluation here")


def _read(path: Path, missing: str) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path.parent}: {missing} ({path.name} is missing); name a folder that tfive eval wrote")
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); run the evaluation again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no evaluation; run it again")
    return content
