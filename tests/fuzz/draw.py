"""Hostile values, and damage to files that were whole: to their bytes, to a JSON document, to a TOML text."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

DEEP, DIGITS = "@deep@", "@digits@"
"""Stand for brackets nested 5,000 times and for a number of 5,000 digits, which Python itself would not write."""

words = st.sampled_from(
    ["", " ", "none", "nan", "inf", "t5", "auto", "cuda:99", "../../etc", "/", "~", "\0", "\ud800", "\x1b[2J",
     "<script>", "{question}", "{0.__class__}", "%s", "²", "٣", "A", "text", "x" * 300, DEEP, DIGITS]
)  # fmt: skip
numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**9, 10**23, 10**400]),
    st.integers(-10, 100),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")]),
    st.floats(width=32),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, words, st.text(max_size=12))
hostile = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(words, st.text(max_size=8)), inner, max_size=3)
    ),
    max_leaves=6,
)
"""A value that may stand anywhere in a document and belongs nowhere."""


def as_json(value: Any) -> bytes:
    """The document as bytes, the two placeholders written out."""
    text = json.dumps(value)
    for stand_in, written in ((DEEP, "[" * 5000 + "]" * 5000), (DIGITS, "9" * 5000)):
        text = text.replace(json.dumps(stand_in), written)
    return text.encode()


def as_toml(value: Any) -> str:
    """A value as TOML text; what TOML has no word for becomes text."""
    if value == DEEP:
        return "[" * 3000 + "]" * 3000
    if value == DIGITS:
        return "9" * 5000
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {as_toml(entry)}" for key, entry in value.items()) + "}"
    return json.dumps(value) if isinstance(value, str) else '"none"'


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes of a file after one to four accidents: flipped, cut, doubled, overwritten, lost."""
    for _ in range(draw(st.integers(1, 4))):
        size = max(len(content), 1)
        # Headers decide: half of all damage is done to the first bytes.
        at = draw(st.one_of(st.integers(0, min(size - 1, 300)), st.integers(0, size - 1)))
        match draw(st.sampled_from(["flip", "cut", "insert", "overwrite", "lose", "double", "empty"])):
            case "flip":
                flipped = bytearray(content or b"\0")
                flipped[at % len(flipped)] ^= 1 << draw(st.integers(0, 7))
                content = bytes(flipped)
            case "cut":
                content = content[:at]
            case "insert":
                content = content[:at] + draw(st.binary(max_size=9)) + content[at:]
            case "overwrite":
                written = draw(st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, b"\0" * 8])))
                content = content[:at] + written + content[at + len(written) :]
            case "lose":
                content = content[:at] + content[at + draw(st.integers(1, 64)) :]
            case "double":
                content = content[:at] + content[max(at - 64, 0) :]
            case _:
                content = draw(st.sampled_from([b"", b"\0", b"{}", b"[]", b"null", b"\xff\xfe", b"\xef\xbb\xbf{}"]))
    return content


@st.composite
def damaged_json(draw: st.DrawFn, document: Any) -> Any:
    """A document of which one to four entries, at any depth, were replaced, removed, renamed or doubled."""
    found = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 4))):
        if not isinstance(found, dict | list) or not found:
            return draw(hostile)
        place: Any = found
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = keys[draw(st.integers(0, len(keys) - 1))]
            inner = place[key]
            if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 3)) == 0:
                break
            place = inner
        match draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "alike"])):
            case "replace":
                place[key] = draw(hostile)
            case "remove":
                del place[key]
            case "rename" if isinstance(place, dict):
                place[draw(st.text(max_size=6))] = place.pop(key)
            case "alike" if isinstance(place[key], int | float) and not isinstance(place[key], bool):
                place[key] = draw(numbers)
            case _:
                place[key] = [place[key], place[key]]
    return found


@st.composite
def damaged_json_file(draw: st.DrawFn, content: bytes) -> bytes:
    """A JSON file with another document in it, or with damaged bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged_bytes(content))
    return as_json(draw(damaged_json(json.loads(content))))


@st.composite
def damaged_toml(draw: st.DrawFn, text: str) -> bytes:
    """A TOML file with other lines in it, or with damaged bytes."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1)) if lines else 0
        chosen = lines[at] if lines else ""
        key = chosen.partition("=")[0].strip() or "key"
        match draw(st.sampled_from(["value", "value", "value", "drop", "double", "table", "junk", "bytes"])):
            case "value":
                lines[at : at + 1] = [f"{key} = {as_toml(draw(hostile))}"]
            case "drop":
                del lines[at : at + 1]
            case "double":
                lines.insert(at, chosen)
            case "table":
                name = draw(st.text("abc.[]\"' ", max_size=8))
                lines.insert(
                    at, draw(st.sampled_from([f"[{name}]", f"[[{name}]]", f"{name} = {{}}", "a." * 3000 + "b=1"]))
                )
            case "junk":
                lines.insert(at, draw(st.text(max_size=20)))
            case _:
                return draw(damaged_bytes("\n".join(lines).encode("utf-8", "surrogatepass")))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


@st.composite
def damaged_safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    """Weights with another header (shapes, offsets, names) before the same bytes, or with damaged bytes."""
    if draw(st.booleans()):
        return draw(damaged_bytes(content))
    size = int.from_bytes(content[:8], "little")
    header = as_json(draw(damaged_json(json.loads(content[8 : 8 + size]))))
    said = draw(st.sampled_from([len(header), len(header), len(header), 2**62, 0, len(header) + 9]))
    return said.to_bytes(8, "little") + header + content[8 + size :]


def damaged_file(name: str) -> Callable[[bytes], st.SearchStrategy[bytes]]:
    """How a file of this name is damaged: by what it holds."""
    if name.endswith(".json"):
        return damaged_json_file
    if name.endswith(".toml"):
        return lambda content: damaged_toml(content.decode())
    return damaged_safetensors if name.endswith(".safetensors") else damaged_bytes
