"""Texts with the working that belongs at some of their positions: what a perfect thought would say there.

A row either brings its workings (a list in its field `workings`, one for each match of the pattern, null where there is
none; each as it would stand between a thought's delimiters), or its text holds them: then the pattern has a group
named `working`, which is cut out of the text, and the thought stands in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tfive.errors import UserError
from tfive.text.formats import raw_rows
from tfive.tree.layout import TextBatch

FIELD = "workings"
"""Field of a row that holds its workings."""

TOKENS = "tokens"
"""Field of a row that says how many tokens its text has in the vocabulary it was made for."""

GROUP = "working"
"""Group of a pattern that is cut out of the text."""


@dataclass(frozen=True)
class WorkedText:
    """The tokens of one text, the positions of its thoughts, and the working that belongs at each."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    workings: tuple[tuple[int, ...] | None, ...]
    source: str
    cut: bool = False
    """Whether the text goes on behind its tokens."""
    foreign: bool = False
    """Whether the row says another number of tokens, those of another vocabulary."""


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """The pattern, or one line that says what is wrong with it."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{where} {pattern!r}: not a regular expression ({error})") from error


def worked_texts(
    path: Path, tokenizer: Any, pattern: re.Pattern[str], *, length: int, per_text: int
) -> Iterator[WorkedText]:
    """The texts of a file, cut at `length` tokens, with their first `per_text` positions that have a working.

    A position counts if a match ends where a token ends and text follows; texts without one are passed over.
    """
    for number, raw in raw_rows(path, ("text", FIELD)):
        row = _row(raw, path, number)
        text, places, workings = _split(row, pattern, path, number)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        whole = [int(token) for token in encoded["input_ids"]]
        ids, cut, foreign = whole[:length], len(whole) > length, row.get(TOKENS, len(whole)) != len(whole)
        ends = {int(end): index for index, (_, end) in enumerate(encoded["offset_mapping"][:length])}
        found = [
            (ends[place], tuple(int(i) for i in tokenizer.encode(working, add_special_tokens=False)))
            for place, working in zip(places, workings)
            if working is not None and ends.get(place, len(ids)) < len(ids) - 1
        ][:per_text]
        if found:
            at, written = tuple(one for one, _ in found), tuple(one for _, one in found)
            yield WorkedText(tuple(ids), at, written, path.name, cut, foreign)


def _row(raw: Any, path: Path, number: int) -> dict[str, Any]:
    try:
        row = raw if isinstance(raw, dict) else json.loads(raw)
        if not isinstance(row, dict):
            row = {"text": raw.decode()}
    except ValueError:
        row = {"text": raw.decode("utf-8", "replace")}
    if not isinstance(row.get("text"), str):
        raise UserError(f"{path}, row {number + 1}: no field text; give rows with text and {FIELD}")
    return row


def _split(
    row: dict[str, Any], pattern: re.Pattern[str], path: Path, number: int
) -> tuple[str, list[int], list[str | None]]:
    """The text without its workings, where each stood (in characters), and the workings."""
    text: str = row["text"]
    matches = list(pattern.finditer(text))
    if FIELD in row:
        workings = row[FIELD]
        if not isinstance(workings, list) or len(workings) != len(matches):
            count = len(workings) if isinstance(workings, list) else "no list"
            raise UserError(
                f"{path}, row {number + 1}: {FIELD} has {count}, the pattern has {len(matches)} matches; give one each"
            )
        return text, [match.end() for match in matches], workings
    if GROUP not in pattern.groupindex:
        return text, [], []
    kept, places, workings, done = "", [], [], 0
    for match in matches:
        kept += text[done : match.start(GROUP)]
        places.append(len(kept))
        workings.append(match[GROUP])
        done = match.end(GROUP)
    return kept + text[done:], places, workings


def enough_for(sizes: Sequence[int]) -> int:
    """The tokens of a thought that hold nine of ten workings of these sizes."""
    return sorted(sizes)[max(-(-9 * len(sizes) // 10) - 1, 0)] if sizes else 0


def batched(texts: Sequence[WorkedText]) -> TextBatch:
    """The texts as one batch, padded at the end, items numbered row by row."""
    width, most = max(len(one.tokens) for one in texts), max(len(one.positions) for one in texts)
    tokens_BS = torch.tensor([[*one.tokens, *[0] * (width - len(one.tokens))] for one in texts])
    document_BS = torch.tensor([[0] * len(one.tokens) + [-1] * (width - len(one.tokens)) for one in texts])
    positions_BP = torch.tensor([[*one.positions, *[-1] * (most - len(one.positions))] for one in texts])
    number_BP = torch.arange(len(texts) * most).view(len(texts), most)
    return TextBatch(tokens_BS, document_BS, positions_BP, torch.where(positions_BP >= 0, number_BP, -1))
