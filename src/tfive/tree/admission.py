"""Admission of a model by numbers, not by name: a small random layout on its actual weights, computed both ways.

The tree pass must agree with the stock model reading one plain row per branch, block by block and with the head;
changing what a branch must not see must change nothing; and the sampling step must agree with the training forward. The
layout is longer than any attention window that could matter and reaches the last position of the run, since windows,
dynamic rotary embeddings and capped logits go wrong silently otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tfive.errors import UserError
from tfive.rng import uniforms
from tfive.tree.admission_gated import reading_pairs
from tfive.tree.attention import TreePass
from tfive.tree.forward import TreeModel
from tfive.tree.grow import grow
from tfive.tree.hf import Backbone
from tfive.tree.layout import Layout, TextBatch, ThoughtPlan, Thoughts
from tfive.tree.settings import SamplingSettings

_BOUND = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative difference of a node's activations that rounding explains, by type of the weights. In float64 it is
that of the norms and softmax that models compute in float32 all the same, 1.2e-6 on some processors."""


_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Admission:
    """What the comparison measured: all of it within bounds."""

    dtype: str
    """The type it was computed in."""
    blocks: tuple[float, ...]
    """Largest relative difference between tree and plain rows after each block."""
    log_prob: float
    """Mean absolute difference of next-token log-probabilities, head included."""
    leak: float
    """Largest relative change of a branch when what it must not see was changed."""
    sampling: float
    """Mean absolute difference of thought log-probabilities between sampling step and training forward."""
    reading: float | None = None
    """Largest relative difference between tree and plain rows in gated reading, where the plan asks for it."""


def admit(tree: TreeModel, longest: int, copy_bytes: int = 8 << 30) -> Admission:
    """Check that `tree` computes what its model would on rows of `longest` positions; a `UserError` names what differs.

    Half-precision weights are checked in float32 if such a copy takes at most `copy_bytes`: rounding hides mistakes.
    Where kernels of recurrent layers are at fault, and the engine's choice, they are given up for this process.
    """
    gated, tree = tree.plan.gated, _small_copy(tree, copy_bytes)
    backbone, plan, device = tree.backbone, tree.plan, tree.device
    room = longest - plan.reach
    needed = max((w + 8 for w in backbone.windows if w < longest), default=0)
    width = min(max(24, needed), room)
    if width < 12:
        raise UserError(f"longest position {longest}: too short for a probe of {plan.reach} branch tokens")
    texts, thoughts = _random_layout(width, plan, tree.head.vocabulary)
    layout = grow(texts.to(device), plan, thoughts.to(device), "all")
    shift = max(0, longest - 1 - int(layout.position_BN.max()))
    bound = _BOUND.get(tree.model.dtype, 1e-4)
    if backbone.recurrent:
        # Both delta rules run in float32 whatever the weights, in different orders of summation.
        bound = max(bound, 1e-3)

    def compared(tree: TreeModel) -> Admission:
        try:
            found = _compare(tree, texts, thoughts, layout, shift, bound)
            return replace(found, reading=_reading_gap(tree, texts, thoughts, shift, bound)) if gated else found
        finally:
            tree.forget_samplers()

    with torch.no_grad():
        try:
            return compared(tree)
        except UserError as error:
            if not tree.refuse_kernels(f"a model was not admitted with them ({error})"):
                raise
            return compared(TreeModel(tree.model, plan, tree.engine, tree.delimiters))


def _small_copy(tree: TreeModel, copy_bytes: int) -> TreeModel:
    """The same model with a small plan and inline reading, in float32 where that is affordable."""
    plan, model = tree.plan, tree.model
    length = min(3, plan.length)
    checkpoints, horizon = tuple(sorted({1, length})), min(3, plan.horizon)
    small = replace(plan, length=length, checkpoints=checkpoints, horizon=horizon, group=2, gated=False)
    if model.dtype in _HALF and 4 * sum(p.numel() for p in model.parameters()) <= copy_bytes:
        model = copy.deepcopy(model).float()
    return TreeModel(model, small, tree.engine, tree.delimiters)


def _random_layout(width: int, plan: ThoughtPlan, vocabulary: int) -> tuple[TextBatch, Thoughts]:
    """Two rows, the second of two documents, three positions each, thoughts of unequal lengths where they may vary."""

    def tokens(sample: int, *shape: int) -> Tensor:
        number = uniforms(0, "probe", 0, torch.arange(torch.Size(shape).numel()).numpy(), sample)
        return torch.from_numpy(number * vocabulary).long().view(shape)

    cut, ahead = width // 3, plan.horizon
    document_BS = torch.zeros(2, width, dtype=torch.int64)
    document_BS[1, cut:] = 1
    last = width - 1 - ahead
    positions_BP = torch.tensor([[2, width // 2, last], [1, cut + 1, last]])
    texts = TextBatch(tokens(0, 2, width), document_BS, positions_BP, torch.arange(6).view(2, 3))
    length_BR = torch.full((2, 6), plan.length)
    if plan.variable_length:
        length_BR[:, 1::2] = 1
    return texts, Thoughts(
        tokens_BRT=tokens(1, 2, 6, plan.length),
        length_BR=length_BR,
        valid_BR=torch.ones(2, 6, dtype=torch.bool),
        closed_BR=torch.zeros(2, 6, dtype=torch.bool),
        log_q_BRT=torch.zeros(2, 6, plan.length),
    )


@contextmanager
def _watched(backbone: Backbone) -> Iterator[list[Tensor]]:
    """The output of every block of the passes run inside, in order."""
    seen: list[Tensor] = []

    def note(_module: object, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        seen.append(output if isinstance(output, Tensor) else output[0])

    hooks = [block.register_forward_hook(note) for block in backbone.blocks]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _paths(layout: Layout) -> list[tuple[int, list[int]]]:
    """(row, nodes from the document's start to a leaf) of every leaf, shortest first."""
    parents, kinds = layout.parent_BN.tolist(), layout.kind_BN.tolist()
    found = []
    for row, (parent, kind) in enumerate(zip(parents, kinds)):
        for leaf in set(range(len(parent))) - set(parent):
            if kind[leaf] < 0:
                continue
            path = [leaf]
            while parent[path[-1]] >= 0:
                path.append(parent[path[-1]])
            found.append((row, path[::-1]))
    # Rotary embeddings that adapt to the longest row seen keep that state: longer rows must not come first.
    return sorted(found, key=lambda item: len(item[1]))


def _tree_pass(tree: TreeModel, layout: Layout, shift: int) -> tuple[list[Tensor], Tensor]:
    """Block outputs and final hidden states of all nodes, positions moved by `shift`."""
    with _watched(tree.backbone) as blocks:
        embeds_BND = tree.embed(layout.token_BN, layout.delimiter_BN)
        step = TreePass(layout, tree.kernel, recurrence=tree.recurrence(layout))
        hidden_BND = tree.backbone.run(embeds_BND, layout.position_BN + shift, step)
    return blocks, hidden_BND


def _plain_rows(tree: TreeModel, layout: Layout, shift: int) -> list[tuple[int, list[int], list[Tensor], Tensor]]:
    """(row, path, block outputs, logits) of each path as a row of its own through the stock model."""
    embeds_BND = tree.embed(layout.token_BN, layout.delimiter_BN)
    # A short row first: rotary embeddings that adapt forget longer rows of earlier calls only then.
    tree.backbone.plain(embeds_BND[:1, :1], layout.position_BN[:1, :1])
    found = []
    for row, path in _paths(layout):
        position_1n = torch.arange(len(path), device=tree.device)[None] + shift
        with _watched(tree.backbone) as blocks:
            logits_1nV = tree.backbone.plain(embeds_BND[row, path][None], position_1n)
        found.append((row, path, [block[0] for block in blocks], logits_1nV[0]))
    return found


def _apart(some: Tensor, other: Tensor) -> float:
    """Largest relative distance between corresponding nodes' activations (the mean one in half precision)."""
    far = (some - other).double().norm(dim=-1) / other.double().norm(dim=-1).clamp(min=1e-30)
    return float(far.mean() if other.dtype in _HALF else far.max())


def _compare(
    tree: TreeModel, texts: TextBatch, thoughts: Thoughts, layout: Layout, shift: int, bound: float
) -> Admission:
    name, backbone = tree.backbone.name, tree.backbone
    plain = _plain_rows(tree, layout, shift)
    blocks, hidden_BND = _tree_pass(tree, layout, shift)
    errors = []
    for index, block in enumerate(backbone.blocks):
        errors.append(max(_apart(blocks[index][row, path], theirs[index]) for row, path, theirs, _ in plain))
        if not errors[-1] <= bound:
            raise UserError(
                f"model {name}: tree and plain rows differ from block {index} ({type(block).__name__}) on, by "
                f"{errors[-1]:.2g} of its activations (bound {bound:.0e}); this model cannot be driven as a tree"
            )
    gaps = [_log_prob_gap(tree, hidden_BND[row, path], logits) for row, path, _, logits in plain]
    log_prob = sum(gaps) / len(gaps)
    if not log_prob <= 10 * bound:
        raise UserError(
            f"model {name}: the blocks agree but the head does not, by {log_prob:.2g} nats; its logits are transformed "
            "in a way the tree engine does not compute"
        )
    leak = _leak(tree, layout, hidden_BND, shift)
    if not leak <= bound:
        raise UserError(
            f"model {name}: a branch sees what it must not (change {leak:.2g}); it cannot be driven as a tree"
        )
    sampling = _sampling_gap(tree, texts)
    if not sampling <= 10 * bound:
        raise UserError(f"model {name}: sampling step and training forward differ by {sampling:.2g} nats on average")
    return Admission(str(tree.model.dtype).removeprefix("torch."), tuple(errors), log_prob, leak, sampling)


def _reading_gap(tree: TreeModel, texts: TextBatch, thoughts: Thoughts, shift: int, bound: float) -> float:
    gap = max(_apart(ours, theirs) for ours, theirs in reading_pairs(tree, texts, thoughts, shift))
    if not gap <= bound:
        raise UserError(
            f"thought.reading = gated: tree and plain rows of model {tree.backbone.name} differ by {gap:.2g} of its "
            f"activations (bound {bound:.0e}); set thought.reading = inline"
        )
    return gap


def _log_prob_gap(tree: TreeModel, hidden_nD: Tensor, logits_nV: Tensor) -> float:
    ours = tree.head.logits(hidden_nD).log_softmax(-1)
    return float((ours - logits_nV.to(ours.dtype).log_softmax(-1)).abs().mean())


def _leak(tree: TreeModel, layout: Layout, hidden_BND: Tensor, shift: int) -> float:
    """How much the first branch of each row moves when everything it must not see is changed."""
    first_segment = layout.segment_start + layout.segment_width * layout.segment_count
    own = [*range(layout.thought_start, layout.thought_start + layout.thought_width)]
    own += range(layout.segment_start, first_segment)
    seen_BN = layout.mask()[:, 0, own].any(1)
    changed = replace(
        layout, token_BN=torch.where(seen_BN, layout.token_BN, (layout.token_BN + 1) % tree.head.vocabulary)
    )
    _, moved_BND = _tree_pass(tree, changed, shift)
    real = layout.kind_BN[:, own] >= 0
    return _apart(moved_BND[:, own][real], hidden_BND[:, own][real])


def _sampling_gap(tree: TreeModel, texts: TextBatch) -> float:
    rows, branches = texts.positions_BP.shape[0], texts.positions_BP.shape[1] * tree.plan.group
    shape = (rows, branches, tree.plan.length)
    numbers = torch.from_numpy(uniforms(0, "probe", 1, torch.arange(torch.Size(shape).numel()).numpy())).view(shape)
    thoughts = tree.sample(texts, numbers, SamplingSettings())
    log_prob = tree.policy(texts, thoughts).log_prob_BRT
    if log_prob is None:
        raise RuntimeError("the policy gave no log-probabilities")
    mask = thoughts.mask_BRT
    return float((log_prob - thoughts.log_q_BRT)[mask].abs().mean())
