"""Gated reading on prose: run folders become means over seeds with intervals over texts, and the committed page shows
the committed numbers."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import prose
import pytest
from safetensors.numpy import save_file

from tfive.errors import UserError
from tfive_lab.estimates import over_seeds, ratio
from tfive_lab.study_tables import PLACE, filled

ROOT = Path(__file__).resolve().parents[2]
TEXTS, ITEMS = 12, 4


def run(folder: Path, method: str, seed: int, shift: float = 0.0, *, warm: bool = False) -> dict[str, np.ndarray]:
    """A run folder as training leaves it, of two windows, its test gains moved by a number; returns its test items."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng([seed, len(method)])
    texts = np.repeat(np.arange(TEXTS, dtype=np.int32), ITEMS)
    kept = {name: (shift + draw.normal(size=len(texts)) / 100).astype(np.float32) for name in prose.MEASURES}
    (folder / "test").mkdir()
    save_file({**kept, "text": texts[::-1].copy()}, folder / "test" / "window-00002.safetensors")
    asked = "[warmstart]\nrounds = 1\nitems = 24\nsamples = 8\nsteps = 60\nlr = 1e-5\nreading = 20\n"
    config = f'method = "{method}"\n[run]\nseed = {seed}\n[window]\nitems = 64\n{asked}'
    (folder / "config.toml").write_text(config, "utf-8")
    gains = {f"development.{name}": 0.5 + seed for name in prose.MEASURES}
    critics = {"r2.1": -0.1, "r2.2": 0.25, "reward_scale": 0.5, "policy_kl": 0.001} if method == "t5" else {}
    lines: list[dict[str, Any]] = [{"step": 0, **gains}]
    gates = {"reading_openness": 0.2} if warm else {}
    lines += [{"step": window, "anchor_loss": 3.0, **critics, **gates} for window in (1, 2)]
    lines[-1] |= {"actor_updates.qualified": 4} if critics else {}
    lines += [{"step": 2, **gains}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    costs = {"window": 2, "seconds": {"fit": 3.0, "fit/inner": 2.0, "update": 4.0}, "trajectories": 150}
    (folder / "costs.jsonl").write_text(json.dumps(costs) + "\n", "utf-8")
    place = {"device_name": "GPU", "compute": "bfloat16", "torch": "2", "transformers": "5", "threads": 1}
    told: dict[str, Any] = {"place": place, "windows": 2}
    told |= {"test_thought_gain_start": 0.0, "test_no_thought_loss_start": 3.25}
    if warm:
        after = {"thought_gain": -0.04, "content_gain": 0.01, "no_thought_loss": 3.125}
        rounds = [{"kept": 24.0, "content_gain": 0.5}, {"thoughts": 24.0}]
        told["warmstart"] = {"rounds": rounds, "after": after}
    (folder / "summary.json").write_text(json.dumps(told), "utf-8")
    return {**kept, "text": texts[::-1]}


def test_a_run_is_kept_text_by_text(tmp_path: Path) -> None:
    kept = run(tmp_path / "t5-1", "t5", 1)
    cell = prose.cell_of(tmp_path / "t5-1")
    assert (cell["method"], cell["seed"], cell["actor_thoughts"], cell["thoughts"], cell["seconds"]) == (
        "t5",
        1,
        128,
        150,
        7,
    )
    assert cell["place"] == {"device_name": "GPU", "compute": "bfloat16", "torch": "2", "transformers": "5"}
    assert [one["window"] for one in cell["measured"]] == [0, 2]
    assert [one["admitted"] for one in cell["critics"]] == [False, True]
    sums = prose.sums_of(cell, "content_gain")
    for text in range(TEXTS):
        assert sums[text] == (pytest.approx(kept["content_gain"][kept["text"] == text].sum(), abs=1e-5), ITEMS)
    assert ratio(sums) == pytest.approx(kept["content_gain"].mean(), abs=1e-6)
    less = prose.sums_of(cell, "mixed_gain", less="mixed_gain_other")
    assert ratio(less) == pytest.approx((kept["mixed_gain"] - kept["mixed_gain_other"]).mean(), abs=1e-6)


def test_seeds_are_paired_and_their_texts_give_the_interval(tmp_path: Path) -> None:
    own = [run(tmp_path / f"t5-{seed}", "t5", seed, 0.01) for seed in (1, 2)]
    control = [run(tmp_path / f"control-{seed}", "anchor-only", seed) for seed in (1, 2)]
    shown = rendered(tmp_path, "smollm2-prose.json")
    apart = np.stack([a["content_gain"] - b["content_gain"] for a, b in zip(own, control)]).mean(0)
    by_text = apart[::-1].reshape(TEXTS, ITEMS).mean(1)
    half = 1.96 * by_text.std(ddof=1) / TEXTS**0.5
    row = next(line for line in shown.splitlines() if line.startswith("| T⁵ minus anchors alone | content gain |"))
    numbers = [float(word) for word in re.findall(r"[+-][\d.]+", row.replace("−", "-"))]
    assert numbers[:3] == pytest.approx([by_text.mean(), by_text.mean() - half, by_text.mean() + half], abs=6e-5)
    assert "| 1 | 1 of 2 | −0.100 | −0.100 |" in shown, "the weaker critic, and how often both were admitted"
    assert "| T⁵ | 128 | +2.0000 ± 6.3531 |" in shown, "development gains 1.5 and 2.5, Student's interval of one degree"


def rendered(runs: Path, name: str, *more: str) -> str:
    """A page with the tables of a study alone, filled from these runs."""
    page, results = runs / "page.md", runs / "results"
    results.mkdir()
    places = "".join(f"<!-- table: {one} -->\n<!-- end of table -->\n" for one in prose.STUDIES[name])
    page.write_text(places, "utf-8")
    assert prose.main(["--runs", str(runs), "--results", str(results), "--page", str(page), *more]) == 0
    assert [path.name for path in results.iterdir()] == [name]
    return page.read_text("utf-8")


def test_runs_from_a_warm_start_are_a_study_of_their_own(tmp_path: Path) -> None:
    for seed in (1, 2):
        run(tmp_path / f"t5-{seed}", "t5", seed, warm=True)
    run(tmp_path / "pilot" / "a", "anchor-only", 0, warm=True)
    shown = rendered(tmp_path, "smollm2-prose-warm.json", "--pilots", str(tmp_path / "pilot"))
    # The pilot, then each seed once; the reading after the rounds keeps no thoughts.
    starts = [line for line in shown.splitlines() if "| 24 (+0.5000) |" in line]
    assert [line[:9] for line in starts] == ["| 0 | 8 |", "| 1 | 8 |", "| 2 | 8 |"]
    assert starts[0].endswith("| −0.0400 | +0.0100 | 3.125 |")
    course = [line for line in shown.splitlines() if line.startswith("| T⁵ | ") and "±" in line]
    assert [line.rsplit("|", 2)[1].strip() for line in course] == ["–", "0.200"], "gates after the window, none before"
    run(tmp_path / "cold", "t5", 3)
    with pytest.raises(UserError, match="with a warm start and without one"):
        prose.main(["--runs", str(tmp_path), "--results", str(tmp_path / "results")])


def test_gains_of_windows_come_back_from_the_scale_that_averages_them() -> None:
    gains, squared, scales = [0.14, 0.05, 0.2, 0.061], 0.14**2, [0.14]
    for one in gains[1:]:
        squared = prose.DECAY * squared + (1 - prose.DECAY) * one**2
        scales.append(squared**0.5)
    assert prose._loudness(scales) == ["0.200", "2", "3"]
    assert prose._loudness([]) == ["–"] * 3


def test_runs_that_cannot_be_tabulated_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in it"):
        prose.main(["--runs", str(tmp_path)])
    run(tmp_path / "one", "quiet-star-grpo", 1)
    with pytest.raises(UserError, match="method = quiet-star-grpo"):
        prose.cell_of(tmp_path / "one")
    (tmp_path / "one" / "summary.json").unlink()
    with pytest.raises(UserError, match="has ended"):
        prose.cell_of(tmp_path / "one")


def test_the_committed_page_shows_the_committed_numbers() -> None:
    page = (ROOT / "docs" / "studies" / "smollm2-study.md").read_text("utf-8")
    found = json.loads((ROOT / "results" / "smollm2-prose.json").read_text("utf-8"))
    tables = prose.page_tables(ROOT / "results")
    assert [place[1] for place in PLACE.findall(page)] == list(tables)
    assert filled(page, tables, {}) == page
    own, control = (prose.methods(found)[key] for key in ("t5", "anchor-only"))
    assert [one["seed"] for one in own] == [one["seed"] for one in control] == [1, 2, 3]
    assert {one["actor_thoughts"] for one in (*own, *control)} == {200_704}
    said = (ROOT / "README.md").read_text("utf-8")
    each = [prose.sums_of(one, "content_gain") for one in own]
    mean, half = over_seeds([ratio(one) for one in each])
    assert half is not None
    assert f"({prose.signed(mean)}, {prose.signed(mean - half)} … {prose.signed(mean + half)} over seeds)" in said


def test_runs_that_have_not_ended_become_the_table_of_open_reading(tmp_path: Path) -> None:
    names = [*prose.prose_open.GAINS, prose.prose_open.LOSS]
    keys = [f"development.{name}{end}" for name in names for end in ("", "_interval.1", "_interval.2")]
    state = {"thought_gain": -0.75, "content_gain": 0.006, "no_thought_loss": 3.25}
    rounds = [{"thoughts": 64.0, "kept": 7.0}, {"thoughts": 8.0}]
    asked = ["--open", str(tmp_path), "--results", str(tmp_path)]
    for name in prose.prose_open.RUNS:
        with pytest.raises(UserError, match=f"no run {name} in it"):
            prose.main(asked)
        folder = tmp_path / name
        folder.mkdir()
        window = {"step": 1, "r2.1": 0.25, "r2.2": 0.5, "actor_updates.qualified": 8.0}
        lines = [{"step": 0, **dict.fromkeys(keys, -0.5)}, window, {"step": 1, **dict.fromkeys(keys, 0.125)}]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
        (folder / "warmstart.json").write_text(json.dumps({"before": state, "rounds": rounds}), "utf-8")
        (folder / "status.json").write_text("{}", "utf-8")
        with pytest.raises(UserError, match=f"{name}: is cut off or no run"):
            prose.main(asked)
        roles = {"account": {"roles": {"actor": {"trajectories": 4096}}}}
        (folder / "status.json").write_text(json.dumps(roles), "utf-8")
    page = tmp_path / "page.md"
    page.write_text("<!-- table: open -->\n<!-- end of table -->\n", "utf-8")
    assert prose.main([*asked, "--page", str(page), "--code", "abc"]) == 0
    found = json.loads((tmp_path / prose.prose_open.RESULTS).read_text("utf-8"))
    assert found["code"] == "abc"
    assert (found["t5"]["actor_thoughts"], found["t5"]["r2"], found["t5"]["admitted"]) == (4096, [[0.25, 0.5]], 1)
    rows = page.read_text("utf-8").splitlines()[3:-1]
    half, eighth = "−0.500 (−0.500 … −0.500)", "+0.125 (+0.125 … +0.125)"
    assert rows[0] == "| as it comes | – | – | −0.750 | +0.006 | – | 3.250 | 4.000 |"
    assert rows[1].endswith(f"| – | 7 | {half} | {half} | {half} | -0.500 | 0.000 |")
    assert rows[3] == f"| T⁵ | 1 | – | {eighth} | {eighth} | {eighth} | 0.125 | 0.000 |"
    assert [row.split("|")[1].strip() for row in rows[3:]] == ["T⁵", "anchors alone"]


def test_the_page_says_of_open_reading_what_was_measured() -> None:
    found = json.loads((ROOT / "results" / prose.prose_open.RESULTS).read_text("utf-8"))
    page = (ROOT / "docs" / "studies" / "smollm2-study.md").read_text("utf-8")
    own, control, reader = (found[name] for name in ("t5", "anchor-only", "reader"))
    assert (
        f"({control['actor_thoughts']:,} in its 52 windows, T⁵ {own['actor_thoughts']:,} in {len(own['r2'])})" in page
    )
    last = [one["measured"][-1]["content_gain"] for one in (own, control)]
    shown = [f"{one[0]:+.3f}, {one[1]:+.3f} … {one[2]:+.3f}".replace("-", "−") for one in last]
    assert f"back to nothing ({shown[0]})" in page
    assert f"the control to {shown[1].replace(', ', ' (', 1)})" in page
    kept = [[int(part["kept"]) for part in one["warmstart"]["rounds"] if "kept" in part] for one in (reader, own)]
    assert f"{kept[0][0]} of 2,048 are learned" in page
    assert f"{min(kept[1])} to {max(kept[1])} once reading was learned" in page
    weaker = [min(pair) for pair in own["r2"]]
    assert own["admitted"] == len(weaker) == 51
    assert f"(R² of the weaker {weaker[0]:.2f} in the first, {statistics.median(weaker):.2f} in the median)" in page
    states = (reader["measured"][0], own["measured"][0], own["measured"][-1], control["measured"][-1])
    after = [one["no_thought_loss"] - one["thought_gain"][0] for one in states]
    first, second, *ends = (f"{loss:.3f}" for loss in after)
    assert f"to {first} by the first start, to {second} by the second" in page
    assert f"alike ({', '.join(ends)})" in page


def test_headrooms_of_models_become_tables(tmp_path: Path) -> None:
    row = {"items": 1536, "texts": 192, "mean": [0.0] * 3} | {
        key: [0.5, 0.25, 0.75] for key in ("loss", *prose.prose_headroom.GAINS)
    }
    critic = {"items": 4, "r2": 0.1, "r2_within": -0.25, "within_share": 0.5, "taking_the_guessed_best": 0.1}
    printed = {"all": row, "by_source": {"web_crawl.jsonl.gz": {**row, "items": 7, "own": [-1.0, -2.0, -0.123456]}},
               "critic": {**critic, "taking_the_best": 0.3}, "thoughts": 16, "thought": {"length": 12}}  # fmt: skip
    folder, results, page = tmp_path / "headroom", tmp_path / "results", tmp_path / "page.md"
    folder.mkdir()
    results.mkdir()
    asked = ["--headroom", str(folder), "--results", str(results), "--page", str(page), "--code", "abc"]
    page.write_text(
        "".join(f"<!-- table: headroom{end} -->\n<!-- end of table -->\n" for end in ("", "_critics")), "utf-8"
    )
    with pytest.raises(UserError, match=r"--headroom .*: no \.json in it"):
        prose.main(asked)
    (folder / "one.json").write_text(json.dumps(printed), "utf-8")
    assert prose.main(asked) == 0
    shown = page.read_text("utf-8")
    told = "+0.500 (+0.250 … +0.750)"
    assert f"| one | every text | 1,536 | 0.500 | {' | '.join([told] * 5)} | – |" in shown
    assert "| one | web crawl | 7 | 0.500 | −1.000 (−2.000 … −0.123) |" in shown
    assert "| one | +0.100 | −0.250 | 0.50 | +0.100 | +0.300 |" in shown
    kept = json.loads((results / "prose-headroom.json").read_text("utf-8"))
    assert (kept["models"]["one"]["code"], kept["models"]["one"]["length"]) == ("abc", 12)
    later = {**printed, "all": {**row, "best_or_none": [0.5, 0.25, 0.75]}}
    (folder / "one.json").rename(folder / "later.json").write_text(json.dumps(later), "utf-8")
    assert prose.main([*asked[:-1], "def"]) == 0
    kept = json.loads((results / "prose-headroom.json").read_text("utf-8"))
    assert {name: model["code"] for name, model in kept["models"].items()} == {"later": "def", "one": "abc"}
    assert f"| later | every text | 1,536 | 0.500 | {' | '.join([told] * 6)} |" in page.read_text("utf-8")
    (folder / "two.json").write_text("{}", "utf-8")
    with pytest.raises(UserError, match=r"two\.json: not what tfive eval headroom"):
        prose.main(asked)
