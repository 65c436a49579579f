"""The tokenizer for corpora: plain text in, token ids out, the same in one process or several."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tfive.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"
PIECE = 100_000
"""Characters encoded at a time; an encoding takes many times the memory of its text."""
BATCH = 1 << 20
"""Characters handed to one encoding call."""

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer in serialised form with its end-of-document id, to be stored or sent to another process."""

    serialized: str
    """The `tokenizer.json` form."""
    end_id: int | None

    @staticmethod
    def of(tokenizer: Any, end_of_document: str = "auto") -> TextTokenizer:
        """From a transformers tokenizer (or a bare `tokenizers.Tokenizer`)."""
        backend = tokenizer if isinstance(tokenizer, Tokenizer) else getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise UserError(
                f"tokenizer {type(tokenizer).__name__} has no tokenizer.json form; save the model with a fast tokenizer"
            )
        content = json.loads(backend.to_str())
        # State left by earlier calls, and the post-processor that adds special tokens, do not affect ids of plain text.
        content |= dict.fromkeys(("truncation", "padding", "post_processor"))
        serialized = json.dumps(content, sort_keys=True, ensure_ascii=False)
        return TextTokenizer(serialized, _end_id(backend, getattr(tokenizer, "eos_token", None), end_of_document))

    @cached_property
    def _backend(self) -> Tokenizer:
        backend = Tokenizer.from_str(self.serialized)
        # A document that spells out a special token contains those characters, not the token.
        backend.encode_special_tokens = True
        return backend

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokenizer and its end-of-document id."""
        return hashlib.sha256(f"{self.end_id}\n{self.serialized}".encode()).hexdigest()

    @property
    def vocabulary(self) -> int:
        """Number of tokens, special ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: list[str]) -> list[Ids]:
        """Token ids of documents, each with the end-of-document token after it."""
        pieces = [(number, piece) for number, text in enumerate(texts) for piece in cut(text, PIECE)]
        encoded = self._backend.encode_batch_fast([piece for _, piece in pieces], add_special_tokens=False)
        parts: list[list[Ids]] = [[] for _ in texts]
        for (number, _), encoding in zip(pieces, encoded):
            parts[number].append(np.asarray(encoding.ids, dtype=np.int32))
        end = [np.asarray([] if self.end_id is None else [self.end_id], dtype=np.int32)]
        return [np.concatenate(part + end) for part in parts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids, special tokens shown."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def growing_text(self, ids: Iterable[int]) -> tuple[str, npt.NDArray[np.int64]]:
        """The decoded text of a token sequence, and after each token how long the text is (−1 inside a character)."""
        stream = DecodeStream(skip_special_tokens=False)
        parts: list[str] = []
        ends: list[int] = []
        length = 0
        for i in ids:
            part = stream.step(self._backend, int(i))
            if part is not None:
                parts.append(part)
                length += len(part)
            ends.append(-1 if part is None else length)
        return "".join(parts), np.asarray(ends, dtype=np.int64)


def _end_id(backend: Tokenizer, eos: str | None, wanted: str) -> int | None:
    if wanted == "none":
        return None
    if wanted != "auto":
        found = backend.token_to_id(wanted)
        if found is None:
            raise UserError(f"text.end_of_document = {wanted!r} is no token of this tokenizer; try auto or none")
        return found
    known = backend.token_to_id(END_OF_DOCUMENT)
    return known if known is not None else backend.token_to_id(eos) if eos else None


def cut(text: str, size: int) -> Iterator[str]:
    """The text in pieces of at most `size` characters, split before white space where there is any."""
    start = 0
    while len(text) - start > size:
        at = max(text.rfind(mark, start + 1, start + size + 1) for mark in ("\n", " "))
        stop = at if at > start else start + size
        yield text[start:stop]
        start = stop
    yield text[start:]


_worker: TextTokenizer | None = None


def _start_worker(path: str, end_id: int | None) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = TextTokenizer(Path(path).read_text(encoding="utf-8"), end_id)


def _encode_in_worker(texts: list[str]) -> list[Ids]:
    if _worker is None:
        raise RuntimeError("the worker was not started with a tokenizer")
    return _worker.encode(texts)


Encoder = Callable[[Iterable[list[str]]], Iterator[list[Ids]]]


@contextmanager
def encoder(tokenizer: TextTokenizer, workers: int) -> Iterator[Encoder]:
    """A function from batches of documents to their encodings, in the same order for any number of workers."""
    if workers == 1:
        yield lambda batches: map(tokenizer.encode, batches)
        return
    died = UserError(
        f"text.workers = {workers}: a worker process died (out of memory, or a script that calls tfive without "
        'an `if __name__ == "__main__":` guard); set it to 1'
    )
    # A worker that runs an unguarded script comes here while it is still starting, and would wait for itself.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise died
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        # By file: a start message larger than a pipe would block for ever on a worker that died.
        path = Path(folder) / "tokenizer.json"
        path.write_text(tokenizer.serialized, encoding="utf-8")
        start = (str(path), tokenizer.end_id)
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=start) as pool:
            try:
                # Now, before the caller takes a lock that a worker running the caller's script would wait for.
                pool.submit(_encode_in_worker, []).result()
                yield partial(_spread, pool, workers)
            except BrokenProcessPool as error:
                raise died from error


def _spread(pool: ProcessPoolExecutor, workers: int, batches: Iterable[list[str]]) -> Iterator[list[Ids]]:
    # A pool's own map would read all batches ahead; memory stays bounded by what is under way.
    under_way: deque[Future[list[Ids]]] = deque()
    for batch in batches:
        under_way.append(pool.submit(_encode_in_worker, batch))
        if len(under_way) > 2 * workers:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()
