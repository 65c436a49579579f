"""A tiny model with opinions, with and without thoughts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import tiny
from tfive.evaluate.tasks import Item, Items, Task, digest_of
from tfive.inference.thought_model import ThoughtModel
from tfive.rl.gate import PredictionGate
from tfive.tree.settings import SamplingSettings, ThoughtSettings


@pytest.fixture(scope="session")
def lively() -> LlamaForCausalLM:
    """A model whose predictions depend strongly on everything before them."""
    model = tiny.model()
    model.config.max_position_embeddings = 256
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.3, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.tokenizer()


@pytest.fixture(scope="session")
def thinker(lively: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> ThoughtModel:
    """The model with short thoughts and a gate that is far from constant."""
    thought = ThoughtSettings(length=3, checkpoints=(3,), horizon=4, open=" (", close=")")
    gate = PredictionGate(lively.config.hidden_size, width=8, seed=2)
    gate.last.weight.data.mul_(300)
    return ThoughtModel(lively, tokenizer, thought, SamplingSettings(), gate)


@pytest.fixture(scope="session")
def exported(thinker: ThoughtModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a folder."""
    folder = tmp_path_factory.mktemp("exported") / "small"
    thinker.save_pretrained(folder)
    return folder


@pytest.fixture
def sums() -> Items:
    """Six questions of mathematics."""
    items = tuple(Item(f"sum-{n}", f"What is {n} and {n + 1}?", str(2 * n + 1)) for n in range(6))
    task = Task(
        name="sums", kind="math", count=6, file="sums.jsonl", prompt="words-v1", stop=("\nQuestion:",), max_new_tokens=9
    )
    return Items(task, items, digest_of(items), "nowhere", "unfrozen")


@pytest.fixture
def riddles() -> Items:
    """Five questions with two or three options."""
    options = [("a red box", "two pens"), ("seven", "eight", "nine boxes of pens"), ("yes", "no")]
    items = tuple(Item(f"riddle-{n}", f"Which of these is number {n}?", "AB"[n % 2], options[n % 3]) for n in range(5))
    task = Task(
        name="riddles",
        kind="choice",
        count=5,
        file="riddles.jsonl",
        prompt="options-v1",
        max_new_tokens=6,
        context="Question: {question}\nAnswer:",
        continuation="text",
    )
    return Items(task, items, digest_of(items), "nowhere", "unfrozen")
