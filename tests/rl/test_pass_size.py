"""A set that memory does not hold is drawn, scored or read again with fewer texts a pass: the one that they make."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import fields
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from stage import LAW, PLAN, Tally, gpt2, llama, rollout_of, texts
from tfive.distributed.roles import Role
from tfive.distributed.world import World
from tfive.rl.continuations import continued
from tfive.rl.critic import FrozenBase, build_pair
from tfive.rl.critics import Critics
from tfive.rl.gate import Gate
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.pass_size import PassSize
from tfive.rl.rollout import Draw, Rollout
from tfive.rl.settings import CriticSettings, GateSettings
from tfive.rl.teacher import Teacher
from tfive.rl.trajectory import Trajectories
from tfive.training.develop import MeasuredTexts
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch

pytestmark = pytest.mark.model

SHORT = torch.OutOfMemoryError("CUDA out of memory")


def many(number: int) -> TextBatch:
    return texts(rows=6, count=3, width=30, seed=number)


def hold(
    monkeypatch: pytest.MonkeyPatch, verb: str, most: int, *, before: int = 0, error: BaseException = SHORT
) -> list[int]:
    """Have an engine's verb find no memory for more texts than that, but for so many calls before; returns the sizes
    that were asked for."""
    function, sizes, large = getattr(TreeModel, verb), list[int](), count()

    def short(engine: TreeModel, some: TextBatch, *asked: Any, **options: Any) -> Any:
        sizes.append(len(some.tokens_BS))
        if sizes[-1] > most and next(large) >= before:
            raise error
        return function(engine, some, *asked, **options)

    monkeypatch.setattr(TreeModel, verb, short)
    return sizes


def told(rows: int) -> tuple[PassSize, list[str]]:
    said: list[str] = []
    return PassSize(rows, tell=said.append), said


def tensors(found: Any) -> dict[str, Tensor]:
    """All that there is of a result."""
    if isinstance(found, Tensor):
        return {"": found}
    if isinstance(found, dict):
        parts = found.items()
    elif isinstance(found, (list, tuple)):
        parts = dict(enumerate(found)).items()
    elif isinstance(found, (int, float)):
        return {"": torch.tensor(found, dtype=torch.float64)}
    elif hasattr(found, "__dataclass_fields__"):
        parts = {f.name: getattr(found, f.name) for f in fields(found)}.items()
    else:
        return {}
    return {f"{name}.{inner}": value for name, part in parts for inner, value in tensors(part).items()}


def same(one: Any, other: Any) -> None:
    mine, others = tensors(one), tensors(other)
    assert mine.keys() == others.keys()
    assert len(mine) > 0
    for name, value in mine.items():
        assert value.dtype == others[name].dtype
        assert torch.equal(value.nan_to_num(), others[name].nan_to_num()), name


Made = tuple[Any, Any]
"""What came of some work on a set, and what was counted; all before it was made by passes of two texts."""


def rollout_with(dtype: torch.dtype) -> tuple[Rollout, Tally]:
    tally = Tally()
    return rollout_of(TreeModel(gpt2(dtype, closing=1.5), PLAN), many, rows=2, telemetry=tally), tally


def collected(rows: PassSize, dtype: torch.dtype) -> Made:
    rollout, tally = rollout_with(dtype)
    rollout.passes, rollout.below = rows, 1
    ahead = [Draw("actor", 1), Draw("head_train", 1, states=True)]
    return [rollout.collect("pilot", 1, states=True, ahead=ahead), *rollout.ready.values()], tally.amounts


def compared(rows: PassSize, dtype: torch.dtype) -> Made:
    rollout, tally = rollout_with(dtype)
    drawn = rollout.collect("actor", 1)
    rollout.passes, rollout.reward = rows, rollout.reward.model_copy(update={"reference": "foreign"})
    return rollout._with_reference("actor", drawn), tally.amounts


def probed(rows: PassSize, dtype: torch.dtype) -> Made:
    rollout, tally = rollout_with(dtype)
    begun = rollout.collect("probe", 1)
    rollout.passes = rows
    return continued(rollout, begun, 3), tally.amounts


def appraised(rows: PassSize, dtype: torch.dtype) -> Made:
    rollout, tally = rollout_with(dtype)
    drawn = rollout.collect("actor", 1)
    rollout.passes = rows
    return rollout.appraised(rollout.engine, drawn.texts, drawn.thoughts, 1), tally.amounts


def critics_with(dtype: torch.dtype) -> tuple[Critics, Trajectories]:
    engine, settings = TreeModel(llama(dtype), PLAN), CriticSettings(adapt="top", blocks=1, width=8, minibatches=2)
    pair = [one.to(dtype) for one in build_pair(llama(dtype, seed=4), PLAN, settings, seed=1)]
    critics = Critics(FrozenBase(engine.model, PLAN, settings), pair, settings, alpha=1.0, seed=2, rows=2)
    return critics, rollout_of(engine, many, rows=2).collect("critic_fit", 1)


def fitted(rows: PassSize, dtype: torch.dtype) -> Made:
    critics, drawn = critics_with(dtype)
    critics.passes = rows
    losses = critics.fit_pass(drawn, None, 1, 0, warmup=True)
    return [losses, dict(critics.critics[0].state_dict())], None


def evaluated(rows: PassSize, dtype: torch.dtype) -> Made:
    critics, drawn = critics_with(dtype)
    critics.evaluate(drawn)  # what is kept of it was read by two
    critics.passes = rows
    return critics.evaluate(drawn), None


def taught(rows: PassSize, dtype: torch.dtype) -> Made:
    engine = TreeModel(gpt2(dtype), PLAN)
    teacher = Teacher.of(engine, decay=0.5, rows=rows)
    teacher.follow(MasterOptimizer(list(engine.model.named_parameters()), lr=1e-3).masters())
    return teacher.losses(many(1)), None


def measured_with(dtype: torch.dtype, rows: int | PassSize) -> MeasuredTexts:
    some = many(1)
    base, kind_BP = TreeModel(gpt2(dtype), PLAN), torch.zeros_like(some.positions_BP)
    return MeasuredTexts(some, kind_BP, base, LAW, role="develop", seed=3, rows=rows)


def yardstick(rows: PassSize, dtype: torch.dtype) -> Made:
    return measured_with(dtype, rows).base_no_thought_BR, None


def measured(rows: PassSize, dtype: torch.dtype) -> Made:
    found, engine = measured_with(dtype, 2), TreeModel(gpt2(dtype, seed=1), PLAN)
    assert found.base_no_thought_BR is not None
    found.passes = rows
    gate = Gate(engine.width, GateSettings(), seed=3, device=engine.device)
    return [found.measure(engine, gate), found.thoughts, found.token_IH], found.amounts()


PLACES: list[tuple[Callable[[PassSize, torch.dtype], Made], str, int]] = [
    (collected, "read", 0), (collected, "sample", 1), (collected, "score", 3), (collected, "score", 5),
    (collected, "policy", 0), (collected, "policy", 1), (compared, "score", 1), (probed, "sample", 1),
    (probed, "policy", 1), (probed, "score", 1), (appraised, "score", 1), (appraised, "policy", 1),
    (fitted, "lower", 1), (evaluated, "lower", 0), (evaluated, "lower", 1), (taught, "no_thought", 1),
    (yardstick, "no_thought", 1), (measured, "sample", 1), (measured, "score", 0), (measured, "score", 7),
]  # fmt: skip
"""Some work, a verb that finds no memory in it, and how many calls of it with too many texts do before."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("work", "verb", "before"), PLACES)
def test_what_does_not_fit_is_made_again_and_is_that_of_the_smaller_size_to_the_bit(
    work: Callable[[PassSize, torch.dtype], Made],
    verb: str,
    before: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted, counted = work(PassSize(2), dtype)
    sizes = hold(monkeypatch, verb, 2, before=before)
    rows, said = told(3)
    found, again = work(rows, dtype)
    assert (rows.rows, sizes.count(3)) == (2, before + 1)
    same(found, wanted)
    assert again == counted, "nothing is counted twice"
    assert said == [
        "a set of texts did not fit and was made again: 2 texts a pass from here on instead of 3 "
        "(run.texts_per_rollout)"
    ]


def test_the_smaller_size_stays_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, _ = rollout_with(torch.float64)
    rollout.passes, said = told(6)
    sizes = hold(monkeypatch, "sample", 1)
    rollout.collect("pilot", 1)
    rollout.collect("actor", 1)
    # Six, three, two, and text by text from there on.
    assert sizes == [6, 3, 2, *[1] * 12]
    assert said == [
        "a set of texts did not fit and was made again: 1 texts a pass from here on instead of 6 "
        "(run.texts_per_rollout)"
    ]


@pytest.mark.parametrize("error", [SHORT, MemoryError(), RuntimeError("wrong shape")])
def test_what_is_no_lack_of_memory_or_of_one_text_is_raised(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, tally = rollout_with(torch.float64)
    rollout.passes, said = told(4)
    sizes = hold(monkeypatch, "sample", 0, error=error)
    with pytest.raises(type(error)) as raised:
        rollout.collect("pilot", 1)
    assert raised.value is error
    assert sizes == ([4] if "shape" in str(error) else [4, 2, 1])
    assert (said, tally.amounts, rollout.ready) == ([], {}, {})


class Two(World):
    """Two processes, of which this is the first."""

    size = 2


def test_of_several_processes_none_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, _ = rollout_with(torch.float64)
    world, given = Two(), dict[str, Any](seed=3, rows=2)
    parts = (rollout.texts_of, rollout.ledger, rollout.snapshots, LAW, rollout.reward, rollout.telemetry)
    shared = Rollout(rollout.engine, *parts, **given, by=Role.of_all(world))
    sizes = hold(monkeypatch, "sample", 1)
    with pytest.raises(torch.OutOfMemoryError):
        shared.collect("pilot", 1)
    assert (sizes, shared.rows) == ([2], 2)
    measuring = MeasuredTexts(
        many(1), many(1).positions_BP, rollout.engine, LAW, role="develop", world=world, **given
    )  # fmt: skip
    sizes = hold(monkeypatch, "no_thought", 1)
    with pytest.raises(torch.OutOfMemoryError):
        assert measuring.base_no_thought_BR is not None
    assert (sizes, measuring.passes.rows) == ([2], 2)


def test_what_failed_and_what_engines_keep_is_given_back_before_it_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollout, _ = rollout_with(torch.float64)
    engine = rollout.engine
    other = TreeModel(engine.model, PLAN)
    rollout.passes = PassSize(3, forget=[other.let_go])
    other.sample(many(1), torch.full((6, 3 * PLAN.group, PLAN.length), 0.5, dtype=torch.float64), LAW)
    kept = weakref.ref(next(iter(other._samplers.values())))
    read, score = TreeModel.read, TreeModel.score
    readings, gone = list[Any](), list[bool]()

    def noted(engine: TreeModel, *asked: Any) -> Any:
        found = read(engine, *asked)
        readings.append(weakref.ref(found))
        return found

    def short(engine: TreeModel, some: TextBatch, *asked: Any, **options: Any) -> Any:
        if len(some.tokens_BS) > 2:
            assert len(engine._samplers) == 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(engine, some, *asked, **options)

    monkeypatch.setattr(TreeModel, "read", noted)
    monkeypatch.setattr(TreeModel, "score", short)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gone.append(readings[0]() is None and kept() is None))
    rollout.collect("pilot", 1)
    assert gone == [True], "nothing is held when memory is given back"
    assert [key[0][0] for key in engine._samplers] == [2]
    assert (other._samplers, other.sampler) == ({}, None)
    assert not engine.passes.wanted
