"""How much of a gain could be rounding: the loss of the eight tokens behind a position, in bfloat16 and in float32.

    python studies/smollm2/rounding.py MODEL corpora/web_curated.jsonl.gz

One position a text, by the model as it comes and without thoughts. Printed is the standard deviation over texts of the
difference of both losses, in nats a token; two readings whose rounding is independent differ by √2 of it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from itertools import islice
from pathlib import Path

import torch

from tfive.cli.options import script
from tfive.errors import UserError
from tfive.models.load import load_model


def texts_of(path: Path, count: int) -> list[str]:
    """The first long texts of a file of rows with `text`."""
    if not path.is_file():
        raise UserError(f"{path} is missing; give a .jsonl.gz file of rows with text")
    with gzip.open(path, "rt", encoding="utf-8") as rows:
        found = (str(json.loads(row)["text"]) for row in rows)
        return list(islice((text for text in found if len(text) > 4000), count))


@torch.no_grad()
def losses(model: torch.nn.Module, rows: list[torch.Tensor], horizon: int) -> list[float]:
    """The mean loss of the last `horizon` tokens of each row."""
    found = []
    for row in rows:
        logits = model(row[None]).logits[0, -horizon - 1 : -1].float()
        found.append(float(torch.nn.functional.cross_entropy(logits, row[-horizon:])))
    return found


def main(given: list[str] | None = None) -> int:
    """Both losses of every text, and how far apart they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--horizon", type=int, default=8)
    asked = parser.parse_args(given)
    loaded = load_model(asked.model, device="cpu", dtype=torch.float32)
    texts = texts_of(asked.corpus, asked.texts)
    rows = [torch.tensor(loaded.tokenizer.encode(text)[: asked.tokens]) for text in texts]
    exact = losses(loaded.model, rows, asked.horizon)
    coarse = load_model(asked.model, device="cpu", dtype=torch.bfloat16)
    rounded = losses(coarse.model, rows, asked.horizon)
    apart = [a - b for a, b in zip(rounded, exact, strict=True)]
    mean, spread = statistics.fmean(apart), statistics.stdev(apart)
    print(f"{len(apart)} texts: bfloat16 minus float32, mean {mean:+.4f}, s.d. {spread:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    script(main)
