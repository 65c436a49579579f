"""Snapshot ids: which version of policy, scorer, critics, … made a record, and the check that it is used with no other
(app:window-refresh)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

KINDS = ("policy", "scorer", "scale", "critics", "normaliser", "weight", "auxiliary", "validation")


class WrongSnapshot(RuntimeError):
    """A record was about to be used with a part that did not make it."""


class Snapshots:
    """The current version of every part that a stored trajectory may depend on.

    A part that changes gets a new id; what depends on it changes with it (app:window-refresh: changing rollout,
    scorer, critics, features or normaliser changes the moment target).
    """

    _DEPENDENTS: ClassVar[dict[str, tuple[str, ...]]] = {
        "policy": ("scorer",),
        "scorer": (),
        "scale": (),
        "critics": ("normaliser",),
        "normaliser": ("weight", "auxiliary"),
        "weight": ("validation",),
        "auxiliary": ("validation",),
        "validation": (),
    }

    def __init__(self) -> None:
        self._versions = dict.fromkeys(KINDS, 0)

    def current(self, *kinds: str) -> dict[str, str]:
        """The ids of the named parts (all of them when none is named)."""
        return {kind: f"{kind}-{self._versions[kind]}" for kind in kinds or KINDS}

    def renew(self, kind: str) -> str:
        """Give a changed part, and everything made for it, a new id; returns the part's."""
        self._versions[kind] += 1
        for dependent in self._DEPENDENTS[kind]:
            self.renew(dependent)
        return f"{kind}-{self._versions[kind]}"

    def require(self, recorded: Mapping[str, str], kinds: Iterable[str], *, what: str) -> None:
        """Raise unless `recorded` names the current snapshot of each kind."""
        for kind, id_now in self.current(*kinds).items():
            if recorded.get(kind) != id_now:
                raise WrongSnapshot(
                    f"{what} was made with {recorded.get(kind, f'no {kind}')}, but {id_now} is in force"
                )

    def state_dict(self) -> dict[str, int]:
        return dict(self._versions)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if set(state) != set(KINDS):
            raise ValueError(f"snapshot state names {sorted(state)}, expected {sorted(KINDS)}")
        self._versions = {kind: int(state[kind]) for kind in KINDS}
