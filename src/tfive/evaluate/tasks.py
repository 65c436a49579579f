"""Benchmarks: what each one is, where its items come from, and the frozen manifest they must match.

A task is one TOML declaration (the shipped ones lie in `data/evaluate/tasks/`) plus a file of items; a declaration
beside the items in the user's own folder adds a task. Items themselves are never shipped. The manifest part of a
declaration is its count and `sha256`: a digest over normalised items that depends on neither their order nor their ids,
so a local file and a hub dataset that hold the same items agree.
"""

from __future__ import annotations

import hashlib
import json
import string
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from tfive.errors import UserError
from tfive.extras import install_hint
from tfive.section import Section
from tfive.text.formats import raw_rows

DECLARATION = ".task.toml"
"""How the name of a user's declaration ends; it stands beside the file of items."""

LETTERS = string.ascii_uppercase
State = Literal["frozen", "unfrozen"]


@dataclass(frozen=True)
class Item:
    """One question with its gold answer: a string, or the letter of the right option for choices."""

    id: str
    question: str
    answer: str
    choices: tuple[str, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict)


class Fields(Section):
    """Which fields of a row make up an item. A dot looks inside a field; several names make a list."""

    id: str = "id"
    """Name of the item; where a row has none, the task's name and the row's number."""
    question: str = "question"
    """The question."""
    choices: str | tuple[str, ...] = "choices"
    """The list of options, or one field for each of them."""
    labels: str | None = None
    """What the options are called in `answer`, where that is neither a number from 0 nor a letter from A."""
    answer: str | int = "answer"
    """Field of the gold answer; a number says that it is always this option."""
    answer_after: str | None = None
    """The gold answer is what stands after the last of these marks."""
    shuffle: bool = False
    """Put the options in an order that a digest decides (for data whose right option is always the first)."""


class HubSource(Section):
    """Where a task's items lie on the Hugging Face hub."""

    path: str
    """Dataset id."""
    config: str | None = None
    """Configuration of the dataset."""
    split: str = "test"
    """Split of the dataset."""
    revision: str | None = None
    """Commit, tag or branch; none means the newest."""
    gated: bool = False
    """Whether the dataset asks for its terms to be accepted first."""
    fields: Fields = Fields()
    """Which fields make up an item."""


class Task(Section):
    """One benchmark: its items, its frozen manifest, and how a model is asked."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """What the task is called."""
    title: str = ""
    """What people call the benchmark."""
    kind: Literal["math", "choice", "text"]
    """Whether an answer is a mathematical object, one of several options, or a few words."""
    count: int | None = Field(None, ge=1)
    """Exact number of items; a task of kind text may leave it open where releases differ."""
    file: str
    """Name of the local file of items."""
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """Digest over the normalised items; none means that the task is not frozen."""
    source: str = ""
    """Where the frozen items were read, with revision and licence."""
    needs: str = ""
    """What a user must bring where nothing is shipped and nothing can be fetched; shown when the file is missing."""
    fields: Fields = Fields()
    """Which fields of a local row make up an item."""
    hub: HubSource | None = None
    """Where the items lie on the hub."""
    prompt: str
    """Version of the prompt: a name of `evaluate.prompts.STYLES`."""
    demonstrations: str | None = None
    """Pool of demonstrations in `data/evaluate/demonstrations.json`; none means no examples before the question."""
    stop: tuple[str, ...] = ()
    """Strings at which generation ends."""
    max_new_tokens: int = Field(2048, ge=1)
    """Longest output in tokens."""
    samples: int = Field(1, ge=1)
    """Outputs per item."""
    temperature: float = Field(0.0, ge=0)
    """Temperature of sampling; 0 takes the likeliest token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Mass of the nucleus tokens are sampled from."""
    context: str | None = None
    """What precedes an option when options are compared by log-likelihood: {question}, {options}, {subject}."""
    continuation: Literal["text", "letter"] = "letter"
    """What is compared: the option's text or its letter."""

    @model_validator(mode="after")
    def _consistent(self) -> Task:
        if self.kind == "choice" and self.context is None:
            raise ValueError("a choice task needs context, which precedes an option in log-likelihood")
        if self.count is None and (self.kind != "text" or self.sha256):
            raise ValueError("count is missing; only a task of kind text that is not frozen may leave it open")
        return self

    @property
    def state(self) -> State:
        """Whether a manifest fixes the items."""
        return "frozen" if self.sha256 else "unfrozen"


@dataclass(frozen=True)
class Items:
    """The items of a task, where they were read, and whether they are those of the manifest."""

    task: Task
    items: tuple[Item, ...]
    sha256: str
    source: str
    state: State

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __getitem__(self, number: int) -> Item:
        return self.items[number]


def declared(text: str, origin: str) -> Task:
    """The task of a TOML declaration."""
    try:
        return Task(**tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{origin}: not TOML ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "declaration"
        raise UserError(f"{origin}: {key}: {first['msg']}") from error


def _shipped() -> Mapping[str, Task]:
    folder = files("tfive") / "data" / "evaluate" / "tasks"
    paths = sorted((path for path in folder.iterdir() if path.name.endswith(".toml")), key=lambda path: path.name)
    tasks = [declared(path.read_text("utf-8"), path.name) for path in paths]
    return MappingProxyType({task.name: task for task in tasks})


TASKS: Mapping[str, Task] = _shipped()
"""Every shipped task by name."""

PRIMARY = ("aime2025", "aime2026", "gsm8k", "math500", "csqa", "piqa", "arc_challenge")
"""The paper's suite, in the order of its table `tab:evaluation-suite`."""

EARLIER = ("math500", "gsm8k", "amc23", "minerva_math", "mmlu", "mmlu_pro", "gpqa_diamond")
"""Those of the paper's earlier comparison, `tab:preliminary-benchmarks`."""

SUPPLEMENTARY = ("hmmt_feb_2025", "simpleqa_verified", "livebench_reasoning", "hle")
"""The diagnostics of `tab:supplementary-evaluation`: declared, with items that users bring."""

SUITES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"primary": PRIMARY, "earlier": EARLIER, "supplementary": SUPPLEMENTARY}
)


def find_tasks(names: Iterable[str], folder: Path | None = None) -> list[Task]:
    """The tasks of these names, suites and declarations in `folder`, in the order given and each once."""
    found: dict[str, Task] = {}
    for name in names:
        if name in SUITES:
            found |= {member: TASKS[member] for member in SUITES[name]}
        elif name in TASKS:
            found[name] = TASKS[name]
        else:
            found[name] = _own_task(name, folder)
    return list(found.values())


def _own_task(name: str, folder: Path | None) -> Task:
    path = folder / f"{name}{DECLARATION}" if folder else None
    if path is None or not path.is_file():
        known = ", ".join((*SUITES, *TASKS))
        where = f" and {path} does not exist" if path else ""
        raise UserError(f"task {name!r}: not known{where}; known are {known}")
    return declared(path.read_text("utf-8"), str(path))


def load_items(task: Task, folder: Path | None, *, frozen: bool = True) -> Items:
    """The task's items from `folder`, or from the hub without one; they must be those of the manifest.

    A wrong count is always refused. With `frozen` false a wrong digest is accepted and recorded as `unfrozen`.
    """
    rows: Iterable[tuple[int, dict[str, Any]]]
    if folder is not None:
        path = local_file(task, folder)
        source, fields = str(path), task.fields
        rows = ((number, _json_row(path, number, raw)) for number, raw in raw_rows(path, ()))
    elif task.hub is not None:
        source, fields = f"{task.hub.path}@{task.hub.revision or 'main'}", task.hub.fields
        rows = enumerate(_hub_rows(task, task.hub))
    else:
        needed = f", {task.needs}" if task.needs else ""
        raise UserError(f"task {task.name}: is not on the hub; give the folder that holds {task.file}{needed}")
    items = tuple(_item(task, fields, number, row, source) for number, row in rows)
    if task.count not in (None, len(items)):
        raise UserError(f"{source}: {len(items)} items, {task.name} has {task.count}; fetch the whole file again")
    twice = next((name for name, count in Counter(item.id for item in items).items() if count > 1), None)
    if twice is not None:
        raise UserError(
            f"{source}: two items have the id {twice!r}, so their answers could not be told apart; rename one, or name "
            f"another field as fields.id (task {task.name})"
        )
    digest = digest_of(items)
    if frozen and task.sha256 not in (None, digest):
        raise UserError(
            f"{source}: items have sha256 {digest}, the manifest of {task.name} says {task.sha256}; "
            "these are not the frozen items"
        )
    return Items(task, items, digest, source, "frozen" if task.sha256 == digest else "unfrozen")


def local_file(task: Task, folder: Path) -> Path:
    """The task's file in `folder`, compressed or not."""
    plain = task.file.removesuffix(".gz").removesuffix(".zst")
    for name in (task.file, plain, f"{plain}.gz", f"{plain}.zst"):
        if (folder / name).is_file():
            return folder / name
    needed = f" ({task.needs})" if task.needs else ""
    raise UserError(
        f"{folder / task.file}: no such file (task {task.name}); put it there{needed}, or name another folder"
    )


def digest_of(items: Iterable[Item]) -> str:
    """sha256 over the sorted digests of items, each normalised: composed Unicode, single spaces, no id."""
    lines = [json.dumps([_plain(item.question), [_plain(c) for c in item.choices], item.answer]) for item in items]
    digests = sorted(hashlib.sha256(line.encode()).hexdigest() for line in lines)
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _json_row(path: Path, number: int, raw: Any) -> dict[str, Any]:
    if isinstance(raw, dict):
        return raw
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: row {number + 1} is not JSON; mend or fetch the file again") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}: row {number + 1} is not a JSON object")
    return row


def _hub_rows(task: Task, hub: HubSource) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"task {task.name}: without a folder its items come from the hub, which needs a package: "
            f"{install_hint('hub')}"
        ) from error
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            hub.path, hub.config, split=hub.split, revision=hub.revision
        )
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        gated = "; it is gated: accept its terms on the hub and log in" if hub.gated else ""
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"task {task.name}: {hub.path} cannot be read from the hub ({reason}){gated}") from error
    return rows


def _item(task: Task, fields: Fields, number: int, row: dict[str, Any], source: str) -> Item:
    def at(key: str) -> Any:
        value: Any = row
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                raise UserError(f"{source}: row {number + 1} has no field {key!r} (task {task.name})")
            value = value[part]
        return value

    question = at(fields.question)
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{source}: row {number + 1} has no text in field {fields.question!r} (task {task.name})")
    name = str(row.get(fields.id) or f"{task.name}-{number}")
    gold = at(fields.answer) if isinstance(fields.answer, str) else fields.answer
    extra: dict[str, str] = {key: str(row[key]) for key in ("subject", "level", "category") if key in row}
    if task.kind != "choice":
        answer = str(gold).split(fields.answer_after)[-1] if fields.answer_after else str(gold)
        if fields.answer_after:
            answer = answer.replace(",", "")
        return Item(name, question, answer.strip(), (), extra)
    listed = at(fields.choices) if isinstance(fields.choices, str) else [at(key) for key in fields.choices]
    choices = [str(choice) for choice in listed]
    right = _option(gold, len(choices), at(fields.labels) if fields.labels else None)
    if right is None:
        raise UserError(f"{source}: row {number + 1} has answer {gold!r} and {len(choices)} options (task {task.name})")
    if fields.shuffle:
        order = sorted(range(len(choices)), key=lambda n: hashlib.sha256(f"{question}\0{choices[n]}".encode()).digest())
        choices, right = [choices[n] for n in order], order.index(right)
    return Item(name, question, LETTERS[right], tuple(choices), extra)


def _option(gold: Any, count: int, labels: list[str] | None) -> int | None:
    """Number of the right option, None where it is not among them."""
    if labels is not None:
        right = labels.index(gold) if gold in labels else -1
    elif isinstance(gold, str) and not gold.isdigit():
        right = LETTERS.find(gold.strip().upper()) if len(gold.strip()) == 1 else -1
    else:
        right = int(gold)
    return right if 0 <= right < count <= len(LETTERS) else None
