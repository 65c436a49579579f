"""The verdict at the top of a page: it never says more than the intervals do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from recorded import items, run
from tfive.report.page_data import run_page
from tfive.report.record import RunRecord
from tfive.report.runs import Run
from tfive.report.story import growth, three_numbers, verdict

NAMES = ("thought_gain", "gain_vs_base", "content_gain", "growth", "no_thought_drift", "other_gain")


def measured(**changes: tuple[float, float]) -> dict[str, Any]:
    """Everything clearly above zero and nothing harmed, but for the intervals given."""
    ends = dict.fromkeys(NAMES, (0.1, 0.3)) | {"no_thought_drift": (-0.01, 0.005), "empty_gain": (-0.2, -0.1)} | changes
    found: dict[str, Any] = {"window": 3, "texts": 80, "no_thought_loss": 1.5}
    for name, (low, high) in ends.items():
        found |= {name: (low + high) / 2, f"{name}_interval": [low, high]}
    return found


def code(found: dict[str, Any], **changes: Any) -> str:
    given: dict[str, Any] = {"thinks": True, "state": "done", "moved": True}
    return verdict(found, **(given | changes))["code"]


def test_learned_needs_every_interval_above_zero() -> None:
    assert code(measured()) == "learned"
    for name in NAMES[:4]:
        assert code(measured(**{name: (-0.001, 0.3)})) == "not_learned", name
        assert code(measured(**{name: (-0.3, -0.1)})) == "not_learned", name
    said = verdict(measured(content_gain=(-0.1, 0.2), gain_vs_base=(-0.3, -0.1)), thinks=True, state="done", moved=True)
    assert said["headline"] == "No useful thoughts were learned."
    assert said["sentence"] == (
        "The gain over the model before training is below zero; the gain over another text's thought is not told apart "
        "from zero (95 % interval)."
    )


def test_harm_is_said_and_doubt_too() -> None:
    assert code(measured(no_thought_drift=(0.02, 0.04))) == "harmed"
    unsure = verdict(measured(no_thought_drift=(-0.02, 0.04)), thinks=True, state="done", moved=True)
    assert unsure["code"] == "learned"
    assert "cannot be told" in unsure["sentence"]


def test_few_texts_need_more() -> None:
    close = dict.fromkeys(NAMES[:4], (0.01, 0.3))
    assert code(measured(**close)) == "learned"
    assert code(measured(**close) | {"texts": 3}) == "not_learned"


def test_what_was_not_measured_is_not_claimed() -> None:
    found = measured()
    del found["content_gain_interval"]
    assert code(found) == "unclear"
    assert code(measured(), moved=False) == "not_learned"
    assert code(measured(), thinks=False) == "no_thoughts"
    assert code({"window": 0}) == "unfinished"


@pytest.mark.parametrize("state", ["running", "stopped", "failed", "unfinished"])
def test_a_run_that_is_not_finished_is_judged_so_far(state: str) -> None:
    said = verdict(measured(content_gain=(-0.1, 0.1)), thinks=True, state=state, moved=True)
    assert said["code"] == "unfinished"
    assert "So far: no useful thoughts were learned." in said["headline"]


def test_three_numbers_have_their_intervals_and_controls() -> None:
    last = measured(other_gain=(-0.3, -0.1))
    first = measured(thought_gain=(-0.3, -0.1)) | {"window": 0}
    prediction, content, harm = three_numbers(first, last, 5)
    assert (prediction["value"], prediction["start"]) == (pytest.approx(0.2), pytest.approx(-0.2))
    assert (prediction["control"]["metric"], prediction["control"]["high"]) == ("empty_gain", -0.1)
    # e^0.2 and e^−0.15: what a gain puts on a token's probability.
    assert "1.22 times the probability" in prediction["sentence"]
    assert "0.86 times" in prediction["sentence"]
    assert (content["control"]["metric"], content["control"]["value"]) == ("other_gain", pytest.approx(-0.2))
    assert harm["control"]["value"] == pytest.approx(1.5 - harm["value"])
    assert [one["good"] for one in (prediction, content, harm)] == [True, True, True]
    assert harm["sentence"].endswith("another text's thought does most harm: −0.200.")
    assert "gates" not in harm["sentence"]


def test_harm_says_what_gates_allow() -> None:
    last = measured(other_gain=(0.001, 0.003), empty_gain=(0.1, 0.1)) | {"reading_openness": 0.0514}
    *_, harm = three_numbers(measured(), last, 5, gated=True)
    assert (
        "Nothing put in a thought's place does harm on average; least good is another text's thought"
        in (harm["sentence"])
    )
    assert harm["sentence"].endswith("no thought changes a prediction. They are open by 0.051 of 1 now.")
    *_, bare = three_numbers(measured(), {"window": 3, "no_thought_drift": 0.1, "thought_gain": 0.1}, 5)
    assert "place" not in bare["sentence"]


def test_growth_is_paired_item_by_item(tmp_path: Path) -> None:
    folder = run(tmp_path / "r", "t5", 0, 0.2)
    first = items(0.1, 0, True)
    first["gain_vs_base"] = first["gain_vs_base"] - np.float32(0.25)
    save_file(first, folder / "develop" / "window-00000.safetensors")
    found = growth(RunRecord(Run("t5", 0, folder)))
    assert found is not None
    assert found["growth"] == pytest.approx(0.25)
    assert found["growth_interval"] == [pytest.approx(0.25), pytest.approx(0.25)]


def test_a_run_of_an_older_version_is_not_flattered(tmp_path: Path) -> None:
    """Its measurements have no intervals: a page shows the numbers and no claim."""
    page = run_page(run(tmp_path / "r", "t5", 0, 0.2, account={"roles": {}, "total": {"generated_tokens": 5}}))
    assert page["story"]["verdict"]["code"] == "unclear"
    assert page["story"]["numbers"][0]["value"] == 0.2
    assert page["series"]["development"]["thought_gain"]["value"] == [0.0, 0.1, 0.2]
    assert page["x"]["development"]["seconds"] == [0.0, 10.0, 20.0]
