"""Rules of a run's course: what comes before the first window, which windows only read, how thoughts grow.

They are rules like those of `config/rules.py`, which says what a rule returns and collects them.
"""

from __future__ import annotations

from tfive.config.schema import Schema


def given_workings_have_places(config: Schema) -> str | None:
    """A warm start from given workings needs the pattern they stand after."""
    if config.warmstart.source != "given" or config.text.positions.pattern:
        return None
    return (
        "warmstart.source = given: text.positions.pattern is empty, so no working has a place; set it, or else; use "
        "warmstart.source = off, warmstart.path = none"
    )


def a_warm_start_trains_every_weight(config: Schema) -> str | None:
    """What a warm start learns becomes the base model, which low-rank updates leave as it is."""
    if config.actor.adapt == "full" or config.warmstart.source == "off":
        return None
    return (
        "actor.adapt = lora: a warm start trains every weight of the model; use actor.adapt = full or "
        "warmstart.source = off and warmstart.path = none"
    )


def the_actor_is_released_within_the_run(config: Schema) -> str | None:
    """Windows of reading end before the run does."""
    reading, windows = config.reading_windows, config.window.windows
    if not config.spec.rewarded or reading < windows:
        return None
    if reading > config.window.reading:
        return (
            f"window.windows = {windows}: with thought.reading = gated the first {reading} only opens the gates and "
            f"nothing would reward a thought; use window.windows ≥ {reading + 1}"
        )
    return (
        f"window.reading = {reading}: the run has {windows} windows and nothing would reward a thought; "
        f"use window.windows ≥ {reading + 1} or window.reading ≤ {windows - 1} or method = anchor-only"
    )


def thoughts_have_lengths_to_grow_through(config: Schema) -> str | None:
    """A curriculum goes from checkpoint to checkpoint, and ends before the run does."""
    asked, windows, checkpoints = config.window.curriculum, config.window.windows, list(config.thought.checkpoints)
    if not asked or not config.spec.trains:
        return None
    if len(checkpoints) == 1:
        half = config.thought.length // 2
        shorter = f" or thought.checkpoints = [{half}, {config.thought.length}]" if half else ""
        return (
            f"window.curriculum = {asked}: thought.checkpoints = {checkpoints} is one length, nothing to grow through; "
            f"use window.curriculum = 0{shorter}"
        )
    if asked < windows:
        return None
    return (
        f"window.curriculum = {asked}: the run has {windows} windows and would end before thoughts have their whole "
        f"length; use window.windows ≥ {asked + 1} or window.curriculum ≤ {windows - 1}"
    )


def a_pilot_can_tell_thoughts_apart(config: Schema) -> str | None:
    """Positions are placed before the first window, when gates that no warm start has opened are shut."""
    share = config.text.positions.variance
    if not share or not config.gates_start_shut or not (config.spec.trains and config.spec.thinks):
        return None
    random = "" if config.text.positions.shares()["uniform"] > share else " and text.positions.uniform = 1"
    return (
        f"text.positions.variance = {share:g}: with thought.reading = gated all thoughts gain the same before the "
        "first window; use warmstart.source = hindsight or thought.reading = inline or text.positions.variance = 0"
        f"{random}"
    )


def a_rate_that_falls_knows_its_end(config: Schema) -> str | None:
    """A schedule goes by the steps of the plan, which a clock may cut short."""
    if config.run.seconds is None or config.optimizer.schedule == "constant":
        return None
    return (
        f"run.seconds = {config.run.seconds:g}: optimizer.schedule = {config.optimizer.schedule} ends with the last "
        "step of the plan, which the clock may keep it from; use optimizer.schedule = constant or run.seconds = none"
    )


COURSE_RULES = (
    given_workings_have_places,
    a_warm_start_trains_every_weight,
    a_pilot_can_tell_thoughts_apart,
    the_actor_is_released_within_the_run,
    thoughts_have_lengths_to_grow_through,
    a_rate_that_falls_knows_its_end,
)
