"""Tiny models of the architectures that matter, with a real (tiny) tokenizer."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = [
    "A thought is written between the lines, and the text goes on.",
    "37 boxes of 48 pencils each, which makes (1480 + 296) 1776 pencils.",
]


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<end>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", bos_token="<end>")


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def saved(tmp_path: Path, llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path / "tiny-llama"
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
