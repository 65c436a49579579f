"""Courses of runs that may not have ended: what critics foresee by the token, and the seconds of a window."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pytest

import scripts
from tfive.errors import UserError

ROOT = Path(__file__).parents[2]


def module() -> Any:
    return scripts.script("studies/answers/by_window.py")


def test_scores_of_steps_are_taken_together() -> None:
    lines = [{"r2_per_step.1.1": 0.5, "r2_per_step.2.10": 0.3, "r2_per_step.1.11": None}, {"r2_per_step.1.2": 0.1}]
    assert module().foreseen(lines) == {"1-10": 0.3}


def test_seconds_are_those_of_later_windows(tmp_path: Path) -> None:
    spent = [(0, {}), (1, {"fit": 9.0}), (2, {"fit": 10.0, "update": 4.0}), (3, {"fit": 10.0, "update": 5.0})]
    last = (4, {"fit": 10.001, "update": 8.0, "update/inner": 2.0, "refit": 1.0})
    rows = [json.dumps({"window": window, "seconds": seconds}) for window, seconds in (*spent, last)]
    path = tmp_path / "costs.jsonl"
    path.write_text("\n".join(rows) + "\n", "utf-8")
    assert module().seconds_of_a_window(path) == {"update": 2.0, "refit": 0.5}
    path.write_text("\n".join(rows[:3]) + "\n", "utf-8")
    assert module().seconds_of_a_window(path) == {}


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run in it"):
        module().main([str(tmp_path), "--code", "abc", "--out", str(tmp_path / "out.json")])
    assert not list(tmp_path.iterdir())
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"no machine\.json"):
        module().main([str(tmp_path), "--code", "abc", "--out", str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()


def recorded(name: str) -> tuple[list[dict[str, Any]], str]:
    """The runs of a file of courses, and the page that tells of them."""
    found = json.loads((ROOT / "results" / name).read_text("utf-8"))
    return found["runs"], (ROOT / "docs" / "studies" / "answers.md").read_text("utf-8")


def test_a_run_that_has_ended_is_read_from_its_result(tmp_path: Path) -> None:
    run = tmp_path / "run-seed1"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"r2_per_step.1.1": 0.5, "pilot_deviation": 0.25}\n', "utf-8")
    (run / "config.toml").write_text("[gae]\nalpha = 2.0\n[run]\ntexts_per_pass = 3\n", "utf-8")
    (run / "costs.jsonl").write_text("", "utf-8")
    (tmp_path / "cell-run-seed1.json").write_text('{"method": "t5", "by_text": {"items": "1"}}', "utf-8")
    assert module().course(run) == {
        "method": "t5",
        "gae.alpha": 2.0,
        "texts_per_pass": 3,
        "r2_by_step": {"1-10": 0.5},
        "pilot_deviations": [0.25],
        "seconds_of_a_window": {},
    }


def test_the_page_tells_what_was_recorded() -> None:
    runs, page = recorded("answers-credit.json")
    plain, alike = (one["measured"][-1] for one in runs if one["method"] == "t5")
    grpo = next(one for one in runs if one["method"] == "quiet-star-grpo")["measured"]
    (after,) = (one for one in grpo if one["steps"] == 56)

    def gain(measured: dict[str, Any]) -> str:
        mean, low, high = measured["gain_vs_base"]
        return f"+{mean:.3f} ({low:.3f} … {high:.3f})"

    assert plain["steps"] == alike["steps"] == 48
    told = f"after 48 updates T⁵ had {gain(plain)} in gain against the start with α = 1 and {gain(alike)} with α = 1000"
    assert f"{told}, GRPO {gain(after)} after 56; its start +{grpo[0]['gain_vs_base'][0]:.3f}" in page


def test_the_page_tells_what_critics_add_to_the_mean_of_the_others() -> None:
    runs, page = recorded("answers-credit-means.json")
    critics = [one for one in runs if one["method"] == "t5"]
    by_step = [median(one["r2_by_step"][steps] for one in critics) for steps in ("1-10", "11-30")]
    told = f"{by_step[0]:.2f} before the first ten tokens and {by_step[1]:.2f} before the next twenty"
    assert told in page
    windows = [window for one in critics for window in one["windows"]]
    more = [min(one["r2.1"], one["r2.2"]) - one["r2_of_others"] for one in windows]
    assert f"in {sum(one > 0 for one in more)} of {len(more)} windows**, by {median(more):.2f} of R²" in page
    assert all(one["credit"] == "qualified" for one in windows)
    accepted = sum(one["accepted"] > 0 for one in windows)
    assert f"was accepted in {accepted} of {len(windows)} windows" in page
    assert f"at most {100 * max(one['retention'] for one in windows):.1f} % of their mean square" in page
    for alpha, shown in ((1.0, "{:.3f} (α = 1)"), (1000.0, "and {:.3f}, so that")):
        alike = median(
            one["twin_correlation"] for run in critics if run["gae.alpha"] == alpha for one in run["windows"]
        )
        assert shown.format(alike) in page


def test_the_page_tells_what_is_foreseen_on_the_way() -> None:
    found = json.loads((ROOT / "results" / "answers-on-the-way.json").read_text("utf-8"))
    runs, page = recorded("answers-way.json")

    def signed(value: float) -> str:
        return f"{value:+.2f}".replace("-", "−")

    foresights = ("by the others' mean", "by its worth so far", "by both")
    for row in found["rows"]:
        known = (f"{row[key]:.2f}" for key in foresights)
        slopes = ", ".join(f"{one:.2f}" for one in row["slopes of both"])
        worth = f"{signed(row['worth so far'])}, {signed(row['in the end'])}"
        assert f"| {row['step']} | {row['thoughts']:,} | {worth} | {' | '.join(known)} | {slopes} |" in page
    assert f"closes {found['thoughts']:,} thoughts" in page
    others, _, both = (found["rows"][1][key] for key in foresights)
    assert (both - others) / (1 - others) == pytest.approx(0.25, abs=0.02)  # a quarter
    again, _ = recorded("answers-way-again.json")
    ended = [one for one in (*runs, *again) if one["settings"]["run.seed"] != 19]
    windows = [one for run in ended for one in run["windows"] if "r2_of_others" in one]
    more = [min(one["r2.1"], one.get("r2.2", 1.0)) - one["r2_of_others"] for one in windows]
    told = f"in {sum(one > 0 for one in more)} of {len(more)} windows**, by {median(more):.2f} of R²"
    assert told in page
    tested = [one for one in windows if "accepted" in one]
    assert f"refused none of {sum(one['credit'] == 'qualified' for one in tested)} windows" in page
    assert len(tested) == sum(one["credit"] == "qualified" for one in tested)
    assert f"by at most {100 * max(one['retention'] for one in tested):.1f} % of their mean square" in page
    names = ("t5", "quiet-star-ppo", "quiet-star-grpo")

    def seconds(found: list[dict[str, Any]], name: str) -> str:
        """Of eight updates, on each of a pair of seeds; a window of GRPO has four."""
        own = [sum(one["seconds_of_a_window"].values()) for one in found if one["method"] == name]
        return " and ".join(f"{(1 + (name == names[2])) * one:.1f}" for one in own)

    t5, ppo, grpo = (seconds(runs, name) for name in names)
    assert f"took T⁵ {t5} s, PPO {ppo}, GRPO {grpo} (two windows of four)" in page
    later = [one for one in again if one in ended]
    assert f"; {', '.join(seconds(later, name) for name in names)} on 17 and 18" in page
    ends = [mean(one["measured"][-1]["gain_vs_base"][0] for one in ended if one["method"] == name) for name in names]
    assert "the ends are T⁵ +{:.3f}, PPO +{:.3f} and GRPO +{:.3f}".format(*ends) in page


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def over_seeds(values: list[float], digits: int = 3) -> tuple[str, str]:
    """Mean and 95 % interval, by Student's t."""
    half = {3: 4.303, 5: 2.776, 9: 2.306}[len(values)] * stdev(values) / len(values) ** 0.5
    middle = mean(values)
    return signed(middle, digits), f"{signed(middle - half, digits)} … {signed(middle + half, digits)}"


GAIN, CONTENT = "gain_vs_base", "content_gain"
ALL_FOUR = ("t5", "quiet-star-grpo", "rlp", "anchor-only")


def right(cell: dict[str, Any]) -> float:
    return 100 * float(cell["accuracy"]["results"]["every"]["accuracy"]["own"][0])


def gsm8k(cell: dict[str, Any]) -> float:
    return 100 * float(cell["accuracy"]["benchmarks"]["gsm8k"]["results"]["all"]["accuracy"]["own"][0])


MEASURES = ((GAIN, 3), (CONTENT, 3), (right, 1), (gsm8k, 1))


def on_the_way() -> tuple[dict[str, Any], dict[tuple[str, int], dict[str, Any]]]:
    """The study's results, and the cells that were paid on the way or stand beside such, by method and seed."""
    study = json.loads((ROOT / "results" / "answers-study.json").read_text("utf-8"))
    cells = scripts.script("studies/answers/long_tables.py").of_clock(study, "way")["cells"]
    return study, {(one["method"], one["settings"]["run.seed"]): one for one in cells if "test" in one}


def apart(first: str, second: str, seeds: Sequence[int], of: Any) -> list[float]:
    """One method minus another on each seed: a measure of test texts, by its name, or right answers."""
    cells, over_texts = on_the_way()[1], scripts.script("studies/answers/estimates.py").over_texts
    both = [(cells[first, seed], cells[second, seed]) for seed in seeds]
    return [over_texts([a], of, [b])[0] if isinstance(of, str) else of(a) - of(b) for a, b in both]


def test_the_page_tells_of_crossed_halves() -> None:
    runs, page = recorded("answers-way-crossed.json")
    crossed = [one for one in runs if one["method"] == "t5"]
    assert [(one["settings"]["run.seed"], one["settings"]["window.crossed"]) for one in crossed] == [
        (seed, True) for seed in range(19, 23)
    ]

    def seconds(found: list[dict[str, Any]], times: int) -> str:
        shown = [f"{times * sum(one['seconds_of_a_window'].values()):.1f}" for one in found]
        return f"{', '.join(shown[:-1])} and {shown[-1]}"

    grpo = [one for one in runs if one["method"] == "quiet-star-grpo"]
    assert f"{seconds(crossed, 1)} with crossed halves and GRPO's {seconds(grpo, 2)} on 19 to 22" in page
    took = [one["seconds_of_a_window"]["calibrate"] for one in crossed]
    assert f"two pairs of heads take {min(took):.1f} to {max(took):.1f}" in page
    both, later, every = ALL_FOUR[:2], (*range(19, 23), 31), (*range(15, 23), 31)
    each = apart(*both, later, GAIN)
    assert [one > 0 for one in each] == [True] * 4 + [False]
    assert f"what four seeds showed ({signed(mean(each[:4]))}) is halved by one more" in page
    middle, over = over_seeds(each)
    assert f"({', '.join(map(signed, each))}; mean {middle}, {over} over seeds" in page
    told = [over_seeds(apart(*both, later, of), digits) for of, digits in ((CONTENT, 3), (right, 1), (gsm8k, 1))]
    answers = "In content gain ({}, {}), right answers ({} points, {}) and on GSM8K's test ({}, {}) it is not above"
    assert answers.format(*(part for one in told for part in one)) in page
    told = [over_seeds(apart(*both, every, of), digits) for of, digits in MEASURES]
    whole = (
        "T⁵ minus GRPO is {} in gain against the start ({} over seeds), {} in content gain ({}), {} points in right "
        "answers ({}), and **{} points on GSM8K's test ({})**"
    )
    assert whole.format(*(part for one in told for part in one)) in page


def test_the_page_tells_of_equal_updates() -> None:
    runs, page = recorded("answers-way.json")
    runs = [*runs, *recorded("answers-way-again.json")[0]]

    def after(method: str, seed: int, key: str) -> float:
        (run,) = (one for one in runs if (one["method"], one["settings"]["run.seed"]) == (method, seed))
        return next(float(one[key][0]) for one in run["measured"] if one["steps"] == 96)

    for key, name in (("gain_vs_base", "gain against the start"), ("content_gain", "content gain")):
        apart = [after("t5", seed, key) - after("quiet-star-ppo", seed, key) for seed in range(15, 20)]
        wide = 2.776 * stdev(apart) / 5**0.5
        middle = mean(apart)
        over = f"{signed(middle)} ({signed(middle - wide)} … {signed(middle + wide)})"
        assert f"| {name} | {' | '.join(map(signed, apart))} | {over} |" in page


def test_the_page_tells_what_better_critics_taught() -> None:
    runs, page = recorded("nano-group-critics.json")
    apart = []
    for seed in range(4):
        plain, added = (one for one in runs if one["seed"] == seed)
        assert (plain["code"], added["code"]) == ("e28ba45", "38f6c5b")
        shown = ["+{:.3f} ({:.3f} … {:.3f})".format(*one["content_gain"]) for one in (plain, added)]
        weaker = [[min(w["r2.1"], w["r2.2"]) for w in one["windows"]] for one in (plain, added)]
        shown += [f"{median(one):.2f}" for one in weaker]
        for one, scores in zip((plain, added), weaker, strict=True):
            above = sum(score > w["r2_of_others"] for score, w in zip(scores, one["windows"], strict=True))
            shown.append(f"{above} of {len(scores)}")
        assert f"| {seed} | {' | '.join(shown)} |" in page
        apart.append(plain["content_gain"][0] - added["content_gain"][0])
    half = 3.182 * stdev(apart) / 2  # Student's t with three degrees of freedom
    told = f"{mean(apart):.3f} ({mean(apart) - half:.3f} … {mean(apart) + half:.3f} over the four seeds)"
    assert f"content gain lower on every seed, by {told}" in page


def pairs(first: str, second: str, seeds: Sequence[int]) -> list[str]:
    """One method minus another, as the study's tables pair them: right answers to fresh problems and on GSM8K's test in
    points, gain against the start and content gain, each with its interval over problems or texts."""
    study, cells = on_the_way()
    estimates = scripts.script("studies/answers/estimates.py")
    own, other = ([cells[method, seed] for seed in seeds] for method in (first, second))
    benchmarks = [[one["accuracy"]["benchmarks"]["gsm8k"] for one in side] for side in (own, other)]
    asked = [([one["accuracy"] for one in own], [one["accuracy"] for one in other], study["clusters"]["test"]),
             (*benchmarks, benchmarks[0][0]["clusters"])]  # fmt: skip
    found = []
    for *sides, clusters in asked:
        verdicts = [[one["verdicts"]["own"] for one in side] for side in sides]
        found.append([100 * value for value in estimates.over_problems(*verdicts, clusters)] + [1])
    found += [[*estimates.over_texts(own, name, other), 3] for name in ("gain_vs_base", "content_gain")]
    return [
        f"{signed(middle, places)} ({signed(middle - half, places)} … {signed(middle + half, places)})"
        for middle, half, places in found
    ]


def test_the_page_tells_of_all_four_from_one_start() -> None:
    runs, page = recorded("answers-way-control.json")
    assert {(one["method"], one["settings"]["run.seed"]) for one in runs} == {(name, 31) for name in ALL_FOUR}
    study, cells = on_the_way()
    own = [cells[method, 31] for method in ALL_FOUR]
    # Nothing but the clock, the seed and a key that is newer differs from the cells before.
    for name, seed in ((ALL_FOUR[0], 19), (ALL_FOUR[1], 19), (ALL_FOUR[2], 15), (ALL_FOUR[3], 15)):
        before, now = ({"window.crossed": False, **cells[name, one]["settings"]} for one in (seed, 31))
        assert {key for key in now if before[key] != now[key]} == {"run.seconds", "run.seed"}
    section = page.partition("#### All four from one start")[2].partition("\n#### ")[0]
    assert len({one["start"] for one in own} | {json.dumps(one["test_start"]) for one in own}) == 2
    spent = [one["measured"][-1] for one in own]
    costs = [f"{one['steps']}, {one['actor_thoughts']:,}, {one['training_seconds']:.0f}" for one in spent]
    assert f"| updates, actor thoughts, seconds | – | {' | '.join(costs)} |" in section

    asked = [("fresh problems", study["accuracy"], [one["accuracy"] for one in own]),
             ("GSM8K's test", study["benchmarks"]["gsm8k"], [one["accuracy"]["benchmarks"]["gsm8k"] for one in own]),
             ]  # fmt: skip
    estimates = scripts.script("studies/answers/estimates.py")
    less = [pairs("t5", name, (31,)) for name in ALL_FOUR[1:]]
    for place, (name, starts, answers) in enumerate(asked):
        models = [starts["careful-128-eighth"], *answers]
        shares = [one["results"].get("every", one["results"]["all"])["accuracy"] for one in models]
        right_ones = (f"{100 * one['own'][0]:.1f}" for one in shares)
        assert f"| {name} | {' | '.join(right_ones)} |" in section
        lazy = (", ".join(f"{100 * one[key][0]:.1f}" for key in ("none", "empty", "random")) for one in shares)
        assert f"| no thought, nothing between the delimiters, random tokens | {' | '.join(lazy)} |" in section
        assert all(abs(one[key][0] - shares[0][key][0]) < 0.02 for one in shares for key in ("none", "empty", "random"))
        clusters = models[0].get("clusters", study["clusters"]["test"])
        rises = [estimates.over_problems([one["verdicts"]["own"]], [models[0]["verdicts"]["own"]], clusters)
                 for one in answers]  # fmt: skip
        shown = [[100 * middle, 100 * (middle - half), 100 * (middle + half)] for middle, half in rises]
        told = ("{} ({} … {})".format(*(signed(value, 1) for value in one)) for one in shown)
        assert f"| minus the start | – | {' | '.join(told)} |" in section
        assert f"| T⁵ minus it | – | – | {' | '.join(one[place] for one in less)} |" in section
    for place, (name, key, begun) in enumerate((("gain against the start", "gain_vs_base", "thought_gain"),
                                                ("content gain", "content_gain", "content_gain")), 2):  # fmt: skip
        told = ("{} ({} … {})".format(*map(signed, one["test"][key])) for one in own)
        assert f"| {name} | {signed(own[0]['test_start'][begun])} | {' | '.join(told)} |" in section
        assert f"| T⁵ minus it | – | – | {' | '.join(one[place] for one in less)} |" in section
    _, gsm, *gains = (one.replace(" (+", ", ").replace("… +", "… ").rstrip(")") for one in pairs(*ALL_FOUR[1:3], (31,)))
    number, _, interval = gsm.partition(", ")
    assert f"({gains[0]}; {gains[1]}; {number} points, {interval})" in section
    per_update = {one["method"]: sum(one["seconds_of_a_window"].values()) / one["settings"]["window.actor_steps"]
                  for one in runs}  # fmt: skip
    t5, grpo, rlp, _ = (f"{8 * per_update[name]:.1f}" for name in ALL_FOUR)
    assert f"{t5}, GRPO's {grpo} and RLP's {rlp} on 31" in page


def test_pages_tell_of_the_control_and_rlp_over_all_their_seeds() -> None:
    page, readme = ((ROOT / name).read_text("utf-8") for name in ("docs/studies/answers.md", "README.md"))
    each = [over_seeds(apart("t5", "anchor-only", (15, 16, 31), of), digits) for of, digits in MEASURES]
    told = [part.replace("+", "") for one in each for part in one]
    said = "by {} in gain against the start ({} over three seeds), {} in content gain ({}), "
    said += "{} points of fresh problems ({}) and {} of GSM8K's test ({})"
    assert said.format(*told) in page
    plain = [one.replace("+", "") for one in pairs("t5", "anchor-only", (15, 16, 31))[:2]]
    (fresh, wide), (gsm, _) = (one.rstrip(")").split(" (") for one in plain)
    seeds = [interval.replace("+", "") for _, interval in each[2:]]
    assert f"by {fresh} and {gsm} points ({seeds[0]} and {seeds[1]} over three seeds)" in readme
    assert f"{fresh} with 128 paid on the way ({wide}, three seeds)" in page
    rlp = pairs("t5", "rlp", (15, 31))
    short = [one.replace(" (+", " (").replace("… +", "… ") for one in rlp]
    of = ("points of fresh problems", "of GSM8K's test")
    fresh, gsm = (one.replace(" (", f" {which} (") for one, which in zip(short, of))
    assert f"Both together: {short[2]}, {short[3]}, {fresh} and {gsm}, over texts and problems" in page
    (fresh, wide), (gsm, wider) = (one.rstrip(")").split(" (") for one in short[:2])
    assert f"above RLP by {fresh.lstrip('+')} on fresh problems ({wide} over problems; two seeds" in readme
    assert f"not told apart from it on GSM8K's test ({gsm}, {wider})" in readme
