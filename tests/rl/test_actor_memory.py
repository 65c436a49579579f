"""An update that memory does not hold is made again with fewer texts a pass, and comes to the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from stage import PLAN, gpt2, texts, thoughts_for
from tfive.rl.actor import Actor, StepStats
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.settings import ActorSettings, AnchorSettings, RatioSettings
from tfive.rl.trajectory import Trajectories
from tfive.tree.forward import TreeModel

BATCH = texts(rows=8)
TOGETHER = AnchorSettings(next_token=0.7, conditioned=1.3)
APART = AnchorSettings(next_token=0.7, conditioned=1.3, lr=1e-4)


def acting() -> Trajectories:
    thoughts, draw = thoughts_for(BATCH, PLAN), torch.Generator().manual_seed(4)
    mask = thoughts.mask_BRT
    log_old, advantage = (torch.randn(mask.shape, generator=draw, dtype=torch.float64) * mask for _ in range(2))
    return Trajectories("actor", 1, BATCH, thoughts, log_old_BRT=log_old - 3, advantage_BRT=advantage)


def updated(anchor: AnchorSettings, rows: int, **options: Any) -> tuple[Actor, StepStats, dict[str, Tensor]]:
    """An actor after one update, what that saw, and the weights."""
    model = gpt2()
    optimizer = MasterOptimizer(list(model.named_parameters()), lr=1e-3)
    engine = TreeModel(model, PLAN)
    actor = Actor(engine, optimizer, ActorSettings(), RatioSettings(), anchor, seed=3, rows=rows, **options)
    return actor, actor.step(acting()), dict(model.state_dict())


def hold(monkeypatch: pytest.MonkeyPatch, most: int, error: BaseException, *, first: bool) -> list[int]:
    """Have passes of more texts than that find no memory, `first` or only when another has left gradients before;
    returns the sizes that were asked for."""
    read, sizes = Actor._read, list[int]()

    def short(actor: Actor, engine: TreeModel, some: Trajectories, *asked: Any, **options: Any) -> Any:
        sizes.append(len(some.texts.tokens_BS))
        begun = any(gradient is not None for gradient in actor.optimizer.accumulators.held)
        if sizes[-1] > most and (first or begun):
            raise error
        return read(actor, engine, some, *asked, **options)

    monkeypatch.setattr(Actor, "_read", short)
    return sizes


@pytest.mark.parametrize("anchor", [TOGETHER, APART])
@pytest.mark.parametrize("parity", [False, True])
def test_an_update_that_does_not_fit_is_made_again_with_half_of_the_texts_a_pass(
    anchor: AnchorSettings, parity: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, seen, weights = updated(anchor, rows=2, parity=parity)
    sizes = hold(monkeypatch, 2, torch.OutOfMemoryError("CUDA out of memory"), first=False)
    actor, again, others = updated(anchor, rows=5, parity=parity)
    assert actor.rows == 2  # five, three, two
    assert sizes[:4] == [5, 3, 3, 3]
    # The same passes to the bit in the end: nothing of those that failed is left.
    assert again == seen
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize(
    "error", [RuntimeError("wrong shape"), torch.OutOfMemoryError("CUDA out of memory"), MemoryError()]
)
def test_what_is_no_lack_of_memory_or_of_one_text_is_raised(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = hold(monkeypatch, 0, error, first=True)
    with pytest.raises(type(error)):
        updated(TOGETHER, rows=8)
    assert sizes == ([8] if "shape" in str(error) else [8, 4, 2, 1])
