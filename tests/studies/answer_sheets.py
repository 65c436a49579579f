"""Problems, a tiny random model and settings for the study of thoughts before answers."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import scripts
from tfive.text.sheets import HEADER

LENGTH = 192
SMALL = (
    f"text.sequence_length={LENGTH}", "text.sequences.train=16", "text.sequences.calibration=4",
    "text.sequences.development=8", "text.sequences.test=8", "thought.length=8",
    "thought.checkpoints=[8]", "window.items=8", "window.windows=1",
    "window.actor_steps=1", "actor.minibatches=1", "actor.reuse_passes=1", "run.develop_items=8", "run.develop_every=1",
    "run.texts_per_rollout=64", "run.texts_per_pass=4", "model.device=cpu", "optimizer.warmup_steps=0",
)  # fmt: skip


def problem(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    a, b, c = (draw.randrange(2, 40) for _ in range(3))
    lines = (f"Ann has {a} + {b} = {a + b} pens.", f"With {c} more she has {a + b} + {c} = {a + b + c}.")
    question = f"Ann buys {a} pens, then {b} pens and then {c} more. How many pens does she have?"
    text = f"{question}\n\n" + "\n".join(lines) + f"\nThe answer is {a + b + c}."
    return {"id": f"p{number}", "source": "gsm8k_train", "text": text, "fewshot": number < 5}


def save_model(folder: Path, texts: list[str]) -> Path:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    torch.manual_seed(0)
    shape = LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048,
                        initializer_range=0.3, tie_word_embeddings=False)  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def render() -> ModuleType:
    return scripts.script("studies/answers/render.py")


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, render: ModuleType) -> Path:
    """A model, problems and the sheets made of them."""
    folder = tmp_path_factory.mktemp("answers")
    rows = [problem(number) for number in range(400)]
    other = {"id": "m1", "source": "math_train", "text": "x\n\ny\nThe answer is 1.", "fewshot": False}
    with gzip.open(folder / "problems.jsonl.gz", "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in (*rows, other))
    save_model(folder / "model", [row["text"] for row in rows] + [HEADER] * 50)
    given = [str(folder / name) for name in ("model", "problems.jsonl.gz", "sheets")]
    assert render.main([*given, "--length", str(LENGTH)]) == 0
    return folder
