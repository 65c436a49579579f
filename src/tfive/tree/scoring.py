"""What the text that follows costs, after a thought and without one, once the text itself has been read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tfive.tree.attention import TreePass
from tfive.tree.grow import grow, segment_counts, without_thoughts
from tfive.tree.head import target_log_prob
from tfive.tree.layout import PADDING, Layout, TextBatch, Thoughts
from tfive.tree.outputs import Reading, Scores
from tfive.tree.picks import Picks
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
        node_BPH, target_BPH, keep_BPH = without_thoughts(self.texts, self.tree.plan.horizon)
        counts = [keep_BPH.sum().view(1), *(() if self.thoughts is None else self._counted(self.thoughts, keep_BPH))]
        # Before any pass of this call, and the one moment at which picks wait for the device.
        plain, *found = torch.cat(counts).tolist()
        self._plain = Picks.of(node_BPH, target_BPH, keep_BPH, self.texts.tokens_BS.shape[1], plain)
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

    def plain(self, valid_BR: Tensor) -> dict[str, Tensor]:
        """The losses without a thought, read off the trunk once per position, whatever the group."""
        tree, reading, picks = self.tree, self.reading, self._plain
        loss_BPH = -tree.reduce(reading.hidden_BSD, picks, target_log_prob)["log_prob"]
        group, valid_BR1 = tree.plan.group, valid_BR[..., None]
        loss_BRH = loss_BPH.repeat_interleave(group, 1) * valid_BR1
        count_BR = picks.keep.sum(-1).clamp(min=1).repeat_interleave(group, 1)
        found = {"no_thought_BR": loss_BRH.sum(-1) / count_BR, "no_thought_token_BRH": loss_BRH}
        if self.features:
            seen_BPHD = picks.spread(picks.rows(reading.hidden_BSD))
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

    def _read(self, layout: Layout, entering: list[Tensor]) -> Tensor:
        """Final hidden states of the branches' nodes, `[B, n, D]`, after the trunk that was read before. `entering`
        gets what enters the block that the reading kept the trunk's activations for."""
        tree, trunk, lower = self.tree, self.reading.attention, self.reading.lower
        nodes_x = tree.existing(layout.kind_BN[:, self.texts.tokens_BS.shape[1] :] != PADDING, tree.fuses)

        def work(layout: Layout, kept: Sequence[Tensor]) -> list[Tensor]:
            recurrence = tree.recurrence(layout, position_BP=self.texts.positions_BP, memory=self.reading.recurrent)
            both = dict(zip(trunk, zip(kept[::2], kept[1::2])))
            row = TreePass(layout, tree.kernel, trunk=both, recurrence=recurrence, gates=tree.gates)
            embeds = tree.embed(layout.token_BN[:, row.start :], layout.delimiter_BN[:, row.start :])
            noted = list[Tensor]()
            note = None if lower is None else (lower.block, noted)
            return [tree.read_only(embeds, layout.position_BN[:, row.start :], row, nodes_x, note=note), *noted]

        kept, key = (
            [part for both in trunk.values() for part in both],
            ("score", None if lower is None else lower.block),
        )
        # What leaves padding out comes in too many sizes to be captured.
        replayed = tree.replays and not tree.plan.gated and nodes_x is None
        found = tree.passes(key, tree.home, work, layout, kept) if replayed else work(layout, kept)
        entering += found[1:]
        return found[0]

    def branches(self, thoughts: Thoughts, start: int) -> dict[str, Tensor]:
        """The losses after each checkpoint (or the last alone) of these thoughts, the first of which is branch
        `start`."""
        tree, texts, reading = self.tree, self.texts, self.reading
        stop = start + thoughts.length_BR.shape[1]
        position_BR = texts.positions_BP.repeat_interleave(tree.plan.group, 1)[:, start:stop]
        layout = tree.layouts(grow, texts, tree.plan, thoughts, "last" if self.whole else "all", position_BR)
        every, final, acted = (sum(counts[start:stop]) for counts in self._counts)
        picks = Picks.continuations(layout, every)
        last = Picks.last_continuations(layout, final) if self.features else None
        actions = None if self.actions_B is None else Picks.actions(layout, thoughts.tokens_BRT, self.actions_B, acted)
        entering: list[Tensor] = []
        hidden_BND = torch.cat([reading.hidden_BSD, self._read(layout, entering)], 1)

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
        if entering:
            # Thoughts stand before the continuations, one after another.
            nodes = layout.branch_count * layout.thought_width
            found[LOWER] = entering[0][:, :nodes].unflatten(1, (layout.branch_count, layout.thought_width))
        if actions is not None:
            found["log_prob_BRT"] = tree.reduce(hidden_BND, actions, target_log_prob, forbidden=True)["log_prob"]
            found["states_BRTD"] = actions.spread(actions.rows(hidden_BND))
        return found
