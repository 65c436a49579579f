"""The calibrator of a run: both heads and their multiplier across windows, and the inputs they read of trajectories."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tfive.distributed.roles import Role
from tfive.errors import RunFailed
from tfive.rl.calibration.dropout import MaskTape
from tfive.rl.calibration.heads import ACTION_WIDTH, MeanHead, WeightHead, light
from tfive.rl.calibration.mean import CrossFit, cross_fit_change, cross_fit_offset
from tfive.rl.calibration.mixture import FixedWeight, MeanInputs, Mixture, WeightInputs
from tfive.rl.calibration.moments import CalibrationData, Occupation
from tfive.rl.calibration.repeated import calibrate_repeated
from tfive.rl.calibration.saddle import CalibrationPlan, Candidate, calibrating
from tfive.rl.calibration.settings import CalibrationSettings
from tfive.rl.critics import CriticValues
from tfive.rl.drift import offset_split
from tfive.rl.gae import PilotNormaliser
from tfive.rl.gains import emptied
from tfive.rl.pass_size import PassSize
from tfive.rl.sampling import micro_batches, scoring_features
from tfive.rl.trajectory import Trajectories
from tfive.tree.fast.cuda_graph import CudaGraphs
from tfive.tree.fast.side_by_side import Task, alone, together
from tfive.tree.forward import TreeModel

FOLDS = 2
"""Folds of texts of the cross-fitted offset: with two, each half is predicted by heads fitted to the other."""


_Places = tuple[Tensor, ...]
"""Where the valid thoughts are. The host must know how many there are, and waits for that once."""


def _places(trajectories: Trajectories) -> _Places:
    return trajectories.thoughts.valid_BR.nonzero(as_tuple=True)


class Calibrator:
    """Collects head inputs under frozen policy, scorer and critics, and learns the weight (eq:calibrated-weight)."""

    def __init__(
        self,
        engine: TreeModel,
        critic_features: int,
        settings: CalibrationSettings,
        *,
        seed: int,
        rows: int | PassSize,
        action_width: int = ACTION_WIDTH,
        by: Role | None = None,
        critics_see: bool = False,
    ) -> None:
        """`critics_see`: critics' values and features depend on the scoring text."""
        self.engine, self.settings, self.seed = engine, settings, seed
        self._own = engine.width if critics_see else None
        self.by = Role() if by is None else by
        self.world = self.by.texts
        self.passes = PassSize.of(rows, alone=self.world.size == 1)
        features = engine.width
        prefix = features + 2 * critic_features
        scoring = features + engine.plan.horizon + 1
        self.weight_head = WeightHead(
            prefix,
            features,
            width=settings.width,
            action_width=action_width,
            dropout=settings.dropout,
            seed=seed,
        )
        self.mean_head = MeanHead(
            prefix,
            scoring,
            width=settings.width,
            dropout=settings.dropout,
            bound=settings.mean_bound,
            seed=seed,
        )
        self.weight_head.to(engine.device)
        self.mean_head.to(engine.device)
        for head in (self.weight_head, self.mean_head):
            # Processes fit heads without an exchange; every pass is a sign of life. Copies of the heads keep the hook.
            head.register_forward_pre_hook(lambda *_: self.world.pulse.beat())
        self._untrained = copy.deepcopy(self.mean_head)
        self.rounds = engine.device.type == "cuda" and engine.model.dtype == torch.bfloat16
        """Whether heads learn by TF32 products. What they read was computed with seven bits of a fraction, of which
        these keep ten; and products of thousands of rows with few columns, which take most of a step, are made on
        tensor cores. What validates a candidate, and the weight that the actor is given, is float32; the
        steps that are kept and cross-fitted offsets are chosen and measured as heads learn."""
        self.multiplier: float | None = None
        self.graphs = CudaGraphs.on(engine.device, engine.engine.cuda_graphs, frequent=True)

    @contextmanager
    def _plan(self) -> Iterator[CalibrationPlan]:
        """The plan of head learning; CUDA graphs captured under it are released at the end."""
        exact = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("high" if self.rounds else exact)
            yield CalibrationPlan.of(self.settings, self.graphs)
        finally:
            torch.set_float32_matmul_precision(exact)
            if self.graphs is not None:
                self.graphs.release()

    def fresh_weight_head(self) -> WeightHead:
        """A frozen copy of the weight head, to be filled from a saved state."""
        return copy.deepcopy(self.weight_head).requires_grad_(False).eval()

    @torch.no_grad()
    def weight_inputs(self, trajectories: Trajectories, values: CriticValues) -> WeightInputs:
        """What the weight head reads of every valid thought, flattened in the order of
        `trajectories.thoughts.valid_BR`."""
        return self._weight_inputs(trajectories, values, _places(trajectories))

    def _weight_inputs(self, trajectories: Trajectories, values: CriticValues, at: _Places) -> WeightInputs:
        policy_BRTD = self._policy_features(trajectories)
        prefix = torch.cat([policy_BRTD, *values.features_2BRTE.to(policy_BRTD.dtype)], dim=-1)
        steps = self.engine.plan.length
        time_T = torch.arange(steps, device=prefix.device, dtype=torch.float32) / steps
        return WeightInputs(
            prefix_NTD=prefix[at].float(),
            value_NT2=values.values_2BRT.permute(1, 2, 3, 0)[at].float(),
            time_NT=time_T.expand(len(at[0]), -1),
            action_NTE=self._embedded(trajectories.thoughts.tokens_BRT)[at].float(),
            log_prob_NT=trajectories.need("log_old_BRT")[at].float(),
        )

    @torch.no_grad()
    def data(self, trajectories: Trajectories, values: CriticValues, normaliser: PilotNormaliser) -> CalibrationData:
        """Inputs of both heads, both normalised advantages and the occupation measure of a set of trajectories.

        Of several continuations of the same prefixes only the probed actions count (`CalibrationData.anchored`).
        """
        at, mask_BRT = _places(trajectories), trajectories.mask_BRT
        visible = self._weight_inputs(trajectories, values, at)
        steps = self.engine.plan.length
        context = MeanInputs(
            prefix_NTD=visible.prefix_NTD,
            value_NT2=visible.value_NT2,
            time_NT=visible.time_NT,
            remaining_NT=1 - visible.time_NT,
            potential_NT=trajectories.need("potentials_BRT")[at].float(),
            scoring_NTF=self._scoring_context(trajectories)[at][:, None].expand(-1, steps, -1),
        )
        first, second = (normaliser.normalise(gae, mask_BRT)[at].float() for gae in trajectories.need("gae_2BRT"))
        text_BR = trajectories.texts.items_BP.amax(1)[:, None].expand_as(trajectories.thoughts.valid_BR)
        occupation = Occupation(mask_BRT[at], text_BR[at], steps)
        data = CalibrationData(visible, context, first, second, occupation)
        if trajectories.probe_step_BR is None:
            return data
        if not occupation.count:
            raise RunFailed(
                f"no thought of the {trajectories.role} set of window {trajectories.window} lasts until its anchor: "
                f"raise window.items or window.{trajectories.role}, or use calibration.mode = learned"
            )
        return data.anchored(trajectories.probe_step_BR[at], self.settings.continuations)

    def learn(self, data: CalibrationData, window: int) -> Candidate:
        """Learn on one window's head-training set; returns the frozen candidate. The next window starts from these
        heads."""
        return self.learn_apart([data], window)[0]

    def learn_apart(self, sets: Sequence[CalibrationData], window: int) -> list[Candidate]:
        """A frozen candidate of each set, all learned from the heads of the window before and none from another's set,
        side by side on a GPU where their inputs are small. The next window starts from the last one's heads."""
        own = self.weight_head, self.mean_head
        each = [copy.deepcopy(own) for _ in sets[1:]] + [own]
        with self._plan() as plan:
            tasks = [partial(self._learning, heads, data, plan, window) for heads, data in zip(each, sets, strict=True)]
            beside = light(*(data.mean_inputs for data in sets))
            found = alone(together(plan.recorder, tasks, beside=beside))
        self.multiplier = found[-1].multiplier
        return found

    def _learning(
        self,
        heads: tuple[WeightHead, MeanHead],
        data: CalibrationData,
        plan: CalibrationPlan,
        window: int,
        recorder: CudaGraphs | None,
    ) -> Task[Candidate]:
        weight_head, mean_head = heads
        mask, state_only = data.occupation.mask_NT, self.settings.mode == "state"
        weight_head.standardize(data.weight_inputs.state_only() if state_only else data.weight_inputs, mask)
        mean_head.standardize(data.mean_inputs, mask)
        plan, start = replace(plan, recorder=recorder), self.multiplier
        if self.settings.mode == "repeated":
            return calibrate_repeated(weight_head, data, plan, self.seed, window, multiplier=start)
        task = calibrating(
            weight_head,
            mean_head,
            data,
            plan,
            self.seed,
            window,
            state_only=state_only,
            multiplier=start,
            fresh=partial(self._fresh_mean_head, mean_head),
        )
        return (yield from task)

    def offsets(
        self, data: CalibrationData, mixture: Mixture, window: int, like: nn.Module | None = None
    ) -> dict[str, float]:
        """Cross-fitted offsets of the mixture and of the fixed average, split into visible and hidden parts, and their
        paired change; `cross_fit_updates` are the optimizer steps that all their heads took.

        Each is in expectation a lower bound on R, from mean heads fitted to that mixture on other texts. Empty with
        fewer texts than folds. `like`: the mean head whose input moments they have, the last one learned unless given.
        """
        if data.occupation.text_N.unique().numel() < FOLDS:
            return {}
        tapes, found = [MaskTape() for _ in range(FOLDS)], dict[str, float]()
        fits, occupation = self._cross_fits(data, mixture, window, tapes, like), data.occupation
        for name in ("mixture", "average"):
            total, visible = (occupation.per_trajectory(fits[name, seen].value_NT) for seen in (False, True))
            split = offset_split(total, visible, occupation.text_N)
            found |= {
                f"cross_fit_{name}": split.total.mean,
                f"cross_fit_{name}_error": split.total.error,
                f"cross_fit_{name}_visible": split.visible.mean,
                f"cross_fit_{name}_hidden": split.hidden.mean,
            }
        averages = {seen: fits["average", seen] for seen in (False, True)}
        changes = self.changes(data, mixture, window, tapes, averages, like)
        steps = sum(fit.steps for fit in fits.values()) + changes.get("cross_fit_updates", 0)
        return {**found, **changes, "cross_fit_updates": steps}

    def _cross_fits(
        self,
        data: CalibrationData,
        mixture: Mixture,
        window: int,
        tapes: Sequence[MaskTape],
        like: nn.Module | None,
    ) -> dict[tuple[str, bool], CrossFit]:
        """The cross-fits to the `average` and to the `mixture`, of all inputs and (True) of visible ones alone. Where
        the mixture is the average, its fits are those of the average, and their steps are counted once."""
        fits = dict[tuple[str, bool], CrossFit]()
        given = data.weight_inputs, data.first_NT, data.second_NT
        targets = {"average": FixedWeight().mixed(*given), "mixture": mixture.mixed(*given)}
        same, fresh = torch.equal(targets["mixture"], targets["average"]), partial(self._fresh_mean_head, like)
        with self._plan() as plan:
            asked = (data.occupation, plan.mean_plan(), FOLDS, self.seed, window, tapes)
            for seen, inputs in ((False, data.mean_inputs), (True, data.mean_inputs.visible(self._own))):
                for name, target_NT in targets.items():
                    if name == "mixture" and same:
                        fits[name, seen] = replace(fits["average", seen], steps=0)
                    else:
                        fits[name, seen] = cross_fit_offset(fresh, inputs, target_NT, *asked)
        return fits

    def changes(
        self,
        data: CalibrationData,
        mixture: Mixture,
        window: int,
        tapes: Sequence[MaskTape] | None = None,
        averages: Mapping[bool, CrossFit] | None = None,
        like: nn.Module | None = None,
    ) -> dict[str, float]:
        """R(w) − R(½) and its visible part as paired, cross-fitted differences; empty for a mixture without a
        weight. `averages`: the cross-fits to the average, by whether of visible inputs alone, where they were made.
        `like` as in `offsets`."""
        weight = mixture.weight(data.weight_inputs)
        if weight is None:
            return {}
        found: dict[str, float] = {"cross_fit_updates": 0}
        with self._plan() as plan:
            for name, seen in (("", False), ("_visible", True)):
                change = cross_fit_change(
                    partial(self._fresh_mean_head, like),
                    data.mean_inputs.visible(self._own) if seen else data.mean_inputs,
                    weight.to(data.first_NT.dtype),
                    data.first_NT,
                    data.second_NT,
                    data.occupation,
                    plan.mean_plan(),
                    FOLDS,
                    self.seed,
                    window,
                    tapes,
                    None if averages is None else averages[seen],
                )
                of = change.estimate
                found |= {f"cross_fit_change{name}": of.mean, f"cross_fit_change{name}_error": of.error}
                found["cross_fit_updates"] += change.steps
        return found

    def _fresh_mean_head(self, like: nn.Module | None) -> MeanHead:
        """An untrained mean head with the input moments of another, the run's own unless given."""
        head, like = copy.deepcopy(self._untrained), self.mean_head if like is None else like
        if not isinstance(like, MeanHead):
            raise TypeError(f"input moments are those of a mean head, not of {type(like).__name__}")
        for path in ("prefix", "scoring"):
            getattr(head, path).standardize.load_state_dict(getattr(like, path).standardize.state_dict())
        head.scalars.load_state_dict(like.scalars.state_dict())
        return head

    @torch.no_grad()
    def advantage(
        self, trajectories: Trajectories, values: CriticValues, normaliser: PilotNormaliser, mixture: Mixture
    ) -> Trajectories:
        """The actor's detached, mixed, normalised advantage (eq:twin-advantage) and the frozen weight behind it."""
        policy_BRTD, mask_BRT = self._policy_features(trajectories), trajectories.mask_BRT
        whole, count = trajectories.having(states_BRTD=policy_BRTD), len(mask_BRT)
        first, second = (normaliser.normalise(gae, mask_BRT) for gae in trajectories.need("gae_2BRT"))

        def passes() -> tuple[Tensor, Tensor]:
            advantage_BRT, weight_BRT = torch.zeros_like(first), torch.zeros_like(first)
            for part in self.world.beating(micro_batches(count, self.passes.rows)):
                some, seen = whole.rows(part), values.rows(part)
                at = _places(some)
                inputs = self._weight_inputs(some, seen, at)
                advantage_BRT[part][at] = mixture.mixed(inputs, first[part][at], second[part][at]).to(first.dtype)
                if (weight := mixture.weight(inputs)) is not None:
                    weight_BRT[part][at] = weight.to(first.dtype)
            return advantage_BRT, weight_BRT

        # What the weight reads of a window's thoughts, in float32, is several times what is kept of them.
        advantage_BRT, weight_BRT = self.passes.fit(passes, self.engine.let_go)
        mixed_set = trajectories.having(advantage_BRT=advantage_BRT * mask_BRT, weight_BRT=weight_BRT * mask_BRT)
        return mixed_set.without_states()

    def _embedded(self, tokens_BRT: Tensor) -> Tensor:
        """The policy's embeddings of actions, which processes without the policy are told."""
        found_BRTE: Tensor = self.by.told(self.engine.backbone.embedding(tokens_BRT))
        return found_BRTE.to(tokens_BRT.device)

    def _policy_features(self, trajectories: Trajectories) -> Tensor:
        if trajectories.states_BRTD is not None:
            return trajectories.states_BRTD
        return self._read(trajectories, lambda some: self.engine.features(some.texts, some.thoughts))

    def _read(self, trajectories: Trajectories, read: Callable[[Trajectories], Tensor]) -> Tensor:
        """What `read` gives for all texts, a pass of them at a time."""
        count = len(trajectories.texts.tokens_BS)

        def passes() -> Tensor:
            parts = self.world.beating(micro_batches(self.world.computed(count), self.passes.rows))
            return self.world.gather(torch.cat([read(trajectories.rows(part)) for part in parts]), count)

        return self.passes.fit(passes, self.engine.let_go)

    def _scoring_context(self, trajectories: Trajectories) -> Tensor:
        """The scoring text's features, with the rewards' reference loss (usually ℓ_0) as the last one."""
        found_BRF = self._scoring_features(trajectories)
        return torch.cat([found_BRF[..., :-1], trajectories.reference_BR[..., None].to(found_BRF.dtype)], -1)

    def _scoring_features(self, trajectories: Trajectories) -> Tensor:
        if trajectories.scoring_BRF is not None:
            return trajectories.scoring_BRF

        def read(some: Trajectories) -> Tensor:
            return scoring_features(self.engine.score(some.texts, emptied(some.thoughts), features=True))

        return self._read(trajectories, read)

    def state_dict(self) -> dict[str, Any]:
        return {
            "weight": dict(self.weight_head.state_dict()),
            "mean": dict(self.mean_head.state_dict()),
            "multiplier": self.multiplier,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight_head.load_state_dict(state["weight"])
        self.mean_head.load_state_dict(state["mean"])
        self.multiplier = state["multiplier"]
