"""What changes between updates reaches those that are replayed: settings, weights, losses that are no numbers. What a
graph has of the data it was captured on is found out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_replayed_updates import BOTH, FUSED, GROUPS, actor_on, record, same, state_of
from torch import Tensor

from stage import llama
from taped_graphs import TapedGraphs
from tfive.distributed.world import World
from tfive.rl.actor import Actor
from tfive.rl.adapters import adapt_actor
from tfive.rl.onlooker import Onlooker
from tfive.rl.settings import ActorSettings, AnchorSettings, RatioSettings
from tfive.rl.update_loss import UpdateLoss
from tfive.tree.fast import replayed_backward
from tfive.tree.forward import TreeModel

pytestmark = pytest.mark.model
Step = Callable[[Actor, int], Any]


def plainly(actor: Actor, step: int) -> Any:
    return actor.step(record(step))


def both_ways(step: Step, steps: int = 8, anchor: AnchorSettings = BOTH, rows: int = 8, **others: Any) -> Actor:
    """A run by replayed updates that is the same as the launched one."""
    graphs = TapedGraphs()
    replayed = actor_on(llama(torch.float64), anchor, graphs=graphs, rows=rows, **others)
    launched = actor_on(
        llama(torch.float64), anchor, rows=rows, options=replace(FUSED, replayed_passes=False), **others
    )
    found = [([step(actor, number) for number in range(steps)], state_of(actor)) for actor in (replayed, launched)]
    same(found[0], found[1])
    assert sum(graph.replays for graph in graphs.graphs) > len(graphs.graphs) > 0
    return replayed


def test_changed_settings_are_seen() -> None:
    def step(actor: Actor, number: int) -> Any:
        if number == 4:
            actor.settings = ActorSettings(clip_low=0.95, clip_high=1.02)
        if number == 8:
            actor.ratio = RatioSettings(correction="truncated", cap=1.1)
        if number == 12:
            actor.anchor = AnchorSettings(next_token=0.1, conditioned=2.0)
        return actor.step(record(number % 4))

    assert both_ways(step, steps=16).updates.reason == ""


@pytest.mark.parametrize("lr", [None, 2e-3], ids=["one rate", "own rate"])
@pytest.mark.parametrize("rows", [8, 3], ids=["whole", "parts"])
def test_steps_of_several_kinds_take_turns(lr: float | None, rows: int) -> None:
    kinds: list[dict[str, Any]] = [{}, {"policy": False}, {"aggregate": "thought"}]

    def step(actor: Actor, number: int) -> Any:
        return actor.step(record(number % 4), **kinds[number % 3])

    actor = both_ways(step, 12, BOTH.model_copy(update={"lr": lr}), rows)
    assert actor.updates.reason == ""


@pytest.mark.parametrize("lr", [None, 2e-3], ids=["one rate", "own rate"])
@pytest.mark.parametrize("rows", [8, 3], ids=["whole", "parts"])
def test_nothing_of_a_skipped_update_stays(lr: float | None, rows: int) -> None:
    """An advantage that is no number leaves none in the gradients, where the next update must not find it."""
    skipped = []

    def step(actor: Actor, number: int) -> Any:
        one = record(number % 3)
        if number in (1, 6, 7):
            broken = one.need("advantage_BRT").clone()
            broken[one.mask_BRT] = torch.nan
            one = replace(one, advantage_BRT=broken)
        before = {name: weight.clone() for name, weight in actor.optimizer.masters().items()}
        stats = actor.step(one)
        skipped.append(actor.optimizer.skipped)
        if number == 6 and lr is None:
            assert all(torch.equal(before[name], weight) for name, weight in actor.optimizer.masters().items())
        # A mean of what is no number is compared as none.
        return replace(stats, policy_loss=0.0, policy_kl=0.0, mismatch_kl=0.0, gradient_norm=float(stats.skipped))

    actor = both_ways(step, 10, BOTH.model_copy(update={"lr": lr}), rows)
    assert skipped[9] == 3
    assert actor.updates.reason == ""


def test_a_single_weight_that_moved_is_read_where_it_is() -> None:
    def step(actor: Actor, number: int) -> Any:
        if number == 5:
            weight: Any = actor.engine.model.model.layers[0].mlp.down_proj.weight
            weight.data = 1.5 * weight.data
        return plainly(actor, number % 2)

    both_ways(step, steps=9)


def test_loaded_weights_are_read() -> None:
    other = actor_on(llama(torch.float64), BOTH)
    for number in range(3):
        plainly(other, number)

    def step(actor: Actor, number: int) -> Any:
        if number == 4:
            actor.load_state_dict(other.state_dict())
        return plainly(actor, number % 2)

    both_ways(step)


def test_a_graph_that_keeps_some_of_its_inputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that is worked out once for a tensor, in the run before a capture, would be that run's for ever."""
    honest, known = UpdateLoss.__call__, dict[int, tuple[Tensor, Tensor]]()

    def remembering(self: UpdateLoss, output: Any, given: Mapping[str, Tensor], totals: Sequence[Any]) -> Any:
        own = given["advantage_BRT"]
        _, first = known.setdefault(id(own), (own, own.clone()))
        return honest(self, output, {**given, "advantage_BRT": first}, totals)

    monkeypatch.setattr(UpdateLoss, "__call__", remembering)
    replayed = actor_on(llama(torch.float64), BOTH, graphs=TapedGraphs())
    launched = actor_on(llama(torch.float64), BOTH, options=replace(FUSED, replayed_passes=False))
    runs = [([plainly(actor, number) for number in range(4)], state_of(actor)) for actor in (replayed, launched)]
    same(runs[0], runs[1])
    assert "differs by" in replayed.updates.reason


def test_what_an_update_would_see_is_read_with_its_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows the vocabulary's product has decides how it rounds."""
    one, sizes, honest = record(0), list[int](), TreeModel.reduce

    def noting(self: TreeModel, hidden_BND: Tensor, picks: Any, *others: Any, **options: Any) -> Any:
        sizes.append(len(picks.index))
        return honest(self, hidden_BND, picks, *others, **options)

    replayed = actor_on(llama(torch.float64), BOTH, graphs=TapedGraphs())
    launched = actor_on(llama(torch.float64), BOTH, options=replace(FUSED, replayed_passes=False))
    wanted = launched.policy_of(one)
    monkeypatch.setattr(TreeModel, "reduce", noting)
    found = replayed.policy_of(one)
    read = sizes.copy()
    sizes.clear()
    replayed.step(one)
    assert read == sizes
    assert all(size % 16 == 0 for size in read)
    for name in ("log_prob_BRT", "features_BRTD", "text_log_prob_BS", "continuation_log_prob_BRH"):
        torch.testing.assert_close(found.need(name), wanted.need(name), rtol=1e-12, atol=1e-12)


def test_updates_of_several_processes_and_low_rank_ones_are_launched() -> None:
    actor = actor_on(llama(torch.float64), BOTH)
    assert actor._replays(actor.engine)
    actor.optimizer.world = two = World()
    two.size = 2
    assert not actor._replays(actor.engine)
    model = llama(torch.float64)
    adapt_actor(model, ActorSettings(adapt="lora"), 0)
    adapted = actor_on(model, BOTH)
    assert not adapted._replays(adapted.engine)


def test_a_process_without_the_actor_has_nothing_to_capture() -> None:
    engine = TreeModel(llama(torch.float64), GROUPS, FUSED.unfused())
    actor = Actor(engine, Onlooker(), ActorSettings(), RatioSettings(), BOTH, seed=0, rows=2)
    assert not actor._replays(engine)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "reserved", "fits"),
    [(60, 20, True), (34, 31, True), (33, 31, False), (20, 31, False), (0, 80, True)],
    ids=["much is free", "just", "not quite", "others have it", "all is ours"],
)
def test_two_passes_must_fit_in_what_the_process_has_or_can_get(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, fits: bool
) -> None:
    """At most 35 GiB were allocated and 10 still are: twice that pass is 60, and 5 of 80 stay free."""
    told = {
        "max_memory_allocated": 35 * GIB,
        "memory_allocated": 10 * GIB,
        "memory_reserved": reserved * GIB,
        "mem_get_info": (free * GIB, 80 * GIB),
    }
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert replayed_backward._fits_twice(torch.device("cuda")) is fits
