"""What processes that hold weights in shards do in tests: steps beside a whole reference, and the traps of sharding."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import courses
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stage import LAW, PLAN, gpt2, llama, texts, thoughts_for
from tfive.distributed import shards
from tfive.distributed.environment import PeerLost
from tfive.distributed.pieces import Piece
from tfive.distributed.roles import Role
from tfive.distributed.shards import SHARD, Shards, shard_mesh
from tfive.distributed.world import SINGLE, World
from tfive.errors import UserError
from tfive.rl.actor import NO_ANCHOR, Actor
from tfive.rl.optimizer import MasterOptimizer, StepReport
from tfive.rl.settings import ActorSettings, AnchorSettings, RatioSettings
from tfive.rl.teacher import Teacher
from tfive.rl.trajectory import Trajectories
from tfive.rl.weight_slots import wide
from tfive.training.health import relative_change
from tfive.training.warmstart import Teaching
from tfive.tree.delimiters import Delimiters
from tfive.tree.forward import TreeModel
from tfive.tree.gated import ReadingGates
from tfive.tree.hf import Backbone
from tfive.tree.settings import EngineOptions, SamplingSettings
from tiny import configure

BATCH = texts(rows=8)
THOUGHTS = thoughts_for(BATCH, PLAN)
LEARNED = replace(PLAN, learned=True, gated=True)
OPTIONS: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1, "lr_multipliers": {"reading_gates.": 5.0}}


@dataclass
class Trained:
    """An engine with its optimizer, whole or in shards."""

    engine: TreeModel
    """What computes without gradients."""
    through: TreeModel
    """What passes with gradients go through."""
    optimizer: MasterOptimizer
    shards: Shards | None = None

    def backward(self, start: int, stop: int, weight: float = 1.0) -> float:
        """One pass over these texts with all its losses, and their backward pass."""

        def read() -> Any:
            return self.through.policy(
                BATCH.rows(start, stop), THOUGHTS.rows(start, stop), text=True, continuations=True
            )

        output = read() if self.shards is None else self.shards.run(read)
        parts = (output.need("log_prob_BRT"), output.need("text_log_prob_BS"), output.need("continuation_log_prob_BRH"))
        loss = -weight * torch.stack([part.sum() for part in parts]).sum() / 100
        loss.backward()
        return float(loss.detach())


def extras(model: Any, plan: Any) -> dict[str, Any]:
    """Learned delimiters and gates that are ajar, where the plan has them."""
    if not plan.learned:
        return {}
    gates = ReadingGates.of(model)
    with torch.no_grad():
        gates.gate.copy_(torch.linspace(-0.5, 0.5, gates.gate.numel()))
    found = {"delimiters": Delimiters.from_model(model, plan), "reading_gates": gates}
    return {name: module.double() if model.dtype == torch.float64 else module for name, module in found.items()}


def trained(
    model: Any, mesh: DeviceMesh | None = None, plan: Any = PLAN, options: EngineOptions | None = None, **own: Any
) -> Trained:
    beside = extras(model, plan)
    engine = TreeModel(model, plan, options, beside.get("delimiters"), beside.get("reading_gates"))
    if mesh is None:
        named = list(model.named_parameters())
        named += [(f"{name}.{n}", p) for name, module in beside.items() for n, p in module.named_parameters()]
        return Trained(engine, engine, MasterOptimizer(named, **(OPTIONS | own)))
    trained_in = (lambda dtype: dtype) if own.get("bf16_update") == "stochastic" else wide
    held = Shards(model, engine.backbone.block_names, mesh, beside=beside, trained_in=trained_in)
    through = TreeModel(held.model, plan, options, held.beside.get("delimiters"), held.beside.get("reading_gates"))
    optimizer = MasterOptimizer(held.named_parameters(), shards=held, **(OPTIONS | own))
    return Trained(engine, through, optimizer, held)


def gathered(one: Trained) -> dict[str, Tensor]:
    """Accumulated gradients by name, whole."""
    own = {name: gradient.clone() for name, gradient in one.optimizer.gradients()}
    return own if one.shards is None else {name: one.shards.gathered(name, rows) for name, rows in own.items()}


def apart(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """The largest difference between tensors of the same names."""
    assert set(first) == set(second), set(first) ^ set(second)
    return max(float((first[name].detach() - second[name].detach()).abs().max()) for name in first)


def masters(one: Trained) -> dict[str, Tensor]:
    """The exact weights, whole."""
    return dict(one.optimizer.whole_masters())


def weights(one: Trained) -> dict[str, Tensor]:
    """The whole copy as it computes."""
    modules = {"": one.engine.model, "delimiters.": one.engine.delimiters, "reading_gates.": one.engine.gates}
    return {
        prefix + name: parameter.detach().clone()
        for prefix, module in modules.items()
        if module is not None
        for name, parameter in module.named_parameters()
    }


def course(world: World, whole: Trained, sharded: Trained, steps: int = 2) -> dict[str, float]:
    """How far a sharded course lies from the whole one, which makes the passes of all processes by itself."""
    far = {"gradients": 0.0, "norm": 0.0, "weights": 0.0, "masters": 0.0, "loss": 0.0}
    each = 8 // world.size
    for _ in range(steps):
        parts = [(start, start + each // 2) for start in range(0, 8, each // 2)]
        losses = [whole.backward(*part) for part in parts]
        mine = [sharded.backward(*part) for part in parts[2 * world.rank : 2 * world.rank + 2]]
        expected = losses[2 * world.rank : 2 * world.rank + 2]
        far["loss"] = max(far["loss"], *(abs(a - b) for a, b in zip(mine, expected)))
        far["gradients"] = max(far["gradients"], apart(gathered(whole), gathered(sharded)))
        reports: list[StepReport] = [one.optimizer.step() for one in (whole, sharded)]
        far["norm"] = max(far["norm"], abs(reports[0].gradient_norm - reports[1].gradient_norm))
        far["masters"] = max(far["masters"], apart(masters(whole), masters(sharded)))
        far["weights"] = max(far["weights"], apart(weights(whole), weights(sharded)))
    return far


def pointers(one: Trained) -> list[int]:
    return [parameter.data_ptr() for parameter in one.engine.model.parameters()]


def bytes_held(one: Trained) -> int:
    """Bytes of master weights, moments and gradients that this process holds, by their storages."""
    tensors: list[Tensor] = []
    for slot in one.optimizer._slots:
        tensors += [slot.weights, *(slot.moments or ())[:2], *([] if slot.gradient is None else [slot.gradient])]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def exactness(world: World) -> dict[str, Any]:
    """Whole and sharded courses in float64: a tied model, with learned delimiters and gates, by recomputation."""
    mesh = shard_mesh("cpu", range(world.size))
    found: dict[str, Any] = {}
    tied = trained(gpt2(), mesh)
    before = pointers(tied)
    found["tied"] = course(world, trained(gpt2()), tied)
    found["pointers stay"] = pointers(tied) == before
    found["delimiters and gates"] = course(world, trained(gpt2(), None, LEARNED), trained(gpt2(), mesh, LEARNED))
    if world.size == 2:
        again = EngineOptions(activation_checkpointing=True)
        untied = [trained(gpt2(tied=False), held, options=again) for held in (None, mesh)]
        found["untied, recomputed"] = course(world, untied[0], untied[1])
    else:
        found["two by two"] = course(world, trained(gpt2()), trained(gpt2(), shard_mesh("cpu", range(4), 2)))
    sharded = trained(llama(blocks=2), mesh)
    sharded.backward(0, 2)
    sharded.optimizer.step()
    sharded.backward(0, 2)
    found["bytes"] = bytes_held(sharded)
    return found


def precisions(world: World) -> dict[str, Any]:
    """Bit for bit: FSDP in a group of one beside no FSDP; stochastic rounding of weights and moments in shards, and by
    several processes with all weights each, beside one process."""
    alone = shard_mesh("cpu", range(world.size), 1)[SHARD]
    found: dict[str, Any] = {}
    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        whole, one = trained(llama(dtype), None, LEARNED), trained(llama(dtype), alone, LEARNED)
        losses = [[side.backward(0, 3), side.backward(3, 8), _stepped(side)] for side in (whole, one) for _ in range(2)]
        found[f"{name} alone"] = losses[:2] == losses[2:] and apart(weights(whole), weights(one)) == 0.0
        found[f"{name} masters"] = apart(masters(whole), masters(one))
    # Not clipped: the norm of shards is summed in another order, and a factor that differs in its last bit may round a
    # moment up instead of down; whether it does depends on the processor's kernels.
    own: dict[str, Any] = {"bf16_update": "stochastic", "moments": "bfloat16", "seed": 5, "clip_norm": None}
    whole = trained(llama(torch.bfloat16), **own)
    sides = {
        "in shards": trained(llama(torch.bfloat16), shard_mesh("cpu", range(world.size)), **own),
        "each": trained(llama(torch.bfloat16), world=world, **own),
    }
    for _ in range(2):
        whole.backward(0, 4)
        norm = _stepped(whole)
        for name, one in sides.items():
            one.backward(0, 4, weight=float(world.leads))
            found[f"stochastic norm, {name}"] = abs(norm - _stepped(one))
    for name, one in sides.items():
        found[f"stochastic, {name}"] = apart(weights(whole), weights(one))
        found[f"moments, {name}"] = apart(_moments(whole), _moments(one))
    return found


def _moments(one: Trained) -> dict[str, Tensor]:
    """Both moments by name, whole; they must be as narrow as they are asked to be."""
    found: dict[str, Tensor] = {}
    for name, entry in whole_state(one)["parameters"].items():
        assert entry["first"].dtype == entry["second"].dtype == torch.bfloat16
        found |= {f"{name} {which}": entry[which] for which in ("first", "second")}
    return found


def _stepped(one: Trained) -> float:
    return one.optimizer.step().gradient_norm


def whole_state(one: Trained) -> dict[str, Any]:
    """The optimizer's state with pieces put together, as a checkpoint gives it back."""
    state = copy.deepcopy(one.optimizer.state_dict())
    for name, entry in state["parameters"].items():
        for key, value in entry.items():
            if isinstance(value, Piece):
                assert one.shards is not None
                entry[key] = one.shards.gathered(name, value.local)
    return state


def restored(one: Trained, model: dict[str, Tensor], state: dict[str, Any]) -> None:
    one.engine.model.load_state_dict(model)
    one.optimizer.load_state_dict(state)


def states(world: World) -> dict[str, Any]:
    """States go from shards to a whole optimizer and back, pending gradients and moments apart included."""
    mesh = shard_mesh("cpu", range(world.size))
    found: dict[str, Any] = {}
    for name, dtype in {"float64": torch.float64, "bfloat16": torch.bfloat16}.items():
        sharded = trained(llama(dtype), mesh)
        for lr in (1e-3, 3e-3):
            with sharded.optimizer.apart(lr) if lr == 3e-3 else nullcontext():
                sharded.backward(0, 2, weight=float(world.leads))
                sharded.optimizer.step()
        sharded.backward(0, 2, weight=float(world.leads))  # a gradient that waits for its step
        model = {key: value.clone() for key, value in sharded.engine.model.state_dict().items()}
        state = whole_state(sharded)
        whole, other = trained(llama(dtype, seed=1)), trained(llama(dtype, seed=1), mesh)
        restored(whole, model, state)
        restored(other, model, whole_state(whole))
        same = torch.equal(next(iter(other.engine.model.parameters())), next(iter(sharded.engine.model.parameters())))
        sides = (sharded, whole, other)
        norms = [_stepped(one) for one in sides]
        found[name] = {
            "loads": same,
            "norms": max(norms) - min(norms),
            "masters": max(apart(masters(sharded), masters(one)) for one in sides),
            "weights": max(apart(weights(sharded), weights(one)) for one in sides),
            "keys": sorted({key for entry in state["parameters"].values() for key in entry}),
        }
        model = copy.deepcopy(dict(other.engine.model.state_dict()))
        restored(sharded, model, copy.deepcopy(other.optimizer.state_dict()))  # the same pieces, not put together
        found[name]["pieces"] = apart(masters(sharded), masters(other))
    return found


def averages(world: World) -> dict[str, Any]:
    """A teacher of which every process averages its rows: what it says, what it holds, and its state in other hands."""
    mesh = shard_mesh("cpu", range(world.size))
    sides = [trained(gpt2(), held) for held in (None, mesh)]
    teachers = [_teacher(side) for side in sides]
    for lr in (1e-3, 3e-3):
        for side, teacher in zip(sides, teachers):
            side.backward(0, 4, weight=1.0 if side.shards is None or world.leads else 0.0)
            side.optimizer.lr = lr
            side.optimizer.step()
            teacher.follow(side.optimizer.masters())
    said, held = ([teacher.losses(BATCH) for teacher in teachers], [_averaged_bytes(teacher) for teacher in teachers])
    whole, state = teachers[0].state_dict(), teachers[1].state_dict()
    others = [_teacher(side) for side in (sides[1], sides[1], sides[0])]
    gathered = {name: sides[1].shards.gathered(name, one.local) for name, one in state["average"].items()}  # type: ignore[union-attr]
    for other, saved in zip(others, (whole, state, state | {"average": gathered})):
        other.load_state_dict(saved)
    with _alive() as most:
        change = relative_change(sides[1].optimizer.whole_masters(), weights(sides[0]))
    return {
        "apart": float((said[0] - said[1]).abs().max()),
        "restored": max(float((other.losses(BATCH) - said[0]).abs().max()) for other in others),
        "bytes": held,
        "change": change,
        "most at a time": most[0],
    }


def teaching_bytes(world: World, folder: str) -> list[int]:
    """Bytes of exact weights that a process has while the warm start trains, and of all of them."""
    config = configure(Path(folder), "warmstart.source=hindsight", "distributed.shard=0")
    model: Any = llama()
    nobody: Any = SimpleNamespace(tokenizer=None)
    teaching = Teaching(config, nobody, nobody, TreeModel(model, PLAN), world)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    return [sum(rows.nbytes for rows in teaching.optimizer.masters().values()), whole]


def _teacher(side: Trained) -> Teacher:
    return Teacher.of(side.engine, decay=0.9, rows=4, shards=side.shards)


def _averaged_bytes(teacher: Teacher) -> int:
    return sum(average.nbytes for average in teacher.average.average.values())


@contextmanager
def _alive() -> Iterator[list[int]]:
    """How many weights that were put together are there at the same time, at most."""
    found: list[weakref.ref[Tensor]] = []
    most, gather = [0], Shards.gathered

    def noted(self: Shards, name: str, rows: Tensor) -> Tensor:
        whole = gather(self, name, rows)
        found.append(weakref.ref(whole))
        most[0] = max(most[0], sum(one() is not None for one in found))
        return whole

    Shards.gathered = noted  # type: ignore[method-assign]
    try:
        yield most
    finally:
        Shards.gathered = gather  # type: ignore[method-assign]


def traps(world: World) -> dict[str, Any]:
    """What a sharded model must not break: copies, sampling, inference mode, critics on the base, a lone bad rank."""
    mesh = shard_mesh("cpu", range(world.size))
    found: dict[str, Any] = {}
    sharded = trained(llama(), mesh, LEARNED)
    calls = _counted()
    with torch.inference_mode():
        # A sharded module that has run in inference mode cannot be trained any more: the whole copy samples.
        uniforms = torch.rand(
            *THOUGHTS.tokens_BRT.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        sharded.engine.sample(BATCH, uniforms, LAW)
    found["sampling"] = calls()
    Teacher.of(sharded.engine, decay=0.9, rows=4)  # copies the model, which is refused of a sharded one
    rows = slice(2 * world.rank, 2 * world.rank + 2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        sharded.backward(rows.start, rows.stop)
    found["warned"] = [str(one.message) for one in warned]
    found["pass"] = calls()
    sharded.optimizer.step()
    found["update"] = calls()
    found["units"] = sharded.engine.block_count + 3
    before = weights(sharded)
    sharded.backward(rows.start, rows.stop, weight=float("nan") if world.rank == world.size - 1 else 1.0)
    report = sharded.optimizer.step()
    found["bad rank"] = [report.applied, sharded.optimizer.skipped, apart(before, weights(sharded))]
    found["refused"] = [_said(lambda: shard_mesh("cpu", range(world.size), 3)), _said(lambda: _mixed(mesh))]
    found["lost copy"] = _lost_copy(world)
    return found


def _lost_copy(world: World) -> list[str]:
    """What a pass raises when a process that holds the same rows is gone, and where watchers see that it waited."""
    copies = shard_mesh("cpu", range(world.size), 1)
    model, exchange = llama(blocks=1), dist.all_reduce
    held = Shards(model, Backbone(model).block_names, copies, trained_in=wide, waiting=world.waiting)
    optimizer = MasterOptimizer(held.named_parameters(), shards=held, lr=1e-3)
    one = Trained(TreeModel(model, PLAN), TreeModel(held.model, PLAN), optimizer, held)

    def gone(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    dist.all_reduce = gone
    try:
        one.backward(0, 2)
    except (RuntimeError, PeerLost) as error:
        return [type(error).__name__, str(error), world.pulse.waits]
    finally:
        dist.all_reduce = exchange
    return []


def _mixed(mesh: DeviceMesh) -> None:
    model = llama(torch.bfloat16)
    model.lm_head.weight.data = model.lm_head.weight.data.float()
    Shards(model, Backbone(model).block_names, mesh, trained_in=wide)


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return "nothing"


def _counted() -> Callable[[], int]:
    """A counter of gatherings by all processes since it was last asked."""
    count, gather = [0], shards._all_gather

    def counting(*arguments: Any, **others: Any) -> Any:
        count[0] += 1
        return gather(*arguments, **others)

    shards._all_gather = counting

    def since() -> int:
        found, count[0] = count[0], 0
        return found

    return since


ANCHORS = AnchorSettings(next_token=0.7, conditioned=1.3)
UPDATES: dict[str, dict[str, Any]] = {
    "one reading for policy and anchors": {"anchor": ANCHORS},
    "thoughts of a group": {"anchor": ANCHORS, "group": 2, "aggregate": "thought"},
    "the policy alone": {"anchor": NO_ANCHOR},
    "anchors alone": {"anchor": ANCHORS, "policy": False},
    "anchors at a rate of their own": {"anchor": ANCHORS.model_copy(update={"lr": 1e-4})},
    "mixed predictions": {"anchor": ANCHORS.model_copy(update={"mixture": 0.4})},
    "centred": {"anchor": ANCHORS, "centre": SamplingSettings(temperature=0.7)},
    "parity": {"anchor": ANCHORS, "parity": True},
    "through delimiters and gates": {"anchor": ANCHORS, "plan": LEARNED},
}
"""Every way in which a method updates the actor."""


def actor_of(one: Trained, world: World, **options: Any) -> Actor:
    own = {name: options[name] for name in ("parity", "centre") if name in options}
    return Actor(
        one.engine, one.optimizer, ActorSettings(), RatioSettings(), options["anchor"], seed=3, rows=2,
        role=Role.of_all(world), shards=one.shards, **own,
    )  # fmt: skip


def recorded(engine: TreeModel, count: int) -> Trajectories:
    """Thoughts of the first texts with advantages, drawn by a policy that lies a little away."""
    batch, thoughts, draw = BATCH.rows(0, count), THOUGHTS.rows(0, count), torch.Generator().manual_seed(4)
    repeated = {f.name: getattr(thoughts, f.name).repeat_interleave(engine.plan.group, 1) for f in fields(thoughts)}
    thoughts = replace(thoughts, **repeated)
    with torch.no_grad():
        log_now = engine.policy(batch, thoughts).need("log_prob_BRT")
    mask = thoughts.mask_BRT
    log_old = (log_now + 0.3 * torch.randn(log_now.shape, generator=draw, dtype=torch.float64)) * mask
    advantage = torch.randn(log_now.shape, generator=draw, dtype=torch.float64) * mask
    return Trajectories("actor", 1, batch, thoughts, log_old_BRT=log_old, advantage_BRT=advantage)


def actors(world: World) -> dict[str, Any]:
    """Updates of every kind beside one process's, on texts that the processes cannot share evenly."""
    mesh = shard_mesh("cpu", range(world.size))
    found: dict[str, Any] = {}
    for name, asked in UPDATES.items():
        plan = replace(asked.get("plan", PLAN), group=asked.get("group", 1))
        sides = [trained(gpt2(), held, plan) for held in (None, mesh)]
        pair = [actor_of(side, held, **asked) for side, held in zip(sides, (SINGLE, world))]
        far, called = 0.0, {key: asked[key] for key in ("policy", "aggregate") if key in asked}
        for count in (7, 1):
            record = recorded(sides[0].engine, count)
            for actor in pair:
                actor.remember()
            stats = [vars(actor.step(record, **called)) for actor in pair]
            far = max(far, *(abs(stats[0][key] - stats[1][key]) for key in stats[0]))
        exact = [masters(side) for side in sides]
        found[name] = [far, apart(*exact), apart(weights(sides[0]), weights(sides[1]))]
    return found


def everything(world: World, folder: str, runs: dict[str, list[str]]) -> dict[str, Any]:
    """All of it in one world, since starting one takes seconds."""
    return {
        "exactness": exactness(world),
        "precisions": precisions(world),
        "states": states(world),
        "traps": traps(world),
        "averages": averages(world),
        "teaching": teaching_bytes(world, folder),
        "actors": actors(world),
        "runs": {
            name: courses.course(world, folder, overrides, name=name, windows=1) for name, overrides in runs.items()
        },
    }
