"""Many texts that are being written at once, each with room for one thought: the pass that reads their next tokens.

Every row of the buffers is one text. Its columns are first an aside of fixed width (a thought between its delimiters
and the tokens it serves), then the text itself. Each reading takes one input per row and lane: lane 0 goes on with the
text, lane 1 with the aside, which sees the text up to where the thought stands and itself. Everything has a fixed shape
and no step waits for the host, so the step that uses this pass can be captured as a CUDA graph.

Local shape letters: n lanes, m columns, X key/value heads, E head features, U channels and J remembered inputs of a
recurrent layer's convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfive.tree.attention import Attending, KeysValues
from tfive.tree.decode import Reading
from tfive.tree.fast.delta_kernel import choose_rule
from tfive.tree.forward import TreeModel
from tfive.tree.recurrent.deltanet import ForkMemory, RecurrentParts, rule_inputs


class Lanes(Attending):
    """Keys, values and recurrent states of all rows, and who sees what in the next reading."""

    def __init__(self, engine: TreeModel, like: Reading, rows: int, width: int, aside: int) -> None:
        """`like` is any reading of the model, for the shapes of its layers; without room for an `aside` there is one
        lane."""
        super().__init__("sdpa" if engine.kernel == "sdpa" else "folded", self)
        self.engine, self.rows, self.width, self.aside = engine, rows, width, aside
        self.lanes = 2 if aside else 1
        self.span = width
        """How many text columns are looked at; the others must be empty."""
        self.slots = {layer: (self._room(k), self._room(v)) for layer, (k, v) in like.attention.items()}
        self.states = {layer: self._states(fork) for layer, fork in like.recurrent.items()}
        self.length_B, self.since_B, self.noted_B = (
            torch.zeros(rows, dtype=torch.int64, device=engine.device) for _ in range(3)
        )
        """Text tokens read; how many of them the newest thought sees; inputs of its aside read."""
        self.active_Bn = torch.zeros(rows, self.lanes, dtype=torch.bool, device=engine.device)
        self._row_B1 = torch.arange(rows, device=engine.device)[:, None]
        if engine.backbone.recurrent:
            self._rule = choose_rule(engine.engine.delta_rule, engine.device, engine.model.dtype).rule

    def _room(self, like_BXmE: Tensor) -> Tensor:
        _, heads, _, features = like_BXmE.shape
        return like_BXmE.new_zeros(self.rows, heads, self.aside + self.width, features)

    def _states(self, like: ForkMemory) -> ForkMemory:
        room = self.rows * self.lanes
        return ForkMemory(
            like.state_XIEF.new_zeros(room, *like.state_XIEF.shape[1:]),
            like.tail_XJU.new_zeros(room, *like.tail_XJU.shape[1:]),
        )

    def seat(self, row_b: Tensor, reading: Reading, length_b: Tensor) -> None:
        """Put freshly read texts of `length_b` tokens into rows."""
        for layer, buffers in self.slots.items():
            for buffer, read_bXSE in zip(buffers, reading.attention[layer]):
                buffer[row_b, :, self.aside : self.aside + read_bXSE.shape[2]] = read_bXSE
        for layer, kept in self.states.items():
            fork = reading.recurrent[layer]
            kept.state_XIEF[row_b * self.lanes] = fork.state_XIEF
            kept.tail_XJU[row_b * self.lanes] = fork.tail_XJU
        self.length_B[row_b], self.since_B[row_b], self.noted_B[row_b] = length_b, 0, 0

    @property
    def position_Bn(self) -> Tensor:
        """Position ids of the next inputs."""
        return torch.stack([self.length_B, self.since_B + self.noted_B][: self.lanes], 1)

    def read(self, embeds_BnD: Tensor, active_Bn: Tensor) -> Tensor:
        """Final hidden states `[B, n, D]` of one more input per row and lane; where a lane is not active the row stays
        as it is and the hidden state means nothing."""
        self._masks.clear()
        self.active_Bn.copy_(active_Bn)
        hidden_BnD = self.engine.backbone.run(embeds_BnD, self.position_Bn, self)
        self.length_B.add_(active_Bn[:, 0])
        if self.lanes == 2:
            self.noted_B.add_(active_Bn[:, 1])
        return hidden_BnD

    def extend(self, layer: int, key_BXnE: Tensor, value_BXnE: Tensor) -> KeysValues:
        # An idle lane writes into the place its next input will take: nobody looks there before.
        text_B = self.aside + self.length_B.clamp(max=self.width - 1)
        slot_Bn = torch.stack([text_B, self.noted_B.clamp(max=self.aside - 1)][: self.lanes], 1)
        key, value = self.slots[layer]
        key[self._row_B1, :, slot_Bn] = key_BXnE.transpose(1, 2).to(key.dtype)
        value[self._row_B1, :, slot_Bn] = value_BXnE.transpose(1, 2).to(value.dtype)
        seen = self.aside + self.span
        return key[:, :, :seen], value[:, :, :seen]

    def visible(self, window: int | None) -> Tensor:
        column_m = torch.arange(self.aside + self.span, device=self.engine.device)
        text_m, is_text_m = column_m - self.aside, column_m >= self.aside
        length_B1, since_B1, noted_B1 = (x[:, None] for x in (self.length_B, self.since_B, self.noted_B))
        seen = [is_text_m & (text_m <= length_B1)]
        apart = [length_B1 - text_m]
        if self.lanes == 2:
            seen.append(torch.where(is_text_m, text_m < since_B1, column_m <= noted_B1))
            apart.append(torch.where(is_text_m, since_B1 + noted_B1 - text_m, noted_B1 - column_m))
        seen_Bnm = torch.stack(seen, 1)
        if window is not None:
            seen_Bnm = seen_Bnm & (torch.stack(apart, 1) < window)
        return seen_Bnm[:, None]

    def mix(self, parts: RecurrentParts, hidden_BnD: Tensor) -> Tensor:
        """A recurrent layer's output; the states of active lanes go on, and an aside starts from its text's state."""
        inputs_BnU, gate, strength, rate = parts.project(hidden_BnD)
        kept = self.states[parts.layer]
        state_Q, tail_Q = self._begun(kept.state_XIEF), self._begun(kept.tail_XJU)
        past_QJU = torch.cat([tail_Q, inputs_BnU.flatten(0, 1)[:, None]], 1)
        wide = torch.promote_types(past_QJU.dtype, torch.float32)
        convolved_QU = (past_QJU[:, -parts.memory - 1 :] * parts.taps_UJ.T.to(wide)).sum(1)
        if parts.tap_bias_U is not None:
            convolved_QU = convolved_QU + parts.tap_bias_U
        convolved_BnU = convolved_QU.to(inputs_BnU.dtype).view_as(inputs_BnU)
        ready = rule_inputs(parts, convolved_BnU, strength, rate, None)
        output, trace = self._rule(*ready.paths(0, self.lanes, 1), state_Q)
        path_Q = torch.arange(len(state_Q), device=state_Q.device)
        self._keep(kept.state_XIEF, trace.state_after(path_Q, torch.ones_like(path_Q)))
        self._keep(kept.tail_XJU, past_QJU[:, 1:])
        return parts.finish(output.unflatten(0, (self.rows, self.lanes))[:, :, 0].to(hidden_BnD.dtype), gate)

    def _begun(self, kept_Q: Tensor) -> Tensor:
        """States before this reading: those of an aside of which nothing was read yet are its text's."""
        if self.lanes == 1:
            return kept_Q
        text_B, aside_B = kept_Q.unflatten(0, (self.rows, 2)).unbind(1)
        fresh_B = (self.noted_B == 0).view(-1, *[1] * (text_B.ndim - 1))
        return torch.stack([text_B, torch.where(fresh_B, text_B, aside_B)], 1).flatten(0, 1)

    def _keep(self, kept_Q: Tensor, new_Q: Tensor) -> None:
        active_Q = self.active_Bn.flatten().view(-1, *[1] * (kept_Q.ndim - 1))
        kept_Q.copy_(torch.where(active_Q, new_Q.to(kept_Q.dtype), kept_Q))
