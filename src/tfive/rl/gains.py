"""Thought gains on held-out texts, with controls that separate the content of a thought from other effects.

The same items are scored after their own thought, another item's thought, an empty thought and random tokens of the
same length, and without a thought under the model and the frozen base model. Claims of learning rest on the content
gain: the loss after another item's thought minus the loss after one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfive import rng
from tfive.distributed.world import SINGLE, World
from tfive.rl.clusters import Estimate, clustered_mean
from tfive.rl.sampling import micro_batches, sample
from tfive.rl.trajectory import last_loss
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.outputs import Reading, Scores
from tfive.tree.settings import SamplingSettings

READING_BYTES = 2**28
"""What is kept of texts between sampling thoughts for all of them and scoring these."""


@dataclass(frozen=True)
class Gains:
    """Losses in nats per token of every valid branch, flattened to `[I]`, and the text each belongs to."""

    own_I: Tensor
    other_I: Tensor
    empty_I: Tensor
    random_I: Tensor
    no_thought_I: Tensor
    base_no_thought_I: Tensor
    length_I: Tensor
    text_I: Tensor
    kind_I: Tensor
    """The kind of position of each item, as the caller numbers them."""
    token_IH: dict[str, Tensor] = field(default_factory=dict)
    """The loss of every continuation token `[I, H]` (0 where there is none) after the `own`, the `other`, the `empty`
    and the `random` thought and with `no_thought`; `mask` says which tokens there are."""

    def per_item(self) -> dict[str, Tensor]:
        """Every gain per item (positive is better), and the no-thought loss with its change against the base model."""
        return {
            "thought_gain": self.no_thought_I - self.own_I,
            "content_gain": self.other_I - self.own_I,
            "gain_vs_base": self.base_no_thought_I - self.own_I,
            "other_gain": self.no_thought_I - self.other_I,
            "empty_gain": self.no_thought_I - self.empty_I,
            "random_gain": self.no_thought_I - self.random_I,
            "no_thought_loss": self.no_thought_I,
            "no_thought_drift": self.no_thought_I - self.base_no_thought_I,
        }

    def estimates(self, select_I: Tensor | None = None) -> dict[str, Estimate]:
        """Mean and text-clustered standard error of every gain, over all items or the selected ones."""
        chosen = torch.ones_like(self.text_I, dtype=torch.bool) if select_I is None else select_I
        return {name: clustered_mean(v[chosen], self.text_I[chosen]) for name, v in self.per_item().items()}

    def summary(self) -> dict[str, Any]:
        """Plain numbers for a log: means, 95 % intervals, the useful fraction and the worst hundredth."""
        out: dict[str, Any] = {}
        for name, estimate in self.estimates().items():
            out[name] = estimate.mean
            out[f"{name}_interval"] = list(estimate.interval())
        gain_I = self.no_thought_I - self.own_I
        worst = max(1, len(gain_I) // 100)
        out["useful_fraction"] = float((gain_I > 0).double().mean())
        out["worst_1_percent"] = float(gain_I.double().sort().values[:worst].mean())
        out["mean_thought_length"] = float(self.length_I.double().mean())
        out["items"], out["texts"] = len(gain_I), int(self.text_I.unique().numel())
        return out


def foreign(thoughts: Thoughts, *, near: bool = False, group: int = 1) -> Thoughts:
    """Every branch with the thought of an item in another text: a permutation of the thoughts.

    `near`: if there are too few texts for that, every item gets the thoughts of the item before it, in whatever text;
    an item has `group` of them.
    """
    valid_BR = thoughts.valid_BR
    rows_I, branches_I = valid_BR.nonzero(as_tuple=True)
    count, most = len(rows_I), int(valid_BR.sum(1).max())
    if count < 2 * most and not (near and count > 1):
        raise ValueError(f"{count} thoughts in too few texts: another text's thought needs at least {2 * most}")
    donor_I = (torch.arange(count, device=rows_I.device) + (most if count >= 2 * most else count - group)) % count

    def permuted(values: Tensor) -> Tensor:
        moved = values.clone()
        moved[rows_I, branches_I] = values[rows_I[donor_I], branches_I[donor_I]]
        return moved

    names = ("tokens_BRT", "length_BR", "closed_BR", "log_q_BRT")
    return replace(thoughts, **{name: permuted(getattr(thoughts, name)) for name in names})


def emptied(thoughts: Thoughts) -> Thoughts:
    """The empty thought everywhere: the delimiters with nothing between them."""
    return replace(
        thoughts,
        length_BR=torch.zeros_like(thoughts.length_BR),
        closed_BR=torch.zeros_like(thoughts.closed_BR),
        log_q_BRT=torch.zeros_like(thoughts.log_q_BRT),
    )


def randomised(
    thoughts: Thoughts, texts: TextBatch, allowed_V: Tensor, *, group: int, seed: int, window: int
) -> Thoughts:
    """Random legal tokens in place of each thought's own; its length and a sampled closing token stay."""
    items_BR = np.repeat(texts.items_BP.cpu().numpy(), group, axis=1)
    steps = thoughts.tokens_BRT.shape[-1]
    member_R = np.tile(np.arange(group), texts.items_BP.shape[1])
    numbers = rng.uniforms(
        seed, "random_thought", window, np.maximum(items_BR, 0)[..., None], member_R[None, :, None], np.arange(steps)
    )
    index = torch.from_numpy((numbers * len(allowed_V)).astype(np.int64)).to(allowed_V.device)
    steps_T = torch.arange(steps, device=allowed_V.device)
    is_close = thoughts.closed_BR[..., None] & (steps_T == thoughts.length_BR[..., None] - 1)
    return replace(thoughts, tokens_BRT=torch.where(is_close, thoughts.tokens_BRT, allowed_V[index]))


def _inside(engine: TreeModel) -> Tensor:
    """Token ids allowed inside a thought: legal actions except the closing token."""
    plan = engine.plan
    out = {*plan.forbidden_ids, plan.stop_id}
    return torch.tensor([token for token in range(engine.head.vocabulary) if token not in out], device=engine.device)


@torch.no_grad()
def no_thought_losses(engine: TreeModel, texts: TextBatch, *, rows: int, world: World = SINGLE) -> Tensor:
    """ℓ_0 of every item `[B, R]` (eq:continuation-ce). Of the frozen base model it is a reference training cannot
    move."""
    count = len(texts.tokens_BS)
    parts = world.beating(micro_batches(world.computed(count), rows))
    return world.gather(torch.cat([engine.no_thought(texts.rows(part.start, part.stop)) for part in parts]), count)


class KeptReadings:
    """Readings of a set's micro-batches for whoever reads the same texts next by the same weights."""

    def __init__(self, most: int = READING_BYTES) -> None:
        """`most`: bytes kept at most; micro-batches beyond it are read again."""
        self._room, self._kept = most, list[Reading | None]()

    def keep(self, reading: Reading) -> None:
        """Keep the next micro-batch's reading, if there is room for it."""
        parts = [reading.hidden_BSD, *(part for both in reading.attention.values() for part in both)]
        size = sum(part.nbytes for part in parts)
        # States of recurrent layers are large, one for every position.
        fits = size <= self._room and not reading.recurrent
        self._kept.append(reading if fits else None)
        self._room -= size if fits else 0

    def take(self, number: int) -> Reading | None:
        """The reading of a micro-batch, which is kept no longer; None where it must be read again."""
        reading, self._kept[number] = self._kept[number], None
        return reading


OnScores = Callable[[str, TextBatch, Thoughts, Scores], None]
"""Called with the scores of every micro-batch of this process, features included, for each item's `own` thought and for
the `other`."""


@torch.no_grad()
def measure(
    engine: TreeModel,
    texts: TextBatch,
    law: SamplingSettings,
    *,
    base_no_thought_BR: Tensor,
    kind_BP: Tensor | None = None,
    seed: int,
    role: str = "develop",
    window: int = 0,
    rows: int,
    on_scores: OnScores | None = None,
    world: World = SINGLE,
) -> tuple[Gains, Thoughts]:
    """Sample thoughts for all items of `texts` and score them and every control under `engine`; returns the gains and
    the thoughts. `on_scores`: see `OnScores`."""
    group, readings = engine.plan.group, KeptReadings()
    asked: dict[str, Any] = {"seed": seed, "role": role, "window": window, "rows": rows, "world": world}
    own = sample(engine, texts, law, **asked, record_old=False, on_reading=readings.keep).thoughts
    versions = {
        "own": own,
        "other": foreign(own),
        "empty": emptied(own),
        "random": randomised(own, texts, _inside(engine), group=group, seed=seed, window=window),
    }
    valid = own.valid_BR
    losses, tokens = _losses_after(engine, texts, versions, readings, rows, on_scores, world)
    flat = {name: loss_BR[valid].float().cpu() for name, loss_BR in losses.items()}
    kinds_BP = torch.zeros_like(texts.positions_BP) if kind_BP is None else kind_BP.to(texts.positions_BP.device)
    gains = Gains(
        own_I=flat["own"],
        other_I=flat["other"],
        empty_I=flat["empty"],
        random_I=flat["random"],
        no_thought_I=flat["no_thought"],
        base_no_thought_I=base_no_thought_BR.to(valid.device)[valid].float().cpu(),
        length_I=own.length_BR[valid].cpu(),
        text_I=torch.arange(len(valid), device=valid.device)[:, None].expand_as(valid)[valid].cpu(),
        kind_I=kinds_BP.repeat_interleave(group, 1)[valid].cpu(),
        token_IH={name: token_BRH[valid].cpu() for name, token_BRH in tokens.items()},
    )
    return gains, own


def _losses_after(
    engine: TreeModel,
    texts: TextBatch,
    versions: dict[str, Thoughts],
    readings: KeptReadings,
    rows: int,
    on_scores: OnScores | None,
    world: World,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The continuation loss `[B, R]` after every version of the thoughts, and without one (`no_thought`); and the same
    token by token `[B, R, H]` (see `Gains.token_IH`).

    The forward pass over the text is shared by all versions, and by the sampling before where it was kept.
    """
    losses: dict[str, list[Tensor]] = {name: [] for name in (*versions, "no_thought")}
    tokens: dict[str, list[Tensor]] = {name: [] for name in (*losses, "mask")}
    count = len(texts.tokens_BS)
    for number, part in enumerate(world.beating(micro_batches(world.computed(count), rows))):
        some = texts.rows(part.start, part.stop)
        reading = readings.take(number) or engine.read(some)
        for name, thoughts in versions.items():
            these, shown = thoughts.rows(part.start, part.stop), on_scores is not None and name in ("own", "other")
            scores = engine.score(some, these, reading, features=shown, whole=True)
            if on_scores is not None and shown:
                on_scores(name, some, these, scores)
            losses[name].append(last_loss(scores.losses_BRK, scores.mask_BRK))
            tokens[name].append(scores.token_BRH)
            if name == "own":
                losses["no_thought"].append(scores.no_thought_BR)
                tokens["no_thought"].append(scores.no_thought_token_BRH)
                tokens["mask"].append(scores.token_mask_BRH)
    own = [(torch.cat(values), 0) for found in (losses, tokens) for values in found.values()]
    whole = iter(world.gather_all(own, count))
    return {name: next(whole) for name in losses}, {name: next(whole) for name in tokens}
