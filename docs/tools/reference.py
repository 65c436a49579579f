"""Writes the pages of docs/reference from the source: configuration keys, commands and the Python interface.

The other way round it writes `tfive/report/meanings.json`, which a run's page shows, from docs/howto/diagnostics.md.

    python docs/tools/reference.py            # write them (make reference)
    python docs/tools/reference.py --check    # exit status 1, naming the pages that differ from the source

The pages are committed, so that they can be read without a build, and `tests/test_docs.py` holds them up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from typer.main import get_command

import tfive
from tfive.cli.app import app
from tfive.config.config import Config
from tfive.config.layers import section_of, toml_item
from tfive.config.reading import readers
from tfive.report import meanings
from tfive.section import Section

FOLDER = Path(__file__).resolve().parents[1] / "reference"
DIAGNOSTICS = FOLDER.parent / "howto" / "diagnostics.md"
MEANINGS = Path(meanings.__file__).with_name(meanings.FILE)
NOTE = (
    "<!-- Written by docs/tools/reference.py from the source; change the docstring there, then run: make reference -->"
)

FURTHER = {
    "tfive.inference.results": ("Prediction", "Generation", "TextScores", "TokenScores", "Thought"),
    "tfive.methods.spec": ("MethodSpec",),
    "tfive.methods.registry": ("register",),
    "tfive.methods.method": ("Method", "Phase", "Kit"),
}
"""Module → names that the public ones return or take, shown after them."""

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


# ── configuration ──────────────────────────────────────────────────────────────────────────────────────────────────


def configuration_page() -> str:
    """Every key with its type, default and meaning, section by section, in the order of declaration."""
    keys = sum(len(list(leaves(model))) for _, model in sections())
    top = [(key, field) for key, field in Config.model_fields.items() if section_of(field) is None]
    parts = [
        "# Configuration keys",
        f"All {keys + len(top)} keys. Every one has a default and few are ever set; "
        "[how to configure](../howto/configure.md) tells where values come from and what is refused. "
        "`tfive config show nano --explain` prints the same text beside the values of a run, "
        "`tfive config show nano --method rlp` only the keys that one method reads.",
        table(top, ""),
    ]
    for name, model in sections():
        parts += [f"## {name}", paragraph(model.__doc__), read_by(name), table(leaves(model), f"{name}.")]
        for entry in entries(model):
            parts += [f"### One entry of {name}.{entry[0]}", paragraph(entry[1].__doc__), table(leaves(entry[1]), "")]
    return page(parts)


def read_by(name: str) -> str:
    """Which methods read a section, where not all do."""
    found = readers(name.split(".")[0])
    return "" if found is None else f"Read by {', '.join(f'`{method}`' for method in found)}."


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Dotted name and class of every section, inner ones after the one that holds them."""

    def below(model: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
        for key, field in model.model_fields.items():
            inner = section_of(field)
            if inner is not None:
                yield f"{prefix}{key}", inner
                yield from below(inner, f"{prefix}{key}.")

    return below(Config, "")


def leaves(model: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    """The keys of a section that hold a value themselves."""
    return ((key, field) for key, field in model.model_fields.items() if section_of(field) is None)


def entries(model: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """Keys of a section that are lists of tables or one optional table, with the class of a table."""
    for key, field in leaves(model):
        for inner in _sections_in(field.annotation):
            yield key, inner
            yield from ((f"{key}.{deeper}", found) for deeper, found in entries(inner))


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and not get_origin(annotation) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)


def table(fields: Any, prefix: str) -> str:
    """A Markdown table of these keys."""
    rows = [
        f"| `{prefix}{key}` | {kind(field)} | {default(field)} | {cell(field.description)} |" for key, field in fields
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]) if rows else ""


def kind(field: FieldInfo) -> str:
    """What may be given: the choices, or the type with its bounds."""
    bounds = [f"{sign} {value}" for name, sign in BOUNDS.items() for value in _bounds(field.metadata, name)]
    return cell(", ".join([type_name(field.annotation), *bounds]))


def _bounds(metadata: list[Any], name: str) -> Iterator[Any]:
    return (getattr(part, name) for part in metadata if getattr(part, name, None) is not None)


def type_name(annotation: Any) -> str:
    """An annotation in words: `"a" or "b"`, `integer or none`, `list of text`."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(inside[0])
    if origin is Literal:
        return " or ".join(f"`{toml_item(value).as_string()}`" for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(part) for part in inside)
    if origin in (tuple, list):
        return f"list of {type_name(inside[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "table"
    return {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "none"}[annotation]


def default(field: FieldInfo) -> str:
    """The default as TOML, `none` where the key is empty, – where it must be given."""
    if field.is_required():
        return "–"
    return "none" if field.default is None else f"`{cell(toml_item(field.default).as_string())}`"


# ── commands ───────────────────────────────────────────────────────────────────────────────────────────────────────


def commands_page() -> str:
    """Every command with its arguments, options and examples, as `--help` prints them."""
    parts = [
        "# Commands",
        "What `--help` prints, on one page; [the commands, one by one](../howto/commands.md) tells what they are for.",
        "Exit status: 0 done; 1 the work failed or was asked to stop, its state is saved; 2 bad input, one line that "
        "names the key or file, the value and the remedy, nothing written; 130 interrupted with nothing to save.",
    ]
    for path, command in commands(get_command(app), "tfive"):
        summary, _, examples = inspect.cleandoc(command.help or "").partition("\n\n\b\nExamples:\n")
        parts += [f"## {path}", paragraph(summary), options(command)]
        if examples:
            parts.append(f"```sh long\n{textwrap.dedent(examples)}\n```")
    return page(parts)


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its full name, in the order of declaration."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, further in inner.items():
        yield from commands(further, f"{path} {name}")


def options(command: Any) -> str:
    """A Markdown table of a command's arguments and options."""
    rows = []
    for parameter in command.params:
        if "--help" in parameter.opts:
            continue
        argument = parameter.param_type_name == "argument"
        # Versions of typer keep the type of a parameter in different places; what an example needs is a placeholder.
        placeholder = parameter.metavar or ("N" if isinstance(parameter.default, int | float) else "VALUE")
        value = "" if getattr(parameter, "is_flag", False) else f" {placeholder}"
        named = placeholder if argument else ", ".join(parameter.opts) + value
        shown = parameter.default
        given = "" if callable(shown) or shown in (None, False, (), []) else f"`{shown}`"
        rows.append(f"| `{cell(named)}` | {given} | {cell(parameter.help)} |")
    return "\n".join(["| argument or option | default | meaning |", "|---|---|---|", *rows]) if rows else ""


# ── Python interface ───────────────────────────────────────────────────────────────────────────────────────────────


def interface_page() -> str:
    """The public names of `tfive` and what they return, from their docstrings."""
    parts = [
        "# Python interface",
        "What `import tfive` offers, and what its functions return. Everything else may change without notice; "
        "[the algorithm](../explanation/algorithm.md) names the function behind each step.",
    ]
    for name in tfive.__all__:
        parts += described(f"tfive.{name}", getattr(tfive, name))
    for module, names in FURTHER.items():
        for name in names:
            parts += described(f"{module}.{name}", getattr(importlib.import_module(module), name))
    return page(parts)


def described(name: str, thing: Any) -> list[str]:
    """Heading, signature, docstring, fields and public methods of one function or class."""
    parts = [f"## {name}"]
    if not inspect.isclass(thing):
        return [*parts, signature(thing), docstring(thing)]
    if not issubclass(thing, Section | BaseException) and not dataclasses.is_dataclass(thing):
        parts.append(signature(thing.__init__, thing.__name__))
    parts += [docstring(thing), attributes(thing)]
    for key, member in vars(thing).items():
        found = member.__func__ if isinstance(member, classmethod) else member
        if key.startswith("_") or not getattr(found, "__doc__", None):
            continue
        if isinstance(found, property):
            parts += [f"**{key}** (property)", docstring(found)]
        elif inspect.isfunction(found):
            parts += [signature(found, f"{thing.__name__}.{key}"), docstring(found)]
    return parts


def signature(function: Any, name: str = "") -> str:
    """The call as a reader would write it, one parameter a line where it is long."""
    found = inspect.signature(function)
    shown = [str(parameter) for key, parameter in found.parameters.items() if key not in ("self", "cls")]
    marks = [parameter.kind for key, parameter in found.parameters.items() if key not in ("self", "cls")]
    if inspect.Parameter.KEYWORD_ONLY in marks and inspect.Parameter.VAR_POSITIONAL not in marks:
        shown.insert(marks.index(inspect.Parameter.KEYWORD_ONLY), "*")
    back = "" if name and "." not in name else f" -> {found.return_annotation}"
    shown = [re.sub(r"'([^']*)'", r"\1", part, count=1) if ": '" in part else part for part in shown]
    back = back.replace("'", "")
    line = f"{name or function.__name__}({', '.join(shown)}){back}"
    if len(line) > 100:
        line = f"{name or function.__name__}(\n" + "".join(f"    {part},\n" for part in shown) + f"){back}"
    return f"```text\n{line}\n```"


def docstring(thing: Any) -> str:
    """A docstring as Markdown; lines with a prompt become a block."""
    parts = inspect.cleandoc(thing.__doc__ or "").split("\n\n")
    return "\n\n".join(f"```text\n{part}\n```" if part.startswith(">>>") else " ".join(part.split()) for part in parts)


def attributes(thing: type) -> str:
    """A list of the documented fields a dataclass declares itself."""
    if not dataclasses.is_dataclass(thing):
        return ""
    body = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    assert isinstance(body, ast.ClassDef)
    rows = []
    for node, after in zip(body.body, [*body.body[1:], ast.Pass()]):
        if isinstance(node, ast.AnnAssign):
            said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            meaning = f": {' '.join(str(said).split())}" if said else ""
            rows.append(f"- `{ast.unparse(node.target)}` ({ast.unparse(node.annotation)}){meaning}")
    return "\n".join(rows)


# ── pages ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def paragraph(text: str | None) -> str:
    """Text of a docstring on one line."""
    return " ".join((text or "").split())


def cell(text: str | None) -> str:
    """Text that may stand in a table."""
    return paragraph(text).replace("|", "\\|")


def page(parts: list[str]) -> str:
    """A page of these parts; empty ones are left out."""
    heading, *rest = (part for part in parts if part)
    return "\n\n".join([heading, NOTE, *rest]) + "\n"


PAGES = {"configuration.md": configuration_page, "commands.md": commands_page, "api.md": interface_page}


def outdated(folder: Path = FOLDER) -> list[str]:
    """Names of the pages that are not what the source says now."""
    return [
        name
        for name, make in PAGES.items()
        if not (folder / name).is_file() or (folder / name).read_text("utf-8") != make()
    ]


def meanings_text() -> str:
    """What `tfive/report/meanings.json` should hold."""
    found = meanings.read_tables(DIAGNOSTICS.read_text("utf-8"))
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Write the pages, or with --check name those that differ; any other word is refused (status 2)."""
    unknown = [word for word in arguments if word != "--check"]
    if unknown:
        print(f"{unknown[0]}: give --check, or nothing to write the pages", file=sys.stderr)
        return 2
    names = outdated()
    same = MEANINGS.is_file() and MEANINGS.read_text("utf-8") == meanings_text()
    names += [] if same else [MEANINGS.name]
    if "--check" not in arguments:
        FOLDER.mkdir(exist_ok=True)
        MEANINGS.write_text(meanings_text(), encoding="utf-8")
        for name in names:
            if name in PAGES:
                (FOLDER / name).write_text(PAGES[name](), encoding="utf-8")
    print("\n".join(names) if names else "docs/reference is up to date")
    return 1 if names and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
