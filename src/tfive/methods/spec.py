"""What a method declares about itself.

Everything outside a method's own file (configuration, rules, assembly, memory estimate, cost count, comparison, command
line, documentation) reads a `MethodSpec` and never tests a method's name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tfive.section import Section

Rule = Callable[[Any], str | None]
"""A check of a whole configuration: None, or one line that names the key, its value and the remedy."""

CRITIC_ROLES = ("critic_fit", "qualify", "pilot", "head_train", "head_validate", "actor")
"""Roles whose trajectories critics evaluate, where a method draws them."""


@dataclass(frozen=True, kw_only=True)
class MethodSpec:
    """One training method. Only `name`, `summary` and `method` have to be given."""

    name: str
    """What `method = "…"` and `--methods` call it."""

    summary: str
    """One line for lists and pages."""

    method: type[Any] | str
    """The subclass of `methods.method.Method`, or `module:Class`, which is imported when a run is built."""

    page: str = ""
    """Its page below `docs/`; empty for methods of other packages."""

    settings: type[Section] | None = None
    """Settings of its own; they appear in the configuration as the section `section`."""

    section: str = ""
    """Name of that section."""

    uses: tuple[str, ...] = ()
    """Sections of the configuration that this method reads beyond those of every method. Ablations that are asked of a
    method without the section they change are refused."""

    trains: bool = True
    """Whether anything is updated."""

    thinks: bool = True
    """Whether thoughts are sampled."""

    rewarded: bool = True
    """Whether a policy gradient rewards them."""

    group: int = 1
    """G, thoughts sampled at each position unless `thought.group` says otherwise; above 1 they are compared."""

    scoring: Literal["checkpoints", "next_token"] = "checkpoints"
    """What is scored: H tokens after every checkpoint, or the one token after the whole thought."""

    critics: int = 0
    """How many critics it fits."""

    roles: Callable[[Any], tuple[str, ...]] | tuple[str, ...] = ("actor",)
    """Roles drawn in every window, by configuration where that matters. How many trajectories each gets is
    `WindowSettings.count`, the same for every method, since the methods of a comparison share one prepared corpus. A
    role that is not declared cannot be drawn: its texts are the actor's."""

    first_roles: Callable[[Any], tuple[str, ...]] | tuple[str, ...] = ()
    """Roles drawn in a run's first window and not in every later one."""

    recorded: tuple[str, ...] = ("actor",)
    """Roles whose log π_old is kept; `rl.settings.OLD_LAW` says from which pass."""

    averages: tuple[str, ...] = ()
    """Moving averages of all weights that it keeps (a float32 average and a compute copy each); each reads every text
    once without a thought."""

    rules: tuple[Rule, ...] = ()
    """Checks beyond those that follow from this declaration."""

    def roles_of(self, config: Any) -> tuple[str, ...]:
        """Roles drawn in every window under this configuration."""
        return self.roles(config) if callable(self.roles) else self.roles

    def first_roles_of(self, config: Any) -> tuple[str, ...]:
        """Roles that only the first window is sure to draw under this configuration."""
        return self.first_roles(config) if callable(self.first_roles) else self.first_roles

    def settings_of(self, config: Any) -> Any:
        """Its own section of a configuration; its defaults in one that was made before the method was registered."""
        if self.settings is None:
            raise ValueError(f"method {self.name} declares no settings; set MethodSpec.settings and section")
        return getattr(config, self.section, None) or self.settings()

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases of a window, in order."""
        method = self.load()
        return tuple(phase.name for phase in method.phases(method))

    def load(self) -> type[Any]:
        """The class that trains."""
        if not isinstance(self.method, str):
            return self.method
        module, _, name = self.method.partition(":")
        found: type[Any] = getattr(importlib.import_module(module), name)
        return found
