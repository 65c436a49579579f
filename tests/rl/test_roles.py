"""The ledger: a text serves one role, comes up in turn, and the account survives a restart."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfive.errors import UserError
from tfive.rl.roles import Ledger, RoleViolation, role_shares
from tfive.rl.settings import TRAINING_ROLES, WindowSettings
from tfive.text.candidates import apportion
from tfive.training.state_tree import decode, encode


@dataclass
class Texts:
    """What the ledger reads of a prepared corpus."""

    role_of: np.ndarray
    items_in: np.ndarray
    fingerprint: str = "f"
    spans: np.ndarray | None = None

    def document_spans(self) -> np.ndarray:
        return self.spans if self.spans is not None else np.arange(len(self.role_of))[:, None].repeat(2, axis=1)


def texts(per_role: int = 40, items: int = 4, **changes: Any) -> Texts:
    roles = np.repeat([*TRAINING_ROLES, "qualify", "develop"], per_role)
    return Texts(roles, np.full(len(roles), items), **changes)


WINDOW = WindowSettings(items=32)


def ledger(corpus: Texts | None = None, window: WindowSettings = WINDOW, seed: int = 0) -> Ledger:
    return Ledger(corpus or texts(), window, seed=seed)  # type: ignore[arg-type]


def test_a_window_draws_what_its_roles_need() -> None:
    book = ledger()
    counts = {role: len(book.draw(role, 1)) for role in (*TRAINING_ROLES, "qualify")}
    needed = {"critic_fit": 8, "pilot": 1, "head_train": 4, "head_validate": 2, "actor": 8, "scale": 1, "probe": 1}
    assert counts == {**needed, "qualify": 2}


def test_texts_come_from_their_role_and_hold_the_items() -> None:
    corpus = texts()
    corpus.items_in = np.arange(len(corpus.role_of)) % 4
    book = ledger(corpus)
    for role in (*TRAINING_ROLES, "qualify"):
        drawn = book.draw(role, 1)
        assert set(corpus.role_of[drawn]) == {role}
        assert (corpus.items_in[drawn] > 0).all()
        needed = WINDOW.count(role)
        assert needed <= corpus.items_in[drawn].sum() < needed + 3


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 5))
def test_every_text_is_used_before_any_is_used_again(per_role: int, windows: int, seed: int) -> None:
    corpus = texts(per_role, items=1)
    count = max(1, per_role // 3)
    book = ledger(corpus, WindowSettings(items=count, qualify=1), seed)
    uses = np.zeros(len(corpus.role_of), dtype=int)
    for window in range(windows):
        drawn = book.draw("actor", window)
        assert len(set(drawn.tolist())) == len(drawn) == count
        uses[drawn] += 1
        mine = uses[corpus.role_of == "actor"]
        assert mine.max() - mine.min() <= 1


def test_later_cycles_have_another_order() -> None:
    book = ledger(texts(8, items=4), WindowSettings(items=32, critic_fit=0))
    orders = [book.draw("actor", window).tolist() for window in range(3)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert len({tuple(order) for order in orders}) == 3


def test_draws_of_one_role_do_not_depend_on_another() -> None:
    alone, together = ledger(), ledger()
    for window in (1, 2, 3):
        together.draw("pilot", window)
        together.draw("qualify", window)
        assert alone.draw("actor", window).tolist() == together.draw("actor", window).tolist()
    assert ledger(seed=1).draw("actor", 1).tolist() != ledger(seed=0).draw("actor", 1).tolist()


def test_attempts_of_a_window_take_fresh_texts() -> None:
    book = ledger(texts(9))
    first, second = book.draw("head_validate", 1, 0), book.draw("head_validate", 1, 1)
    assert not set(first.tolist()) & set(second.tolist())
    book.draw("head_validate", 1, 2)
    book.draw("head_validate", 1, 3)
    with pytest.raises(RoleViolation, match="no fresh texts left in window 1"):
        book.draw("head_validate", 1, 4)
    assert len(book.draw("head_validate", 2)) == 2


def test_fitting_and_qualification_may_start_over_within_a_window() -> None:
    book = ledger(texts(9))
    for attempt in range(6):
        drawn = book.draw("qualify", 1, attempt)
        assert len(set(drawn.tolist())) == 2
    rows = [row for row in book.rows() if row["role"] == "qualify"]
    assert [row["again"] for row in rows] == [0, 0, 0, 0, 1, 2]
    assert sum(row["texts"] for row in rows) == 12
    assert book.roles()["qualify"] == {"texts": 9, "items": 36, "used": 9, "most_uses": 2}


def test_a_draw_is_made_once_and_time_runs_forward() -> None:
    book = ledger()
    book.draw("actor", 3, 1)
    for window, attempt in [(3, 1), (3, 0), (2, 5)]:
        with pytest.raises(RoleViolation, match="does not come after it"):
            book.draw("actor", window, attempt)
    book.draw("actor", 4)


def test_a_text_of_another_role_is_refused() -> None:
    book, corpus = ledger(), texts()
    pilot = np.flatnonzero(corpus.role_of == "pilot")
    book.check("pilot", pilot)
    with pytest.raises(RoleViolation, match="belongs to the role pilot, not to actor"):
        book.check("actor", pilot[:1])
    for role in ("develop", "nobody"):
        with pytest.raises(RoleViolation, match="no role that texts are drawn for"):
            book.draw(role, 1)


def test_a_document_in_two_roles_is_refused() -> None:
    corpus = texts(3, items=64)
    number = np.arange(len(corpus.role_of))
    spans = np.stack([number, number + 1], axis=1)
    with pytest.raises(RoleViolation, match="document 3 serves two roles"):
        ledger(Texts(corpus.role_of, corpus.items_in, spans=spans))
    last = number % 3 == 2  # Three texts a role: let no document go on after the third.
    spans[last, 1] = spans[last, 0]
    ledger(Texts(corpus.role_of, corpus.items_in, spans=spans))


def test_the_account_survives_a_restart() -> None:
    whole, first = ledger(), ledger()
    for window in (1, 2):
        for role in ("actor", "critic_fit", "qualify"):
            assert whole.draw(role, window).tolist() == first.draw(role, window).tolist()
    document, tensors = encode(first.state_dict())
    second = ledger()
    second.load_state_dict(decode(json.loads(json.dumps(document)), tensors))
    assert second.rows() == first.rows()
    assert second.roles() == first.roles()
    for window in (3, 4, 9, 10, 11, 12):
        for role in ("actor", "critic_fit", "qualify"):
            assert whole.draw(role, window).tolist() == second.draw(role, window).tolist()
    assert whole.rows() == second.rows()


def test_an_account_of_another_corpus_or_seed_is_refused() -> None:
    state = ledger().state_dict()
    for other in (ledger(texts(fingerprint="g")), ledger(seed=3)):
        with pytest.raises(UserError, match="another prepared corpus or seed"):
            other.load_state_dict(state)


def test_roles_that_do_not_fit_are_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"window\.items: a window needs 200 items of the role actor, .* holds 160"):
        ledger(window=WindowSettings(items=200, critic_fit=0.5))
    with pytest.raises(UserError, match=r"window\.qualify: a window needs 320 items of the role qualify"):
        ledger(window=WindowSettings(items=32, qualify=10))
    corpus = texts()
    corpus.items_in[corpus.role_of == "pilot"] = 0
    with pytest.raises(UserError, match=r"window\.pilot: .* holds 0"):
        ledger(corpus)


def test_shares_follow_what_a_window_draws() -> None:
    training = {
        "critic_fit": 1,
        "pilot": 1 / 8,
        "head_train": 1 / 2,
        "head_validate": 1 / 4,
        "actor": 1,
        "scale": 1 / 8,
    }
    for items in (1024, 4096):
        shares = role_shares(WindowSettings(items=items, probe=0), per_text=16)
        assert shares == {"train": training, "calibration": {"qualify": 1}, "development": {"develop": 1}}


@given(st.integers(1, 500), st.integers(1, 20), st.integers(0, 50))
def test_a_split_that_holds_one_window_holds_every_role_of_it(items: int, per_text: int, spare: int) -> None:
    window = WindowSettings(items=items)
    needed = {role: math.ceil(window.count(role) / per_text) for role in TRAINING_ROLES}
    shares = role_shares(window, per_text)["train"]
    given_texts = dict(zip(shares, apportion(sum(needed.values()) + spare, list(shares.values()))))
    assert all(given_texts[role] >= needed[role] for role in TRAINING_ROLES)
