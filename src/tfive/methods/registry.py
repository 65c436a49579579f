"""The one registry of methods.

A method of one's own is registered from any module, by `register` or by the entry-point group `tfive.methods`, and is
then an ordinary `method = "…"` for every command.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points

from tfive.errors import UserError
from tfive.methods.builtin import SPECS
from tfive.methods.spec import MethodSpec

ENTRY_POINTS = "tfive.methods"
"""Entry-point group whose objects are `MethodSpec`s of other packages."""

_REGISTRY: dict[str, MethodSpec] = {}
_LISTENERS: list[Callable[[MethodSpec], None]] = []


def register(spec: MethodSpec) -> MethodSpec:
    """Make a method known under its name; returns the spec, so that a module can keep it."""
    if spec.name in _REGISTRY and _REGISTRY[spec.name] != spec:
        raise UserError(f"method {spec.name} is registered twice; give one of them another name")
    if (spec.settings is None) != (not spec.section):
        raise UserError(f"method {spec.name}: settings and section belong together; give both or neither")
    taken = next((other.name for other in _REGISTRY.values() if other.section and other.section == spec.section), None)
    if taken not in (None, spec.name):
        raise UserError(f"method {spec.name}: section {spec.section} is already that of {taken}; use another name")
    _REGISTRY[spec.name] = spec
    for listener in _LISTENERS:
        listener(spec)
    return spec


def on_register(listener: Callable[[MethodSpec], None]) -> None:
    """Call `listener` with every method: those known already, and each later one when it is registered."""
    for spec in methods().values():
        listener(spec)
    _LISTENERS.append(listener)


def methods() -> dict[str, MethodSpec]:
    """Every method by name: built in, from entry points of installed packages, and registered by hand."""
    _discover()
    return dict(_REGISTRY)


def spec_of(name: str) -> MethodSpec:
    """The method of this name."""
    known = methods()
    if name not in known:
        raise UserError(f"method = {name}: no such method; use one of {', '.join(known)}")
    return known[name]


@cache
def _discover() -> None:
    """Register what ships with the package, then what installed packages offer."""
    for spec in SPECS:
        register(spec)
    for entry in entry_points(group=ENTRY_POINTS):
        found = entry.load()
        if not isinstance(found, MethodSpec):
            raise UserError(f"entry point {entry.name} = {entry.value}: no MethodSpec; see docs/howto/add-a-method.md")
        register(found)
