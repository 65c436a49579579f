"""What the text that follows costs, after a thought and without one, once the text itself has been read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tfive.tree.attention import TreePass
from tfive.tree.fast.replayed import Named
from tfive.tree.grow import grow, segment_counts, without_thoughts
from tfive.tree.head import target_log_prob
from tfive.tree.layout import PADDING, Layout, TextBatch, Thoughts, layout_tensors, taken, tensors_of
from tfive.tree.outputs import Reading, Scores
from tfive.tree.picks import Count, Picks
from tfive.tree.reader import TreeReader

LOWER = "lower_BRAD"
"""What `Scoring.branches` calls the activations of thoughts that enter the block the reading kept them for."""


_KINDS = 3
"""How many numbers of picks are told of each branch."""


@dataclass
class Scoring:
    """One call of `TreeModel.score`: what is read, and what is wanted of it."""

    tree: TreeReader
    texts: TextBatch
    reading: Reading
    features: bool = False
    whole: bool = False
    actions_B: Tensor | None = None
    """bool: texts whose actions' log-probabilities and states are wanted as well; the pass computes them anyway."""
    thoughts: Thoughts | None = None
    """Those of all branches, where some are scored."""

    def __post_init__(self) -> None:
        self._count: Count = "every"
        self._counts: list[list[int]] = []
        # Features are asked for after empty thoughts, and actions of some texts: there much would be read for nothing.
        self._every = self.tree.takes_every and not self.features and self.actions_B is None
        if not self._every:
            keep_BPH = without_thoughts(self.texts, self.tree.plan.horizon)[2]
            counts = [keep_BPH.sum().view(1)]
            counts += [] if self.thoughts is None else self._counted(self.thoughts, keep_BPH)
            # Before any pass of this call, and the one moment at which picks wait for the device.
            self._count, *found = torch.cat(counts).tolist()
            branches = len(found) // _KINDS
            self._counts = [found[kind * branches : (kind + 1) * branches] for kind in range(_KINDS)]

    def _counted(self, thoughts: Thoughts, keep_BPH: Tensor) -> list[Tensor]:
        """How many picks each branch has in all texts, `[R]` each: continuation tokens after all checkpoints, after the
        last, and actions."""
        plan = self.tree.plan
        valid_BR = thoughts.valid_BR & (self.texts.positions_BP.repeat_interleave(plan.group, 1) >= 0)
        last_BR = keep_BPH.sum(-1).repeat_interleave(plan.group, 1) * valid_BR
        every_BR = last_BR * segment_counts(plan, thoughts.length_BR, "last" if self.whole else "all")
        action_BR = thoughts.length_BR * valid_BR
        if self.actions_B is not None:
            action_BR = action_BR * self.actions_B[:, None]
        return [count_BR.sum(0) for count_BR in (every_BR, last_BR, action_BR)]

    def _how_many(self, start: int, stop: int) -> list[Count]:
        """Picks of these branches, of each kind."""
        if not self._counts:
            return ["every"] * _KINDS
        return [sum(counts[start:stop]) for counts in self._counts]

    def plain(self, valid_BR: Tensor) -> Named:
        """The losses without a thought, read off the trunk once per position, whatever the group."""
        given = [*tensors_of(self.texts), self.reading.hidden_BSD, valid_BR]
        if not self._every:
            return self._plain(given)
        return self.tree.passes(("plain", self.tree.plan), self.tree.home, self._plain, given)

    def _plain(self, given: Sequence[Tensor]) -> Named:
        *texts, hidden_BSD, valid_BR = given
        tree, width = self.tree, hidden_BSD.shape[1]
        picks = Picks.of(*without_thoughts(TextBatch(*texts), tree.plan.horizon), width, self._count)
        loss_BPH = -tree.reduce(hidden_BSD, picks, target_log_prob)["log_prob"]
        group, valid_BR1 = tree.plan.group, valid_BR[..., None]
        loss_BRH = loss_BPH.repeat_interleave(group, 1) * valid_BR1
        count_BR = picks.keep.sum(-1).clamp(min=1).repeat_interleave(group, 1)
        found = {"no_thought_BR": loss_BRH.sum(-1) / count_BR, "no_thought_token_BRH": loss_BRH}
        if self.features:
            seen_BPHD = picks.spread(picks.rows(hidden_BSD))
            found["no_thought_features_BRHD"] = seen_BPHD.repeat_interleave(group, 1) * valid_BR1[..., None]
        return found

    def unread(self, thoughts: Thoughts) -> Scores:
        """The scores of thoughts that shut gates keep out: those without a thought, and no branch is read."""
        plain = self.plain(thoughts.valid_BR)
        layout = self.tree.layouts(grow, self.texts, self.tree.plan, thoughts, "last" if self.whole else "all")
        found = {
            "losses_BRK": plain["no_thought_BR"][..., None] * layout.segment_mask_BRK,
            "checkpoint_BRK": layout.checkpoint_BRK,
            "mask_BRK": layout.segment_mask_BRK,
            "token_BRH": plain["no_thought_token_BRH"],
            "token_mask_BRH": layout.loss_mask_BRH,
        }
        if self.features:
            found["features_BRHD"] = plain["no_thought_features_BRHD"]
        return Scores(**found, **plain)

    @property
    def _kept(self) -> list[Tensor]:
        """Keys and values of the trunk, layer by layer."""
        return [part for both in self.reading.attention.values() for part in both]

    @property
    def _below(self) -> int | None:
        """The block that the reading kept the trunk's activations for."""
        return None if self.reading.lower is None else self.reading.lower.block

    def _read(self, layout: Layout, kept: Sequence[Tensor]) -> Named:
        """Final `hidden` states of the branches' nodes, `[B, n, D]`, after the trunk that was read before, of which
        these keys and values are, and what is `entering` the block that activations are kept for."""
        tree, below = self.tree, self._below
        nodes_x = tree.existing(layout.kind_BN[:, self.texts.tokens_BS.shape[1] :] != PADDING, tree.fuses)
        names = list(layout_tensors(layout))

        def work(given: Sequence[Tensor]) -> Named:
            rows: dict[str, Any] = dict(zip(names, given))
            own, kept = replace(layout, **rows), given[len(names) :]
            recurrence = tree.recurrence(own, position_BP=self.texts.positions_BP, memory=self.reading.recurrent)
            both = dict(zip(self.reading.attention, zip(kept[::2], kept[1::2])))
            row = TreePass(own, tree.kernel, trunk=both, recurrence=recurrence, gates=tree.gates)
            embeds = tree.embed(own.token_BN[:, row.start :], own.delimiter_BN[:, row.start :])
            noted = list[Tensor]()
            note = None if below is None else (below, noted)
            found = {"hidden": tree.read_only(embeds, own.position_BN[:, row.start :], row, nodes_x, note=note)}
            return found | dict(zip(("entering",), noted))

        given = [*layout_tensors(layout).values(), *kept]
        # What leaves padding out comes in too many sizes to be captured; what is read whole is, with its losses.
        alone = tree.replays and not tree.plan.gated and nodes_x is None and not self._every
        key = ("score", below, tree.plan, layout.segment_count, layout.segment_every)
        return tree.passes(key, tree.home, work, given) if alone else work(given)

    def branches(self, thoughts: Thoughts, start: int) -> Named:
        """The losses after each checkpoint (or the last alone) of these thoughts, the first of which is branch
        `start`."""
        tree, stop = self.tree, start + thoughts.length_BR.shape[1]
        position_BR = self.texts.positions_BP.repeat_interleave(tree.plan.group, 1)[:, start:stop]
        given = [*tensors_of(self.texts), *tensors_of(thoughts), self.reading.hidden_BSD, position_BR]
        given += [*([] if self.actions_B is None else [self.actions_B]), *self._kept]
        work = partial(self._branches, self._how_many(start, stop))
        if not self._every:
            return work(given)
        key = ("branches", self._below, self.whole, tree.plan)
        return tree.passes(key, tree.home, work, given)

    def _branches(self, counts: Sequence[Count], given: Sequence[Tensor]) -> Named:
        """The same of what `branches` gives, with so many picks of each kind."""
        tree, rest = self.tree, iter(given)
        texts, thoughts = taken(TextBatch, rest), taken(Thoughts, rest)
        hidden_BSD, position_BR = next(rest), next(rest)
        actions_B = None if self.actions_B is None else next(rest)
        layout = tree.layouts(grow, texts, tree.plan, thoughts, "last" if self.whole else "all", position_BR)
        every, final, acted = counts
        picks = Picks.continuations(layout, every)
        last = Picks.last_continuations(layout, final) if self.features else None
        actions = None if actions_B is None else Picks.actions(layout, thoughts.tokens_BRT, actions_B, acted)
        read = self._read(layout, list(rest))
        hidden_BND = torch.cat([hidden_BSD, read["hidden"]], 1)

        loss_BRKH = -tree.reduce(hidden_BND, picks, target_log_prob)["log_prob"]
        count_BR = layout.loss_mask_BRH.sum(-1).clamp(min=1)
        whole_BR11 = (layout.segment_mask_BRK.sum(-1) - 1).clamp(min=0)[..., None, None]
        found = {
            "losses_BRK": loss_BRKH.sum(-1) / count_BR[..., None],
            "checkpoint_BRK": layout.checkpoint_BRK,
            "mask_BRK": layout.segment_mask_BRK,
            "token_BRH": loss_BRKH.take_along_dim(whole_BR11, 2)[:, :, 0],
            "token_mask_BRH": layout.loss_mask_BRH,
        }
        if last is not None:
            found["features_BRHD"] = last.spread(last.rows(hidden_BND))
        if "entering" in read:
            # Thoughts stand before the continuations, one after another.
            nodes = layout.branch_count * layout.thought_width
            found[LOWER] = read["entering"][:, :nodes].unflatten(1, (layout.branch_count, layout.thought_width))
        if actions is not None:
            found["log_prob_BRT"] = tree.reduce(hidden_BND, actions, target_log_prob, forbidden=True)["log_prob"]
            found["states_BRTD"] = actions.spread(actions.rows(hidden_BND))
        return found
