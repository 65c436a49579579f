"""The study of hindsight alone: its tables are those of the results, and pages say what these hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import scripts
from tfive.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study() -> Any:
    return scripts.script("studies/answers/from_hindsight.py")


@pytest.fixture(scope="module")
def found(study: Any) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(study.RESULTS.read_text("utf-8"))
    return kept


def test_the_page_shows_the_committed_results(study: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    emptied = study.PAGE.read_text("utf-8")
    for name in study.TABLES:
        before, _, rest = emptied.partition(f"<!-- table: {name} -->\n")
        emptied = f"{before}<!-- table: {name} -->\n{rest[rest.index('<!-- end of table -->') :]}"
    page.write_text(emptied, "utf-8")
    assert study.main(["--page", str(page)]) == 0
    assert page.read_text("utf-8") == study.PAGE.read_text("utf-8")


def right(model: dict[str, Any], condition: str = "own") -> str:
    return f"{100 * model['results']['every']['accuracy'][condition][0]:.1f}"


def test_pages_tell_what_was_answered(study: Any, found: dict[str, Any]) -> None:
    cells = {study.title(cell): cell["accuracy"] for cell in study.ordered(found)}
    asked = found["benchmarks"]["gsm8k"]
    starts = [right(asked[study.COLD]), right(asked[study.START])]
    ends = [right(cells[name]["benchmarks"]["gsm8k"]) for name in ("T⁵", "GRPO", "anchors alone")]
    fresh = [right(found["accuracy"][study.START]), *(right(cells[name]) for name in ("T⁵", "GRPO", "anchors alone"))]
    readme = (ROOT / "README.md").read_text("utf-8")
    own = f"goes from {starts[0]} % of GSM8K's test (as it comes, with its own thought) to {starts[1]} and {ends[0]} % "
    assert f"{own}with T⁵, {ends[1]} with GRPO, and {ends[2]} with anchors alone" in readme
    rest = f"{fresh[1]}, {fresh[2]} and {fresh[3]}"
    assert f"of fresh problems from {fresh[0]} % (after hindsight; not asked before) to {rest}" in readme
    page = study.PAGE.read_text("utf-8")
    begun = f"{starts[0]} % rightly after its own greedy thought as it comes ({right(asked[study.COLD], 'none')} % "
    assert f"{begun}without a thought), {starts[1]} % after" in page
    cold = cells["T⁵, no warm start at all"]
    assert f"ends at {right(cold['benchmarks']['gsm8k'])} and {right(cold)} %" in page


def test_starts_are_what_the_page_says_of_them(study: Any, found: dict[str, Any]) -> None:
    noted, own = found["starts"]["noted"], found["starts"]["own"]
    page = study.PAGE.read_text("utf-8")
    gains = [f"{one:+.3f}" for one in (noted["before"]["content_gain"], noted["after"]["content_gain"])]
    assert f"({gains[0]} → {gains[1]})" in page
    after = [one["after"]["no_thought_loss"] - one["after"]["thought_gain"] for one in (noted, own)]
    assert f"the noted start is ahead, {after[0]:.3f} to {after[1]:.3f}" in page
    kept = [f"{100 * one['kept'] * 8 / one['thoughts']:.0f}" for one in own["rounds"]]
    assert f"{kept[0]} % were (then {kept[1]} and {kept[2]} %)" in page
    assert f"{found['accuracy'][study.START]['results']['every']['problems']} of the fresh problems" in page
    assert f"{100 * noted['rounds'][-1]['informed']:.0f} % came" in page
    assert f"from {gains[0]} to {own['after']['content_gain']:+.3f}" in page
    assert noted["rounds"][-1]["informed"] > noted["rounds"][0]["informed"] > 0
    assert all(one["informed"] == 0 for one in own["rounds"])


@pytest.mark.parametrize("start", ["other=README.md", "own=nowhere.json", "own"])
def test_a_start_that_is_not_there_is_refused(study: Any, tmp_path: Path, start: str) -> None:
    with pytest.raises(UserError, match="give one of noted, own, and a file that is there"):
        study.main(["--runs", str(tmp_path), "--start", start, "--out", str(tmp_path / "out.json")])
    assert not list(tmp_path.iterdir())


def test_lots_take_as_many_thoughts_as_hindsight_does() -> None:
    begun = scripts.script("studies/answers/start.py")
    draw = torch.Generator().manual_seed(0)
    own, other, none = (torch.rand(6, 8, generator=draw) for _ in range(3))
    valid = torch.rand(6, 8, generator=draw) > 0.2
    _, _, useful = begun.chosen(own, other, none, valid, 4)
    branch, gain, taken = begun.by_luck(own, other, none, valid, 4)
    assert useful.any()
    assert taken.sum() == useful.sum()
    assert valid.gather(1, branch)[taken].all()
    assert (branch == torch.tensor([0, 4])).all()
    assert torch.allclose(gain, other.view(6, 2, 4).mean(-1) - own[:, ::4])
    again = begun.by_luck(own, other, none, valid, 4)[2]
    assert torch.equal(again, taken)
    assert not torch.equal(taken, useful)  # another choice: of losses it only has the number
