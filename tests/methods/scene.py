"""Any method on the smallest stage, in float64 throughout: made-up texts, one small model, no files.

`play` puts a method together as `training/build.py` does, but small enough for a test to compute every number again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import GPT2LMHeadModel

from stage import CLOSE, PLAN, gpt2, rollout_of, texts
from tfive.methods.controls import AnchorOnly, NextToken
from tfive.methods.fitting import CriticParts
from tfive.methods.method import Method, Parts
from tfive.methods.mixing import T5Parts, T5Settings
from tfive.methods.quiet_star import QuietStarGRPO, QuietStarPPO
from tfive.methods.registry import spec_of
from tfive.methods.rlp import RLP, RLPParts
from tfive.methods.settings import GrpoSettings, PpoSettings
from tfive.methods.t5 import T5
from tfive.rl.actor import Actor
from tfive.rl.calibration.calibrator import Calibrator
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.rl.critic import FrozenBase, build_pair
from tfive.rl.critics import Critics
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.settings import (
    ActorSettings,
    AnchorSettings,
    CriticSettings,
    QualifySettings,
    RatioSettings,
    WindowSettings,
)
from tfive.rl.teacher import Teacher
from tfive.tree.forward import TreeModel

GROUP, STEPS, ROWS = 4, 2, 3
ANCHOR = AnchorSettings(next_token=0.7, conditioned=0.4)
CRITIC = CriticSettings(adapt="top", blocks=1, width=8, lr=1e-3, head_lr=1e-2, passes=1, minibatches=2, loss="squared")
CALIBRATION = CalibrationSettings(
    mode="average", steps=4, warm_steps=4, evaluate_every=2, batch=8, width=6, cross_fit=False
)


def play(
    name: str,
    *,
    model: GPT2LMHeadModel | None = None,
    anchor: AnchorSettings = ANCHOR,
    actor: ActorSettings | None = None,
    lr: float = 3e-3,
    warmup_rounds: int | None = None,
    **settings: Any,
) -> Method[Any]:
    """The method `name` before its first window. `settings` are those of its own section."""
    model = model or writer()
    plan = replace(PLAN, group=GROUP if spec_of(name).group > 1 else 1)
    engine = TreeModel(model, plan)
    heard = engine if name != "rlp" else TreeModel(model, replace(plan, checkpoints=(plan.length,), horizon=1))
    rollout = rollout_of(heard, lambda number: texts(rows=5, seed=number), rows=ROWS)
    optimizer = MasterOptimizer(list(model.named_parameters()), lr=lr)
    rules = actor or ActorSettings(minibatches=2)
    own = AnchorSettings(next_token=anchor.next_token) if name == "ntp" else anchor
    shared: dict[str, Any] = {
        "rollout": rollout,
        "actor": Actor(engine, optimizer, rules, RatioSettings(), own, seed=6, rows=ROWS),
        "snapshots": rollout.snapshots,
        "telemetry": rollout.telemetry,
    }
    if name in ("ntp", "anchor-only"):
        return {"ntp": NextToken, "anchor-only": AnchorOnly}[name](Parts(**shared), actor_steps=STEPS)
    if name == "quiet-star-grpo":
        return QuietStarGRPO(GrpoSettings(**settings), Parts(**shared), actor_steps=STEPS)
    if name == "rlp":
        teacher = Teacher(TreeModel(writer(seed=9), heard.plan), rows=ROWS, **({"decay": 0.999} | settings))
        return RLP(RLPParts(**shared, teacher=teacher), actor_steps=STEPS)
    if name == "quiet-star-ppo":
        return QuietStarPPO(
            PpoSettings(**settings), CriticParts(**shared, critics=critics(1, warmup_rounds or 3)), actor_steps=STEPS
        )
    pair = critics(2, warmup_rounds or 2)
    calibration = CALIBRATION.model_copy(update=settings)
    calibrator = Calibrator(engine, 8, calibration, seed=4, rows=ROWS, action_width=3)
    course = T5Settings(WindowSettings(actor_steps=STEPS), pair.settings, QualifySettings(rule="fixed"), calibration)
    return T5(course, T5Parts(**shared, critics=pair, calibrator=calibrator))


def settle(module: torch.nn.Module, seed: int) -> None:
    """Weights from numpy's generator: torch's normal numbers differ in their last bits between processors."""
    draw = np.random.default_rng(seed)
    for parameter in module.parameters():
        noise = torch.from_numpy(draw.standard_normal(tuple(parameter.shape))).to(parameter.dtype)
        parameter.data = 0.3 * noise if parameter.ndim > 1 else parameter.data.round() + 0.1 * noise


def writer(seed: int = 0) -> GPT2LMHeadModel:
    """A model that ends many thoughts early, in exact float64."""
    model = gpt2(tied=False)
    settle(model, seed)
    with torch.no_grad():
        model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0.0, 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[CLOSE, 0] = 1.0
    return model


def critics(count: int, warmup_rounds: int) -> Critics:
    """One critic or a pair, their heads in float64 like everything else here."""
    settings = CRITIC.model_copy(update={"warmup_rounds": warmup_rounds})
    base = writer(seed=9).requires_grad_(False)
    chosen = [critic.double() for critic in build_pair(base, PLAN, settings, seed=1)[:count]]
    for number, critic in enumerate(chosen):
        settle(critic.head, number)
    return Critics(FrozenBase(base, PLAN, settings), chosen, settings, alpha=1.0, seed=2, rows=ROWS)


def until(method: Method[Any], phase: str) -> None:
    """Micro-steps until `phase` is next."""
    method.advance()
    while method.phase != phase:
        method.advance()


def weights(method: Method[Any]) -> torch.Tensor:
    """All of the actor's weights as one vector."""
    model = method.parts.actor.engine.model
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
