"""From a configuration to parts that can work: models, engines, critics, heads, and the method over them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from tfive.config import Config
from tfive.learn.optimizer import MasterOptimizer
from tfive.methods.t5 import T5, T5Parts, T5Settings
from tfive.models.critic import FrozenBase, build_pair
from tfive.models.critic_files import load_critics
from tfive.models.load import Loaded
from tfive.models.thinker import plan_for
from tfive.parts.actor import Actor
from tfive.parts.calibration import Calibrator
from tfive.parts.critics import TwinCritics
from tfive.parts.gate import Gate
from tfive.parts.probe import Probe
from tfive.parts.rollout import Rollout
from tfive.protocol.roles import Ledger
from tfive.protocol.snapshots import Snapshots
from tfive.run.develop import Development
from tfive.telemetry import Telemetry
from tfive.text.prepared import PreparedCorpus
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.layout import ThoughtPlan
from tfive.tree.probe import admit


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
    method: T5
    development: Development

    @property
    def plan(self) -> ThoughtPlan:
        """The shape of every thought."""
        return self.base.plan


def build(config: Config, loaded: Loaded, corpus: PreparedCorpus, telemetry: Telemetry) -> Workshop:
    """Admit the model by probe, copy the frozen base, and put the method's parts together."""
    plan = plan_for(config.thought, loaded.model, loaded.tokenizer)
    seed, rows = config.run.seed, config.run.texts_per_pass
    frozen = copy.deepcopy(loaded.model).requires_grad_(False)
    base = TreeModel(frozen, plan, config.engine, _delimiters(frozen, plan, trainable=False))
    with telemetry.phase("admit"):
        admit(base, corpus.sequence_length + plan.reach)
    actor = _actor(config, loaded, plan)
    engine = actor.engine
    ledger, snapshots = Ledger(corpus, config.window, seed=seed), Snapshots()
    rollout = Rollout(
        engine,
        lambda numbers: corpus.batch(numbers).to(engine.device),
        ledger,
        snapshots,
        config.sampling,
        config.reward,
        telemetry,
        seed=seed,
        rows=rows,
    )
    pair = build_pair(frozen, plan, config.critic, engine=config.engine, reward_clip=config.reward.clip, seed=seed)
    if config.critic.start is not None:
        load_critics(config.critic.start, pair)
    critics = TwinCritics(
        FrozenBase(frozen, plan, config.critic, config.engine),
        pair,
        config.critic,
        alpha=config.gae.alpha,
        seed=seed,
        rows=rows,
    )
    features = critics.critics[0].head.last.in_features
    calibrator = Calibrator(engine, features, config.heads, config.calibration, seed=seed, rows=rows)
    gate = Gate(engine.width, config.gate, seed=seed, device=engine.device) if config.gate.enabled else None
    clip = (config.actor.clip_low, config.actor.clip_high)
    probe = Probe(
        rollout,
        critics,
        calibrator,
        continuations=config.calibration.continuations,
        clip=clip,
        denominator=config.ratio.denominator,
    )
    settings = T5Settings(config.window, config.critic, config.qualify, config.pilot, config.calibration, config.actor)
    parts = T5Parts(
        rollout, critics, calibrator, actor, snapshots, telemetry, gate, probe if config.window.probe else None
    )
    return Workshop(
        config, loaded, corpus, ledger, actor, base, gate, T5(settings, parts), _development(config, corpus, base)
    )


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
        config.anchor,
        seed=config.run.seed,
        rows=config.run.texts_per_pass,
        parity=config.sampling.parity,
    )


def _delimiters(model: Any, plan: ThoughtPlan, *, trainable: bool) -> Delimiters | None:
    return Delimiters.from_model(model, plan).requires_grad_(trainable) if plan.learned else None


def _development(config: Config, corpus: PreparedCorpus, base: TreeModel) -> Development:
    """The first development sequences that together hold the items asked for."""
    numbers = corpus.sequences("development")
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
        rows=config.run.texts_per_pass,
    )
