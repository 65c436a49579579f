"""The prediction gate as a part: fitted on frozen predictions of training texts, judged on texts it never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tfive import chance
from tfive.learn.anchor import best_constant_gate, correlation, gate_terms, mixed_log_prob, oracle_gate_gain
from tfive.learn.clusters import clustered_mean
from tfive.learn.optimizer import MasterOptimizer
from tfive.models.gate import PredictionGate
from tfive.models.settings import GateSettings
from tfive.rollout.sample import micro_batches
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.outputs import Scores


@dataclass(frozen=True)
class Experts:
    """Both predictions of every continuation token, detached: log-probabilities `[I, H]`, hidden states `[I, H, D]`."""

    log_with_IH: Tensor
    log_without_IH: Tensor
    with_IHD: Tensor
    without_IHD: Tensor
    mask_IH: Tensor
    text_I: Tensor

    def items(self, index: Tensor) -> Experts:
        """Some of the items."""
        return Experts(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def per_item(self, gain_IH: Tensor) -> Tensor:
        """Mean over an item's continuation tokens, nats per token."""
        kept = torch.where(self.mask_IH, gain_IH, torch.zeros_like(gain_IH))
        return kept.sum(-1) / self.mask_IH.sum(-1).clamp(min=1)

    @staticmethod
    def of(scores: Scores, texts: TextBatch, thoughts: Thoughts) -> Experts:
        """What scores with features say of the valid branches."""
        valid_BR = thoughts.valid_BR
        text_BR = texts.items_BP.amax(1)[:, None].expand_as(valid_BR)
        return Experts(
            -scores.token_BRH[valid_BR].float(),
            -scores.no_thought_token_BRH[valid_BR].float(),
            scores.need("features_BRHD")[valid_BR].float(),
            scores.need("no_thought_features_BRHD")[valid_BR].float(),
            scores.token_mask_BRH[valid_BR],
            text_BR[valid_BR],
        )

    @staticmethod
    def joined(parts: Sequence[Experts]) -> Experts:
        """Micro-batches one after the other."""
        return Experts(*(torch.cat([getattr(p, name) for p in parts]) for name in Experts.__dataclass_fields__))


@torch.no_grad()
def experts(engine: TreeModel, texts: TextBatch, thoughts: Thoughts, *, rows: int) -> Experts:
    """The two predictions of each item's continuation: after its whole thought, and without it."""
    parts = []
    for part in micro_batches(len(texts.tokens_BS), rows):
        some, own = texts.rows(part.start, part.stop), thoughts.rows(part.start, part.stop)
        parts.append(Experts.of(engine.score(some, own, features=True, whole=True), some, own))
    return Experts.joined(parts)


class Gate:
    """β_g with its optimizer. Gradients reach the gate alone (app:gate-behavior)."""

    def __init__(self, features: int, settings: GateSettings, *, seed: int, device: torch.device) -> None:
        self.settings, self.seed = settings, seed
        self.gate = PredictionGate(features, width=settings.width, seed=seed).to(device)
        self.optimizer = MasterOptimizer(
            [(f"gate.{name}", p) for name, p in self.gate.named_parameters()],
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            seed=seed,
        )
        self.constant = 0.0

    def fit(self, predictions: Experts, window: int) -> float:
        """Passes over a training set's predictions; returns the mean loss of the last pass."""
        count, loss_mean = len(predictions.text_I), 0.0
        for number in range(self.settings.passes):
            order = torch.from_numpy(chance.permutation(self.seed, f"gate/{number}", window, count))
            total = tokens = 0.0
            for part in micro_batches(count, self.settings.batch):
                some = predictions.items(order[part].to(predictions.text_I.device))
                terms = gate_terms(
                    self.gate(some.with_IHD, some.without_IHD),
                    some.log_with_IH,
                    some.log_without_IH,
                    some.mask_IH,
                    no_harm=self.settings.no_harm,
                    utility=self.settings.utility,
                    utility_scale=self.settings.utility_scale,
                )
                (terms.loss_sum / terms.count.clamp(min=1)).backward()
                self.optimizer.step()
                total, tokens = total + float(terms.loss_sum.detach()), tokens + float(terms.count)
            loss_mean = total / max(tokens, 1.0)
        self.constant = best_constant_gate(predictions.log_with_IH, predictions.log_without_IH, predictions.mask_IH)
        return loss_mean

    @torch.no_grad()
    def logits(self, predictions: Experts) -> Tensor:
        """Gate logits `[I, H]`, a few thousand items at a time."""
        parts = micro_batches(len(predictions.text_I), 4096)
        return torch.cat([self.gate(predictions.with_IHD[p], predictions.without_IHD[p]) for p in parts])

    def state_dict(self) -> dict[str, Any]:
        return {
            "gate": dict(self.gate.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "constant": self.constant,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.gate.load_state_dict(state["gate"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.constant = float(state["constant"])


@dataclass(frozen=True)
class MixedGains:
    """Mixed gains item by item, and how the gate behaved."""

    gains_I: dict[str, Tensor]
    text_I: Tensor
    behaviour: dict[str, float | None]

    def summary(self) -> dict[str, Any]:
        """Means with 95 % intervals, and the gate's mean, spread and correlation with utility."""
        out: dict[str, Any] = {}
        for name, gain_I in self.gains_I.items():
            estimate = clustered_mean(gain_I, self.text_I)
            out[name], out[f"{name}_interval"] = estimate.mean, list(estimate.interval())
        return out | self.behaviour


def mixed_gains(gate: Gate, own: Experts, lent: Experts) -> MixedGains:
    """Mixed gain over no-thought prediction on texts the gate never saw, beside what simpler and wiser gates would get.

    `own` are the predictions given each item's thought, `lent` those given another's. `mixed_gain_constant` uses the
    one best β of the gate's own training texts, `mixed_gain_oracle` knows the answer, `mixed_gain_other` feeds the same
    gate another item's thought.
    """
    logit = gate.logits(own)
    beta = torch.sigmoid(logit)
    plain = own.log_without_IH
    constant = torch.full_like(plain, gate.constant).logit(eps=1e-7)
    gains_I = {
        "mixed_gain": own.per_item(mixed_log_prob(logit, own.log_with_IH, plain) - plain),
        "mixed_gain_constant": own.per_item(mixed_log_prob(constant, own.log_with_IH, plain) - plain),
        "mixed_gain_oracle": own.per_item(oracle_gate_gain(own.log_with_IH, plain, own.mask_IH)),
        "mixed_gain_other": lent.per_item(
            mixed_log_prob(gate.logits(lent), lent.log_with_IH, lent.log_without_IH) - lent.log_without_IH
        ),
    }
    kept = beta[own.mask_IH].double()
    behaviour = {
        "mean_gate": float(kept.mean()),
        "gate_deviation": float(kept.std()),
        "gate_utility_correlation": correlation(beta, own.log_with_IH - plain, own.mask_IH),
    }
    return MixedGains(gains_I, own.text_I, behaviour)
