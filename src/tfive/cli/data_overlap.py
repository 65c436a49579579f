"""What `tfive data overlap` does: benchmark items in a corpus, as a report."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.evaluate.overlap import Report, survey
from tfive.telemetry import Telemetry
from tfive.text.corpus import source_files
from tfive.text.settings import Source
from tfive.text.sources import Reader
from tfive.training.corpus import benchmark_index, cache_folder
from tfive.training.recorder import Recorder

LISTED = 20
"""Matches the text report shows; `--json` has more."""


def overlap(
    corpora: Sequence[str],
    tasks: Sequence[str],
    data: Path | None,
    fields: Sequence[str],
    overrides: Sequence[str],
    *,
    as_json: bool = False,
    quiet: bool = False,
) -> str:
    """The overlap of corpora (files, folders, or the sources of a configuration) with tasks; returns what to print."""
    config, sources = _sources(corpora, fields, overrides)
    index = benchmark_index(tasks, data)
    reader = Reader(skip_bad=config.text.bad_rows == "skip")
    with Recorder(quiet=quiet or as_json) as recorder:
        report = survey(index, _documents(sources, reader, cache_folder(config), recorder))
    return json.dumps(report.plain(), indent=1, ensure_ascii=False) if as_json else rendered(report)


TEXT = (".txt", ".md", ".json", ".jsonl", ".csv", ".parquet", ".gz", ".zst", ".xz", ".bz2")
"""Endings of a name that is meant as a file and not as a preset."""


def _sources(corpora: Sequence[str], fields: Sequence[str], overrides: Sequence[str]) -> tuple[Config, list[Source]]:
    """Files and folders as sources of their own, presets and TOML files by the sources they name."""
    paths = [
        Path(name).expanduser() for name in corpora if not name.endswith(".toml") and Path(name).expanduser().exists()
    ]
    layers = [name for name in corpora if Path(name).expanduser() not in paths]
    for name in layers:
        if not name.endswith(".toml") and ("/" in name or Path(name).suffix in TEXT):
            raise UserError(f"{name}: no such file or folder; check the path")
    config = Config.load(*layers, overrides=overrides)
    sources = [Source(name=_name(path), path=str(path), fields=tuple(fields)) for path in paths]
    sources += config.text.sources if layers else ()
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise UserError(f"corpora {', '.join(names)}: two have the same name; look at them one after the other")
    return config, sources


def _name(path: Path) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", re.sub(r"\.(jsonl|txt|parquet)(\.gz|\.zst)?$", "", path.name))
    return plain.lstrip("._-") or "corpus"


def _documents(
    sources: Sequence[Source], reader: Reader, cache: Path, telemetry: Telemetry
) -> Iterator[tuple[str, int, str]]:
    for source in sources:
        files, _ = source_files(source, cache, telemetry, skip_bad=reader.skip_bad)
        for file in files:
            label = f"reading {source.name}: {file.name}"
            for row, text in telemetry.progress(reader.documents(file), label):
                yield source.name, row, text


def rendered(report: Report) -> str:
    """The report for people."""
    table = Table(box=None, pad_edge=False)
    table.add_column("task", no_wrap=True)
    for title in ("items", "too short", "found", "documents"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, task in report.tasks.items():
        table.add_row(name, *(f"{n:,}" for n in (task.items, task.unchecked, task.found, task.documents)))
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
    lines += ["", f"rule: {report.rule}"]
    lines += [
        f"{name}: {report.overlapping[name]:,} of {n:,} documents overlap" for name, n in report.documents.items()
    ]
    for match in report.matches[:LISTED]:
        lines.append("{source} row {row}: {task} {item}, {runs} of {of} runs".format(**match))
    hidden = len(report.matches) + report.more - LISTED
    return "\n".join([*lines, f"and {hidden:,} more"] if hidden > 0 else lines)
