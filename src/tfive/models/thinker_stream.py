"""Reading a text token by token, with or without a thought in it: keys, values and recurrent states of one growing row.

A `Stream` is a pass like those of the tree engine, so it meets the same models in the same way and needs none of
transformers' caches. Nothing is written in place: a fork is a new view of the same past and costs nothing. `Writing`
holds two of them, the text itself and the text with the newest thought in it, and mixes what they predict.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tfive import chance
from tfive.models.gate import PredictionGate
from tfive.tree.attention import Attending, KeysValues
from tfive.tree.decode import Reading
from tfive.tree.delta_kernel import choose_rule
from tfive.tree.deltanet import ForkMemory, RecurrentParts, rule_inputs
from tfive.tree.forward import TreeModel
from tfive.tree.head import mix_log_probs
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.settings import SamplingSettings


def thought_uniforms(seed: int, position: int, steps: int) -> np.ndarray:
    """The random numbers of the thought after token `position`, the same whoever asks: `[T]` in (0, 1)."""
    return chance.uniforms(seed, "thought", 0, position, 0, np.arange(steps))


class Stream(Attending):
    """One row as far as it has been read. `read` goes on; `fork` gives a second reader of the same past."""

    def __init__(self, engine: TreeModel, origin: Stream | None = None) -> None:
        super().__init__("sdpa" if engine.kernel == "sdpa" else "folded", self)
        self.engine = engine
        self.kept: dict[int, KeysValues] = {} if origin is None else dict(origin.kept)
        """Keys and values of everything read, by layer."""
        self.states: dict[int, ForkMemory] = {} if origin is None else dict(origin.states)
        """States of recurrent layers after the last token, by layer."""
        self.length: int = 0 if origin is None else origin.length
        self._new = 0
        if engine.backbone.recurrent:
            self._rule = choose_rule(engine.engine.delta_rule, engine.device, engine.model.dtype).rule

    def fork(self) -> Stream:
        """A stream that has read the same and goes its own way from here."""
        return Stream(self.engine, self)

    def read(self, embeds_1nD: Tensor) -> Tensor:
        """Read n more inputs; returns their final hidden states, `[n, D]`."""
        self._masks.clear()
        self._new = embeds_1nD.shape[1]
        positions_1n = self.length + torch.arange(self._new, device=embeds_1nD.device)[None]
        hidden_1nD = self.engine.backbone.run(embeds_1nD, positions_1n, self)
        self.length += self._new
        return hidden_1nD[0]

    def extend(self, layer: int, key_BXnE: Tensor, value_BXnE: Tensor) -> KeysValues:
        if layer in self.kept:
            earlier_key, earlier_value = self.kept[layer]
            key_BXnE, value_BXnE = torch.cat([earlier_key, key_BXnE], 2), torch.cat([earlier_value, value_BXnE], 2)
        self.kept[layer] = key_BXnE, value_BXnE
        return self.kept[layer]

    def visible(self, window: int | None) -> Tensor:
        every_m = torch.arange(self.length + self._new, device=self.engine.device)
        apart_nm = every_m[self.length :, None] - every_m
        seen_nm = apart_nm >= 0 if window is None else (apart_nm >= 0) & (apart_nm < window)
        return seen_nm[None, None]

    def mix(self, parts: RecurrentParts, hidden_BnD: Tensor) -> Tensor:
        """A recurrent layer's output for the new inputs; its state and convolution go on from where they were."""
        inputs_BnU, gate, strength, rate = parts.project(hidden_BnD)
        before = self.states.get(parts.layer)
        tail = inputs_BnU.new_zeros(1, parts.memory, inputs_BnU.shape[-1]) if before is None else before.tail_XJU
        past_BLU = torch.cat([tail, inputs_BnU], 1)
        wide = torch.promote_types(past_BLU.dtype, torch.float32)
        bias = None if parts.tap_bias_U is None else parts.tap_bias_U.to(wide)
        taps_U1J = parts.taps_UJ.to(wide)[:, None]
        convolved_BUn = F.conv1d(past_BLU.to(wide).mT, taps_U1J, bias, groups=len(taps_U1J))
        ready = rule_inputs(parts, convolved_BUn.mT.to(inputs_BnU.dtype), strength, rate, None)
        output, trace = self._rule(*ready.paths(0, 1, self._new), None if before is None else before.state_XIEF)
        first = torch.zeros(1, dtype=torch.int64, device=hidden_BnD.device)
        tail = past_BLU[:, past_BLU.shape[1] - parts.memory :]
        self.states[parts.layer] = ForkMemory(trace.state_after(first, first + self._new), tail)
        return parts.finish(output.to(hidden_BnD.dtype), gate)

    def reading(self, width: int, last_D: Tensor) -> Reading:
        """This past as the trunk of the sampling loop, padded to `width` tokens; `last_D` is its last hidden state."""
        room = width - self.length
        attention = {i: (F.pad(k, (0, 0, 0, room)), F.pad(v, (0, 0, 0, room))) for i, (k, v) in self.kept.items()}
        return Reading(last_D.expand(1, width, -1), attention, self.states)


@dataclass(frozen=True)
class NextToken:
    """Log-probabilities of every vocabulary entry as the next token, `[V]`."""

    plain_V: Tensor
    thoughtful_V: Tensor | None
    """After the newest thought; None where none serves."""
    gate: float
    """β_g: how far the thought is trusted; 0 where there is none."""
    mixed_V: Tensor


class Writing:
    """A text that is being written: it can be thought about after any token, and says what it expects next."""

    def __init__(
        self, engine: TreeModel, gate: PredictionGate | None, law: SamplingSettings, seed: int, width: int
    ) -> None:
        """`width` is the most tokens the text will have; it fixes the shape of every thought's sampling."""
        self.engine, self.gate, self.law, self.seed, self.width = engine, gate, law, seed, width
        self.ids: list[int] = []
        self.plain = Stream(engine)
        self.last_D: Tensor | None = None
        self.branch: Stream | None = None
        """The text with the newest thought in it."""
        self.branch_last_D: Tensor | None = None
        self.since = -1
        """The token after which the newest thought stands."""

    def read(self, ids: list[int]) -> None:
        """Go on with these tokens; a thought whose H tokens are over is dropped."""
        embeds = self.engine.embed(torch.tensor([ids], device=self.engine.device))
        self.last_D = self.plain.read(embeds)[-1]
        self.ids += ids
        if self.branch is not None and len(self.ids) - 1 - self.since < self.engine.plan.horizon:
            self.branch_last_D = self.branch.read(embeds)[-1]
        else:
            self.branch = self.branch_last_D = None

    def think(self) -> Thoughts:
        """A thought after the last token; from here on it is the one that serves."""
        if self.last_D is None:
            raise ValueError("there is no text to think about yet")
        position, plan, device = len(self.ids) - 1, self.engine.plan, self.engine.device
        tokens_1S = torch.tensor([self.ids], device=device)
        room = (0, self.width - len(self.ids))
        place_11 = torch.tensor([[position]], device=device)
        document_1S = F.pad(torch.zeros_like(tokens_1S), room, value=-1)
        texts = TextBatch(F.pad(tokens_1S, room), document_1S, place_11, place_11)
        numbers = torch.from_numpy(thought_uniforms(self.seed, position, plan.length)).view(1, 1, -1)
        thoughts = self.engine.sample(texts, numbers, self.law, self.plain.reading(self.width, self.last_D))
        length = int(thoughts.length_BR)
        embeds = thought_embeds(self.engine, thoughts.tokens_BRT[0, 0, :length].tolist(), bool(thoughts.closed_BR))
        self.branch, self.since = self.plain.fork(), position
        self.branch_last_D = self.branch.read(embeds)[-1]
        return thoughts

    def expects(self) -> NextToken:
        """What the next token may be: without the thought, with it, and mixed in probability by the gate."""
        if self.last_D is None:
            raise ValueError("there is no text to go on from yet")
        plain_V = self.engine.head.logits(self.last_D[None])[0].log_softmax(-1)
        if self.branch_last_D is None:
            return NextToken(plain_V, None, 0.0, plain_V)
        thoughtful_V = self.engine.head.logits(self.branch_last_D[None])[0].log_softmax(-1)
        beta = self._trust(self.branch_last_D, self.last_D)
        mixed_V = mix_log_probs(plain_V, thoughtful_V, beta.to(plain_V.dtype))
        return NextToken(plain_V, thoughtful_V, float(beta), mixed_V)

    def _trust(self, with_D: Tensor, without_D: Tensor) -> Tensor:
        if self.gate is None:
            return torch.ones((), device=with_D.device)
        # The gate reads whole continuations and knows a token by its place in them; this is the place of this one.
        horizon = self.engine.plan.horizon
        logits_H = self.gate(with_D.expand(horizon, -1), without_D.expand(horizon, -1))
        return torch.sigmoid(logits_H[len(self.ids) - 1 - self.since])


def thought_embeds(engine: TreeModel, tokens: list[int], closed: bool) -> Tensor:
    """Input embeddings `[1, n, D]` of a thought between its delimiters; a sampled close is already its last token."""
    plan = engine.plan
    ids = [*plan.open_ids[: plan.open_width], *tokens, *(() if closed else plan.close_ids[: plan.close_width])]
    marks = [-1] * len(ids)
    if plan.learned:
        marks[0], marks[-1] = 0, 1
    return engine.embed(torch.tensor([ids], device=engine.device), torch.tensor([marks], device=engine.device))
