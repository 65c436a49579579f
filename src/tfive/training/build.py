"""From a configuration to parts that can work: models, engines, critics, heads, and the method over them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from tfive.config.schema import Config
from tfive.errors import UserError
from tfive.inference.thought_model import plan_for
from tfive.methods.anchor_only import AnchorOnly
from tfive.methods.fitting import CriticParts
from tfive.methods.ntp import NextToken
from tfive.methods.quiet_star import QuietStarGRPO, QuietStarPPO
from tfive.methods.rlp import RLP, RLPParts
from tfive.methods.t5 import T5, T5Parts, T5Settings
from tfive.methods.untrained import Untrained
from tfive.methods.window import Parts, Window
from tfive.models.load import Loaded
from tfive.rl.actor import Actor, under
from tfive.rl.calibration.calibrator import Calibrator
from tfive.rl.critic import FrozenBase, build_pair
from tfive.rl.critic_files import load_critics
from tfive.rl.critics import Critics
from tfive.rl.drift_probe import Probe
from tfive.rl.gate import Gate
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.roles import Ledger
from tfive.rl.rollout import Rollout
from tfive.rl.settings import AnchorSettings
from tfive.rl.snapshots import Snapshots
from tfive.rl.teacher import Teacher
from tfive.telemetry import Telemetry
from tfive.text.prepared import PreparedCorpus
from tfive.training.develop import Development
from tfive.tree.admission import admit
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.layout import ThoughtPlan


@dataclass
class Workshop:
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
    method: Window[Any]
    development: Development

    @property
    def reader(self) -> TreeModel:
        """The actor's weights with one thought a position, whatever the group: what is measured."""
        return self.actor.reader

    @property
    def plan(self) -> ThoughtPlan:
        """The shape of every measured thought."""
        return self.base.plan


def build(config: Config, loaded: Loaded, corpus: PreparedCorpus, telemetry: Telemetry) -> Workshop:
    """Admit the model by probe, copy the frozen base, and put the method's parts together."""
    plan = replace(plan_for(config.thought, loaded.model, loaded.tokenizer), group=config.group)
    single = replace(plan, group=1)
    frozen = copy.deepcopy(loaded.model).requires_grad_(False)
    base = TreeModel(frozen, single, config.engine, _delimiters(frozen, single, trainable=False))
    with telemetry.phase("admit"):
        admit(base, corpus.sequence_length + plan.reach)
    actor = _actor(config, loaded, plan)
    ledger, snapshots = Ledger(corpus, config.window, seed=config.run.seed), Snapshots()
    thinks = config.method not in ("base", "ntp")
    gate = None
    if config.gate.enabled and thinks:
        gate = Gate(base.width, config.gate, seed=config.run.seed, device=base.device)
    engine = actor.engine
    if config.method == "rlp":
        # Its reward is the next token after the whole thought; nothing else is scored.
        engine = under(engine, replace(plan, checkpoints=(plan.length,), horizon=1))
    rollout = _rollout(config, engine, corpus, ledger, snapshots, telemetry)
    critics = _critics(config, frozen, single)
    shared = {"rollout": rollout, "actor": actor, "snapshots": snapshots, "telemetry": telemetry, "gate": gate}
    method = _method(config, shared, critics)
    return Workshop(
        config, loaded, corpus, ledger, actor, base, gate, critics, method, _development(config, corpus, base)
    )


def _method(config: Config, shared: dict[str, Any], critics: Critics | None) -> Window[Any]:
    """The method over its parts."""
    name, steps, reading = config.method, config.window.actor_steps, config.window.reading
    if name == "t5" and critics is not None:
        return _t5(config, shared, critics)
    if name == "quiet-star-ppo" and critics is not None:
        return QuietStarPPO(config.ppo, CriticParts(**shared, critics=critics), actor_steps=steps, reading=reading)
    if name == "quiet-star-grpo":
        return QuietStarGRPO(config.grpo, Parts(**shared), actor_steps=steps, reading=reading)
    if name == "rlp":
        taught = RLPParts(**shared, teacher=_teacher(config, shared["rollout"].engine))
        return RLP(taught, actor_steps=steps, reading=reading)
    simple = {"base": Untrained, "ntp": NextToken, "anchor-only": AnchorOnly}
    return simple[name](Parts(**shared), actor_steps=steps)


def _teacher(config: Config, student: TreeModel) -> Teacher:
    model = copy.deepcopy(student.model).requires_grad_(False)
    engine = TreeModel(model, student.plan, config.engine, _delimiters(model, student.plan, trainable=False))
    return Teacher(engine, decay=config.rlp.decay, rows=config.run.rollout_texts)


def _t5(config: Config, shared: dict[str, Any], critics: Critics) -> T5:
    rollout = shared["rollout"]
    calibrator = Calibrator(
        rollout.engine,
        critics.critics[0].head.last.in_features,
        config.heads,
        config.calibration,
        seed=config.run.seed,
        rows=config.run.rollout_texts,
    )
    probe = Probe(
        rollout,
        critics,
        calibrator,
        continuations=config.calibration.continuations,
        clip=(config.actor.clip_low, config.actor.clip_high),
        ratio=config.ratio,
    )
    settings = T5Settings(config.window, config.critic, config.qualify, config.pilot, config.calibration)
    probing = probe if config.window.probe else None
    return T5(settings, T5Parts(**shared, critics=critics, calibrator=calibrator, probe=probing))


def _rollout(
    config: Config,
    engine: TreeModel,
    corpus: PreparedCorpus,
    ledger: Ledger,
    snapshots: Snapshots,
    telemetry: Telemetry,
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
    )


def _critics(config: Config, frozen: Any, plan: ThoughtPlan) -> Critics | None:
    """As many critics as the method has, fresh from the base model or from a saved pair."""
    count = {"t5": 2, "quiet-star-ppo": 1}.get(config.method, 0)
    if not count:
        return None
    seed, clip = config.run.seed, config.reward.clip
    own = build_pair(frozen, plan, config.critic, engine=config.engine, reward_clip=clip, seed=seed)[:count]
    if config.critic.start is not None:
        load_critics(config.critic.start, own)
    base = FrozenBase(frozen, plan, config.critic, config.engine)
    rows = config.run.texts_per_pass
    return Critics(base, own, config.critic, alpha=config.gae.alpha, seed=seed, rows=rows)


def _actor(config: Config, loaded: Loaded, plan: ThoughtPlan) -> Actor:
    model = loaded.model.requires_grad_(True)
    engine = TreeModel(model, plan, config.engine, _delimiters(model, plan, trainable=True))
    named = list(model.named_parameters())
    if engine.delimiters is not None:
        named += [(f"delimiters.{name}", parameter) for name, parameter in engine.delimiters.named_parameters()]
    total = config.window.windows * config.window.actor_steps
    optimizer = MasterOptimizer(named, total_steps=total, seed=config.run.seed, **config.optimizer.model_dump())
    return Actor(
        engine,
        optimizer,
        config.actor,
        config.ratio,
        # NTP writes no thoughts, so there is nothing to condition on.
        AnchorSettings(next_token=config.anchor.next_token) if config.method == "ntp" else config.anchor,
        seed=config.run.seed,
        rows=config.run.texts_per_pass,
        parity=config.sampling.parity,
        centre=config.sampling if config.method == "t5" and config.calibration.score_centering else None,
    )


def _delimiters(model: Any, plan: ThoughtPlan, *, trainable: bool) -> Delimiters | None:
    return Delimiters.from_model(model, plan).requires_grad_(trainable) if plan.learned else None


def _development(config: Config, corpus: PreparedCorpus, base: TreeModel) -> Development:
    """The first development sequences (after those passed over) that together hold the items asked for."""
    numbers = corpus.sequences("development")[config.run.develop_after :]
    if not len(numbers):
        raise UserError(
            f"run.develop_after = {config.run.develop_after}: the prepared corpus has only "
            f"{len(corpus.sequences('development'))} development texts; pass over fewer"
        )
    items = corpus.items_in[numbers].cumsum()
    enough = int((items < config.run.develop_items).sum()) + 1
    chosen = numbers[:enough]
    kinds = torch.from_numpy(corpus.kinds[chosen].astype("int64"))
    return Development(
        corpus.batch(chosen).to(base.device),
        kinds,
        base,
        config.sampling,
        seed=config.run.seed,
        rows=config.run.rollout_texts,
    )
