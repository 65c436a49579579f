"""docs/explanation/paper.md: every label of the paper once, verdicts that are counted right, names that exist."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

from test_doc_names import is_name, resolve
from tfive.config.config import Config, presets, variants
from tfive.methods.registry import spec_of
from tfive_lab.theory.statements import REGISTRY

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "explanation" / "paper.md").read_text("utf-8")
LABELS = (ROOT / "tests" / "paper_labels.txt").read_text("utf-8").split()
"""Every label of the paper's TeX source, in its order."""

VERDICTS = ("agrees", "deviates", "checked", "reported", "text", "missing")
LABEL = r"(?:eq|alg|app|sec|prop|lem|thm|cor|fig|tab):[a-z0-9-]+"


def rows(cells: int) -> list[list[str]]:
    """The rows of tables with so many columns, heads and rules left out."""
    lines = [line.strip().strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line] for line in lines if len(line) == cells]
    return [row for row in found if row[-1].startswith("**")]


def labelled() -> list[tuple[list[str], str, str]]:
    """Labels, where and verdict of every row about the paper's labels."""
    return [(re.findall(rf"`({LABEL})`", row[0]), row[2], row[3]) for row in rows(4)]


def verdict_of(cell: str) -> str:
    found = re.match(r"\*\*(\w+)\*\*", cell)
    assert found is not None, cell
    assert found[1] in VERDICTS, cell
    return found[1]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_label_of_the_paper_has_one_row() -> None:
    assert len(LABELS) == len(set(LABELS)) == 201
    counted = Counter(label for labels, _, _ in labelled() for label in labels)
    assert sorted(set(LABELS) - set(counted)) == []
    assert sorted(set(counted) - set(LABELS)) == []
    assert [label for label, count in counted.items() if count > 1] == []


def test_the_counts_at_the_top_are_those_of_the_rows() -> None:
    counted = Counter(verdict_of(verdict) for labels, _, verdict in labelled() for _ in labels)
    stated = {word: int(count) for word, count in re.findall(r"^\| \*\*(\w+)\*\* \| (\d+) \|", PAGE, re.MULTILINE)}
    assert stated == {word: counted[word] for word in VERDICTS}
    assert f"({sum(stated.values())} labels" in PAGE


def test_what_a_row_claims_can_be_followed() -> None:
    for labels, where, verdict in labelled():
        word, names = verdict_of(verdict), named(where)
        # Only an argument may stand without code, and what is missing has none.
        assert names or word in ("text", "missing"), labels
        assert len(verdict) > 40 or word not in ("deviates", "missing"), f"{labels}: say why"
        if word == "checked":
            assert any(name.startswith("tfive_lab.theory.claims_") for name in names), labels
        for name in names:
            assert found_at(name) is not None, name


def found_at(name: str) -> object:
    """What a dotted name stands for, of this package or of `tfive_lab`."""
    if not name.startswith("tfive_lab."):
        assert is_name(name), name
        return resolve(name)
    found: object = importlib.import_module(".".join(name.split(".")[:3]))
    for part in name.split(".")[3:]:
        found = getattr(found, part)
    return found


def test_every_line_of_the_algorithm_and_every_rule_names_its_code() -> None:
    found = [row for row in rows(3) if not row[0].startswith("**")]
    assert [row[0].split(":")[0] for row in found[:6]] == [f"line {number}" for number in range(1, 7)]
    for rule, where, verdict in found:
        assert [resolve(name) for name in named(where)] or verdict_of(verdict) == "missing", rule
        assert set(re.findall(LABEL, rule)) <= set(LABELS)
    phases = {name.rpartition(".")[2] for row in found[:6] for name in named(row[1]) if name.startswith("methods.t5")}
    assert phases - {"_validate"} <= set(spec_of("t5").phases)


def test_statements_that_are_checked_are_called_so() -> None:
    verdicts = {label: verdict_of(verdict) for labels, _, verdict in labelled() for label in labels}
    assert set(REGISTRY) <= set(LABELS)
    # A statement that a run also computes may agree or deviate instead.
    assert {verdicts[label] for label in REGISTRY} <= {"checked", "agrees", "deviates"}


def test_keys_and_presets_that_the_page_names_exist() -> None:
    keys = set(Config().leaves())
    sections = {key.split(".")[0] for key in keys if "." in key}
    words = [text.split(" = ")[0] for text in named(PAGE)]
    dotted = [word for word in words if re.fullmatch(r"[a-z_]+\.[a-z_]+", word) and word.split(".")[0] in sections]
    assert [word for word in dotted if word not in keys and not is_name(word)] == []
    hyphened = [word for word in words if re.fullmatch(r"(?:qwen|ablation|learning)[\w.-]+", word)]
    assert "learning-dynamics" in hyphened
    assert set(hyphened) <= {*presets(), *variants()}
