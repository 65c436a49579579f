"""Tables of the runs that were shown no working; `from_hindsight.py` says from which files."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from answer_tables import GSM8K
from forms import over_both, percent, points, points_of, signed, with_interval

from tfive.errors import UserError
from tfive.rl.clusters import cluster_sums, clustered_mean
from tfive_lab.estimates import over_clusters
from tfive_lab.study_tables import drawn

FIRST, SECOND = "25", "26"
"""Seeds: of the first runs, and of those with careful reading in all texts, on sheets without any working too."""
AGAIN = ("27", "28")
"""Seeds of the bare sheets' further runs, each from a start of its own."""
LARGER = "29"
"""Seed of the runs of a model three times as large, on bare sheets."""
START, BARE, LOTS, COLD = "own-128", "bare-128", "lots-128", "qwen2.5-coder-0.5b"
"""What runs began with, or would have: the model after hindsight, the same on bare sheets, after as many thoughts drawn
by lot there, and as it comes."""
LARGE, LARGE_COLD = "bare-128-1.5b", "qwen2.5-coder-1.5b"
"""The larger model after hindsight on bare sheets, and as it comes."""
NAMES = {"anchor-only": "anchors alone", "t5": "T⁵", "quiet-star-grpo": "GRPO"}
FORMS = {
    "noted": "half of the thoughts drawn with a note of what follows",
    "own": "all drawn as always",
    "wide": "as always; read in all texts",
    "bare": "on bare sheets; read in all texts",
    "lots": "on bare sheets, as many thoughts by lot; read in all texts",
    "larger": "on bare sheets, 1.5B; read in all texts",
}
BEGUN = {"noted": "as it comes", "bare": "as it comes, bare sheets", "larger": "as it comes, bare sheets, 1.5B"}
"""Starts beside which the model is shown as it was before."""
Found = dict[str, Any]


def starts(found: Found) -> str:
    """What each form of hindsight came to on development texts."""
    head = ("drawn", "measured", "thought gain", "content gain", "loss without", "tokens of a thought", "learned of")
    every = {name: one for seed in (FIRST, SECOND, LARGER) for name, one in found[seed]["starts"].items()}
    forms = dict(FORMS)
    for seed in AGAIN:
        every[seed] = found[seed]["starts"]["bare"]
        forms[seed] = f"{FORMS['bare']} (seed {seed})"
    rows = []
    for name, form in forms.items():
        one = every[name]
        for when in ("before", "after")[name not in (*BEGUN, *AGAIN) :]:
            shown = one[when]
            counts = ", ".join(f"{each['kept']:.0f} of {each['thoughts']:,.0f}" for each in one["rounds"])
            begun = BEGUN.get(name, f"{BEGUN['bare']} (seed {name})")
            named = ("–", begun, "–") if when == "before" else (form, "after", counts)
            gains = (signed(shown["thought_gain"]), signed(shown["content_gain"]))
            numbers = (f"{shown['no_thought_loss']:.3f}", f"{shown['mean_thought_length']:.0f}")
            rows.append((named[0], named[1], *gains, *numbers, named[2]))
    return drawn(head, rows)


HEAD = ("model", "updates", "actor thoughts", "content gain", "asked", "no thought", "empty", "random tokens",
        "another's", "own, sampled", "own, greedy", "minus the start's, greedy")  # fmt: skip


def answers(found: Found) -> str:
    """The first runs: right answers in per cent, and what each model has won over the start, answer by answer."""
    some = found[FIRST]
    begun = asked_of(some, START)
    cold = asked_of(some, COLD)
    rows = rows_of("as it comes", cold, begun, some) + rows_of("the start", begun, None, some)
    for cell in ordered(some):
        rows += rows_of_cell(cell, title(cell), begun, some)
    return drawn(HEAD, rows)


def again(found: Found) -> str:
    """The same of the second runs, of both kinds of sheets."""
    some = found[SECOND]
    rows = rows_of("as it comes", asked_of(some, COLD), None, some)
    for start, where in ((START, "sheets with lines shown"), (BARE, "bare sheets")):
        begun = asked_of(some, start)
        rows += rows_of(f"**{where}**: the start", begun, None, some)
        if start == BARE:
            rows += rows_of("as many by lot", asked_of(some, LOTS), begun, some)
        for cell in ordered(some):
            if cell["start"] == start:
                rows += rows_of_cell(cell, NAMES[cell["method"]], begun, some)
    return drawn(HEAD, rows)


def asked_of(some: Found, model: str) -> Found:
    """What a model answered that was asked by itself."""
    found = {"fresh problems": some["accuracy"].get(model), "GSM8K's test": some["benchmarks"][GSM8K].get(model)}
    return {asked: one for asked, one in found.items() if one is not None}


def rows_of(
    name: str, models: Found, begun: Found | None, some: Found, told: Sequence[str] = ("–", "–", "–")
) -> list[Sequence[str]]:
    """A row for each kind of questions; what was trained is told in the first."""
    rows: list[Sequence[str]] = []
    for asked, model in models.items():
        less = "–" if begun is None else _apart(model, begun[asked], some)
        rows.append((name, *told, asked, *_shares(model), less))
        told = ("", "", "") if "–" not in told else told
    return rows


def rows_of_cell(cell: Found, name: str, begun: Found, some: Found) -> list[Sequence[str]]:
    """The same of a run's model."""
    last = cell["measured"][-1]
    told = (f"{last['steps']}", f"{last['actor_thoughts']:,}", with_interval(cell["test"]["content_gain"]))
    return rows_of(name, answered(cell), begun, some, told)


def answered(cell: Found) -> Found:
    """What a run's model answered."""
    return {"fresh problems": cell["accuracy"], "GSM8K's test": cell["accuracy"]["benchmarks"][GSM8K]}


def apart(found: Found) -> str:
    """The first rewarded runs from the start minus others, answer by answer, in points."""
    some = found[FIRST]
    cells = {title(cell): answered(cell) for cell in ordered(some)}
    own, group, control = (NAMES[method] for method in ("t5", "quiet-star-grpo", "anchor-only"))
    cold = next(name for name in cells if name not in NAMES.values())
    rows = []
    for one, other in ((own, control), (group, control), (own, group), (own, cold)):
        rows.append(
            (f"{one} minus {other}", *(_apart(cells[one][asked], cells[other][asked], some) for asked in cells[one]))
        )
    return drawn(("greedy own thought, points", "fresh problems", "GSM8K's test"), rows)


def bare(found: Found) -> str:
    """Models of the second runs minus others, own thoughts, by how much of a problem's working is shown."""
    some = found[SECOND]
    models = {(cell["start"], cell["method"]): answered(cell) for cell in some["cells"]}
    names = {START: "sheets with lines shown", BARE: "bare sheets"}
    pairs = [("bare sheets: the start minus as many by lot", asked_of(some, BARE), asked_of(some, LOTS)),
             ("bare sheets: the start minus as it comes", asked_of(some, BARE), asked_of(some, COLD))]  # fmt: skip
    for start in (BARE, START):
        own, control, begun = models[start, "t5"], models[start, "anchor-only"], asked_of(some, start)
        pairs += [
            (f"{names[start]}: T⁵ minus the start", own, begun),
            (f"{names[start]}: T⁵ minus anchors alone", own, control),
        ]
    pairs.append(("T⁵ on sheets with lines shown minus on bare ones", models[START, "t5"], models[BARE, "t5"]))
    return _by_what_is_shown(pairs, some)


def _by_what_is_shown(pairs: Sequence[tuple[str, Found, Found]], some: Found) -> str:
    """Models minus others, by how much of a problem's working is shown."""
    shown = [number for number, kind in enumerate(some["missing"].split()) if kind != "all"]
    rest = [number for number, kind in enumerate(some["missing"].split()) if kind == "all"]
    rows = []
    for name, one, other in pairs:
        for condition, how in (("own", "greedy"), ("sampled", "sampled")):
            fresh = [
                _apart(one["fresh problems"], other["fresh problems"], some, condition, which)
                for which in (shown, rest)
            ]
            asked = _apart(one["GSM8K's test"], other["GSM8K's test"], some, condition)
            rows.append((name if how == "greedy" else "", how, *fresh, asked))
    head = (
        "points",
        "own thought",
        f"fresh, lines shown ({len(shown)} answers)",
        f"fresh, none shown ({len(rest)})",
        "GSM8K's test",
    )
    return drawn(head, rows)


def larger(found: Found) -> str:
    """Right answers of the larger model's runs."""
    some = found[LARGER]
    begun = asked_of(some, LARGE)
    rows = rows_of("as it comes", asked_of(some, LARGE_COLD), begun, some) + rows_of("the start", begun, None, some)
    for cell in ordered(some):
        rows += rows_of_cell(cell, NAMES[cell["method"]], begun, some)
    return drawn(HEAD, rows)


def larger_apart(found: Found) -> str:
    """The same models minus one another."""
    some = found[LARGER]
    trained = {cell["method"]: answered(cell) for cell in some["cells"]}
    own, control = trained["t5"], trained["anchor-only"]
    begun, cold = asked_of(some, LARGE), asked_of(some, LARGE_COLD)
    pairs = [("the start minus as it comes", begun, cold), ("T⁵ minus the start", own, begun),
             ("T⁵ minus anchors alone", own, control), ("anchors alone minus the start", control, begun)]  # fmt: skip
    return _by_what_is_shown(pairs, some)


def seeds(found: Found) -> str:
    """Bare sheets from several starts: right answers of each start and of its runs."""
    every = (SECOND, *AGAIN)
    models = bare_models(found)
    rows: list[Sequence[str]] = []
    for asked in ("fresh problems", "GSM8K's test"):
        for condition, how in (("own", "greedy"), ("sampled", "sampled")):
            for name in ("the start", "T⁵", "GRPO"):
                shares = [
                    models[seed, name][asked]["results"]["every"]["accuracy"][condition][0]
                    if (seed, name) in models else None
                    for seed in every
                ]  # fmt: skip
                told = ["–" if share is None else percent(share) for share in shares]
                rows.append((asked, how, name, *told))
    return drawn(("asked", "own thought", "right, %", *(f"seed {seed}" for seed in every)), rows)


def seeds_apart(found: Found) -> str:
    """The same models minus one another, by how much of a problem's working is shown: means over starts."""
    models, every = bare_models(found), (SECOND, *AGAIN)
    cold = asked_of(found[SECOND], COLD)
    pairs = [
        ("the start minus as it comes", every, "the start", None),
        ("T⁵ minus its start", every, "T⁵", "the start"),
        ("T⁵ minus its start", AGAIN, "T⁵", "the start"),
        ("GRPO minus its start", AGAIN, "GRPO", "the start"),
        ("T⁵ minus GRPO", AGAIN, "T⁵", "GRPO"),
    ]
    kinds = found[SECOND]["missing"].split()
    shown = [number for number, kind in enumerate(kinds) if kind != "all"]
    rest = [number for number, kind in enumerate(kinds) if kind == "all"]
    rows = []
    for name, some, one, other in pairs:
        for condition, how in (("own", "greedy"), ("sampled", "sampled")):
            cells = []
            for asked, which in (("fresh problems", shown), ("fresh problems", rest), ("GSM8K's test", None)):
                told = [
                    (found[seed], models[seed, one][asked], (cold if other is None else models[seed, other])[asked])
                    for seed in some
                ]
                cells.append(_apart_over_seeds(told, condition, which))
            rows.append((name if how == "greedy" else "", ", ".join(some) if how == "greedy" else "", how, *cells))
    head = ("points", "seeds", "own thought", f"fresh, lines shown ({len(shown)} answers)",
            f"fresh, none shown ({len(rest)})", "GSM8K's test")  # fmt: skip
    return drawn(head, rows)


def bare_models(found: Found) -> dict[tuple[str, str], Found]:
    """By seed and name what the starts on bare sheets and the runs from them answered; one run of a method a seed."""
    models: dict[tuple[str, str], Found] = {}
    for seed in (SECOND, *AGAIN):
        if found[seed]["clusters"] != found[SECOND]["clusters"] or found[seed]["missing"] != found[SECOND]["missing"]:
            raise UserError(
                f"seed {seed}: was asked other questions than seed {SECOND}; answer by answer needs the same"
            )
        models[seed, "the start"] = asked_of(found[seed], BARE)
        for cell in found[seed]["cells"]:
            if cell["start"] == BARE:
                if (seed, NAMES[cell["method"]]) in models:
                    raise UserError(f"seed {seed}: two runs of {cell['method']} from {BARE}; give a folder with one")
                models[seed, NAMES[cell["method"]]] = answered(cell)
    return models


def _apart_over_seeds(
    pairs: Sequence[tuple[Found, Found, Found]], condition: str, which: Sequence[int] | None = None
) -> str:
    """The mean over seeds of one model's right answers minus another's, over problems and over seeds."""
    each = [_differences(one, other, some, condition, which) for some, one, other in pairs]
    sums = [
        {
            int(number): (float(total), float(mass))
            for number, total, mass in zip(
                problem_N.unique(), *cluster_sums(value_N, torch.ones_like(value_N), problem_N), strict=True
            )
        }
        for value_N, problem_N in each
    ]
    return over_both(over_clusters(sums), [float(value_N.double().mean()) for value_N, _ in each], points_of)


def ordered(found: Found) -> list[Found]:
    """The runs from the start in the order of `NAMES`, then those from the model as it comes."""
    order = list(NAMES)
    return sorted(found["cells"], key=lambda one: (one["start"] != START, order.index(one["method"])))


def title(cell: Found) -> str:
    """What a run is called."""
    return NAMES[cell["method"]] + ("" if cell["start"] == START else ", no warm start at all")


def _shares(model: Found) -> list[str]:
    shares = model["results"]["every"]["accuracy"]
    return [percent(shares[name][0]) for name in ("none", "empty", "random", "other", "sampled", "own")]


def _apart(
    first: Found, second: Found, found: Found, condition: str = "own", which: Sequence[int] | None = None
) -> str:
    """Right answers after own thoughts, one model's minus another's, of all questions or some: points with a 95 %
    interval over problems."""
    told = clustered_mean(*_differences(first, second, found, condition, which))
    return points([told.mean, *told.interval()])


def _differences(
    first: Found, second: Found, found: Found, condition: str, which: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One model's right answers minus another's, answer by answer, and the problem of each."""
    one, two = ([int(verdict) for verdict in model["verdicts"][condition]] for model in (first, second))
    own, other = (model.get("clusters") or found["clusters"].get(model["problems"]) for model in (first, second))
    if first["problems"] != second["problems"] or len(one) != len(two) or own != other or own is None:
        raise UserError(f"{first['problems']} and {second['problems']}: other questions cannot be paired")
    clusters = own.split()
    numbers = range(len(one)) if which is None else which
    problem_N = torch.tensor([int(clusters[number]) for number in numbers])
    return torch.tensor([one[number] - two[number] for number in numbers]), problem_N


def without_workings(found: Found) -> str:
    """In short, for the README: right answers of GSM8K's test on bare sheets, means over starts. In brackets points
    above each run's own start, and how many starts where they are fewer than the row's."""
    head = (
        "model",
        "starts",
        "as it comes",
        "thoughts by lot",
        "hindsight",
        "then anchors alone",
        "then GRPO",
        "then T⁵",
    )
    rows = []
    for name, seeds, start, cold in (("0.5B", (SECOND, *AGAIN), BARE, COLD), ("1.5B", (LARGER,), LARGE, LARGE_COLD)):
        begun = {seed: _right(asked_of(found[seed], start)) for seed in seeds}
        lots = [_right(asked_of(found[seed], LOTS)) for seed in seeds if LOTS in found[seed]["accuracy"]]
        row = [name, f"{len(seeds)}", percent(_right(asked_of(found[seeds[0]], cold)))]
        row += [percent(lots[0]) + ("" if len(seeds) == 1 else f" ({len(lots)})") if lots else "–"]
        row.append(percent(fmean(begun.values())))
        for method in ("anchor-only", "quiet-star-grpo", "t5"):
            ends = {
                seed: _right(answered(cell))
                for seed in seeds
                for cell in found[seed]["cells"]
                if (cell["method"], cell["start"]) == (method, start)
            }
            won = points_of(fmean(ends[seed] - begun[seed] for seed in ends)) if ends else ""
            fewer = f"; {len(ends)}" if len(ends) < len(seeds) else ""
            row.append(f"{percent(fmean(ends.values()))} ({won}{fewer})" if ends else "–")
        rows.append(row)
    return drawn(head, rows)


def _right(model: Found) -> float:
    """The share of GSM8K's test that is right after the own greedy thought."""
    return float(model["GSM8K's test"]["results"]["every"]["accuracy"]["own"][0])


BRIEF = {"without_workings": without_workings}
"""What the README shows of them."""
TABLES = {"starts": starts, "answers": answers, "apart": apart, "again": again, "bare": bare,
          "seeds": seeds, "seeds_apart": seeds_apart, "larger": larger, "larger_apart": larger_apart}  # fmt: skip
