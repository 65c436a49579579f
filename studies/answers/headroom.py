"""What thoughts are worth before training: the model's own, another's, none at all, the working that was left out."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.evaluate.headroom import draw, losses_after, true_thoughts
from tfive.inference.thought_model import ThoughtModel
from tfive.models.load import load_model
from tfive.rl.gains import emptied, foreign
from tfive.text.sheets import END
from tfive.training.corpus import corpus_of, measured_sequences
from tfive.training.devices import place
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts

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


def workings_by_item(known: dict[int, LeftOut], encode: Any) -> dict[int, tuple[int, ...]]:
    """The left-out working of each item as token ids, as it stands between the delimiters."""
    return {item: tuple(encode(f" {missing.working}{END}")) for item, missing in known.items()}


def measure(config: Config, count: int) -> list[dict[str, Any]]:
    """One row of gains for each of about `count` development items."""
    placement = place(config.model.device, config.model.compute)
    placement.apply(config.run.seed)
    loaded = load_model(config.model.name, device=placement.device, dtype=placement.compute)
    corpus, tokenizer = corpus_of(config, loaded=loaded), loaded.tokenizer
    texts = corpus.batch(measured_sequences(corpus, "development", count))
    with gzip.open(workings_file(config), "rt", encoding="utf-8") as file:
        known = left_out(texts, json.load(file), tokenizer.decode)
    texts, rows = texts.to(placement.device), config.run.rollout_texts
    model = ThoughtModel(loaded.model, tokenizer, config.thought, config.sampling, engine=config.engine.options())
    thoughts, after_BPG, without_BP = draw(model, texts, MANY, seed=config.run.seed, rows=rows)
    own = thoughts.branches(0, None, MANY)
    engine = TreeModel(loaded.model, replace(model.plan, group=1), model.settings)
    workings = workings_by_item(known, lambda text: tokenizer.encode(text, add_special_tokens=False))
    true = true_thoughts(own, texts, workings, model.plan)
    controls = {"other": foreign(own), "empty": emptied(own), "true": true, "true_other": foreign(true)}
    after = {name: losses_after(engine, texts, control, rows)[0] for name, control in controls.items()}
    found = []
    for row, branch in own.valid_BR.nonzero().tolist():
        missing = known.get(int(texts.items_BP[row, branch]))
        if missing is None:
            continue
        start = float(without_BP[row, branch])
        losses_G = after_BPG[row, branch]
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
