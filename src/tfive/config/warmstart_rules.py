"""Rules of the warm start, as those of `rules.py`."""

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
