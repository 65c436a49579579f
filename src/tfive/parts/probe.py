"""Probe contexts: independent continuations of the same prefix, from which offset and drift are estimated without
bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tfive.credit.drift import drift_report, offset, offset_difference
from tfive.credit.mixture import Mixture
from tfive.credit.pilot import PilotNormaliser
from tfive.parts.calibration import Calibrator
from tfive.parts.continuations import at_step, continued
from tfive.parts.critics import Critics
from tfive.parts.rollout import Rollout
from tfive.rollout.sample import micro_batches
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
        rewarded = continued(self.rollout, self.rollout.collect("probe", window), self.continuations)
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
        ratio_NM = self._contexts(probe, (log_new - at_step(probe, recorded)).exp())
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
            state_BRD = at_step(some, self.engine.features(some.texts, some.thoughts))
            token_BR = at_step(some, some.thoughts.tokens_BRT)
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
        return self._contexts(probe, at_step(probe, value_BRT))

    def _contexts(self, probe: Trajectories, value_BR: Tensor) -> Tensor:
        """`[N, M, …]`: the branches of each existing context side by side."""
        rows, branches = value_BR.shape[:2]
        grouped = value_BR.view(rows, branches // self.continuations, self.continuations, *value_BR.shape[2:])
        valid = probe.thoughts.valid_BR.view(rows, -1, self.continuations)[..., 0]
        return grouped[valid]
