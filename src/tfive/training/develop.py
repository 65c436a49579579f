"""Measuring on development or test texts: gains with every control, and mixed gain on texts the gate never saw."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tfive.distributed.world import SINGLE, World
from tfive.rl.gains import Gains, no_thought_losses
from tfive.rl.gains import measure as measure_gains
from tfive.rl.gate import Experts, Gate, mixed_gains
from tfive.rl.pass_size import PassSize
from tfive.text.settings import KINDS
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.outputs import Scores
from tfive.tree.settings import SamplingSettings

SCORED = 5
"""Continuations scored per item: after its own thought, another's, an empty one and random tokens, and without one."""


class MeasuredTexts:
    """The same items every time, with the same random numbers, so that two measurements differ by the model alone.

    Every method is measured with one thought an item, however many it trains on: engines come with a group of 1.
    """

    def __init__(
        self,
        texts: TextBatch,
        kind_BP: Tensor,
        base: TreeModel,
        sampling: SamplingSettings,
        *,
        role: str,
        seed: int,
        rows: int | PassSize,
        world: World = SINGLE,
    ) -> None:
        self.texts, self.kind_BP, self.base, self.sampling = texts, kind_BP, base, sampling
        self.role, self.seed, self.world = role, seed, world
        self.passes = PassSize.of(rows, alone=world.size == 1)
        self.thoughts: Thoughts | None = None
        """Those of the last measurement."""
        self.token_IH: dict[str, Tensor] = {}
        """Continuation tokens of the last measurement: their losses (`rl.gains.Gains.token_IH`) and the `gate` if there
        is one."""

    @cached_property
    def base_no_thought_BR(self) -> Tensor:
        """The yardstick that training cannot move."""
        read = partial(no_thought_losses, self.base, self.texts, world=self.world)
        return self.passes.fit_told(read, self.base.let_go)

    def measure(self, engine: TreeModel, gate: Gate | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All gains as plain numbers with 95 % intervals, each kind of position also by itself; and item by item."""
        kept: dict[str, list[Experts]] = {}
        base_no_thought_BR = self.base_no_thought_BR

        def keep(name: str, texts: TextBatch, thoughts: Thoughts, scores: Scores) -> None:
            kept[name].append(Experts.of(scores, texts, thoughts))

        def measured() -> tuple[Gains, Thoughts]:
            kept.update(own=[], other=[])
            return measure_gains(
                engine,
                self.texts,
                self.sampling,
                base_no_thought_BR=base_no_thought_BR,
                kind_BP=self.kind_BP,
                seed=self.seed,
                role=self.role,
                rows=self.passes.rows,
                on_scores=None if gate is None else keep,
                world=self.world,
            )

        gains, thoughts = self.passes.fit(measured, kept.clear, engine.let_go)
        self.thoughts, self.token_IH = thoughts, dict(gains.token_IH)
        found = gains.summary()
        items = gains.per_item() | {"length": gains.length_I, "text": gains.text_I, "kind": gains.kind_I}
        items["item"] = self.texts.items_BP.to(thoughts.valid_BR.device)[thoughts.valid_BR]
        for number, kind in enumerate(KINDS):
            chosen_I = gains.kind_I == number
            if bool(chosen_I.any()):
                own = gains.estimates(chosen_I)
                found |= {f"{name}_{kind}": own[name].mean for name in ("thought_gain", "content_gain", "empty_gain")}
        if gate is not None:
            count = len(self.texts.tokens_BS)
            pair = [Experts.joined(kept[name]).gathered(self.world, count) for name in ("own", "other")]
            mixed = mixed_gains(gate, *pair)
            found |= mixed.summary()
            items |= mixed.gains_I
            self.token_IH["gate"] = mixed.gate_IH.detach().cpu()
        return found, items

    def amounts(self) -> dict[str, int]:
        """What the last measurement generated and scored: one thought an item, and the continuation after it, after
        each of the three controls and without a thought."""
        thoughts = self._measured()
        count = int(thoughts.valid_BR.sum())
        return {
            "trajectories": count,
            "generated_tokens": int(thoughts.length_BR[thoughts.valid_BR].sum()),
            "scored_tokens": SCORED * count * self.base.plan.horizon,
        }

    def _measured(self) -> Thoughts:
        if self.thoughts is None:
            raise ValueError("nothing has been measured yet")
        return self.thoughts

    def samples(self, decode: Callable[[list[int]], str], count: int = 4) -> list[dict[str, str]]:
        """A few thoughts of the last measurement as text, with what stands before and after them."""
        thoughts, shown = self._measured(), []
        for row, branch in thoughts.valid_BR.nonzero()[:count].tolist():
            position, length = int(self.texts.positions_BP[row, branch]), int(thoughts.length_BR[row, branch])
            text = self.texts.tokens_BS[row].tolist()
            shown.append(
                {
                    "before": decode(text[max(0, position - 24) : position + 1]),
                    "thought": decode(thoughts.tokens_BRT[row, branch, :length].tolist()),
                    "after": decode(text[position + 1 : position + 1 + self.base.plan.horizon]),
                }
            )
        return shown


def save_items(items: dict[str, Tensor], folder: Path, window: int) -> None:
    """Every item's gains of one measurement, so that methods can be compared position by position."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"item", "text", "kind", "length"}
    kept = {name: v.detach().cpu().to(torch.int32 if name in whole else torch.float32) for name, v in items.items()}
    save_file({name: value.contiguous() for name, value in kept.items()}, folder / f"window-{window:05d}.safetensors")
