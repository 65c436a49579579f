"""Workings of a file as thoughts that a warm start learns, and what of them no thought can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.rl.hindsight import Learnable
from tfive.text.workings import batched, compiled, enough_for, worked_texts
from tfive.tree.layout import ThoughtPlan, Thoughts


@dataclass(frozen=True)
class Given(Learnable):
    """Texts with the workings that fit a thought, and what became of the others."""

    unfit: int = 0
    """Workings that no thought can be, mostly because they are longer."""
    enough: int = 0
    """Tokens of a thought that would hold nine of ten workings."""
    cut: int = 0
    """Texts that are longer than a row."""
    foreign: int = 0
    """Texts that say another number of tokens than they have."""


def given_workings(config: Config, tokenizer: Any, plan: ThoughtPlan, length: int) -> Given:
    """The workings of `warmstart.path` that fit a thought, where they stand in texts of `length` tokens."""
    path = Path(config.warmstart.path or "").expanduser()
    if not path.is_file():
        raise UserError(f"warmstart.path = {config.warmstart.path}: no such file; give rows with text and workings")
    positions = config.text.positions
    pattern = compiled(positions.pattern, "text.positions.pattern")
    found = list(worked_texts(path, tokenizer, pattern, length=length, per_text=positions.per_text))
    if not found:
        raise UserError(
            f"warmstart.path = {path}: no row has a working after text.positions.pattern; give workings, or "
            "warmstart.source = hindsight"
        )
    texts, stop = batched(found), () if plan.stop_id is None else (plan.stop_id,)
    shape, sizes = (len(found), texts.positions_BP.shape[1]), list[int]()
    tokens_BRT = torch.zeros(*shape, plan.length, dtype=torch.int64)
    length_BR = torch.zeros(shape, dtype=torch.int64)
    for row, one in enumerate(found):
        for slot, working in enumerate(one.workings):
            ids = (*(working or ()), *stop)
            sizes.extend([len(ids)] if working else [])
            if working and len(ids) <= plan.length and (stop or len(ids) == plan.length):
                tokens_BRT[row, slot, : len(ids)], length_BR[row, slot] = torch.tensor(ids), len(ids)
    valid_BR, enough, cut = length_BR > 0, enough_for(sizes), sum(one.cut for one in found)
    if not bool(valid_BR.any()):
        none = f"thought.length = {plan.length}: no working of warmstart.path = {path} "
        if not stop:
            raise UserError(f"{none}has exactly so many tokens; use thought.variable_length = true")
        rows = f", or text.sequence_length = {length}, at which {cut:,} of {len(found):,} texts are cut" * bool(cut)
        raise UserError(f"{none}fits, with its close; raise thought.length ({enough} holds nine of ten){rows}")
    thoughts = Thoughts(tokens_BRT, length_BR, valid_BR, valid_BR & bool(stop), torch.zeros(tokens_BRT.shape))
    unfit, foreign = len(sizes) - int(valid_BR.sum()), sum(one.foreign for one in found)
    return Given(texts, thoughts, unfit=unfit, enough=enough, cut=cut, foreign=foreign)


def shortfalls(data: Given, plan: ThoughtPlan, length: int) -> Iterator[str]:
    """What of given workings is not learned or cut off, and what would change that for most of them."""
    many = f"of {len(data.texts.tokens_BS):,} texts with workings"
    if data.foreign:
        made = "were made for another model's tokens; make them anew (tfive data sheets)"
        yield f"{data.foreign:,} {many} {made}"
    if data.cut:
        made = f"are longer than text.sequence_length = {length} and cut there"
        yield f"{data.cut:,} {many} {made}"
    said = f"{data.unfit:,} of {data.unfit + data.kept:,} workings are"
    if data.unfit and plan.stop_id is None:
        yield f"{said} not exactly thought.length = {plan.length} and not learned; use thought.variable_length = true"
    elif data.unfit:
        more = f"; {data.enough} would hold nine of ten" if data.enough > plan.length else ""
        yield f"{said} longer than thought.length = {plan.length}, with their close, and not learned{more}"
