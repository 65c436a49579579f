"""The one written form of an answer that exact match compares."""

from __future__ import annotations


def normalised(answer: str) -> str:
    """The answer without white space; deepened below."""
    return "".join(answer.split()).rstrip(".")
