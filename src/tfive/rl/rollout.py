"""Rollouts: fresh trajectories of a role with their rewards, under one frozen policy, scorer and reward scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tfive.distributed.roles import Role
from tfive.distributed.world import World
from tfive.errors import RunFailed
from tfive.rl.gains import foreign
from tfive.rl.pass_size import PassSize
from tfive.rl.reward import (
    RewardScale,
    carried_potential,
    checkpoint_rewards,
    final_gain,
    potentials,
    returns_to_go,
)
from tfive.rl.roles import Ledger
from tfive.rl.sampling import Wanted, micro_batches, sample_sets, with_scores
from tfive.rl.settings import OLD_LAW, OldLaw, RewardSettings
from tfive.rl.siblings import numbers_of_others
from tfive.rl.snapshots import Snapshots
from tfive.rl.trajectory import Trajectories, last_loss
from tfive.telemetry import Telemetry
from tfive.tree.forward import TreeModel
from tfive.tree.grow import no_thoughts
from tfive.tree.layout import TextBatch, Thoughts
from tfive.tree.settings import SamplingSettings


@dataclass(frozen=True)
class Draw:
    """A set to collect: of which role, window and attempt, and what is kept of it."""

    role: str
    window: int
    attempt: int = 0
    recorded: bool = True
    """False where no ratio to π_old will be taken."""
    states: bool = False
    """Whether what the calibration heads read is kept."""

    @property
    def stream(self) -> str:
        """The name by which its random numbers are drawn."""
        return self.role if self.attempt == 0 else f"{self.role}/{self.attempt}"


@dataclass(frozen=True)
class Ahead:
    """A set that was drawn before it was asked for: its texts and makers, and on the actor's processes itself."""

    numbers: npt.NDArray[np.int64]
    snapshots: dict[str, str]
    drawn: Trajectories | None


class Rollout:
    """Draws a role's texts, samples a thought (or a group) per item, scores and rewards them, and counts the tokens."""

    def __init__(
        self,
        engine: TreeModel,
        texts_of: Callable[[Any], TextBatch],
        ledger: Ledger,
        snapshots: Snapshots,
        law: SamplingSettings,
        reward: RewardSettings,
        telemetry: Telemetry,
        *,
        seed: int,
        rows: int | PassSize,
        by: Role | None = None,
        longest: Callable[[int], int] | None = None,
    ) -> None:
        """`rows`: texts of a pass, or what tells other parts as well. `by`: the processes that sample and score a share
        of the texts each; every process gets all trajectories. `longest` says how long thoughts may be in a window,
        where that is not always the plan's length."""
        self.by = Role() if by is None else by
        self.world = self.by.texts
        self._ahead: dict[Draw, Ahead] = {}
        self.engine, self.texts_of, self.ledger, self.snapshots, self.law = engine, texts_of, ledger, snapshots, law
        self.reward, self.telemetry, self.seed = reward, telemetry, seed
        self.passes = PassSize.of(rows, alone=self.world.size == 1)
        self.longest = longest or (lambda window: engine.plan.length)
        self.scale = RewardScale(reward.decay)
        self.old_law: OldLaw = "recorded"
        """Where log π_old comes from in roles that `OLD_LAW` does not name: those of which ratios are taken."""
        self.below: int | None = None
        """The block whose entering activations are kept for critics, where they stand on the policy's."""
        self.shows_others = False
        """Whether critics see what the other thoughts at a position came to."""
        self.ready: dict[tuple[str, int], Trajectories] = {}
        """Sets that were drawn ahead and not asked for yet, by stream and window."""

    @property
    def rows(self) -> int:
        """Texts of a pass."""
        return self.passes.rows

    def grows(self, window: int) -> bool:
        """Whether thoughts may be longer from this window on than before."""
        return window > 1 and self.longest(window) > self.longest(window - 1)

    def collect(
        self,
        role: str,
        window: int,
        attempt: int = 0,
        *,
        rewarded: bool = True,
        recorded: bool = True,
        states: bool = False,
        ahead: Sequence[Draw] = (),
    ) -> Trajectories:
        """Fresh thoughts for the role's next texts, with all losses and (unless the scale itself is being set) rewards.

        `attempt` numbers several draws of one role in one window; `states` keeps what the calibration heads read;
        `recorded` is False where no ratio to π_old will be taken. Sets that are certain to be collected next under the
        same weights are drawn `ahead`, in the same passes, and handed out when they are asked for.
        """
        asked = Draw(role, window, attempt, recorded, states)
        scored = self.ready.pop((asked.stream, window), None)
        if scored is None:
            numbers = self.ledger.draw(role, window, attempt)
            scored = self._drawn_ahead(asked, numbers)
        if scored is None:
            # Where critics have processes of their own, later sets are drawn while those fit (`draw_ahead`).
            others = () if self.by.apart else ahead
            further = [self.ledger.draw(one.role, one.window, one.attempt) for one in others]
            scored, *rest = self._drawn([asked, *others], [numbers, *further], self.world)
            self.ready |= {(one.role, one.window): one for one in rest}
        self._check(scored)
        self.count_tokens(role, scored)
        scored = self._with_reference(role, scored)
        return self.rewarded(scored) if rewarded else scored

    def drop_ready(self, kept: Sequence[str]) -> None:
        """Let go of sets that were drawn ahead and will not be asked for, but for those roles; they are counted."""
        for stream, window in [key for key in self.ready if key[0] not in kept]:
            self.count_tokens(stream.partition("/")[0], self.ready.pop((stream, window)))

    def lighten_ready(self) -> None:
        """Keep of sets that were drawn ahead no activations below the critics, which can be read again."""
        self.ready = {key: replace(one, lower_BND=None) for key, one in self.ready.items()}

    def _drawn(
        self, draws: Sequence[Draw], numbers: Sequence[npt.NDArray[np.int64]], world: World
    ) -> list[Trajectories]:
        """Thoughts of these sets for the texts of these numbers, scored by the weights that drew them, by the processes
        of `world`."""
        wanted = [
            Wanted(
                self.texts_of(texts),
                one.stream,
                one.window,
                OLD_LAW.get(one.role, self.old_law) if one.recorded else "none",
                one.states,
                one.role not in ("scale", "probe"),  # no critic reads these as they are
                self.longest(one.window),
            )
            for one, texts in zip(draws, numbers)
        ]
        snapshots = self.snapshots.current("policy", "scorer")
        options: dict[str, Any] = {"seed": self.seed, "snapshots": snapshots, "world": world, "below": self.below}
        draw = partial(sample_sets, self.engine, wanted, self.law, **options)
        return self.passes.fit_told(draw, self.engine.let_go)

    def draw_ahead(self, draw: Draw) -> bool:
        """Draw a set that `collect` will be asked for while the weights are as they are now, by the actor's processes
        alone: the critics' fit meanwhile. False if it was drawn before. Nothing is recorded or counted until then, and
        a run that goes on from a checkpoint between simply draws it when it is asked for."""
        if draw in self._fresh_ahead() or (draw.stream, draw.window) in self.ready:
            return False
        numbers, members = self.ledger.foreseen(draw.role, draw.window, draw.attempt), self.by.members
        drawn = None if members is None else self._drawn([draw], [numbers], members)[0]
        self._ahead[draw] = Ahead(numbers, self.snapshots.current("policy", "scorer"), drawn)
        return True

    def _drawn_ahead(self, draw: Draw, numbers: npt.NDArray[np.int64]) -> Trajectories | None:
        """The set for these texts that the actor's processes drew ahead, on every process; None if they did not."""
        ahead = self._fresh_ahead().pop(draw, None)
        if ahead is None or not np.array_equal(ahead.numbers, numbers):
            return None
        found = self.by.told(None if ahead.drawn is None else ahead.drawn.state_dict())
        return ahead.drawn or Trajectories.from_state(found).to(self.engine.device)

    def _fresh_ahead(self) -> dict[Draw, Ahead]:
        """The sets drawn ahead by the present weights; others are dropped."""
        now = self.snapshots.current("policy", "scorer")
        self._ahead = {draw: one for draw, one in self._ahead.items() if one.snapshots == now}
        return self._ahead

    def _with_reference(self, role: str, scored: Trajectories) -> Trajectories:
        """The trajectories, with their losses after thoughts of other texts if those are the rewards' reference."""
        if self.reward.reference == "no_thought":
            return scored
        if scored.count < 2:
            raise RunFailed(
                f"reward.reference = foreign: the {scored.role} set of window {scored.window} has one thought and no "
                f"other; raise window.items or window.{role}"
            )
        losses_BR = self._foreign_losses(self.engine, scored)
        self.telemetry.count(_counted_as(role), scored_tokens=scored.count * self.engine.plan.horizon)
        return scored.having(foreign_BR=losses_BR)

    def _foreign_losses(self, engine: TreeModel, scored: Trajectories) -> Tensor:
        """The loss `[B, R]` of each continuation after a whole thought of another text."""
        other, count = foreign(scored.thoughts, near=True), len(scored.texts.tokens_BS)

        def scores() -> Tensor:
            losses = []
            for part in self.world.beating(micro_batches(self.world.computed(count), self.rows)):
                some = scored.texts.rows(part.start, part.stop)
                found = engine.score(some, other.rows(part.start, part.stop), whole=True)
                losses.append(last_loss(found.losses_BRK, found.mask_BRK))
            return self.world.gather(torch.cat(losses), count)

        losses_BR = self.passes.fit(scores, engine.let_go)
        if not bool(torch.isfinite(losses_BR).all()):
            raise RunFailed(f"the {scored.role} set of window {scored.window} has foreign losses that are not finite")
        return losses_BR

    def appraised(self, engine: TreeModel, texts: TextBatch, thoughts: Thoughts, window: int) -> Trajectories:
        """Thoughts that were sampled before, with the losses, log-probabilities and rewards they get from `engine` now.

        For reports alone: nothing is drawn and nothing is counted.
        """
        found = self.passes.fit(partial(self._read_again, engine, texts, thoughts, window), engine.let_go)
        if self.reward.reference != "no_thought":
            found = found.having(foreign_BR=self._foreign_losses(engine, found))
        return self._with_rewards(found)

    def _read_again(self, engine: TreeModel, texts: TextBatch, thoughts: Thoughts, window: int) -> Trajectories:
        scores, recorded = [], []
        own = self.world.computed(len(texts.tokens_BS))
        for part in self.world.beating(micro_batches(own, self.rows)):
            some, these = texts.rows(part.start, part.stop), thoughts.rows(part.start, part.stop)
            scores.append(engine.score(some, these))
            recorded.append(engine.policy(some, these, features=True, parity=self.law.parity))
        found = Trajectories(
            "develop",
            window,
            texts.rows(own.start, own.stop),
            thoughts.rows(own.start, own.stop),
            log_old_BRT=torch.cat([p.need("log_prob_BRT").float() for p in recorded]),
            states_BRTD=torch.cat([p.need("features_BRTD") for p in recorded]),
        )
        return with_scores(found, scores).gathered(self.world, texts)

    def texts(self, role: str, window: int) -> Trajectories:
        """The role's next texts without thoughts, for a method that writes none."""
        texts = self.texts_of(self.ledger.draw(role, window))
        branches = texts.positions_BP.shape[1] * self.engine.plan.group
        nothing = no_thoughts(len(texts.tokens_BS), branches, self.engine.plan, self.engine.device)
        nothing = replace(nothing, valid_BR=torch.zeros_like(nothing.valid_BR))
        return Trajectories(role, window, texts, nothing, snapshots=self.snapshots.current("policy"))

    def count_tokens(self, role: str, scored: Trajectories, given: int = 0) -> None:
        """Count the trajectories and tokens of a scored set for the role; `given` of its tokens were not sampled."""
        tokens = int(scored.mask_BRT.sum()) - given
        segments = int(scored.need("checkpoint_mask_BRK").sum()) + scored.count
        self.telemetry.count(
            _counted_as(role),
            trajectories=scored.count,
            generated_tokens=tokens,
            actor_tokens=tokens if role == "actor" else 0,
            scored_tokens=segments * self.engine.plan.horizon,
        )

    def rewarded(self, scored: Trajectories) -> Trajectories:
        """The trajectories with potentials, checkpoint rewards and full returns at the window's frozen scale
        (eq:dense-reward, eq:checkpoint-reward, eq:critic-return)."""
        self.snapshots.require(scored.snapshots, ("policy", "scorer"), what=f"the {scored.role} set")
        return self._with_rewards(scored).having(snapshots=self.snapshots.current("scale"))

    def _with_rewards(self, scored: Trajectories) -> Trajectories:
        mask_BRK, steps = scored.need("checkpoint_mask_BRK"), scored.need("checkpoint_BRK")
        potential_BRK = potentials(
            scored.reference_BR, scored.need("losses_BRK"), mask_BRK, self.scale.value, self.reward.clip
        )
        length = self.engine.plan.length
        rewards_BRT = checkpoint_rewards(potential_BRK, steps, mask_BRK, length)
        rewarded = scored.having(
            potentials_BRT=carried_potential(rewards_BRT),
            rewards_BRT=rewards_BRT,
            returns_BRT=returns_to_go(rewards_BRT, scored.mask_BRT),
        )
        if not self.shows_others:
            return rewarded
        whole_BR, group = rewarded.need("returns_BRT")[..., 0], self.engine.plan.group
        return rewarded.having(others_BRN=numbers_of_others(whole_BR, scored.thoughts.valid_BR, group))

    def rewarded_next(self, scored: Trajectories, *, afresh: bool | None = None) -> Trajectories:
        """The trajectories as the next window would reward them if they set its scale: `update_scale`, foreseen."""
        present = self.scale
        try:
            self.scale = self._updated(scored, afresh)
            return self._with_rewards(scored)
        finally:
            self.scale = present

    def _updated(self, scored: Trajectories, afresh: bool | None) -> RewardScale:
        """The scale after these whole-thought gains; the present one stays as it is."""
        scale = RewardScale(self.reward.decay)
        if not (self.grows(scored.window) if afresh is None else afresh):
            scale.load_state_dict(self.scale.state_dict())
        gain_BR = final_gain(scored.reference_BR, scored.need("losses_BRK"), scored.need("checkpoint_mask_BRK"))
        scale.update(gain_BR, scored.thoughts.valid_BR)
        return scale

    def update_scale(self, scored: Trajectories, *, afresh: bool | None = None) -> float:
        """Update σ_r with the whole-thought gains of a disjoint set (eq:reward-scale), or set it `afresh` from them
        alone, as it is unless told where thoughts have grown: shorter ones gain less. A scale of practically zero stops
        the run."""
        self.snapshots.require(scored.snapshots, ("policy", "scorer"), what=f"the {scored.role} set")
        self.scale = self._updated(scored, afresh)
        value = self.scale.value
        self.snapshots.renew("scale")
        if self.scale.is_flat:
            raise RunFailed(
                f"reward scale {value:.2e}: thoughts change the continuation loss by less than ε = "
                f"{self.scale.epsilon:g} allows; the scorer ignores thoughts, so nothing can be learned from them"
            )
        return value

    def _check(self, scored: Trajectories) -> None:
        """Stop early at what would otherwise surface much later: losses that are not finite, thoughts that are
        identical."""
        losses = scored.need("losses_BRK")[scored.need("checkpoint_mask_BRK")]
        plain = scored.need("no_thought_BR")[scored.thoughts.valid_BR]
        if not (bool(torch.isfinite(losses).all()) and bool(torch.isfinite(plain).all())):
            raise RunFailed(
                f"the {scored.role} set of window {scored.window} has continuation losses that are not finite"
            )
        thoughts = scored.thoughts
        if scored.count >= 16 and bool((thoughts.closed_BR & (thoughts.length_BR == 1))[thoughts.valid_BR].all()):
            raise RunFailed(
                f"every thought of the {scored.role} set of window {scored.window} ends at once: the policy writes "
                "only the close; lower optimizer.lr, or set thought.variable_length = false"
            )
        if scored.count >= 16 and _identical(
            thoughts.tokens_BRT[thoughts.valid_BR], thoughts.length_BR[thoughts.valid_BR]
        ):
            raise RunFailed(
                f"all {scored.count} thoughts of the {scored.role} set of window {scored.window} are identical: the "
                "policy has collapsed; lower optimizer.lr or raise the anchors"
            )

    def state_dict(self) -> dict[str, Any]:
        ready = [one.state_dict() for one in self.ready.values()]
        return {"scale": self.scale.state_dict(), "ready": ready}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.load_state_dict(state["scale"])
        # A checkpoint of before sets were drawn ahead has none; they are drawn when they are asked for.
        ready = [Trajectories.from_state(one).to(self.engine.device) for one in state.get("ready", [])]
        self.ready = {(one.role, one.window): one for one in ready}


def _counted_as(role: str) -> str:
    """The name a role is counted under: probes are `extra`."""
    return "extra" if role == "probe" else role


def _identical(tokens_IT: Tensor, length_I: Tensor) -> bool:
    return bool((length_I == length_I[0]).all()) and bool((tokens_IT == tokens_IT[0]).all())
