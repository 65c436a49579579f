"""The exchanges between processes: rows come back in order and bit for bit, sums are the same everywhere."""

from __future__ import annotations

import pytest
import torch
from processes import run_world

from tfive.distributed.world import SINGLE, World


def test_shares_cover_all_rows_in_order_and_differ_by_one_at_most() -> None:
    world = World()
    world.size = 4
    for count in range(12):
        shares = [world.share_of(rank, count) for rank in range(4)]
        assert [row for share in shares for row in range(share.start, share.stop)] == list(range(count))
        sizes = [share.stop - share.start for share in shares]
        assert max(sizes) - min(sizes) <= 1
    world.rank = 3
    assert world.share(2) == slice(2, 2)
    assert world.computed(2) == slice(1, 2)


def test_a_world_of_one_gives_back_what_it_is_given() -> None:
    rows = torch.arange(6).view(3, 2)
    assert SINGLE.gather(rows, 3) is rows
    assert SINGLE.sum_in_order([[1.0, 2.0], [3.0, 4.0]], 2) == [4.0, 6.0]
    assert SINGLE.computed(3) == slice(0, 3)
    assert SINGLE.leads
    assert not SINGLE.any_of(False)


@pytest.mark.parametrize("size", [2, 4])
def test_exchanges_are_exact_and_the_same_on_every_process(size: int) -> None:
    found = run_world(size, "exchanges:exchanges")
    assert [one.pop("rank") for one in found] == list(range(size))
    assert [one.pop("part") for one in found] == [[2.0], [2.0], None, None][:size]
    assert all(one == found[0] for one in found)
    total = size * (size - 1) // 2
    assert found[0]["sum"] == [float(total), 10.0 * total]
    assert found[0]["ragged"][1] == [number for rank in range(size) for number in range(rank)]
    assert found[0]["gradients"] == [[[float(total)] * 2] * 2, [1.0] * 3, None]
    assert found[0]["any"] == [True, False]
    assert [one["seconds"] for one in found[0]["numbers"]] == [1.5 * rank for rank in range(size)]
    assert found[0]["texts"] == ["é" * rank for rank in range(size)]
    assert found[0]["transferred"] == [[0, 1, 2], 1.5, None, [[1.0], [1.0]]]
    assert "the corpus differs between processes: rank" in found[0]["differs"]
