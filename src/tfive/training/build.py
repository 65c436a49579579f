"""From a configuration to parts that can work: models, engines, critics, heads, and the method over them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from tfive.config.config import Config
from tfive.distributed.roles import Role, Roles, roles_of
from tfive.distributed.world import SINGLE, World
from tfive.inference.thought_model import plan_for
from tfive.methods.method import Kit, Method
from tfive.models.load import Loaded
from tfive.rl.actor import Actor, under
from tfive.rl.adapters import adapt_actor
from tfive.rl.critic import FrozenBase, build_pair
from tfive.rl.critic_files import load_critics
from tfive.rl.critics import Critics
from tfive.rl.gate import Gate
from tfive.rl.onlooker import Onlooker
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.pass_size import PassSize
from tfive.rl.roles import MEASURED, Ledger
from tfive.rl.rollout import Rollout
from tfive.rl.snapshots import Snapshots
from tfive.rl.weight_slots import wide
from tfive.telemetry import Telemetry
from tfive.text.prepared import PreparedCorpus
from tfive.training.corpus import measured_sequences
from tfive.training.develop import MeasuredTexts
from tfive.training.memory_limits import engine_options
from tfive.training.positions import MovedPositions
from tfive.training.shard_engines import in_shards, shards_of
from tfive.training.warmstart import begun_parts
from tfive.training.warmstart_kept import WarmStart
from tfive.tree.admission import admit
from tfive.tree.fast.cuda_graph import CudaGraphs
from tfive.tree.forward import TreeModel
from tfive.tree.gated import GATES
from tfive.tree.layout import ThoughtPlan
from tfive.tree.low_rank import copy_on_the_same_weights
from tfive.tree.settings import EngineOptions


@dataclass
class Assembly:
    """Everything a run works with."""

    config: Config
    loaded: Loaded
    corpus: PreparedCorpus
    ledger: Ledger
    actor: Actor
    base: TreeModel
    """The frozen base model: critics read it, and its loss without a thought is the yardstick."""
    gate: Gate | None
    critics: Critics | None
    method: Method[Any]
    development: MeasuredTexts
    """Texts by which progress is watched and settings are chosen."""
    test: MeasuredTexts
    """Texts that choose nothing: measured once, when training is over."""
    warmstart: dict[str, Any] | None = None
    """What the warm start did, where there was one."""
    roles: Roles = field(default_factory=Roles)
    """Which processes of the run have the actor, and which have critics."""
    moved_positions: dict[str, Any] | None = None
    """What the pilot found by which positions were moved, where there was one."""

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.roles.actor.every

    @property
    def reader(self) -> TreeModel:
        """The actor's weights with one thought a position, whatever the group: what is measured."""
        return self.actor.reader

    def tried(self, phase: str) -> dict[str, int]:
        """Texts a pass by key of `run`, where memory has left fewer than the configuration has."""
        run, rows = self.config.run, self.method.parts.rollout.rows
        found = {"texts_per_rollout": rows} if rows < run.rollout_texts else {}
        return found | ({"texts_per_pass": self.actor.rows} if phase == "update" else {})

    def draws(self, windows: int) -> dict[str, float]:
        """How often so many windows draw a training text, by what learns from it."""
        return self.ledger.draws(windows) if self.config.spec.trains else {}

    @property
    def plan(self) -> ThoughtPlan:
        """The shape of every measured thought."""
        return self.base.plan


def build(
    config: Config,
    loaded: Loaded,
    corpus: PreparedCorpus,
    telemetry: Telemetry,
    warmed: WarmStart | None = None,
    world: World = SINGLE,
    moved: MovedPositions | None = None,
) -> Assembly:
    """Admit the model by probe, copy the frozen base, and put the method's parts together; `warmed`: what the run
    begins with beside the weights; `world`: the processes that split the passes over texts; `moved`: `corpus` with its
    positions moved."""
    roles = roles_of(config.distributed.profile, world, config.spec.critics)
    corpus = corpus if moved is None else moved.corpus
    plan = replace(plan_for(config.thought, loaded.model, loaded.tokenizer), group=config.group)
    single = replace(plan, group=1)
    frozen = _frozen(config, loaded, roles.actor)
    options = engine_options(config, loaded)
    # The base model; after a warm start with the delimiters and gates that it left, frozen.
    base = TreeModel(frozen, single, options, *begun_parts(frozen, single, warmed, trainable=False))
    with telemetry.phase("admit"):
        admit(base, corpus.sequence_length + plan.reach)
    if base.backbone.recurrent:
        telemetry.event("recurrent layers", f"{base.rule.name}: {base.rule.reason}", window=0)
    actor = _actor(config, loaded, plan, options, warmed, roles.actor)
    spec, engine, snapshots = config.spec, actor.engine, Snapshots()
    ledger = ledger_of(config, corpus)
    gate = None
    if config.gate.passes and spec.thinks:
        graphs = CudaGraphs.on(base.device, options.cuda_graphs, frequent=True)
        gate = Gate(base.width, config.gate, seed=config.run.seed, device=base.device, graphs=graphs)
    if spec.scoring == "next_token":
        engine = under(engine, replace(plan, checkpoints=(plan.length,), horizon=1))
    reading = PassSize(config.run.rollout_texts, alone=world.size == 1)
    reading.forget += [one.let_go for one in dict.fromkeys((base, actor.engine, actor.reader, engine))]
    reading.forget += [] if gate is None or gate.graphs is None else [gate.graphs.close]
    rollout = _rollout(config, engine, corpus, ledger, snapshots, telemetry, roles.actor, reading)
    if config.ratio.denominator == "scored":
        rollout.old_law = "scored"
    policy = actor.engine if config.critic.features == "policy" else None
    critics = _critics(config, frozen, plan, options, roles, reading, policy)
    if critics is not None and policy is not None:
        rollout.below = critics.base.below
    reading.forget += [] if critics is None else [critics.let_go]
    rollout.shows_others = critics is not None and config.critic.sees == "group"
    common = {"rollout": rollout, "actor": actor, "snapshots": snapshots, "telemetry": telemetry, "gate": gate}
    method: Method[Any] = spec.load().assemble(Kit(config, common, critics))
    for passes in (reading, actor.passes):
        passes.tell = lambda line: telemetry.event("memory", line, window=method.window)
    measured = partial(_measured, config, corpus, base, roles.actor.texts, reading)
    return Assembly(
        config,
        loaded,
        corpus,
        ledger,
        actor,
        base,
        gate,
        critics,
        method,
        development=measured("development", config.run.develop_items),
        test=measured("test"),
        warmstart=None if warmed is None else warmed.report,
        roles=roles,
        moved_positions=None if moved is None else moved.report,
    )


def _frozen(config: Config, loaded: Loaded, actor: Role) -> PreTrainedModel:
    """The base model beside the actor's: a copy of it, or (`actor.adapt = lora`) the very weights that the actor's
    low-rank updates stand on. A process that has no actor needs no copy."""
    if config.actor.adapt == "full":
        if actor.members is None:
            return loaded.model.requires_grad_(False)
        return copy.deepcopy(loaded.model).requires_grad_(False)
    base = copy_on_the_same_weights(loaded.model.requires_grad_(False))
    adapt_actor(loaded.model, config.actor, config.run.seed)
    return base


def _rollout(
    config: Config,
    engine: TreeModel,
    corpus: PreparedCorpus,
    ledger: Ledger,
    snapshots: Snapshots,
    telemetry: Telemetry,
    by: Role,
    rows: PassSize,
) -> Rollout:
    return Rollout(
        engine,
        lambda numbers: corpus.batch(numbers).to(engine.device),
        ledger,
        snapshots,
        config.sampling,
        config.reward,
        telemetry,
        seed=config.run.seed,
        rows=rows,
        by=by,
        longest=lambda window: config.window.longest_thought(window, config.thought.checkpoints),
    )


def _critics(
    config: Config,
    frozen: Any,
    plan: ThoughtPlan,
    options: EngineOptions,
    roles: Roles,
    reading: PassSize,
    policy: TreeModel | None = None,
) -> Critics | None:
    """As many critics as the method has, fresh from the base model or from a saved pair, on the features of the base
    model or of `policy` where it is given; those of other processes are shapes without weights here."""
    count = config.spec.critics
    if not count:
        return None
    seed, clip = config.run.seed, config.reward.clip
    own = build_pair(frozen, plan, config.critic, engine=options, reward_clip=clip, seed=seed)[:count]
    if config.critic.start is not None:
        load_critics(config.critic.start, own)
    base = FrozenBase(frozen, plan, config.critic, options, policy)
    shards: list[Any] = [None] * count
    for number, (critic, role) in enumerate(zip(own, roles.critics)):
        # Adapted blocks are as large as the model's; a head or low-rank updates are small, and every process has all.
        if critic.tree is not None and config.critic.adapt in ("top", "full") and in_shards(config, role):
            # Its group may be smaller than the actor's shards are wide.
            width, beside = min(config.distributed.shard, len(role.ranks)), {"head": critic.head}
            shards[number] = shards_of(critic.tree, beside, role, width=width, name="body", trained_in=wide)
        if role.members is None:
            critic.to("meta")
    split: dict[str, Any] = {"roles": roles.critics, "shards": shards}
    split |= {"rows": config.run.texts_per_pass, "read_rows": reading}
    split["siblings"] = plan.group if config.gae.unit == "position" else 1
    split["graphs"] = CudaGraphs.on(base.tree.device, options.cuda_graphs, frequent=True)
    return Critics(base, own, config.critic, alpha=config.gae.alpha, seed=seed, **split)


def ledger_of(config: Config, corpus: PreparedCorpus) -> Ledger:
    """Who draws which texts; refuses a text that does not hold what a window of the method needs."""
    drawn = (*config.spec.roles_of(config), *config.spec.first_roles_of(config))
    return Ledger(corpus, config.window, seed=config.run.seed, roles=drawn)


def _actor(
    config: Config, loaded: Loaded, plan: ThoughtPlan, options: EngineOptions, warmed: WarmStart | None, role: Role
) -> Actor:
    model, has = loaded.model, role.members is not None
    if config.actor.adapt == "full" and has:
        model.requires_grad_(True)
    delimiters, gates = begun_parts(model, plan, warmed, trainable=True)
    # A process that has no actor reads single rows of it, whose results are dropped.
    engine = TreeModel(model, plan, options if has else options.unfused(), delimiters, gates)
    beside = {"delimiters": delimiters, GATES.removesuffix("."): gates}
    small = {name: module for name, module in beside.items() if module is not None}
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for prefix, module in small.items():
        named += [(f"{prefix}.{name}", parameter) for name, parameter in module.named_parameters()]
    shards = None
    if config.actor.adapt == "full" and in_shards(config, role):
        # Low-rank updates are small, and every process has all of them.
        kept = config.optimizer.bf16_update == "stochastic"
        own: dict[str, Any] = {"width": config.distributed.shard, "trained_in": (lambda dtype: dtype) if kept else wide}
        shards = shards_of(engine, small, role, **own)
        named = [] if shards is None else shards.named_parameters()
    total = config.window.windows * config.window.actor_steps
    settings = config.optimizer.model_dump(exclude={"gate_lr"})
    rates = {GATES: config.optimizer.gate_lr / config.optimizer.lr}
    optimizer: MasterOptimizer = Onlooker(config.optimizer.lr)
    if role.members is not None:
        settings |= {"total_steps": total, "seed": config.run.seed, "lr_multipliers": rates}
        optimizer = MasterOptimizer(named, world=role.members, shards=shards, **settings)
    return Actor(
        engine,
        optimizer,
        config.actor,
        config.ratio,
        # Without thoughts there is nothing to condition on.
        config.anchor if config.spec.thinks else config.anchor.without_thoughts(),
        seed=config.run.seed,
        rows=config.run.texts_per_pass,
        parity=config.sampling.parity,
        centre=config.sampling if config.calibration.score_centering else None,
        role=role,
        shards=shards,
    )


def _measured(
    config: Config,
    corpus: PreparedCorpus,
    base: TreeModel,
    world: World,
    rows: PassSize,
    split: str,
    items: int | None = None,
) -> MeasuredTexts:
    """The first sequences of a split that together hold the items asked for, or all."""
    numbers = measured_sequences(corpus, split, items)
    return MeasuredTexts(
        corpus.batch(numbers).to(base.device),
        torch.from_numpy(corpus.kinds[numbers].astype("int64")),
        base,
        config.sampling,
        role=MEASURED[split],
        seed=config.run.seed,
        rows=rows,
        world=world,
    )
