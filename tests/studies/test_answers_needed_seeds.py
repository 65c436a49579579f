"""How far pairs of seeds lie apart, and how many of them it takes to show a difference."""

from __future__ import annotations

import pytest
from made_up_cells import clocked, lines_of
from scipy import stats

import scripts


@pytest.mark.parametrize(("deviation", "difference"), [(0.018, 0.01), (0.018, 0.02), (0.3, 1.0)])
def test_so_many_pairs_tell_a_difference_four_times_of_five(deviation: float, difference: float) -> None:
    needed = scripts.script("studies/answers/needed_seeds.py")

    def power(pairs: int) -> float:
        """Of the paired t-test, by the noncentral distribution."""
        shift, bar = difference / deviation * pairs**0.5, stats.t.ppf(0.975, pairs - 1)
        return float(stats.nct.sf(bar, pairs - 1, shift))

    pairs = needed.pairs_needed(deviation, difference)
    assert power(pairs) == pytest.approx(0.8, abs=0.07)
    assert power(pairs + 1) > 0.8
    assert power(max(2, pairs - 3)) < 0.8


def test_needed_pairs_are_those_of_the_cells() -> None:
    needed = scripts.script("studies/answers/needed_seeds.py")
    gains = {("t5", 1): 0.5, ("t5", 2): 0.3, ("quiet-star-grpo", 1): 0.2, ("quiet-star-grpo", 2): 0.1}
    right = {("t5", 1): "1101", ("t5", 2): "1100", ("quiet-star-grpo", 1): "1000", ("quiet-star-grpo", 2): "1100"}
    cells = [clocked(of[0], 390.0, gain, of[1], own=right[of]) for of, gain in gains.items()]
    for cell in cells:
        cell["by_text"]["content_gain"] = cell["by_text"]["thought_gain"]
    first, _, own, _ = lines_of(needed.seeds_needed({"cells": cells}))
    assert lines_of(needed.seeds_needed({"cells": cells[:1]})) == [], "no pair, no row"
    # Differences 0.3 and 0.2, and two and no answers of four.
    assert first[:5] == ["gain against the start", "2", "+0.250", "−0.385 … +0.885", "0.071"]
    assert own[:3] == ["right after own, points", "2", "+25.0"]
    assert own[4] == "35.4"


def test_a_run_that_was_cut_off_has_no_course_beside_the_others() -> None:
    tables = scripts.script("studies/answers/long_tables.py")
    cells = [clocked(method, 390.0, 0.3) for method in ("t5", "quiet-star-grpo")]
    short = clocked("quiet-star-ppo", 390.0, 0.9)
    short["measured"] = short["measured"][:2]
    del short["test"]
    course = tables.ended_course({"cells": [*cells, short]})
    assert course == tables.seeds_course({"cells": cells}, left_out=("steps",), control=False)
    assert {row[0].partition(",")[0] for row in lines_of(course)} == {"seconds", "actor thoughts"}
    assert "PPO" in tables.seeds_course({"cells": [*cells, short]})
    assert "PPO" not in course
    assert "minus the control" not in course
