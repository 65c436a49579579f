"""What every method has in common: windows of named phases in micro-steps that can be saved, bounded updates, a close.

A method is a subclass with an explicit list of phases. A phase function does one micro-step and returns the phase that
comes next, or None for the next one of the list. All randomness is a function of (seed, role, window, item, …), so a
run that was stopped anywhere goes on exactly; and the actor's texts, their order and the number of optimizer steps
depend on nothing but seed and window, so that methods can be compared step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from tfive.config.schema import Schema
from tfive.methods.registry import spec_of
from tfive.rl.actor import Actor, StepStats
from tfive.rl.credit import Credit
from tfive.rl.critics import Critics
from tfive.rl.diagnosis import mean_stats, rates_outside
from tfive.rl.gate import Gate, experts
from tfive.rl.losses import correction_weight
from tfive.rl.rollout import Rollout
from tfive.rl.snapshots import Snapshots
from tfive.rl.trajectory import Trajectories
from tfive.telemetry import Telemetry
from tfive.tree.fast.cuda_graph import CudaGraphs
from tfive.tree.layout import TextBatch, Thoughts


class Phase(NamedTuple):
    """One entry of a method's list of phases."""

    name: str
    micro_step: Callable[[], str | None]
    """Does one micro-step; returns the phase that comes next, None for the next one of the list."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Who takes part in any window. Each may live elsewhere: they exchange trajectories and snapshot ids alone."""

    rollout: Rollout
    actor: Actor
    snapshots: Snapshots
    telemetry: Telemetry
    gate: Gate | None = None


P = TypeVar("P", bound=Parts)


@dataclass(frozen=True)
class Kit:
    """What a run offers to assemble a method from; `Method.assemble` takes what it needs."""

    config: Schema
    common: dict[str, Any]
    """The fields of `Parts`."""
    critics: Critics | None
    """As many critics as the method's declaration says."""

    @property
    def settings(self) -> Any:
        """The method's own section of the configuration."""
        return spec_of(self.config.method).settings_of(self.config)

    @property
    def windows(self) -> dict[str, int]:
        """The arguments of `Method` that say how a run's windows go."""
        return {"actor_steps": self.config.window.actor_steps, "reading": self.config.reading_windows}

    def need_critics(self) -> Critics:
        """The critics of a method that declares some."""
        if self.critics is None:
            raise ValueError(f"method {self.config.method} declares no critics; set MethodSpec.critics")
        return self.critics


class Method(Generic[P]):
    """A run's windows as a state machine: every transition is part of the saved state and logged."""

    saved: ClassVar[tuple[str, ...]] = ("window", "phase", "step", "report", "largest_push")
    """Attributes that are saved as they are."""
    stateful: ClassVar[tuple[str, ...]] = ("snapshots", "rollout", "actor", "gate")
    """Parts that have a state of their own."""
    made_by: ClassVar[tuple[str, ...]] = ("policy", "scorer")
    """Snapshots that the actor's set must name when it is used."""

    def __init__(self, parts: P, *, actor_steps: int, reading: int = 0) -> None:
        self.parts, self.actor_steps = parts, actor_steps
        self.reading_windows = reading
        """Windows at the start in which the anchors alone move θ."""
        self.window = 0
        self.phase = self.phases()[0].name
        self.step = 0
        """Micro-step inside the phase."""
        self.held: dict[str, Trajectories] = {}
        """Trajectories that later micro-steps of this window still need."""
        self.report: dict[str, Any] = {}
        """What this window measured so far."""
        self.largest_push: float | None = None
        """The largest |advantage|, with the correction of its ratio, that any actor token of the run has had; None
        before the first that was rewarded."""

    @classmethod
    def assemble(cls, kit: Kit) -> Self:
        """The method over the parts that a run offers. Here: one that needs nothing but the common parts."""
        return cls(Parts(**kit.common), **kit.windows)  # type: ignore[arg-type]

    def phases(self) -> tuple[Phase, ...]:
        """One window, in order. Here: fresh thoughts, updates, close."""
        return (
            Phase("open", self.open),
            Phase("collect", self.collect),
            Phase("update", self.update),
            Phase("close", self.close),
        )

    def reading_phases(self) -> tuple[Phase, ...]:
        """One of the first `window.reading` windows, in which nothing is rewarded and the anchors alone move θ."""
        return (
            Phase("open", self.open),
            Phase("collect", self.collect_for_reading),
            Phase("update", self.update_by_anchors),
            Phase("close", self.close),
        )

    @property
    def closed(self) -> bool:
        """Between two windows."""
        return self.phase == self.phases()[0].name

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

    @property
    def note(self) -> str | None:
        """What a summary must say first: where the run departed from the method it is named after; usually nothing."""
        return None

    def advance(self) -> str:
        """One micro-step; returns the phase it belonged to."""
        name = self.phase
        # The window number rises inside `open`, which both lists begin with.
        listed = self.phases() if self.closed or not self.reading else self.reading_phases()
        with self.parts.telemetry.phase(name):
            following = next(phase for phase in listed if phase.name == name).micro_step()
        if following is None:
            names = [phase.name for phase in (self.reading_phases() if self.reading else self.phases())]
            following = names[(names.index(name) + 1) % len(names)]
        if following != name:
            self.step = 0
        self.phase = following
        return name

    def open(self) -> str | None:
        """Rollout copy = π_old = scorer = actor weights from here to the end of the window."""
        self.window += 1
        self.held, self.report = {}, {"window": self.window}
        self.parts.snapshots.renew("policy")
        self.parts.actor.remember()
        self._say_length()
        return None

    def _say_length(self) -> None:
        """How long thoughts may be, while that is not the whole length or has just become it."""
        rollout = self.parts.rollout
        longest, whole = rollout.longest(self.window), rollout.engine.plan.length
        if longest < whole or rollout.grows(self.window):
            self.report["longest_thought"] = longest
        if rollout.grows(self.window) or (self.window == 1 and longest < whole):
            self.log("curriculum", f"thoughts of at most {longest} of {whole} tokens from window {self.window} on")

    def collect(self) -> str | None:
        """Fresh trajectories with their advantages, given to `act_on`."""
        raise NotImplementedError(f"{type(self).__name__} collects nothing; define collect or other phases")

    def fix_scale(self) -> None:
        """The reward scale of this window; the run's first comes from a set of its own (eq:reward-scale).

        A window that opens reading gates has none: behind shut gates every thought gains 0.
        """
        rollout = self.parts.rollout
        if self.reading and self.parts.actor.unread():
            return
        if rollout.scale.updates == 0:
            rollout.update_scale(rollout.collect("scale", self.window, rewarded=False))
        self.report["reward_scale"] = rollout.scale.value

    def collect_for_reading(self) -> str | None:
        """Fresh thoughts for the anchors, scored for the report and not rewarded."""
        return self.act_on(self.parts.rollout.collect("actor", self.window, rewarded=False, recorded=False))

    def act_on(self, acting: Trajectories) -> str | None:
        """Keep the actor's set for the updates that follow, without what only critics read of it."""
        self.held["actor"] = acting.without_states()
        if acting.advantage_BRT is not None and acting.log_old_BRT is not None:
            ratio, log_q_BRT = self.parts.actor.ratio, acting.thoughts.log_q_BRT
            weight_BRT = correction_weight(acting.log_old_BRT, log_q_BRT, ratio.correction, ratio.cap)
            push = float((acting.advantage_BRT * weight_BRT * acting.mask_BRT).abs().max())
            self.largest_push = max(push, self.largest_push or 0.0)
        self.report["steps"] = []
        return None

    def update(self) -> str | None:
        """One optimizer step on the next minibatch of the actor's texts; only θ moves."""
        return self._update(self.made_by, self.learn)

    def update_by_anchors(self) -> str | None:
        """The same with the anchors alone."""
        return self._update(Method.made_by, lambda acting: self.parts.actor.step(acting, policy=False))

    def _update(self, made_by: tuple[str, ...], learn: Callable[[Trajectories], StepStats]) -> str | None:
        actor, acting = self.parts.actor, self.held["actor"]
        self.parts.snapshots.require(acting.snapshots, made_by, what="the actor set")
        reuse, minibatch = divmod(self.step, actor.settings.minibatches)
        rows = actor.minibatches(len(acting.texts.tokens_BS), self.window, reuse)[minibatch]
        self.report["steps"].append(asdict(learn(acting.rows(rows))))
        self.step += 1
        return "update" if self.step < self.actor_steps else None

    @property
    def group(self) -> int:
        """Thoughts drawn at each position."""
        return self.parts.actor.engine.plan.group

    def learn(self, acting: Trajectories) -> StepStats:
        """The update itself: clipped PPO (eq:ppo) and the anchors, unless the method says otherwise."""
        return self.parts.actor.step(acting)

    def close(self) -> str | None:
        """Sum the updates up, take the next reward scale, fit the prediction gate to the new weights."""
        parts, acting = self.parts, self.held["actor"]
        if steps := self.report.pop("steps"):
            self.report |= mean_stats([StepStats(**one) for one in steps])
            if any(one["tokens"] for one in steps):
                alarms = rates_outside(self.report)
                self.report["rate_alarms"] = len(alarms)
                for alarm in alarms:
                    self.log("rates", alarm)
        if (gates := parts.actor.engine.gates) is not None:
            self.report["reading_openness"] = float(parts.actor.role.told(gates.openness))
        if self.reading and parts.rollout.scale.updates:
            # Nothing was rewarded by the old scale, and gains shrink while the model learns to read.
            parts.rollout.update_scale(acting, afresh=True)
        elif "scale" in self.held:
            parts.rollout.update_scale(self.held["scale"])
        if parts.gate is not None:
            # The gate meets one thought an item, so that it learns equally much with any group.
            single = acting.thoughts.branches(0, None, self.group)
            world = parts.rollout.world
            read = partial(experts, parts.actor.reader, acting.texts, single, world=world)
            predictions = parts.rollout.passes.fit_told(read, parts.actor.reader.let_go)
            self.report["gate_loss"] = parts.gate.fit(predictions, self.window, world)
            self._say_trouble("gate", parts.gate.graphs)
        if acting.count:
            self.report |= {
                "actor_gain": float(acting.gain_BR.sum() / acting.count),
                "mean_thought_length": float(acting.mask_BRT.sum() / acting.count),
            }
        self.held = {}
        return None

    def credited(self, texts: TextBatch, thoughts: Thoughts) -> Credit | None:
        """How the tokens of these thoughts would be credited now, for reports; one thought a position.

        Here: None, for a method without critics, which has nothing to say of a single thought's tokens. A method with
        critics says nothing either where it draws groups: its critics know thoughts beside others.
        """
        return None

    def standing(self) -> str:
        """What a person who watches the run should know beside window and phase, in a few words; empty for nothing."""
        return "learning to read" if self.reading and not self.closed else ""

    def _say_trouble(self, whose: str, graphs: CudaGraphs | None) -> None:
        """Log why steps are launched kernel by kernel that should be captured, once."""
        if graphs is not None and (trouble := graphs.new_trouble()):
            self.log(f"{whose}: its steps cannot be captured", f"they are launched: {trouble}")

    def log(self, what: str, detail: str) -> None:
        """A transition, for the console and the log."""
        self.parts.telemetry.event(what, detail, window=self.window)

    def state_dict(self) -> dict[str, Any]:
        parts = {name: getattr(self.parts, name) for name in self.stateful}
        return {
            **{name: getattr(self, name) for name in self.saved},
            "held": {role: held.state_dict() for role, held in self.held.items()},
            **{name: None if part is None else part.state_dict() for name, part in parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.saved:
            setattr(self, name, state[name])
        device = self.parts.rollout.engine.device
        self.held = {role: Trajectories.from_state(held).to(device) for role, held in state["held"].items()}
        for name in self.stateful:
            part = getattr(self.parts, name)
            if part is not None:
                part.load_state_dict(state[name])
