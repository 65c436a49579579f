"""Peak memory of preparing a corpus from a source of a given size.

    python benchmarks/corpus_memory.py --gigabytes 10

writes a source of made-up documents, prepares the default splits from it (12,800 + 1,024 + 1,024 sequences of 512
tokens) in a process of its own, and prints one JSON document. `baseline_mb` is that process before it reads anything.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 1 << 22


def words(seed: int, count: int) -> str:
    """Made-up words with the frequencies of a language: few common ones, many rare ones."""
    rng = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    vocabulary = ["".join(rng.choice(letters, size=size)) for size in rng.integers(2, 10, 20_000)]
    ranks = np.minimum(rng.zipf(1.3, count), len(vocabulary)) - 1
    return " ".join(vocabulary[rank] for rank in ranks)


def documents(total_bytes: int, mean_bytes: int) -> Iterator[str]:
    """Documents of varying length, all different, until they hold `total_bytes`."""
    text = words(0, BLOCK // 6)
    rng = np.random.default_rng(1)
    written = number = 0
    while written < total_bytes:
        size = int(rng.exponential(mean_bytes)) + 50
        start = int(rng.integers(0, len(text) - size)) if size < len(text) else 0
        document = f"Document {number}. {text[start : start + size]}"
        number += 1
        written += len(document)
        yield document


def write_source(path: Path, total_bytes: int, mean_bytes: int) -> int:
    """A .jsonl or .jsonl.gz file; returns how many documents it holds."""
    count = 0
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
        for text in documents(total_bytes, mean_bytes):
            file.write(json.dumps({"text": text}).encode() + b"\n")
            count += 1
    return count


def tokenizer() -> Any:
    """A byte-level BPE of 16,384 tokens, trained on the spot."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=16_384, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(documents(2_000_000, 3000), trainer)
    return made


def measure(source: str, cache: str, workers: int, answer: Any) -> None:
    """Prepare, and report the peak of this process and of its workers."""
    from tfive.rl.roles import role_shares
    from tfive.rl.settings import WindowSettings
    from tfive.text.corpus import prepare
    from tfive.text.settings import TextSettings

    made = tokenizer()
    settings = TextSettings.model_validate({"sources": [{"name": "made-up", "path": source}], "workers": workers})
    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    corpus = prepare(settings, horizon=16, roles=role_shares(WindowSettings(), 16), tokenizer=made, cache=Path(cache))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    answer.send(
        {
            "baseline_mb": round(baseline / 1024, 1),
            "peak_rss_mb": round(peak / 1024, 1),
            "peak_worker_rss_mb": round(children / 1024, 1) if workers > 1 else None,
            "seconds": round(seconds, 1),
            "read": corpus.manifest["read"]["made-up"],
            **corpus.manifest["counts"],
        }
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--gigabytes", type=float, default=1.0, help="bytes of text in the source, in units of 1e9")
    arguments.add_argument("--document-bytes", type=int, default=3000, help="mean length of a document")
    arguments.add_argument("--gzip", action="store_true", help="write the source as .jsonl.gz")
    arguments.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    arguments.add_argument(
        "--folder", default=None, help="where to work; a folder that is removed afterwards if not given"
    )
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        source = Path(folder) / ("source.jsonl.gz" if given.gzip else "source.jsonl")
        count = write_source(source, int(given.gigabytes * 1e9), given.document_bytes)
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=measure, args=(str(source), f"{folder}/cache", given.workers, theirs))
        process.start()
        theirs.close()
        result = ours.recv()
        process.join()
        shown = {"source_bytes": source.stat().st_size, "source_documents": count, **result}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
