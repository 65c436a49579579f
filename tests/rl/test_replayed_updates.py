"""Updates by replayed graphs are those launched kernel by kernel: the same weights, step after step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pretended_graphs import Again, PretendedGraphs
from stage import FIXED, PLAN, llama, texts, thoughts_for
from taped_graphs import Tape, TapedGraphs
from tfive.rl.actor import Actor, StepStats
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.settings import ActorSettings, AnchorSettings, RatioSettings
from tfive.rl.trajectory import Trajectories
from tfive.tree import packed
from tfive.tree.delimiters import Delimiters
from tfive.tree.forward import TreeModel
from tfive.tree.layout import ThoughtPlan
from tfive.tree.settings import EngineOptions, SamplingSettings

pytestmark = pytest.mark.model
FUSED = EngineOptions(fused_blocks="on", fused_training="on", replayed_passes=True)
NOTHING = AnchorSettings(next_token=0.0)
TEXT = AnchorSettings(next_token=0.7)
BOTH = AnchorSettings(next_token=0.7, conditioned=1.3)
GROUPS = replace(PLAN, group=2)
LEARNED = replace(GROUPS, learned=True)


class Unused(nn.Module):
    """A weight that no pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))


def actor_on(
    model: PreTrainedModel,
    anchor: AnchorSettings = BOTH,
    plan: ThoughtPlan = GROUPS,
    graphs: PretendedGraphs | None = None,
    rows: int = 8,
    options: EngineOptions = FUSED,
    **others: Any,
) -> Actor:
    delimiters = Delimiters.from_model(model, plan) if plan.learned else None
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    named += [("unused.weight", Unused().weight)]
    if delimiters is not None:
        named += [("delimiters.weight_2D", delimiters.weight_2D)]
    engine = TreeModel(model, plan, options, delimiters)
    optimizer = MasterOptimizer(named, lr=1e-2, weight_decay=0.1)
    actor = Actor(
        engine, optimizer, ActorSettings(), RatioSettings(), anchor, seed=3, rows=rows, **others
    )  # fmt: skip
    actor.updates.graphs = graphs
    return actor


def record(step: int, plan: ThoughtPlan = GROUPS, rows: int = 8) -> Trajectories:
    """Thoughts of every length with advantages, other ones each step."""
    batch, draw = texts(rows=rows, seed=step + 1), torch.Generator().manual_seed(step)
    thoughts = thoughts_for(batch, plan, seed=step)
    repeated = {f.name: getattr(thoughts, f.name).repeat_interleave(plan.group, 1) for f in fields(thoughts)}
    thoughts = replace(thoughts, **repeated)
    old, advantage = torch.randn(2, *thoughts.mask_BRT.shape, generator=draw, dtype=torch.float64) * thoughts.mask_BRT
    return Trajectories("actor", 1, batch, thoughts, log_old_BRT=0.3 * old - 3, advantage_BRT=advantage)


def trained(actor: Actor, records: Iterable[Trajectories], **options: Any) -> tuple[list[StepStats], dict[str, Tensor]]:
    """What each step saw, and all that the optimizer has in the end."""
    seen = [actor.step(one, **options) for one in records]
    return seen, state_of(actor)


def state_of(actor: Actor) -> dict[str, Tensor]:
    saved = actor.optimizer.state_dict()["parameters"]
    parts = {f"{name}.{part}": value for name, own in saved.items() for part, value in own.items()}
    found = {name: torch.as_tensor(value).clone() for name, value in parts.items()}
    return found | {name: weights.clone() for name, weights in actor.optimizer.masters().items()}


def same(mine: Any, other: Any, tolerance: float = 1e-12) -> None:
    for one, two in zip(mine[0], other[0], strict=True):
        assert asdict(one) == pytest.approx(asdict(two), rel=tolerance, abs=tolerance)
    assert mine[1].keys() == other[1].keys()
    for name, value in other[1].items():
        torch.testing.assert_close(mine[1][name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("anchor", "plan", "rows", "options"),
    [
        (NOTHING, GROUPS, 8, {}),
        (TEXT, PLAN, 8, {}),
        (BOTH, GROUPS, 8, {}),
        (BOTH, GROUPS, 3, {}),
        (BOTH, LEARNED, 3, {}),
        (BOTH.model_copy(update={"mixture": 0.4, "answers": False}), GROUPS, 8, {"aggregate": "thought"}),
        (BOTH.model_copy(update={"lr": 2e-3}), GROUPS, 8, {}),
        (BOTH.model_copy(update={"lr": 2e-3}), PLAN, 3, {}),
        (BOTH, FIXED, 3, {"policy": False}),
        (BOTH.model_copy(update={"mixture": 0.4, "answers": False}), replace(FIXED, group=2), 3, {}),
    ],
    ids=[
        "policy",
        "text",
        "both",
        "parts",
        "learned parts",
        "mixture",
        "own rate",
        "own rate, parts",
        "anchors alone",
        "one length",
    ],
)
def test_a_run_is_the_same(anchor: AnchorSettings, plan: ThoughtPlan, rows: int, options: dict[str, Any]) -> None:
    records, graphs = [record(step, plan) for step in range(5)], TapedGraphs()
    replayed = actor_on(llama(torch.float64), anchor, plan, graphs, rows)
    launched = actor_on(llama(torch.float64), anchor, plan, None, rows, replace(FUSED, replayed_passes=False))
    found = trained(replayed, records, **options)
    same(found, trained(launched, records, **options))
    assert replayed.updates.reason == ""
    assert sum(graph.replays for graph in graphs.graphs) > len(graphs.graphs) > 0
    assert not any("unused" in name and name != "unused.weight" for name in found[1])


@pytest.mark.parametrize(("anchor", "rows"), [(NOTHING, 8), (BOTH, 8), (BOTH, 3)], ids=["policy", "both", "parts"])
def test_a_run_without_padding_is_the_same(anchor: AnchorSettings, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "ROWS", 4)
    computed: list[tuple[int | None, int]] = []

    def noted(backbone: Any, embeds_BnD: Tensor, position_Bn: Tensor, tree: Any, index_x: Any, **given: Any) -> Tensor:
        computed.append((None if index_x is None else len(index_x), position_Bn.numel()))
        return packed.run_nodes(backbone, embeds_BnD, position_Bn, tree, index_x, **given)

    monkeypatch.setattr("tfive.tree.reader.run_nodes", noted)
    records, graphs = [record(step) for step in range(6)], TapedGraphs()
    packing = actor_on(llama(torch.float64), anchor, GROUPS, graphs, rows, replace(FUSED, packed="on"))
    plain = replace(FUSED, replayed_passes=False, packed="off")
    launched = actor_on(llama(torch.float64), anchor, GROUPS, None, rows, plain)
    found, own = trained(packing, records), list(computed)
    same(found, trained(launched, records))
    assert packing.updates.reason == ""
    # Parts that leave padding out are launched; only others may be captured.
    assert sum(size is not None and size < 0.9 * nodes for size, nodes in own) > len(own) / 2
    assert len(graphs.graphs) <= sum(size is None for size, _ in own)


def test_half_precision_has_the_same_bits_captured_and_not() -> None:
    records, graphs = [record(step) for step in range(5)], TapedGraphs()
    captured, launched = (actor_on(llama(torch.bfloat16), graphs=some, rows=3) for some in (graphs, None))
    same(trained(captured, records), trained(launched, records), tolerance=0.0)
    assert captured.updates.count > 0
    kept = [slot.kept for slot in captured.optimizer._slots if slot.parameter.dtype == torch.bfloat16]
    assert {None if tensor is None else tensor.dtype for tensor in kept} == {torch.float32}


def test_one_graph_serves_every_number_of_thoughts_up_to_its_size() -> None:
    records, graphs = [record(step) for step in range(12)], TapedGraphs()
    actor = actor_on(llama(torch.float64), NOTHING, graphs=graphs)
    counts = [int(one.mask_BRT.sum()) for one in records]
    trained(actor, records)
    sizes = {-(-count // 16) for count in counts}
    assert len(set(counts)) > 2 * len(sizes) > 2
    assert len(graphs.graphs) <= len(sizes)


def test_another_shape_and_moved_weights_are_seen() -> None:
    records = [record(step, rows=rows) for step, rows in enumerate([8, 8, 8, 5, 5, 5, 8])]
    graphs, model = TapedGraphs(), llama(torch.float64)
    replayed = actor_on(model, BOTH, graphs=graphs)
    launched = actor_on(llama(torch.float64), BOTH, options=replace(FUSED, replayed_passes=False))
    same(trained(replayed, records), trained(launched, records))
    assert len(graphs.graphs) >= 2
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    same(trained(replayed, records), trained(launched, records))
    assert replayed.updates.reason == ""


class Broken(TapedGraphs):
    """Graphs whose second capture breaks when most of the work is done."""

    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Again:
        found = super().capture(work, warm_up)
        if len(self.graphs) > 1:
            raise RuntimeError("operation failed due to a previous error during capture\nand so on")
        return found


class Louder(Again):
    """A graph that leaves a twentieth more than it should in one gradient."""

    def __init__(self, work: Callable[[], None], actor: Actor) -> None:
        super().__init__(work)
        self.actor = actor

    def replay(self) -> None:
        super().replay()
        self.actor.optimizer._slots[3].gradient.mul_(1.05)  # type: ignore[union-attr]


class Wrong(PretendedGraphs):
    actor: Actor

    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Again:
        super().capture(work, warm_up)
        return Louder(work, self.actor)


class Idle(Tape):
    """A graph that does nothing: what it should write is there from the run that was captured."""

    def replay(self) -> None:
        pass


class Silent(TapedGraphs):
    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Again:
        super().capture(work, warm_up)
        return Idle([])


class Asking(TapedGraphs):
    """Graphs of work that asks the device what it computed."""

    def capture(self, work: Callable[[], None], warm_up: int = 0) -> Again:
        def asking() -> None:
            work()
            float(torch.ones(()))

        return super().capture(asking, warm_up)


@pytest.mark.parametrize("rows", [8, 3], ids=["whole", "parts"])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Broken, "cannot be captured: operation failed"),
        (Asking, "cannot be captured: _local_scalar_dense: operation not permitted"),
        (Wrong, "differs by 0.05"),
        (Silent, "differs by"),
    ],
)
def test_what_cannot_be_captured_rightly_is_launched(make: Callable[[], Any], why: str, rows: int) -> None:
    records, graphs = [record(step) for step in range(5)], make()
    graphs.actor = replayed = actor_on(llama(torch.float64), BOTH, graphs=graphs, rows=rows)
    launched = actor_on(llama(torch.float64), BOTH, rows=rows, options=replace(FUSED, replayed_passes=False))
    same(trained(replayed, records), trained(launched, records))
    assert why in replayed.updates.reason
    assert replayed.updates.count == 0
    assert all(slot.kept is None for slot in replayed.optimizer._slots)


def test_gradients_of_an_earlier_pass_do_not_stand_for_those_of_a_graph() -> None:
    actor = actor_on(llama(torch.float64), BOTH, graphs=Silent())
    trained(actor, [record(0)] * 3)
    assert "differs by nan" in actor.updates.reason


def test_a_pass_without_an_effect_admits_no_graph() -> None:
    graphs, idle = TapedGraphs(), record(0)
    actor = actor_on(llama(torch.float64), NOTHING, graphs=graphs)
    idle = replace(idle, advantage_BRT=torch.zeros_like(idle.need("advantage_BRT")))
    trained(actor, [idle] * 3)
    assert (actor.updates.count, actor.updates.reason) == (0, "")
    trained(actor, [record(0)] * 2)
    assert actor.updates.count == 1


@pytest.mark.parametrize("pending", [False, True], ids=["between steps", "within a step"])
def test_a_resumed_run_ends_with_the_same_bits(pending: bool) -> None:
    records = [record(step) for step in range(8)]
    whole, resumed = (actor_on(llama(torch.float64), graphs=TapedGraphs(), rows=3) for _ in range(2))
    trained(whole, records[:4])
    trained(resumed, records[5:])  # has captured, and is elsewhere
    if pending:
        whole._backward(whole.engine, records[0], aggregate="token", anchored=True)
    assert pending == any(slot.gradient is not None for slot in whole.optimizer._slots)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert whole.updates.count > 0
    assert resumed.updates.count > 0
    same(trained(resumed, records[4:]), trained(whole, records[4:]), tolerance=0.0)


def test_autograd_remembers_nothing_of_a_pass_when_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd adds a gradient on the stream on which its weight was first read since it forgot the passes before; a
    capture cannot use the stream that all else runs on."""
    model, fresh = llama(torch.float64), list[bool]()
    honest = TreeModel.policy_from

    def accumulators() -> list[Any]:
        reads: list[Any] = [parameter.view_as(parameter) for parameter in model.parameters()]
        return [read.grad_fn.next_functions[0][0] for read in reads]

    def marking(self: TreeModel, prepared: Any) -> Any:
        output = honest(self, prepared)
        for node in accumulators():
            node.metadata["seen"] = True
        return output

    class Looking(PretendedGraphs):
        def capture(self, work: Callable[[], None], warm_up: int = 0) -> Again:
            fresh.append(not any("seen" in node.metadata for node in accumulators()))
            return super().capture(work, warm_up)

    monkeypatch.setattr(TreeModel, "policy_from", marking)
    monkeypatch.setattr(gc, "collect", lambda: 0)
    actor = actor_on(model, BOTH, graphs=Looking(), rows=3)
    trained(actor, [record(step) for step in range(3)])
    assert len(fresh) > 1
    assert all(fresh)


@pytest.mark.parametrize(
    ("options", "others", "plan"),
    [
        (replace(FUSED, replayed_passes=False), {}, GROUPS),
        (replace(FUSED, cuda_graphs=False), {}, GROUPS),
        (replace(FUSED, activation_checkpointing=True), {}, GROUPS),
        (replace(FUSED, fused_training="off"), {}, GROUPS),
        (replace(FUSED, attention="flex"), {}, GROUPS),
        (FUSED, {"parity": True}, PLAN),
        (FUSED, {"centre": SamplingSettings(temperature=0.7)}, GROUPS),
        (FUSED, {}, replace(GROUPS, gated=True)),
    ],
    ids=["unasked", "no graphs", "recomputed", "own blocks", "flex", "parity", "centred", "gated"],
)
def test_other_updates_are_launched(options: EngineOptions, others: dict[str, Any], plan: ThoughtPlan) -> None:
    actor = actor_on(llama(torch.float64), NOTHING, plan, TapedGraphs(), options=options, **others)
    assert not actor._replays(actor.engine)
