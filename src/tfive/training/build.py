"""From a configuration to parts that can work: models, engines, critics, heads, and the method over them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tfive.config.config import Config
from tfive.distributed.roles import fitters
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
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.roles import MEASURED, Ledger
from tfive.rl.rollout import Rollout
from tfive.rl.snapshots import Snapshots
from tfive.rl.weight_slots import wide
from tfive.telemetry import Telemetry
from tfive.text.prepared import PreparedCorpus
from tfive.training.develop import MeasuredTexts
from tfive.training.positions import MovedPositions
from tfive.training.warmstart import WarmStart, begun_parts
from tfive.tree.admission import admit
from tfive.tree.forward import TreeModel
from tfive.tree.gated import GATES
from tfive.tree.layout import ThoughtPlan
from tfive.tree.low_rank import copy_on_the_same_weights


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
    world: World = SINGLE
    """The processes of the run."""
    moved_positions: dict[str, Any] | None = None
    """What the pilot found by which positions were moved, where there was one."""

    @property
    def reader(self) -> TreeModel:
        """The actor's weights with one thought a position, whatever the group: what is measured."""
        return self.actor.reader

    @property
    def draws(self) -> dict[str, float]:
        """How often the whole run draws a training text, by what learns from it."""
        return self.ledger.draws(self.config.window.windows) if self.config.spec.trains else {}

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
    corpus = corpus if moved is None else moved.corpus
    plan = replace(plan_for(config.thought, loaded.model, loaded.tokenizer), group=config.group)
    single = replace(plan, group=1)
    frozen = _frozen(config, loaded)
    # Gates that stay shut: the base model is measured without thoughts.
    base = TreeModel(frozen, single, config.engine.options(), *begun_parts(frozen, single, None, trainable=False))
    with telemetry.phase("admit"):
        admit(base, corpus.sequence_length + plan.reach)
    actor = _actor(config, loaded, plan, warmed, world)
    spec, engine, snapshots = config.spec, actor.engine, Snapshots()
    drawn = (*spec.roles_of(config), *spec.first_roles)
    ledger = Ledger(corpus, config.window, seed=config.run.seed, roles=drawn)
    gate = None
    if config.gate.passes and spec.thinks:
        gate = Gate(base.width, config.gate, seed=config.run.seed, device=base.device)
    if spec.scoring == "next_token":
        engine = under(engine, replace(plan, checkpoints=(plan.length,), horizon=1))
    rollout = _rollout(config, engine, corpus, ledger, snapshots, telemetry, world)
    if config.ratio.denominator == "scored":
        rollout.old_law = "scored"
    policy = actor.reader if config.critic.features == "policy" else None
    critics = _critics(config, frozen, single, world, policy)
    if critics is not None and policy is not None:
        rollout.below = critics.base.below
    common = {"rollout": rollout, "actor": actor, "snapshots": snapshots, "telemetry": telemetry, "gate": gate}
    method: Method[Any] = spec.load().assemble(Kit(config, common, critics))
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
        development=_measured(config, corpus, base, world, "development", config.run.develop_items),
        test=_measured(config, corpus, base, world, "test"),
        warmstart=None if warmed is None else warmed.report,
        world=world,
        moved_positions=None if moved is None else moved.report,
    )


def _frozen(config: Config, loaded: Loaded) -> PreTrainedModel:
    """The base model beside the actor's: a copy of it, or (`actor.adapt = lora`) the very weights that the actor's
    low-rank updates stand on."""
    if config.actor.adapt == "full":
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
    world: World,
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
        rows=config.run.rollout_texts,
        world=world,
        longest=lambda window: config.window.longest_thought(window, config.thought.checkpoints),
    )


def _critics(
    config: Config, frozen: Any, plan: ThoughtPlan, world: World, policy: TreeModel | None = None
) -> Critics | None:
    """As many critics as the method has, fresh from the base model or from a saved pair; they stand on the features of
    the base model, or of `policy` where it is given."""
    count = config.spec.critics
    if not count:
        return None
    seed, clip = config.run.seed, config.reward.clip
    own = build_pair(frozen, plan, config.critic, engine=config.engine.options(), reward_clip=clip, seed=seed)[:count]
    if config.critic.start is not None:
        load_critics(config.critic.start, own)
    base = FrozenBase(frozen, plan, config.critic, config.engine.options(), policy)
    by, shards = fitters(config.distributed.profile, world, count), []
    if config.critic.adapt in ("top", "full") and _in_shards(config, world) and not any(one.alone for one in by):
        # Adapted blocks are as large as the model's; a head or low-rank updates are small, and every process has all.
        trees = [(critic, critic.tree) for critic in own if critic.tree is not None]
        shards = [_shards(config, t, {"head": c.head}, world, name="body", trained_in=wide) for c, t in trees]
    split: dict[str, Any] = {"world": world, "fitters": by, "shards": shards}
    split |= {"rows": config.run.texts_per_pass, "read_rows": config.run.rollout_texts}
    return Critics(base, own, config.critic, alpha=config.gae.alpha, seed=seed, **split)


def _actor(config: Config, loaded: Loaded, plan: ThoughtPlan, warmed: WarmStart | None, world: World) -> Actor:
    model = loaded.model.requires_grad_(True) if config.actor.adapt == "full" else loaded.model
    delimiters, gates = begun_parts(model, plan, warmed, trainable=True)
    engine = TreeModel(model, plan, config.engine.options(), delimiters, gates)
    beside = {"delimiters": delimiters, GATES.removesuffix("."): gates}
    small = {name: module for name, module in beside.items() if module is not None}
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for prefix, module in small.items():
        named += [(f"{prefix}.{name}", parameter) for name, parameter in module.named_parameters()]
    shards = None
    if _in_shards(config, world):
        kept = config.optimizer.bf16_update == "stochastic"
        shards = _shards(config, engine, small, world, trained_in=(lambda dtype: dtype) if kept else wide)
        named = shards.named_parameters()
    total = config.window.windows * config.window.actor_steps
    settings = config.optimizer.model_dump(exclude={"gate_lr"})
    rates = {GATES: config.optimizer.gate_lr / config.optimizer.lr}
    optimizer = MasterOptimizer(
        named, total_steps=total, seed=config.run.seed, lr_multipliers=rates, world=world, shards=shards, **settings
    )
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
        world=world,
        shards=shards,
    )


def _in_shards(config: Config, world: World) -> bool:
    return world.size > 1 and config.distributed.shard != 1


def _shards(config: Config, engine: TreeModel, beside: Mapping[str, nn.Module], world: World, **options: Any) -> Any:
    """An engine's weights in shards, of which its own become the whole copy."""
    # Imported where it is needed: a run without shards never loads FSDP.
    from tfive.distributed.shards import Shards, shard_mesh

    mesh = shard_mesh(engine.device.type, world.size, config.distributed.shard)
    return Shards(engine.model, engine.backbone.block_names, mesh, beside=beside, waiting=world.waiting, **options)


def _measured(
    config: Config, corpus: PreparedCorpus, base: TreeModel, world: World, split: str, items: int | None = None
) -> MeasuredTexts:
    """The first sequences of a split that together hold the items asked for, or all."""
    numbers = corpus.sequences(split)
    if items is not None:
        numbers = numbers[: int((corpus.items_in[numbers].cumsum() < items).sum()) + 1]
    return MeasuredTexts(
        corpus.batch(numbers).to(base.device),
        torch.from_numpy(corpus.kinds[numbers].astype("int64")),
        base,
        config.sampling,
        role=MEASURED[split],
        seed=config.run.seed,
        rows=config.run.rollout_texts,
        world=world,
    )
