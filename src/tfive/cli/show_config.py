"""What `tfive config` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tfive.config.config import presets, resolve, variants
from tfive.config.json_schema import json_schema
from tfive.config.reading import read_keys
from tfive.config.rules import RULES, problems
from tfive.errors import UserError
from tfive.methods.registry import methods


def show_config(
    sources: Sequence[str], overrides: Sequence[str], explain: bool, as_json: bool, method: str | None = None
) -> str:
    """The resolved configuration as TOML with origins (a valid file again), or as JSON; `explain` adds each meaning.

    With a `method`, that method's configuration and of it only the keys it reads.
    """
    resolved = resolve(sources, [*overrides, *([] if method is None else [f"method={method}"])])
    keys = None if method is None else read_keys(resolved.config)
    if as_json:
        return json.dumps(resolved.to_dict(explain, keys), indent=2, ensure_ascii=False)
    return resolved.to_toml(explain, keys).rstrip("\n")


def show_schema() -> str:
    """The JSON schema of a configuration file."""
    return json.dumps(json_schema(), indent=1, ensure_ascii=False)


def list_presets(as_json: bool) -> str:
    """Every preset with the first line of what it says of itself: whole runs, then variants that go after one."""
    kinds = {"presets": presets(), "variants": variants()}
    about = {kind: {name: _first_line(text) for name, text in found.items()} for kind, found in kinds.items()}
    if as_json:
        return json.dumps(about, indent=2, ensure_ascii=False)
    width = max(len(name) for found in about.values() for name in found)
    lines = [
        [heading, *(f"  {name:<{width}}  {line}" for name, line in about[kind].items())]
        for kind, heading in (
            ("presets", "whole runs (tfive train NAME)"),
            ("variants", "variants, named after a whole run (tfive train nano NAME)"),
        )
    ]
    return "\n".join(line for group in lines for line in group)


def list_methods(as_json: bool) -> str:
    """Every method with what it declares: built in, or from an installed package."""
    specs = methods().values()
    if as_json:
        facts = ("summary", "page", "section", "group", "critics", "thinks", "rewarded")
        return json.dumps(
            {spec.name: {fact: getattr(spec, fact) for fact in facts} for spec in specs}, indent=2, ensure_ascii=False
        )
    width = max(len(spec.name) for spec in specs)
    return "\n".join(
        f"{spec.name:<{width}}  {spec.summary}" + (f"; settings in [{spec.section}]" if spec.section else "")
        for spec in specs
    )


def _first_line(text: str) -> str:
    return text.splitlines()[0].removeprefix("# ").split(". ")[0].rstrip(".")


def check_config(sources: Sequence[str], overrides: Sequence[str], as_json: bool) -> tuple[str, list[str]]:
    """What to print, and the broken rules (empty if all is well)."""
    try:
        resolved = resolve(sources, overrides)
    except UserError as error:
        if not as_json:
            raise
        return json.dumps({"ok": False, "problems": [str(error)]}, ensure_ascii=False), [str(error)]
    found = problems(resolved.config)
    changed = sum(origin != "default" for origin in resolved.origins.values())
    if as_json:
        return json.dumps(
            {"ok": not found, "problems": found, "keys": len(resolved.origins), "changed": changed}, ensure_ascii=False
        ), found
    summary = f"ok: {len(resolved.origins)} keys, {changed} of them not at their default; {len(RULES)} rules hold"
    return "" if found else summary, found
