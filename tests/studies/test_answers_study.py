"""The study of thoughts before answers: sheets, warm start, headroom, a cell and its tables on a tiny random model; and
the committed page shows the committed numbers."""

from __future__ import annotations

import gzip
import json
import re
import statistics
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from answer_sheets import LENGTH, SMALL
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import scripts
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.text.sheets import ANSWER, HEADER, Problem, shown
from tfive.text.workings import worked_texts

ROOT = Path(__file__).resolve().parents[2]


def rows_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as rows:
        return [json.loads(row) for row in rows]


def test_sheets_fill_rows_and_share_no_problem(place: Path) -> None:
    tokenizer = Tokenizer.from_file(str(place / "model" / "tokenizer.json"))
    files = {name: rows_of(place / "sheets" / f"{name}.jsonl.gz") for name in ("test", "warm", "runs")}
    seen: list[set[str]] = []
    for rows in files.values():
        assert rows
        assert {len(tokenizer.encode(row["text"]).ids) for row in rows} == {LENGTH - 1}
        seen.append({name for row in rows for name in row["problems"]})
    assert sum(map(len, seen)) == len(set().union(*seen))
    assert not {f"p{number}" for number in range(5)} & set().union(*seen)
    text = files["runs"][0]["text"]
    assert text.startswith(HEADER)
    assert len(text.split(ANSWER)) - 1 == 2 + len(files["runs"][0]["problems"])


def test_what_a_sheet_leaves_out_is_the_rest_of_the_working() -> None:
    one = Problem("p", "How many?", ("a", "b", "c"), "7")
    assert shown(one, "1") == ("Question: How many? So far: a. b.\nAnswer:\n", "c")
    assert shown(one, "2") == ("Question: How many? So far: a.\nAnswer:\n", "b. c")
    assert shown(one, "all") == ("Question: How many?\nAnswer:\n", "a. b. c")


def test_a_file_without_problems_is_refused(tmp_path: Path, render: ModuleType) -> None:
    with gzip.open(tmp_path / "none.jsonl.gz", "wt") as out:
        out.write(json.dumps({"id": "m", "source": "math_train", "text": "x", "fewshot": False}) + "\n")
    with pytest.raises(UserError, match="0 problems of gsm8k_train and 0 with fewshot"):
        render.read_problems(tmp_path / "none.jsonl.gz")


@pytest.mark.model
def test_the_warm_start_learns_workings_and_never_the_opening(place: Path, tmp_path: Path) -> None:
    warm = scripts.script("studies/answers/warm_start.py")
    loaded = warm.load_model(str(place / "model"), device="cpu", dtype=torch.float32)
    data = warm.examples(place / "sheets", loaded.tokenizer, 62)
    for ids, kinds in data[:20]:
        text = loaded.tokenizer.decode([token for token, kind in zip(ids, kinds) if kind == warm.THOUGHT])
        assert re.fullmatch(r"(?s) .*\n####", text)
        assert warm.OPEN in loaded.tokenizer.decode([t for t, kind in zip(ids[1:], kinds[1:]) if kind == warm.NOTHING])
    head = loaded.model.get_output_embeddings().weight.detach().clone()
    model = warm.tied(loaded.model)
    assert torch.equal(model.get_input_embeddings().weight, head)
    assert model.get_input_embeddings().weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    some, device = data[:8], torch.device("cpu")
    among = warm.counts(some)
    with torch.no_grad():
        whole = warm.losses(model, some, 0, device, among)
        parts = [warm.losses(model, some[share::3], 0, device, among) for share in range(3)]
    for kind in warm.WEIGHTS:
        torch.testing.assert_close(sum(part[kind] for part in parts), whole[kind])
    course = warm.learn(model, data, 0, steps=40, batch=8, rate=2e-2, passes=2)
    assert course[-1] < 0.8 * course[0]
    assert warm.main([str(place / "model"), "none", str(tmp_path / "folder"), "--steps", "0"]) == 0
    again = warm.load_model(str(tmp_path / "folder"), device="cpu", dtype=torch.float32).model
    assert torch.equal(again.get_input_embeddings().weight, head)


@pytest.mark.model
def test_careful_reading_and_what_a_critic_can_know(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    asked = [
        word
        for one in (*SMALL, "thought.length=40", "thought.checkpoints=[40]", f"text.cache={tmp_path / 'cache'}")
        for word in ("--set", one)
    ]
    careful = scripts.script("studies/answers/careful.py")
    assert careful.main(["model", str(tmp_path / "careful"), "--steps", "3", "--rate", "1e-3", *asked]) == 0
    told = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert told["reading"]["continuation_last"] < told["reading"]["continuation_first"]
    assert told["after"]["no_thought_loss"] != told["before"]["no_thought_loss"]
    scripts.script("studies/answers/headroom.py")
    foresight = scripts.script("studies/answers/foresight.py")
    monkeypatch.setattr(foresight, "PASSES", (2,))
    monkeypatch.setattr(foresight, "BUDGETS", (8,))
    out = tmp_path / "foresight.json"
    assert foresight.main([str(tmp_path / "careful"), "--sheets", "8", "--many", "2", "--out", str(out), *asked]) == 0
    found = json.loads(out.read_text("utf-8"))
    assert found["thoughts"] == 32
    assert {row["block"] for row in found["rows"]} == {1, 2}
    way = scripts.script("studies/answers/on_the_way.py")
    monkeypatch.setattr(way, "LEAST", 4)
    out = tmp_path / "way.json"
    shape = ["--sheets", "8", "--many", "2", "--every", "10", "--out", str(out)]
    assert way.main([str(tmp_path / "careful"), *shape, *asked]) == 0
    told = json.loads(out.read_text("utf-8"))
    assert told["thoughts"] == 32
    assert [row["step"] for row in told["rows"]] == [10, 20, 30]
    with pytest.raises(UserError, match="--many 1 --every 10"):
        way.main([str(tmp_path / "careful"), *shape[:3], "1", *shape[4:], *asked])
    with pytest.raises(UserError, match=r"--every 40: no step on the way of thought\.length = 40"):
        way.main([str(tmp_path / "careful"), "--every", "40", *asked])
    # Sheets of the same problems are fitted or tested together.
    rows = rows_of(place / "sheets" / "runs.jsonl.gz")
    source = tomllib.loads(Path(str(foresight.PRESET)).read_text("utf-8"))["text"]["sources"][0]
    numbers = foresight.same_problems([row["text"] for row in rows], source["split_by"])
    problems = ["".join(row["problems"]) for row in rows]
    assert len(set(zip(numbers, problems))) == len(set(numbers)) == len(set(problems)) < len(rows)
    # A value that knows the answer is told apart from one that knows nothing, and from one that knows the position.
    truth = torch.tensor([[1.0, 0.0, 3.0, 2.0]])
    assert foresight.r_squared(truth, truth) == 1.0
    assert foresight.r_squared(truth.mean().expand_as(truth), truth) == 0.0
    apart = foresight.in_positions(truth, torch.tensor([[True, True, True, False]]), 2)
    assert apart.tolist() == [[1.0, 0.0]]


def test_what_a_thought_is_worth_on_the_way_foresees_its_end() -> None:
    scripts.script("studies/answers/headroom.py")
    scripts.script("studies/answers/foresight.py")
    way = scripts.script("studies/answers/on_the_way.py")
    draw = torch.Generator().manual_seed(0)
    texts, group = 400, 4
    place_B1, so_far_BR, luck_BR = (torch.randn(texts, n, generator=draw) for n in (1, group, group))
    length_BR = torch.where(torch.rand(texts, group, generator=draw) < 0.5, 7, 2)
    length_BR[0] = 4  # one token behind the checkpoint, which is the close of two of them
    closed_BR = (length_BR == 4) & torch.tensor([True, True, False, False])
    final_BR = place_B1 + 0.5 * so_far_BR + luck_BR
    worth = way.Worth(
        torch.stack([so_far_BR, final_BR], -1) * (length_BR > 3)[..., None]
        + torch.stack([final_BR, torch.zeros_like(final_BR)], -1) * (length_BR <= 3)[..., None],
        torch.stack([length_BR.clamp(max=3), length_BR], -1),
        torch.stack([torch.ones_like(length_BR), length_BR > 3], -1).bool(),
        final_BR, torch.ones_like(length_BR).bool(), length_BR, closed_BR,
        float(final_BR.mean()),
    )  # fmt: skip
    (row,) = way.by_step(worth, torch.arange(texts), group)  # nobody goes on at the second or the last token
    assert row["step"] == 3
    assert row["thoughts"] == int((length_BR > 3).sum()) - 2
    # Of a variance of 2.25 the place has 1, which three others tell but for their own luck, and what is known 0.25.
    others = 1 / (1 + 1.25 / 3)
    assert row["by the others' mean"] == pytest.approx(others / 2.25, abs=0.06)
    assert row["by its worth so far"] == pytest.approx(0.25 / 2.25, abs=0.05)
    assert row["by both"] == pytest.approx((others + 0.25) / 2.25, abs=0.06)
    assert row["slopes of both"] == pytest.approx([others, 0.5], abs=0.06)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(way, "LEAST", 10_000)
        assert way.by_step(worth, torch.arange(texts), group) == []


@pytest.mark.model
def test_headroom_cells_and_their_tables(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = scripts.script("studies/answers/run.py")
    monkeypatch.chdir(place)
    runs = tmp_path / "runs"
    sets = [f"--set={one}" for one in (*SMALL, "model.name=model", f"text.cache={tmp_path / 'cache'}")]
    assert run.main(["headroom", "warm", "--items", "12", "--runs", str(runs), *sets]) == 0
    items = json.loads((runs / "headroom-warm.json").read_text("utf-8"))
    assert 12 <= len(items) < 20
    for item in items:
        assert item["best16"] >= max(item["own"], item["mean16"])
        assert 0 <= item["right"] <= 1
        assert item["missing"] in ("1", "2", "all")
    cells = ["cell", "anchor-only+optimizer.lr=1e-5", "--seed", "1", "--runs", str(runs), *sets]
    benchmark = tmp_path / "gsm8k.jsonl.gz"
    with gzip.open(benchmark, "wt", encoding="utf-8") as rows:
        rows.writelines(json.dumps({"question": f"{n} plus\n 2?", "answer": f"1,00{n}"}) + "\n" for n in range(3))
    formulas = tmp_path / "math500.jsonl.gz"
    with gzip.open(formulas, "wt", encoding="utf-8") as rows:
        rows.writelines(
            json.dumps({"question": f"Half of {n}?", "answer": f"\\frac{{{n}}}{{2}}"}) + "\n" for n in (3, 5)
        )
    both = ["--benchmark", str(benchmark), "--benchmark", str(formulas)]
    assert run.main([*cells, "--problems", "test", "--limit", "6", *both]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "left out every, 6 answers" in told[-1]
    assert not list(runs.rglob("model.safetensors"))
    assert run.main(cells) == 0  # passed over: it has a result
    assert capsys.readouterr().out.splitlines() == told[-4:]
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- table: course -->\nold\n<!-- end of table -->\nAfter.\n", "utf-8")
    asked = ["table", "--runs", str(runs), "--out", str(tmp_path / "found.json"), "--page", str(page)]
    assert run.main(asked) == 0
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert [row["missing"] for row in found["headroom"]["warm"]][-1] == "every"
    (cell,) = found["cells"]
    assert cell["settings"]["optimizer.lr"] == 1e-5
    assert cell["settings"]["run.seed"] == 1
    assert cell["accuracy"]["results"]["every"]["items"] == 6
    on_benchmark = cell["accuracy"]["benchmarks"]["gsm8k"]["results"]["every"]
    assert (on_benchmark["items"], on_benchmark["problems"], "true" in on_benchmark["accuracy"]) == (3, 3, False)
    assert cell["accuracy"]["benchmarks"]["gsm8k"]["examples"][0]["answer"] == "1000"
    assert cell["accuracy"]["benchmarks"]["math500"]["results"]["every"]["items"] == 2
    assert len(cell["test"]["thought_gain"]) == 3
    assert (cell["method"], cell["status"], cell["actor_thoughts_per_window"]) == ("anchor-only", "1 windows", 8)
    assert [one["window"] for one in cell["measured"]] == [0, 1]
    shown = page.read_text("utf-8")
    assert "old" not in shown
    assert f"{cell['measured'][1]['thought_gain'][0]:+.3f}".replace("-", "−") in shown
    assert shown.startswith("Before.\n")
    assert shown.endswith("After.\n")


def test_a_failed_cell_says_why(tmp_path: Path) -> None:
    collect = scripts.script("studies/answers/collect.py")
    (tmp_path / collect.FAILURE).write_text("no number\n", "utf-8")
    assert collect._status(tmp_path, [{"step": 0}]) == "failed: no number"


def test_the_page_shows_the_committed_results() -> None:
    tables = scripts.script("studies/answers/tables.py")
    pages = [page.read_text("utf-8") for page in scripts.script("studies/answers/run.py").PAGES]
    found = json.loads((ROOT / "results" / "answers-study.json").read_text("utf-8"))
    named = re.findall(r"<!-- table: (\w+) -->", "".join(pages))
    others = scripts.script("studies/answers/from_hindsight.py").BRIEF
    assert sorted(named) == sorted([*tables.TABLES, *others])
    assert [tables.draw(page, found) for page in pages] == pages
    readme = (ROOT / "README.md").read_text("utf-8")
    clocks = scripts.script("studies/answers/long_tables.py")
    eight = clocks.ended(clocks.of_clock(found, "groups"))
    assert len(eight) == 5
    (row,) = (line for line in readme.splitlines() if line.startswith("| Qwen2.5-Coder-0.5B before answers, 64 tokens"))
    for name, cells in eight.items():
        assert f"{statistics.fmean(cell['test']['content_gain'][0] for cell in cells):+.3f}" in row, name


def test_the_short_table_is_of_the_cells_it_names() -> None:
    page = (ROOT / "docs" / "studies" / "answers.md").read_text("utf-8")
    found = json.loads((ROOT / "results" / "answers-study.json").read_text("utf-8"))

    def share(one: dict[str, Any]) -> float:
        return float(100 * one["results"]["every"]["accuracy"]["own"][0])

    def own(method: str, seeds: Sequence[int], crossed: bool, start: str, benchmark: bool) -> dict[int, float]:
        cells = [
            cell
            for cell in found["cells"]
            if (cell["method"], cell.get("start")) == (method, start)
            and cell["settings"]["run.seed"] in seeds
            and bool(cell["settings"].get("window.crossed")) == crossed
            and "test" in cell
        ]
        answers = [one["accuracy"]["benchmarks"]["gsm8k"] if benchmark else one["accuracy"] for one in cells]
        return {cell["settings"]["run.seed"]: share(one) for cell, one in zip(cells, answers)}

    times = {15: "fifth", 16: "fifth", 17: "sixth", 18: "sixth", 31: "eighth"} | dict.fromkeys(range(19, 23), "seventh")

    for asked, benchmark in (("fresh problems", False), ("GSM8K's test", True)):
        for name, seeds, crossed in (("128 tokens, paid on the way", range(15, 19), False),
                                     ("the same, T⁵ with `window.crossed`", (*range(19, 23), 31), True)):  # fmt: skip
            (line,) = (one for one in page.splitlines() if one.startswith(f"| {asked} | {name} |"))
            shown = line.strip("| ").split(" | ")
            t5 = own("t5", seeds, crossed, "careful-128", benchmark)
            grpo = own("quiet-star-grpo", seeds, False, "careful-128", benchmark)
            assert set(t5) == set(grpo) == set(seeds)
            control = own("anchor-only", seeds, False, "careful-128", benchmark)
            kept = found["benchmarks"]["gsm8k"] if benchmark else found["accuracy"]
            begun = {seed: share(kept[f"careful-128-{times[seed]}"]) for seed in seeds}
            assert float(shown[5]) == pytest.approx(statistics.fmean(begun.values()), abs=0.051)
            for cell, ends in ((shown[-1], t5), (shown[-3], grpo), (shown[-5], control)):
                value, rise, fewer = re.fullmatch(r"([\d.]+) \(([+−][\d.]+)(?:; (\d) seeds?)?\)", cell).groups()  # type: ignore[union-attr]
                assert float(value) == pytest.approx(statistics.fmean(ends.values()), abs=0.051)
                expected = statistics.fmean(ends.values()) - statistics.fmean(begun[seed] for seed in ends)
                assert float(rise.replace("−", "-")) == pytest.approx(expected, abs=0.051)
                assert fewer == (None if len(ends) == len(seeds) else str(len(ends)))


@pytest.mark.parametrize(
    ("seeds", "told"), [(range(30, 31), "30"), (range(3, 6), "3 to 5"), ((19, 20, 21, 22, 31), "19 to 22, 31")]
)
def test_seeds_that_follow_each_other_are_told_by_their_ends(seeds: Sequence[int], told: str) -> None:
    assert scripts.script("studies/answers/short_table.py").in_runs(seeds) == told


def test_the_readme_tells_what_its_short_table_shows() -> None:
    readme, page = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/studies/answers.md"))
    lines = [line for line in page.splitlines() if line.startswith(("| fresh problems |", "| GSM8K's test |"))]
    rows = [line.strip("| ").split(" | ") for line in lines]

    def rises(asked: str, column: int) -> str:
        found = [re.search(r"\(([+−][\d.]+)", row[column]) for row in rows if row[0] == asked]
        known = sorted(float(one[1].replace("−", "-")) for one in found if one)
        return f"{known[0]:+.1f} to {known[-1]:+.1f}".replace("-", "−")

    t5 = [rises(asked, -1).replace("+", "") for asked in ("fresh problems", "GSM8K's test")]
    control = [rises(asked, -5) for asked in ("fresh problems", "GSM8K's test")]
    assert "rewards add {} points to fresh problems and {} to GSM8K's test".format(*t5) in readme
    assert "the control that is never rewarded, {} and {}.".format(*control) in readme
    # The readme's rows are some of the page's.
    brief = [line for line in readme.splitlines() if line.startswith(("| fresh problems |", "| GSM8K's test |"))]
    assert len(brief) == 6
    figures = {tuple(row[:1] + row[2:]) for row in rows}
    assert all(tuple((row := line.strip("| ").split(" | "))[:1] + row[2:]) in figures for line in brief)


def test_pages_tell_of_the_larger_model_what_its_runs_measured() -> None:
    found = json.loads((ROOT / "results" / "answers-study.json").read_text("utf-8"))
    start, ended = "careful-128-1.5b", {
        cell["method"]: cell for cell in found["cells"] if cell.get("start") == "careful-128-1.5b" and "test" in cell
    }  # fmt: skip
    t5, grpo = ended["t5"], ended["quiet-star-grpo"]

    def right(model: dict[str, Any], condition: str = "own") -> float:
        share: float = model["results"]["every"]["accuracy"][condition][0]
        return round(100 * share, 1)

    before, on_gsm8k = found["accuracy"][start], found["benchmarks"]["gsm8k"]
    after, last = t5["accuracy"], t5["accuracy"]["benchmarks"]["gsm8k"]
    readme, page = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/studies/answers.md"))
    unaided = right(after, "none") - right(before, "none")
    said = f"At 1.5B no control was run from given workings, and {unaided:.1f} points of the rise on fresh problems are"
    assert said in readme
    rows = [line for line in readme.splitlines() if "| 1.5B, T⁵ with `window.crossed` |" in line]
    for row, now, then in zip(rows, (after, last), (before, on_gsm8k[start]), strict=True):
        shown = [cell.split(" ")[0] for cell in row.strip("| ").split(" | ")]
        told = [float(shown[place]) for place in (3, 4, 5, -1)]
        assert told == [right(now, "none"), right(now, "empty"), right(then), right(now)]
    content = t5["test_start"]["content_gain"], t5["test"]["content_gain"][0]
    assert "content gain rises from {:+.3f} to {:+.3f}".format(*content) in page
    theirs = right(grpo["accuracy"]), right(grpo["accuracy"]["benchmarks"]["gsm8k"])
    assert "GRPO has {} and {:.1f} % and {:+.3f}".format(*theirs, grpo["test"]["content_gain"][0]) in page
    assert t5["accuracy"]["benchmarks"]["gsm8k"]["examples"][0]["after"] == "18"


def test_gains_on_trained_sheets_stand_beside_those_on_fresh_ones() -> None:
    clocks = scripts.script("studies/answers/long_tables.py")
    measured = [{"thought_gain": [gain], "items": 30, "texts": 10} for gain in (0.2, 0.3, 0.25)]
    settings = {"window.items": 60, "group": 1, "run.seed": 7, "optimizer.lr": 1e-5}
    cell = {
        "method": "t5",
        "start": "careful",
        "settings": settings,
        "measured": measured,
        "test": {},
        "test_start": {},
    }
    cell["windows"] = [{"actor_gain": gain} for gain in (0.21, 0.3, 0.3, 0.3, 0.4, 0.5)]
    unlike = cell | {"method": "rlp"}
    *_, row = clocks.text_again({"cells": [cell, unlike]}).splitlines()
    # Six windows of 60 positions, three a sheet; the last two windows' mean is 0.45.
    assert row == "| T⁵, 60 × 1 | 7 | 100 | +0.210 | +0.200 | +0.450 | +0.250 | +0.200 | +0.190 |"


def test_each_method_is_held_against_the_control_with_the_same_positions() -> None:
    tables = scripts.script("studies/answers/tables.py")
    found = json.loads((ROOT / "results" / "answers-study.json").read_text("utf-8"))
    rows = [line.split(" | ")[:2] for line in tables.between(found).splitlines()[2:]]
    pairs = {(first.removeprefix("| "), second) for first, second in rows}
    assert ("T⁵, 2,048 × 1", "anchors alone, 2,048 × 1") in pairs
    assert ("GRPO, 256 × 8", "anchors alone, 256 × 1") in pairs
    assert ("T⁵, 2,048 × 1", "anchors alone, 256 × 1") not in pairs
    # No control of the first recipe had GRPO's positions: the one there is stands in.
    cold = tables.between(found, tables.COLD)
    assert "| GRPO, 192 × 8 | anchors alone, 768 × 1 |" in cold


def test_models_are_paired_answer_by_answer() -> None:
    tables = scripts.script("studies/answers/tables.py")
    mean, low, high = tables.paired("110010" * 30, "100011" * 30)
    assert mean == 0.0
    assert low == pytest.approx(-high)
    # A difference of 1 on a sixth and of -1 on a sixth has a variance of a third.
    assert high == pytest.approx(1.96 * (1 / 3 * 180 / 179 / 180) ** 0.5)
    with pytest.raises(ValueError, match="zip"):
        tables.paired("11", "1")


def test_a_finished_run_is_told_by_its_test_texts(tmp_path: Path) -> None:
    collect = scripts.script("studies/answers/collect.py")
    summary = {"test_thought_gain_end": 0.25, "test_thought_gain_interval": [0.1, 0.4], "test_mean_thought_length": 7.0}
    found = collect._tested({**summary, "test_mixed_gain_constant": 0.2, "dev_thought_gain_end": 9.0})
    assert found == {"thought_gain": [0.25, 0.1, 0.4], "mixed_gain_constant": [0.2], "mean_thought_length": 7.0}


@pytest.mark.model
def test_accuracy_with_and_without_thoughts(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = scripts.script("studies/answers/accuracy.py")
    asked = [str(place / "model"), str(place / "sheets"), "--limit", "12", "--samples", "2", "--device", "cpu"]
    sets = ["--set", "thought.length=8", "--set", "thought.checkpoints=[8]"]
    assert accuracy.main([*asked, *sets, "--out", str(tmp_path / "a.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "a.json").read_text("utf-8")) == found
    every = found["results"]["every"]
    assert every["items"] == 12
    assert set(every["accuracy"]) == {"none", "own", "sampled", "vote", "other", "empty", "random", "true"}
    assert set(found["verdicts"]["own"]) <= {"0", "1"}
    with pytest.raises(UserError, match=r"workings\.json\.gz is missing"):
        accuracy.read_items(tmp_path, [], None)


def test_accuracy_is_paired_over_problems(place: Path) -> None:
    accuracy = scripts.script("studies/answers/accuracy.py")
    items = [accuracy.Item((), f"p{n // 2}", "1" if n % 2 else "all", (), str(n)) for n in range(8)]
    assert [items[donor].missing for donor in accuracy.donors(items)] == [item.missing for item in items]
    assert all(items[donor].problem != item.problem for donor, item in zip(accuracy.donors(items), items))
    texts = [str(n) for n in range(8)]
    wrong = ["Working: 3", *texts[1:4], *["9"] * 4]
    written = {"none": [wrong], "own": [texts], "sampled": [texts, wrong, wrong]}
    values, coverage = accuracy.scored(items, written)
    assert values["own"] == [1.0] * 8
    assert values["vote"] == [1.0] * 4 + [0.0] * 4
    assert coverage["none"] == pytest.approx(7 / 8)
    every = accuracy.summarised(items, values)["every"]
    gap = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    means = [sum(gap[n : n + 2]) / 2 for n in range(0, 8, 2)]
    error = (sum((one - 0.625) ** 2 for one in means) / 3 / 4) ** 0.5
    assert every["difference"]["own - none"] == pytest.approx(
        [0.625, 0.625 - 1.96 * error, 0.625 + 1.96 * error], abs=1e-3
    )
    assert accuracy.NUMBERS.right("$1,200.\n", "1200")
    assert accuracy.NUMBERS.right("Working: 5", "5") is None


def test_cells_run_side_by_side_and_a_broken_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = scripts.script("studies/answers/cells.py")
    both = [cells.Cell(f"t5+qualify.eta={eta}", 1, ("window.windows=2",)) for eta in (0, 0.05)]
    assert [cell.config().qualify.eta for cell in both] == [0, 0.05]
    assert [cell.config().run.seed for cell in both] == [1, 1]
    assert both[0].name == "t5+qualify.eta=0+window.windows=2-seed1"
    monkeypatch.setattr(cells, "corpus_of", lambda config: None)
    # Each waits for the other's file, so that neither ends unless both run at once; the second then fails.
    waits = (
        "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\n"
        "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.05)\n"
    )
    said = "if sys.argv[1].endswith('b'): sys.exit('no memory')"
    names = {both[0]: ("a", "b"), both[1]: ("b", "a")}
    assert "--share 0.667 " in " ".join(both[0].command(tmp_path, cells.Measuring(), 2 / 3))
    shares = []

    def command(cell: Any, runs: Path, measuring: Any, share: float) -> list[str]:
        shares.append(share)
        return [sys.executable, "-c", waits + said, *(str(runs / name) for name in names[cell])]

    monkeypatch.setattr(cells.Cell, "command", command)
    kept: list[Any] = []
    monkeypatch.setattr(cells, "keep", lambda cell, *_: kept.append(cell))
    broken = cells.run_side_by_side(both, tmp_path, 2, cells.Measuring())
    assert shares == [pytest.approx(2 / 3)] * 2  # an even share, and a third of it more
    assert broken == [f"{both[1].name}: exit status 1: no memory"]
    # A result is kept as its cell ends, unless there is something left to measure, which waits until all have ended.
    assert kept == [both[0]]
    cells.run_side_by_side(both, tmp_path, 2, cells.Measuring("test"))
    assert kept == [both[0]]
    (tmp_path / both[0].name).mkdir()
    (tmp_path / both[0].name / cells.ACCURACY).touch()
    monkeypatch.setattr(cells, "EVERY", 0.0)
    cells.run_side_by_side(both, tmp_path, 2, cells.Measuring("test"), tmp_path / "all.tgz")
    assert kept == [both[0]] * 2
    # An archive was made while they ran.
    with tarfile.open(tmp_path / "all.tgz") as found:
        assert {"a", "b", f"{both[0].name}/{cells.ACCURACY}"} <= set(found.getnames())


def test_an_archive_needs_its_folder(tmp_path: Path) -> None:
    asked = ["cell", "rlp", "--runs", str(tmp_path / "runs"), "--archive", str(tmp_path / "none" / "all.tgz")]
    with pytest.raises(UserError, match=r"^--archive .*all\.tgz: there is no folder"):
        scripts.script("studies/answers/run.py").main(asked)
    assert not list(tmp_path.iterdir())


def test_an_archive_holds_small_files_and_not_itself(tmp_path: Path) -> None:
    cells, runs = scripts.script("studies/answers/cells.py"), tmp_path / "runs"
    (runs / "one" / "checkpoints").mkdir(parents=True)
    (runs / "one" / "metrics.jsonl").write_text("{}\n", "utf-8")
    (runs / "one" / "checkpoints" / "weights.bin").write_bytes(bytes(cells.SMALL + 1))
    for _ in range(2):
        cells.archive(runs, runs / "all.tgz")
    with tarfile.open(runs / "all.tgz") as found:
        assert found.getnames() == ["one/metrics.jsonl"]
        found.extractall(tmp_path / "out", filter="data")
    assert (tmp_path / "out" / "one" / "metrics.jsonl").read_text("utf-8") == "{}\n"


def test_rows_hold_what_they_leave_out(place: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(place / "model" / "tokenizer.json"))
    pattern = re.compile(Config.load(str(ROOT / "studies" / "answers" / "answers.toml")).text.positions.pattern)
    (first, *_) = worked_texts(place / "sheets" / "test.jsonl.gz", tokenizer, pattern, length=LENGTH, per_text=4)
    row = rows_of(place / "sheets" / "test.jsonl.gz")[0]
    assert [tokenizer.decode(list(working or ())) for working in first.workings] == row["workings"]
    for at in first.positions:
        assert str(tokenizer.decode(list(first.tokens[: at + 1]))).endswith(ANSWER)
