"""The actor: the only part whose weights move in a window's last phase, by clipped PPO and its anchors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tfive import rng
from tfive.distributed.roles import Role
from tfive.distributed.sharding import Sharding
from tfive.errors import RunFailed
from tfive.rl.losses import Aggregate, anchor_counts, before_answers, centering_term, policy_count
from tfive.rl.optimizer import MasterOptimizer, StepReport
from tfive.rl.pass_size import PassSize
from tfive.rl.sampling import micro_batches
from tfive.rl.settings import ActorSettings, AnchorSettings, RatioSettings
from tfive.rl.trajectory import Trajectories
from tfive.rl.update_loss import TERMS, UpdateLoss
from tfive.rl.weight_slots import wide
from tfive.tree.fast.replayed import Named
from tfive.tree.fast.replayed_backward import ReplayedBackward
from tfive.tree.forward import Centring, TreeModel
from tfive.tree.gated import GATES
from tfive.tree.layout import ThoughtPlan
from tfive.tree.low_rank import copy_sharing_frozen, load_trained_state, low_rank_parts, trained_state
from tfive.tree.outputs import PolicyOutput
from tfive.tree.policy_pass import ToCapture
from tfive.tree.settings import SamplingSettings


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step saw, as means over its valid tokens (losses in nats)."""

    policy_loss: float
    anchor_loss: float
    conditioned_loss: float
    clip_fraction: float
    policy_kl: float
    mismatch_kl: float
    gradient_norm: float
    lr: float
    tokens: int
    skipped: bool


NO_ANCHOR = AnchorSettings(next_token=0.0, conditioned=0.0)
NO_TERMS = dict.fromkeys(TERMS, 0.0)


@dataclass(frozen=True)
class Sums:
    """What the passes of one step came to: sums of the policy's terms, means of the anchors' losses."""

    policy: dict[str, float] = field(default_factory=lambda: dict(NO_TERMS))
    text: float = 0.0
    conditioned: float = 0.0


class Actor:
    """π_θ with its optimizer. `step` is one PPO update; anchors are read off the same rows, in parity mode in passes of
    their own."""

    def __init__(
        self,
        engine: TreeModel,
        optimizer: MasterOptimizer,
        actor: ActorSettings,
        ratio: RatioSettings,
        anchor: AnchorSettings,
        *,
        seed: int,
        rows: int,
        parity: bool = False,
        patience: int = 3,
        centre: SamplingSettings | None = None,
        role: Role | None = None,
        shards: Sharding | None = None,
    ) -> None:
        """`parity`: ratios one text at a time, as in parity sampling. `patience`: how many skipped updates in a row end
        the run. `centre`: the sampling law for score centring, which needs a second copy of the weights. `role`: the
        processes that have the actor and read a share of each step's texts; their gradients are summed by `optimizer`,
        or on the way to its `shards`, where the weights are trained in shards of which `engine` is the whole copy.
        Another process takes no part in a step and is told what it came to; its `engine` stays as it began."""
        self.role = Role() if role is None else role
        self.engine, self.optimizer, self.world, self.shards = engine, optimizer, self.role.texts, shards
        self.reader = under(engine, replace(engine.plan, group=1))
        """The same weights with one thought a position, whatever the group: for anchors, gate and measurements."""
        self.trained = engine if shards is None else through_shards(engine, shards)
        """What passes with gradients go through."""
        self.trained_reader = under(self.trained, self.reader.plan)
        self.settings, self.ratio, self.anchor = actor, ratio, anchor
        self.seed, self.parity, self.patience = seed, parity, patience
        self.passes = PassSize(rows, "run.texts_per_pass", "an update", alone=self._alone)
        """Texts of a pass with gradients. An update that does not fit begins again: its sums are the same. (Several
        processes would have to do so together.)"""
        self.skipped = 0
        self.centring = None if centre is None else _centring(engine, ratio, centre)
        options = engine.engine
        self.updates = ReplayedBackward(
            options.cuda_graphs and options.replayed_passes, gradients=optimizer.accumulators
        )
        """Parts of an update that come again with the same shapes."""

    @property
    def rows(self) -> int:
        """Texts of a pass with gradients."""
        return self.passes.rows

    def unread(self) -> bool:
        """Whether the reading gates are still shut; all processes must ask."""
        return bool(self.role.told(self.engine.unread))

    def remember(self) -> None:
        """π_old is the policy as it is now; only score centring needs to keep it."""
        if self.centring is not None:
            old, engine = self.centring.old, self.engine
            old.model.load_state_dict(trained_state(engine.model), strict=False)
            if old.delimiters is not None and engine.delimiters is not None:
                old.delimiters.load_state_dict(engine.delimiters.state_dict())
            # Centring compares actions, which no reading gate touches.

    def minibatches(self, texts: int, window: int, reuse: int) -> list[Tensor]:
        """The rows of each optimizer step of one pass over the window's texts: a fresh order per pass."""
        order = rng.permutation(self.seed, f"minibatch/{reuse}", window, texts)
        parts = np.array_split(order, min(self.settings.minibatches, texts))
        return [torch.from_numpy(np.sort(part)) for part in parts]

    def step(
        self,
        trajectories: Trajectories,
        *,
        policy: bool = True,
        aggregate: Aggregate = "token",
    ) -> StepStats:
        """One update on these texts; its mean is global, so the size of micro-batches does not matter.

        Without `policy` the anchors alone move θ. `aggregate`: the mean is over valid tokens, or over each thought's
        tokens and then over thoughts.
        """
        if self.anchor.lr is not None:
            sums, report = self._two_updates(trajectories, policy, aggregate)
        else:
            sums, report = self._one_update(trajectories, policy, aggregate)
        self.skipped = 0 if report.applied else self.skipped + 1
        if self.skipped >= self.patience:
            raise RunFailed(
                f"{self.skipped} actor updates in a row had losses or gradients that are not finite (last norm "
                f"{report.gradient_norm}, losses: policy {sums.policy['loss_sum']:.4g}, next token {sums.text:.4g}, "
                f"conditioned {sums.conditioned:.4g}); lower optimizer.lr or look at the reward scale"
            )
        terms = sums.policy
        tokens = max(terms["tokens"], 1.0)
        return StepStats(
            policy_loss=terms["loss_sum"] / max(terms["count"], 1.0),
            anchor_loss=sums.text,
            conditioned_loss=sums.conditioned,
            clip_fraction=terms["clipped"] / tokens,
            policy_kl=terms["kl_positive"] / tokens,
            mismatch_kl=terms["mismatch_positive"] / tokens,
            gradient_norm=report.gradient_norm,
            lr=report.lr,
            tokens=int(terms["tokens"]),
            skipped=not report.applied,
        )

    def _one_update(self, trajectories: Trajectories, policy: bool, aggregate: Aggregate) -> tuple[Sums, StepReport]:
        """Policy and anchors as one loss."""

        def passes() -> Sums:
            if policy and self._one_pass:
                return self._backward(self.trained, trajectories, aggregate=aggregate, anchored=True)
            sums = self._backward(self.trained, trajectories, aggregate=aggregate, anchored=False) if policy else Sums()
            anchors = self._anchor_passes(trajectories)
            return replace(sums, text=anchors.text, conditioned=anchors.conditioned)

        sums = self.passes.fit(passes, self._undo)
        return sums, self._applied(sums)

    def _two_updates(self, trajectories: Trajectories, policy: bool, aggregate: Aggregate) -> tuple[Sums, StepReport]:
        """The policy's update, then the anchors' by a rate of their own; the report is the policy's where there is
        one."""
        sums, report = Sums(), None
        if policy:
            passes = partial(self._backward, self.trained, trajectories, aggregate=aggregate, anchored=False)
            sums = self.passes.fit(passes, self._undo)
            report = self._applied(sums, counted=False)
        anchors = self.passes.fit(partial(self._anchor_passes, trajectories), self._undo)
        with self.optimizer.apart(self.anchor.lr or self.optimizer.lr):
            own = self._applied(anchors)
        sums = replace(sums, text=anchors.text, conditioned=anchors.conditioned)
        return sums, own if report is None or not own.applied else report

    def _undo(self) -> None:
        """Leave nothing of an update that did not fit."""
        self.updates.refuse("an update did not fit in memory")
        self.optimizer.zero_grad()

    def _anchor_passes(self, trajectories: Trajectories) -> Sums:
        return self._backward(self.trained_reader, self._first_thoughts(trajectories), aggregate=None, anchored=True)

    def _first_thoughts(self, trajectories: Trajectories) -> Trajectories:
        """Anchors read the first thought of a group alone, so that all thought methods have the same ones."""
        single = trajectories.thoughts.branches(0, None, self.engine.plan.group)
        return Trajectories(trajectories.role, trajectories.window, trajectories.texts, single)

    @property
    def _alone(self) -> bool:
        return self.shards is None and self.world.size == 1 and self.optimizer.world.size == 1

    def _applied(self, sums: Sums, *, counted: bool = True) -> StepReport:
        """The update that the passes came to, dropped if a loss is no number."""
        # A clipped token passes no gradient on, so a loss can be no number while every gradient is one.
        sound = math.isfinite(sums.policy["loss_sum"] + sums.text + sums.conditioned)
        report = self.optimizer.step(counted=counted) if sound else self.optimizer.skip()
        return StepReport(**self.role.told(asdict(report)))

    @property
    def _one_pass(self) -> bool:
        """Whether policy and anchors share a reading of the row: a sum of losses has the sum of their gradients. Parity
        wants rows as they were sampled."""
        return not self.parity

    def _backward(
        self, engine: TreeModel, trajectories: Trajectories, *, aggregate: Aggregate | None, anchored: bool
    ) -> Sums:
        """Forward and backward passes over all texts: the policy's loss (unless `aggregate` is None), the next-token
        loss of the texts, and where asked for that of the continuations given the thoughts."""
        weights = self.anchor if anchored else NO_ANCHOR
        if aggregate is None and not (weights.next_token or weights.conditioned):
            return Sums()
        texts = trajectories.texts
        total = 1 if aggregate is None else max(int(policy_count(trajectories.mask_BRT, aggregate)), 1)
        counts = anchor_counts(texts.document_BS, texts.positions_BP, engine.plan.horizon, weights.answers)
        totals = (total, *(max(count, 1) for count in counts))
        loss = UpdateLoss(self.settings, self.ratio, weights, aggregate)
        # They stay on the device: the host waits for them once, after the last part.
        seen, acting = list[Tensor](), aggregate is not None
        for some, spare in self.world.beating(self._passes(trajectories, acting)):
            parts = self._asked(some, weights, acting)
            found = engine.to_capture(some.texts, **parts) if self._replays(engine) else None
            if isinstance(found, ToCapture):
                seen.append(self._replayed(engine, some, loss, totals, found))
                continue
            alone = partial(self._read, engine, some, weights, acting)
            read = alone if found is None else partial(engine.policy_from, found)
            output = read() if self.shards is None else self.shards.run(read)
            own, sums = loss(output, self._given(some, loss) | self._text_mask(some.texts.positions_BP, output), totals)
            (0.0 * own if spare else own).backward()
            if not spare:
                seen.append(sums)
        rows = torch.stack(seen).tolist() if seen else []
        *policy, text_all, after_all = self.world.sum_in_order(rows, len(TERMS) + 2)
        return Sums(dict(zip(TERMS, policy)), text_all / totals[1], after_all / totals[2])

    def _given(self, some: Trajectories, loss: UpdateLoss) -> dict[str, Tensor]:
        """What the loss reads of these thoughts beside what the pass gives."""
        given: dict[str, Tensor] = {}
        if loss.aggregate is not None:
            given |= {name: some.need(name) for name in ("log_old_BRT", "advantage_BRT", "mask_BRT")}
            given["log_q_BRT"] = some.thoughts.log_q_BRT
        return given

    def _replays(self, engine: TreeModel) -> bool:
        """Whether parts of an update may be captured and replayed: those that never wait for the host."""
        plain = self._alone and not self.parity and self.centring is None
        return plain and self.updates.wanted and engine.replays_training

    def _replayed(
        self, engine: TreeModel, some: Trajectories, loss: UpdateLoss, totals: Sequence[float], captured: ToCapture
    ) -> Tensor:
        """The row of sums of a part, whose gradients are accumulated: by a replayed graph where its shape came before.
        All that changes between parts and steps is handed over as tensors."""
        given = self._given(some, loss)
        divisors = torch.tensor(totals, dtype=wide(engine.model.dtype))

        def work(tensors: Sequence[Tensor]) -> Named:
            divisors_3, positions_BP, *rest = tensors
            output = engine.policy_from(captured.made(rest[len(given) :]))
            read = dict(zip(given, rest)) | self._text_mask(positions_BP, output)
            own, sums = loss(output, read, divisors_3.unbind())
            own.backward()
            return {"sums": sums} | {f"log-probabilities {i}": one for i, one in enumerate(output.log_probs)}

        others = [tensor.to(engine.device) for tensor in (divisors, some.texts.positions_BP, *given.values())]
        return self.updates((loss, captured.kind), engine.home, work, [*others, *captured.tensors])["sums"]

    def _passes(self, trajectories: Trajectories, acting: bool) -> Iterator[tuple[Trajectories, bool]]:
        """The parts that this process reads. Over shards a pass is common work: a process with fewer parts than others
        adds spare ones, whose loss counts for nothing, and a pass in parity, which reads texts one by one, has one."""
        count = len(trajectories.texts.tokens_BS)
        rows = 1 if self.shards is not None and self.parity and acting else self.rows
        parts = list(micro_batches(self.world.share(count), rows))
        yield from ((trajectories.rows(part), False) for part in parts)
        if self.shards is not None and count:
            most = len(list(micro_batches(self.world.share_of(0, count), rows)))
            row = self.world.computed(count).start
            yield from ((trajectories.rows(slice(row, row + 1)), True) for _ in range(most - len(parts)))

    def _read(
        self, engine: TreeModel, some: Trajectories, weights: AnchorSettings, acting: bool, features: bool = False
    ) -> PolicyOutput:
        """The forward pass of an update over these texts, with what its losses need."""
        asked = self._asked(some, weights, acting)
        asked |= {"centring": self.centring if acting else None, "parity": self.parity and acting}
        return engine.policy(some.texts, **asked, features=features, padded=self._replays(engine))

    def _asked(self, some: Trajectories, weights: AnchorSettings, acting: bool) -> dict[str, Any]:
        """The thoughts that an update's pass reads, and the parts that it asks for."""
        after = weights.conditioned > 0
        return {
            "thoughts": some.thoughts if acting or after else None,
            "actions": acting,
            "text": weights.next_token > 0,
            "continuations": after,
            "no_thought": weights.mixture > 0,
            "of_first": True,
        }

    def policy_of(self, some: Trajectories) -> PolicyOutput:
        """What an update on these texts would see of the policy, by the very pass it would make (the row is longer
        with continuations behind the thoughts, and rounds differently), and the final states of all actions."""
        return self._read(self.engine, some, self.anchor if self._one_pass else NO_ANCHOR, True, features=True)

    def _text_mask(self, positions_BP: Tensor, output: PolicyOutput) -> dict[str, Tensor]:
        """`text_mask_BS` where texts were read: bool, the tokens whose next one the next-token anchor takes."""
        mask_BS = output.text_mask_BS
        if mask_BS is None or self.anchor.answers:
            return {} if mask_BS is None else {"text_mask_BS": mask_BS}
        left_out_BS = before_answers(positions_BP, mask_BS.shape[1], self.engine.plan.horizon)
        return {"text_mask_BS": mask_BS & ~left_out_BS.to(mask_BS.device)}

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments and counts; on a process without the actor, pieces without elements."""
        found: dict[str, Any] = self.role.state(None if self.role.members is None else self._own_state())
        return found

    def _own_state(self) -> dict[str, Any]:
        # Weights in compute precision follow from the masters where there are any, so both are always in step.
        # Frozen weights are the base model's.
        trained = trained_state(self.engine.model)
        state: dict[str, Any] = {"model": trained, "optimizer": self.optimizer.state_dict(), "skipped": self.skipped}
        if any(True for _ in low_rank_parts(self.engine.model)):
            state["compute"] = str(self.engine.model.dtype).removeprefix("torch.")
        if self.engine.delimiters is not None:
            state["delimiters"] = dict(self.engine.delimiters.state_dict())
        if self.engine.gates is not None:
            state["reading_gates"] = dict(self.engine.gates.state_dict())
        if self.centring is not None:
            old = self.centring.old
            state["old_model"] = {name: value for name, value in old.model.state_dict().items() if name in trained}
            if old.delimiters is not None:
                state["old_delimiters"] = dict(old.delimiters.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = int(state["skipped"])
        if self.role.members is None:
            return
        load_trained_state(self.engine.model, state["model"])
        if self.engine.delimiters is not None:
            self.engine.delimiters.load_state_dict(state["delimiters"])
        if self.engine.gates is not None:
            self.engine.gates.load_state_dict(state["reading_gates"])
        if self.centring is not None:
            old = self.centring.old
            old.model.load_state_dict(state["old_model"], strict=False)
            if old.delimiters is not None:
                old.delimiters.load_state_dict(state["old_delimiters"])
        self.optimizer.load_state_dict(state["optimizer"])


def under(engine: TreeModel, plan: ThoughtPlan) -> TreeModel:
    """The same weights under another plan."""
    if plan == engine.plan:
        return engine
    other = TreeModel(engine.model, plan, engine.engine, engine.delimiters, engine.gates)
    other.share_fusion(engine)
    return other


def through_shards(engine: TreeModel, shards: Sharding) -> TreeModel:
    """The same engine over the sharded weights, by the model's own blocks."""
    delimiters, gates = shards.beside.get("delimiters"), shards.beside.get(GATES.removesuffix("."))
    return TreeModel(shards.model, engine.plan, engine.engine.unfused(), delimiters, gates)


def _centring(engine: TreeModel, ratio: RatioSettings, law: SamplingSettings) -> Centring:
    """A frozen copy of the policy, and the mean score of the update that these ratios make."""
    model = copy_sharing_frozen(engine.model).requires_grad_(False)
    delimiters = None if engine.delimiters is None else copy_sharing_frozen(engine.delimiters).requires_grad_(False)
    term = partial(centering_term, denominator=ratio.denominator, correction=ratio.correction, cap=ratio.cap)
    return Centring(TreeModel(model, engine.plan, engine.engine, delimiters), law, term)
