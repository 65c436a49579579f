"""Seeds of the study of thoughts before answers that began with different starts, and methods that lack a seed: what is
paired with what, in numbers reckoned by hand."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from made_up_cells import clocked, lines_of

import scripts

AGAIN = "careful-groups-again"
T5, GRPO, RLP, CONTROL = "T⁵, 8 × 1", "GRPO, 8 × 1", "RLP, 8 × 1", "anchors alone, 8 × 1"


def drawn(name: str, found: dict[str, Any]) -> list[list[str]]:
    return lines_of(scripts.script("studies/answers/long_tables.py").CLOCKED_TABLES[name](found))


def model(own: str, sampled: str = "") -> dict[str, Any]:
    """A model that is wrong without a thought of its own."""
    nothing = "0" * len(own)
    names = ("none", "empty", "random", "other", "true")
    verdicts = {"own": own, "sampled": sampled or nothing, **dict.fromkeys(names, nothing)}
    shares = {name: [statistics.fmean(map(int, one))] for name, one in verdicts.items()}
    every = {"items": len(own), "accuracy": shares, "difference": {"own - none": [*shares["own"], 0.0, 0.0]}}
    return {"problems": "test", "verdicts": verdicts, "results": {"every": every}}


def cell(method: str, seed: int, own: str = "000", **more: Any) -> dict[str, Any]:
    """Seed 3 had another clock than those after it, and another start."""
    found = clocked(method, 380.0 if seed == 3 else 400.0, more.pop("gain", 0.1), seed=seed, **more)
    found["test"] |= {"empty_gain": [0.0], "random_gain": [0.0]}
    return found | {"accuracy": model(own)}


def three_seeds() -> dict[str, Any]:
    """T⁵ with three seeds and RLP with the last two; three answers of two problems."""
    t5 = [cell("t5", seed, own) for seed, own in ((3, "110"), (4, "111"), (5, "010"))]
    rlp = [cell("rlp", seed, own) for seed, own in ((4, "110"), (5, "100"))]
    models = {"careful-groups": model("100"), AGAIN: model("110"), "careful-long": model("111")}
    return {"cells": [*t5, *rlp], "accuracy": models, "clusters": {"test": "0 0 1"}, "benchmark": {}}


def test_right_answers_are_paired_with_the_start_that_each_seed_began_with() -> None:
    found = three_seeds()
    third, later, t5, rlp = drawn("groups_answers", found)
    assert third[:3] == ["after careful reading, seed 3", "–", "33.3"]
    assert later[:3] == ["after careful reading, seeds 4, 5", "–", "66.7"]
    # A third more, a third more, a third less; Student's with two degrees of freedom.
    half = 4.3027 * statistics.stdev([1 / 3, 1 / 3, -1 / 3]) / 3**0.5
    assert t5[:3] == [T5, "3 (3, 4, 5)", "66.7"]
    assert t5[8] == f"+11.1 (−{100 * (half - 1 / 9):.1f} … +{100 * (half + 1 / 9):.1f})"
    # Mean over seeds: −1/3 and 1/3 of the first problem, 1/3 of the second; both are 2/9 off what a ninth each gives.
    half = 1.96 * (2 * 2 * (2 / 9) ** 2) ** 0.5 / 3
    assert t5[9] == f"−{100 * (half - 1 / 9):.1f} … +{100 * (half + 1 / 9):.1f}"
    assert (rlp[:2], rlp[8].split()[0]) == ([RLP, "2 (4, 5)"], "−16.7")
    rows = drawn("groups_lazy", found)
    assert [row[0] for row in rows] == ["the start, seed 3", "the start, seeds 4, 5", T5, RLP]
    assert [row[6] for row in rows] == ["33.3", "66.7", "66.7", "50.0"]
    assert [row[:2] for row in drawn("groups_ends", found)[:2]] == [["the start", "3"], ["the start", "4, 5"]]


def test_one_start_has_one_row_and_one_that_was_not_asked_no_difference() -> None:
    found = three_seeds()
    alone = {**found, "cells": found["cells"][:1]}
    start, t5 = drawn("groups_answers", alone)
    assert (start[:3], t5[1], t5[8]) == (["after careful reading", "–", "33.3"], "1", "+33.3")
    assert drawn("groups_lazy", alone)[0][0] == "the start"
    assert drawn("groups_ends", alone)[0][:2] == ["the start", "–"]
    # Seeds 4 and 5 alone have the other start, and no other.
    start, t5, _ = drawn("groups_answers", {**found, "cells": found["cells"][1:]})
    assert (start[:3], t5[8].split()[0]) == (["after careful reading", "–", "66.7"], "+0.0")
    del found["accuracy"][AGAIN]
    start, t5, rlp = drawn("groups_answers", found)
    assert start[0] == "after careful reading, seed 3"
    assert t5[8:] == rlp[8:] == ["–"] * 4
    tables = scripts.script("studies/answers/long_tables.py")
    assert set(tables.of_clock(three_seeds(), "groups")["accuracy"]) == {"careful", AGAIN}
    assert set(tables.of_clock(three_seeds(), "long")["accuracy"]) == {"careful"}


def test_the_benchmark_is_paired_within_a_seed_and_averaged_over_seeds() -> None:
    own = {
        "t5": {3: "1110", 4: "0000", 5: "1111"},
        "quiet-star-grpo": {3: "1111", 4: "1000", 5: "1111"},
        "rlp": {4: "1000", 5: "1000"},
    }
    cells = [cell(method, seed) for method, seeds in own.items() for seed in seeds]
    for one in cells:
        one["accuracy"]["benchmark"] = model(own[one["method"]][one["settings"]["run.seed"]])
    found = {"cells": cells, "benchmark": {"careful-groups": model("1000"), AGAIN: model("1100")}}
    rows = {(row[0], row[1]): row[2:] for row in drawn("groups_benchmark", found)}
    means = [(T5, "3, 4, 5"), (GRPO, "3, 4, 5"), (RLP, "4, 5")]
    single = [(T5, "3"), (T5, "4"), (T5, "5"), (GRPO, "3"), (GRPO, "4"), (GRPO, "5"), (RLP, "4"), (RLP, "5")]
    assert list(rows) == [("the start", "3"), ("the start", "4, 5"), *single, *means]
    # Own thoughts minus the start's, and T⁵'s minus this one's, of the same seed each.
    first = {key: (row[8].split()[0], row[10].split()[0]) for key, row in rows.items()}
    assert [first["the start", seeds] for seeds in ("3", "4, 5")] == [("–", "+50.0"), ("–", "+0.0")]
    assert [first[T5, seed] for seed in "345"] == [("+50.0", "–"), ("−50.0", "–"), ("+50.0", "–")]
    assert [first[GRPO, seed] for seed in "345"] == [("+75.0", "−25.0"), ("−25.0", "−25.0"), ("+50.0", "+0.0")]
    assert first[T5, "3, 4, 5"] == ("+16.7", "–")
    assert first[GRPO, "3, 4, 5"] == ("+33.3", "−16.7")
    rlp = rows[RLP, "4, 5"]
    assert rlp[:2] == ["4", "25.0"]
    # Question by question 0, −1, 0, 0 on both seeds.
    assert rlp[8] == "−25.0 (−74.0 … +24.0; over seeds −25.0 … −25.0)"
    # Question by question −1/2, 1/2, 1/2, 1/2; seed by seed −1/4 and 3/4, one degree of freedom.
    assert rlp[10] == "+25.0 (−24.0 … +74.0; over seeds −610.3 … +660.3)"
    # T⁵ leads where no start was asked, too.
    rows = {(row[0], row[1]): row[2:] for row in drawn("groups_benchmark", {**found, "benchmark": {}})}
    assert list(rows) == [*single, *means]
    assert [rows[name, "3"][10].split()[0] for name in (T5, GRPO)] == ["–", "−25.0"]


def texts(digest: str, gains: str, lost: str = "5000 5000") -> dict[str, str]:
    """One item of the first text and three of the second, with what the model loses without a thought."""
    return {"digest": digest, "items": "1 3", "no_thought_loss": lost,
            **dict.fromkeys(("gain_vs_base", "thought_gain", "content_gain"), gains)}  # fmt: skip


def test_methods_are_told_apart_seed_by_seed_over_texts_problems_and_seeds() -> None:
    t5 = [cell("t5", seed, own) for seed, own in ((3, "110"), (4, "111"), (5, "010"))]
    grpo = [cell("quiet-star-grpo", seed) for seed in (3, 4, 5)]
    for one, digest, gains in zip(t5, "dea", ("1000 3000", "2000 9000", "0 6000"), strict=True):
        one["by_text"] = texts(digest, gains)
    # Of seed 4 the second text was measured at other positions.
    for one, digest, lost in zip(grpo, "dfa", ("1 2", "5000 9000", "1 2"), strict=True):
        one["by_text"] = texts(digest, "0 0", lost)
    found = {"cells": [*t5, *grpo, cell("rlp", 5)], "clusters": {"test": "0 0 1"}, "accuracy": {}}
    row, other = drawn("groups_apart", found)
    assert row[:4] == [T5, GRPO, "3 (3, 4, 5)", "2, 1, 2"]
    assert (other[1:3], other[6].count("over seeds")) == ([RLP, "1 (5)"], 0)
    # 0.1, 0.2 and 0.15 an item; the texts of seed 5 are 0.0375 off its mean, of three seeds a third of that.
    over_texts, over_seeds = 1.96 * (2 * 2 * 0.0125**2) ** 0.5, 4.3027 * 0.05 / 3**0.5
    wanted = [0.15 - over_texts, 0.15 + over_texts, 0.15 - over_seeds, 0.15 + over_seeds]
    assert row[4] == "+0.150 ({:+.3f} … {:+.3f}; over seeds {:+.3f} … {:+.3f})".format(*wanted)
    assert row[5] == row[4]
    # Two thirds, all and one third of the answers; 5/3 of two answers and 1/3 of one.
    over_problems, over_seeds = 1.96 * (2 * 2 / 9) ** 0.5 / 3, 4.3027 * (1 / 3) / 3**0.5
    wanted = [100 * (2 / 3 + one) for one in (-over_problems, over_problems, -over_seeds, over_seeds)]
    shown = "+66.7 ({:+.1f} … {:+.1f}; over seeds {:+.1f} … {:+.1f})".format(*wanted)
    assert row[6] == shown.replace("-", "−")
    assert row[7].startswith("+0.0 (")
    # A seed without a text in common leaves nothing that could be called the mean over three.
    grpo[1]["by_text"]["items"] = "3 1"
    row, _ = drawn("groups_apart", found)
    assert row[3:6] == ["2, 0, 2", "–", "–"]


def test_a_variant_is_also_held_against_one_with_more_parts_replaced() -> None:
    variants = [{}, {"critic.pair": "bracket"}, {"calibration.mode": "single"},
                {"critic.pair": "bracket", "calibration.mode": "average"}]  # fmt: skip
    cells = [cell("t5", 3, own) for own in ("111", "110", "010", "100")]
    for one, parts in zip(cells, variants, strict=True):
        one["settings"] = one["settings"] | parts
        one["by_text"] = texts("d", "0 0")
    found = {"cells": cells, "clusters": {"test": "0 1 2"}, "accuracy": {}}
    rows = drawn("groups_apart", found)
    bracket, single, average = (f"{T5}, {part}" for part in (
        "twins of two expectiles", "first critic alone", "twins of two expectiles, average of the two"))  # fmt: skip
    told = {(row[0], row[1]): row[6].split()[0] for row in rows}
    assert told == {
        (T5, bracket): "+33.3", (T5, single): "+66.7", (T5, average): "+66.7", (bracket, average): "+33.3",
    }  # fmt: skip


def test_means_over_seeds_add_what_a_text_does_in_each() -> None:
    estimates = scripts.script("studies/answers/estimates.py")
    one, two = {0: (1.0, 1), 1: (0.0, 1)}, {0: (0.0, 1), 1: (1.0, 1)}
    # What one seed gains on a text the other loses: the mean is the same on both.
    assert estimates.over_clusters([one, two]) == pytest.approx((0.5, 0.0))
    mean, half = estimates.over_clusters([one, one])
    assert (mean, half) == pytest.approx(estimates.over_clusters([one]))
    assert half == pytest.approx(1.96 * (2 * 2 * 0.25**2) ** 0.5)


def test_the_course_is_cut_seed_by_seed_and_differences_are_of_common_seeds() -> None:
    # T⁵ takes ten seconds a window on seed 3, thirty on seed 4 and twenty on seed 5, the others ten; two windows of it.
    cells = [cell("t5", seed, gain=0.2, windows=2, slow=slow) for seed, slow in ((3, 1), (4, 3), (5, 2))]
    cells += [cell("rlp", seed, gain=0.2, windows=8) for seed in (4, 5)]
    cells += [cell("anchor-only", seed, gain=0.05, windows=8) for seed in (3, 4, 5)]
    rows = {(row[0], row[1]): row[2:] for row in drawn("groups_course", {"cells": cells})}
    equal = "seconds, 20 / 40"  # of seed 3, and of seeds 4 and 5 what both have
    assert rows[equal, T5][:3] == ["3 (3, 4, 5)", "2", "40"]
    assert rows[equal, RLP][:3] == ["2 (4, 5)", "5", "50"]  # six windows of seed 4, four of seed 5
    assert rows[equal, CONTROL][:3] == ["3 (3, 4, 5)", "4", "40"]
    # 1.2 − 0.3 and 0.8 − 0.2; the control of seed 3 has no part in it.
    assert rows[equal, RLP][7] == "+0.750 (−1.156 … +2.656)"
    assert rows[equal, T5][7].split()[0] == "+0.200"  # 0.4 less 0.1, 0.3 and 0.2
    assert rows["steps, 8", RLP][:2] == ["2 (4, 5)", "2"]  # one number where all seeds agree


def test_critics_stand_beside_the_mean_of_the_others_where_it_was_kept() -> None:
    def window(number: int, second: float, **more: float) -> dict[str, Any]:
        return {"window": number, "r2.1": 0.5, "r2.2": second, "credit": "qualified", **more}

    kept = [
        window(1, 0.3, r2_of_others=0.35, retention=0.002, accepted=1.0, twin_correlation=0.9),
        window(2, 0.4, r2_of_others=0.2, retention=0.0125, accepted=0.0, twin_correlation=0.8),
        window(3, 0.6, r2_of_others=0.3),
        window(4, 0.45, retention=0.001, accepted=1.0, twin_correlation=float("nan")),
    ]
    cells = [cell("t5", 3, critics=[window(1, 0.3)]), cell("t5", 4, critics=kept)]
    before, after = drawn("groups_critics", {"cells": cells})
    assert before == [T5, "3", "1 of 1", "1 of 1", "– / +0.300", *["–"] * 5]
    # The weaker one has 0.3, 0.4 and 0.5 where the others' mean is known.
    assert after[4:] == ["+0.350 / +0.475", "+0.350 / +0.250", "2 of 3", "0.0125", "2 of 3", "+0.850"]
    assert drawn("groups_critics", {"cells": cells[:1]}) == [before[:5]]
