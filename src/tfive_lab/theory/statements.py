"""Every numbered claim of the paper that this package checks, in the order the paper argues."""

from __future__ import annotations

from tfive_lab.theory import claims_gae, claims_mixture, claims_policy, claims_prediction, claims_saddle, claims_scope
from tfive_lab.theory.statement import REGISTRY, Statement

GROUPS = {
    "prediction": claims_prediction,
    "policy": claims_policy,
    "gae": claims_gae,
    "mixture": claims_mixture,
    "saddle": claims_saddle,
    "scope": claims_scope,
}
"""Importing a group registers its statements."""


def statements() -> dict[str, Statement]:
    """All statements by label, group by group."""
    order = {group.__name__: place for place, group in enumerate(GROUPS.values())}

    def place(statement: Statement) -> int:
        check = statement.on_world or statement.on_examples
        return order.get(check.__module__, len(order)) if check is not None else len(order)

    return {statement.label: statement for statement in sorted(REGISTRY.values(), key=place)}
