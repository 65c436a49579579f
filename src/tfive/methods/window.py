"""What every method's window has in common: micro-steps that can be saved, fresh actor texts, bounded updates, a close.

A method is a subclass: its `phases` in order and one `_phase` function each, which does one micro-step and says what
comes next. All randomness is a function of (seed, role, window, item, …), so a run that was stopped anywhere goes on
exactly; and the actor's texts, their order and the number of optimizer steps depend on nothing but seed and window, so
that methods can be compared step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar

from tfive.rl.actor import Actor, StepStats
from tfive.rl.diagnosis import mean_stats
from tfive.rl.gate import Gate, experts
from tfive.rl.rollout import Rollout
from tfive.rl.snapshots import Snapshots
from tfive.rl.trajectory import Trajectories
from tfive.telemetry import Telemetry


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Who takes part in any window. Each may live elsewhere: they exchange trajectories and snapshot ids alone."""

    rollout: Rollout
    actor: Actor
    snapshots: Snapshots
    telemetry: Telemetry
    gate: Gate | None = None


P = TypeVar("P", bound=Parts)


class Window(Generic[P]):
    """The window as a state machine: every transition is part of the saved state and told to the telemetry."""

    name: ClassVar[str]
    phases: ClassVar[tuple[str, ...]]
    plain: ClassVar[tuple[str, ...]] = ("window", "phase", "step", "report")
    """Attributes that are saved as they are."""
    keeping: ClassVar[tuple[str, ...]] = ("snapshots", "rollout", "actor", "gate")
    """Parts that have a memory of their own."""
    made_by: ClassVar[tuple[str, ...]] = ("policy", "scorer")
    """Snapshots that the actor's set must name when it is used."""

    def __init__(self, parts: P, *, actor_steps: int, reading: int = 0) -> None:
        self.parts, self.actor_steps = parts, actor_steps
        self.reading_windows = reading
        """Windows at the start in which the anchors alone move θ."""
        self.window = 0
        self.phase = self.phases[0]
        self.step = 0
        """Micro-step inside the phase."""
        self.held: dict[str, Trajectories] = {}
        """Trajectories that later micro-steps of this window still need."""
        self.report: dict[str, Any] = {}
        """What this window measured so far."""

    @property
    def closed(self) -> bool:
        """Between two windows."""
        return self.phase == self.phases[0]

    @property
    def reading(self) -> bool:
        """Whether this window only learns to read."""
        return 0 < self.window <= self.reading_windows

    @property
    def first(self) -> bool:
        """Whether this is the first window that is rewarded."""
        return self.window == self.reading_windows + 1

    def finished(self, windows: int) -> bool:
        """Whether a run of so many windows is over."""
        return self.closed and self.window >= windows

    def advance(self) -> str:
        """One micro-step; returns the phase it belonged to."""
        phase = self.phase
        micro_step: Callable[[], str] = getattr(self, f"_{phase}")
        if phase == "collect" and self.reading:
            micro_step = self._read
        with self.parts.telemetry.phase(phase):
            following = micro_step()
        if phase == "open" and self.reading:
            following = "collect"
        if following != phase:
            self.step = 0
        self.phase = following
        return phase

    def _open(self) -> str:
        """Rollout copy = π_old = scorer = actor weights from here to the end of the window."""
        self.window += 1
        self.held, self.report = {}, {"window": self.window}
        self.parts.snapshots.renew("policy")
        self.parts.actor.remember()
        return self.phases[1]

    def _fix_scale(self) -> None:
        """The reward scale of this window; the run's first comes from a set of its own (eq:reward-scale)."""
        rollout = self.parts.rollout
        if rollout.scale.updates == 0:
            rollout.update_scale(rollout.collect("scale", self.window, rewarded=False))
        self.report["reward_scale"] = rollout.scale.value

    def _read(self) -> str:
        """Fresh thoughts for the anchors, scored for the report and rewarded by nobody."""
        return self._act(self.parts.rollout.collect("actor", self.window, rewarded=False, recorded=False))

    def _act(self, acting: Trajectories) -> str:
        """Keep the actor's set for the updates that follow."""
        self.held["actor"] = acting
        self.report["steps"] = []
        return "update"

    def _update(self) -> str:
        """One optimizer step on the next minibatch of the actor's texts; only θ moves."""
        actor, acting = self.parts.actor, self.held["actor"]
        made_by = Window.made_by if self.reading else self.made_by
        self.parts.snapshots.require(acting.snapshots, made_by, what="the actor set")
        reuse, minibatch = divmod(self.step, actor.settings.minibatches)
        rows = actor.minibatches(len(acting.texts.tokens_BS), self.window, reuse)[minibatch]
        some = acting.rows(rows)
        self.report["steps"].append(asdict(actor.step(some, policy=False) if self.reading else self._learn(some)))
        self.step += 1
        return "update" if self.step < self.actor_steps else "close"

    def _learn(self, acting: Trajectories) -> StepStats:
        """The update itself: clipped PPO (eq:ppo) and the anchors, unless the method says otherwise."""
        return self.parts.actor.step(acting)

    def _close(self) -> str:
        """Sum the updates up, take the next reward scale, fit the prediction gate to the new weights."""
        parts, acting = self.parts, self.held["actor"]
        if steps := self.report.pop("steps"):
            self.report |= mean_stats([StepStats(**one) for one in steps])
        if self.reading and parts.rollout.scale.updates:
            # Nothing was rewarded by the old scale, and gains shrink while the model learns to read.
            parts.rollout.update_scale(acting, afresh=True)
        elif "scale" in self.held:
            parts.rollout.update_scale(self.held["scale"])
        if parts.gate is not None:
            # The gate meets one thought an item, so that it learns equally much with any group.
            single = acting.thoughts.branches(0, None, parts.actor.engine.plan.group)
            predictions = experts(parts.actor.reader, acting.texts, single, rows=parts.rollout.rows)
            self.report["gate_loss"] = parts.gate.fit(predictions, self.window)
        if acting.count:
            self.report |= {
                "actor_gain": float(acting.gain_BR.sum() / acting.count),
                "mean_thought_length": float(acting.mask_BRT.sum() / acting.count),
            }
        self.held = {}
        return self.phases[0]

    def _tell(self, what: str, detail: str) -> None:
        """A transition, for whoever is looking and for the log."""
        self.parts.telemetry.event(what, detail, window=self.window)

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self.parts, name) for name in self.keeping}
        return {
            **{name: getattr(self, name) for name in self.plain},
            "held": {role: held.state_dict() for role, held in self.held.items()},
            **{name: None if part is None else part.state_dict() for name, part in parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.plain:
            setattr(self, name, state[name])
        device = self.parts.rollout.engine.device
        self.held = {role: Trajectories.from_state(held).to(device) for role, held in state["held"].items()}
        for name in self.keeping:
            part = getattr(self.parts, name)
            if part is not None:
                part.load_state_dict(state[name])
