"""What `tfive config` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tfive.config.config import presets, resolve, variants
from tfive.config.rules import RULES, problems


def show_config(sources: Sequence[str], overrides: Sequence[str], explain: bool, as_json: bool) -> str:
    """The resolved configuration as TOML with origins (a valid file again), or as JSON; `explain` adds each meaning."""
    resolved = resolve(sources, overrides)
    if as_json:
        return json.dumps(resolved.to_dict(explain), indent=2, ensure_ascii=False)
    return resolved.to_toml(explain).rstrip("\n")


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


def _first_line(text: str) -> str:
    return text.splitlines()[0].removeprefix("# ").split(". ")[0].rstrip(".")


def check_config(sources: Sequence[str], overrides: Sequence[str], as_json: bool) -> tuple[str, list[str]]:
    """What to print, and the broken rules (empty if all is well)."""
    resolved = resolve(sources, overrides)
    found = problems(resolved.config)
    changed = sum(origin != "default" for origin in resolved.origins.values())
    if as_json:
        return json.dumps(
            {"ok": not found, "problems": found, "keys": len(resolved.origins), "changed": changed}
        ), found
    assent = f"ok: {len(resolved.origins)} keys, {changed} of them not at their default; {len(RULES)} rules hold"
    return "" if found else assent, found
