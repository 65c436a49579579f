"""Train the BPE tokenizer: 4,096 entries, every digit alone, `(` and `)` never merged with anything but a space before.

python recipes/nano/train_tokenizer.py --text WORK --out WORK/tokenizer        # and WORK/pretrain_tokens.npz
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import worked_prose
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY = 4096
# A digit with the space before it is one entry, so a four-digit figure is four tokens in running text and in a working.
SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{N}| ?\(|\)| ?\p{L}+| ?[^\s\p{L}\p{N}()]+|\s+(?!\S)|\s+"
WORKED_DOCUMENTS, NOTEBOOKS = 20_000, 2_000


def texts(pretrain: Path, seed: int, worked: int) -> Iterator[str]:
    """Every document of the real text, and a sample of worked prose and notebooks in roughly its share of
    pre-training.
    """
    with gzip.open(pretrain, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]
    for number in range(worked):
        pieces = worked_prose.draw_document(seed, "tokenizer", number, reckoned=0.3, held_out=False)
        yield worked_prose.document_text(pieces)
    for number in range(worked * NOTEBOOKS // WORKED_DOCUMENTS):
        yield worked_prose.draw_notebook(seed, "tokenizer-notebook", number)
    for word in worked_prose.GUESS_WORDS:
        yield from [f", which makes ({word} 1000) 1000"] * (worked // 10)


def train(
    pretrain: Path, out: Path, seed: int, vocabulary: int = VOCABULARY, worked: int = WORKED_DOCUMENTS
) -> Tokenizer:
    """The trained tokenizer, saved so that `AutoTokenizer.from_pretrained(out)` reads it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(pretrain, seed, worked), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        bos_token=END,
        pad_token=END,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(out)
    return tokenizer


def write_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """The tokenised real documents, end to end with their lengths, so that training starts at once."""
    with gzip.open(folder / "pretrain_real.jsonl.gz", "rt", encoding="utf-8") as lines:
        encoded = tokenizer.encode_batch([json.loads(line)["text"] for line in lines])
    tokens = np.concatenate([np.array(one.ids, dtype=np.uint16) for one in encoded])
    np.savez(folder / "pretrain_tokens.npz", tokens=tokens, lengths=np.array([len(one.ids) for one in encoded]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="the folder that make_text.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    tokenizer = train(args.text / "pretrain_real.jsonl.gz", args.out, args.seed)
    write_tokens(tokenizer, args.text)
    print(f"{tokenizer.get_vocab_size()} entries; '1480 + 296' is {tokenizer.encode('1480 + 296').tokens}")


if __name__ == "__main__":
    main()
