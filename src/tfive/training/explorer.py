"""What a run keeps of single thoughts for its page: the same development items at the start, half-way and at the end.

`explorer/texts.safetensors` holds the texts and the places, `explorer/window-N.safetensors` what was measured there:
the thoughts, the loss of every following token without, with the own, with another's and with an empty thought, the
gate, and what the critics say of every token. Strings lie in a table of their own (`pieces`), tokens are numbers of it.
At most three measurements are kept whatever a run's length: the first, the one half-way, and the newest. Of 256 items
with thoughts of 12 tokens and continuations of 16 each takes about 0.1 MB.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save
from torch import Tensor

from tfive.config.config import Config
from tfive.methods.method import Method
from tfive.rl.credit import Credit
from tfive.text.prepared import PreparedCorpus
from tfive.text.settings import KINDS
from tfive.text.tokens import TextTokenizer
from tfive.training.develop import MeasuredTexts
from tfive.tree.layout import TextBatch, Thoughts

EXPLORER, TEXTS = "explorer", "texts.safetensors"
GAINS = ("thought_gain", "content_gain", "other_gain", "empty_gain", "gain_vs_base", "mixed_gain")
LOSSES = {"no_thought": "without", "own": "own", "other": "other", "empty": "empty"}

Arrays = dict[str, npt.NDArray[Any]]


class Pieces:
    """A table of strings: every string once, tokens are numbers of it."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._numbers: dict[str, int] = {}

    def of(self, ids: Iterable[int]) -> list[int]:
        """The text of each token; one that ends inside a character has none, the one that completes it the whole."""
        text, ends = self.tokenizer.growing_text(ids)
        parts, begun = [], 0
        for end in ends.tolist():
            parts.append(text[begun:end] if end >= 0 else "")
            begun = max(begun, end)
        if len(ends) and ends[-1] < 0:
            parts[-1] = "\N{REPLACEMENT CHARACTER}"
        return [self._numbers.setdefault(part, len(self._numbers)) for part in parts]

    def arrays(self) -> Arrays:
        """The table as UTF-8 bytes and where each string ends."""
        encoded = [part.encode("utf-8", "replace") for part in self._numbers]
        return {
            "pieces": np.frombuffer(b"".join(encoded), np.uint8),
            "piece_ends": np.cumsum([len(part) for part in encoded], dtype=np.int32),
        }


@dataclass
class Explorer:
    """Writes the files of one run; `count` items, the first of the development set. Of several processes, which all
    ask the critics together, one `writes`."""

    folder: Path
    config: Config
    corpus: PreparedCorpus
    development: MeasuredTexts
    writes: bool = True

    def __post_init__(self) -> None:
        texts = self.development.texts
        valid_BP = texts.positions_BP >= 0
        through_B = valid_BP.sum(1).cumsum(0)
        self.count = min(self.config.run.explorer_items, int(through_B[-1]))
        self.rows = int((through_B < self.count).sum()) + 1 if self.count else 0
        """Texts that hold the items kept."""
        windows, every = self.config.window.windows, self.config.run.develop_every
        half = -(-windows // 2)
        self.half_way = min(-(-half // every) * every, windows)
        """The first measurement that is not before the middle of the run."""

    def path(self, window: int) -> Path:
        """Where the measurement of a window lies."""
        return self.folder / f"window-{window:05d}.safetensors"

    def save(self, window: int, method: Method[Any], items: dict[str, Tensor], *, last: bool) -> None:
        """Write what the development set's newest measurement found, and drop the one it replaces; `last` says that
        the run ends with it."""
        thoughts = self.development.thoughts
        if not self.count or thoughts is None:
            return
        texts, thoughts = self.development.texts.rows(0, self.rows), thoughts.rows(0, self.rows)
        # What critics say costs passes of its own, so it is asked for where it stays: half-way and at the end.
        stays = last or window == self.half_way
        credit = method.credited(texts, thoughts) if stays else None
        if not self.writes:
            return
        if not (self.folder / TEXTS).is_file():
            self._save_texts()
        kept: Arrays = self._thoughts(thoughts)
        kept |= self._tokens() | {name: _half(items[name][: self.count]) for name in GAINS if name in items}
        if credit is not None:
            kept |= self._credit(credit, thoughts.valid_BR)
        _save(kept, self.path(window), {"window": window})
        for path in self.folder.glob("window-*.safetensors"):
            if path not in (self.path(0), self.path(self.half_way), self.path(window)):
                path.unlink()

    def forget_after(self, window: int) -> None:
        """Remove measurements later than a window: a resumed run makes them again."""
        if not self.writes:
            return
        for path in self.folder.glob("window-*.safetensors"):
            if path.name > self.path(window).name:
                path.unlink()

    def _save_texts(self) -> None:
        texts: TextBatch = self.development.texts.rows(0, self.rows)
        pieces = Pieces(self.corpus.tokenizer)
        items_BP = texts.items_BP.cpu()
        valid_BP = items_BP >= 0
        text_BP = torch.arange(self.rows)[:, None].expand_as(items_BP)
        item_I = items_BP[valid_BP][: self.count].numpy()
        sources = self.corpus.source_of(item_I)
        tokens = [pieces.of(row) for row in texts.tokens_BS.cpu().tolist()]
        kept: Arrays = {
            "tokens": np.asarray(tokens, np.int32),
            "sequence": (items_BP.amax(1) // self.corpus.per_text).numpy().astype(np.int64),
            "document": texts.document_BS.cpu().numpy().astype(np.int32),
            "item": item_I.astype(np.int64),
            "text": text_BP[valid_BP][: self.count].numpy().astype(np.int32),
            "position": texts.positions_BP.cpu()[valid_BP][: self.count].numpy().astype(np.int32),
            "kind": self.development.kind_BP.cpu()[: self.rows][valid_BP][: self.count].numpy().astype(np.int32),
            "source": np.asarray([self.corpus.sources.index(name) for name in sources], np.int32),
            **pieces.arrays(),
        }
        config = self.config
        about = {
            "horizon": config.thought.horizon,
            "length": config.thought.length,
            "checkpoints": list(config.thought.checkpoints),
            "thinks": config.spec.thinks,
            "critics": config.spec.critics,
            "sources": self.corpus.sources,
            "kinds": list(KINDS),
            "half_way": self.half_way,
            "windows": config.window.windows,
        }
        _save(kept, self.folder / TEXTS, about)

    def _thoughts(self, thoughts: Thoughts) -> Arrays:
        valid_BR = thoughts.valid_BR
        length_I = thoughts.length_BR[valid_BR][: self.count].cpu().numpy().astype(np.int32)
        ids_IT = thoughts.tokens_BRT[valid_BR][: self.count].cpu().tolist()
        pieces = Pieces(self.corpus.tokenizer)
        tokens_IT = np.zeros((self.count, thoughts.tokens_BRT.shape[-1]), np.int32)
        for row, (ids, length) in enumerate(zip(ids_IT, length_I.tolist())):
            tokens_IT[row, :length] = pieces.of(ids[:length])
        closed_I = thoughts.closed_BR[valid_BR][: self.count].cpu().numpy().astype(np.uint8)
        return {"tokens": tokens_IT, "length": length_I, "closed": closed_I, **pieces.arrays()}

    def _tokens(self) -> Arrays:
        found = self.development.token_IH
        kept: Arrays = {shown: _half(found[name][: self.count]) for name, shown in LOSSES.items()}
        kept["horizon"] = found["mask"][: self.count].sum(1).cpu().numpy().astype(np.int32)
        return kept | ({"gate": _half(found["gate"][: self.count])} if "gate" in found else {})

    def _credit(self, credit: Credit, valid_BR: Tensor) -> Arrays:
        pairs = (("values", credit.values_CBRT), ("advantages", credit.advantages_CBRT))
        kept = {name: _half(value[:, valid_BR][:, : self.count]) for name, value in pairs}
        single = (("returns", credit.returns_BRT), ("weight", credit.weight_BRT), ("mixed", credit.mixed_BRT))
        return kept | {name: _half(value[valid_BR][: self.count]) for name, value in single if value is not None}


def _half(value: Tensor) -> npt.NDArray[np.float16]:
    """Two bytes a number are enough to look at; what lies beyond them is cut off."""
    most = float(np.finfo(np.float16).max)
    return value.detach().float().clamp(-most, most).cpu().numpy().astype(np.float16)


def _save(arrays: Arrays, path: Path, about: dict[str, Any]) -> None:
    """Write a file that appears whole or not at all: a page may read it while the run goes on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    whole = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    beside.write_bytes(save(whole, metadata={"explorer": json.dumps(about, ensure_ascii=False)}))
    os.replace(beside, path)
