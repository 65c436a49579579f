"""Roles of texts: which texts serve which role, the ledger of what each window drew, and the count of rollouts.

Every document has one role for the whole run, and all positions of a text share it, because one position's scoring text
is another's visible prefix (app:data-contracts). Roles are assigned when the corpus is prepared; the ledger draws a
role's texts window by window, never those of another role, and records every use. The trajectories generated for the
roles are counted as in app:rollout-accounting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tfive.errors import RunFailed, UserError
from tfive.rl.settings import TRAINING_ROLES, WindowSettings
from tfive.rng import philox

if TYPE_CHECKING:
    from tfive.text.prepared import PreparedCorpus

DEVELOP = "develop"
"""The role of the development split: measured, never drawn."""

REUSABLE = ("critic_fit", "qualify")
"""Roles that may draw a text again in the same window, with new thoughts, once all their texts were used in it."""


class RoleViolation(RunFailed):
    """A text was about to serve a role that is not its own, or a second time where it may not."""


def role_shares(window: WindowSettings, per_text: int = 1) -> dict[str, dict[str, float]]:
    """Roles of each split with their shares of its texts, in proportion to the texts a window draws.

    With `per_text` positions a text, a role that needs a few items still needs a whole text; shares count such texts,
    so that a split large enough for one window's roles together is large enough for each.
    """
    texts = {role: math.ceil(window.count(role) / per_text) for role in TRAINING_ROLES}
    return {
        "train": {role: count / texts["actor"] for role, count in texts.items() if count > 0},
        "calibration": {"qualify": 1.0},
        "development": {DEVELOP: 1.0},
    }


class Ledger:
    """Draws each role's texts and records their use.

    The texts used least often come first, in an order that is a counter-based function of the seed, the role and how
    often they were used. So the draws of one role do not depend on those of another, and a resumed run draws what it
    would have drawn.
    """

    def __init__(self, corpus: PreparedCorpus, window: WindowSettings, *, seed: int) -> None:
        self._window, self._seed = window, seed
        self._fingerprint = corpus.fingerprint
        self._items = np.asarray(corpus.items_in, dtype=np.int64)
        self._role = np.asarray(corpus.role_of)
        _one_role_per_document(corpus)
        self._texts = {str(role): self._of(role) for role in np.unique(self._role) if role != DEVELOP}
        self._uses = np.zeros(len(self._role), dtype=np.int32)
        self._last = np.full(len(self._role), -1, dtype=np.int32)
        self._rows: list[dict[str, Any]] = []
        self._check_sizes()

    def _of(self, role: str) -> npt.NDArray[np.int64]:
        """Texts of a role that hold at least one item."""
        return np.flatnonzero((self._role == role) & (self._items > 0))

    def _check_sizes(self) -> None:
        for role in (*TRAINING_ROLES, "qualify"):
            needed = self._window.count(role)
            held = int(self._items[self._texts[role]].sum()) if role in self._texts else 0
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
        if role not in self._texts:
            raise RoleViolation(f"{role} is no role that texts are drawn for; there are {', '.join(self._texts)}")
        self._check_turn(role, window, attempt)
        needed = self._window.count(role)
        texts = self._texts[role]
        fresh = texts[self._last[texts] != window]
        chosen = self._first(role, fresh, needed)
        missing = needed - int(self._items[chosen].sum())
        if missing > 0 and role not in REUSABLE:
            raise RoleViolation(
                f"role {role} has no fresh texts left in window {window} (attempt {attempt} needs {needed} items): "
                "a text serves a role once a window; prepare more text or lower window.items"
            )
        if missing > 0:
            chosen = np.concatenate([chosen, self._first(role, np.setdiff1d(texts, chosen), missing)])
        self._record(role, window, attempt, chosen)
        return chosen

    def _first(self, role: str, texts: npt.NDArray[np.int64], needed: int) -> npt.NDArray[np.int64]:
        """The first texts of the role's order that together hold the needed items."""
        uses = self._uses[texts]
        words = philox(self._seed, f"ledger/{role}", uses, texts)
        turn = texts[np.lexsort((texts, words[:, 1], words[:, 0], uses))]
        return turn[: int((np.cumsum(self._items[turn]) < needed).sum()) + 1] if needed > 0 else turn[:0]

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
        self.check(role, chosen)
        self._rows.append(
            {
                "role": role,
                "window": window,
                "attempt": attempt,
                "texts": len(chosen),
                "items": int(self._items[chosen].sum()),
                "reused": int((self._uses[chosen] > 0).sum()),
                "again": int((self._last[chosen] == window).sum()),
            }
        )
        self._uses[chosen] += 1
        self._last[chosen] = window

    def check(self, role: str, texts: Sequence[int] | npt.NDArray[np.integer]) -> None:
        """Raise unless every one of these texts belongs to `role`."""
        numbers = np.asarray(texts, dtype=np.int64)
        wrong = numbers[self._role[numbers] != role]
        if len(wrong):
            raise RoleViolation(f"text {wrong[0]} belongs to the role {self._role[wrong[0]]}, not to {role}")

    def rows(self) -> list[dict[str, Any]]:
        """Every draw: role, window, attempt, texts, items, and how many were used before and in this window."""
        return [dict(row) for row in self._rows]

    def roles(self) -> dict[str, dict[str, int]]:
        """What each role has and has used: texts, items, texts used at least once, most uses of one text."""
        return {
            role: {
                "texts": len(texts),
                "items": int(self._items[texts].sum()),
                "used": int((self._uses[texts] > 0).sum()),
                "most_uses": int(self._uses[texts].max(initial=0)),
            }
            for role, texts in self._texts.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """All uses and draws, and which corpus and seed they belong to."""
        return {
            "corpus": self._fingerprint,
            "seed": self._seed,
            "uses": self._uses.copy(),
            "last": self._last.copy(),
            "rows": self.rows(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; that of another corpus or seed is refused."""
        if (state["corpus"], state["seed"]) != (self._fingerprint, self._seed):
            raise UserError("the ledger belongs to another prepared corpus or seed; resume with the run's own settings")
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


AUXILIARY_ROLES = ("critic_fit", "qualify", "pilot", "head_train", "head_validate", "scale", "extra", DEVELOP)
"""Roles whose trajectories do not train the actor. The paper's n_extra (retries, rejected attempts, diagnostics) is
`extra`, which are the probes, and `develop`, the measurements; a retry is counted under the role it repeats."""


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
