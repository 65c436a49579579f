"""What guesses of the next sentence are worth to a trained model, beside guesses that nobody had to make.

    python studies/smollm2/lookahead_gains.py exported lookahead          # a model that `tfive export` wrote

On texts that no run has seen, gains in nats a token of the model's own guess, another text's, an empty one, random
tokens, the words of the next sentence (what a perfect guesser would gain; and those of another place), and what a
program writes that repeats the last content words before the place. Beside them how often a guess says a word that
comes, and one that was there.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lookahead import PRESET, WORD
from torch import Tensor

from tfive.cli.options import script
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.evaluate.headroom import draw, losses_after, true_thoughts
from tfive.inference.thought_model import ThoughtModel
from tfive.rl.clusters import clustered_mean
from tfive.rl.gains import emptied, foreign, randomised
from tfive.text.workings import WorkedText, batched, compiled, worked_texts
from tfive.training.devices import place
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts

AGAINST = {"own": ("other", "empty", "before"), "true": ("true_other", "before")}
"""Differences that are told with an interval of their own."""


def texts_of(folder: Path, name: str, model: ThoughtModel, asked: argparse.Namespace) -> list[WorkedText]:
    """The first texts of a file with its workings."""
    pattern, path = compiled(asked.pattern, "--pattern"), folder / f"{name}.jsonl.gz"
    found = worked_texts(path, model.tokenizer, pattern, length=asked.tokens, per_text=asked.per_text)
    return list(found)[: asked.texts]


def workings_of(rows: list[WorkedText], texts: TextBatch) -> dict[int, tuple[int, ...]]:
    """The working of each item by its number."""
    return {
        int(texts.items_BP[row, slot]): ids
        for row, one in enumerate(rows)
        for slot, ids in enumerate(one.workings)
        if ids is not None
    }


def measure(model: ThoughtModel, asked: argparse.Namespace) -> dict[str, Any]:
    """Gains of every kind of thought, and what the words in them are."""
    after, before = (texts_of(asked.folder, name, model, asked) for name in ("held", "before"))
    if [one.positions for one in after] != [one.positions for one in before]:
        raise UserError(f"{asked.folder}: held.jsonl.gz and before.jsonl.gz have other places; make them anew")
    texts = batched(after).to(model.model.device)
    thoughts, after_BPG, without_BP = draw(model, texts, asked.samples, seed=asked.seed, rows=asked.rows)
    own, plan = thoughts.branches(0, None, asked.samples), replace(model.plan, group=1)
    engine = TreeModel(model.model, plan, model.settings, model.delimiters, model.gates)
    allowed = sorted(set(range(engine.head.vocabulary)) - {*plan.forbidden_ids, plan.stop_id})
    allowed_V = torch.tensor(allowed, device=texts.tokens_BS.device)
    true = true_thoughts(own, texts, workings_of(after, texts), plan)
    kinds = {
        "other": foreign(own),
        "empty": emptied(own),
        "random": randomised(own, texts, allowed_V, group=1, seed=asked.seed, window=0),
        "before": true_thoughts(own, texts, workings_of(before, texts), plan),
        "true": true,
        "true_other": foreign(true),
    }
    gain_BPG = without_BP[..., None] - after_BPG
    gain = {"own": gain_BPG[..., 0], "mean": gain_BPG.mean(-1), "best": gain_BPG.amax(-1)}
    gain["best_or_none"] = gain["best"].clamp(min=0)
    gain |= {name: without_BP - losses_after(engine, texts, one, asked.rows)[0] for name, one in kinds.items()}
    gain |= {f"{name} − {less}": gain[name] - gain[less] for name, some in AGAINST.items() for less in some}
    gain["loss"] = without_BP
    valid_BP = own.valid_BR.cpu()
    told: dict[str, Any] = {name: estimate(value, valid_BP) for name, value in gain.items()}
    told |= {"items": int(valid_BP.sum()), "texts": len(after), "thoughts": asked.samples}
    told |= {"length": float(own.length_BR[own.valid_BR].double().mean())}
    told |= {"closed": float(own.closed_BR[own.valid_BR].double().mean())}
    if model.gates is not None:
        told["openness"] = model.gates.openness
    told["words"] = words_of({"own": own, **kinds}, texts, model)
    told["examples"] = examples({"own": own, **kinds}, gain, texts, model, asked.examples)
    return told


def estimate(value_BP: Tensor, valid_BP: Tensor) -> list[float]:
    """Mean and 95 % interval over texts."""
    text_BP = torch.arange(len(valid_BP))[:, None].expand_as(valid_BP)
    found = clustered_mean(value_BP[valid_BP], text_BP[valid_BP])
    return [round(one, 5) for one in (found.mean, *found.interval())]


def thought_text(thoughts: Thoughts, row: int, slot: int, decode: Any) -> str:
    """A thought without its close."""
    length = int(thoughts.length_BR[row, slot]) - int(thoughts.closed_BR[row, slot])
    return str(decode(thoughts.tokens_BRT[row, slot, :length].tolist()))


def words_of(kinds: dict[str, Thoughts], texts: TextBatch, model: ThoughtModel) -> dict[str, list[float]]:
    """Of each kind: words a thought, the share of them among those of the tokens that score it, and the share that
    stands in the text before."""
    decode: Any = model.tokenizer.decode
    horizon = model.plan.horizon
    found = {name: [0, 0, 0] for name in kinds}
    places = kinds["own"].valid_BR.nonzero().tolist()
    for row, slot in places:
        p = int(texts.positions_BP[row, slot])
        tokens = texts.tokens_BS[row].tolist()
        parts = (decode(some) for some in (tokens[p + 1 : p + 1 + horizon], tokens[: p + 1]))
        comes, was = ({word.lower() for word in WORD.findall(part)} for part in parts)
        for name, thoughts in kinds.items():
            said = {word.lower() for word in WORD.findall(thought_text(thoughts, row, slot, decode))}
            for number, some in enumerate((said, said & comes, said & was)):
                found[name][number] += len(some)
    return {
        name: [round(number / max(1, of), 4) for number, of in zip(some, (len(places), some[0], some[0]))]
        for name, some in found.items()
    }


def examples(
    kinds: dict[str, Thoughts], gain: dict[str, Tensor], texts: TextBatch, model: ThoughtModel, count: int
) -> list[dict[str, Any]]:
    """Some places with what was written there and what it gained."""
    found, decode, places = [], model.tokenizer.decode, kinds["own"].valid_BR.nonzero().tolist()
    for row, slot in places[:: max(1, len(places) // max(1, count))][:count]:
        p, tokens = int(texts.positions_BP[row, slot]), texts.tokens_BS[row].tolist()
        shown: dict[str, Any] = {"text": decode(tokens[max(0, p - 40) : p + 1])}
        shown["follows"] = decode(tokens[p + 1 : p + 1 + model.plan.horizon])
        for name in ("own", "before", "true"):
            written = thought_text(kinds[name], row, slot, decode)
            shown[name] = [written, round(float(gain[name][row, slot]), 4)]
        found.append(shown)
    return found


def main(given: list[str] | None = None) -> int:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="an exported model")
    parser.add_argument("folder", type=Path, help="the folder that lookahead.py wrote")
    parser.add_argument("--pattern", default=None, help="ends of sentences; that of lookahead.toml unless given")
    parser.add_argument("--texts", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--per-text", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="own guesses at every place")
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="texts of a pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compute", default="auto")
    asked = parser.parse_args(given)
    if asked.pattern is None:
        asked.pattern = Config.load(str(PRESET)).text.positions.pattern
    placement = place(asked.device, asked.compute)
    placement.apply(asked.seed)
    model = ThoughtModel.from_pretrained(asked.model, device=placement.device, dtype=placement.compute)
    with torch.no_grad():
        print(json.dumps({"model": asked.model, **measure(model, asked)}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    script(main)
