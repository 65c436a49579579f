"""The ledger: a text serves one role at a time, comes up in turn, and the account survives a restart."""

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
from tfive.rl.settings import HALVES, LEARNING, TRAINING_ROLES, WindowSettings
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
    own = [role for role in TRAINING_ROLES if role not in LEARNING]
    roles = np.repeat([*HALVES, *own, "qualify", "develop", "test"], per_role)
    return Texts(roles, np.full(len(roles), items), **changes)


WINDOW = WindowSettings(items=32)


T5_ROLES = TRAINING_ROLES
BARE = ("actor",)


def ledger(
    corpus: Texts | None = None, window: WindowSettings = WINDOW, seed: int = 0, roles: tuple[str, ...] = T5_ROLES
) -> Ledger:
    return Ledger(corpus or texts(), window, seed=seed, roles=roles)  # type: ignore[arg-type]


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
        own = {"actor": HALVES[0], "critic_fit": HALVES[1]}.get(role, role)
        assert set(corpus.role_of[drawn]) == {own}
        assert (corpus.items_in[drawn] > 0).all()
        needed = WINDOW.count(role)
        assert needed <= corpus.items_in[drawn].sum() < needed + 3


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 5), st.sampled_from([T5_ROLES, BARE]))
def test_every_text_is_used_before_any_is_used_again(
    per_role: int, windows: int, seed: int, roles: tuple[str, ...]
) -> None:
    corpus = texts(per_role, items=1)
    count = max(1, per_role // 3)
    book = ledger(corpus, WindowSettings(items=count, qualify=1), seed, roles)
    uses = np.zeros(len(corpus.role_of), dtype=int)
    for window in range(1, 2 * windows + 1):
        drawn = book.draw("actor", window)
        assert len(set(drawn.tolist())) == len(drawn) == count
        uses[drawn] += 1
        if roles == BARE:
            mine = uses[np.isin(corpus.role_of, (*HALVES, *TRAINING_ROLES))]
        else:
            mine = uses[corpus.role_of == HALVES[0 if window % 2 else 1]]
        assert mine.max() - mine.min() <= 1


def test_actor_and_critics_learn_from_the_same_texts_but_never_in_one_window() -> None:
    corpus = texts(16, items=4)
    book = ledger(corpus, WindowSettings(items=32))
    learned: dict[str, set[int]] = {role: set() for role in LEARNING}
    for window in range(1, 5):
        # Fitting comes first, and again where a test fails; the actor's texts must not be among them.
        fitted = [book.draw("critic_fit", window, attempt) for attempt in range(3)]
        acting = book.draw("actor", window)
        assert not set(np.concatenate(fitted).tolist()) & set(acting.tolist())
        learned["actor"] |= set(acting.tolist())
        learned["critic_fit"] |= {int(text) for some in fitted for text in some}
    pool = set(np.flatnonzero(np.isin(corpus.role_of, HALVES)).tolist())
    assert learned["actor"] == learned["critic_fit"] == pool


def test_critics_are_fitted_to_texts_that_the_actor_has_not_met_while_there_are_any() -> None:
    book = ledger(texts(32, items=4), WindowSettings(items=32))
    met: set[int] = set()
    for window in range(1, 7):
        assert not met & set(book.draw("critic_fit", window).tolist())
        met |= set(book.draw("actor", window).tolist())


def test_a_method_without_critics_learns_from_the_whole_split() -> None:
    corpus, window = texts(8, items=4), WindowSettings(items=32)
    training = np.flatnonzero(np.isin(corpus.role_of, (*HALVES, *TRAINING_ROLES)))
    book = ledger(corpus, window, roles=BARE)
    drawn = [book.draw("actor", number) for number in range(1, 8)]
    assert sorted(np.concatenate(drawn).tolist()) == training.tolist()
    assert book.draws(7) == {"actor": 1.0}
    assert "critic_fit" not in book.draws(7)
    # What sets its reward scale stays apart.
    scaled = ledger(corpus, window, roles=("actor", "scale"))
    reached = {int(text) for number in range(1, 14) for text in scaled.draw("actor", number)}
    assert reached == set(training.tolist()) - set(np.flatnonzero(corpus.role_of == "scale").tolist())


def test_methods_draw_the_same_actor_texts_until_one_has_used_up_the_pool() -> None:
    corpus, window = texts(16, items=4), WindowSettings(items=32)
    books = {name: ledger(corpus, window, roles=roles) for name, roles in (("t5", T5_ROLES), ("ntp", BARE))}
    shared = []
    for number in range(1, 7):
        books["t5"].draw("critic_fit", number)
        first, second = (book.draw("actor", number).tolist() for book in books.values())
        of_all = [book.shared_draw(number) for book in books.values()]
        if all(one is not None for one in of_all):
            shared.append(number)
            assert first == second
    assert shared == [1, 2, 3, 4]
    assert books["ntp"].draws(6)["actor"] < 1 < books["t5"].draws(6)["actor"]


def test_later_cycles_have_another_order() -> None:
    book = ledger(texts(8, items=4), WindowSettings(items=32))
    orders = [book.draw("actor", window).tolist() for window in (1, 3, 5)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert len({tuple(order) for order in orders}) == 3


def test_the_actors_draws_do_not_depend_on_other_roles() -> None:
    alone, together = ledger(), ledger()
    for window in (1, 2, 3):
        for role in ("pilot", "qualify", "critic_fit"):
            together.draw(role, window)
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
    book.check("pilot", pilot, 1)
    with pytest.raises(RoleViolation, match="belongs to pilot, which does not serve actor in window 1"):
        book.check("actor", pilot[:1], 1)
    with pytest.raises(RoleViolation, match="belongs to pool_1, which does not serve actor in window 2"):
        book.check("actor", np.flatnonzero(corpus.role_of == "pool_1"), 2)
    with pytest.raises(RoleViolation, match="pilot is no role that texts are drawn for"):
        ledger(roles=BARE).draw("pilot", 1)
    for role in ("develop", "test", "nobody"):
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
    found = encode(first.state_dict())
    second = ledger()
    second.load_state_dict(decode(json.loads(json.dumps(found.document)), [piece.local for piece in found.pieces]))
    assert second.rows() == first.rows()
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
    for items in (1024, 4096):
        shares = role_shares(WindowSettings(items=items, probe=0), per_text=16)
        training = {role: share * 16 / items for role, share in shares.pop("train").items()}
        own = {"pilot": 1 / 8, "head_train": 1 / 2, "head_validate": 1 / 4, "scale": 1 / 8}
        assert training == {"pool_1": 1, "pool_2": 1, **own}
        assert shares == {"calibration": {"qualify": 1}, "development": {"develop": 1}, "test": {"test": 1}}


@given(st.integers(1, 500), st.integers(1, 20), st.integers(0, 50), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_a_split_that_holds_one_window_holds_every_role_of_it(
    items: int, per_text: int, spare: int, critic_fit: float
) -> None:
    window = WindowSettings(items=items, critic_fit=critic_fit)
    needed = window.training_texts(per_text)
    shares = role_shares(window, per_text)["train"]
    given_texts = dict(zip(shares, apportion(sum(needed.values()) + spare, list(shares.values()))))
    assert all(given_texts[group] >= count for group, count in needed.items())
    for role in TRAINING_ROLES:
        for group in HALVES if role in LEARNING else (role,):
            assert given_texts.get(group, 0) >= math.ceil(window.count(role) / per_text)
