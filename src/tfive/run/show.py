"""What `tfive config` prints."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tfive.config import resolve
from tfive.rules import RULES, problems


def show_config(sources: Sequence[str], overrides: Sequence[str], explain: bool, as_json: bool) -> str:
    """The resolved configuration as TOML with origins (a valid file again), or as JSON; `explain` adds each meaning."""
    resolved = resolve(sources, overrides)
    if as_json:
        return json.dumps(resolved.to_dict(explain), indent=2, ensure_ascii=False)
    return resolved.to_toml(explain).rstrip("\n")


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
