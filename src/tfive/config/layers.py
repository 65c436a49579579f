"""Layered TOML for a tree of sections: read, merge left to right, remember where each value came from, write back.

A *leaf* is a dotted key whose value is not itself a section (`thought.length`). Tables merge down to the leaves; a leaf
is replaced whole. Nothing here knows which sections there are.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import tomlkit
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from tomlkit.items import Item

from tfive.errors import UserError
from tfive.section import Section

NONE = "none"
"""How a file or `--set` writes "no value"; TOML has no null."""

LONGEST_KEY = 100
"""Characters of a key that are compared with the valid ones: likeness takes quadratic time."""

LONGEST_LINE = 1_000
"""Characters of a line in which a key is looked for, to say where it was written."""


@dataclass(frozen=True)
class Leaf:
    """One value and where it came from (`default`, `preset nano`, `my.toml:12`, `--set`)."""

    value: Any
    origin: str


Layer = Mapping[str, Leaf]
"""Dotted key → leaf."""


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class of a field that is a whole section, else None."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def leaf_fields(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every dotted key of `model` in declaration order, with its field."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        inner = section_of(field)
        found |= leaf_fields(inner, f"{prefix}{name}.") if inner else {f"{prefix}{name}": field}
    return found


CLOSE = 0.62
"""Likeness from which on a name may be meant: a slip of a few letters passes, another word does not."""


def nearest(key: str, valid: Iterable[str]) -> list[str]:
    """The valid keys that `key` may have been meant for, the most alike first, three at most; none if no key is close.

    The whole dotted name counts, and so does its last part alone.
    """
    key = key[:LONGEST_KEY]

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        last = difflib.SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.95 * last)

    found = {candidate: likeness(candidate) for candidate in valid}
    best = max(found.values(), default=0.0)
    close = sorted((key for key in found if found[key] >= max(CLOSE, best - 0.005)), key=lambda one: -found[one])
    return close[:3]


def meant(key: str, valid: Iterable[str], otherwise: str) -> str:
    """`did you mean a or b?`, or `otherwise` where nothing is close."""
    *others, last = nearest(key, valid) or [""]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else otherwise


def unknown_key(key: str, origin: str, valid: Iterable[str], former: Mapping[str, str]) -> UserError:
    """The refusal of a key that does not exist; for one that once did, with what became of it."""
    if key in former:
        return UserError(f"{key} ({origin}): {former[key]}")
    return UserError(
        f"{_short(key)} ({origin}): no such key; {meant(key, valid, 'tfive config show --explain lists all')}"
    )


def flatten(
    table: Mapping[str, Any], model: type[Section], origin_of: Mapping[str, str], default: str
) -> dict[str, Leaf]:
    """Leaves of a parsed TOML document; a key that `model` does not declare is refused by name."""
    everything = leaf_fields(model)
    leaves: dict[str, Leaf] = {}

    def walk(part: Mapping[str, Any], within: type[BaseModel], prefix: str) -> None:
        for name, value in part.items():
            key = f"{prefix}{name}"
            origin = origin_of.get(key, default)
            field = within.model_fields.get(name)
            if field is None:
                full = _full_name(key, value)
                raise unknown_key(full, origin_of.get(full, origin), everything, model.former_keys)
            inner = section_of(field)
            if inner is None:
                leaves[key] = Leaf(_null(value, field), origin)
            elif isinstance(value, Mapping):
                walk(value, inner, f"{key}.")
            else:
                first = next(iter(inner.model_fields))
                raise UserError(
                    f"{key} = {_short(repr(value))} ({origin}): a section; write a key of it, such as {key}.{first}"
                )

    walk(table, model, "")
    return leaves


def _full_name(key: str, value: Any) -> str:
    """The first leaf below an unknown table, so that the whole name is compared with the valid ones."""
    while isinstance(value, Mapping) and value and len(key) <= LONGEST_KEY:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _null(value: Any, field: FieldInfo) -> Any:
    """None for the word `none` where the field may be empty and does not itself use that word."""
    members = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    return None if value == NONE and NoneType in members and NONE not in words else value


_HEADER = re.compile(r"^\s*\[{1,2}\s*(?P<name>[^\[\]]+?)\s*\]{1,2}\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"^\s*(?P<name>[A-Za-z0-9_.\-\"']+)\s*=")


MOST_PARTS = 64
_TOWER = re.compile(
    rf"""(?<![\w"'-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{MOST_PARTS}}}"""
)  # Python's parser takes a time that grows with the square of the parts of one key: a file of 60 kB, a minute.


def key_lines(text: str) -> dict[str, int]:
    """Line number (from 1) at which each dotted key of a TOML text is first written."""
    found: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if len(line) > LONGEST_LINE:
            continue
        if header := _HEADER.match(line):
            table = re.sub(r"[\s\"']", "", header["name"])
            found.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            name = re.sub(r"[\s\"']", "", assignment["name"])
            found.setdefault(f"{table}.{name}" if table else name, number)
    return found


def read_toml(text: str, model: type[Section], name: str, by_line: bool) -> dict[str, Leaf]:
    """Leaves of a TOML text called `name` in messages; `by_line` adds the line to each origin."""
    table = _parsed(text, name)
    lines = {key: f"{name}:{line}" for key, line in key_lines(text).items()} if by_line else {}
    return flatten(table, model, lines, name)


def _parsed(text: str, name: str) -> dict[str, Any]:
    """The tables of a TOML text; whatever the parser cannot take is one line."""
    if _TOWER.search(text):
        raise UserError(f"{name}: a name of more than {MOST_PARTS} parts with dots between them; write a shorter one")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise UserError(f"{name}: brackets nested too deeply to be read; write fewer inside each other") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name}: not valid TOML: {_short(str(error), 200)}; fix the line and try again") from error
    except ValueError as error:  # a whole number of thousands of digits
        raise UserError(f"{name}: not valid TOML: {_short(str(error), 200)}; write a shorter number") from error


def read_file(path: Path, model: type[Section]) -> dict[str, Leaf]:
    """Leaves of a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a UTF-8 text file; give a TOML file") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a readable TOML file or the name of a preset") from error
    return read_toml(text, model, str(path), by_line=True)


def top_level_value(path: Path, key: str) -> Any:
    """What a TOML file says of one of its topmost keys, None if nothing or if it cannot be read."""
    try:
        return _parsed(path.read_text(encoding="utf-8"), str(path)).get(key)
    except (OSError, ValueError, UserError):
        return None


def read_override(argument: str, model: type[Section]) -> dict[str, Leaf]:
    """The leaf of one `--set key=value`: the value in TOML syntax, or a bare word taken as a string."""
    before, equals, after = argument.partition("=")
    key, raw = before.strip(), after.strip()
    shown = _short(argument)
    if not (key and equals and raw):
        raise UserError(f"--set {shown}: write KEY=VALUE, for example --set thought.length=8")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except RecursionError as error:
        raise UserError(f"--set {shown}: brackets nested too deeply to be read; write fewer") from error
    except ValueError as error:
        if raw[0] in "[{\"'" or "\n" in raw or not isinstance(error, tomllib.TOMLDecodeError):
            reason = _short(str(error), 200)
            raise UserError(f"--set {shown}: {_short(raw)} is not a TOML value: {reason}") from error
        if after != raw and before == before.rstrip():
            # `key = word` is a way to write it; `key= word` may mean a word that begins with a space.
            quoted = f"{key}={json.dumps(after, ensure_ascii=False)}"
            raise UserError(
                f"--set {shown}: quote a text that begins or ends with a space: {_short(quoted)}"
            ) from error
        value = raw
    fields = leaf_fields(model)
    if key in fields:
        return {key: Leaf(_null(value, fields[key]), "--set")}
    parent = next((leaf for leaf in fields if key.startswith(f"{leaf}.")), None)
    if parent is not None:
        raise UserError(f"--set {shown}: {parent} is one value; set it whole, for example in a TOML file")
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return flatten(nested, model, {}, "--set")


def merge(layers: Iterable[Layer]) -> dict[str, Leaf]:
    """Later layers win, leaf by leaf."""
    merged: dict[str, Leaf] = {}
    for layer in layers:
        merged |= layer
    return merged


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys → nested tables."""
    document: dict[str, Any] = {}
    for key, value in leaves.items():
        *path, last = key.split(".")
        table = document
        for part in path:
            table = table.setdefault(part, {})
        table[last] = value
    return document


def explain(error: ValidationError, leaves: Layer, model: type[BaseModel]) -> list[str]:
    """One line per refused value: the key, the value, where it was written, what is expected."""
    fields = leaf_fields(model)
    lines = []
    for problem in error.errors():
        where = [str(part) for part in problem["loc"]]
        message = _short(problem["msg"].removeprefix("Value error, ").replace("Input should", "should"), 300)
        key = next((k for n in range(len(where), 0, -1) if (k := ".".join(where[:n])) in fields), None)
        if key is None:
            lines.append(f"{_short('.'.join(where))}: {message}")
            continue
        if problem["type"] == "extra_forbidden":
            message = f"no such key; {_siblings(fields[key], where[-1])}"
        shown = json.dumps(problem["input"], default=str, ensure_ascii=False)
        origin = leaves[key].origin if key in leaves else "default"
        meaning = fields[key].description
        about = f" ({_first(meaning)})" if meaning else ""
        lines.append(f"{_short('.'.join(where))} = {_short(shown)} ({origin}): {message}{about}")
    return lines


def _siblings(field: FieldInfo, name: str) -> str:
    def sections(annotation: Any) -> Iterable[type[BaseModel]]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        for inner in get_args(annotation):
            yield from sections(inner)

    valid = [key for model in sections(field.annotation) for key in model.model_fields]
    return meant(name, valid, f"it has {', '.join(valid)}" if valid else "remove it")


def _first(text: str) -> str:
    return re.split(r"(?<=[.;])\s", " ".join(text.split()))[0].rstrip(".;")


def _short(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def as_json(leaves: Layer) -> str:
    """The merged leaves as JSON, which pydantic reads strictly: arrays become tuples, strings do not become numbers."""
    try:
        return json.dumps(nest({key: leaf.value for key, leaf in leaves.items()}), default=str)
    except RecursionError as error:
        raise UserError("a value holds tables nested too deeply to be read; write fewer inside each other") from error


def toml_item(value: Any) -> Item:
    """One value as a tomlkit item on one line: None as the word `none`, tables inline and without empty entries."""
    if value is None:
        return tomlkit.item(NONE)
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        for name, entry in value.items():
            if entry is not None:
                table.append(str(name), toml_item(entry))
        return table
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(toml_item(entry) for entry in value)
        return array
    return tomlkit.item(value)


def to_toml(leaves: Layer, comments: bool = True, meanings: Mapping[str, str] | None = None) -> str:
    """A TOML document of all leaves, each with its origin as a comment; reading it back gives the same values.

    A key in `meanings` gets that text as comment lines above it.
    """
    sections: dict[str, dict[str, Leaf]] = {}
    for key, leaf in leaves.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = leaf
    document = tomlkit.document()
    for section in sorted(sections, key=bool):
        table: Any = document
        for part in section.split(".") if section else ():
            if part not in table:
                table.append(part, tomlkit.table())
            table = table[part]
        items = {name: toml_item(leaf.value) for name, leaf in sections[section].items()}
        widths = {name: len(f"{name} = {item.as_string()}") for name, item in items.items()}
        column = max((width for width in widths.values() if width <= 48), default=0)
        for name, item in items.items():
            meaning = (meanings or {}).get(f"{section}.{name}" if section else name, "")
            for line in textwrap.wrap(meaning, 110):
                table.add(tomlkit.comment(line))
            if comments:
                item.comment(sections[section][name].origin)
                item.trivia.comment_ws = " " * (max(column - widths[name], 0) + 2)
            table.append(name, item)
    return tomlkit.dumps(document)
