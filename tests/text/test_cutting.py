"""Plain text is cut where it falls apart by itself, and nothing but white space gets lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfive.text.corpus import prepare
from tfive.text.cutting import ENOUGH, MOST, SECTION, documents_of
from tfive.text.settings import TextSettings, TextSource
from tfive.text.sources import Reader, local_files
from tiny import tokenizer


def cut(text: str) -> list[str]:
    return [document.decode() for document in documents_of(text.encode().split(b"\n"))]


PARAGRAPH = ("one two three four " * 40).strip()


def test_paragraphs_are_joined_until_there_is_enough() -> None:
    documents = cut("\n\n".join([PARAGRAPH] * 12))
    assert documents[0] == "\n\n".join([PARAGRAPH] * 3)
    assert len(documents) == 4
    assert len(documents[0]) >= ENOUGH > len("\n\n".join([PARAGRAPH] * 2))


def test_a_form_feed_ends_a_document_and_so_do_two_blank_lines_behind_a_section() -> None:
    assert cut("a page\fanother\n\fa third") == ["a page", "another", "a third"]
    section = "word " * (SECTION // 5)
    assert cut(f"{section}\n\n\nnext") == [section, "next"]
    assert cut("a heading\n\n\nits text") == ["a heading\n\nits text"]


@pytest.mark.parametrize("unit", ["word ", "字", "x"])
def test_a_paragraph_without_an_end_is_cut_between_words_or_characters(unit: str) -> None:
    documents = cut(unit * 10_000)
    assert len(documents) > 1
    assert max(len(one.encode()) for one in documents) <= MOST
    assert "".join(documents) == unit * 10_000
    assert all(one.startswith(unit) for one in documents)


@given(
    st.lists(
        st.sampled_from(["alpha beta", "\n", "\n\n", "\f", " \t", "ä€😀" * 30, PARAGRAPH, "z" * 3_000]), max_size=40
    )
)
def test_nothing_but_white_space_gets_lost(parts: list[str]) -> None:
    text = "".join(parts)
    documents = cut(text)
    assert "".join("".join(documents).split()) == "".join(text.split())
    assert all(document.strip() for document in documents)
    assert max((len(document.encode()) for document in documents), default=0) <= MOST + len(documents)


def test_a_source_is_cut_by_default_and_whole_if_asked(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n\n".join([PARAGRAPH] * 12), "utf-8")

    def read(**options: str) -> int:
        (file,) = local_files(TextSource(name="s", path=str(tmp_path / "book.txt"), **options))
        return len(list(Reader().documents(file)))

    assert (read(), read(separator="none"), read(separator="\n\n")) == (4, 1, 12)


def test_how_text_is_cut_is_part_of_what_a_corpus_depends_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"{n} {PARAGRAPH}" for n in range(400)), "utf-8")
    roles = {"train": {"actor": 1.0}, "calibration": {"qualify": 1.0}, "development": {"develop": 1.0}}

    def key(separator: str) -> str:
        source = TextSource(name="s", path=str(tmp_path / "a.txt"), separator=separator)
        settings = TextSettings.model_validate(
            {
                "sources": (source,),
                "sequence_length": 32,
                "allow_fewer": True,
                "sequences": {"train": 4, "calibration": 2, "development": 2},
            }
        )
        return prepare(settings, horizon=3, roles=roles, tokenizer=tokenizer(), cache=tmp_path / "cache").fingerprint

    assert key("auto") != key("\n\n")
