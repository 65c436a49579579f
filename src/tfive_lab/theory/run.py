"""Runs statements on named and random worlds and returns one row each."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from tfive.errors import UserError
from tfive.telemetry import Silent, Telemetry
from tfive_lab.theory.examples import named
from tfive_lab.theory.statement import Statement
from tfive_lab.theory.statements import statements
from tfive_lab.theory.worlds import World, random_world


@dataclass(frozen=True)
class Row:
    """The outcome of one statement: smallest margin over all checks, and the world that gave it."""

    label: str
    says: str
    passed: bool
    margin: float
    worlds: int
    checks: int
    tightest: str


def select(labels: Iterable[str] | None) -> list[Statement]:
    """The statements with these labels, all of them for None; an unknown label is refused with the known ones."""
    known = statements()
    if labels is None:
        return list(known.values())
    wanted = list(labels)
    unknown = [label for label in wanted if label not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.0)[0]
        raise UserError(f"--statement {unknown[0]!r} is unknown; the nearest label is {near} (tfive theory lists all)")
    return [known[label] for label in wanted]


def run(
    labels: Iterable[str] | None = None,
    worlds: int = 200,
    seed: int = 0,
    telemetry: Telemetry | None = None,
) -> list[Row]:
    """Checks each statement on its own examples, on every named world and on `worlds` random ones."""
    if worlds < 0:
        raise UserError(f"--worlds {worlds} must not be negative")
    chosen = select(labels)
    tallies = {statement.label: _Tally() for statement in chosen}
    for statement in chosen:
        if statement.on_examples is not None:
            tallies[statement.label].add("the paper's example", statement.on_examples(), counts=0)
    on_worlds = [statement for statement in chosen if statement.on_world is not None]
    cases: list[World | int] = [*named().values(), *range(worlds)] if on_worlds else []
    for case in (telemetry or Silent()).progress(cases, "worlds"):
        world = random_world(seed, case) if isinstance(case, int) else case
        for statement in on_worlds:
            if statement.on_world is not None:
                tallies[statement.label].add(world.name, statement.on_world(world), counts=1)
    return [tallies[s.label].row(s) for s in chosen]


class _Tally:
    def __init__(self) -> None:
        self.margin, self.tightest, self.worlds, self.checks = float("inf"), "", 0, 0

    def add(self, name: str, margins: Iterable[float], counts: int) -> None:
        self.worlds += counts
        for margin in margins:
            self.checks += 1
            # A margin that is not a number is a failure, and must not slip through a comparison.
            margin = margin if margin == margin else float("-inf")
            if margin < self.margin:
                self.margin, self.tightest = margin, name

    def row(self, statement: Statement) -> Row:
        passed = self.checks > 0 and self.margin >= 0
        return Row(statement.label, statement.says, passed, self.margin, self.worlds, self.checks, self.tightest)
