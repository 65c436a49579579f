"""The tokenizer: plain text in, ids out; nothing in the text can turn into a special token."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from material import document
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tfive.errors import UserError
from tfive.text import tokens
from tfive.text.tokens import TextTokenizer, cut, encoder


@given(st.text(st.sampled_from("abc \n"), max_size=60), st.integers(1, 20))
def test_pieces_make_the_whole(text: str, size: int) -> None:
    pieces = list(cut(text, size))
    assert "".join(pieces) == text
    assert all(len(piece) <= size for piece in pieces)
    assert all(piece[0].isspace() or len(before) == size for before, piece in pairwise(pieces))


def test_documents_end_with_their_token(backend: Tokenizer, tokenizer: TextTokenizer) -> None:
    text = document(3)
    (ids,) = tokenizer.encode([text])
    assert ids[:-1].tolist() == backend.encode(text).ids
    assert tokenizer.end_id == backend.token_to_id("<|endoftext|>") == ids[-1]
    assert tokenizer.decode(ids) == text + "<|endoftext|>"


def test_a_spelled_out_special_token_is_text(tokenizer: TextTokenizer) -> None:
    (ids,) = tokenizer.encode(["a <|endoftext|> b"])
    assert (ids == tokenizer.end_id).sum() == 1
    assert tokenizer.decode(ids[:-1]) == "a <|endoftext|> b"


def test_long_documents_are_encoded_in_pieces(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = document(5, 300)
    whole = tokenizer.encode([text, "short"])
    monkeypatch.setattr(tokens, "PIECE", 100)
    pieces = tokenizer.encode([text, "short"])
    # Cuts stand before white space, where this tokenizer never joins.
    assert [a.tolist() for a in pieces] == [b.tolist() for b in whole]


def test_end_of_document_choices(backend: Tokenizer) -> None:
    assert TextTokenizer.of(backend, "none").end_id is None
    assert TextTokenizer.of(backend, "e").end_id == backend.token_to_id("e")
    with pytest.raises(UserError, match=r"text.end_of_document = '<eod>' is no token"):
        TextTokenizer.of(backend, "<eod>")


def test_a_transformers_tokenizer_gives_the_same(backend: Tokenizer, tokenizer: TextTokenizer) -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    wrapped("make it truncate", truncation=True, max_length=2)
    made = TextTokenizer.of(wrapped)
    assert made.fingerprint == tokenizer.fingerprint
    without = Tokenizer.from_str(backend.to_str().replace("<|endoftext|>", "</s>"))
    assert TextTokenizer.of(PreTrainedTokenizerFast(tokenizer_object=without, eos_token="</s>")).end_id == 0
    assert TextTokenizer.of(without).end_id is None
    with pytest.raises(UserError, match=r"no tokenizer\.json form"):
        TextTokenizer.of(object())


def test_the_fingerprint_knows_the_end_token(backend: Tokenizer, tokenizer: TextTokenizer) -> None:
    assert TextTokenizer.of(backend, "none").fingerprint != tokenizer.fingerprint


@given(st.text(max_size=40))
def test_growing_text_is_the_text_of_each_prefix(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode([text])[0][:-1]
    grown, ends = tokenizer.growing_text(ids)
    assert len(ends) == len(ids)
    for count, end in enumerate(ends.tolist(), start=1):
        if end >= 0:
            assert grown[:end] == tokenizer.decode(ids[:count])


def test_workers_change_nothing(tokenizer: TextTokenizer) -> None:
    work = [[document(n), document(n + 100)] for n in range(9)]
    with encoder(tokenizer, 1) as one, encoder(tokenizer, 2) as two:
        for a, b in zip(one(work), two(work), strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_unguarded_script_is_told_so(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer.serialized, encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            from pathlib import Path
            from tfive.errors import UserError
            from tfive.text.tokens import TextTokenizer, encoder
            text = Path({str(tmp_path / "tokenizer.json")!r}).read_text(encoding="utf-8")
            try:
                with encoder(TextTokenizer(text, None), 2) as encode:
                    list(encode([["a"]]))
            except UserError as error:
                print("told:", error)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert "told: text.workers = 2: a worker process died" in done.stdout.splitlines()[-1]
