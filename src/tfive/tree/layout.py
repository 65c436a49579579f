"""Where each node stands and what it sees: texts as trunks, thoughts and scored continuations as branches.

One row is one text. Its N nodes are, in this order: the S text tokens (the trunk); for every branch its opening and its
T thought tokens; for every branch and scored checkpoint the close and the first H−1 continuation tokens (a *segment*).
A node sees its ancestors and itself, nothing else, and its position id is its depth inside its document. `grow.py`
makes layouts; this file says what they are.

With gated reading a segment is the close, then the text's token p once more and the first H−1 continuation tokens. The
latter H stand and see as they would without a thought (token p in place of the trunk's); `gated.py` says how they read
it.

Legend of shape letters, used by suffix all over the project:
    B texts (rows)             S text tokens of a row        P positions per text       G group members per position
    R = P·G branches per text, branch r = p·G + g            T thought steps            K scored checkpoints
    H continuation tokens      N nodes of a row              D features                 V vocabulary          Q paths
    O opening tokens           C closing tokens              A = O + T nodes of a thought
    W = C + H − 1 nodes of a segment (C + H with gated reading)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tfive.errors import UserError
from tfive.tree.settings import ThoughtSettings

PADDING, TEXT, OPEN, THOUGHT, CLOSE, CONTINUATION = -1, 0, 1, 2, 3, 4
"""Kinds of node."""

Record = TypeVar("Record")


def moved(record: Record, device: torch.device | str) -> Record:
    """The same record with every tensor field on `device`."""
    changes = {f.name: getattr(record, f.name) for f in fields(record)}  # type: ignore[arg-type]
    return replace(record, **{k: v.to(device) for k, v in changes.items() if isinstance(v, Tensor)})  # type: ignore[type-var]


def tensors_of(record: Any) -> list[Tensor]:
    """The tensors of a record of nothing else, in its order."""
    return [getattr(record, f.name) for f in fields(record)]


def taken(kind: type[Record], tensors: Iterator[Tensor]) -> Record:
    """A record of the next tensors, as `tensors_of` gives them."""
    return kind(*(next(tensors) for _ in fields(kind)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TextBatch:
    """Rows of packed text and the positions that get thoughts.

    Documents of a row do not see each other; a row whose documents may see each other carries one document number.
    """

    tokens_BS: Tensor
    """int64 token ids."""
    document_BS: Tensor
    """int64 number of the (contiguous) document a token belongs to inside its row, −1 for padding."""
    positions_BP: Tensor
    """int64 trunk index p of each item: its thought follows token p; −1 where the row has no further item."""
    items_BP: Tensor
    """int64 global item numbers, for counter-based random numbers; −1 where there is none."""

    def __post_init__(self) -> None:
        if self.tokens_BS.shape != self.document_BS.shape or self.tokens_BS.ndim != 2:
            raise ValueError(
                f"tokens {tuple(self.tokens_BS.shape)} and documents {tuple(self.document_BS.shape)} differ"
            )
        if self.positions_BP.shape != self.items_BP.shape or len(self.positions_BP) != len(self.tokens_BS):
            raise ValueError(
                f"positions {tuple(self.positions_BP.shape)}, items {tuple(self.items_BP.shape)} do not fit"
            )

    def to(self, device: torch.device | str) -> TextBatch:
        """The same batch on another device."""
        return moved(self, device)

    @staticmethod
    def joined(parts: Sequence[TextBatch]) -> TextBatch:
        """The rows of several batches of one width, one after another."""
        if len(parts) == 1:
            return parts[0]
        return TextBatch(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(TextBatch)))

    def rows(self, start: int, stop: int) -> TextBatch:
        """The rows `start … stop−1`."""
        return TextBatch(*(getattr(self, f.name)[start:stop] for f in fields(self)))


@dataclass(frozen=True)
class ThoughtPlan:
    """The shape of every thought of a run, with delimiters as token ids."""

    length: int = 12
    checkpoints: tuple[int, ...] = (4, 8, 12)
    horizon: int = 16
    open_ids: tuple[int, ...] = ()
    close_ids: tuple[int, ...] = ()
    learned: bool = False
    """Delimiters are learned input embeddings, one node each; the ids are then only their starting point."""
    variable_length: bool = False
    group: int = 1
    special_ids: tuple[int, ...] = ()
    """Vocabulary entries that may never be an action (end of text, padding, …)."""
    gated: bool = False
    """Whether continuations read thoughts through gates (`gated.py`) instead of as text before them."""

    def __post_init__(self) -> None:
        if not self.checkpoints or self.checkpoints[-1] != self.length:
            raise ValueError(f"the last checkpoint of {self.checkpoints} must be the length {self.length}")
        if self.variable_length and not (self.learned or len(self.close_ids) == 1):
            raise ValueError("variable_length needs a close of one token")

    @property
    def open_width(self) -> int:
        """O: nodes the opening takes."""
        return 1 if self.learned else len(self.open_ids)

    @property
    def close_width(self) -> int:
        """C: nodes the close takes."""
        return 1 if self.learned else len(self.close_ids)

    @property
    def segment_width(self) -> int:
        """W: nodes a scored continuation takes, its close included."""
        return self.close_width + self.horizon - (0 if self.gated else 1)

    @property
    def stop_id(self) -> int | None:
        """The vocabulary entry whose sampling ends a thought, if there is one."""
        return self.close_ids[0] if self.variable_length else None

    @property
    def forbidden_ids(self) -> tuple[int, ...]:
        """Entries masked alike in q, π_old and π_θ: specials and an opening that is one vocabulary entry.

        The tokens of a longer opening stay legal (banning a common piece of it would ban ordinary text), a learned
        opening is no vocabulary entry, and a close that may be sampled is never banned.
        """
        opening = set(self.open_ids) if len(self.open_ids) == 1 and not self.learned else set()
        return tuple(sorted((set(self.special_ids) | opening) - {self.stop_id}))

    def scored_nodes(self, whole: bool) -> int:
        """Nodes of a branch with its scored continuations: after every checkpoint, or after the `whole` thought."""
        segments = 1 if whole else len(self.checkpoints)
        return self.open_width + self.length + segments * self.segment_width

    @property
    def reach(self) -> int:
        """How many positions a branch may extend beyond its trunk node."""
        return self.open_width + self.length + self.close_width + self.horizon


def plan_thoughts(
    settings: ThoughtSettings, encode: Callable[[str], Sequence[int]], special_ids: Sequence[int] = ()
) -> ThoughtPlan:
    """The plan of `settings` for a tokenizer's `encode` (text to ids, no specials added)."""
    opening = tuple(encode(settings.open)) if settings.delimiters != "none" else ()
    closing = tuple(encode(settings.close)) if settings.delimiters != "none" else ()
    if settings.delimiters != "none" and not (opening and closing):
        raise UserError("thought.open / thought.close: no tokens in this vocabulary; set thought.delimiters = 'none'")
    if settings.variable_length and len(closing) != 1:
        raise UserError(
            f"thought.close: {settings.close!r} is {len(closing)} tokens in this vocabulary; variable_length needs one"
        )
    return ThoughtPlan(
        length=settings.length,
        checkpoints=tuple(settings.checkpoints),
        horizon=settings.horizon,
        open_ids=opening,
        close_ids=closing,
        learned=settings.delimiters == "learned",
        variable_length=settings.variable_length,
        group=settings.group or 1,
        special_ids=tuple(special_ids),
        gated=settings.reading == "gated",
    )


@dataclass(frozen=True)
class Thoughts:
    """One thought per branch: what was written and under which law."""

    tokens_BRT: Tensor
    """int64; entries from `length_BR` on mean nothing."""
    length_BR: Tensor
    """int64 number of actions L, a sampled close included; 0 is the empty thought of the controls."""
    valid_BR: Tensor
    """bool; whether the branch exists."""
    closed_BR: Tensor
    """bool; whether the last action is a sampled close."""
    log_q_BRT: Tensor
    """float32 log-probability under the sampling law, 0 where there is no action."""

    @property
    def mask_BRT(self) -> Tensor:
        """bool; which steps are actions."""
        steps_T = torch.arange(self.tokens_BRT.shape[-1], device=self.tokens_BRT.device)
        return (steps_T < self.length_BR[..., None]) & self.valid_BR[..., None]

    def to(self, device: torch.device | str) -> Thoughts:
        """The same thoughts on another device."""
        return moved(self, device)

    def rows(self, start: int, stop: int) -> Thoughts:
        """The thoughts of the texts `start … stop−1`."""
        return Thoughts(*(getattr(self, f.name)[start:stop] for f in fields(self)))

    def branches(self, start: int, stop: int | None, every: int = 1) -> Thoughts:
        """The branches `start … stop−1` of every text, with stride `every`."""
        return Thoughts(*(getattr(self, f.name)[:, start:stop:every] for f in fields(self)))


@dataclass(frozen=True)
class Layout:
    """Node attributes of a batch of tree rows, and where in them to read features, actions and losses."""

    plan: ThoughtPlan
    trunk_width: int
    """S."""
    branch_count: int
    """R."""
    segment_count: int
    """K: scored segments per branch (0 without scoring)."""
    segment_every: int
    """Stride of the branches that have segments: 1, or G for the first of each group."""

    token_BN: Tensor
    """int64 vocabulary entry (0 for padding; unused where `delimiter_BN` ≥ 0)."""
    delimiter_BN: Tensor
    """int64 learned embedding that enters here: 0 the opening, 1 the close, −1 none."""
    kind_BN: Tensor
    """int64, one of the kinds above."""
    document_BN: Tensor
    """int64 document of the node (of its trunk node for branches), −1 for padding."""
    position_BN: Tensor
    """int64 position id: depth inside the document, 0 for padding."""
    parent_BN: Tensor
    """int64 index of the parent node in the row, −1 at the start of a document and for padding."""

    trunk_limit_BN: Tensor
    """int64 last trunk index the node sees (in its own document), −1 for padding."""
    branch_BN: Tensor
    """int64 branch whose thought nodes it may see, −1 on the trunk."""
    place_BN: Tensor
    """int64 index of the node in its own part: in the trunk, in its thought's A nodes, or in its segment's W nodes."""
    step_limit_BN: Tensor
    """int64 last place on its branch's thought the node sees, −1 on the trunk."""
    segment_BN: Tensor
    """int64 segment (r·K + k, r counting branches that have any) the node belongs to, −1 outside segments."""

    position_BR: Tensor
    """int64 trunk index p of each branch, −1 where the branch does not exist."""
    length_BR: Tensor
    """int64 actions per branch (0 where it does not exist)."""
    action_node_BRT: Tensor
    """int64 node that predicts action t: the last node before it (0 where there is no action)."""
    action_mask_BRT: Tensor
    """bool; which actions exist."""
    checkpoint_BRK: Tensor
    """int64 thought tokens read before the segment (0 where there is no segment)."""
    segment_mask_BRK: Tensor
    """bool; which segments exist."""
    loss_node_BRKH: Tensor
    """int64 node that predicts continuation token j given the thought (0 where masked)."""
    trunk_loss_node_BRH: Tensor
    """int64 node that predicts it without a thought (0 where masked)."""
    loss_target_BRH: Tensor
    """int64 continuation tokens (0 where masked)."""
    loss_mask_BRH: Tensor
    """bool; continuation tokens that exist in the document of p."""

    @property
    def node_count(self) -> int:
        """N."""
        return self.token_BN.shape[1]

    @property
    def thought_width(self) -> int:
        """A = O + T."""
        return self.plan.open_width + self.plan.length

    @property
    def segment_width(self) -> int:
        """W."""
        return self.plan.segment_width

    @property
    def segments(self) -> int:
        """Segments of a row."""
        return len(range(0, self.branch_count, self.segment_every)) * self.segment_count

    @property
    def thought_start(self) -> int:
        """Index of the first thought node; branch r's nodes are `thought_start + r·A …`."""
        return self.trunk_width

    @property
    def segment_start(self) -> int:
        """Index of the first segment node; segment r·K + k has the nodes `segment_start + (r·K + k)·W …`."""
        return self.trunk_width + self.branch_count * self.thought_width

    @property
    def text_target_BS(self) -> Tensor:
        """int64 next token of every trunk node inside its document, −1 where there is none (no prediction there)."""
        document_BS = self.document_BN[:, : self.trunk_width]
        same = (document_BS[:, 1:] == document_BS[:, :-1]) & (document_BS[:, 1:] >= 0)
        target = torch.where(same, self.token_BN[:, 1 : self.trunk_width], -1)
        return torch.nn.functional.pad(target, (0, 1), value=-1)

    def mask(self, start: int = 0, window: int | None = None) -> Tensor:
        """bool `[B, 1, N−start, N]`: which nodes the nodes from `start` on see; `window` also bounds the *depth* apart.

        Every node sees itself, padding included, so that no softmax is empty.
        """
        return self.mask_of(torch.arange(start, self.node_count, device=self.token_BN.device), window)[:, None]

    def mask_of(self, node_n: Tensor, window: int | None = None, among_m: Tensor | None = None) -> Tensor:
        """bool `[B, n, N]`: which nodes (`[B, n, m]`: which of the nodes `among_m`) the nodes `node_n` see."""
        if among_m is None:
            every_N = torch.arange(self.node_count, device=self.token_BN.device)
            return self._sees(lambda v: v[:, node_n, None], lambda v: v[:, None, :], node_n[:, None], every_N, window)
        keys_m = among_m
        return self._sees(lambda v: v[:, node_n, None], lambda v: v[:, None, keys_m], node_n[:, None], keys_m, window)

    def mask_mod(self, start: int = 0, window: int | None = None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """The same relation as a FlexAttention `mask_mod(batch, head, query, key)`; queries count from `start`."""

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            query = query + start
            return self._sees(lambda v: v[batch, query], lambda v: v[batch, key], query, key, window)

        return sees

    def block_mask(self, start: int = 0, window: int | None = None) -> Any:
        """A FlexAttention `BlockMask` of the same relation."""
        from torch.nn.attention.flex_attention import create_block_mask

        rows, nodes = self.token_BN.shape
        return create_block_mask(
            self.mask_mod(start, window), rows, None, nodes - start, nodes, device=str(self.token_BN.device)
        )

    def _sees(
        self,
        of_query: Callable[[Tensor], Tensor],
        of_key: Callable[[Tensor], Tensor],
        query: Tensor,
        key: Tensor,
        window: int | None,
    ) -> Tensor:
        """The closed form behind both masks: a key is seen by its part (trunk, thought or segment), owner and place."""
        kind, place = of_key(self.kind_BN), of_key(self.place_BN)
        trunk = (of_query(self.document_BN) == of_key(self.document_BN)) & (place <= of_query(self.trunk_limit_BN))
        thought = (of_query(self.branch_BN) == of_key(self.branch_BN)) & (place <= of_query(self.step_limit_BN))
        segment = (of_query(self.segment_BN) == of_key(self.segment_BN)) & (place <= of_query(self.place_BN))
        if self.plan.gated:
            # The close belongs to the thought, which a continuation reads through its gates alone.
            segment = segment & (kind == of_query(self.kind_BN))
        seen = ((kind == TEXT) & trunk) | (((kind == OPEN) | (kind == THOUGHT)) & thought) | ((kind >= CLOSE) & segment)
        if window is not None:
            seen = seen & (of_query(self.position_BN) - of_key(self.position_BN) < window)
        return (seen & (of_query(self.kind_BN) != PADDING)) | (query == key)


def layout_tensors(layout: Layout) -> dict[str, Tensor]:
    """The tensors of a layout by name."""
    found = {f.name: getattr(layout, f.name) for f in fields(layout)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
