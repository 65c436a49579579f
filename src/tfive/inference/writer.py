"""Writing texts with thoughts in them, many at once: a thought token or a text token of every text in each step.

A text is either being thought about or written on, so a text with thoughts takes as many steps as it has tokens, those
of its thoughts included, and texts do not wait for each other. Whoever is done leaves, and the next takes its row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from tfive import rng
from tfive.inference.lanes import Lanes
from tfive.inference.requests import Manner, Order, Written
from tfive.rl.gate import PredictionGate
from tfive.tree.decode import DecodeLoop, Reading
from tfive.tree.forward import TreeModel
from tfive.tree.head import mix_log_probs
from tfive.tree.law import draw_token
from tfive.tree.layout import TextBatch

READ_TOKENS = 16384
"""Most prompt tokens, padding included, read in one pass."""

SPAN = 128
"""Text columns that attention looks at come in multiples of this, so that few step shapes occur."""


class Writing(DecodeLoop):
    """Rows of texts on static buffers, and the step that brings each one token further."""

    def __init__(
        self, engine: TreeModel, gate: PredictionGate | None, manner: Manner, rows: int, width: int, most: int
    ) -> None:
        """Room for `rows` texts of at most `width` tokens, `most` of them new."""
        super().__init__(engine.head, engine.engine, engine.device, engine.forbidden_V)
        self.engine, self.gate, self.manner, self.most = engine, gate, manner, most
        self.plan, self.thinks = engine.plan, manner.when.ever
        plan, device = self.plan, engine.device
        self.thought_end = plan.open_width + plan.length + plan.close_width
        like = engine.read(_texts([[0]], device))
        self.lanes = Lanes(engine, like, rows, width, self.thought_end + plan.horizon - 1 if self.thinks else 0)
        self.plain_BD = like.hidden_BSD.new_zeros(rows, like.hidden_BSD.shape[-1])
        self.aside_BD = torch.zeros_like(self.plain_BD)

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=torch.int64, device=device)

        self.token_B, self.aside_token_B, self.prompt_B, self.limit_B, self.written_B = (numbers() for _ in range(5))
        self.place_B, self.thought_B = numbers(), numbers()
        """Where in opening, thought and close the next input of an aside belongs; how many thoughts there were."""
        self.alive_B, self.thinking_B, self.serves_B, self.fresh_B, self.ended_B, self.closes_B = (
            numbers().bool() for _ in range(6)
        )
        """Still written; being thought about; a thought serves; last input was text; ended itself; close sampled."""
        self.out_Bo = numbers(most)
        self.log_Bo4 = torch.zeros(rows, most, 4, device=device)
        self.uniform_Bo = torch.zeros(rows, most, dtype=torch.float64, device=device)
        thoughts = most if self.thinks else 0
        self.note_BoT, self.note_length_Bo = numbers(thoughts, plan.length), numbers(thoughts)
        self.note_since_Bo, self.note_closed_Bo = numbers(thoughts), numbers(thoughts).bool()
        self.uniform_BoT = torch.zeros(rows, thoughts, plan.length, dtype=torch.float64, device=device)
        script = [*plan.open_ids[: plan.open_width], *[-1] * plan.length, *plan.close_ids[: plan.close_width], 0]
        self.script = torch.tensor(script, device=device)
        self.ends = torch.tensor(manner.ends, dtype=torch.int64, device=device)
        self._row_B = torch.arange(rows, device=device)

    @torch.no_grad()
    def seat(self, orders: dict[int, Order]) -> None:
        """Read the prompts of `orders`, by row; they begin with the next step."""
        row_b = torch.tensor(list(orders), device=self.engine.device)
        texts = [list(order.ids) for order in orders.values()]
        length_b = torch.tensor([len(ids) for ids in texts], device=self.engine.device)
        reading: Reading = self.engine.read(_texts(texts, self.engine.device))
        self.lanes.seat(row_b, reading, length_b)
        self.plain_BD[row_b] = reading.hidden_BSD[torch.arange(len(texts), device=row_b.device), length_b - 1]
        self.prompt_B[row_b], self.written_B[row_b], self.thought_B[row_b] = length_b, 0, 0
        self.limit_B[row_b] = torch.tensor([o.max_new_tokens for o in orders.values()], device=row_b.device)
        self.alive_B[row_b], self.fresh_B[row_b] = True, True
        self.thinking_B[row_b], self.serves_B[row_b], self.ended_B[row_b] = False, False, False
        for row, order in orders.items():
            self._give_numbers(row, order)

    def _give_numbers(self, row: int, order: Order) -> None:
        seed, most = self.manner.seed, order.max_new_tokens
        place_o = len(order.ids) + np.arange(most)
        if self.manner.law is not None:
            drawn = rng.uniforms(seed, "text", order.item, place_o, order.sample)
            self.uniform_Bo[row, :most] = torch.from_numpy(drawn).to(self.uniform_Bo.device)
        if self.thinks:
            steps = np.arange(self.plan.length)
            drawn = rng.uniforms(seed, "thought", order.item, (place_o - 1)[:, None], order.sample, steps)
            self.uniform_BoT[row, :most] = torch.from_numpy(drawn).to(self.uniform_BoT.device)

    @torch.no_grad()
    def advance(self, reach: int) -> None:
        """One token further, each text; `reach` is at least as long as the longest of them will then be."""
        # A single text reads so little that one shape, captured once, is cheaper than several narrow ones.
        alone = self.lanes.rows == 1
        self.lanes.span = self.lanes.width if alone else min(self.lanes.width, -(-reach // SPAN) * SPAN)
        if self.uncaptured(self.lanes.span):
            with self._idle():
                self.capture(self.lanes.span)
        self.step(self.lanes.span)

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Steps that leave no trace: with nobody alive or thinking a step moves nothing but what is put back here."""
        moved = (self.alive_B, self.thinking_B, self.fresh_B, self.serves_B, self.plain_BD, self.aside_BD)
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
        """Every row's next input: of its text, or of the thought it is having or now begins."""
        plain_BV = self.head.logits(self.plain_BD)
        mixed_BV, columns = plain_BV, None
        if self.thinks:
            aside_BV = self.head.logits(self.aside_BD)
            self._begin_thoughts(plain_BV)
            self._choose_aside(torch.where((self.lanes.noted_B == 0)[:, None], plain_BV, aside_BV))
            mixed_BV, columns = self._mixture(plain_BV, aside_BV)
        self._choose_text(mixed_BV, columns)

    def _begin_thoughts(self, plain_BV: Tensor) -> None:
        when, lanes = self.manner.when, self.lanes
        if when.entropy_above is not None:
            log_BV = plain_BV.log_softmax(-1)
            due_B = (-(log_BV.exp() * log_BV).sum(-1) > when.entropy_above) & ~self.serves_B
        else:
            due_B = (lanes.length_B - self.prompt_B) % when.every == 0
        due_B = due_B & self.fresh_B & self.alive_B & ~self.thinking_B
        self.thinking_B.logical_or_(due_B)
        self.serves_B.logical_and_(~due_B)
        lanes.since_B.copy_(torch.where(due_B, lanes.length_B, lanes.since_B))
        for counter in (lanes.noted_B, self.place_B):
            counter.masked_fill_(due_B, 0)
        self.thought_B.add_(due_B)
        note_B = (self.thought_B - 1).clamp(min=0)
        self._set(self.note_since_Bo, note_B, lanes.since_B, due_B)
        self._set(self.note_length_Bo, note_B, torch.zeros_like(note_B), due_B)
        self._set(self.note_closed_Bo, note_B, torch.zeros_like(due_B), due_B)

    def _set(self, buffer_Bo: Tensor, index_B: Tensor, value_B: Tensor, where_B: Tensor) -> None:
        index_B1 = index_B.clamp(max=buffer_Bo.shape[1] - 1)[:, None]
        old_B1 = buffer_Bo.gather(1, index_B1)
        buffer_Bo.scatter_(1, index_B1, torch.where(where_B[:, None], value_B[:, None].to(old_B1.dtype), old_B1))

    def _choose_aside(self, logits_BV: Tensor) -> None:
        """The next input of every thought: its delimiters as they are, its tokens by the sampling law."""
        plan, opening = self.plan, self.plan.open_width
        step_B = (self.place_B - opening).clamp(0, plan.length - 1)
        offset_B = (self.lanes.length_B - self.prompt_B).clamp(0, self.most - 1)
        uniform_B = self.uniform_BoT[self._row_B, offset_B, step_B]
        token_B, _ = self.thought_token(logits_BV, self.manner.thought_law, uniform_B)
        given_B = self.script[self.place_B.clamp(max=self.thought_end)]
        sampled_B = self.thinking_B & (given_B < 0)
        self.aside_token_B.copy_(torch.where(given_B < 0, token_B, given_B))
        self.closes_B.copy_(sampled_B & (token_B == (-1 if plan.stop_id is None else plan.stop_id)))
        note_B = (self.thought_B - 1).clamp(min=0)
        self._set(self.note_length_Bo, note_B, step_B + 1, sampled_B)
        self._set(self.note_closed_Bo, note_B, self.closes_B, sampled_B)
        flat_Bo = self.note_BoT.flatten(1)
        self._set(flat_Bo, note_B * plan.length + step_B, token_B, sampled_B)

    def expects(self) -> tuple[Tensor, Tensor]:
        """What each text's next token may be: mixed log-probabilities `[B, V]`, and the gate `[B]` (0: no thought)."""
        plain_BV, aside_BV = self.head.logits(self.plain_BD), self.head.logits(self.aside_BD)
        mixed_BV, (_, _, beta_B) = self._mixture(plain_BV, aside_BV)
        return mixed_BV, beta_B

    def _mixture(self, plain_BV: Tensor, aside_BV: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Mixed log-probabilities, and what they were mixed from."""
        plain_BV, aside_BV = plain_BV.log_softmax(-1), aside_BV.log_softmax(-1)
        beta_B = torch.where(self.serves_B, self._trust().to(plain_BV.dtype), 0.0)
        both_BV = mix_log_probs(plain_BV, aside_BV, beta_B[:, None])
        return torch.where(self.serves_B[:, None], both_BV, plain_BV), (plain_BV, aside_BV, beta_B)

    def _trust(self) -> Tensor:
        if self.gate is None:
            return torch.ones_like(self.plain_BD[:, 0])
        # The gate reads whole continuations and knows a token by its place in them; this is the place of this one.
        horizon = self.plan.horizon
        pair = (hidden_BD[:, None].expand(-1, horizon, -1) for hidden_BD in (self.aside_BD, self.plain_BD))
        place_B1 = (self.lanes.length_B - self.lanes.since_B).clamp(0, horizon - 1)[:, None]
        return torch.sigmoid(self.gate(*pair)).gather(1, place_B1)[:, 0]

    def _choose_text(self, mixed_BV: Tensor, columns: tuple[Tensor, Tensor, Tensor] | None) -> None:
        writes_B = self.alive_B & ~self.thinking_B
        if self.manner.law is None:
            token_B = mixed_BV.argmax(-1)
        else:
            index_B = self.written_B.clamp(max=self.most - 1)
            token_B, _ = draw_token(mixed_BV, self.manner.law, self.uniform_Bo[self._row_B, index_B])

        def of(log_BV: Tensor) -> Tensor:
            return log_BV.gather(1, token_B[:, None])[:, 0].float()

        if columns is None:
            plain_B = of(mixed_BV) - mixed_BV.logsumexp(-1).float()
            log_B4 = torch.stack([plain_B, torch.full_like(plain_B, torch.nan), torch.zeros_like(plain_B), plain_B], 1)
        else:
            plain_BV, aside_BV, beta_B = columns
            with_B = torch.where(self.serves_B, of(aside_BV), torch.nan)
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
        lanes, plan = self.lanes, self.plan
        writes_B = self.alive_B & ~self.thinking_B
        if not self.thinks:
            hidden_BnD = lanes.read(self.engine.embed(self.token_B[:, None]), writes_B[:, None])
            self.plain_BD.copy_(torch.where(writes_B[:, None], hidden_BnD[:, 0], self.plain_BD))
            return
        # While a text goes on, its aside reads the text's token.
        aside_B = torch.where(self.thinking_B, self.aside_token_B, self.token_B)
        token_Bn = torch.stack([self.token_B, aside_B], 1)
        active_Bn = torch.stack([writes_B, self.thinking_B | (self.serves_B & writes_B)], 1)
        hidden_BnD = lanes.read(self.engine.embed(token_Bn, self._marks()), active_Bn)
        self.plain_BD.copy_(torch.where(writes_B[:, None], hidden_BnD[:, 0], self.plain_BD))
        self.aside_BD.copy_(torch.where(active_Bn[:, 1:], hidden_BnD[:, 1], self.aside_BD))
        self.place_B.copy_(torch.where(self.closes_B, self.thought_end, self.place_B + self.thinking_B))
        done_B = self.thinking_B & (self.place_B >= self.thought_end)
        self.thinking_B.logical_and_(~done_B)
        self.serves_B.logical_or_(done_B).logical_and_(lanes.length_B - lanes.since_B < plan.horizon)
        self.fresh_B.copy_(writes_B)

    def _marks(self) -> Tensor:
        """Which inputs are learned delimiters, `[B, 2]`."""
        mark_B = torch.full_like(self.token_B, -1)
        if self.plan.learned:
            mark_B = torch.where(self.place_B == 0, 0, mark_B)
            mark_B = torch.where((self.place_B == self.thought_end - 1) | self.closes_B, 1, mark_B)
            mark_B = torch.where(self.thinking_B, mark_B, -1)
        return torch.stack([torch.full_like(mark_B, -1), mark_B], 1)

    def result(self, row: int, count: int, ended: str) -> Written:
        """What a row holds, cut after `count` tokens."""
        thoughts = []
        last = int(self.prompt_B[row]) + count
        for n in range(int(self.thought_B[row]) if self.thinks else 0):
            since, length = int(self.note_since_Bo[row, n]), int(self.note_length_Bo[row, n])
            if since < last:
                tokens = self.note_BoT[row, n, :length].tolist()
                thoughts.append((since - 1, tokens, bool(self.note_closed_Bo[row, n])))
        log_probs = self.log_Bo4[row, :count].cpu().clone()
        return Written(self.out_Bo[row, :count].tolist(), log_probs, thoughts, ended)


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
    manner: Manner,
    orders: Sequence[Order],
    stopped: Callable[[int, list[int], int], int | None],
    *,
    rows: int = 1,
    poll: int = 1,
) -> Iterator[tuple[int, Written]]:
    """All orders, by number, as they are done: longest prompts first, `rows` at a time, looked at every `poll` steps.

    `stopped(number, new tokens, known)` says after how many tokens a text is to be cut, None: not yet; it was shown the
    first `known` tokens before.
    """
    queue = deque(sorted(range(len(orders)), key=lambda n: -len(orders[n].ids)))
    width, most = max(order.width for order in orders), max(order.max_new_tokens for order in orders)
    writing = Writing(engine, gate, manner, min(rows, len(orders)), width, most)
    seated: dict[int, int] = {}
    texts: dict[int, list[int]] = {}
    while queue or seated:
        free = [row for row in range(writing.lanes.rows) if row not in seated]
        while queue and free:
            count = max(1, min(len(free), len(queue), READ_TOKENS // len(orders[queue[0]].ids)))
            taken = {free.pop(): queue.popleft() for _ in range(count)}
            writing.seat({row: orders[number] for row, number in taken.items()})
            seated |= taken
            texts |= {row: [] for row in taken}
        longest = int(writing.lanes.length_B[list(seated)].max())
        for ahead in range(poll):
            writing.advance(longest + ahead + 1)
        written_B, alive_B, ended_B = (x.tolist() for x in (writing.written_B, writing.alive_B, writing.ended_B))
        out_Bo = writing.out_Bo.cpu()
        for row, number in list(seated.items()):
            ids, known, count = texts[row], len(texts[row]), written_B[row]
            ids += out_Bo[row, known:count].tolist()
            cut = stopped(number, ids, known) if count > known else None
            if cut is None and alive_B[row]:
                continue
            reason = "stop" if cut is not None else "end" if ended_B[row] else "length"
            yield number, writing.result(row, count if cut is None else cut, reason)
            del seated[row]
            writing.alive_B[row], writing.thinking_B[row] = False, False
