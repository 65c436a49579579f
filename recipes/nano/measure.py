"""Measure the design condition of the nano model, per kind of position, with the plain one-row-per-thought scorer.

    python recipes/nano/measure.py [--model FOLDER] [--corpus FOLDER/corpus] [--per-kind 1200] [--json FILE]

Gains are nats per token over the next H = 5 tokens against no thought; positive is better. `working` is the true
working used as a thought; `sampled` are the model's own thoughts (at most 12 tokens, the close sampled); `empty`,
`other` (another place's sampled thought of the same kind) and `random` (random tokens, same lengths) are controls;
`content` = `sampled` − `other`. The last two rows are averages over kinds: results as the corpus has them, and the
positions that the `nano` preset selects.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import worked_prose
from phrases import MATCH_PATTERN
from plain_thoughts import Law, Place, losses, sample
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HORIZON, LONGEST = 5, 12
TEXTS_PER_PLACE = 3  # texts read for a place of each kind: the rarest result comes less than once a text
SHIPPED = Path(__file__).parents[2] / "src" / "tfive" / "data" / "nano"
RESULT_KINDS = tuple(f"{kind} result" for kind in sorted(set(worked_prose.MIDTRAINED)))
KINDS = (*RESULT_KINDS, "worked prose elsewhere", "real text")
RESULTS, SELECTED = "results together", "selected positions"
ROWS = (*KINDS, RESULTS, SELECTED)
MATCH, REAL = 0.7, 0.15  # positions right before results; of the others, drawn uniformly, those in real text


def result_shares() -> dict[str, float]:
    """The share of every kind among the results of the mid-training corpus."""
    counts = Counter(f"{kind} result" for kind in worked_prose.MIDTRAINED)
    return {kind: counts[kind] / counts.total() for kind in RESULT_KINDS}


def selected_shares(match: float = MATCH, real: float = REAL) -> dict[str, float]:
    """The share of every kind among selected positions, where every text has as many results as `match` asks for."""
    results = {kind: match * share for kind, share in result_shares().items()}
    return results | {"worked prose elsewhere": (1 - match) * (1 - real), "real text": (1 - match) * real}


def read_corpus(folder: Path, name: str) -> list[dict[str, str]]:
    with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def thought_law(tokenizer: PreTrainedTokenizerBase) -> Law:
    (opening,), (close,) = tokenizer(" (").input_ids, tokenizer(")").input_ids
    return Law(LONGEST, opening, close, (opening, *tokenizer.all_special_ids))


def result_ends(text: str) -> list[int]:
    """Where a result is about to follow, judged from the left by the pattern alone."""
    return [found.end() for found in re.finditer(MATCH_PATTERN, text)]


def worked_places(
    rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, rng: random.Random, per_kind: int
) -> list[Place]:
    """Places before results, by kind of figure, and other places of the same prose.

    The figures are drawn again from the document's number, which its identifier holds, so that the true working is
    known.
    """
    found: dict[str, list[Place]] = {kind: [] for kind in KINDS[:-1]}
    for text, row in enumerate(rows):
        _, seed, number = row["id"].rsplit("-", 2)
        pieces = worked_prose.draw_document(
            int(seed), "midtrain", int(number), reckoned=0.0, held_out=True, kinds=worked_prose.MIDTRAINED
        )
        figures = [piece.figure for piece in pieces if piece.figure]
        ends = result_ends(row["text"])
        if worked_prose.document_text(pieces) != row["text"] or len(ends) != len(figures):
            raise ValueError(f"{row['id']}: not the text that this recipe draws")
        tokens = tokenizer(row["text"]).input_ids
        places = [len(tokenizer(row["text"][:end]).input_ids) for end in ends]
        for place, figure in zip(places, figures, strict=True):
            working = tuple(tokenizer(figure.working).input_ids)
            after = tuple(tokens[place : place + HORIZON])
            if len(after) == HORIZON:
                found[f"{figure.kind} result"].append(
                    Place(text, f"{figure.kind} result", tuple(tokens[:place]), after, working)
                )
        free = [p for p in range(1, len(tokens) - HORIZON + 1) if all(abs(p - place) >= HORIZON for place in places)]
        place = rng.choice(free)
        found["worked prose elsewhere"].append(
            Place(text, "worked prose elsewhere", tuple(tokens[:place]), tuple(tokens[place : place + HORIZON]))
        )
    return [place for places in found.values() for place in places[:per_kind]]


def real_places(
    rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, rng: random.Random, per_kind: int
) -> list[Place]:
    places = []
    for text, row in enumerate(rows[:per_kind]):
        tokens = tokenizer(row["text"]).input_ids
        place = rng.randrange(1, len(tokens) - HORIZON + 1)
        places.append(Place(10**6 + text, "real text", tuple(tokens[:place]), tuple(tokens[place : place + HORIZON])))
    return places


def all_places(
    corpus: Path, tokenizer: PreTrainedTokenizerBase, per_kind: int, seed: int, skip: int = 0
) -> list[Place]:
    rng = random.Random(f"measure/{seed}")
    worked = worked_places(read_corpus(corpus, "worked")[skip:][: TEXTS_PER_PLACE * per_kind], tokenizer, rng, per_kind)
    return worked + real_places(read_corpus(corpus, "real")[skip:], tokenizer, rng, per_kind)


def control_thoughts(
    places: list[Place], thoughts: list[list[int]], law: Law, size: int, seed: int
) -> dict[str, list[list[int]]]:
    """Another place's thought of the same kind, and random tokens of the same length."""
    rng = random.Random(f"controls/{seed}")
    other: list[list[int]] = [[] for _ in places]
    for kind in {place.kind for place in places}:
        members = [number for number, place in enumerate(places) if place.kind == kind]
        for number, lender in zip(members, members[1:] + members[:1], strict=True):
            other[number] = thoughts[lender]
    barred = {law.close, *law.forbidden}
    allowed = [token for token in range(size) if token not in barred]
    return {"other": other, "random": [[rng.choice(allowed) for _ in thought] for thought in thoughts]}


def mean_and_error(values: list[float], places: list[Place], shares: dict[str, float]) -> tuple[float, float]:
    """Mean over places, kinds weighted by `shares`, and its standard error with texts as the unit.

    Places of one text are not independent, whatever their kinds; the shares are given, not estimated.
    """
    total, by_text = 0.0, defaultdict[int, float](float)
    for kind, share in shares.items():
        members = [number for number, place in enumerate(places) if place.kind == kind]
        mean = math.fsum(values[number] for number in members) / len(members)
        total += share * mean
        for number in members:
            by_text[places[number].text] += share * (values[number] - mean) / len(members)
    count = len(by_text)
    squares = math.fsum(value * value for value in by_text.values())
    return total, math.sqrt(squares * count / max(1, count - 1))


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    places: list[Place],
    seed: int,
    selected: dict[str, float] | None = None,
) -> dict[str, dict[str, Any]]:
    """Per kind of place, and over `selected` shares of them: no-thought loss, every gain with its standard error, and
    what the sampled thoughts look like.
    """
    law = thought_law(tokenizer)
    thoughts = sample(model, places, law, torch.Generator().manual_seed(seed))
    workings = [list(place.working) for place in places]
    sets: dict[str, list[list[int]]] = {
        "sampled": thoughts,
        "empty": [[] for _ in places],
        **control_thoughts(places, thoughts, law, len(tokenizer), seed),
        "working": workings,
    }
    base = losses(model, places, None, law)
    gains = {name: (base - losses(model, places, inner, law)).tolist() for name, inner in sets.items()}
    gains["content"] = [own - other for own, other in zip(gains["sampled"], gains["other"], strict=True)]
    shown = [str(tokenizer.decode(thought)) for thought in thoughts]
    plain = {
        "no-thought loss": base.tolist(),
        "mean length": [float(min(LONGEST, len(thought) + 1)) for thought in thoughts],
        "share of workings": [float(bool(re.fullmatch(r"\d+ \+ \d+", text))) for text in shown],
        "share of true workings": [float(a == b != []) for a, b in zip(thoughts, workings, strict=True)],
    }
    table: dict[str, dict[str, Any]] = {}
    weights = {kind: {kind: 1.0} for kind in KINDS} | {
        RESULTS: result_shares(),
        SELECTED: selected or selected_shares(),
    }
    for name, shares in weights.items():
        members = [number for number, place in enumerate(places) if place.kind in shares]
        row: dict[str, object] = {"places": len(members)}
        row |= {column: mean_and_error(values, places, shares)[0] for column, values in plain.items()}
        for column, values in gains.items():
            if column != "working" or set(shares) <= set(RESULT_KINDS):
                row[column] = mean_and_error(values, places, shares)
        table[name] = row | {"examples": [shown[number] for number in members[:8]] if name in KINDS else []}
    return table


def show(table: dict[str, dict[str, object]]) -> None:
    for kind, row in table.items():
        print(f"{kind}: {row['places']} places, no-thought loss {row['no-thought loss']:.3f}")
        gains = [f"{name} {value[0]:+.3f} ± {value[1]:.3f}" for name, value in row.items() if isinstance(value, tuple)]
        print("   gain: " + ", ".join(gains))
        print(
            f"   sampled: mean length {row['mean length']:.1f}, workings {row['share of workings']:.2f}, "
            f"true ones {row['share of true workings']:.3f}; {row['examples']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer, where it is not the model's")
    parser.add_argument("--corpus", type=Path, default=SHIPPED / "corpus")
    parser.add_argument("--per-kind", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    table = measure(model, tokenizer, all_places(args.corpus, tokenizer, args.per_kind, args.seed), args.seed)
    show(table)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
