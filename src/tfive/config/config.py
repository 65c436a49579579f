"""The whole configuration, resolved from presets, TOML files and `--set`.

Layers, weakest first: the defaults beside the code, then presets and files left to right, then `--set`. Every resolved
value knows which of them it came from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tfive.config import layers
from tfive.config.former_keys import FORMER_PRESETS
from tfive.config.layers import Leaf
from tfive.config.rules import problems
from tfive.config.schema import Schema
from tfive.errors import UserError
from tfive.methods.registry import methods, on_register
from tfive.methods.spec import MethodSpec

DEFAULT = "nano"
"""The preset taken when none is named."""


class Config(Schema):
    """The whole configuration of a run. Sections are documented where they are declared; each method adds its own."""

    @classmethod
    def load(cls, *sources: str | Path, overrides: Sequence[str] = ()) -> Config:
        """The configuration of these presets and TOML files with these `key=value` overrides, checked by every rule."""
        return resolve(sources, overrides).checked()

    def leaves(self) -> dict[str, Any]:
        """Dotted key → plain value, in the order of declaration."""
        # A method that was registered after this configuration was made has its defaults in it.
        document = Config().model_dump(mode="json") | self.model_dump(mode="json")
        found = {}
        for key in layers.leaf_fields(Config):
            value: Any = document
            for part in key.split("."):
                value = value[part]
            found[key] = value
        return found

    def to_toml(self) -> str:
        """A TOML document from which `Config.load` gives an equal configuration."""
        return layers.to_toml({key: Leaf(value, "") for key, value in self.leaves().items()}, comments=False)


def _add_section(spec: MethodSpec) -> None:
    """Give `Config` the section of a method, with its defaults."""
    if spec.settings is None:
        return
    known = Config.model_fields.get(spec.section)
    if known is not None and known.annotation is spec.settings:
        return
    if known is not None or hasattr(Config, spec.section):
        raise UserError(f"method {spec.name}: section {spec.section} is taken by the configuration; use another name")
    field = FieldInfo.from_annotated_attribute(spec.settings, spec.settings())
    Config.__pydantic_fields__[spec.section] = field
    Config.__annotations__[spec.section] = spec.settings
    Config.model_rebuild(force=True)


on_register(_add_section)


@dataclass(frozen=True)
class Resolved:
    """A configuration, and for every dotted key where its value came from."""

    config: Config
    origins: dict[str, str]

    def checked(self) -> Config:
        """The configuration, once every cross-field rule holds."""
        found = problems(self.config)
        if found:
            rest = f" (and {len(found) - 1} more: see tfive config check)" if len(found) > 1 else ""
            raise UserError(found[0] + rest)
        return self.config

    def to_toml(self, explain: bool = False, keys: Collection[str] | None = None) -> str:
        """The configuration (or these `keys` of it) as TOML, each value with its origin as a comment, below its
        meaning if `explain`."""
        leaves = {key: Leaf(value, self.origins[key]) for key, value in self._leaves(keys).items()}
        return layers.to_toml(leaves, meanings=meanings() if explain else {})

    def _leaves(self, keys: Collection[str] | None) -> dict[str, Any]:
        return {key: value for key, value in self.config.leaves().items() if keys is None or key in keys}

    def to_dict(self, explain: bool = False, keys: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """Dotted key → value, origin and, if `explain`, meaning."""
        meaning = meanings()
        return {
            key: {"value": value, "origin": self.origins[key]} | ({"meaning": meaning[key]} if explain else {})
            for key, value in self._leaves(keys).items()
        }


def meanings() -> dict[str, str]:
    """Dotted key → what it means, as written below its declaration."""
    return {key: " ".join((field.description or "").split()) for key, field in layers.leaf_fields(Config).items()}


def presets() -> dict[str, str]:
    """Name → TOML text of every preset of a whole run: a model, its text, its settings."""
    return {name: text for name, text in _shipped().items() if _names_a_model(text)}


def variants() -> dict[str, str]:
    """Name → TOML text of every preset that changes a method and goes after one of a whole run."""
    return {name: text for name, text in _shipped().items() if not _names_a_model(text)}


def _shipped() -> dict[str, str]:
    folder = files("tfive.config").joinpath("presets")
    found = {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
    return {name: found[name].read_text("utf-8") for name in sorted(found)}


def _names_a_model(text: str) -> bool:
    return "\n[model]\n" in text


def read_source(source: str | Path) -> dict[str, Leaf]:
    """The leaves of a preset (by name) or of a TOML file (by path)."""
    path = Path(source)
    known = _shipped()
    name = str(source)
    if name in known:
        return layers.read_toml(known[name], Config, f"preset {name}", by_line=False)
    if path.suffix == ".toml" or path.exists():
        return _read_file(path)
    if name in FORMER_PRESETS:
        raise UserError(f"{source}: this preset {FORMER_PRESETS[name]}")
    close = layers.meant(name, list(known), "name one of those")
    raise UserError(
        f"{source}: no such preset; {close} (presets: {', '.join(presets())}; "
        "all with tfive config presets; files end in .toml)"
    )


def _read_file(path: Path) -> dict[str, Leaf]:
    """The leaves of a file. If one is refused and the file's method is not known here, the method is the reason: its
    section came from a package that is not installed."""
    try:
        return layers.read_file(path, Config)
    except UserError as error:
        method = layers.top_level_value(path, "method")
        if not isinstance(method, str) or method in methods():
            raise
        raise UserError(
            f"method = {method} ({path}): no such method here; install the package that registers it, or use one of "
            f"{', '.join(methods())}"
        ) from error


def resolve(sources: Sequence[str | Path], overrides: Sequence[str] = ()) -> Resolved:
    """Merge and validate; types and single values are judged here, cross-field rules by `Resolved.checked`."""
    named = [str(source) for source in sources or (DEFAULT,)]
    if all(name in variants() for name in named):
        raise UserError(
            f"{named[0]} is a variant and says nothing of model and text; name a whole run before it: "
            f"{DEFAULT} {' '.join(named)}"
        )
    written = [read_source(source) for source in sources or (DEFAULT,)]
    merged = layers.merge([*written, *(layers.read_override(argument, Config) for argument in overrides)])
    try:
        config = Config.model_validate_json(layers.as_json(merged), strict=True)
    except ValidationError as error:
        lines = layers.explain(error, merged, Config)
        raise UserError("; ".join(lines)) from error
    origins = {key: merged[key].origin if key in merged else "default" for key in layers.leaf_fields(Config)}
    return Resolved(config, origins)
