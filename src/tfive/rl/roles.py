"""Roles of texts: which texts serve which role, the ledger of what each window drew, and the count of rollouts.

All positions of a text share its role, because one position's scoring text is another's visible prefix
(app:data-contracts). Texts that normalise, calibrate, validate, set the scale, probe or qualify have that role for the
whole run, assigned when the corpus is prepared: nothing else learns from them (with `window.crossed` halves of the
actor's texts stand in for most of them, `rl.halves`). The other training texts are a pool of
two halves; in one window the actor learns from one and the critics from the other, and in the next they change over,
so that documents that belong together never serve both at once. The ledger draws the texts window by window and
records every use. The trajectories generated for the roles are counted as in app:rollout-accounting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tfive.errors import RunFailed, UserError
from tfive.rl.settings import HALVES, LEARNING, TRAINING_ROLES, WindowSettings
from tfive.rng import philox

if TYPE_CHECKING:
    from tfive.text.prepared import PreparedCorpus

MEASURED = {"development": "develop", "test": "test"}
"""Split → the role of its texts: measured, never drawn."""

REUSABLE = ("critic_fit", "qualify")
"""Roles that may draw a text again in the same window, with new thoughts, once all their texts were used in it."""


class RoleViolation(RunFailed):
    """A text was about to serve a role that is not its own, or a second time where it may not."""


def role_shares(window: WindowSettings, per_text: int = 1) -> dict[str, dict[str, float]]:
    """Roles of each split with their shares of its texts, in proportion to the texts a window draws, so that a split
    large enough for one window's roles together is large enough for each."""
    return {
        "train": {role: float(count) for role, count in window.training_texts(per_text).items()},
        "calibration": {"qualify": 1.0},
        **{split: {role: 1.0} for split, role in MEASURED.items()},
    }


class Ledger:
    """Draws each role's texts and records their use.

    Texts come in an order that is a counter-based function of the seed, the role and how often they were used, so a
    resumed run draws what it would have drawn. The actor takes what it has met least, from its half of the pool first,
    whatever other roles draw: methods learn from the same texts until one of them has used up the pool.
    """

    def __init__(
        self, corpus: PreparedCorpus, window: WindowSettings, *, seed: int, roles: Collection[str] = TRAINING_ROLES
    ) -> None:
        """`roles` are those that the method draws; the actor also learns from the texts of those that it does not."""
        self._window, self._seed = window, seed
        self._fingerprint = corpus.fingerprint
        self._items = np.asarray(corpus.items_in, dtype=np.int64)
        self._role = np.asarray(corpus.role_of)
        _one_role_per_document(corpus)
        self._roles = tuple(role for role in (*TRAINING_ROLES, "qualify") if role in (*roles, "actor", "qualify"))
        self._idle = tuple(role for role in TRAINING_ROLES if role not in (*roles, *LEARNING))
        self._met = np.zeros(len(self._role), dtype=np.int32)
        """How often the actor drew each text."""
        self._uses = np.zeros(len(self._role), dtype=np.int32)
        """How often other roles did."""
        self._last = np.full(len(self._role), -1, dtype=np.int32)
        self._rows: list[dict[str, Any]] = []
        self._check_sizes()

    def _groups(self, role: str, window: int) -> tuple[str, ...]:
        """The groups of the corpus that a role draws from in a window, the preferred one first."""
        if role not in LEARNING:
            return (role,)
        own, other = HALVES if window % 2 else HALVES[::-1]
        if role == "critic_fit":
            return (other,)
        return (own, *self._idle) if "critic_fit" in self._roles else (own, *self._idle, other)

    def _of(self, *groups: str) -> npt.NDArray[np.int64]:
        """Texts of these groups that hold at least one item."""
        return np.flatnonzero(np.isin(self._role, groups) & (self._items > 0))

    def _check_sizes(self) -> None:
        for role in self._roles:
            held = min(int(self._items[self._of(*self._groups(role, window))].sum()) for window in (1, 2))
            needed = self._window.count(role)
            if needed > held:
                key = self._window.key_of(role)
                raise UserError(
                    f"{key}: a window needs {needed} items of the role {role}, the prepared text holds {held}; "
                    "lower window.items or prepare more text (text.sequences)"
                )

    def draw(self, role: str, window: int, attempt: int = 0) -> npt.NDArray[np.int64]:
        """Whole texts that hold at least the items `role` needs in one window, as sequence numbers.

        `attempt` numbers several draws of one role in one window: each takes texts the window has not used. When none
        is left, roles of `REUSABLE` start over (their thoughts are new), the others raise.
        """
        chosen = self.foreseen(role, window, attempt)
        self._record(role, window, attempt, chosen)
        return chosen

    def foreseen(self, role: str, window: int, attempt: int = 0) -> npt.NDArray[np.int64]:
        """What `draw` would choose now, without a record of it."""
        if role not in self._roles:
            raise RoleViolation(f"{role} is no role that texts are drawn for; there are {', '.join(self._roles)}")
        self._check_turn(role, window, attempt)
        groups, needed = self._groups(role, window), self._window.count(role)
        texts = self._of(*groups)
        chosen = self._first(role, texts[self._last[texts] != window], needed, groups[0])
        missing = needed - int(self._items[chosen].sum())
        if missing > 0 and role not in REUSABLE:
            raise RoleViolation(
                f"role {role} has no fresh texts left in window {window} (attempt {attempt} needs {needed} items): "
                "a text serves a role once a window; prepare more text or lower window.items"
            )
        if missing > 0:
            again = self._first(role, np.setdiff1d(texts, chosen), missing, groups[0])
            chosen = np.concatenate([chosen, again])
        return chosen

    def _first(self, role: str, texts: npt.NDArray[np.int64], needed: int, preferred: str) -> npt.NDArray[np.int64]:
        """The first texts of the role's order that together hold the needed items.

        Critics prefer texts that the actor has not met, since those it is about to learn from are such, too.
        """
        met, uses, elsewhere = self._met[texts], self._uses[texts], self._role[texts] != preferred
        turn, keys = (met, (elsewhere, met)) if role == "actor" else (uses, (uses, met))
        words = philox(self._seed, f"ledger/{role}", turn, texts)
        # The last key counts first.
        order = texts[np.lexsort((texts, words[:, 1], words[:, 0], *keys))]
        return order[: int((np.cumsum(self._items[order]) < needed).sum()) + 1] if needed > 0 else order[:0]

    def _check_turn(self, role: str, window: int, attempt: int) -> None:
        for row in reversed(self._rows):
            if row["role"] == role:
                if (row["window"], row["attempt"]) >= (window, attempt):
                    raise RoleViolation(
                        f"role {role} was drawn for window {row['window']}, attempt {row['attempt']}; "
                        f"window {window}, attempt {attempt} does not come after it"
                    )
                return

    def _record(self, role: str, window: int, attempt: int, chosen: npt.NDArray[np.int64]) -> None:
        self.check(role, chosen, window)
        self._rows.append(
            {
                "role": role,
                "window": window,
                "attempt": attempt,
                "texts": len(chosen),
                "items": int(self._items[chosen].sum()),
                "reused": int((self._met + self._uses)[chosen].astype(bool).sum()),
                "again": int((self._last[chosen] == window).sum()),
            }
        )
        counted = self._met if role == "actor" else self._uses
        counted[chosen] += 1
        self._last[chosen] = window

    def check(self, role: str, texts: Sequence[int] | npt.NDArray[np.integer], window: int) -> None:
        """Raise unless `role` may draw every one of these texts in this window."""
        numbers = np.asarray(texts, dtype=np.int64)
        wrong = numbers[~np.isin(self._role[numbers], self._groups(role, window))]
        if len(wrong):
            raise RoleViolation(
                f"text {wrong[0]} belongs to {self._role[wrong[0]]}, which does not serve {role} in window {window}"
            )

    def rows(self) -> list[dict[str, Any]]:
        """Every draw: role, window, attempt, texts, items, and how many were used before and in this window."""
        return [dict(row) for row in self._rows]

    def draws(self, windows: int) -> dict[str, float]:
        """How often a run of so many windows draws a text for actor and critics: the mean over the texts each may
        have, at one round of fitting a window."""
        found = {}
        for role in LEARNING:
            if role in self._roles and (role == "actor" or not self._window.history):
                texts = self._of(*self._groups(role, 1), *self._groups(role, 2))
                found[role] = windows * self._window.count(role) / int(self._items[texts].sum())
        return found

    def shared_draw(self, window: int) -> npt.NDArray[np.int64] | None:
        """The actor's texts of a closed window if every method draws the same there: all from its half of the pool,
        all for the first time. None if not, or if it drew none."""
        drawn = next((row for row in self._rows if (row["role"], row["window"]) == ("actor", window)), None)
        chosen = np.flatnonzero((self._last == window) & (self._role == self._groups("actor", window)[0]))
        shared = drawn is not None and drawn["texts"] == len(chosen) and bool((self._met[chosen] == 1).all())
        return chosen if shared else None

    def state_dict(self) -> dict[str, Any]:
        """All uses and draws, and which corpus and seed they belong to."""
        return {
            "corpus": self._fingerprint,
            "seed": self._seed,
            "met": self._met.copy(),
            "uses": self._uses.copy(),
            "last": self._last.copy(),
            "rows": self.rows(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; that of another corpus or seed is refused."""
        if (state["corpus"], state["seed"]) != (self._fingerprint, self._seed):
            raise UserError("the ledger belongs to another prepared corpus or seed; resume with the run's own settings")
        self._met[:] = np.asarray(state["met"])
        self._uses[:] = np.asarray(state["uses"])
        self._last[:] = np.asarray(state["last"])
        self._rows = [dict(row) for row in state["rows"]]


def _one_role_per_document(corpus: PreparedCorpus) -> None:
    """Raise when the texts of two roles hold pieces of one document."""
    spans = corpus.document_spans()
    served = np.zeros(int(spans.max()) + 1, dtype=np.int64)
    for role in np.unique(corpus.role_of):
        edges = np.zeros(len(served) + 1, dtype=np.int64)
        mine = spans[np.asarray(corpus.role_of) == role]
        np.add.at(edges, mine[:, 0], 1)
        np.add.at(edges, mine[:, 1] + 1, -1)
        served += np.cumsum(edges)[:-1] > 0
    if (served > 1).any():
        raise RoleViolation(f"document {int(served.argmax())} serves two roles; prepare the corpus again")


AUXILIARY_ROLES = (
    "critic_fit", "qualify", "pilot", "head_train", "head_validate", "scale", "extra", *MEASURED.values(),
)  # fmt: skip
"""Roles whose trajectories do not train the actor. The paper's n_extra (retries, rejected attempts, diagnostics) is
`extra`, which are the probes, and the measurements; a retry is counted under the role it repeats."""


def auxiliary_rollouts(counts: Mapping[str, int]) -> int:
    """n_aux of eq:total-rollout-budget: all newly generated trajectories that do not train the actor."""
    unknown = set(counts) - set(AUXILIARY_ROLES) - {"actor"}
    if unknown or min(counts.values(), default=0) < 0:
        raise ValueError(f"trajectory counts must be nonnegative and of known roles, got {dict(counts)}")
    return sum(count for role, count in counts.items() if role != "actor")


def total_rollouts(counts: Mapping[str, int]) -> int:
    """N_roll of the conditional-moment protocol (eq:total-rollout-budget)."""
    return counts.get("actor", 0) + auxiliary_rollouts(counts)


def repeated_rollouts(anchors: int, calibrate: int, admit: int, act: int, base: int) -> int:
    """N_roll of repeated-prefix calibration (eq:repeated-rollout-budget); both critics share every continuation."""
    return anchors * (calibrate + admit + act) + base


def fewer_than_groups(counts: Mapping[str, int], group: int) -> bool:
    """Whether the window generates fewer trajectories than groups of this size on the same actor items would
    (eq:grpo-rollout-threshold): n_aux < (G − 1)·n_act."""
    return auxiliary_rollouts(counts) < (group - 1) * counts.get("actor", 0)
