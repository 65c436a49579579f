"""Drift diagnostics of a run: probe contexts with independent continuations, and the offset and drift measured on them.

The estimators themselves are in `rl/drift.py`. Their D numbers are the coordinates of one bias vector added to every
final hidden state, just before the vocabulary head: of all that θ could move, what a cheap backward pass through the
head alone can tell for each action. Drifts of the whole θ are larger; windows and methods compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tfive.rl.calibration.calibrator import Calibrator
from tfive.rl.calibration.mixture import Mixture
from tfive.rl.continuations import at_step, continued, side_by_side
from tfive.rl.critics import Critics
from tfive.rl.drift import drift_report, offset, offset_difference
from tfive.rl.gae import PilotNormaliser
from tfive.rl.losses import correction_weight
from tfive.rl.rollout import Rollout
from tfive.rl.sampling import micro_batches
from tfive.rl.settings import RatioSettings
from tfive.rl.trajectory import Trajectories
from tfive.tree.outputs import PolicyOutput


class Probe:
    """Draws probe continuations once per window; measures the actual clipped update on them at the first and last
    step."""

    def __init__(
        self,
        rollout: Rollout,
        critics: Critics,
        calibrator: Calibrator,
        *,
        continuations: int,
        clip: tuple[float, float],
        forward: Callable[[Trajectories], PolicyOutput],
        rows: int,
        ratio: RatioSettings | None = None,
    ) -> None:
        """`forward` is the update's own pass over some texts, with the final states of the actions; it gets `rows`
        texts at a time."""
        self.forward, self.rows = forward, rows
        self.rollout, self.critics, self.calibrator = rollout, critics, calibrator
        self.continuations, self.clip, self.ratio = continuations, clip, ratio or RatioSettings()
        self.engine = rollout.engine
        if self.engine.plan.group != 1:
            raise ValueError("probes continue single thoughts; the plan's group must be 1")

    def draw(self, window: int, mixture: Mixture, normaliser: PilotNormaliser) -> Trajectories:
        """Continuations with log-probabilities, rewards, GAEs and the mixed advantage; `probe_step_BR` is the probed
        step."""
        rewarded = continued(self.rollout, self.rollout.collect("probe", window), self.continuations)
        values = self.critics.evaluate(rewarded)
        self.critics.release()
        with_gae = self.critics.advantages(rewarded, values)
        return self.calibrator.advantage(with_gae, values, normaliser, mixture)

    @torch.no_grad()
    def report(self, probe: Trajectories, normaliser: PilotNormaliser, moment: str) -> dict[str, Any]:
        """Drift of the update that the present weights would make on the probed actions; `moment` is `first` or `last`.

        Everything is on the scale of eq:trajectory-occupation, as the cross-fitted offsets are: a context that was not
        reached counts as zero. If no thought reached its probed step there are no drift numbers.
        """
        self.rollout.snapshots.require(probe.snapshots, ("policy", "scorer", "scale"), what="the probe set")
        if not probe.count:
            return {"probe_contexts": 0} if moment == "first" else {}
        advantage_BR = at_step(probe, probe.need("advantage_BRT"))
        log_q, log_old = (at_step(probe, x) for x in (probe.thoughts.log_q_BRT, probe.need("log_old_BRT")))
        log_new, score_BRD = self._scores(probe)
        ratio_BR = (log_new - (log_q if self.ratio.denominator == "sampler" else log_old)).exp()
        # The correction is a factor of the update like the ratio, but clipping depends on the ratio alone.
        factor_BR = correction_weight(log_old, log_q, self.ratio.correction, self.ratio.cap)
        text_BR = probe.texts.items_BP.amax(1)[:, None].expand_as(advantage_BR)
        reached_BR = probe.thoughts.valid_BR
        score_BRD = (factor_BR * reached_BR)[..., None] * score_BRD
        advantage, ratio, score, text, reached = (
            self._by_context(probe, x, reached=False) for x in (advantage_BR, ratio_BR, score_BRD, text_BR, reached_BR)
        )
        found = drift_report(advantage, ratio, score, text[:, 0], *self.clip, reached_N=reached[:, 0])
        out = {
            f"drift_covariance_{moment}": found.covariance_norm,
            f"drift_mean_induced_net_{moment}": found.net_norm,
            f"drift_alignment_{moment}": found.alignment,
            f"probe_clip_fraction_{moment}": found.clip_fraction,
            f"drift_bound_estimate_{moment}": found.drift_bound,
        }
        by_context = {"drift_mean_induced": found.mean_induced, "drift_mean_induced_square": found.mean_induced_square}
        for name, estimate in by_context.items():
            if estimate is not None:
                out |= {f"{name}_{moment}": estimate.mean, f"{name}_error_{moment}": estimate.error}
        if moment == "first":
            out |= self._offsets(probe, advantage_BR, normaliser) | {"probe_contexts": int(reached[:, 0].sum())}
        return out

    def _offsets(self, probe: Trajectories, mixed_BR: Tensor, normaliser: PilotNormaliser) -> dict[str, float]:
        """Unbiased R of the mixture and of the fixed average; a context that was not reached counts as zero."""
        first, second = (normaliser.normalise(gae, probe.mask_BRT) for gae in probe.need("gae_2BRT"))
        average_BR = at_step(probe, (first + second) / 2)
        text_BR = probe.texts.items_BP.amax(1)[:, None].expand_as(mixed_BR)
        mixed, average, text = (self._by_context(probe, x, reached=False) for x in (mixed_BR, average_BR, text_BR))
        own, fixed = offset(mixed, text[:, 0]), offset(average, text[:, 0])
        change = offset_difference(mixed, average, text[:, 0])
        return {
            "offset": own.mean,
            "offset_error": own.error,
            "offset_average": fixed.mean,
            "offset_change": change.mean,
            "offset_change_error": change.error,
        }

    def _scores(self, probe: Trajectories) -> tuple[Tensor, Tensor]:
        """log π_θ of each probed action by the update's own forward, and its gradient in the hidden state that enters
        the vocabulary head, `[B, R, D]`."""
        logs, scores = [], []
        head = self.engine.head
        count, world = len(probe.texts.tokens_BS), self.rollout.world
        for part in world.beating(micro_batches(world.computed(count), self.rows)):
            some = probe.rows(part)
            with torch.enable_grad():
                output = self.forward(some)
            logs.append(at_step(some, output.need("log_prob_BRT").detach()).float())
            state_BRD = at_step(some, output.need("features_BRTD").detach())
            del output
            token_BR = at_step(some, some.thoughts.tokens_BRT)
            with torch.enable_grad():
                flat = state_BRD.flatten(0, 1).requires_grad_()
                log_V = torch.log_softmax(head.logits(flat, self.engine.forbidden_V), dim=-1)
                (slope,) = torch.autograd.grad(log_V.gather(-1, token_BR.reshape(-1, 1)).sum(), flat)
            scores.append(slope.view(state_BRD.shape).float())
        log_BR, score_BRD = world.gather_all([(torch.cat(logs), 0), (torch.cat(scores), 0)], count)
        return log_BR, score_BRD

    def _by_context(self, probe: Trajectories, value_BR: Tensor, *, reached: bool = True) -> Tensor:
        return side_by_side(probe, value_BR, self.continuations, reached=reached)
