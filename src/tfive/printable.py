"""Text of others (corpora, thoughts, file names, error messages) as it is shown: nothing in it can steer a terminal."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed; escape sequences begin with one
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that turn the direction of writing
    "\u2028\u2029\ufeff\ud800-\udfff]"  # separators that end a line, a byte order mark, halves of surrogate pairs
)


def printable(text: str) -> str:
    """The text with every control character written as `\\u001b`; in JSON this is the same text, escaped."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
