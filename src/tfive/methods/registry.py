"""The one registry of methods.

A method of one's own is registered from any module, by `register` or by the entry-point group `tfive.methods`, and is
then an ordinary `method = "…"` for every command.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from tfive.errors import UserError
from tfive.methods.builtin import SPECS
from tfive.methods.spec import MethodSpec
from tfive.section import Section

ENTRY_POINTS = "tfive.methods"
"""Entry-point group whose objects are `MethodSpec`s of other packages."""

_REGISTRY: dict[str, MethodSpec] = {}
_LISTENERS: list[Callable[[MethodSpec], None]] = []
_NAME, _SECTION = re.compile(r"[A-Za-z0-9][\w.-]*"), re.compile(r"[a-z][a-z0-9_]*")
"""What a method and a section may be called: `--methods` separates names by `,` and settings by `+`."""


def register(spec: MethodSpec) -> MethodSpec:
    """Make a method known under its name; returns the spec, so that a module can keep it."""
    _discover()
    return _add(spec)


def _add(spec: MethodSpec) -> MethodSpec:
    if spec.name in _REGISTRY and _REGISTRY[spec.name] != spec:
        raise UserError(f"method {spec.name} is registered twice; give one of them another name")
    if not _NAME.fullmatch(spec.name):
        raise UserError(f"method {spec.name!r}: use letters, digits, '-', '_' and '.' in its name")
    _check_section(spec)
    # First the listeners: what one of them refuses is not registered.
    for listener in _LISTENERS:
        listener(spec)
    _REGISTRY[spec.name] = spec
    return spec


def _check_section(spec: MethodSpec) -> None:
    """Settings of a method stand in a section of their own, and every key of it has a default."""
    if (spec.settings is None) != (not spec.section):
        raise UserError(f"method {spec.name}: settings and section belong together; give both or neither")
    if spec.settings is None:
        return
    taken = next((other.name for other in _REGISTRY.values() if other.section == spec.section), None)
    if taken not in (None, spec.name):
        raise UserError(f"method {spec.name}: section {spec.section} is already that of {taken}; use another name")
    if not _SECTION.fullmatch(spec.section):
        raise UserError(f"method {spec.name}: section {spec.section!r}: use small letters, digits and '_'")
    if not (isinstance(spec.settings, type) and issubclass(spec.settings, Section)):
        raise UserError(f"method {spec.name}: settings {spec.settings!r} are no tfive.section.Section; derive from it")
    required = [key for key, field in spec.settings.model_fields.items() if field.is_required()]
    if required:
        raise UserError(f"method {spec.name}: {spec.section}.{required[0]} has no default; give it one")


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


_undiscovered: list[MethodSpec | EntryPoint] = [*SPECS, *entry_points(group=ENTRY_POINTS)]
"""What ships with the package, then what installed packages offer, until it is registered."""


def _discover() -> None:
    """Register what is not registered yet. An entry point's module may itself call `register` while it is loaded, so
    each is taken off the list first; one that fails is put back and named again by the next command."""
    while _undiscovered:
        found = _undiscovered.pop(0)
        try:
            _add(found if isinstance(found, MethodSpec) else _loaded(found))
        except BaseException:
            _undiscovered.insert(0, found)
            raise


def _loaded(entry: EntryPoint) -> MethodSpec:
    """The method of an entry point."""
    label = f"entry point {entry.name} = {entry.value}" + (f" of {entry.dist.name}" if entry.dist else "")
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"{label}: {error}; repair or remove that package") from error
    if not isinstance(found, MethodSpec):
        raise UserError(f"{label}: no MethodSpec; see docs/howto/add-a-method.md")
    return found
