"""The configuration as a JSON schema of its TOML files, which editors read to show meanings and mark mistakes.

pydantic describes the model; a file differs from it in two ways: "no value" is the word `none`, because TOML has no
null, and it is only taken where a key of a section is written (inside a list of tables an entry is left out instead).
References are resolved and fixed tuples written in the style of draft 7, the newest that TOML editors read in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfive.config.config import Config
from tfive.config.layers import NONE
from tfive.methods.registry import methods

DRAFT = "http://json-schema.org/draft-07/schema#"

Node = dict[str, Any]


def json_schema() -> Node:
    """The schema of a whole configuration file, every key with its meaning, its default and what it may be."""
    described = Config.model_json_schema()
    described["properties"]["method"]["enum"] = list(methods())
    return {"$schema": DRAFT, "title": "tfive configuration", **_section(described, described["$defs"])}


def _section(node: Node, definitions: Mapping[str, Node]) -> Node:
    """A table of the file: tables inside it, and keys that may say `none` where they may be empty."""
    found = _value({**node, "properties": {}}, definitions)
    found.pop("$defs", None)
    for name, inner in node["properties"].items():
        if "$ref" in inner:
            found["properties"][name] = _section(_target(inner, definitions), definitions)
        else:
            found["properties"][name] = _value(inner, definitions, may_say_none=True)
    return found


def _target(node: Node, definitions: Mapping[str, Node]) -> Node:
    return definitions[node["$ref"].rpartition("/")[2]]


def _value(node: Node, definitions: Mapping[str, Node], may_say_none: bool = False) -> Node:
    """What may be written as a value, without references and without null."""
    if "$ref" in node:
        return _value({**_target(node, definitions), **{k: v for k, v in node.items() if k != "$ref"}}, definitions)
    found: Node = {}
    for keyword, content in node.items():
        match keyword:
            case "title":
                pass
            case "description":
                found[keyword] = " ".join(content.split())
            case "default":
                if content is not None or may_say_none:
                    found[keyword] = NONE if content is None else content
            case "properties":
                found[keyword] = {name: _value(inner, definitions) for name, inner in content.items()}
            case "prefixItems":
                found["items"] = [_value(inner, definitions) for inner in content]
            case "items":
                found[keyword] = _value(content, definitions)
            case "additionalProperties" if isinstance(content, dict):
                found[keyword] = _value(content, definitions)
            case "anyOf":
                kept = [_value(one, definitions) for one in content if one.get("type") != "null"]
                kept += [{"const": NONE}] if may_say_none and len(kept) < len(content) else []
                found |= kept[0] if len(kept) == 1 else {keyword: kept}
            case _:
                found[keyword] = content
    return found
