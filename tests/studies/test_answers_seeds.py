"""Several seeds of the study of thoughts before answers: one start, cells method by method under a clock, and tables
of what there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answer_sheets import SMALL
from made_up_cells import clocked, lines_of, made_up
from safetensors.numpy import save_file
from safetensors.torch import load_file

import scripts
from tfive.errors import UserError
from tfive.rl.clusters import clustered_mean

PLACES = "<!-- table: {} -->\n<!-- end of table -->\n"


@pytest.mark.model
def test_one_start_is_the_two_scripts_one_after_the_other(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    longer = ("thought.length=40", "thought.checkpoints=[40]", f"text.cache={tmp_path / 'cache'}")
    sets = [f"--set={one}" for one in (*SMALL, *longer, "model.compute=bfloat16")]
    warm = ["--steps", "2", "--batch", "4", "--rate", "1e-3", "--device", "cpu"]
    start, both, apart = scripts.script("studies/answers/start.py"), tmp_path / "both", tmp_path / "apart"
    once = ["model", "sheets", str(both / "careful"), *warm, "--warm", str(both / "warm")]
    assert start.main([*once, "--reading", "2", "--reading-rate", "1e-3", *sets]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) == {"reading", "seconds"}
    assert scripts.script("studies/answers/warm_start.py").main(["model", "sheets", str(apart / "warm"), *warm]) == 0
    asked = [str(apart / "warm"), str(apart / "careful"), "--steps", "2", "--rate", "1e-3", *sets]
    assert scripts.script("studies/answers/careful.py").main(asked) == 0
    for name in ("warm", "careful"):
        first, second = (load_file(folder / name / "model.safetensors") for folder in (both, apart))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name
    with pytest.raises(UserError, match="careful already exists"):
        start.main([*once, *sets])


@pytest.mark.model
def test_a_start_of_thoughts_drawn_by_lot_learns_as_many_of_others(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    sets = [*SMALL, f"text.cache={tmp_path / 'cache'}", "warmstart.source=hindsight", "warmstart.path=none",
            "warmstart.rounds=1", "warmstart.items=16", "warmstart.samples=4", "warmstart.steps=2"]  # fmt: skip
    told = []
    for name, more in (("best", []), ("lots", ["--by-luck"])):
        asked = ["model", "sheets", str(tmp_path / name), "--steps", "0", "--reading", "2", "--measure", *more]
        start = scripts.script("studies/answers/start.py")
        assert start.main([*asked, "--device", "cpu", *(f"--set={one}" for one in sets)]) == 0
        told.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    best, lots = (one["rounds"][0] for one in told)
    assert told[0]["before"] == told[1]["before"]
    assert best["kept"] == lots["kept"] > 0
    assert best["thoughts"] == lots["thoughts"]
    assert best["content_gain"] > max(0.0, lots["content_gain"])
    assert best["learned"] != lots["learned"]


def test_seeds_of_one_method_share_the_device_with_each_other_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, seen = scripts.script("studies/answers/run.py"), []

    def batches(given: Any, runs: Path, jobs: int, measuring: Any, kept_in: Any) -> None:
        seen.extend([[(cell.label, cell.seed) for cell in cells] for cells in given])
        configs = [cell.config() for cells in given for cell in cells]
        assert {(one.run.seconds, one.window.windows) for one in configs} == {(90.0, run.MANY_WINDOWS)}
        assert measuring.code == "abc"

    monkeypatch.setattr(run, "run_cells", batches)
    asked = ["cell", "rlp", "anchor-only", "--seed", "1", "--seed", "2", "--seconds", "90", "--code", "abc"]
    assert run.main([*asked, "--runs", str(tmp_path), "--together", "seeds"]) == 0
    assert seen == [[("rlp", 1), ("rlp", 2)], [("anchor-only", 1), ("anchor-only", 2)]]
    seen.clear()
    assert run.main([*asked, "--runs", str(tmp_path)]) == 0
    assert seen == [[("rlp", 1), ("anchor-only", 1), ("rlp", 2), ("anchor-only", 2)]]


def test_a_batch_that_broke_keeps_no_other_from_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, seen = scripts.script("studies/answers/cells.py"), []

    def batch(given: Any, runs: Path, jobs: int, measuring: Any, kept_in: Any) -> list[str]:
        seen.append(given)
        return [f"{given[0]}: no memory"] if given == ["a"] else []

    monkeypatch.setattr(cells, "run_batch", batch)
    with pytest.raises(UserError, match=r"^a: no memory$"):
        cells.run_cells([["a"], ["b"]], tmp_path, 1, cells.Measuring())
    assert seen == [["a"], ["b"]]


@pytest.mark.model
def test_cells_under_a_clock_become_tables(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, runs = scripts.script("studies/answers/run.py"), tmp_path / "runs"
    monkeypatch.chdir(place)
    (tmp_path / "careful").symlink_to(place / "model")
    own = (f"model.name={tmp_path / 'careful'}", f"text.cache={tmp_path / 'cache'}", "run.develop_every=9")
    sets = [f"--set={one}" for one in (*(one for one in SMALL if "window.windows" not in one), *own)]
    common = ["--runs", str(runs), "--seconds", "1e-6", "--code", "now", *sets]
    # Cells of seed 0 search; a single cell of a command runs in this process.
    for rate in ("1e-5", "1e-3"):
        assert run.main(["cell", f"anchor-only+optimizer.lr={rate}", *common]) == 0
    capsys.readouterr()
    assert run.main(["rate", "--runs", str(runs)]) == 0
    chosen = float(capsys.readouterr().out)
    accuracy = scripts.script("studies/answers/accuracy.py")
    asked = [str(tmp_path / "careful"), "sheets", "--limit", "12", "--samples", "1", "--device", "cpu"]
    short = ["--set", "thought.length=8", "--set", "thought.checkpoints=[8]"]
    assert accuracy.main([*asked, *short, "--out", str(runs / "accuracy-careful.json")]) == 0
    for label in ("rlp", "anchor-only"):
        measured = ["--problems", "test", "--limit", "12", "--seed", "1", f"--set=optimizer.lr={chosen}"]
        assert run.main(["cell", label, *common, *measured]) == 0
    page, out, tables = tmp_path / "page.md", tmp_path / "found.json", scripts.script("studies/answers/tables.py")
    page.write_text("".join(PLACES.format(name) for name in tables.CLOCKED_TABLES), "utf-8")
    out.write_text(json.dumps({"cells": [{"name": "old", "code": "x", "measured": []}], "pilot": 1}), "utf-8")
    assert run.main(["table", "--add", "--runs", str(runs), "--out", str(out), "--page", str(page)]) == 0
    found = json.loads(out.read_text("utf-8"))
    assert found["pilot"] == 1
    cells = {(one["method"], one["settings"]["run.seed"]): one for one in found["cells"] if one["name"] != "old"}
    assert len(found["cells"]) == 5  # both rates of the search, both methods, and what there was
    cell = cells["rlp", 1]
    # The window in which the second passed was the last, and is measured though none was due.
    assert [one["window"] for one in cell["measured"]] == [0, 1]
    assert cell["measured"][0]["generated_tokens"] == cell["measured"][0]["training_seconds"] == 0
    last = cell["measured"][1]
    assert last["training_seconds"] > 0
    assert last["thoughts"] == last["actor_thoughts"] == 64
    assert 0 < last["generated_tokens"] <= 64 * 8
    assert (cell["start"], cell["code"], cell["settings"]["run.seconds"]) == ("careful", "now", 1e-6)
    # What is kept text by text gives the mean of the run's own summary.
    totals, items = (list(map(int, cell["by_text"][name].split())) for name in ("thought_gain", "items"))
    assert sum(totals) / 1e4 / sum(items) == pytest.approx(cell["test"]["thought_gain"][0], abs=1e-3)
    assert len(found["clusters"]["test"].split()) == 12 == len(cell["accuracy"]["verdicts"]["random"])
    assert "clusters" not in cell["accuracy"]
    courses = scripts.script("studies/answers/by_window.py")
    assert courses.main([str(runs), "--code", "now", "--out", str(tmp_path / "courses.json")]) == 0
    told = json.loads((tmp_path / "courses.json").read_text("utf-8"))
    assert len(told["runs"]) == 4
    assert all(len(one["windows"]) == 1 and one["gae.alpha"] == 1 and "accuracy" not in one for one in told["runs"])
    assert 0 <= told["starts"]["accuracy-careful"]["every"]["own"][0] <= 1
    seeds = scripts.script("studies/answers/seed_tables.py")
    searched = seeds.begun_careful(found, search=True)
    assert len(searched) == 2
    best = max(searched, key=lambda one: one["measured"][-1]["content_gain"][0])
    assert best["settings"]["optimizer.lr"] == chosen
    shown = page.read_text("utf-8")
    assert "| RLP, 8 × 8 | 1 | " in shown
    assert f"| thought gain | RLP, 8 × 8 | 1 | {tables.signed(cell['test']['thought_gain'][0])} | – | " in shown


def test_intervals_over_seeds_are_students_and_differences_are_paired() -> None:
    seeds = scripts.script("studies/answers/seed_tables.py")
    cells = [made_up("rlp", seed, gain) for seed, gain in ((1, 0.1), (2, 0.3), (3, 0.2))]
    cells += [made_up("anchor-only", seed, gain) for seed, gain in ((1, 0.05), (3, 0.15))]
    found = {"cells": [*cells, {**made_up("rlp", 1, 9.0), "code": seeds.PILOT}]}
    first, control = lines_of(seeds.seeds(found))[:2]
    half = 4.303 * 0.1 / 3**0.5  # two degrees of freedom; the seeds' deviation is 0.1
    assert first[2:5] == ["3", "+0.200", f"{seeds.signed(0.2 - half)} … {seeds.signed(0.2 + half)}"]
    assert first[6] == "+0.050 (+0.050 … +0.050)"  # seeds 1 and 3, both 0.05 apart
    assert control[2:4] == ["2", "+0.100"]
    assert control[6] == "–"
    alone = lines_of(seeds.seeds({"cells": cells[:1]}))[0]
    assert alone[2:5] == ["1", "+0.100", "–"]
    assert lines_of(seeds.seeds({"cells": []})) == []


def test_intervals_over_clusters_are_the_packages() -> None:
    estimates = scripts.script("studies/answers/estimates.py")
    values, clusters = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.75]), torch.tensor([0, 0, 1, 2, 2])
    mean, half = estimates.over_clusters([{0: (1.0, 2), 1: (0.5, 1), 2: (1.0, 2)}])
    wanted = clustered_mean(values, clusters)
    assert mean == pytest.approx(wanted.mean)
    assert half == pytest.approx(1.96 * wanted.error)
    # Verdicts of two seeds against the start, two answers of one problem and one of another.
    over = estimates.over_problems(["110", "100"], ["000"], "0 0 1")
    assert over == pytest.approx(estimates.over_clusters([{0: (1.5, 2), 1: (0.0, 1)}]))
    assert estimates.over_problems(["11"], ["000"], "0 0 1") is None


def test_the_course_is_cut_where_every_rewarded_cell_has_been() -> None:
    seeds = scripts.script("studies/answers/seed_tables.py")
    slow, fast = made_up("t5", 1, 0.1, slow=3, windows=2), made_up("rlp", 1, 0.2, windows=8)
    control = made_up("anchor-only", 1, 0.05, windows=1)
    drawn = lines_of(seeds.seeds_course({"cells": [slow, fast, control]}))
    rows = {(row[0], row[1].split(",")[0]): row[2:] for row in drawn}
    # T⁵ took 60 s, RLP had its sixth window by then; the control's ten seconds bound nobody.
    assert rows["seconds, 60", "T⁵"][:3] == ["1", "2", "60"]
    assert rows["seconds, 60", "RLP"][:3] == ["1", "6", "60"]
    assert rows["actor thoughts, 16", "RLP"][:3] == ["1", "2", "20"]
    assert rows["actor thoughts, 16", "anchors alone"][:3] == ["1", "1", "10"]
    assert rows["steps, 8", "RLP"][6] == "+0.400"
    assert rows["steps, 8", "RLP"][7] == "+0.350"


def test_what_changed_of_the_start_is_paired_by_seed() -> None:
    seeds = scripts.script("studies/answers/seed_tables.py")
    begun = {"test_start": {"thought_gain": 0.1, "content_gain": 0.2, "no_thought_loss": 1.0}}
    cells = [made_up(method, 1, gain) | begun for method, gain in (("t5", 0.3), ("rlp", 0.5), ("anchor-only", 0.05))]
    rows = {
        (row[0], row[1].split(",")[0], row[2].split(",")[0]): row[3:]
        for row in lines_of(seeds.seeds_apart({"cells": cells}))
    }
    # Two windows of 0.3 a window on development texts, 0.3 against the start's 0.1 and 0.2 on test texts.
    assert rows["gain against the start", "T⁵", "the start"] == ["1", "+0.200", "–", "+0.600"]
    assert rows["content gain", "T⁵", "the start"] == ["1", "+0.100", "–", "+0.600"]
    assert rows["content gain", "anchors alone", "the start"][1] == "−0.150"
    rewarded = [key for key in rows if key[2] != "the start"]
    assert all("anchors alone" not in key for key in rewarded)
    assert {rows[key][1] for key in rewarded} <= {"−0.200", "+0.200"}
    assert len(rewarded) == 2


def test_critics_are_told_window_by_window() -> None:
    seeds = scripts.script("studies/answers/seed_tables.py")
    one = {"window": 1, "r2.1": 0.1, "r2.2": -0.02, "credit": "qualified"}
    cells = [
        made_up("t5", 1, 0.1, critics=[one, {**one, "window": 2, "credit": "baseline"}]),
        made_up("t5", 2, 0.1, critics=[one]),
        made_up("quiet-star-ppo", 1, 0.1, critics=[{"window": 1, "r2.1": 0.3}]),
        made_up("rlp", 1, 0.1, critics=[{"window": 1}]),
    ]
    assert lines_of(seeds.seeds_critics({"cells": cells})) == [
        ["T⁵, 8 × 1", "1", "+0.100 / −0.020, admitted", "+0.100 / −0.020, admitted"],
        ["T⁵, 8 × 1", "2", "+0.100 / −0.020, batch baseline", "–"],
        ["PPO, one critic, 8 × 1", "1", "+0.300", "–"],
    ]


def test_the_rate_is_one_that_every_method_was_run_with() -> None:
    seeds = scripts.script("studies/answers/seed_tables.py")

    def searched(method: str, rate: float, gain: float, status: str = "2 windows") -> dict[str, Any]:
        cell = made_up(method, 0, gain)
        cell["measured"][-1]["gain_vs_base"] = [-gain, 0, 0]  # what reading alone brings decides nothing
        if status != "2 windows":
            del cell["test"]
        return {**cell, "status": status, "settings": {**cell["settings"], "optimizer.lr": rate}}

    tried = (("t5", 1e-6, 0.2), ("rlp", 1e-6, 0.1), ("t5", 1e-5, 0.1), ("rlp", 1e-5, 0.3))
    cells = [searched(*one) for one in tried]
    assert seeds.best_rate(cells) == 1e-5
    cells += [searched("t5", 1e-4, 0.9), searched("rlp", 1e-4, 0.9, "failed: no number")]
    cells += [searched("t5", 2e-4, 0.9), searched("rlp", 2e-4, 0.9, "stopped in window 2")]
    assert seeds.best_rate(cells) == 1e-5
    with pytest.raises(UserError, match="no rate was run to its end with all of rlp, t5"):
        seeds.best_rate(cells[-2:])


def test_long_runs_have_tables_of_their_own() -> None:
    tables, forms = (scripts.script(f"studies/answers/{name}.py") for name in ("long_tables", "forms"))
    critics = [{"window": w, "r2.1": 0.2, "r2.2": r2, "credit": c} for w, r2, c in
               ((1, 0.05, "qualified"), (2, 0.1, "qualified"), (3, -0.2, "baseline"))]  # fmt: skip
    short, long = clocked("t5", 170.0, 0.9), clocked("t5", 1000.0, 0.3, critics=critics)
    other = clocked("quiet-star-grpo", 1000.0, 0.2, own="010")
    warm = {"problems": "test", "verdicts": {"own": "01011"}}
    models = {"careful": "short start", "careful-long": "long start", "warm": warm}
    between, larger = clocked("t5", 850.0, 0.7), {**clocked("t5", 560.0, 0.5), "start": "careful-1.5b"}
    eight, models = clocked("t5", 380.0, 0.8), models | {"careful-1.5b": "larger start"}
    parts = {**clocked("t5", 590.0, 0.6), "windows": [
        {"window": 1, "cross_fit_average": 0.25, "cross_fit_change": -0.5, "cross_fit_change_error": 0.1,
         "accepted": 1.0, "retention": 0.01},
        {"window": 2, "cross_fit_average": 0.75, "cross_fit_change": 0.0, "cross_fit_change_error": 0.1,
         "accepted": 0.0, "retention": 0.0},
    ]}  # fmt: skip
    units = [clocked("t5", 250.0, 0.5), clocked("quiet-star-grpo", 250.0, 0.4)]
    for cell in units:
        cell["settings"] = {**cell["settings"], "gae.unit": "position", "grpo.normalisation": "leave_one_out"}
    rates = [clocked(method, 225.0, gain) for method in ("t5", "quiet-star-grpo") for gain in (0.5, 0.25)]
    for cell, rate in zip(rates, (3e-6, 1e-5) * 2):
        cell["settings"] = {**cell["settings"], "optimizer.lr": rate}
    length, models = {**clocked("t5", 330.0, 0.4), "start": "careful-128"}, models | {"careful-128": "longer start"}
    credit, models = {**clocked("t5", 380.0, 0.35), "start": "careful-128"}, models | {"careful-128-fourth": "credit's"}
    credit["settings"] = {**credit["settings"], "gae.alpha": 1000.0}
    way = {**clocked("quiet-star-ppo", 390.0, 0.3), "start": "careful-128"}
    way["settings"] = {**way["settings"], "window.history": True}
    beside = {**clocked("quiet-star-grpo", 345.0, 0.2), "start": "careful-128"}
    both = {**clocked("t5", 360.0, 0.45), "start": "careful-128-1.5b"}
    models |= {"careful-128-fifth": "the way's", "careful-128-1.5b": "larger, longer start"}
    math, models = {**clocked("t5", 345.0, 0.55), "start": "careful-128-both"}, models | {"careful-128-both": "both's"}
    ways = [way, beside, {**clocked("rlp", 300.0, 0.1, seed=31), "start": "careful-128"}]
    cells = [short, long, other, between, larger, eight, parts, *units, *rates, length, credit, *ways, both, math]
    found = {"cells": cells, "accuracy": models, "clusters": {"test": "0 0 1"}}
    of = {kind: tables.of_clock(found, kind) for kind in tables.CLOCKS}
    assert {kind: len(one["cells"]) for kind, one in of.items()} == {
        "short": 1, "rates": 4, "units": 2, "groups": 1, "parts": 1, "second": 1, "long": 2, "larger": 1,
        "larger_way": 1, "length": 1, "credit": 1, "both": 1, "way": 3,
    }  # fmt: skip
    # Rates of the first method and of others, then another's own two.
    names = [f"{name}, 8 × 1, rate {rate}" for name in ("T⁵", "GRPO") for rate in ("3e-06", "1e-05")]
    pairs = [row[:2] for row in lines_of(tables.CLOCKED_TABLES["rates_apart"](found))[:4]]
    assert pairs == [[names[0], other] for other in names[1:]] + [[names[2], names[3]]]
    first, second, middle = tables.CLOCKED_TABLES["parts_offsets"](found).splitlines()[2:]
    assert first.endswith("| 1 | +0.2500 | −0.5000 | +0.1000 | 0.0100 |")
    assert second.endswith("| 2 | +0.7500 | +0.0000 | +0.1000 | not accepted |")
    assert middle.endswith("| median | +0.5000 | −0.2500 | +0.1000 | 1 of 2 accepted |")
    # Each method's own part has a name, another's none.
    assert [row[0] for row in lines_of(tables.CLOCKED_TABLES["units_ends"](found))[1:]] == [
        "T⁵, 8 × 1, in units of the position", "GRPO, 8 × 1, not divided by the group's deviation",
    ]  # fmt: skip
    # Nothing of the smaller model, not even the warm start, stands beside the larger one.
    assert of["larger"]["accuracy"] == {"careful": "larger start"}
    assert "+0.500" in tables.CLOCKED_TABLES["larger_ends"](found)
    assert larger["start"] == "careful-1.5b"
    assert of["larger_way"]["accuracy"] == {"careful": "larger, longer start"}
    assert "+0.450" in tables.CLOCKED_TABLES["larger_way_ends"](found)
    # Nor of one source beside both.
    assert of["both"]["accuracy"] == {"careful": "both's"}
    assert "+0.550" in tables.CLOCKED_TABLES["both_ends"](found)
    # Nor does anything of shorter thoughts beside longer ones.
    assert of["length"]["accuracy"] == {"careful": "longer start"}
    assert "+0.400" in tables.CLOCKED_TABLES["length_ends"](found)
    assert of["credit"]["accuracy"] == {"careful": "credit's"}
    told = tables.CLOCKED_TABLES["credit_ends"](found)
    assert "T⁵, 8 × 1, all tokens credited alike" in told
    assert "+0.350" in told
    assert of["way"]["accuracy"] == {"careful": "the way's"}
    # A method with history is held against every other one, not against itself.
    first = {**clocked("t5", 390.0, 0.4), "start": "careful-128"}
    pairs = [row[:2] for row in lines_of(tables.CLOCKED_TABLES["way_apart"]({**found, "cells": [*cells, first]}))]
    names = ["T⁵, 8 × 1", "GRPO, 8 × 1", f"PPO, one critic, 8 × 1, {forms.HISTORY}"]
    assert pairs == [[names[0], names[1]], [names[0], names[2]], [names[2], names[1]]]
    # Anchors at a rate of their own are another control.
    slow = clocked("anchor-only", 850.0, 0.6)
    slow["settings"] = {**slow["settings"], "anchor.lr": 3e-07}
    both = {**found, "cells": [clocked("anchor-only", 850.0, 0.4), slow]}
    rows = lines_of(tables.CLOCKED_TABLES["second_ends"](both))
    assert [row[0] for row in rows[1:]] == ["anchors alone, 8 × 1", "anchors alone, 8 × 1, anchors at 3e-07"]
    assert of["short"]["accuracy"] == {"careful": "short start", "warm": warm}
    assert of["second"]["accuracy"] == {"warm": warm}  # its start was not asked
    assert of["long"]["accuracy"] == {"careful": "long start", "warm": warm}
    # A cell without a clock is a short one.
    assert len(tables.of_clock({"cells": [{"name": "old"}]}, "short")["cells"]) == 1
    begun, mine, theirs = lines_of(tables.long_ends(of["long"]))
    # Its gain against itself is what its thoughts gain.
    assert begun == ["the start", *"–––––", "+0.100", "+0.100", "+0.200", "1.000", "–"]
    assert mine[:7] == ["T⁵, 8 × 1", "1", "8", "16", "9", "20", "+0.300 (+0.200 … +0.400)"]
    assert theirs[0] == "GRPO, 8 × 1"
    (name, minus, seeds, texts, gain, content, own, sampled), *warmed = lines_of(tables.long_apart(of["long"]))
    # The warm-started model answered more; the first three count.
    assert [[*row[:2], row[6].split()[0]] for row in warmed] == [
        ["T⁵, 8 × 1", "after the warm start", "+33.3"],
        ["GRPO, 8 × 1", "after the warm start", "+0.0"],
    ]
    assert (name, minus, seeds, texts) == ("T⁵, 8 × 1", "GRPO, 8 × 1", "1", "2")
    assert gain == "+0.100 (+0.100 … +0.100)"  # the same of both texts
    assert content == "–"  # nothing kept text by text
    # One of three answers more, of the first problem: its total of 1 lies 1/3 above what two answers would have.
    half = 1.96 * (2 * ((1 - 2 / 3) ** 2 + (1 / 3) ** 2)) ** 0.5 / 3
    assert own == f"+33.3 ({forms.points_of(1 / 3 - half)} … {forms.points_of(1 / 3 + half)})"
    assert sampled.startswith("+0.0 ")
    assert lines_of(tables.long_critics(of["long"])) == [["T⁵, 8 × 1", "1", "2 of 3", "1 of 3", "+0.050 / −0.050"]]
    assert "+0.900" in tables.CLOCKED_TABLES["seeds"](found)
    assert "+0.300" not in tables.CLOCKED_TABLES["seeds"](found)


def test_lengths_of_thought_are_compared_answer_by_answer() -> None:
    tables = scripts.script("studies/answers/length_tables.py")

    def model(own: str, sampled: str) -> dict[str, Any]:
        shares = {"own": [own.count("1") / len(own)], "sampled": [sampled.count("1") / len(sampled)]}
        every = {"accuracy": shares, "items": len(own)}
        kinds = {"every": every, "all": {"accuracy": {"own": [0.25]}, "items": 1}}
        known = {"verdicts": {"own": own, "sampled": sampled}, "clusters": "0 1 2 3"}
        return {"problems": "test", "results": kinds, **known}

    def cell(start: str, seconds: float, seed: int, own: str) -> dict[str, Any]:
        made = clocked("t5", seconds, 0.1)
        settings = {**made["settings"], "run.seed": seed}
        asked = {"accuracy": {**model(own, "0000"), "benchmarks": {"gsm8k": model(own, own)}}}
        return {**made, "start": start, "settings": settings, **asked}

    starts = {
        "careful": model("1000", "0000"),
        "careful-long": model("1100", "0000"),
        "careful-128": model("1110", "0011"),
    }
    fewer = model("11", "11")  # of fewer answers, so not compared
    cells = [
        cell("careful", 380.0, 3, "1000"),
        cell("careful", 380.0, 4, "1001"),
        cell("careful-128", 330.0, 10, "1111"),
    ]
    cells.append(cell("careful", 850.0, 2, "1111"))  # another recipe
    known = {"careful": model("0000", "0000"), "careful-128": model("0001", "0000")}
    found = {
        "cells": cells,
        "accuracy": {**starts, "careful-rates": fewer},
        "benchmark": known,
        "clusters": {"test": "0 1 2 3"},
    }
    (short, long, less), (_, trained, more) = (lines_of(tables.lengths(found))[n : n + 3] for n in (0, 3))
    assert short == ["the start", "64", "2 makings (1 of GSM8K)", "37.5", "0.0", "25.0", "0.0", "0.0"]
    assert long == ["the start", "128", "1 making", "75.0", "50.0", "25.0", "25.0", "0.0"]
    assert [one.split()[0] for one in less[3:]] == ["+37.5", "+50.0", "–", "+25.0", "+0.0"]
    assert trained[:4] == ["T⁵", "128", "1 seed", "100.0"]
    assert [one.split()[0] for one in more[3:]] == ["+62.5", "+0.0", "–", "+62.5", "+62.5"]
    # A second making of the longer start is one more of them; critics fitted to history have rows of their own.
    again = cell("careful-128", 330.0, 12, "0111")
    again["settings"] = {**again["settings"], "window.history": True}
    later = {**found, "cells": [*cells, again], "accuracy": {**starts, "careful-128-again": model("1111", "0011")}}
    rows = lines_of(tables.lengths(later))
    assert rows[1][2:4] == ["2 makings (1 of GSM8K)", "87.5"]
    assert [row[:4] for row in rows[4:8:3]] == [trained[:4], [rows[6][0], "128", "1 seed", "75.0"]]
    assert rows[6][0] == "T⁵, critics fitted to the actor's last thoughts, beside T⁵"
    assert lines_of(tables.lengths({"cells": [], "accuracy": {}})) == []


def test_every_seed_of_long_thoughts_is_held_against_grpo() -> None:
    tables = scripts.script("studies/answers/length_tables.py")

    def cell(method: str, seed: int, gain: float, own: float, seconds: float = 330.0, **more: Any) -> dict[str, Any]:
        made = clocked(method, seconds, gain, seed)
        right = {"results": {"every": {"accuracy": {"own": [own], "sampled": [own / 2]}}}, "problems": "test"}
        asked = {**made["accuracy"], **right, "benchmarks": {"gsm8k": right}}
        return {**made, "start": "careful-128", "settings": {**made["settings"], **more}, "accuracy": asked}

    grpo = "quiet-star-grpo"
    cells = [cell("t5", 1, 0.3, 0.5), cell(grpo, 1, 0.2, 0.4), cell("t5", 2, 0.9, 0.9), cell(grpo, 2, 0.3, 0.5)]
    cells.append(cell("t5", 2, 0.2, 0.5, **{"window.history": True}))  # in the place of the one before
    cells.append(cell("t5", 3, 0.9, 0.9))  # nothing to hold it against
    cells += [cell("t5", 4, 0.1, 0.6, 380.0), cell(grpo, 4, 0.1, 0.3, 380.0)]
    cells.append(cell("t5", 4, 0.9, 0.9, 380.0, **{"gae.alpha": 1000.0}))  # another trace
    *each, mean = lines_of(tables.against_grpo({"cells": cells, "accuracy": {}}))
    assert each == [
        ["1", "thoughts of their own", "+0.100", "+0.100", "+10.0", "+5.0", "+10.0", "+5.0"],
        ["2", "the actor's last thoughts", "−0.100", "−0.100", "+0.0", "+0.0", "+0.0", "+0.0"],
        ["4", "thoughts of their own", "+0.000", "+0.000", "+30.0", "+15.0", "+30.0", "+15.0"],
    ]
    assert mean[:2] == ["mean", "–"]
    half = 4.303 * 0.1 / 3**0.5  # Student's t with two degrees of freedom
    assert mean[2] == f"+0.000 (−{half:.3f} … +{half:.3f})"
    assert mean[4].startswith("+13.3 ")
    assert lines_of(tables.against_grpo({"cells": [], "accuracy": {}})) == []


def test_the_page_tells_what_the_other_form_of_a_seed_would_say() -> None:
    tables = scripts.script("studies/answers/length_tables.py")
    root = Path(__file__).parents[2]
    found = json.loads((root / "results" / "answers-study.json").read_text("utf-8"))
    page = (root / "docs" / "studies" / "answers.md").read_text("utf-8")
    other = [
        one["settings"]["run.seed"] == 11 and one["settings"].get("window.history", False) for one in found["cells"]
    ]
    cells = [one for one, left_out in zip(found["cells"], other, strict=True) if not left_out]
    assert len(cells) == len(found["cells"]) - 1
    mean = lines_of(tables.against_grpo({**found, "cells": cells}))[-1]
    content, own, asked = (mean[column].replace(" (", " for {} (", 1) for column in (3, 4, 6))
    told = f"{own.replace(' for {}', ' points for right answers')}, {content.format('content gain')}"
    assert f"the means are {told} and {asked.format('GSM8K')}, so the edge" in page


def test_gains_are_kept_text_by_text(tmp_path: Path) -> None:
    collect = scripts.script("studies/answers/collect.py")
    items = {"text": np.array([4, 4, 7]), "thought_gain": np.array([0.1, 0.2, -0.5])}
    save_file(items, tmp_path / "items.safetensors")
    assert collect.by_text(tmp_path / "items.safetensors") == {"items": "2 1", "thought_gain": "3000 -5000"}


def test_texts_are_paired_where_the_same_positions_were_measured() -> None:
    estimates = scripts.script("studies/answers/estimates.py")

    def cell(digest: str, start: str, items: str = "2 1 1") -> dict[str, Any]:
        # The start's loss is the loss without a thought where both gains are the same.
        gains = {"gain_vs_base": "10 20 30", "thought_gain": "10 20 30"}
        return {"by_text": {"digest": digest, "items": items, "no_thought_loss": start, **gains}}

    first = cell("a", "20000 9000 8000")
    assert estimates.shared_texts(first, cell("a", "1 2 3")) == [0, 1, 2]
    # The first text is 0.0015 a token away, which is rounding, the second 0.1, which is another position.
    second = cell("b", "20030 10000 8000")
    assert estimates.shared_texts(first, second) == [0, 2]
    assert estimates.shared_texts(first, cell("b", "20000 9000 8000", items="1 2 1")) == []
    second["by_text"]["gain_vs_base"] = second["by_text"]["thought_gain"] = "0 0 0"
    second["by_text"]["no_thought_loss"] = "20000 0 8000"
    apart = estimates.over_texts([first], "thought_gain", [second])
    assert apart == pytest.approx(estimates.over_clusters([{0: (0.001, 2), 2: (0.003, 1)}]))
    del second["by_text"]["gain_vs_base"]
    assert estimates.shared_texts(first, second) == []


def test_right_answers_to_the_benchmark_stand_beside_the_starts() -> None:
    tables = scripts.script("studies/answers/long_tables.py")

    def asked(own: str) -> dict[str, Any]:
        shares = {name: [0.5, 0.4, 0.6] for name in ("own", "sampled", "none", "empty", "random", "other")}
        every = {"items": 3, "accuracy": shares, "difference": {"own - none": [0.25, 0.2, 0.3]}}
        return {"results": {"every": every}, "verdicts": {"own": own, "sampled": ["011", "110"]}}

    cells = [clocked(method, 380.0, 0.8) for method in ("t5", "quiet-star-grpo", "rlp")]
    cells[0]["accuracy"]["benchmark"], cells[1]["accuracy"]["benchmark"] = asked("110"), asked("111")
    found = {"cells": cells, "benchmark": {"careful-groups": asked("100"), "careful-long": asked("111")}}
    start, mine, theirs = lines_of(tables.CLOCKED_TABLES["groups_benchmark"](found))
    assert start[:4] == ["the start", "–", "3", "50.0"]
    assert (start[10], start[-2].split()[0]) == ("–", "+33.3")
    assert (mine[0], mine[10].split()[0], mine[11].split()[0], mine[-1]) == ("T⁵, 8 × 1", "+33.3", "+0.0", "–")
    assert [theirs[place].split()[0] for place in (10, -2, -1)] == ["+66.7", "−33.3", "+0.0"]
    # Where nothing was asked there is a head and no row.
    assert lines_of(tables.CLOCKED_TABLES["groups_benchmark"]({"cells": [], "benchmark": {}})) == []
