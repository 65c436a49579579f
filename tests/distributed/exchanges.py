"""What the processes of `test_world.py` do."""

from __future__ import annotations

from typing import Any

import torch

from tfive.distributed.transfer import transferred
from tfive.distributed.world import World
from tfive.errors import RunFailed

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def exchanges(world: World) -> dict[str, Any]:
    """Every exchange of a world, with what came of it."""
    found: dict[str, Any] = {"rank": world.rank}
    for count in (1, 3, 4, 7, 9):
        for kind in KINDS:
            whole = torch.arange(count * 6).view(count, 3, 2).to(kind)
            own = whole[world.computed(count)]
            (back, sideways) = world.gather_all([(own, 0), (own.movedim(0, 1), 1)], count)
            assert torch.equal(back, whole), (count, kind)
            assert torch.equal(sideways, whole.movedim(0, 1)), (count, kind)
    ragged = world.gather_ragged([torch.full((world.rank, 2), float(world.rank)), torch.arange(world.rank)])
    found["ragged"] = [part.tolist() for part in ragged]
    found["sum"] = world.sum_in_order([[1.0, 10.0]] * world.rank, 2)
    mine = torch.full((2, 2), float(world.rank))
    gradients = [mine, None if world.rank else torch.ones(3), None]
    shapes = [torch.zeros(2, 2), torch.zeros(3), torch.zeros(5)]
    sums = world.reduce_gradients(gradients, lambda number: shapes[number])
    found["gradients"] = [None if one is None else one.tolist() for one in sums]
    found["any"] = [world.any_of(world.rank == 1), world.any_of(False)]
    found["numbers"] = world.gather_numbers({"seconds": 1.5 * world.rank, "bytes": 2.0})
    found["texts"] = world.gather_texts("é" * world.rank)
    tree = {"a.b": [torch.arange(3), 1.5, None], "two": {"weights": torch.full((2, 1), float(world.rank)).bfloat16()}}
    came = transferred(world, tree, 1)
    found["transferred"] = [came["a.b"][0].tolist(), *came["a.b"][1:], came["two"]["weights"].tolist()]
    some = world.part([0, 1])
    found["part"] = None if some is None else some.sum_in_order([[1.0]], 1)
    world.barrier("here")
    world.agree("the corpus", "same")
    try:
        world.agree("the corpus", f"{world.rank == 1}")
    except RunFailed as error:
        found["differs"] = str(error)
    return found
