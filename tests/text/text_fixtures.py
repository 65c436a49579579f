"""A small tokenizer, and a way to prepare corpora in a folder of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from material import ROLES, Prepare, document
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tfive.text.corpus import prepare
from tfive.text.prepared import PreparedCorpus
from tfive.text.settings import TextSettings
from tfive.text.tokens import TextTokenizer


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    """A byte-level BPE of 400 tokens whose characters may be split between tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([document(n) for n in range(50)], trainer)
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer(backend: Tokenizer) -> TextTokenizer:
    return TextTokenizer.of(backend)


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: TextTokenizer) -> Prepare:
    """Prepares a corpus of these settings in a cache of the test's own."""

    def run(settings: TextSettings, **changes: Any) -> PreparedCorpus:
        options: dict[str, Any] = {"horizon": 4, "roles": ROLES, "tokenizer": tokenizer, "cache": tmp_path / "cache"}
        return prepare(settings, **{**options, **changes})

    return run
