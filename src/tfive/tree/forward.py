"""The engine's four verbs: `sample` thoughts, `score` them, recompute the `policy` with gradients, and read `values`.

A `TreeModel` is a transformers model (one weight set) with a plan. Everything it computes equals what the plain model
would compute on one row per thought (text up to p, opening, thought, close, continuation); the tree only avoids reading
the text again for every thought.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tfive.tree.decode import Sampler, ended
from tfive.tree.delimiters import Delimiters
from tfive.tree.gated import ReadingGates
from tfive.tree.grow import full_thoughts
from tfive.tree.head import (
    Source,
    reduce_vocabulary,
    score_centre,
    target_log_prob,
    target_log_prob_and_entropy,
)
from tfive.tree.law import draw, law_log_prob, law_logits
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts, taken, tensors_of
from tfive.tree.outputs import Lower, PolicyOutput, Reading, Scores
from tfive.tree.packed import last_block_for
from tfive.tree.picks import Count, Picks
from tfive.tree.policy_pass import PolicyPass, ToCapture
from tfive.tree.reader import TreeReader
from tfive.tree.scoring import LOWER, Scoring
from tfive.tree.settings import EngineOptions, SamplingSettings

_SAMPLERS = 4
"""How many shapes of batch keep their sampling buffers."""

ValueHead = Callable[[Tensor, Tensor], Tensor]
"""`(features_BRTD, step_T) → values_BRT`; steps count from 0."""


@dataclass(frozen=True)
class Centring:
    """Where score centring takes the sampling law from: the old policy and the law it sampled by."""

    old: TreeModel
    law: SamplingSettings
    term: Callable[[Tensor, Tensor, Tensor], Tensor]
    """`(log π_θ, log π_old, log q)` of full rows → a number per row whose gradient is the mean score to subtract."""


class TreeModel(TreeReader):
    """A model over tree rows with the four verbs of training. It keeps sampling buffers for a few shapes of batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: ThoughtPlan,
        engine: EngineOptions | None = None,
        delimiters: Delimiters | None = None,
        gates: ReadingGates | None = None,
    ) -> None:
        super().__init__(model, plan, engine, delimiters, gates)
        self._samplers: dict[Any, Sampler] = {}
        self.sampler: Sampler | None = None  # the one used last

    @torch.no_grad()
    def sample(
        self,
        texts: TextBatch,
        uniforms_BRT: Tensor,
        law: SamplingSettings,
        reading: Reading | None = None,
        prefix: tuple[Tensor, Tensor] | None = None,
    ) -> Thoughts:
        """One thought per branch, drawn from the law q with one uniform number (float64) per branch and step; with
        numbers for fewer steps than the plan's length, thoughts end there.

        `prefix`, `(tokens_BRT, length_BR)`, gives the first tokens of each thought; their log q is 0, since nothing
        drew them. It is not for parity mode.

        In parity mode every text is a batch of its own and every step reads the whole padded row by the training
        forward: slow, but tokens do not depend on batching and `log_q` equals `policy(…, parity=True)` bit for bit.
        """
        if law.parity and prefix is not None:
            raise ValueError("parity mode draws whole thoughts; it cannot continue a prefix")
        if law.parity:
            return self._sample_in_parity(texts, uniforms_BRT.to(self.device), law)
        fusion = self._fused
        layout = self._grow(texts, full_thoughts(texts, self.plan))
        reading = reading or self.read(texts)
        if fusion is not None:
            fusion.refresh()
        # A captured step reads the weights where they were.
        home = next(self.model.parameters()).data_ptr()
        key = (layout.token_BN.shape, layout.position_BR.shape, reading.hidden_BSD.dtype, home, law, fusion is None)
        if key not in self._samplers:
            usable = [(k, v) for k, v in self._samplers.items() if k[3] == home]
            self._samplers = dict(usable[-_SAMPLERS + 1 :])
            asked = (self.backbone, self.head, self.embed, self.engine, law, self.forbidden_V)
            self._samplers[key] = Sampler(*asked, layout, reading, fusion)
        self.sampler = self._samplers[key]
        return self.sampler.run(layout, reading, uniforms_BRT, prefix)

    def let_go(self) -> None:
        """Give back what is kept for batches of shapes that came before, because memory ran out: buffers and captured
        steps of sampling, which are made anew where they are needed, and captured passes, which are not."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.forget_samplers()
        self.passes.refuse("memory ran out")

    def forget_samplers(self) -> None:
        """Drop what sampling keeps for shapes of batch. It knows its engine, so an engine that is done with, and the
        weights it holds, would otherwise stay until garbage is collected."""
        self._samplers, self.sampler = {}, None

    def _sample_in_parity(self, texts: TextBatch, uniforms_BRT: Tensor, law: SamplingSettings) -> Thoughts:
        parts, steps = [], uniforms_BRT.shape[-1]
        for row in range(len(texts.tokens_BS)):
            text = texts.rows(row, row + 1)
            thoughts = full_thoughts(text, self.plan).to(self.device)
            for step in range(steps):
                layout = self._grow(text, thoughts)
                before_RD = self._run(layout)[0, layout.action_node_BRT[0, :, step]]
                logits_RV = law_logits(self.head.logits(before_RD, self.forbidden_V), law)
                token_R, _ = draw(logits_RV, uniforms_BRT[row, :, step])
                thoughts.tokens_BRT[0, :, step] = token_R
            thoughts = ended(thoughts.tokens_BRT[..., :steps], thoughts.log_q_BRT[..., :steps], layout)
            layout = self._grow(text, thoughts)
            picks = Picks.actions(layout, thoughts.tokens_BRT)
            log_q = self.reduce(self._run(layout), picks, law_log_prob(law), forbidden=True)["log_prob"]
            parts.append(replace(thoughts, log_q_BRT=log_q.float()))
        return Thoughts(*(torch.cat([getattr(p, name) for p in parts]) for name in Thoughts.__dataclass_fields__))

    @torch.no_grad()
    def score(
        self,
        texts: TextBatch,
        thoughts: Thoughts,
        reading: Reading | None = None,
        features: bool = False,
        *,
        whole: bool = False,
        actions_B: Tensor | None = None,
    ) -> Scores:
        """Losses of every checkpoint's continuation and of no thought, from one reading of the text.

        With `max_nodes` the branches are scored a few at a time, each time after the same reading. `whole`
        scores after the whole thought alone, where no reward is needed. `actions_B` (bool) names texts whose actions'
        log-probabilities and states are wanted too. While all reading gates are shut, the losses with a thought are
        those without one, bit for bit; no branch is read then, so nothing is known of actions. A reading with `lower`
        activations has those of the thoughts added.
        """
        texts, thoughts = texts.to(self.device), thoughts.to(self.device)
        scoring = Scoring(self, texts, reading or self.read(texts), features, whole, actions_B, thoughts)
        if self.unread:
            return scoring.unread(thoughts)
        # First, so that a device has work while the host prepares the branches.
        plain = scoring.plain(thoughts.valid_BR)
        # Masked attention asks every node for every key of its pass, seen or not; with twice the trunk's nodes in a
        # pass that waste stays bounded and the products stay large.
        step = max(1, (self.engine.max_nodes or 2 * texts.tokens_BS.shape[1]) // self.plan.scored_nodes(whole))
        starts = range(0, max(1, thoughts.length_BR.shape[1]), step)
        parts = [scoring.branches(thoughts.branches(start, start + step), start) for start in starts]
        joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
        lower, own = scoring.reading.lower, joined.pop(LOWER, None)
        if lower is not None and own is not None:
            joined["lower_BND"] = torch.cat([lower.hidden_BND, own.flatten(1, 2)], 1)
        return Scores(**joined, **plain)

    @torch.no_grad()
    def no_thought(self, texts: TextBatch) -> Tensor:
        """ℓ_0 of every item, `[B, R]`, from the texts alone: no branch is grown."""
        texts = texts.to(self.device)
        valid_BR = full_thoughts(texts, self.plan).valid_BR
        return Scoring(self, texts, self.read(texts)).plain(valid_BR)["no_thought_BR"]

    def policy(
        self,
        texts: TextBatch,
        thoughts: Thoughts | None = None,
        *,
        actions: bool = True,
        entropy: bool = False,
        features: bool = False,
        centring: Centring | None = None,
        text: bool = False,
        continuations: bool = False,
        no_thought: bool = False,
        of_first: bool = False,
        parity: bool = False,
        padded: bool = False,
    ) -> PolicyOutput:
        """The training forward: log-probabilities of the sampled actions under the model's own distribution (no
        temperature, forbidden entries out), and the other parts asked for, with gradients.

        `text` asks for the texts' own next tokens; without thoughts there is nothing else. `continuations` hangs the
        continuation behind the whole thought (`of_first`: of a group's first alone) and asks for its tokens after it;
        with `no_thought` for the same tokens' predictions without it as well, which get no gradients. `parity`: one
        text at a time. `padded`: with the picks of passes that are captured, which round alike.
        """
        if thoughts is None and (continuations or centring):
            raise ValueError("continuations and centring need thoughts")
        parts: dict[str, Any] = {"actions": actions, "text": text, "continuations": continuations}
        parts |= {"no_thought": no_thought, "of_first": of_first}
        if parity and len(texts.tokens_BS) > 1:
            asked = parts | {"entropy": entropy, "features": features, "centring": centring, "parity": True}
            each = range(len(texts.tokens_BS))
            own = [None if thoughts is None else thoughts.rows(b, b + 1) for b in each]
            return PolicyOutput.stacked([self.policy(texts.rows(b, b + 1), own[b], **asked) for b in each])
        prepared = (self._of_capture if padded else self.prepare)(texts, thoughts, **parts)
        # Parity samples by passes that compute every node.
        hidden_BND = self._run(prepared.layout, nodes_x=None if parity else prepared.nodes_x)
        output = self._reduced(prepared, hidden_BND, entropy, features)
        if centring is None or thoughts is None or prepared.actions is None:
            return output
        return replace(output, centre_BRT=self._centre(texts, hidden_BND, prepared.actions, centring, thoughts))

    def prepare(
        self,
        texts: TextBatch,
        thoughts: Thoughts | None,
        *,
        actions: bool = True,
        text: bool = False,
        continuations: bool = False,
        no_thought: bool = False,
        of_first: bool = False,
        count: Count = None,
    ) -> PolicyPass:
        """The rows of a `policy` pass and the nodes that it reads; the parts are asked for as there."""
        layout = self._grow(texts, thoughts, ("first" if of_first else "last") if continuations else "none")
        tokens_BRT = thoughts.tokens_BRT.to(self.device) if thoughts is not None and actions else None
        after = Picks.last_continuations(layout, count) if continuations else None
        apart = no_thought or self.unread
        return PolicyPass(
            layout,
            actions=None if tokens_BRT is None else Picks.actions(layout, tokens_BRT, count=count),
            text=Picks.text(layout, count) if text else None,
            after=after,
            without=after.without_thought(layout, count) if after is not None and apart else None,
            no_thought=no_thought,
            nodes_x=self._packing(layout),
        )

    def _of_capture(self, texts: TextBatch, thoughts: Thoughts | None, **asked: bool) -> PolicyPass:
        """As `prepare`, with the picks of passes that are captured: of few sizes, or all that may exist where thoughts
        have one length, for which nothing waits unless padding is left out."""
        return self.prepare(texts, thoughts, count=None if self.plan.variable_length else "every", **asked).padded()

    def to_capture(self, texts: TextBatch, thoughts: Thoughts | None, **asked: bool) -> ToCapture | PolicyPass:
        """A `policy` pass to be captured; the pass itself where it leaves padding out, and so comes in too many
        sizes."""
        kind = (self.plan, *(name for name, wanted in asked.items() if wanted))
        if self.plan.variable_length or self.engine.packed == "on":
            prepared = self._of_capture(texts, thoughts, **asked)
            return prepared if prepared.nodes_x is not None else ToCapture(kind, prepared.tensors, prepared.on)
        records = [one.to(self.device) for one in (texts, thoughts) if one is not None]

        def again(tensors: Sequence[Tensor]) -> PolicyPass:
            rest = iter(tensors)
            own = taken(TextBatch, rest)
            return self._of_capture(own, None if thoughts is None else taken(Thoughts, rest), **asked)

        return ToCapture(kind, [tensor for record in records for tensor in tensors_of(record)], again)

    def policy_from(self, prepared: PolicyPass) -> PolicyOutput:
        """The training forward of a pass that was prepared; nothing of it waits for the host where `replays_training`
        says so."""
        return self._reduced(prepared, self._run(prepared.layout, nodes_x=prepared.nodes_x))

    def _reduced(
        self, prepared: PolicyPass, hidden_BND: Tensor, entropy: bool = False, features: bool = False
    ) -> PolicyOutput:
        """What was asked for, from the final hidden states of all nodes."""
        found: dict[str, Tensor] = {}
        picks, text = prepared.actions, prepared.text
        if picks is not None:
            reducer = target_log_prob_and_entropy if entropy else target_log_prob
            reduced = self.reduce(hidden_BND, picks, reducer, forbidden=True)
            found["log_prob_BRT"] = reduced["log_prob"]
            if entropy:
                found["entropy_BRT"] = reduced["entropy"]
            if features:
                found["features_BRTD"] = picks.spread(picks.rows(hidden_BND))
        if text is not None:
            found["text_log_prob_BS"] = self.reduce(hidden_BND, text, target_log_prob)["log_prob"]
            found["text_mask_BS"] = text.keep
        if prepared.after is not None:
            found |= self._after_thoughts(hidden_BND, prepared.after, prepared.without, prepared.no_thought)
        return PolicyOutput(mask_BRT=prepared.layout.action_mask_BRT, **found)

    def _after_thoughts(
        self, hidden_BND: Tensor, after: Picks, without: Picks | None, no_thought: bool
    ) -> dict[str, Tensor]:
        """Log-probabilities of continuation tokens after the thought, and without it where asked for."""
        log_prob_BRH = self.reduce(hidden_BND, after, target_log_prob)["log_prob"]
        found = {"continuation_mask_BRH": after.keep}
        if without is None:
            return found | {"continuation_log_prob_BRH": log_prob_BRH}
        with torch.no_grad():
            plain_BRH = self.reduce(hidden_BND, without, target_log_prob)["log_prob"]
        if self.unread:
            # Behind shut gates both differ by rounding alone: the value is that without a thought, bit for bit, and the
            # gradient (shut gates have one) that of the reading.
            log_prob_BRH = plain_BRH + (log_prob_BRH - log_prob_BRH.detach())
        if no_thought:
            found["no_thought_log_prob_BRH"] = plain_BRH
        return found | {"continuation_log_prob_BRH": log_prob_BRH}

    def _centre(
        self, texts: TextBatch, hidden_BND: Tensor, picks: Picks, centring: Centring, thoughts: Thoughts
    ) -> Tensor:
        old = centring.old
        with torch.no_grad():
            layout = old._grow(texts, thoughts)  # without continuations, so actions stand elsewhere in it
            before = Picks.actions(layout, thoughts.tokens_BRT.to(self.device)).rows(old._run(layout))
        sources = [
            Source(self.head, picks.rows(hidden_BND), self.forbidden_V),
            Source(old.head, before, old.forbidden_V),
        ]
        reducer = score_centre(lambda logits: law_logits(logits, centring.law), centring.term)
        found = reduce_vocabulary(sources, reducer, None, self.engine.head_bytes)
        return picks.spread(found["centre"])

    def features(self, texts: TextBatch, thoughts: Thoughts, lower: Lower | None = None) -> Tensor:
        """`[B, R, T, D]` final hidden states of the last node before each action (0 where there is none)."""
        layout = self._grow(texts, thoughts)
        picks = Picks.actions(layout, thoughts.tokens_BRT.to(self.device))
        # A pass that is made again for its gradients is made whole: it would meet the model's own forwards then.
        with nullcontext() if self.recomputes else last_block_for(self.backbone, picks.index, self.device):
            return picks.spread(picks.rows(self._run(layout, lower, fuse=not torch.is_grad_enabled())))

    @torch.no_grad()
    def lower(self, texts: TextBatch, thoughts: Thoughts, block: int) -> Lower:
        """Activations of all nodes before block `block`: the frozen part, computed once for many passes of the rest."""
        if not 0 < block < self.block_count:
            raise ValueError(f"block {block} of {self.block_count}: take 1 or more, and `features` for the head alone")
        layout = self._grow(texts, thoughts)
        return Lower(self._run(layout, stop=block, fuse=True), block)

    @torch.no_grad()
    def states(self, texts: TextBatch, thoughts: Thoughts, lower: Lower) -> Tensor:
        """`[B, R, T, D]`: of activations that enter a block, those of the last node before each action."""
        picks = Picks.actions(self._grow(texts, thoughts), thoughts.tokens_BRT.to(self.device))
        return picks.spread(picks.rows(lower.hidden_BND.to(self.device)))

    def values(self, texts: TextBatch, thoughts: Thoughts, value_head: ValueHead, lower: Lower | None = None) -> Tensor:
        """V(s_t) of every prefix before an action, `[B, R, T]` (0 where there is none), with gradients.

        The row holds text and thoughts alone; there is no scoring text for a critic to see. With `lower` only the
        blocks above it run.
        """
        features_BRTD = self.features(texts, thoughts, lower)
        step_T = torch.arange(self.plan.length, device=features_BRTD.device)
        return value_head(features_BRTD, step_T) * thoughts.mask_BRT.to(features_BRTD.device)
