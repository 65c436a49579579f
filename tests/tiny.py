"""The smallest whole run: a two-block model of sixteen units, a made-up corpus, windows of a few thoughts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tfive.config.config import Config

WORDS = ("river", "mill", "farm", "boat", "grain", "salt", "paper", "town", "rain", "wind", "seven", "(", ")", ".")


def document(number: int) -> str:
    words = np.random.default_rng(number).choice(WORDS, size=40)
    return f"{number} " + " ".join(words)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([document(n) for n in range(60)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(shape).eval()


OVERRIDES = (
    "text.sequence_length=32",
    "text.sequences.train=96",
    "text.sequences.calibration=12",
    "text.sequences.development=6",
    "text.sequences.test=6",
    "text.positions.per_text=2",
    "text.allow_fewer=true",
    "thought.length=4",
    "thought.checkpoints=[2, 4]",
    "thought.horizon=3",
    "thought.variable_length=true",
    "window.items=16",
    "window.windows=2",
    "window.actor_steps=4",
    "window.probe=0.125",
    "actor.minibatches=2",
    "critic.adapt=top",
    "critic.blocks=1",
    "critic.width=8",
    "critic.passes=1",
    "critic.minibatches=2",
    "qualify.eta=0.0",
    "qualify.consecutive=1",
    "qualify.attempts=40",
    "calibration.steps=4",
    "calibration.warm_steps=4",
    "calibration.evaluate_every=2",
    "calibration.batch=8",
    "calibration.width=8",
    "gate.passes=1",
    "optimizer.lr=1e-3",
    "run.texts_per_pass=4",
    "run.develop_items=8",
    "model.device=cpu",
)


def configure(folder: Path, *overrides: str) -> Config:
    """Write the model and the corpus once, and give the configuration that uses them."""
    home, corpus = folder / "model", folder / "corpus.jsonl"
    if not home.exists():
        model().save_pretrained(home)
        tokenizer().save_pretrained(home)
        corpus.write_text("".join(json.dumps({"text": document(n)}) + "\n" for n in range(400)), "utf-8")
        source = f'[[text.sources]]\nname = "made-up"\npath = "{corpus}"\n\n[text]\ncache = "{folder / "cache"}"\n'
        (folder / "tiny.toml").write_text(f'[model]\nname = "{home}"\n\n{source}', "utf-8")
    return Config.load(folder / "tiny.toml", overrides=(*OVERRIDES, *overrides))
