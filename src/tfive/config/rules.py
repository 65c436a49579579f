"""Rules that span several settings, checked before anything runs. Each is one function and one message.

A rule returns None, or one line that names the key, its value and, after the last semicolon, the remedy: `use KEY =
VALUE`, `KEY ≤ VALUE` or `KEY ≥ VALUE`, several joined by `and`, alternatives by `or`. A test applies every remedy: what
a rule recommends, it accepts. Rules within one section live beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tfive.config.course_rules import COURSE_RULES
from tfive.config.schema import Schema
from tfive.rl.settings import TRAINING_ROLES

SHORTEST_TEXT = 12
"""Tokens of a text that the admission probe needs (`tree.admission`)."""

Rule = Callable[[Schema], str | None]
RULES: list[Rule] = [*COURSE_RULES]


def rule(function: Rule) -> Rule:
    """Register a rule."""
    RULES.append(function)
    return function


def problems(config: Schema) -> list[str]:
    """One line per broken rule, in the order of declaration."""
    return [message for check in (*RULES, *config.spec.rules) if (message := check(config)) is not None]


@rule
def trace_decay_lies_between_0_and_1(config: Schema) -> str | None:
    """`0 ≤ λ(L) = 1 − 1/(αL) ≤ 1` for every reachable thought length (`eq:masked-gae`)."""
    fixed = config.window.longest_thought(1, config.thought.checkpoints)
    shortest = 1 if config.thought.variable_length else fixed
    alpha = config.gae.alpha
    if alpha * shortest >= 1:
        return None
    decay = 1 - 1 / (alpha * shortest)
    return (
        f"gae.alpha = {alpha:g}: λ(L) = 1 − 1/(αL) is {decay:.3g} at thought length {shortest}, which can be reached; "
        f"use gae.alpha ≥ {math.ceil(1e4 / shortest) / 1e4:g}"
    )


@rule
def a_rate_of_anchors_has_anchors(config: Schema) -> str | None:
    """`anchor.lr` is the rate of updates that something must make."""
    if config.anchor.lr is None or config.anchor.next_token or config.anchor.conditioned:
        return None
    return (
        f"anchor.lr = {config.anchor.lr:g}: both anchors are 0, nothing to update; use anchor.next_token = 1 or "
        "anchor.lr = none"
    )


@rule
def texts_are_long_enough_for_the_probe(config: Schema) -> str | None:
    """The admission of a model reads three positions with a continuation each."""
    length = config.text.sequence_length
    if length >= SHORTEST_TEXT:
        return None
    return (
        f"text.sequence_length = {length}: the check of the model takes {SHORTEST_TEXT} tokens; "
        f"use text.sequence_length ≥ {SHORTEST_TEXT}"
    )


@rule
def continuation_fits_in_the_sequence(config: Schema) -> str | None:
    """`p + H ≤ S` for at least the first allowed position."""
    horizon, length = config.thought.horizon, config.text.sequence_length
    if horizon < length:
        return None
    return (
        f"thought.horizon = {horizon}: p + H ≤ S fails already at position 1 of sequences of {length} tokens; "
        f"use {_shorter_horizon(config)}text.sequence_length ≥ {_length_needed(config)}"
    )


def _length_needed(config: Schema) -> int:
    """S for P positions at their least distance, with a continuation after the last."""
    gap = config.text.positions.min_gap or config.thought.horizon
    return max(SHORTEST_TEXT, gap * (config.text.positions.per_text - 1) + config.thought.horizon + 1)


def _shorter_horizon(config: Schema) -> str:
    """The longest horizon with which all positions fit, as one way out; empty where there is none."""
    positions, length = config.text.positions, config.text.sequence_length
    by_gap = None if positions.min_gap is None else length - 1 - positions.min_gap * (positions.per_text - 1)
    most = (length - 1) // positions.per_text if by_gap is None else by_gap
    return f"thought.horizon ≤ {most} or " if most >= 1 else ""


@rule
def positions_fit_in_the_sequence(config: Schema) -> str | None:
    """P positions at their least distance, with a continuation after the last."""
    positions = config.text.positions
    gap = positions.min_gap or config.thought.horizon
    most = (config.text.sequence_length - config.thought.horizon - 1) // gap + 1
    if positions.per_text <= most or most < 1:
        return None
    return (
        f"text.positions.per_text = {positions.per_text}: at most {most} positions {gap} tokens apart fit in "
        f"{config.text.sequence_length} tokens; use text.positions.per_text ≤ {most} or "
        f"text.sequence_length ≥ {_length_needed(config)}"
    )


def texts_needed(config: Schema, role: str) -> int:
    """Sequences that `role` takes in one window when every sequence gives all its positions."""
    return math.ceil(config.window.count(role) / config.text.positions.per_text)


@rule
def training_roles_fit_in_the_training_split(config: Schema) -> str | None:
    """Roles go to whole texts and share none, so a window needs that many different ones."""
    needed = sum(config.window.training_texts(config.text.positions.per_text).values())
    available = config.text.sequences.train
    if needed <= available:
        return None
    most = _most_items(config, available)
    fewer = f"window.items ≤ {most} or " if most else ""
    return (
        f"window.items = {config.window.items}: one window's roles need {needed} training sequences, "
        f"text.sequences.train has {available}; use {fewer}text.sequences.train ≥ {needed}"
    )


def _most_items(config: Schema, available: int) -> int:
    """The largest N whose roles fit in so many sequences, by bisection; 0 where not even one item does."""
    low, high = 0, config.window.items
    while high - low > 1:
        middle = (low + high) // 2
        tried = config.model_copy(update={"window": config.window.model_copy(update={"items": middle})})
        fits = sum(texts_needed(tried, role) for role in TRAINING_ROLES) <= available
        low, high = (middle, high) if fits else (low, middle)
    return low


@rule
def qualification_fits_in_the_calibration_split(config: Schema) -> str | None:
    """A fresh test takes its texts from the calibration split."""
    needed, available = texts_needed(config, "qualify"), config.text.sequences.calibration
    if needed <= available:
        return None
    return (
        f"window.qualify = {config.window.qualify:g}: a test needs {needed} calibration sequences, "
        f"text.sequences.calibration has {available}; use text.sequences.calibration ≥ {needed} or "
        f"window.qualify ≤ {0.99 * available * config.text.positions.per_text / config.window.items:.2g}"
    )


@rule
def development_items_exist(config: Schema) -> str | None:
    """Progress is measured on items the development split can hold."""
    most = config.text.sequences.development * config.text.positions.per_text
    if config.run.develop_items <= most:
        return None
    needed = max(2, math.ceil(config.run.develop_items / config.text.positions.per_text))
    fewer = f"run.develop_items ≤ {most} or " if most >= 2 * config.text.positions.per_text else ""
    return (
        f"run.develop_items = {config.run.develop_items}: the development split holds {most} items; "
        f"use {fewer}text.sequences.development ≥ {needed}"
    )


@rule
def development_items_lie_in_several_texts(config: Schema) -> str | None:
    """Content gain needs another text's thought for every item."""
    least = 2 * config.text.positions.per_text
    if config.run.develop_items >= least:
        return None
    return (
        f"run.develop_items = {config.run.develop_items}: controls take thoughts of other texts, and one text may hold "
        f"{config.text.positions.per_text} items; use run.develop_items ≥ {least}"
    )


@rule
def roles_of_the_method_are_filled(config: Schema) -> str | None:
    """Critics, normaliser and calibration each need trajectories of their own."""
    wanted = (*config.spec.roles_of(config), *config.spec.first_roles_of(config))
    known = (*TRAINING_ROLES, "qualify")
    unknown = next((role for role in wanted if role not in known), None)
    if unknown is not None:
        return f"method = {config.method}: it declares the role {unknown}, which is none of {', '.join(known)}; mend it"
    empty = next((role for role in wanted if config.window.count(role) == 0), None)
    if empty is None:
        return None
    key = config.window.key_of(empty)
    usual = type(config.window).model_fields[key.rpartition(".")[2]].default
    return f"{key} = 0: method {config.method} needs trajectories of the role {empty}; use {key} = {usual}"


@rule
def group_suits_the_method(config: Schema) -> str | None:
    """Group-relative methods compare at least two thoughts; methods with critics may draw several, the others one."""
    group, method, usual = config.group, config.method, config.spec.group
    if usual > 1 and group < 2:
        return f"thought.group = {group}: method {method} compares thoughts of a position; use thought.group = {usual}"
    if usual == 1 and not config.spec.critics and group > 1:
        return f"thought.group = {group}: method {method} samples one thought per position; use thought.group = 1"
    return None


@rule
def the_others_are_there(config: Schema) -> str | None:
    """A thought that stands alone has no others for critics to see, and a single other one lies apart from nobody."""
    least = 3 if config.gae.unit == "position" else 2 if config.critic.sees == "group" else 1
    if not config.spec.critics or config.group >= least:
        return None
    asked = "gae.unit = position" if least == 3 else "critic.sees = group"
    return f"{asked}: it needs {least} thoughts at each position or more; use thought.group = 8"


@rule
def whole_critics_stand_on_nothing(config: Schema) -> str | None:
    """A critic that runs every block itself reads no other model's features."""
    if config.critic.features == "base" or config.critic.adapt != "full":
        return None
    return "critic.features = policy: critic.adapt = full runs every block itself; use critic.adapt = top"


@rule
def critics_apart_stand_on_the_base(config: Schema) -> str | None:
    """Processes that have a critic alone do not have the policy."""
    if config.critic.features == "base" or config.distributed.profile == "single":
        return None
    return (
        f"critic.features = policy: with distributed.profile = {config.distributed.profile} critics have processes "
        "without the policy; use critic.features = base"
    )


@rule
def a_single_critic_is_no_pair(config: Schema) -> str | None:
    """Disjoint and bracketing pairs say how two critics differ."""
    if config.spec.critics != 1 or config.critic.pair == "same":
        return None
    return f"critic.pair = {config.critic.pair}: method {config.method} has one critic; use critic.pair = same"


@rule
def ablations_change_something(config: Schema) -> str | None:
    """What changes calibration or qualification would silently change nothing in a method without them."""
    uses = config.spec.uses
    usual = {
        "calibration.mode": (config.calibration.mode, "learned"),
        "calibration.score_centering": (config.calibration.score_centering, False),
        "calibration.certified": (config.calibration.certified, False),
        "qualify.rule": (config.qualify.rule if config.qualify.rule == "fixed" else "strict", "strict"),
    }
    for key, (value, default) in usual.items():
        if value != default and key.split(".")[0] not in uses:
            shown, instead = (str(one).lower() for one in (value, default))
            return f"{key} = {shown}: method {config.method} has no such step; use method = t5 or {key} = {instead}"
    return None


@rule
def a_foreign_reference_needs_critics(config: Schema) -> str | None:
    """Inside a group a reference that all share cancels, and one that a member lends would tell of it to the others;
    without rewards there is none."""
    reference, method = config.reward.reference, config.method
    if reference == "no_thought" or (config.spec.critics and config.group == 1):
        return None
    why = f"it draws groups of {config.group}" if config.spec.critics else "it has no critic"
    return f"reward.reference = {reference}: of no use to method {method}: {why}; use reward.reference = no_thought"


@rule
def minibatches_are_not_empty(config: Schema) -> str | None:
    """Every PPO step gets at least one text."""
    texts = texts_needed(config, "actor")
    if config.actor.minibatches <= texts:
        return None
    return (
        f"actor.minibatches = {config.actor.minibatches}: the actor role has {texts} texts a window; "
        f"use actor.minibatches ≤ {texts}"
    )


@rule
def actor_steps_are_within_the_reuse(config: Schema) -> str | None:
    """Reuse is bounded: a window never takes more steps than its passes allow."""
    most = config.actor.reuse_passes * config.actor.minibatches
    if config.window.actor_steps <= most:
        return None
    return (
        f"window.actor_steps = {config.window.actor_steps}: {config.actor.reuse_passes} passes of "
        f"{config.actor.minibatches} minibatches give {most}; use window.actor_steps ≤ {most}"
    )


@rule
def warmup_ends_within_the_run(config: Schema) -> str | None:
    """The learning rate reaches its peak before the last step."""
    steps = config.window.windows * config.window.actor_steps
    if config.optimizer.warmup_steps < steps:
        return None
    said = f"optimizer.warmup_steps = {config.optimizer.warmup_steps}: the run takes {steps} steps"
    return f"{said}; use optimizer.warmup_steps ≤ {steps - 1}"


@rule
def ratio_correction_leaves_room(config: Schema) -> str | None:
    """A cap of 1 would weigh or drop every action whose two log-probabilities differ at all."""
    if config.ratio.correction == "none" or config.ratio.cap > 1:
        return None
    return (
        f"ratio.cap = {config.ratio.cap:g}: ratio.correction = {config.ratio.correction} needs a cap above 1; "
        "use ratio.cap = 2 or ratio.correction = none"
    )


@rule
def bfloat16_weights_are_rounded_stochastically(config: Schema) -> str | None:
    """Weights kept in bfloat16 are allowed only with stochastic rounding, which in turn means nothing in float32."""
    if config.optimizer.bf16_update != "stochastic" or config.model.compute != "float32":
        return None
    return (
        "optimizer.bf16_update = stochastic: model.compute is float32, so nothing is rounded; "
        "use model.compute = bfloat16 or optimizer.bf16_update = master"
    )


@rule
def the_actor_learns_something(config: Schema) -> str | None:
    """Without a policy gradient an anchor must carry the method; mixing and reading are the conditioned anchor's."""
    anchor = config.anchor
    if anchor.mixture > 0 and anchor.conditioned == 0:
        said = f"anchor.mixture = {anchor.mixture:g}: only the conditioned anchor mixes"
        return f"{said}; use anchor.conditioned = 1 or anchor.mixture = 0"
    if config.window.reading > 0 and anchor.conditioned == 0:
        said = f"window.reading = {config.window.reading}: nothing would teach reading"
        return f"{said}; use anchor.conditioned = 1 or window.reading = 0"
    spec, name = config.spec, config.method
    if spec.rewarded or not spec.trains:
        return None
    if not spec.thinks and anchor.next_token == 0:
        return f"anchor.next_token = 0: method {name} trains by this loss alone; use anchor.next_token = 1"
    if anchor.next_token == anchor.conditioned == 0:
        said = f"anchor.next_token = 0: method {name} needs an anchor"
        return f"{said}; use anchor.next_token = 1 or anchor.conditioned = 1"
    return None


@rule
def gates_can_open(config: Schema) -> str | None:
    """Only the conditioned anchor reads thoughts with gradients, so only it opens gates that start shut."""
    spec, anchor = config.spec, config.anchor
    if not config.gates_start_shut or not (spec.trains and spec.thinks) or anchor.conditioned > 0:
        return None
    return (
        "thought.reading = gated: the gates start shut and nothing would open them; use anchor.conditioned = 1 or "
        "warmstart.source = hindsight or thought.reading = inline"
    )


@rule
def there_is_text(config: Schema) -> str | None:
    """A run needs at least one source."""
    if config.text.sources:
        return None
    return "text.sources = []: no text; name a preset or give a source, e.g. [[text.sources]] with name and path"


@rule
def begun_thoughts_can_be_continued(config: Schema) -> str | None:
    """Probes and repeated continuations go on from begun thoughts, which parity sampling and groups cannot."""
    if config.sampling.parity:
        why = "parity sampling draws whole thoughts"
    elif config.group > 1 and "calibration" in config.spec.uses:
        why = f"groups of {config.group} are drawn whole"
    else:
        return None
    if config.calibration.mode == "repeated":
        return f"calibration.mode = repeated: {why}; use calibration.mode = learned"
    if config.window.probe == 0:
        return None
    return f"window.probe = {config.window.probe:g}: {why}; use window.probe = 0"


@rule
def bounds_hold_by_construction(config: Schema) -> str | None:
    """Hoeffding limits and certificates need bounds on the actual signal, which bounded heads give
    (`eq:moment-statistical-bound`)."""
    settings = config.calibration
    if settings.bounds != "enforce" and not settings.certified:
        return None
    if config.critic.bounded and settings.mean_bound is not None:
        return None
    key = "certified = true" if settings.certified else "bounds = enforce"
    remedy = f"use critic.bounded = true and calibration.mean_bound = {2 * config.reward.clip:g}"
    return f"calibration.{key}: nothing bounds the signal; {remedy}"
