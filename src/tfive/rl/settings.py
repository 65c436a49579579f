"""Settings of reinforcement learning, in the order data flows: window, reward, critics, advantages, actor, gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from tfive.section import Section

TRAINING_ROLES = ("critic_fit", "pilot", "head_train", "head_validate", "actor", "scale", "probe")
"""Roles filled from the training split; `qualify` is filled from the calibration split."""

LEARNING = ("actor", "critic_fit")
"""Roles that share a pool of training texts; each other one has texts of its own."""

HALVES = ("pool_1", "pool_2")
"""The two halves of the pool, as `tfive data` names them: in one window the actor learns from one and the critics from
the other, in the next they change over."""

DERIVED_ROLES = {"scale": ("pilot", 1.0), "head_validate": ("head_train", 0.5)}
"""Role → the key of `[window]` it follows, and its part of that: the paper's N/8 and N/8, N/2 and N/4. They do not
depend on the method, because all methods of a comparison share one prepared corpus."""


OldLaw = Literal["none", "scored", "recorded"]
"""Where a set's log π_old comes from: nowhere; the pass that scores, which reads the same nodes by the same weights but
rounds otherwise than an update; or a pass like the update's own."""

OLD_LAW: dict[str, OldLaw] = {
    "critic_fit": "none", "qualify": "none", "pilot": "none", "scale": "none",
    "head_train": "scored", "head_validate": "scored",
}  # fmt: skip
"""Role → where its log π_old comes from, unless `recorded`. The first four do not read it; to the next two it is an
input of a head, and no ratio to an update's own pass is taken: the rounding of the scoring pass is harmless."""


class WindowSettings(Section):
    """One window: N actor items, the other roles as trajectories per actor item, and the steps the actor may take."""

    items: int = Field(1024, ge=1, le=10_000_000)
    """N, the positions at which the actor thinks in a window; each gives one trajectory, in a group G of them."""

    windows: int = Field(100, ge=1, le=1_000_000)
    """Windows to complete before the run ends."""

    reading: int = Field(0, ge=0, le=1_000_000)
    """Windows at the start in which the anchors alone move the model: it learns to read its thoughts before anything
    rewards them. No critic is fitted meanwhile. With gated reading it is at least 1 where thoughts are
    rewarded, unless a warm start has opened the gates."""

    curriculum: int = Field(0, ge=0, le=1_000_000)
    """Windows over which thoughts grow: from the first of `thought.checkpoints` over the next ones to `thought.length`,
    which they reach when these windows are over. 0: they may have their whole length from the start. Measured thoughts
    always may."""

    actor_steps: int = Field(8, ge=1, le=100_000)
    """PPO steps of a window, in which only the actor moves; at most actor.reuse_passes × actor.minibatches."""

    history: bool = False
    """Whether the actor's thoughts serve once more before they are learned from: when their advantages are fixed, they
    fit the critics for the next window, and at its end they set the next reward scale. Both are history by then, so
    later windows draw no thoughts for either; what tests, normalises and calibrates stays fresh. Critics that fail a
    test are fitted to fresh thoughts as ever."""

    crossed: bool = False
    """Whether the actor's thoughts also test, normalise and calibrate, where history has fitted the critics: they are
    tested on all of them, and of two random halves of their texts each is normalised and mixed by what the other half
    taught. A later window then draws no thoughts but the actor's (and for probes). What mixes a thought is never
    learned from it; only the test is of the thoughts that it admits, on texts that critics may have met before. A
    second test, and the first window, draw sets of their own. `head_train` and `head_validate` are taken of a half's
    texts; where it holds fewer thoughts, each gets its share."""

    critic_fit: float = Field(1.0, ge=0, le=64)
    """Critic-fitting trajectories per actor item (n_V = N)."""

    qualify: float = Field(0.25, ge=0, le=64)
    """Held-out trajectories per actor item in one qualification test (N/4)."""

    pilot: float = Field(0.125, ge=0, le=64)
    """Pilot trajectories per actor item for the advantage normaliser (N/8); as many more (role `scale`) set the next
    window's reward scale."""

    head_train: float = Field(0.5, ge=0, le=64)
    """Trajectories per actor item that teach the weight and mean heads (N/2); half as many (role `head_validate`, N/4)
    validate the frozen candidate."""

    probe: float = Field(0.03125, ge=0, le=64)
    """Probe contexts per actor item for the drift diagnostics (N/32); continuations count as extra, 0 is none."""

    def count(self, role: str) -> int:
        """Trajectories of `role` in one window; a role with a positive share gets at least one."""
        if role == "actor":
            return self.items
        key, factor = DERIVED_ROLES.get(role, (role, 1.0))
        share: float = factor * getattr(self, key)
        return max(1, round(self.items * share)) if share > 0 else 0

    @property
    def fitted_role(self) -> str:
        """The role whose thoughts a later window fits its critics to."""
        return "actor" if self.history else "critic_fit"

    def longest_thought(self, window: int, checkpoints: Sequence[int]) -> int:
        """Tokens that a thought of this window (from 1) may have at most: a reward checkpoint, so that every thought
        that is cut there is scored at its end."""
        if window > self.curriculum:
            return checkpoints[-1]
        return checkpoints[max(window - 1, 0) * (len(checkpoints) - 1) // self.curriculum]

    def training_texts(self, per_text: int) -> dict[str, int]:
        """Texts that each group of the training split must hold for one window, at `per_text` positions a text.

        A role that needs a few items still needs a whole text.
        """
        texts = {role: math.ceil(self.count(role) / per_text) for role in TRAINING_ROLES}
        half = max(texts.pop(role) for role in LEARNING)
        return dict.fromkeys(HALVES, half) | {role: count for role, count in texts.items() if count > 0}

    @staticmethod
    def key_of(role: str) -> str:
        """The key that decides how many trajectories a role gets."""
        return "window.items" if role == "actor" else f"window.{DERIVED_ROLES.get(role, (role, 1.0))[0]}"


class RewardSettings(Section):
    """How a gain becomes a reward (eq:dense-reward, eq:reward-scale)."""

    clip: float = Field(3.0, ge=1e-3, le=1e3)
    """c_r: potentials are clipped to ±this."""

    reference: Literal["no_thought", "foreign"] = "no_thought"
    """What a thought's loss is held against: that of the text without a thought (the paper), or with a thought of
    another text (of the place before, where a set has too few texts). No action of the thought changes either, so
    both point the same way; the second is closer, and what is left is the thought's content."""

    decay: float = Field(0.9, ge=0, lt=1)
    """Decay of the second moment of whole-thought gains across windows."""


HEADS_ALONE = ("head", "probe")
"""What `critic.adapt` calls critics that train nothing but their value head."""


HEAD_BYTES = 1 << 30
"""Bytes that a pass of value heads with gradients may take: 1 GiB, where a pass of the model below them takes more."""
STATE_BYTES = 12
"""Bytes that it takes of each number of a state: as it is read, in float32, and normalised."""


def head_texts(asked: int, texts: int, states: int, width: int) -> int:
    """Texts of a pass with gradients of heads on `states` states a text of `width` features: as many of a step's
    `texts` as `HEAD_BYTES` hold, and no fewer than `asked`, which is what a pass of the model may have."""
    return max(asked, min(texts, HEAD_BYTES // (states * width * STATE_BYTES)))


class CriticSettings(Section):
    """How a state-value critic is made from the base model, and how the two of a pair differ."""

    adapt: Literal["head", "probe", "top", "lora", "full"] = "full"
    """What is trained: the value head alone, on final states (`head`) or on what enters the last `blocks` blocks
    (`probe`); the last `blocks` blocks, low-rank updates of those, or everything."""

    features: Literal["base", "policy"] = "base"
    """What adapted blocks and heads stand on: the frozen base model, or the policy as the window found it, whose
    activations sampling and scoring leave behind, so that no pass is made for them (final states for `head`, parity
    mode and gated reading take one). They move with the policy from window to window."""

    sees: Literal["prefix", "continuation", "group"] = "prefix"
    """What values are of: the text before the thought and the thought so far (the paper), or these and the text that
    will score it: its tokens' losses without a thought, the loss that rewards compare with, and the potential so far;
    `group` adds mean and deviation of what the other thoughts at the position came to. No action from here on changes
    any of it, so such a value is a baseline like the other; the actor never sees it. It lowers the floor that hidden
    scoring text puts under a critic's error (lem:visible-floor)."""

    blocks: int = Field(4, ge=1, le=1024)
    """Last blocks that `top` and `lora` adapt, and that `probe` leaves out; the frozen rest is computed once per
    trajectory."""

    lora_rank: int = Field(16, ge=1, le=4096)
    """Rank of each low-rank update."""

    width: int = Field(256, ge=0, le=16_384)
    """Hidden units of the value head; 0 makes it linear in the normalised features, with one bias a step."""

    bounded: bool = False
    """Keep |V| ≤ 2·c_r by construction (the bound eq:value-risk-confidence asks for)."""

    pair: Literal["same", "disjoint", "bracket"] = "same"
    """`same`: both fit all data (paper); `disjoint`: half each; `bracket`: a low and a high expectile (a variant)."""

    expectile: float = Field(0.7, gt=0.5, lt=1)
    """The upper expectile of a `bracket` pair; the lower one is its mirror image."""

    start: str | None = None
    """Folder of a saved critic pair to start from; none means fresh critics from the base model."""

    loss: Literal["clipped", "squared"] = "clipped"
    """Value loss of alternating training: clipped around the pre-fit prediction (eq:value-loss), or half-squared.
    Warm-ups always take the latter: the pre-fit prediction is not yet worth staying near."""

    clip: float = Field(0.2, ge=1e-3, le=1e3)
    """ε_v of the clipped loss, in units of the shaped return."""

    lr: float = Field(1e-5, ge=1e-12, le=1)
    """Learning rate of the adapted blocks."""

    head_lr: float = Field(1e-3, ge=1e-12, le=1)
    """Learning rate of the value head."""

    head_passes: int = Field(1, ge=0, le=1000)
    """Passes of the value-head warm-up over its fitting set, before the blocks are unfrozen."""

    passes: int = Field(2, ge=1, le=1000)
    """Passes over a window's fitting set."""

    minibatches: int = Field(8, ge=1, le=100_000)
    """Optimizer steps per pass."""

    warmup_rounds: int = Field(3, ge=1, le=10_000)
    """Fitting rounds (a fresh set, `passes` passes over it) before the actor's first step where no test decides that:
    `quiet-star-ppo`, and T⁵ with `qualify.rule = fixed`. Later windows have one each."""

    def numbers_seen(self, horizon: int) -> int:
        """How many numbers a value head reads beside its features (`rl.critic.scoring_numbers`)."""
        return {"prefix": 0, "continuation": horizon + 2, "group": horizon + 4}[self.sees]


class QualifySettings(Section):
    """When critics are good enough for the actor to move, and what happens while they are not."""

    rule: Literal["strict", "sustained", "fixed"] = "strict"
    """`strict` (Algorithm 1): `consecutive` fresh passes in every window; no step on critics that did not pass in it.
    `sustained` (Section 4): once admitted, one test a window, and `patience` failures in a row pause the actor. `fixed`
    (an ablation): the actor waits for `critic.warmup_rounds`; tests are made and decide nothing."""

    eta: float = Field(0.1, ge=0, lt=1)
    """The weaker critic's held-out R² must reach this."""

    consecutive: int = Field(2, ge=1, le=10_000)
    """m: fresh tests in a row that admit."""

    patience: int = Field(2, ge=1, le=10_000)
    """Failures in a row, once admitted, that pause the actor; `rule = sustained` alone reads it."""

    attempts: int = Field(5, ge=1, le=10_000)
    """Failed tests of a window without admission after which `on_failure` decides."""

    on_failure: Literal["stop", "wait", "baseline"] = "baseline"
    """When the attempts are spent. `stop`: the run ends. `wait` (Algorithm 1): the actor waits and the critics are
    refitted until they pass, however long. `baseline`: this window's update takes the mean return of the other thoughts
    of the batch (in a group: of the position) in place of critics; each later window gives the critics one attempt
    until they pass. Updates made so are counted, and the first line of the summary says so."""


class GaeSettings(Section):
    """Length-adaptive traces (eq:masked-gae), and what they are measured in."""

    alpha: float = Field(1.0, ge=1e-6, le=1e6)
    """λ(L) = 1 − 1/(αL); every reachable length must keep λ in [0, 1]."""

    unit: Literal["run", "position"] = "run"
    """What advantages are divided by before the pilot's deviation: nothing (the paper), or, in a group, how far the
    whole returns of the *other* thoughts at the position lie apart, so that places where thoughts differ little count
    for more, up to √G times (`quiet-star-grpo` makes all places alike). No action of the thought changes it."""


class RatioSettings(Section):
    """Which law stands under the ratio, and what is done about the gap between the sampler and the recomputed
    policy."""

    denominator: Literal["recomputed", "scored", "sampler"] = "recomputed"
    """`recomputed`: π_old from the training forward, so that the first update's ratios are 1. `scored`: π_old from the
    pass that scores, which costs nothing more and rounds otherwise (parity mode recomputes). `sampler`: the law the
    thought was actually drawn from."""

    correction: Literal["none", "truncated", "mask"] = "none"
    """`truncated`: multiply by min(π_old/q, cap). `mask`: drop tokens with π_old/q outside [1/cap, cap]."""

    cap: float = Field(2.0, ge=1, le=1e6)
    """Bound used by the correction."""

    @model_validator(mode="after")
    def _sampler_needs_no_correction(self) -> RatioSettings:
        if self.denominator == "sampler" and self.correction != "none":
            raise ValueError(
                f"correction = {self.correction} corrects the recomputed denominator; use ratio.correction = none or "
                "ratio.denominator = recomputed"
            )
        return self


class ActorSettings(Section):
    """What of the actor is trained, and its clipped-PPO step (eq:ppo)."""

    adapt: Literal["full", "lora"] = "full"
    """`full`: every weight of the model. `lora`: low-rank updates of its linear layers; the model itself is frozen and
    there once, for actor, base model, teacher and critics together."""

    lora_rank: int = Field(16, ge=1, le=4096)
    """Rank of each low-rank update."""

    lora_targets: Literal["all", "attention", "mlp"] = "all"
    """Linear layers of every block that are updated: all, those of attention (and of recurrent layers), or those of the
    feed-forward part."""

    clip_low: float = Field(0.8, ge=1e-6, le=1)
    """ρ₋: below it, negative advantages stop pushing."""

    clip_high: float = Field(1.28, ge=1, le=1e6)
    """ρ₊: above it, positive advantages stop pushing."""

    reuse_passes: int = Field(2, ge=1, le=1000)
    """Passes over the window's actor trajectories."""

    minibatches: int = Field(4, ge=1, le=100_000)
    """Optimizer steps per pass."""


class AnchorSettings(Section):
    """Likelihood losses beside the policy gradient."""

    next_token: float = Field(1.0, ge=0, le=100)
    """Weight of the next-token loss on the text itself; 0 leaves it out."""

    lr: float | None = Field(None, ge=1e-12, le=1)
    """Peak learning rate of the anchors alone; none: one update of policy and anchors together by `optimizer.lr`. With
    a rate each step is two updates with moments of their own, the policy's by `optimizer.lr`, then the anchors': AdamW
    takes steps of the same size whatever a loss weighs, so weights alone cannot slow one of them down."""

    answers: bool = True
    """Whether the next-token loss also takes the H tokens after every selected position; `false` leaves them out, so
    that few answers that come again and again are not learned by heart."""

    conditioned: float = Field(0.0, ge=0, le=100)
    """Weight of the next-token loss on the continuation given the thought; 0 leaves it out."""

    mixture: float = Field(0.0, ge=0, lt=1)
    """Share of the prediction after the thought in a mixture with the one without it, whose loss the conditioned anchor
    takes; only the former learns from it. 0: the prediction after the thought stands alone."""

    def without_thoughts(self) -> AnchorSettings:
        """What of these a method without thoughts can use: the anchor on the text itself."""
        return AnchorSettings(next_token=self.next_token, answers=self.answers)


class OptimizerSettings(Section):
    """AdamW and its schedule. All keys but `gate_lr` are keyword arguments of `rl.optimizer.MasterOptimizer`."""

    lr: float = Field(1e-5, ge=1e-12, le=1)
    """Peak learning rate."""

    gate_lr: float = Field(1e-2, ge=1e-12, le=1)
    """Peak learning rate of the reading gates (`thought.reading = gated`); it follows the same schedule as `lr`."""

    weight_decay: float = Field(0.0, ge=0, le=10)
    """Decoupled decay; norms, biases and other vectors are left out."""

    clip_norm: float | None = Field(1.0, ge=1e-4, le=1e6)
    """Largest global gradient norm; none = no clipping."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; `linear` and `cosine` end at 0."""

    warmup_steps: int = Field(0, ge=0, le=1_000_000_000)
    """Updates of linear warm-up."""

    bf16_update: Literal["master", "stochastic"] = "master"
    """How bfloat16 weights are trained: with a float32 master copy, or alone (4 bytes less) by stochastic rounding."""

    moments: Literal["float32", "bfloat16"] = "float32"
    """Precision of AdamW's two moments of the actor; bfloat16 halves them, rounded stochastically."""


class GateSettings(Section):
    """The prediction gate β_g and its loss (app:gate-behavior)."""

    no_harm: float = Field(1.0, ge=0, le=1e3)
    """Weight of the penalty on predictions that the mixture makes worse."""

    utility: float = Field(0.1, ge=0, le=1e3)
    """Weight per nat of the term that ties the gate to the signed utility of the thought."""

    lr: float = Field(1e-3, ge=1e-12, le=1)
    """Learning rate of the gate."""

    passes: int = Field(2, ge=0, le=1000)
    """Passes over a window's actor trajectories; with 0 there is no gate, and no mixed gain is reported."""
