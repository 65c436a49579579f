"""The tutorial's notebook, run from top to bottom on tiny settings, without Jupyter."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import docs_check
import tiny
from tfive.rl.qualify import Qualifier

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "docs" / "tutorial" / "tutorial.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; returns the value of its last line where that is an expression."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, NOTEBOOK.name, "exec"), names)
        return None
    tree.body.pop()
    exec(compile(tree, NOTEBOOK.name, "exec"), names)
    return eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)


def small_model(folder: Path) -> Path:
    """The tiny model with room for the notebook's sentence."""
    model = tiny.model()
    model.config.max_position_embeddings = 256
    model.save_pretrained(folder / "tiny")
    tiny.tokenizer().save_pretrained(folder / "tiny")
    return folder / "tiny"


@pytest.mark.model
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFIVE_CACHE", str(tmp_path / "cache"))
    # Critics of this size qualify by luck alone; here it only matters that every cell does what it should.
    monkeypatch.setattr(Qualifier, "_criterion", lambda *_: (True, "let through"))
    settings = [*tiny.OVERRIDES, "text.sequence_length=48", "window.windows=1", f"model.name={small_model(tmp_path)}"]
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in cells("code"):
        found = run_cell("".join(cell["source"]), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names |= {"DOCUMENTS": 200, "SETTINGS": settings}
        shown.append(found)
    assert names["summary"]["windows"] == 1
    assert (tmp_path / "out" / "README.md").is_file()
    drawn = [one._repr_html_() for one in shown if hasattr(one, "_repr_html_")]
    assert len(drawn) == 2
    assert all(html.startswith("<div") for html in drawn)


def test_the_notebook_is_clean_and_has_settings_to_change() -> None:
    content = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells("code"))
    tagged = [cell for cell in cells("code") if "parameters" in cell["metadata"].get("tags", ())]
    assert len(tagged) == 1


def test_the_notebooks_links_and_commands_lead_somewhere() -> None:
    text = "\n\n".join("".join(cell["source"]) for cell in cells("markdown"))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    for link in links:
        assert (NOTEBOOK.parent / link.partition("#")[0]).is_file(), link
    commands = re.findall(r"`(tfive [^`]+)`", text)
    assert commands
    assert [docs_check.parse_error(command.split(), set()) for command in commands] == [None] * len(commands)
