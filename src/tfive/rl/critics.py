"""The critics of a run, one or a pair: fitting to full returns (eq:value-loss), values of trajectories, and GAEs
(eq:masked-gae)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfive import rng
from tfive.errors import RunFailed
from tfive.rl.critic import BaseActivations, Critic, FrozenBase
from tfive.rl.gae import adaptive_gae
from tfive.rl.losses import clipped_value_loss, expectile_value_loss, squared_value_loss
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.sampling import micro_batches
from tfive.rl.settings import CriticSettings
from tfive.rl.trajectory import Trajectories
from tfive.tree.layout import TextBatch, Thoughts


@dataclass(frozen=True)
class CriticValues:
    """Every critic's values `[2, B, R, T]` and features `[2, B, R, T, E]` of some trajectories, detached."""

    values_2BRT: Tensor
    features_2BRTE: Tensor


class Critics:
    """Separately parameterised critics with an optimizer each; the frozen base is run once per trajectory set.

    T⁵ has two; the leading axis of their tensors is the number of critics, 2 or 1.
    """

    def __init__(
        self,
        base: FrozenBase,
        critics: Sequence[Critic],
        settings: CriticSettings,
        *,
        alpha: float,
        seed: int,
        rows: int,
    ) -> None:
        self.base, self.critics, self.settings = base, tuple(critics), settings
        self.alpha, self.seed, self.rows = alpha, seed, rows
        self.head_passes = 0 if settings.adapt == "head" else settings.head_passes
        """Passes of the value-head warm-up; 0 if only heads are trained anyway."""
        self.head_only = self.head_passes > 0
        self.optimizers = [self._optimizer(critic) for critic in critics]
        self._read: tuple[TextBatch, Thoughts, list[BaseActivations]] | None = None

    def _optimizer(self, critic: Critic) -> MasterOptimizer:
        head = self.settings.head_lr / self.settings.lr
        return MasterOptimizer(
            critic.trainable(),
            lr=self.settings.lr,
            lr_multipliers={"head.": head},
            seed=self.seed,
        )

    def unfreeze(self) -> None:
        """End of the value-head warm-up: from here on the adapted blocks are trained as well."""
        self.head_only = False

    def shared(self, trajectories: Trajectories) -> list[BaseActivations]:
        """The frozen base's activations of each micro-batch, cached for the trajectories last asked for."""
        texts, thoughts = trajectories.texts, trajectories.thoughts
        if self._read is None or self._read[0] is not texts or self._read[1] is not thoughts:
            parts = [trajectories.rows(part) for part in micro_batches(len(texts.tokens_BS), self.rows)]
            self._read = (texts, thoughts, [self.base.read(p.texts, p.thoughts, features=False) for p in parts])
        return self._read[2]

    def _features(self, critic: Critic, some: Trajectories, read: BaseActivations) -> Tensor:
        """Features of every state; during the value-head warm-up no gradient goes below the head."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.head_only):
            return critic.features(some.texts, some.thoughts, read)

    def release(self) -> None:
        """Drop the cached activations of the last trajectories."""
        self._read = None

    @torch.no_grad()
    def evaluate(self, trajectories: Trajectories) -> CriticValues:
        """Values and features of every prefix before an action, by every critic with its present weights."""
        views: list[list[Any]] = [[] for _ in self.critics]
        shared = self.shared(trajectories)
        for part, read in zip(micro_batches(len(trajectories.texts.tokens_BS), self.rows), shared):
            some = trajectories.rows(part)
            for number, critic in enumerate(self.critics):
                views[number].append(critic.evaluate(self._features(critic, some, read), some.mask_BRT))
        values_2BRT = torch.stack([torch.cat([v.values_BRT for v in one]) for one in views])
        if not bool(torch.isfinite(values_2BRT).all()):
            raise RunFailed(f"a critic diverged: values of the {trajectories.role} set are not finite; lower critic.lr")
        return CriticValues(
            values_2BRT,
            torch.stack([torch.cat([v.hidden_BRTE for v in one]) for one in views]),
        )

    def advantages(self, trajectories: Trajectories, values: CriticValues) -> Trajectories:
        """The trajectories with each critic's masked, length-adaptive GAEs from the same rewards (eq:masked-gae)."""
        mask_BRT, rewards_BRT = trajectories.mask_BRT, trajectories.need("rewards_BRT")
        gae = [adaptive_gae(rewards_BRT, v.to(rewards_BRT.dtype), mask_BRT, self.alpha) for v in values.values_2BRT]
        return trajectories.having(values_2BRT=values.values_2BRT, gae_2BRT=torch.stack(gae))

    def fit_pass(
        self, trajectories: Trajectories, frozen_2BRT: Tensor, window: int, number: int, *, warmup: bool
    ) -> list[float]:
        """One pass of every critic over the fitting set; returns each one's mean loss, before its updates.

        `frozen_2BRT` is the pre-fit prediction around which the loss is clipped (eq:value-loss). Minibatches are
        whole texts.
        """
        texts, size = len(trajectories.texts.tokens_BS), self.rows
        self._require_halves(trajectories)
        shared = self.shared(trajectories)
        # What the host needs of the set is fetched once; losses stay on the device until the pass is over.
        mask_BRT, every_row = trajectories.mask_BRT, torch.arange(texts)
        steps_B = mask_BRT.sum((1, 2)).cpu()
        seen = [self._sees(critic, trajectories, every_row).cpu() for critic in range(len(self.critics))]
        losses = torch.zeros(len(self.critics), dtype=torch.float64, device=mask_BRT.device)
        counts = [0] * len(self.critics)
        order = rng.permutation(self.seed, f"critic/{number}", window, texts)
        for step in np.array_split(order, min(self.settings.minibatches, texts)):
            chosen = torch.from_numpy(np.sort(step))
            for critic in range(len(self.critics)):
                own = chosen[seen[critic][chosen]]
                count = int(steps_B[own].sum())
                if not count:
                    continue
                for rows in own.split(size):
                    read = BaseActivations.gathered(shared, size, rows)
                    loss = self._loss(critic, trajectories, rows, read, frozen_2BRT, warmup)
                    (loss / count).backward()
                    losses[critic] += loss.detach().to(losses.device)
                counts[critic] += count
                report = self.optimizers[critic].step()
                if not report.applied:
                    raise RunFailed(f"critic {critic + 1} diverged in window {window}: its gradient is not finite")
        return [total / max(count, 1.0) for total, count in zip(losses.tolist(), counts)]

    def _sees(self, critic: int, trajectories: Trajectories, rows: Tensor) -> Tensor:
        """Which of these texts a critic fits: all, or its half in a disjoint pair, always the same by item number."""
        first_item_B = trajectories.texts.items_BP[rows].amax(1).clamp(min=0)
        if self.settings.pair != "disjoint":
            return torch.ones_like(first_item_B, dtype=torch.bool)
        per_text = trajectories.texts.items_BP.shape[1]
        return (first_item_B // per_text) % 2 == critic

    def _require_halves(self, trajectories: Trajectories) -> None:
        """Stop if a critic of a disjoint pair would silently stay unfitted."""
        if self.settings.pair != "disjoint":
            return
        all_rows = torch.arange(len(trajectories.texts.tokens_BS))
        for critic in range(len(self.critics)):
            own = all_rows[self._sees(critic, trajectories, all_rows).cpu()]
            if not bool(trajectories.mask_BRT[own].any()):
                raise RunFailed(
                    f"critic.pair = disjoint: none of the {len(all_rows)} fitting texts of this window "
                    f"is in the half of critic {critic + 1}; raise window.items or use critic.pair = same"
                )

    def fits_squares(self, warmup: bool) -> bool:
        """Whether a pass minimises half the squared error itself, not a clipped or tilted one."""
        return self.settings.pair != "bracket" and (warmup or self.settings.loss == "squared")

    def _loss(
        self,
        critic: int,
        trajectories: Trajectories,
        rows: Tensor,
        read: BaseActivations,
        frozen_2BRT: Tensor,
        warmup: bool,
    ) -> Tensor:
        rows = rows.to(trajectories.mask_BRT.device)
        some = trajectories.rows(rows)
        mask = some.mask_BRT
        own = self.critics[critic]
        value = own.evaluate(self._features(own, some, read), some.mask_BRT).values_BRT
        target = some.need("returns_BRT").to(value.dtype)
        if self.settings.pair == "bracket":
            expectile = self.settings.expectile if critic else 1 - self.settings.expectile
            return expectile_value_loss(value, target, mask, expectile)[0]
        if self.fits_squares(warmup):
            return squared_value_loss(value, target, mask)[0]
        return clipped_value_loss(value, target, frozen_2BRT[critic][rows].to(value.dtype), mask, self.settings.clip)[0]

    def state_dict(self) -> dict[str, Any]:
        return {
            "head_only": self.head_only,
            "critics": [dict(critic.state_dict()) for critic in self.critics],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.head_only = bool(state["head_only"])
        for critic, optimizer, weights, moments in zip(
            self.critics, self.optimizers, state["critics"], state["optimizers"]
        ):
            critic.load_state_dict(weights)
            optimizer.load_state_dict(moments)
        self.release()
