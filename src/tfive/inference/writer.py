"""Writing texts with thoughts in them, many at once: a thought token or a text token of every text in each step.

A text is either being thought about or written on, so a text with thoughts takes as many steps as it has tokens, those
of its thoughts included, and texts do not wait for each other. A finished text frees its slot for the next request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from tfive import rng
from tfive.inference.requests import Completion, TokenRequest, WritingMode
from tfive.inference.slots import SlotCache
from tfive.rl.gate import PredictionGate
from tfive.tree.decode import DecodeLoop
from tfive.tree.forward import TreeModel
from tfive.tree.head import mix_log_probs
from tfive.tree.law import draw_token
from tfive.tree.layout import TextBatch
from tfive.tree.outputs import Reading

READ_TOKENS = 16384
"""Most prompt tokens, padding included, read in one pass."""

SPAN = 128
"""Text columns that attention looks at come in multiples of this, so that few step shapes occur."""


class TextWriter(DecodeLoop):
    """The texts in all slots, on static buffers, and the step that brings each one token further."""

    def __init__(
        self, engine: TreeModel, gate: PredictionGate | None, mode: WritingMode, rows: int, width: int, most: int
    ) -> None:
        """`rows` slots for texts of at most `width` tokens, `most` of them new."""
        super().__init__(engine.head, engine.engine, engine.device, engine.forbidden_V)
        self.engine, self.gate, self.mode, self.most = engine, gate, mode, most
        self.plan, self.thinks = engine.plan, mode.when.ever
        plan, device = self.plan, engine.device
        self.served = most if mode.when.at_answer else plan.horizon
        """How many tokens a thought serves."""
        self.thought_end = plan.open_width + plan.length + plan.close_width
        self.branch_end = self.thought_end + (1 if plan.gated else 0)
        """Place at which a branch serves: with gated reading the text's last token is read again after the thought."""
        self.unread = engine.unread
        like = engine.read(_texts([[0]], device))
        self.cache = SlotCache(engine, like, rows, width, self.branch_end + self.served - 1 if self.thinks else 0)
        self.plain_BD = like.hidden_BSD.new_zeros(rows, like.hidden_BSD.shape[-1])
        self.branch_BD = torch.zeros_like(self.plain_BD)

        def integers(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.int64, device=device)

        self.token_B, self.branch_token_B, self.prompt_B, self.limit_B, self.written_B = (integers() for _ in range(5))
        self.place_B, self.thought_count_B = integers(), integers()
        """Where in opening, thought and close the next input of a branch belongs; how many thoughts there were."""
        self.alive_B, self.thinking_B, self.serves_B, self.fresh_B, self.ended_B, self.closes_B = (
            integers().bool() for _ in range(6)
        )
        """Still written; being thought about; a thought serves; last input was text; ended itself; close sampled."""
        self.out_Bo = integers(most)
        self.log_Bo4 = torch.zeros(rows, most, 4, device=device)
        self.uniform_Bo = torch.zeros(rows, most, dtype=torch.float64, device=device)
        thoughts = (1 if mode.when.at_answer else most) if self.thinks else 0
        self.thought_token_BoT, self.thought_length_Bo = integers(thoughts, plan.length), integers(thoughts)
        self.thought_from_Bo, self.thought_closed_Bo = integers(thoughts), integers(thoughts).bool()
        self.uniform_BoT = torch.zeros(rows, thoughts, plan.length, dtype=torch.float64, device=device)
        self.given_BT, self.given_length_B = integers(plan.length), integers() - 1
        """A text's first thought where the request brings it; −1 tokens where it is drawn."""
        template = [*plan.open_ids[: plan.open_width], *[-1] * plan.length, *plan.close_ids[: plan.close_width], 0]
        self.template = torch.tensor(template, device=device)
        self.ends = torch.tensor(mode.ends, dtype=torch.int64, device=device)
        self._row_B = torch.arange(rows, device=device)

    @torch.no_grad()
    def fill(self, requests: dict[int, TokenRequest]) -> None:
        """Read the prompts of `requests`, by slot; they begin with the next step."""
        row_b = torch.tensor(list(requests), device=self.engine.device)
        texts = [list(request.ids) for request in requests.values()]
        length_b = torch.tensor([len(ids) for ids in texts], device=self.engine.device)
        reading: Reading = self.engine.read(_texts(texts, self.engine.device))
        self.cache.fill(row_b, reading, length_b)
        self.plain_BD[row_b] = reading.hidden_BSD[torch.arange(len(texts), device=row_b.device), length_b - 1]
        self.token_B[row_b] = torch.tensor([ids[-1] for ids in texts], device=row_b.device)
        self.prompt_B[row_b], self.written_B[row_b], self.thought_count_B[row_b] = length_b, 0, 0
        self.limit_B[row_b] = torch.tensor(
            [request.max_new_tokens for request in requests.values()], device=row_b.device
        )
        self.alive_B[row_b], self.fresh_B[row_b] = True, True
        self.thinking_B[row_b], self.serves_B[row_b], self.ended_B[row_b] = False, False, False
        for row, request in requests.items():
            self._set_uniforms(row, request)
            self._set_thought(row, request)

    def _set_uniforms(self, row: int, request: TokenRequest) -> None:
        seed, most = self.mode.seed, request.max_new_tokens
        place_o = len(request.ids) + np.arange(most)
        if self.mode.law is not None:
            drawn = rng.uniforms(seed, "text", request.item, place_o, request.sample)
            self.uniform_Bo[row, :most] = torch.from_numpy(drawn).to(self.uniform_Bo.device)
        if self.thinks:
            steps = np.arange(self.plan.length)
            place_o = place_o[: self.uniform_BoT.shape[1]]
            drawn = rng.uniforms(seed, "thought", request.item, (place_o - 1)[:, None], request.sample, steps)
            self.uniform_BoT[row, : len(place_o)] = torch.from_numpy(drawn).to(self.uniform_BoT.device)

    def _set_thought(self, row: int, request: TokenRequest) -> None:
        self.given_length_B[row] = -1
        if request.thought is None:
            return
        count, plan = len(request.thought), self.plan
        if count > plan.length or (count < plan.length and not plan.close_width):
            raise ValueError(f"a thought of {count} tokens does not fit a plan of {plan.length}")
        self.given_BT[row, :count] = torch.tensor(request.thought, dtype=torch.int64, device=self.given_BT.device)
        self.given_length_B[row] = count

    @torch.no_grad()
    def advance(self, reach: int) -> None:
        """One token further, each text; `reach` is at least as long as the longest of them will then be."""
        # A single text reads so little that one shape, captured once, is cheaper than several narrow ones.
        alone = self.cache.rows == 1
        self.cache.span = self.cache.width if alone else min(self.cache.width, -(-reach // SPAN) * SPAN)
        if self.uncaptured(self.cache.span):
            with self._idle():
                self.capture(self.cache.span)
        self.step(self.cache.span)

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Steps that leave no trace: with no text alive or thinking a step moves only what is restored here."""
        moved = (self.alive_B, self.thinking_B, self.fresh_B, self.serves_B, self.plain_BD, self.branch_BD)
        kept = [buffer.clone() for buffer in moved]
        self.alive_B.zero_()
        self.thinking_B.zero_()
        yield
        for buffer, before in zip(moved, kept):
            buffer.copy_(before)

    def _step(self) -> None:
        self._choose()
        self._read()

    def _choose(self) -> None:
        """The next input of every slot: of its text, or of a thought that goes on or begins."""
        plain_BV = self.head.logits(self.plain_BD)
        mixed_BV, columns = plain_BV, None
        if self.thinks:
            branch_BV = self.head.logits(self.branch_BD)
            self._begin_thoughts(plain_BV)
            self._choose_thought(torch.where((self.cache.branch_read_B == 0)[:, None], plain_BV, branch_BV))
            mixed_BV, columns = self._mixture(plain_BV, branch_BV)
        self._choose_text(mixed_BV, columns)

    def _begin_thoughts(self, plain_BV: Tensor) -> None:
        when, cache = self.mode.when, self.cache
        if when.entropy_above is not None:
            log_BV = plain_BV.log_softmax(-1)
            due_B = (-(log_BV.exp() * log_BV).sum(-1) > when.entropy_above) & ~self.serves_B
        elif when.at_answer:
            due_B = cache.length_B == self.prompt_B
        else:
            due_B = (cache.length_B - self.prompt_B) % when.every == 0
        due_B = due_B & self.fresh_B & self.alive_B & ~self.thinking_B
        self.thinking_B.logical_or_(due_B)
        self.serves_B.logical_and_(~due_B)
        cache.fork_B.copy_(torch.where(due_B, cache.length_B, cache.fork_B))
        for counter in (cache.branch_read_B, self.place_B):
            counter.masked_fill_(due_B, 0)
        self.thought_count_B.add_(due_B)
        newest_B = (self.thought_count_B - 1).clamp(min=0)
        self._set(self.thought_from_Bo, newest_B, cache.fork_B, due_B)
        self._set(self.thought_length_Bo, newest_B, torch.zeros_like(newest_B), due_B)
        self._set(self.thought_closed_Bo, newest_B, torch.zeros_like(due_B), due_B)

    def _set(self, buffer_Bo: Tensor, index_B: Tensor, value_B: Tensor, where_B: Tensor) -> None:
        index_B1 = index_B.clamp(max=buffer_Bo.shape[1] - 1)[:, None]
        old_B1 = buffer_Bo.gather(1, index_B1)
        buffer_Bo.scatter_(1, index_B1, torch.where(where_B[:, None], value_B[:, None].to(old_B1.dtype), old_B1))

    def _choose_thought(self, logits_BV: Tensor) -> None:
        """The next input of every thought: its delimiters as they are, its tokens by the sampling law."""
        plan, opening = self.plan, self.plan.open_width
        is_given_B = (self.given_length_B >= 0) & (self.thought_count_B == 1)
        over_B = is_given_B & self.thinking_B & (self.place_B == opening + self.given_length_B)
        self.place_B.masked_fill_(over_B, opening + plan.length)
        step_B = (self.place_B - opening).clamp(0, plan.length - 1)
        offset_B = (self.cache.length_B - self.prompt_B).clamp(0, self.uniform_BoT.shape[1] - 1)
        uniform_B = self.uniform_BoT[self._row_B, offset_B, step_B]
        token_B, _ = self.thought_token(logits_BV, self.mode.thought_law, uniform_B)
        token_B = torch.where(is_given_B, self.given_BT[self._row_B, step_B], token_B)
        given_B = self.template[self.place_B.clamp(max=self.thought_end)]
        sampled_B = self.thinking_B & (given_B < 0)
        self.branch_token_B.copy_(torch.where(given_B < 0, token_B, given_B))
        self.closes_B.copy_(sampled_B & (token_B == (-1 if plan.stop_id is None else plan.stop_id)))
        newest_B = (self.thought_count_B - 1).clamp(min=0)
        self._set(self.thought_length_Bo, newest_B, step_B + 1, sampled_B)
        self._set(self.thought_closed_Bo, newest_B, self.closes_B, sampled_B)
        flat_Bo = self.thought_token_BoT.flatten(1)
        self._set(flat_Bo, newest_B * plan.length + step_B, token_B, sampled_B)

    def expects(self) -> tuple[Tensor, Tensor]:
        """What each text's next token may be: mixed log-probabilities `[B, V]`, and the gate `[B]` (0: no thought)."""
        plain_BV, branch_BV = self.head.logits(self.plain_BD), self.head.logits(self.branch_BD)
        mixed_BV, (_, _, beta_B) = self._mixture(plain_BV, branch_BV)
        return mixed_BV, beta_B

    def _mixture(self, plain_BV: Tensor, branch_BV: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Mixed log-probabilities, and what they were mixed from."""
        plain_BV, branch_BV = plain_BV.log_softmax(-1), branch_BV.log_softmax(-1)
        beta_B = torch.where(self.serves_B, self._gate_value().to(plain_BV.dtype), 0.0)
        if self.unread:
            return plain_BV, (plain_BV, plain_BV, beta_B)
        both_BV = mix_log_probs(plain_BV, branch_BV, beta_B[:, None])
        return torch.where(self.serves_B[:, None], both_BV, plain_BV), (plain_BV, branch_BV, beta_B)

    def _gate_value(self) -> Tensor:
        if self.gate is None:
            return torch.ones_like(self.plain_BD[:, 0])
        # The gate reads whole continuations and knows a token by its place in them; this is the place of this one.
        horizon = self.plan.horizon
        pair = (hidden_BD[:, None].expand(-1, horizon, -1) for hidden_BD in (self.branch_BD, self.plain_BD))
        place_B1 = (self.cache.length_B - self.cache.fork_B).clamp(0, horizon - 1)[:, None]
        return torch.sigmoid(self.gate(*pair)).gather(1, place_B1)[:, 0]

    def _choose_text(self, mixed_BV: Tensor, columns: tuple[Tensor, Tensor, Tensor] | None) -> None:
        writes_B = self.alive_B & ~self.thinking_B
        if self.mode.law is None:
            token_B = mixed_BV.argmax(-1)
        else:
            index_B = self.written_B.clamp(max=self.most - 1)
            token_B, _ = draw_token(mixed_BV, self.mode.law, self.uniform_Bo[self._row_B, index_B])

        def of(log_BV: Tensor) -> Tensor:
            return log_BV.gather(1, token_B[:, None])[:, 0].float()

        if columns is None:
            plain_B = of(mixed_BV) - mixed_BV.logsumexp(-1).float()
            log_B4 = torch.stack([plain_B, torch.full_like(plain_B, torch.nan), torch.zeros_like(plain_B), plain_B], 1)
        else:
            plain_BV, branch_BV, beta_B = columns
            with_B = torch.where(self.serves_B, of(branch_BV), torch.nan)
            log_B4 = torch.stack([of(plain_BV), with_B, beta_B.float(), of(mixed_BV)], 1)
        self._set(self.out_Bo, self.written_B, token_B, writes_B)
        for column in range(4):
            self._set(self.log_Bo4[:, :, column], self.written_B, log_B4[:, column], writes_B)
        self.token_B.copy_(torch.where(writes_B, token_B, self.token_B))
        self.written_B.add_(writes_B)
        self.ended_B.logical_or_(writes_B & (token_B[:, None] == self.ends).any(-1))
        self.alive_B.logical_and_(~self.ended_B & (self.written_B < self.limit_B))

    def _read(self) -> None:
        """Read the chosen inputs; a thought whose H tokens are over is dropped."""
        cache, plan = self.cache, self.plan
        writes_B = self.alive_B & ~self.thinking_B
        if not self.thinks:
            hidden_BnD = cache.read(self.engine.embed(self.token_B[:, None]), writes_B[:, None])
            self.plain_BD.copy_(torch.where(writes_B[:, None], hidden_BnD[:, 0], self.plain_BD))
            return
        if plan.gated:
            again_B = self.thinking_B & (self.place_B == self.thought_end)
            cache.thought_read_B.copy_(torch.where(again_B, cache.branch_read_B, cache.thought_read_B))
            cache.reads_B.copy_(again_B | self.serves_B)
        # While a text goes on, its branch reads the text's token.
        branch_B = torch.where(self.thinking_B & ~cache.reads_B, self.branch_token_B, self.token_B)
        token_Bn = torch.stack([self.token_B, branch_B], 1)
        active_Bn = torch.stack([writes_B, self.thinking_B | (self.serves_B & writes_B)], 1)
        hidden_BnD = cache.read(self.engine.embed(token_Bn, self._marks()), active_Bn)
        self.plain_BD.copy_(torch.where(writes_B[:, None], hidden_BnD[:, 0], self.plain_BD))
        self.branch_BD.copy_(torch.where(active_Bn[:, 1:], hidden_BnD[:, 1], self.branch_BD))
        self.place_B.copy_(torch.where(self.closes_B, self.thought_end, self.place_B + self.thinking_B))
        done_B = self.thinking_B & (self.place_B >= self.branch_end)
        self.thinking_B.logical_and_(~done_B)
        self.serves_B.logical_or_(done_B).logical_and_(cache.length_B - cache.fork_B < self.served)
        self.fresh_B.copy_(writes_B)

    def _marks(self) -> Tensor:
        """Which inputs are learned delimiters, `[B, 2]`."""
        mark_B = torch.full_like(self.token_B, -1)
        if self.plan.learned:
            mark_B = torch.where(self.place_B == 0, 0, mark_B)
            mark_B = torch.where((self.place_B == self.thought_end - 1) | self.closes_B, 1, mark_B)
            mark_B = torch.where(self.thinking_B, mark_B, -1)
        return torch.stack([torch.full_like(mark_B, -1), mark_B], 1)

    def result(self, row: int, count: int, finish_reason: str) -> Completion:
        """What a slot holds, cut after `count` tokens."""
        thoughts = []
        last = int(self.prompt_B[row]) + count
        for n in range(int(self.thought_count_B[row]) if self.thinks else 0):
            fork, length = int(self.thought_from_Bo[row, n]), int(self.thought_length_Bo[row, n])
            if fork < last:
                tokens = self.thought_token_BoT[row, n, :length].tolist()
                thoughts.append((fork - 1, tokens, bool(self.thought_closed_Bo[row, n])))
        log_probs = self.log_Bo4[row, :count].cpu().clone()
        return Completion(self.out_Bo[row, :count].tolist(), log_probs, thoughts, finish_reason)


def _texts(rows: list[list[int]], device: torch.device) -> TextBatch:
    """Prompts of any lengths as one batch; the end of each is where it goes on."""
    width = max(len(ids) for ids in rows)
    tokens_BS = torch.tensor([ids + [0] * (width - len(ids)) for ids in rows], device=device)
    last_B1 = torch.tensor([[len(ids) - 1] for ids in rows], device=device)
    index_S = torch.arange(width, device=device)
    return TextBatch(tokens_BS, torch.where(index_S <= last_B1, 0, -1), last_B1, last_B1)


def write(
    engine: TreeModel,
    gate: PredictionGate | None,
    mode: WritingMode,
    requests: Sequence[TokenRequest],
    stopped: Callable[[int, list[int], int], int | None],
    *,
    rows: int = 1,
    poll: int = 1,
    beat: Callable[[], None] | None = None,
) -> Iterator[tuple[int, Completion]]:
    """Completions by number of the request, as they finish: longest prompts first, in `rows` slots, which are looked at
    every `poll` steps. `beat` is called as often, and with every pass over prompts: a sign that the work goes on.

    `stopped(number, new tokens, known)` says after how many tokens a text is to be cut, None: not yet; it was shown the
    first `known` tokens before.
    """
    queue = deque(sorted(range(len(requests)), key=lambda n: -len(requests[n].ids)))
    width, most = max(request.width for request in requests), max(request.max_new_tokens for request in requests)
    text_writer = TextWriter(engine, gate, mode, min(rows, len(requests)), width, most)
    occupied: dict[int, int] = {}
    texts: dict[int, list[int]] = {}
    while queue or occupied:
        free = [row for row in range(text_writer.cache.rows) if row not in occupied]
        while queue and free:
            count = max(1, min(len(free), len(queue), READ_TOKENS // len(requests[queue[0]].ids)))
            taken = {free.pop(): queue.popleft() for _ in range(count)}
            text_writer.fill({row: requests[number] for row, number in taken.items()})
            if beat is not None:
                beat()
            occupied |= taken
            texts |= {row: [] for row in taken}
        longest = int(text_writer.cache.length_B[list(occupied)].max())
        for ahead in range(poll):
            text_writer.advance(longest + ahead + 1)
        if beat is not None:
            beat()
        written_B, alive_B = text_writer.written_B.tolist(), text_writer.alive_B.tolist()
        ended_B = text_writer.ended_B.tolist()
        out_Bo = text_writer.out_Bo.cpu()
        for row, number in list(occupied.items()):
            ids, known, count = texts[row], len(texts[row]), written_B[row]
            ids += out_Bo[row, known:count].tolist()
            cut = stopped(number, ids, known) if count > known else None
            if cut is None and alive_B[row]:
                continue
            reason = "stop" if cut is not None else "end" if ended_B[row] else "length"
            yield number, text_writer.result(row, count if cut is None else cut, reason)
            del occupied[row]
            text_writer.alive_B[row], text_writer.thinking_B[row] = False, False
