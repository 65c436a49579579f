"""Layouts by a replayed graph are those that are grown, one after another, and tiles are what the mask says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from cases import random_case
from torch import Tensor

from pretended_graphs import Again, PretendedGraphs
from tfive.tree.fast.grown import GrownLayouts
from tfive.tree.fast.tiled import Tiles, lists, tiled_trouble, words
from tfive.tree.grow import full_thoughts, grow, no_thoughts, without_thoughts
from tfive.tree.layout import Layout


def same(mine: Layout, other: Layout) -> bool:
    pairs = [(getattr(mine, f.name), getattr(other, f.name)) for f in fields(mine)]
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def test_captured_layouts_are_the_grown_ones() -> None:
    graphs = PretendedGraphs()
    layouts, case = GrownLayouts(graphs=graphs), random_case(1, "text2", group=2)
    found, wanted = [], []
    for step in range(4):
        texts = replace(case.texts, tokens_BS=case.texts.tokens_BS + step)
        for thoughts, segments in ((case.thoughts, "all"), (None, "none")):
            found.append(layouts(grow, texts, case.plan, thoughts, segments))
            wanted.append(grow(texts, case.plan, thoughts, segments))
    # After one eager call of a shape the next captures it and looks whether it is right; then it is replayed.
    assert [graph.replays for graph in graphs.graphs] == [3, 3]
    assert all(same(mine, other) for mine, other in zip(found, wanted, strict=True))
    assert layouts.reason == ""


class Broken(Again):
    """A graph whose work is not done again: replays leave what was captured."""

    def replay(self) -> None:
        pass


class BrokenGraphs(PretendedGraphs):
    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Again:
        super().capture(work, warm_up)
        return Broken(work)


def test_a_wrong_graph_ends_capturing() -> None:
    layouts, case = GrownLayouts(graphs=BrokenGraphs()), random_case(1, "text")
    honest, calls = grow, []

    def moving(*given: Any) -> Layout:
        # What is captured is another layout than what was grown before it.
        calls.append(1)
        layout = honest(*given)
        return replace(layout, token_BN=layout.token_BN + (len(calls) > 2))

    for _ in range(4):
        layouts(moving, case.texts, case.plan, case.thoughts)
    assert "differs" in layouts.reason
    # Once it was found out, layouts are grown one by one.
    before = len(calls)
    layouts(moving, case.texts, case.plan, case.thoughts)
    assert len(calls) == before + 1


def test_continuations_without_thoughts_are_those_of_a_layout() -> None:
    for seed in range(3):
        case = random_case(seed, "text", count=3)
        rows, count = case.texts.positions_BP.shape
        empty = no_thoughts(rows, count, case.plan, "cpu")
        layout = grow(case.texts, case.plan, empty, "none", case.texts.positions_BP)
        wanted = (layout.trunk_loss_node_BRH, layout.loss_target_BRH, layout.loss_mask_BRH)
        found = without_thoughts(case.texts, case.plan.horizon)
        assert all(torch.equal(mine, other) for mine, other in zip(found, wanted))


def test_words_hold_a_bit_for_every_key() -> None:
    seen_Bnm = torch.rand(2, 5, 150, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = (words(seen_Bnm)[..., None] >> torch.arange(64)) & 1
    assert torch.equal(bits.bool().flatten(2)[..., :150], seen_Bnm)
    assert not bits.flatten(2)[..., 150:].any()


def test_tiles_are_listed_by_what_is_seen_of_them() -> None:
    case = random_case(6, "text2", group=2, count=4)
    layout = grow(case.texts, case.plan, full_thoughts(case.texts, case.plan))
    seen_Bnm = layout.mask()[:, 0].repeat_interleave(9, 1).repeat_interleave(9, 2)
    tiles = Tiles.of(seen_Bnm)
    for rows, (order, whole, some) in ((32, tiles.queries(32)), (64, tiles.keys(64))):
        table = seen_Bnm if rows == 32 else seen_Bnm.transpose(1, 2)
        for batch, tile in ((b, t) for b in range(len(order)) for t in range(order.shape[1])):
            part = table[batch, rows * tile : rows * (tile + 1)]
            columns = [part[:, 64 * int(w) : 64 * int(w) + 64] for w in order[batch, tile]]
            count, until = int(whole[batch, tile]), int(some[batch, tile])
            assert all(bool(c.all()) and c.shape[1] == 64 for c in columns[:count])
            assert all(bool(c.any()) and not (bool(c.all()) and c.shape[1] == 64) for c in columns[count:until])
            assert not any(bool(c.any()) for c in columns[until:])
    assert lists(words(seen_Bnm), 32)[0].dtype == torch.int32
    assert tiled_trouble(4, 2, 64, torch.device("cpu"), torch.bfloat16) == "there are no kernels for cpu"
