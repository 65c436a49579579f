"""Many texts that are being written at once, each with room for one thought: the pass that reads their next tokens.

Every row of the buffers is a slot for one text. Its columns are first a branch of fixed width (a thought between its
delimiters and the tokens it serves), then the text itself. Each pass takes one input per slot and stream: stream 0 goes
on with the text, stream 1 with the branch, which sees the text up to where the thought stands and itself. With gated
reading the branch, once its thought is written, reads the text's last token again and goes on as the text does; it then
sees the thought through the gates alone. Everything has a fixed shape and no step waits for the host, so the step that
uses this pass can be captured as a CUDA graph.

Local shape letters: B slots, n streams, m columns, X key/value heads, E head features, U channels and J remembered
inputs of a recurrent layer's convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfive.tree.attention import Attending, KeysValues
from tfive.tree.fast.delta_kernel import choose_rule
from tfive.tree.forward import TreeModel
from tfive.tree.gated import read_thought
from tfive.tree.outputs import Reading
from tfive.tree.recurrent.deltanet import ForkMemory, RecurrentParts, rule_inputs


class SlotCache(Attending):
    """Keys, values and recurrent states of all slots, and what each input of the next pass sees."""

    def __init__(self, engine: TreeModel, like: Reading, rows: int, width: int, branch_width: int) -> None:
        """`like` is any reading of the model, for the shapes of its layers; with a `branch_width` of 0 there is no
        branch and one stream."""
        super().__init__("sdpa" if engine.kernel == "sdpa" else "folded", self)
        self.engine, self.rows, self.width, self.branch_width = engine, rows, width, branch_width
        self.streams = 2 if branch_width else 1
        self.span = width
        """How many text columns are looked at; the others must be empty."""
        self.keys_values = {layer: (self._room(k), self._room(v)) for layer, (k, v) in like.attention.items()}
        self.states = {layer: self._states(fork) for layer, fork in like.recurrent.items()}
        self.length_B, self.fork_B, self.branch_read_B = (
            torch.zeros(rows, dtype=torch.int64, device=engine.device) for _ in range(3)
        )
        """Text tokens read; how many of them the newest thought sees; inputs of its branch read."""
        self.thought_read_B = torch.zeros(rows, dtype=torch.int64, device=engine.device)
        self.reads_B = torch.zeros(rows, dtype=torch.bool, device=engine.device)
        """Gated reading: inputs of the branch that are its thought; whether the next one is text that reads it."""
        self.active_Bn = torch.zeros(rows, self.streams, dtype=torch.bool, device=engine.device)
        self._row_B1 = torch.arange(rows, device=engine.device)[:, None]
        if engine.backbone.recurrent:
            self._rule = choose_rule(engine.engine.delta_rule, engine.device, engine.model.dtype).rule

    def _room(self, like_BXmE: Tensor) -> Tensor:
        _, heads, _, features = like_BXmE.shape
        return like_BXmE.new_zeros(self.rows, heads, self.branch_width + self.width, features)

    def _states(self, like: ForkMemory) -> ForkMemory:
        room = self.rows * self.streams
        return ForkMemory(
            like.state_XIEF.new_zeros(room, *like.state_XIEF.shape[1:]),
            like.tail_XJU.new_zeros(room, *like.tail_XJU.shape[1:]),
        )

    def fill(self, row_b: Tensor, reading: Reading, length_b: Tensor) -> None:
        """Put freshly read texts of `length_b` tokens into slots `row_b`."""
        for layer, buffers in self.keys_values.items():
            for buffer, read_bXSE in zip(buffers, reading.attention[layer]):
                buffer[row_b, :, self.branch_width : self.branch_width + read_bXSE.shape[2]] = read_bXSE
        for layer, kept in self.states.items():
            fork = reading.recurrent[layer]
            kept.state_XIEF[row_b * self.streams] = fork.state_XIEF
            kept.tail_XJU[row_b * self.streams] = fork.tail_XJU
        self.length_B[row_b], self.fork_B[row_b], self.branch_read_B[row_b] = length_b, 0, 0

    @property
    def position_Bn(self) -> Tensor:
        """Position ids of the next inputs."""
        branch_B = self.fork_B + self.branch_read_B - torch.where(self.reads_B, self.thought_read_B + 1, 0)
        return torch.stack([self.length_B, branch_B][: self.streams], 1)

    def read(self, embeds_BnD: Tensor, active_Bn: Tensor) -> Tensor:
        """Final hidden states `[B, n, D]` of one more input per slot and stream; where a stream is not active the slot
        stays as it is and the hidden state means nothing."""
        self._masks.clear()
        self.active_Bn.copy_(active_Bn)
        hidden_BnD = self.engine.backbone.run(embeds_BnD, self.position_Bn, self)
        self.length_B.add_(active_Bn[:, 0])
        if self.streams == 2:
            self.branch_read_B.add_(active_Bn[:, 1])
        return hidden_BnD

    def extend(self, layer: int, key_BXnE: Tensor, value_BXnE: Tensor) -> KeysValues:
        # An idle stream writes into the column its next input will take: nothing sees that column before.
        text_B = self.branch_width + self.length_B.clamp(max=self.width - 1)
        column_Bn = torch.stack([text_B, self.branch_read_B.clamp(max=self.branch_width - 1)][: self.streams], 1)
        key, value = self.keys_values[layer]
        key[self._row_B1, :, column_Bn] = key_BXnE.transpose(1, 2).to(key.dtype)
        value[self._row_B1, :, column_Bn] = value_BXnE.transpose(1, 2).to(value.dtype)
        seen = self.branch_width + self.span
        return key[:, :, :seen], value[:, :, :seen]

    def visible(self, window: int | None) -> Tensor:
        column_m = torch.arange(self.branch_width + self.span, device=self.engine.device)
        text_m, is_text_m = column_m - self.branch_width, column_m >= self.branch_width
        length_B1, fork_B1, branch_read_B1 = (x[:, None] for x in (self.length_B, self.fork_B, self.branch_read_B))
        seen = [is_text_m & (text_m <= length_B1)]
        apart = [length_B1 - text_m]
        if self.streams == 2:
            reads_B1 = self.reads_B[:, None]
            before_B1 = torch.where(reads_B1, fork_B1 - 1, fork_B1)
            first_B1 = torch.where(reads_B1, self.thought_read_B[:, None], 0)
            own_Bm = (column_m >= first_B1) & (column_m <= branch_read_B1)
            seen.append(torch.where(is_text_m, text_m < before_B1, own_Bm))
            apart.append(torch.where(is_text_m, self.position_Bn[:, 1:] - text_m, branch_read_B1 - column_m))
        seen_Bnm = torch.stack(seen, 1)
        if window is not None:
            seen_Bnm = seen_Bnm & (torch.stack(apart, 1) < window)
        return seen_Bnm[:, None]

    def attend(
        self,
        layer: int,
        query_BYnE: Tensor,
        key_BXnE: Tensor,
        value_BXnE: Tensor,
        scale: float | None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        output_BnYE = super().attend(layer, query_BYnE, key_BXnE, value_BXnE, scale, window, cap)
        gates = self.engine.gates
        if gates is None or self.streams == 1:
            return output_BnYE
        key, value = (held[:, :, None, : self.branch_width] for held in self.keys_values[layer])
        column_t = torch.arange(self.branch_width, device=output_BnYE.device)
        seen_B1t = ((column_t < self.thought_read_B[:, None]) & self.reads_B[:, None])[:, None]
        scale = query_BYnE.shape[-1] ** -0.5 if scale is None else scale
        query_BY11E = query_BYnE[:, :, None, 1:]
        read_B1YE = read_thought(query_BY11E, key, value, seen_B1t, gates.gate_LY[layer], scale, cap)[:, 0]
        return torch.cat([output_BnYE[:, :1], output_BnYE[:, 1:] + read_B1YE], 1)

    def mix(self, parts: RecurrentParts, hidden_BnD: Tensor) -> Tensor:
        """A recurrent layer's output; states of active streams advance, and a branch starts from its text's state."""
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
        output, trace = self._rule(*ready.paths(0, self.streams, 1), state_Q)
        path_Q = torch.arange(len(state_Q), device=state_Q.device)
        self._keep(kept.state_XIEF, trace.state_after(path_Q, torch.ones_like(path_Q)))
        self._keep(kept.tail_XJU, past_QJU[:, 1:])
        return parts.finish(output.unflatten(0, (self.rows, self.streams))[:, :, 0].to(hidden_BnD.dtype), gate)

    def _begun(self, kept_Q: Tensor) -> Tensor:
        """States before this pass: a branch of which nothing was read yet has its text's."""
        if self.streams == 1:
            return kept_Q
        text_B, branch_B = kept_Q.unflatten(0, (self.rows, 2)).unbind(1)
        fresh_B = (self.branch_read_B == 0).view(-1, *[1] * (text_B.ndim - 1))
        return torch.stack([text_B, torch.where(fresh_B, text_B, branch_B)], 1).flatten(0, 1)

    def _keep(self, kept_Q: Tensor, new_Q: Tensor) -> None:
        active_Q = self.active_Bn.flatten().view(-1, *[1] * (kept_Q.ndim - 1))
        kept_Q.copy_(torch.where(active_Q, new_Q.to(kept_Q.dtype), kept_Q))
