"""What thoughts are worth before training: the model's own, another's, none at all, the working that was left out."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from render import END
from torch import Tensor

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.inference.thought_model import plan_for
from tfive.models.load import load_model
from tfive.rl.gains import emptied, foreign
from tfive.rl.sampling import join_thoughts, micro_batches, sample
from tfive.rl.trajectory import last_loss
from tfive.training.corpus import corpus_of
from tfive.training.devices import place
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts

MANY = 16
"""Own thoughts drawn at every position."""


@dataclass(frozen=True)
class LeftOut:
    """The working that a sheet leaves out before one answer."""

    missing: str
    working: str
    answer: str


def left_out(texts: TextBatch, workings: dict[str, Any], decode: Any) -> dict[int, LeftOut]:
    """What is missing at each item, by its number; items whose question is not known are left out."""
    found = {}
    for tokens, positions, items in zip(texts.tokens_BS.tolist(), texts.positions_BP.tolist(), texts.items_BP.tolist()):
        for position, item in zip(positions, items):
            before = decode(tokens[: position + 1]) if item >= 0 else ""
            known = workings.get(before[before.rfind("Question: ") :]) if before else None
            if known is not None:
                found[item] = LeftOut(known["missing"], known["working"], known["answer"])
    return found


def true_thoughts(
    own: Thoughts, texts: TextBatch, known: dict[int, LeftOut], plan: ThoughtPlan, encode: Any
) -> Thoughts:
    """The left-out working in place of every thought, closed where it fits."""
    true = Thoughts(*(getattr(own, field.name).clone() for field in fields(own)))
    for row, branch in own.valid_BR.nonzero().tolist():
        missing = known.get(int(texts.items_BP[row, branch]))
        ids = encode(f" {missing.working}{END}") if missing is not None else []
        ids = [*ids, plan.stop_id][: plan.length]
        true.tokens_BRT[row, branch, : len(ids)] = torch.tensor(ids, device=true.tokens_BRT.device)
        true.length_BR[row, branch] = len(ids)
        true.closed_BR[row, branch] = ids[-1] == plan.stop_id
    return true


def scorer(engine: TreeModel, texts: TextBatch, rows: int) -> Callable[[Thoughts], tuple[Tensor, Tensor]]:
    """A function that gives the losses after whole thoughts and without them, `[B, R]` each."""

    def losses(thoughts: Thoughts) -> tuple[Tensor, Tensor]:
        after, without = [], []
        for part in micro_batches(len(texts.tokens_BS), rows):
            some = texts.rows(part.start, part.stop), thoughts.rows(part.start, part.stop)
            scores = engine.score(*some, whole=True)
            after.append(last_loss(scores.losses_BRK, scores.mask_BRK).float().cpu())
            without.append(scores.no_thought_BR.float().cpu())
        return torch.cat(after), torch.cat(without)

    return losses


def measure(config: Config, count: int) -> list[dict[str, Any]]:
    """One row of gains for each of about `count` development items."""
    placement = place(config.model.device, config.model.compute)
    placement.apply(config.run.seed)
    loaded = load_model(config.model.name, device=placement.device, dtype=placement.compute)
    corpus, tokenizer = corpus_of(config, loaded=loaded), loaded.tokenizer
    numbers = corpus.sequences("development")
    texts = corpus.batch(numbers[: int((corpus.items_in[numbers].cumsum() < count).sum()) + 1])
    with gzip.open(workings_file(config), "rt", encoding="utf-8") as file:
        known = left_out(texts, json.load(file), tokenizer.decode)
    plan = replace(plan_for(config.thought, loaded.model, tokenizer), group=1)
    texts = texts.to(placement.device)
    engine, rows = TreeModel(loaded.model, plan, config.engine.options()), config.run.rollout_texts
    drawing = TreeModel(loaded.model, replace(plan, group=MANY), config.engine.options())
    few = max(1, rows // 8)
    drawn = [
        sample(drawing, texts.rows(part.start, part.stop), config.sampling, seed=config.run.seed, role="headroom",
               window=0, rows=few, record_old=False).thoughts
        for part in micro_batches(len(texts.tokens_BS), few)
    ]  # fmt: skip
    thoughts, losses = join_thoughts(drawn), scorer(engine, texts, rows)
    own = thoughts.branches(0, None, MANY)
    true = true_thoughts(own, texts, known, plan, lambda text: tokenizer.encode(text, add_special_tokens=False))
    each = [losses(thoughts.branches(number, None, MANY)) for number in range(MANY)]
    controls = {"other": foreign(own), "empty": emptied(own), "true": true, "true_other": foreign(true)}
    after = {name: losses(control)[0] for name, control in controls.items()}
    many_GBR, without_BR = torch.stack([loss for loss, _ in each]), each[0][1]
    found = []
    for row, branch in own.valid_BR.nonzero().tolist():
        missing = known.get(int(texts.items_BP[row, branch]))
        if missing is None:
            continue
        start = float(without_BR[row, branch])
        losses_G = many_GBR[:, row, branch]
        written = written_numbers(thoughts, row, branch, missing.answer, tokenizer.decode)
        found.append(
            {"missing": missing.missing, "l0": start, "own": start - float(losses_G[0])}
            | {name: start - float(loss[row, branch]) for name, loss in after.items()}
            | {"mean16": start - float(losses_G.mean()), "best16": start - float(losses_G.min())}
            | {"spread": float(losses_G.std()), "right": written, "length": float(own.length_BR[row, branch])}
        )
    return found


def workings_file(config: Config) -> Path:
    """Where `render.py` wrote what the sheets leave out."""
    path = Path(config.text.sources[0].path or "").parent / "workings.json.gz"
    if not path.is_file():
        raise UserError(f"{path}: not there; headroom needs the folder that render.py wrote")
    return path


def written_numbers(thoughts: Thoughts, row: int, branch: int, answer: str, decode: Any) -> float:
    """The share of a position's thoughts in which the right number stands."""
    right = 0
    for number in range(branch * MANY, (branch + 1) * MANY):
        text = decode(thoughts.tokens_BRT[row, number, : int(thoughts.length_BR[row, number])].tolist())
        right += bool(re.search(rf"(?<![\d.]){answer}(?!\d)", text.replace(",", "")))
    return right / MANY
