"""The page of the embedded example tells what the committed runs with four thoughts a position came to."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).parents[2]
STUDENT = 3.182
"""Student's t of three degrees of freedom."""


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def test_every_row_is_that_of_the_committed_runs() -> None:
    runs = json.loads((ROOT / "results" / "nano-group-methods.json").read_text("utf-8"))["runs"]
    page = (ROOT / "docs" / "studies" / "nano.md").read_text("utf-8")
    rows = {run["name"]: [one for one in runs if one["name"] == run["name"]] for run in runs}
    own = [one["content_gain"][0] for one in rows["T⁵"]]
    assert len(rows) == 9
    for name, some in rows.items():
        assert [one["seed"] for one in some] == [0, 1, 2, 3]
        gains = [one["content_gain"][0] for one in some]
        less = [first - second for first, second in zip(own, gains, strict=True)]
        half = STUDENT * stdev(less) / 2
        apart = f"{signed(mean(less))} ({signed(mean(less) - half)} … {signed(mean(less) + half)})"
        each, every = ", ".join(map(signed, gains)), mean(one["thoughts"] for one in some)
        told = f"| {name} | {some[0]['actor_thoughts']:,} | {every:,.0f} | {each} | {signed(mean(gains))} |"
        assert f"{told} {apart if any(less) else '–'} |" in page
    sides = (rows["T⁵ with history, 8 windows"], rows["GRPO, 13 windows"])
    less = [one["content_gain"][0] - other["content_gain"][0] for one, other in zip(*sides, strict=True)]
    half = STUDENT * stdev(less) / 2
    assert f"is {signed(mean(less))} ({signed(mean(less) - half)} … {signed(mean(less) + half)})." in page
    crossed, grpo = rows["T⁵ with crossed halves, 10 windows"], rows["GRPO, 13 windows"]
    less = [one["content_gain"][0] - other["content_gain"][0] for one, other in zip(crossed, grpo, strict=True)]
    half = STUDENT * stdev(less) / 2
    assert f"GRPO is {signed(mean(less))} ({signed(mean(less) - half)} … {signed(mean(less) + half)})." in page
    gained = [mean(one["gain_vs_base"] for one in some) for some in (rows["T⁵"], crossed, grpo)]
    assert "T⁵ has +{:.3f}, with crossed halves +{:.3f}, GRPO with 13 windows +{:.3f}".format(*gained) in page
    for name, shown in (
        ("T⁵", "took {} to {} s"),
        ("T⁵ with history, 8 windows", "({} to {} s)"),
        ("GRPO, 13 windows", "with 13 windows {} to {}"),
    ):
        seconds = [one["seconds"] for one in rows[name]]
        assert shown.format(min(seconds), max(seconds)) in page
