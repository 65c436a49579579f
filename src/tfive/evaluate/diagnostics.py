"""Gains of a model on a user's own text: every gain and control, by kind of position and by source.

Texts are the first tokens of documents that are at least as long, drawn at random from each file in proportion to its
share, one text per document. Claims of learning rest on content gain and on gain against the base model's loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tfive import rng
from tfive.distributed.world import SINGLE, World
from tfive.errors import UserError
from tfive.inference.thought_model import ThoughtModel
from tfive.rl.clusters import clustered_mean
from tfive.rl.gains import Gains, foreign, measure, no_thought_losses
from tfive.rl.gate import Gate, PredictionGate, best_constant_gate, experts, mixed_gains
from tfive.rl.sampling import micro_batches
from tfive.rl.settings import GateSettings
from tfive.text.candidates import apportion
from tfive.text.items import ENTROPY_QUANTILE, PositionChooser
from tfive.text.settings import KINDS, Positions
from tfive.text.sources import Reader, SourceFile
from tfive.text.tokens import TextTokenizer
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts

_READ_AHEAD = 64
"""Documents tokenized at a time while looking for long enough ones."""

_AGAINST_BASE = ("gain_vs_base", "no_thought_drift")
"""Gains that need a base model."""


@dataclass(frozen=True)
class Corpus:
    """One body of text to draw from: its files, and its share of the texts."""

    name: str
    files: Sequence[SourceFile]
    share: float = 1.0


@dataclass(frozen=True)
class Sample:
    """The texts of a measurement with their positions, the kind of each position and the source of each text."""

    texts: TextBatch
    kind_BP: Tensor
    source_B: tuple[str, ...]
    passed_over: dict[str, int]
    """Documents of each source that were too short."""


@dataclass(frozen=True)
class SampleSize:
    """How much text is measured."""

    texts: int = 64
    tokens: int = 256
    """Of a text."""
    rows: int = 4
    """Texts in one pass."""
    seed: int = 0


def draw_texts(
    sources: Sequence[Corpus], tokenizer: TextTokenizer, size: SampleSize, world: World = SINGLE
) -> tuple[np.ndarray, list[int], list[int]]:
    """Beginnings of documents in a random order `[B, S]`, the number of each one's source, and how many documents of
    each source were too short. A process of `world` gives a sign of life with every document."""
    parts, number_B, short = [], [], [0] * len(sources)
    for number, count in enumerate(apportion(size.texts, [source.share for source in sources])):
        if count:
            rows, short[number] = _beginnings(sources[number], number, count, size, tokenizer, world)
            parts.append(rows)
            number_B += [number] * count
    order = rng.permutation(size.seed, "gains/texts", 0, size.texts)
    return np.concatenate(parts)[order].astype(np.int64), [number_B[i] for i in order.tolist()], short


def sample_texts(
    sources: Sequence[Corpus], model: ThoughtModel, positions: Positions, size: SampleSize, world: World = SINGLE
) -> Sample:
    """Texts of all sources, the same on every process of `world`; positions by entropy are chosen where this model is
    uncertain."""
    tokenizer = TextTokenizer.of(model.tokenizer)
    tokens_BS, number_B, short = draw_texts(sources, tokenizer, size, world)
    names = [source.name for source in sources]
    entropy_BS = _entropies(model, tokens_BS, size.rows, world) if positions.entropy > 0 else None
    chooser = PositionChooser(positions, model.plan.horizon, size.seed, tokenizer, _never_asked)
    place_BP = np.full((size.texts, positions.per_text), -1, dtype=np.int64)
    kind_BP = place_BP.copy()
    for row, tokens_S in enumerate(tokens_BS):
        uncertain = None
        if entropy_BS is not None:
            uncertain = entropy_BS[row] >= np.quantile(entropy_BS, ENTROPY_QUANTILE)
        chosen = chooser.row(row, tokens_S, np.zeros_like(tokens_S), uncertain)
        place_BP[row, : len(chosen)] = [place for place, _ in chosen]
        kind_BP[row, : len(chosen)] = [kind for _, kind in chosen]
    items_BP = np.where(place_BP >= 0, np.arange(place_BP.size).reshape(place_BP.shape), -1)
    tokens, place, items, kind = (torch.from_numpy(array) for array in (tokens_BS, place_BP, items_BP, kind_BP))
    texts = TextBatch(tokens, torch.zeros_like(tokens), place, items)
    return Sample(texts, kind, tuple(names[i] for i in number_B), dict(zip(names, short)))


def _never_asked(*_: Any) -> Any:
    raise RuntimeError("entropies are measured before positions are chosen")


def _beginnings(
    source: Corpus, number: int, count: int, size: SampleSize, tokenizer: TextTokenizer, world: World
) -> tuple[np.ndarray, int]:
    """The beginnings of `count` documents in a random order `[count, S]`, and how many were too short."""
    documents = [text for file in source.files for _, text in world.beating(Reader().documents(file))]
    order = rng.permutation(size.seed, "gains/documents", number, len(documents)).tolist()
    rows: list[Any] = []
    short = 0
    for start in range(0, len(order), _READ_AHEAD):
        for ids in world.beating(tokenizer.encode([documents[i] for i in order[start : start + _READ_AHEAD]])):
            if len(ids) < size.tokens:
                short += 1
                continue
            rows.append(ids[: size.tokens])
            if len(rows) == count:
                return np.stack(rows), short
    raise UserError(
        f"{source.name}: {len(rows)} documents of {size.tokens} tokens, {count} are needed; ask for less "
        "(--texts, --tokens), or part the text by blank lines, since each document's beginning is read"
    )


def _entropies(model: ThoughtModel, tokens_BS: np.ndarray, rows: int, world: World) -> np.ndarray:
    """Entropy of the plain prediction after every token, `[B, S]` (0 after the last, which predicts nothing)."""
    parts = []
    for part in world.beating(micro_batches(world.computed(len(tokens_BS)), rows)):
        some = tokens_BS[part].tolist()
        parts += [score.entropy.float() for score in model.score(some, [[] for _ in some])]
    return np.pad(world.gather(torch.stack(parts), len(tokens_BS)).numpy(), ((0, 0), (0, 1)))


@torch.no_grad()
def diagnose(
    model: ThoughtModel,
    sample: Sample,
    size: SampleSize,
    base: PreTrainedModel | None = None,
    world: World = SINGLE,
) -> dict[str, Any]:
    """Every gain with its text-clustered 95 % interval: all items together, by kind of position, by source.

    `base` is the model before training, for gains against a loss that training cannot change; it reads the same tokens.
    The processes of `world` read a share of the texts each, and all of them have the answer.
    """
    engine = model.engine()
    texts = sample.texts.to(engine.device)
    most, items = int((texts.positions_BP >= 0).sum(1).max()), int((texts.positions_BP >= 0).sum())
    if items < 2 * max(1, most):
        raise UserError(f"{items} positions in {size.texts} texts: too few for another text's thoughts; ask for more")
    if base is None:
        base_loss_BR = torch.full(texts.positions_BP.shape, torch.nan)
    else:
        before = TreeModel(base, model.plan, engine.engine, model.delimiters)
        base_loss_BR = no_thought_losses(before, texts, rows=size.rows, world=world)
    gains, thoughts = measure(
        engine,
        texts,
        model.sampling,
        base_no_thought_BR=base_loss_BR,
        kind_BP=sample.kind_BP,
        seed=size.seed,
        rows=size.rows,
        world=world,
    )
    columns = {name: value for name, value in gains.per_item().items() if base is not None or name not in _AGAINST_BASE}
    columns["continuation_loss"] = gains.own_I
    behaviour: dict[str, float | None] = {}
    if model.gate is not None:
        mixed, behaviour = _mixed(engine, model.gate, texts, thoughts, gains, size.rows, world)
        columns |= mixed
    sources = sorted(set(sample.source_B))
    source_I = torch.tensor([sources.index(name) for name in sample.source_B])[gains.text_I]
    everything = torch.ones_like(gains.text_I, dtype=torch.bool)
    kinds = {name: gains.kind_I == number for number, name in enumerate(KINDS)}
    return {
        "all": _summary(columns, gains, everything) | behaviour,
        "by_kind": {name: _summary(columns, gains, at) for name, at in kinds.items() if bool(at.any())},
        "by_source": {name: _summary(columns, gains, source_I == n) for n, name in enumerate(sources)},
        "passed_over": sample.passed_over,
    }


def _mixed(
    engine: TreeModel,
    own: PredictionGate,
    texts: TextBatch,
    thoughts: Thoughts,
    gains: Gains,
    rows: int,
    world: World,
) -> tuple[dict[str, Tensor], dict[str, float | None]]:
    """Mixed gains item by item. The constant gate is fitted on the first half of the texts and measured on the rest."""
    gate = Gate(own.features, GateSettings(), seed=0, device=engine.device, width=own.last.in_features)
    gate.gate.load_state_dict(own.state_dict())
    half = max(1, len(texts.tokens_BS) // 2)
    predictions, with_foreign = (
        experts(engine, texts, some, rows=rows, world=world) for some in (thoughts, foreign(thoughts))
    )
    first = predictions.items((gains.text_I < half).nonzero().flatten().to(engine.device))
    gate.constant = best_constant_gate(first.log_with_IH, first.log_without_IH, first.mask_IH)
    found = mixed_gains(gate, predictions, with_foreign)
    columns = {name: gain_I.float().cpu() for name, gain_I in found.gains_I.items()}
    columns["mixed_gain_constant"] = torch.where(gains.text_I >= half, columns["mixed_gain_constant"], torch.nan)
    return columns, found.behaviour


def _summary(columns: dict[str, Tensor], gains: Gains, at_I: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"items": int(at_I.sum()), "texts": int(gains.text_I[at_I].unique().numel())}
    for name, value_I in columns.items():
        kept_I = at_I & ~value_I.isnan()
        if bool(kept_I.any()):
            estimate = clustered_mean(value_I[kept_I], gains.text_I[kept_I])
            found[name] = {"mean": estimate.mean, "error": estimate.error, "interval": list(estimate.interval())}
    gain_I = columns["thought_gain"][at_I].double()
    worst = max(1, len(gain_I) // 100)
    found["useful_fraction"] = float((gain_I > 0).double().mean())
    found["worst_1_percent"] = float(gain_I.sort().values[:worst].mean())
    return found


def gains_table(found: dict[str, Any]) -> str:
    """The gains as Markdown: measures below each other, groups of items side by side."""
    groups = {"all": found["all"]}
    groups |= {f"{kind} positions": one for kind, one in found["by_kind"].items()} if len(found["by_kind"]) > 1 else {}
    groups |= dict(found["by_source"]) if len(found["by_source"]) > 1 else {}
    measures = [name for name, value in found["all"].items() if isinstance(value, dict)]
    rows = ["| nats per token (95 %) | " + " | ".join(groups) + " |", "|" + "---|" * (len(groups) + 1)]
    for name in measures:
        cells = []
        for one in groups.values():
            value = one.get(name)
            cells.append("" if value is None else f"{value['mean']:+.4f} ± {1.96 * value['error']:.4f}")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    for name, shape in (("useful_fraction", ".1%"), ("worst_1_percent", "+.3f"), ("items", "d"), ("texts", "d")):
        rows.append(f"| {name} | " + " | ".join(format(one[name], shape) for one in groups.values()) + " |")
    return "\n".join(rows)
