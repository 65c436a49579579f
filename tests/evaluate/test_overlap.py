"""Which items a text holds, by hand, against a plain search, and over the borders of blocks."""

from __future__ import annotations

import numpy as np
import pytest
from made_up import LONG, SHORT, TINY, benchmark

from tfive.evaluate import overlap
from tfive.evaluate.overlap import RUN, SHORTEST, Match, OverlapIndex, find_overlaps, words_of
from tfive.evaluate.tasks import Item
from tfive.rng import uniforms

FAR = "The river was wide and the boats were small, "
ITEMS = benchmark(
    Item("long", LONG, "28"),
    Item("short", SHORT, "36"),
    Item("tiny", TINY, "night"),
    Item("by-option", "Which one?", "A", (f"the option {LONG.lower()}", "the other one")),
)


def test_words_are_letters_and_digits_without_case() -> None:
    assert words_of("Janet’s 16 eggs, $x_1$-ray; ÉTÉ ﬁne") == [
        "janet", "s", "16", "eggs", "x", "1", "ray", "été", "fine",
    ]  # fmt: skip


def test_a_whole_item_inside_a_document() -> None:
    runs = len(LONG.split()) - RUN + 1
    index = OverlapIndex([benchmark(ITEMS[0], ITEMS[1], ITEMS[2])])
    assert index.matches(f"{FAR} {LONG} {FAR}") == [Match("made_up", "long", runs, runs)]
    assert index.matches(FAR + LONG.upper().replace(" ", " -- ")) == [Match("made_up", "long", runs, runs)]
    assert index.overlaps(f"{FAR}{SHORT}")
    assert not index.overlaps(FAR * 10)


@pytest.mark.parametrize(("words", "found"), [(RUN, True), (RUN - 1, False)])
def test_thirteen_words_in_a_row_and_no_fewer(words: int, found: bool) -> None:
    piece = " ".join(LONG.split()[3 : 3 + words])
    assert OverlapIndex([benchmark(ITEMS[0])]).overlaps(f"{FAR}{piece} {FAR}") is found


def test_a_short_question_counts_only_as_a_whole() -> None:
    index = OverlapIndex([benchmark(ITEMS[1])])
    words = SHORT.rstrip("?").split()
    assert SHORTEST <= len(words) < RUN
    assert index.overlaps(FAR + SHORT)
    assert not index.overlaps(FAR + " ".join(words[:-1]))
    assert not index.overlaps(FAR + " ".join([*words[:4], "big", *words[4:]]))


def test_what_is_too_short_is_looked_for_by_its_options_or_counted() -> None:
    index = OverlapIndex([ITEMS])
    assert index.tasks["made_up"].unchecked == 1
    assert not index.overlaps(f"{FAR}{TINY}")
    assert {match.item for match in index.matches(LONG)} == {"long", "by-option"}


def test_every_item_with_the_run_is_named_and_shares_are_told() -> None:
    twin = LONG.replace("in all", "altogether today")
    index = OverlapIndex([benchmark(Item("a", LONG, "1"), Item("b", twin, "1"))])
    found = {match.item: match for match in index.matches(LONG)}
    assert found["a"].runs == found["a"].of
    assert 0 < found["b"].runs < found["b"].of


def plain_search(texts: dict[str, list[str]], document: list[str]) -> set[str]:
    """The rule once more, by looking everywhere."""
    found = set()
    for name, words in texts.items():
        size = min(RUN, len(words))
        runs = {tuple(words[n : n + size]) for n in range(len(words) - size + 1)}
        if runs & {tuple(document[n : n + size]) for n in range(len(document) - size + 1)}:
            found.add(name)
    return found


def test_hashed_search_agrees_with_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two letters make many near misses; a tiny block makes every border occur.
    monkeypatch.setattr(overlap, "_BLOCK", 40)
    texts = {}
    for number in range(12):
        length = SHORTEST + number
        texts[f"q{number}"] = ["ab"[int(u < 0.3)] for u in uniforms(0, "question", number, np.arange(length))]
    index = OverlapIndex([benchmark(*(Item(name, " ".join(words), "1") for name, words in texts.items()))])
    hits = 0
    for number in range(60):
        document = ["abz"[int(u * 2.1)] for u in uniforms(0, "document", number, np.arange(150))]
        expected = plain_search(texts, document)
        assert {match.item for match in index.matches(" ".join(document))} == expected
        assert index.overlaps(" ".join(document)) == bool(expected)
        hits += len(expected)
    assert hits > 20


def test_equal_hashes_of_other_words_are_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    # With factor 1 the hash is a sum, so any order of the same words collides.
    monkeypatch.setattr(overlap, "_FACTOR", 1)
    index = OverlapIndex([benchmark(ITEMS[1])])
    assert index.overlaps(SHORT)
    assert not index.overlaps(" ".join(reversed(SHORT.rstrip("?").split())))


def test_a_survey_counts_documents_and_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MOST_LISTED", 2)
    index = OverlapIndex([benchmark(ITEMS[0], ITEMS[1]), benchmark(Item("o", LONG + " Say why.", "1"), name="other")])
    documents = [("web", 0, FAR), ("web", 1, LONG), ("web", 2, LONG), ("books", 0, SHORT), ("books", 1, "")]
    report = find_overlaps(index, documents)
    assert report.documents == {"web": 3, "books": 2}
    assert report.overlapping == {"web": 2, "books": 1}
    assert (report.tasks["made_up"].found, report.tasks["made_up"].documents) == (2, 3)
    assert (report.tasks["other"].found, report.tasks["other"].documents) == (1, 2)
    assert (len(report.matches), report.more) == (2, 3)
    assert report.matches[0]["row"] == 1
    assert report.plain()["tasks"]["made_up"]["items"] == 2


def test_the_fingerprint_follows_the_items() -> None:
    first = OverlapIndex([benchmark(ITEMS[0])]).fingerprint
    assert first == OverlapIndex([benchmark(Item("renamed", LONG, "28"))]).fingerprint
    assert first != OverlapIndex([benchmark(ITEMS[1])]).fingerprint
