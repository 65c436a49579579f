"""The data of a page: whatever a folder holds gives one, in bounded size, with nothing invented."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import kept_thoughts
import numpy as np
import pytest

from recorded import run
from tfive.errors import UserError
from tfive.report import thoughts
from tfive.report.page_data import page_data, run_page
from tfive.report.record import RunRecord
from tfive.report.runs import Run
from tfive.report.series import timeline

CONFIG = 'method = "t5"\n[model]\nname = "/home/me/secret/mine"\n[window]\nwindows = 3\n[thought]\nhorizon = 3\n'


def begun(folder: Path, windows: int = 1, **status: Any) -> Path:
    """A run that has measured at the start and closed some windows, without a summary."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG, "utf-8")
    lines: list[dict[str, Any]] = []
    costs = []
    for window in range(windows + 1):
        gain = {"development.thought_gain": 0.1 * window, "development.items": 8.0, "development.texts": 4.0}
        gain |= {"development.thought_gain_interval.1": -1.0, "development.thought_gain_interval.2": 1.0}
        lines.append({"step": window, "seconds": 5.0 * window, **gain})
        if window:
            lines.append({"step": window, "seconds": 5.0 * window, "event": "stage", "detail": "<b>"})
            lines.append({"step": window, "seconds": 5.0 * window, "r2.1": 0.2, "r2.2": 0.1, "strange": 4.0, **gain})
        seconds = {"fit": 2.0 * window, "fit/inner": 1.0, "update": 1.0 * window}
        costs.append({"window": window, "seconds": seconds, "thought_tokens": 10 * window, "corpus_tokens": 7 * window})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 9, "seco', "utf-8")
    (folder / "costs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in costs), "utf-8")
    if status:
        (folder / "status.json").write_text(json.dumps({"machine": platform.node(), **status}), "utf-8")
    return folder


def test_a_run_that_goes_on_has_a_page(tmp_path: Path) -> None:
    page = run_page(begun(tmp_path / "r", state="running", process=os.getpid(), phase="fit"))
    assert page["state"] == "running"
    assert page["x"]["training"] == {
        "windows": [1.0], "seconds": [3.0], "corpus_tokens": [7.0], "thought_tokens": [10.0]
    }  # fmt: skip
    assert page["series"]["training"]["strange"]["value"] == [4.0]
    assert any(chart["series"] == ["strange"] for chart in page["charts"])
    assert page["critics"]["r2"] == [[0.2], [0.1]]
    assert page["timeline"]["seconds"] == [[2.0, 1.0]]
    assert page["events"]["detail"] == ["<b>"]
    assert "/home/me" not in json.dumps(page)
    assert page["meanings"]["thought_gain"]["what"] == "loss without a thought − loss with one's own"


def test_states_of_runs_without_a_summary(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    said: dict[str, Any] = {"state": "running", "process": gone.pid}
    assert run_page(begun(tmp_path / "killed", **said))["state"] == "unfinished"
    assert run_page(begun(tmp_path / "elsewhere", **said, machine="another"))["state"] == "running"
    folder = begun(tmp_path / "failed", state="failed", failure="it broke (the last checkpoint is in /home/me)")
    assert (run_page(folder)["state"], run_page(folder)["failure"]) == ("failed", "it broke")
    assert run_page(begun(tmp_path / "old"))["state"] == "unfinished"
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.toml").write_text(CONFIG, "utf-8")
    page = run_page(bare)
    assert (page["story"]["numbers"], page["charts"], page["explorers"]) == ([], [], [])
    assert page["title"] == "t5 on mine, seed 0"
    with pytest.raises(UserError, match="name the folder of a run"):
        run_page(tmp_path)


def test_the_version_changes_with_the_content_alone(tmp_path: Path) -> None:
    folder = begun(tmp_path / "r")
    first = page_data([folder])["version"]
    assert page_data([folder])["version"] == first
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('nds": 1}\n')
    assert page_data([folder])["version"] != first


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    page = run_page(begun(tmp_path / "r", windows=1500))
    x, series = page["x"]["training"]["windows"], page["series"]["training"]["r2.1"]["value"]
    assert len(x) == len(series) == 400
    assert (x[0], x[-1]) == (1.0, 1500.0)
    found = timeline(RunRecord(Run("t5", 0, tmp_path / "r")))
    assert found is not None
    # What thinned windows spent is added to the next one that is kept.
    assert sum(row[0] for row in found["seconds"]) == pytest.approx(3000.0)


def texts_of(shown: dict[str, Any], row: int, moment: int) -> str:
    snapshot = shown["snapshots"][moment]
    begin = sum(snapshot["length"][:row])
    return "".join(shown["pieces"][token] for token in snapshot["tokens"][begin : begin + snapshot["length"][row]])


def test_thoughts_come_back_as_they_were_kept(tmp_path: Path) -> None:
    folder = kept_thoughts.keep(begun(tmp_path / "r"))
    (shown,) = run_page(folder)["explorers"]
    places, last = kept_thoughts.places(6), kept_thoughts.moment(6, 2, critics=True)
    assert (shown["windows"], shown["names"]) == ([0, 1, 2], ["start", "half-way", "end"])
    text = [shown["pieces"][token] for token in shown["texts"]["tokens"][: kept_thoughts.TOKENS]]
    assert text == [kept_thoughts.WORDS[token] for token in places["tokens"][0]]
    assert shown["texts"]["documents"][0] == [0, 6, 1, 6]
    words = ["close", " mill", "</script>"]
    for row in range(6):
        wanted = "".join(words[token] for token in last["tokens"][row, : last["length"][row]])
        assert texts_of(shown, row, 2) == wanted
    assert shown["items"]["detail"] == list(range(6))
    detail = shown["snapshots"][2]["detail"]
    np.testing.assert_allclose(np.asarray(detail["own"]) * 0.01, last["own"].reshape(-1), atol=0.00501)
    mask = np.arange(kept_thoughts.STEPS) < last["length"][:, None]
    np.testing.assert_allclose(np.asarray(detail["values"][1]) * 0.01, last["values"][1][mask], atol=0.00501)
    np.testing.assert_allclose(np.asarray(detail["weight"]) * 0.01, last["weight"][mask], atol=0.00501)
    gains = np.asarray(shown["snapshots"][2]["content_gain"]) * shown["quantities"]["gain"]
    np.testing.assert_allclose(gains, last["content_gain"], atol=0.000501)
    assert shown["snapshots"][0]["detail"]["values"] is None


def test_a_page_leaves_out_in_order_what_does_not_fit(tmp_path: Path) -> None:
    folder = kept_thoughts.keep(begun(tmp_path / "r"), items=400)
    found = thoughts.read_thoughts(RunRecord(Run("t5", 0, folder)))
    assert found is not None
    full = thoughts.packed_size(thoughts.explorer(found, 10**9))
    bare = thoughts.packed_size(thoughts._columns(found, np.zeros(0, np.int64)))
    sizes = {"some": (bare * 2 + full) // 3, "ends": int(bare / 0.9), "fewer": bare // 3}
    shown = {name: thoughts.explorer(found, most) for name, most in sizes.items()}
    for name, most in sizes.items():
        assert thoughts.packed_size(shown[name]) <= most, name
    some = np.asarray(shown["some"]["items"]["detail"])
    assert len(shown["some"]["windows"]) == 3
    assert 0 < (some >= 0).sum() < 400
    # The most telling one is among those with detail.
    best = int(np.argmax(found.moments[2].arrays["content_gain"]))
    assert some[best] >= 0
    assert shown["ends"]["windows"] == [0, 2]
    assert len(shown["ends"]["items"]["id"]) == 400
    fewer = shown["fewer"]
    assert 0 < len(fewer["items"]["id"]) == 400 - fewer["left_out"] < 400
    whole = thoughts.explorer(found, 10**9)
    item = fewer["items"]["id"][-1]
    assert texts_of(fewer, len(fewer["items"]["id"]) - 1, 1) == texts_of(whole, whole["items"]["id"].index(item), 2)


def test_calibration_plots_bin_predictions(tmp_path: Path) -> None:
    folder = kept_thoughts.keep(begun(tmp_path / "r"), items=40)
    found = thoughts.read_thoughts(RunRecord(Run("t5", 0, folder)))
    assert found is not None
    arrays = found.moments[2].arrays
    arrays["values"][0] = arrays["returns"]
    plots = [plot for plot in thoughts.calibration(found) if plot["window"] == 2]
    assert [plot["critic"] for plot in plots] == [0, 1]
    assert plots[0]["predicted"] == pytest.approx(plots[0]["returned"])
    assert sum(plots[0]["count"]) == int(arrays["length"].sum())
    (first, _) = thoughts.weight_histograms(found)
    assert sum(first["count"]) == int(found.moments[1].arrays["length"].sum())


def test_samples_of_an_older_run_are_shown(tmp_path: Path) -> None:
    folder = run(tmp_path / "r", "t5", 0, 0.2)
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    for window, word in ((0, "eh"), (2, "so")):
        summary["history"][window]["samples"] = [{"before": "a mill", "thought": word, "after": " by"}]
    (folder / "summary.json").write_text(json.dumps(summary), "utf-8")
    page = run_page(folder)
    (shown,) = page["explorers"]
    assert (shown["windows"], texts_of(shown, 0, 0), texts_of(shown, 0, 1)) == ([0, 2], "eh", "so")
    assert shown["snapshots"][1]["thought_gain"] is not None
    assert "before thoughts were kept token by token" in page["absent"]["explorers"]


def test_a_study_shows_every_run_and_its_pairs(tmp_path: Path) -> None:
    cells = []
    for label, seed, level in (("a", 0, 0.1), ("b", 0, 0.4), ("a", 1, 0.1), ("b", 1, 0.4)):
        folder = kept_thoughts.keep(run(tmp_path / f"{label}{seed}", label, seed, level))
        cells.append({"label": label, "seed": seed, "folder": folder.name})
    begun(tmp_path / "c0", state="failed", failure="no")
    cells.append({"label": "c", "seed": 0, "folder": "c0"})
    (tmp_path / "study.json").write_text(json.dumps({"cells": cells}), "utf-8")
    page = page_data([tmp_path])
    assert [(one["label"], one["state"]) for one in page["compare"]["runs"]][-1] == ("c", "failed")
    (difference,) = page["compare"]["differences"]
    assert difference["measured"]["thought_gain"]["mean"] == pytest.approx(-0.3, abs=1e-5)
    assert [one["label"] for one in page["explorers"]] == ["a", "b"]
    assert page["story"]["verdict"]["headline"].startswith("a, 2 seeds: No useful thoughts were learned")
    assert page["compare"]["runs"][1]["series"]["thought_gain"]["value"] == [0.0, 0.2, 0.4]


def test_a_study_without_a_finished_run_has_a_page(tmp_path: Path) -> None:
    begun(tmp_path / "c0", state="failed", failure="no")
    (tmp_path / "study.json").write_text(json.dumps({"cells": [{"label": "c", "seed": 0, "folder": "c0"}]}), "utf-8")
    page = page_data([tmp_path])
    assert page["story"]["verdict"]["sentence"] == "Why: none is finished."
    assert page["compare"]["runs"][0]["failure"] == "no"


def evaluation(folder: Path, name: str, right: list[bool], *, done: bool = True) -> Path:
    folder.mkdir()
    facts = {"kind": "math", "items": len(right), "of": len(right), "sha256": "s", "manifest": "frozen"}
    about = {"model": {"name": name, "precision": "float32", "thoughts": "none"}, "seed": 0, "tasks": {"sums": facts}}
    (folder / "run.json").write_text(json.dumps(about), "utf-8")
    answers = [
        {"id": f"s{n}", "sample": 0, "correct": one, "extracted": str(n), "gold": "0", "steps": ["read"], "tokens": 3,
         "ended": "stop", "thoughts": 1, "thought_tokens": 4, "question": f"{n}?", "choices": [], "output": "x" * 9000}
        for n, one in enumerate(right)
    ]  # fmt: skip
    (folder / "sums.generated.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers) + '{"id"', "utf-8")
    if done:
        score = {"mean": sum(right) / len(right), "low": 0.0, "high": 1.0}
        scores = {"tasks": {"sums": {"primary": "pass@1", "scores": {"pass@1": score}}}}
        (folder / "scores.json").write_text(json.dumps(scores), "utf-8")
    return folder


def test_two_evaluations_are_compared_item_by_item(tmp_path: Path) -> None:
    first = evaluation(tmp_path / "a", "plain", [False] * 30 + [True] * 10)
    second = evaluation(tmp_path / "b", "thinker", [True] * 25 + [False] * 5 + [True] * 10, done=False)
    page = page_data([first, second])
    (task,) = page["evaluation"]["tasks"]
    (measure,) = task["measures"]
    assert measure["difference"]["mean"] == pytest.approx(25 / 40)
    assert measure["difference"]["low"] > 0.4
    assert measure["values"][1]["mean"] == pytest.approx(35 / 40)
    assert page["story"]["verdict"]["headline"] == "thinker is better on 1 of 1 tasks."
    items, answers = page["evaluation"]["items"], page["evaluation"]["items"]["answers"]
    assert len(items["id"]) == 40
    assert [answers[m]["correct"][0] for m in (0, 1)] == [0, 1]
    assert (answers[0]["cut"][0], len(answers[0]["output"][0])) == (1, 4003)
    assert page["state"] == "unfinished"


def test_items_that_all_agree_prove_little(tmp_path: Path) -> None:
    pair = evaluation(tmp_path / "a", "plain", [False] * 3), evaluation(tmp_path / "b", "thinker", [True] * 3)
    page = page_data(list(pair))
    assert page["story"]["verdict"]["headline"] == "thinker and plain cannot be told apart."


def test_a_run_and_its_evaluations_share_a_page(tmp_path: Path) -> None:
    folder, asked = begun(tmp_path / "r"), evaluation(tmp_path / "a", "mine", [True, False])
    page = page_data([folder, asked])
    assert (page["kind"], page["evaluation"]["models"][0]["name"]) == ("run", "mine")
    with pytest.raises(UserError, match="one run or one study"):
        page_data([folder, begun(tmp_path / "other")])


def test_a_finished_run_has_the_windows_that_its_clock_left(tmp_path: Path) -> None:
    def windows(folder: Path) -> str:
        return next(one["value"] for one in run_page(folder)["header"] if one["name"] == "windows")

    clock = CONFIG.replace("windows = 3", "windows = 1000") + "[run]\nseconds = 9.0\n"
    finished, going = run(tmp_path / "done", "t5", 0, 0.2), begun(tmp_path / "going")
    for folder in (finished, going):
        (folder / "config.toml").write_text(clock, "utf-8")
    assert (windows(finished), windows(going)) == ("2 of 2", "1 of 1000")
    (finished / "config.toml").write_text(clock.replace("9.0", '"none"'), "utf-8")
    assert windows(finished) == "2 of 1000"


def test_the_page_says_which_texts_its_numbers_are_of(tmp_path: Path) -> None:
    def measured_on(folder: Path) -> str:
        return next(one["value"] for one in run_page(folder)["header"] if one["name"] == "measured on")

    finished = run(tmp_path / "done", "t5", 0, 0.2)
    summary = json.loads((finished / "summary.json").read_text("utf-8"))
    summary["history"][-1] |= {"items": 6, "texts": 3}
    summary["test"]["after"] |= {"items": 8, "texts": 4}
    (finished / "summary.json").write_text(json.dumps(summary), "utf-8")
    assert measured_on(finished) == "8 places in 4 test texts"
    del summary["test"]
    (finished / "summary.json").write_text(json.dumps(summary), "utf-8")
    assert measured_on(finished) == "6 places in 3 development texts"
