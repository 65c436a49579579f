"""Which keys a method reads, from what it declares: the others may be set and change nothing."""

from __future__ import annotations

from tfive.config.config import Config
from tfive.config.layers import leaf_fields
from tfive.methods.registry import methods
from tfive.methods.spec import MethodSpec
from tfive.rl.settings import DERIVED_ROLES

ALWAYS = frozenset(
    {"method", "model", "text", "thought", "sampling", "engine", "window", "run", "benchmarks", "distributed"}
)
"""Sections of every method: also one without thoughts is measured with them."""

_ROLE_KEYS = frozenset({"critic_fit", "qualify", "pilot", "head_train", "probe"})
"""Keys of `[window]` that give a role its share."""


def read_sections(spec: MethodSpec) -> set[str]:
    """The sections that a method reads."""
    found = {*ALWAYS, *spec.uses, *([spec.section] if spec.section else [])}
    if spec.trains:
        found |= {"actor", "anchor", "optimizer"}
    if spec.rewarded:
        found |= {"reward", "ratio"}
    return found | {"gate", "warmstart"} if spec.thinks else found


def read_keys(config: Config) -> set[str]:
    """The dotted keys that the method of a configuration reads.

    The shares of roles decide how the corpus is dealt out for every method, so that methods can be compared; what is
    left out of `[window]` are the shares of roles that this one never draws.
    """
    spec, sections = config.spec, read_sections(config.spec)
    roles = (*spec.roles_of(config), *spec.first_roles_of(config))
    drawn = {DERIVED_ROLES.get(role, (role, 1.0))[0] for role in roles}
    if "calibration" in spec.uses:
        drawn.add("probe")
    unread = {f"window.{key}" for key in _ROLE_KEYS - drawn}
    if not spec.rewarded:
        unread.add("window.reading")
    if not spec.critics:
        unread.add("window.history")
    if "calibration" not in spec.uses:
        unread.add("window.crossed")
    return {key for key in leaf_fields(Config) if key.split(".")[0] in sections} - unread


def readers(section: str) -> list[str] | None:
    """The methods that read a section, None if all do."""
    found = [spec.name for spec in methods().values() if section in read_sections(spec)]
    return None if len(found) == len(methods()) else found
