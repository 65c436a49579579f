"""How far the laws that could stand under PPO's ratio lie from the update's own pass, by the weights that sampled.

At a window's first step the ratio is e to the power of this gap: exactly 1 if π_old was recorded by a pass like the
update's own, and 1 up to rounding if it is read off the scoring pass (`ratio.denominator = scored`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tfive.rl.sampling import branch_uniforms
from tfive.rl.trajectory import Trajectories
from tfive.training.build import Assembly

TEXTS = 4


@torch.no_grad()
def law_gaps(assembly: Assembly) -> dict[str, dict[str, float]]:
    """Law → mean and largest |log π_θ − log π_old| and the estimated KL of a few fresh thoughts; empty for a method
    that writes none."""
    rollout = assembly.method.parts.rollout
    engine = rollout.engine
    if not assembly.config.spec.rewarded or engine.unread:
        return {}
    texts = rollout.texts_of(assembly.corpus.sequences("train")[:TEXTS])
    plan = engine.plan
    drawn = {"seed": rollout.seed, "role": "law gap", "window": 0}
    numbers_BRT = branch_uniforms(texts, group=plan.group, steps=plan.length, **drawn)
    reading = engine.read(texts)
    thoughts = engine.sample(texts, numbers_BRT, rollout.law, reading)
    all_B = torch.ones(len(texts.tokens_BS), dtype=torch.bool, device=engine.device)
    scores = engine.score(texts, thoughts, reading, actions_B=all_B)
    recorded = engine.policy(texts, thoughts, parity=rollout.law.parity).need("log_prob_BRT")
    update = assembly.actor.policy_of(Trajectories("actor", 0, texts, thoughts)).need("log_prob_BRT")
    laws = {"recorded": recorded, "scored": scores.need("log_prob_BRT"), "sampler": thoughts.log_q_BRT}
    mask_BRT = thoughts.mask_BRT
    return {name: _gap((update.float() - law.float())[mask_BRT]) for name, law in laws.items()}


def _gap(gap_N: Tensor) -> dict[str, float]:
    gap_N = gap_N.double()
    kl = float((gap_N.exp() - 1 - gap_N).mean())
    return {"mean": float(gap_N.abs().mean()), "largest": float(gap_N.abs().max()), "kl": kl}
