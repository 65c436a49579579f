"""The prediction gate β_g (app:gate-behavior): its network, its loss, its training, and the gain of the mixed
prediction.

The gate mixes the prediction after a thought with the one without it; gradients reach the gate alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tfive import rng
from tfive.distributed.world import SINGLE, World
from tfive.rl.clusters import clustered_mean
from tfive.rl.initial import InitialWeights, dense
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.sampling import micro_batches
from tfive.rl.settings import GateSettings
from tfive.rl.unseen import UnseenSteps
from tfive.tree.fast.cuda_graph import CudaGraphs, ReplayedStep
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.outputs import Scores

WIDTH = 64
"""Units each feature vector is projected to, and of the hidden layer: the gate learns from one window's thoughts."""

WEIGHT_DECAY = 1e-2
"""AdamW decay of the gate, which is fitted to the same thoughts several times."""

BATCH = 64
"""Items of one optimizer step: tens of steps a pass for a window of a thousand items."""


class PredictionGate(nn.Module):
    """β_g = sigmoid of the returned logits; starts near ½, with a last layer that is small but not zero.

    Both hidden states are detached, so that no gradient reaches the model, normalised and projected by the same layer;
    the gate reads both projections and their difference.
    """

    def __init__(self, features: int, *, width: int = WIDTH, seed: int = 0) -> None:
        """`features` is the width D of the hidden states."""
        super().__init__()
        initial = InitialWeights(seed, "gate")
        self.features = features
        self.project = dense(features, width, initial.of("project"))
        self.join = dense(3 * width + 1, width, initial.of("join"), gain=2.0**0.5)
        self.last = dense(width, 1, initial.of("last"), gain=0.01)

    def forward(self, with_thought: Tensor, without_thought: Tensor) -> Tensor:
        """Gate logits `[…, H]` for hidden states `[…, H, D]` with and without the thought.

        The position j/H of the predicted token in the continuation is an input as well.
        """
        dtype = self.last.weight.dtype
        pair = torch.stack([with_thought.detach(), without_thought.detach()]).to(dtype)
        thought, plain = self.project(F.layer_norm(pair, (self.features,)))
        horizon = with_thought.shape[-2]
        offset = torch.arange(horizon, dtype=dtype, device=pair.device) / horizon
        columns = [thought, plain, thought - plain, offset.expand(with_thought.shape[:-1]).unsqueeze(-1)]
        logits: Tensor = self.last(F.silu(self.join(F.silu(torch.cat(columns, dim=-1)))))
        return logits.squeeze(-1)


def mixed_log_prob(gate_logit: Tensor, log_with: Tensor, log_without: Tensor) -> Tensor:
    """log(β_g p_thought + (1−β_g) p_no-thought) per predicted token, β_g = sigmoid(gate_logit): a mixture of
    probabilities, not of logits."""
    return torch.logaddexp(F.logsigmoid(gate_logit) + log_with, F.logsigmoid(-gate_logit) + log_without)


@dataclass(frozen=True)
class GateTerms:
    """The prediction gate's loss summed over tokens, its three parts (detached), and the token count."""

    loss_sum: Tensor
    mixed: Tensor
    no_harm: Tensor
    utility: Tensor
    count: Tensor


def gate_terms(
    gate_logit: Tensor,
    log_with: Tensor,
    log_without: Tensor,
    mask: Tensor,
    *,
    no_harm: float = 1.0,
    utility: float = 0.1,
) -> GateTerms:
    """Mixed NLL + no-harm + utility-aware loss (app:gate-behavior), [..., H]; only the gate gets gradients.

    No-harm: how much worse the mixture predicts than the model without the thought. Utility-aware: ``−β_g U`` with
    U = log p_thought − log p_no-thought, which opens the gate where thoughts help and shuts it where they hurt.
    """
    log_with, log_without = log_with.detach(), log_without.detach()
    zero = torch.zeros_like(gate_logit)
    mixed = mixed_log_prob(gate_logit, log_with, log_without)
    nll = torch.where(mask, -mixed, zero).sum()
    harm = torch.where(mask, (log_without - mixed).clamp(min=0), zero).sum()
    gain = torch.where(mask, log_with - log_without, zero)
    useful = -(torch.sigmoid(gate_logit) * gain).sum()
    loss = nll + no_harm * harm + utility * useful
    return GateTerms(loss, nll.detach(), harm.detach(), useful.detach(), mask.sum())


def best_constant_gate(log_with: Tensor, log_without: Tensor, mask: Tensor, iterations: int = 60) -> float:
    """The one β ∈ [0, 1] that minimises the mixed NLL on these tokens; the loss is convex in β, so bisection finds
    it. No step of it waits for the device."""
    lift = torch.expm1((log_with - log_without)[mask].double())
    low, high = lift.new_zeros(()), lift.new_ones(())
    for _ in range(iterations):
        middle = (low + high) / 2
        rises = (lift / (1 + middle * lift)).mean() > 0
        low, high = torch.where(rises, middle, low), torch.where(rises, high, middle)
    return float((low + high) / 2)


def oracle_gate_gain(log_with: Tensor, log_without: Tensor, mask: Tensor) -> Tensor:
    """Per token, the gain of a gate that knows the answer, ``max(U, 0)``, zero where masked: an upper bound."""
    return torch.where(mask, (log_with - log_without).clamp(min=0), torch.zeros_like(log_with))


def correlation(left: Tensor, right: Tensor, mask: Tensor) -> float | None:
    """Pearson correlation over valid tokens; None if one side is constant."""
    a, b = left[mask].double(), right[mask].double()
    a, b = a - a.mean(), b - b.mean()
    scale = float(a.norm() * b.norm())
    return None if scale <= 1e-300 else float(a @ b) / scale


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
        """The predictions of the valid branches, from scores with features."""
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

    def gathered(self, world: World, texts: int) -> Experts:
        """The items of all `texts` rows, of which these are the ones that this process computed."""
        if world.size == 1:
            return self
        rows = world.share(texts)
        own = self if rows.stop > rows.start else self.items(self.text_I[:0])
        return Experts(*world.gather_ragged([getattr(own, name) for name in Experts.__dataclass_fields__]))

    @staticmethod
    def joined(parts: Sequence[Experts]) -> Experts:
        """The micro-batches concatenated."""
        return Experts(*(torch.cat([getattr(p, name) for p in parts]) for name in Experts.__dataclass_fields__))


@torch.no_grad()
def experts(engine: TreeModel, texts: TextBatch, thoughts: Thoughts, *, rows: int, world: World = SINGLE) -> Experts:
    """The two predictions of each item's continuation: after its whole thought, and without it."""
    parts = []
    for part in world.beating(micro_batches(world.computed(len(texts.tokens_BS)), rows)):
        some, own = texts.rows(part.start, part.stop), thoughts.rows(part.start, part.stop)
        parts.append(Experts.of(engine.score(some, own, features=True, whole=True), some, own))
    return Experts.joined(parts).gathered(world, len(texts.tokens_BS))


class Gate:
    """β_g with its optimizer, and the best constant β of its last training set for comparison."""

    def __init__(
        self,
        features: int,
        settings: GateSettings,
        *,
        seed: int,
        device: torch.device,
        width: int = WIDTH,
        batch: int = BATCH,
        graphs: CudaGraphs | None = None,
    ) -> None:
        """`graphs` capture a fit's steps, where the device has such; there are none between two fits."""
        self.settings, self.seed, self.batch, self.graphs = settings, seed, batch, graphs
        self.gate = PredictionGate(features, width=width, seed=seed).to(device)
        self.optimizer = MasterOptimizer(
            [(f"gate.{name}", p) for name, p in self.gate.named_parameters()],
            lr=settings.lr,
            weight_decay=WEIGHT_DECAY,
            seed=seed,
        )
        self.constant = 0.0

    def fit(self, predictions: Experts, window: int, world: World = SINGLE) -> float:
        """Passes over a training set's predictions, alike on every process of `world`; returns the mean loss of the
        last pass."""
        count, device, steps = len(predictions.text_I), predictions.text_I.device, UnseenSteps(self.optimizer)
        sums_2 = torch.zeros(2, dtype=torch.float64, device=device)

        def step(rows: Tensor) -> None:
            some = predictions.items(rows)
            terms = gate_terms(
                self.gate(some.with_IHD, some.without_IHD),
                some.log_with_IH,
                some.log_without_IH,
                some.mask_IH,
                no_harm=self.settings.no_harm,
                utility=self.settings.utility,
            )
            steps.step(terms.loss_sum / terms.count.clamp(min=1))
            sums_2.add_(torch.stack([terms.loss_sum.detach().double(), terms.count.double()]))

        step_on, made = ReplayedStep(step, (), device, self.graphs if steps.unseen else None), 0
        for number in range(self.settings.passes):
            order = torch.from_numpy(rng.permutation(self.seed, f"gate/{number}", window, count))
            order = order.to(device, non_blocking=True)
            sums_2.zero_()
            for part in world.beating(micro_batches(count, self.batch)):
                step_on(order[part])
                made += 1
        self.constant = best_constant_gate(predictions.log_with_IH, predictions.log_without_IH, predictions.mask_IH)
        steps.settle(made)
        # The host waits for all of it here.
        total, tokens = sums_2.tolist()
        if self.graphs is not None:
            self.graphs.release()
        return total / max(tokens, 1.0)

    @torch.no_grad()
    def logits(self, predictions: Experts) -> Tensor:
        """Gate logits `[I, H]`, computed 4096 items at a time to bound memory."""
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
    gate_IH: Tensor
    """β_g at every continuation token of the own thoughts."""

    def summary(self) -> dict[str, Any]:
        """Means with 95 % intervals, and the gate's mean, spread and correlation with utility."""
        out: dict[str, Any] = {}
        for name, gain_I in self.gains_I.items():
            estimate = clustered_mean(gain_I, self.text_I)
            out[name], out[f"{name}_interval"] = estimate.mean, list(estimate.interval())
        return out | self.behaviour


def mixed_gains(gate: Gate, own: Experts, other: Experts) -> MixedGains:
    """Mixed gain over no-thought prediction on texts the gate was not trained on, beside those of reference gates.

    `own` are the predictions given each item's thought, `other` those given another item's. `mixed_gain_constant` uses
    the best single β of the gate's training texts, `mixed_gain_oracle` knows the answer, `mixed_gain_other` gives the
    same gate another item's thought.
    """
    logit = gate.logits(own)
    beta = torch.sigmoid(logit)
    plain = own.log_without_IH
    constant = torch.full_like(plain, gate.constant).logit(eps=1e-7)
    gains_I = {
        "mixed_gain": own.per_item(mixed_log_prob(logit, own.log_with_IH, plain) - plain),
        "mixed_gain_constant": own.per_item(mixed_log_prob(constant, own.log_with_IH, plain) - plain),
        "mixed_gain_oracle": own.per_item(oracle_gate_gain(own.log_with_IH, plain, own.mask_IH)),
        "mixed_gain_other": other.per_item(
            mixed_log_prob(gate.logits(other), other.log_with_IH, other.log_without_IH) - other.log_without_IH
        ),
    }
    kept = beta[own.mask_IH].double()
    behaviour = {
        "mean_gate": float(kept.mean()),
        "gate_deviation": float(kept.std()),
        "gate_utility_correlation": correlation(beta, own.log_with_IH - plain, own.mask_IH),
    }
    return MixedGains(gains_I, own.text_I, behaviour, beta)
