"""Probe contexts: independent continuations of the same prefix, from which offset and drift are estimated without bias.

Of each probe text's thought a random prefix is kept and continued several times. The step is drawn uniformly from
1 … T_max and prefixes that end earlier are left out, so that averages follow the occupation measure
(eq:trajectory-occupation) up to its mass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfive import chance
from tfive.credit.drift import drift_report, offset, offset_difference
from tfive.credit.mixture import Mixture
from tfive.credit.pilot import PilotNormaliser
from tfive.parts.calibration import Calibrator
from tfive.parts.critics import Critics
from tfive.parts.rollout import Rollout
from tfive.rollout.sample import branch_uniforms, join_thoughts, micro_batches
from tfive.rollout.score import score
from tfive.rollout.trajectory import Trajectories


class Probe:
    """Draws probe continuations once a window; reads the actual clipped update off them at the first and last step."""

    def __init__(
        self,
        rollout: Rollout,
        critics: Critics,
        calibrator: Calibrator,
        *,
        continuations: int,
        clip: tuple[float, float],
        denominator: str = "recomputed",
    ) -> None:
        self.rollout, self.critics, self.calibrator = rollout, critics, calibrator
        self.continuations, self.clip, self.denominator = continuations, clip, denominator
        self.engine = rollout.engine
        if self.engine.plan.group != 1:
            raise ValueError("probes continue single thoughts; the plan's group must be 1")

    def draw(self, window: int, mixture: Mixture, normaliser: PilotNormaliser) -> Trajectories:
        """Continuations with laws, rewards, GAEs and the mixed advantage; `probe_step_BR` tells the probed action."""
        rollout, group = self.rollout, self.continuations
        begun = rollout.collect("probe", window)
        texts, plan = begun.texts, self.engine.plan
        number = chance.uniforms(rollout.seed, "probe/step", window, np.maximum(texts.items_BP.cpu().numpy(), 0))
        step_BP = torch.from_numpy((number * plan.length).astype(np.int64)).to(texts.items_BP.device)
        reached_BP = begun.thoughts.valid_BR & (step_BP < begun.thoughts.length_BR)
        numbers_BRT = branch_uniforms(
            texts, group=group, steps=plan.length, seed=rollout.seed, role="probe/continuation", window=window
        )
        # Every position stands as often as it is continued: to the engine, continuations are branches like any other.
        texts = replace(
            texts,
            positions_BP=torch.where(reached_BP, texts.positions_BP, -1).repeat_interleave(group, 1),
            items_BP=torch.where(reached_BP, texts.items_BP, -1).repeat_interleave(group, 1),
        )
        step_BR = step_BP.repeat_interleave(group, 1)
        tokens_BRT = begun.thoughts.tokens_BRT.repeat_interleave(group, 1)
        thoughts, log_old = [], []
        for part in micro_batches(len(texts.tokens_BS), rollout.rows):
            some = texts.rows(part.start, part.stop)
            drawn = self.engine.sample(some, numbers_BRT[part], rollout.law, begun=(tokens_BRT[part], step_BR[part]))
            with torch.no_grad():
                log_old.append(self.engine.policy(some, drawn).need("log_prob_BRT").float())
            thoughts.append(drawn)
        probe = Trajectories(
            "probe",
            window,
            texts,
            join_thoughts(thoughts),
            log_old_BRT=torch.cat(log_old),
            probe_step_BR=step_BR,
            snapshots=rollout.snapshots.current("policy"),
        )
        scored = score(self.engine, probe, rows=rollout.rows, snapshots=rollout.snapshots.current("scorer"))
        rollout.book("probe", scored, given=int(step_BR[scored.thoughts.valid_BR].sum()))
        rewarded = rollout.rewarded(scored)
        judged = self.critics.judge(rewarded)
        self.critics.release()
        judged_set = self.critics.advantages(rewarded, judged)
        return self.calibrator.advantage(judged_set, judged, normaliser, mixture)

    @torch.no_grad()
    def report(self, probe: Trajectories, normaliser: PilotNormaliser, moment: str) -> dict[str, Any]:
        """Drift of the update the present weights would make on the probed actions; `moment` is `first` or `last`.

        Where no thought reached its probed step there is nothing to tell.
        """
        self.rollout.snapshots.require(probe.snapshots, ("policy", "scorer", "scale"), what="the probe set")
        if not probe.count:
            return {"probe_contexts": 0} if moment == "first" else {}
        advantage_NM, average_NM = self._probed(probe, probe.need("advantage_BRT")), self._average(probe, normaliser)
        log_new, score_BRD = self._scores(probe)
        recorded = probe.thoughts.log_q_BRT if self.denominator == "sampler" else probe.need("log_old_BRT")
        ratio_NM = self._contexts(probe, (log_new - self._at_step(probe, recorded)).exp())
        score_NMD = self._contexts(probe, score_BRD)
        text_N = self._contexts(probe, probe.texts.items_BP.amax(1)[:, None].expand_as(probe.thoughts.valid_BR))[:, 0]
        found = drift_report(advantage_NM, ratio_NM, score_NMD, text_N, *self.clip)
        out = {
            f"drift_covariance_{moment}": found.covariance_norm,
            f"drift_mean_induced_{moment}": found.mean_induced_norm,
            f"drift_alignment_{moment}": found.alignment,
            f"probe_clip_fraction_{moment}": found.clip_fraction,
            f"drift_bound_estimate_{moment}": found.drift_bound,
        }
        if found.mean_induced_square is not None:
            out[f"drift_mean_induced_square_{moment}"] = found.mean_induced_square.mean
            out[f"drift_mean_induced_square_error_{moment}"] = found.mean_induced_square.error
        if moment == "first":
            paired = offset_difference(advantage_NM, average_NM, text_N)
            fixed = offset(average_NM, text_N)
            out |= {
                "offset": found.offset.mean,
                "offset_error": found.offset.error,
                "offset_average": fixed.mean,
                "offset_change": paired.mean,
                "offset_change_error": paired.error,
                "probe_contexts": len(text_N),
            }
        return out

    def _scores(self, probe: Trajectories) -> tuple[Tensor, Tensor]:
        """log π_θ of each probed action, and ∇log π_θ at the state the vocabulary head reads, `[B, R, D]`."""
        logs, scores = [], []
        head = self.engine.head
        for part in micro_batches(len(probe.texts.tokens_BS), self.rollout.rows):
            some = probe.rows(part)
            state_BRD = self._at_step(some, self.engine.features(some.texts, some.thoughts))
            token_BR = self._at_step(some, some.thoughts.tokens_BRT)
            with torch.enable_grad():
                flat = state_BRD.flatten(0, 1).detach().requires_grad_()
                log_V = torch.log_softmax(head.logits(flat, self.engine.forbidden_V), dim=-1)
                log = log_V.gather(-1, token_BR.reshape(-1, 1)).squeeze(-1)
                (slope,) = torch.autograd.grad(log.sum(), flat)
            logs.append(log.detach().view(token_BR.shape))
            scores.append(slope.view(state_BRD.shape).float())
        return torch.cat(logs).float(), torch.cat(scores)

    def _average(self, probe: Trajectories, normaliser: PilotNormaliser) -> Tensor:
        first, second = (normaliser.normalise(g, probe.mask_BRT) for g in probe.need("gae_2BRT"))
        return self._probed(probe, (first + second) / 2)

    def _probed(self, probe: Trajectories, value_BRT: Tensor) -> Tensor:
        return self._contexts(probe, self._at_step(probe, value_BRT))

    def _at_step(self, probe: Trajectories, value_BRT: Tensor) -> Tensor:
        """The entry of each branch's probed step (further dimensions stay)."""
        step_BR = probe.need("probe_step_BR")
        index = step_BR[..., None]
        for _ in range(value_BRT.ndim - 3):
            index = index[..., None]
        return value_BRT.take_along_dim(index.expand(*step_BR.shape, 1, *value_BRT.shape[3:]), dim=2).squeeze(2)

    def _contexts(self, probe: Trajectories, value_BR: Tensor) -> Tensor:
        """`[N, M, …]`: the branches of each existing context side by side."""
        rows, branches = value_BR.shape[:2]
        grouped = value_BR.view(rows, branches // self.continuations, self.continuations, *value_BR.shape[2:])
        valid = probe.thoughts.valid_BR.view(rows, -1, self.continuations)[..., 0]
        return grouped[valid]
