"""The tables of docs/studies/answers.md, answers-earlier.md and the README, drawn from results/answers-study.json.

A place is `<!-- table: NAME -->` … `<!-- end of table -->`; what stands around it is written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from answer_tables import GSM8K, asked_of, asked_starts
from forms import CAREFUL, NAMES, PILOT, paired, percent, points, seed_of, signed, title, usual, with_interval
from length_tables import against_grpo, lengths
from long_tables import CLOCKED_TABLES
from short_table import BRIEF, in_short

from tfive_lab.study_tables import drawn, filled

MISSING = {"1": "one line", "2": "two lines", "all": "all of it", "every": "every item"}
STARTS = {"base": "as it comes", "warm": "after the warm start", "smollm2-135m": "SmolLM2-135M-Instruct, as it comes",
          "qwen-1.5b": "Qwen2.5-Coder-1.5B-Instruct, as it comes"}  # fmt: skip
FINAL = {"anchor.next_token": 0.3, "anchor.answers": True, "anchor.conditioned": 0.05}
"""The anchors that the comparison uses."""
EARLIER = "2f32b4f"
"""The commit of the first runs, which had two flaws that the page names; their cells carry it."""
OWN_LAW, COLD = 1.0, 0.7
"""Temperatures: thoughts drawn from the policy itself (as `answers.toml` has it), and those of the first recipe."""
AT_THE_END = [64]
"""The checkpoints of cells whose thoughts are scored at their end alone."""


def draw(page: str, found: dict[str, Any]) -> str:
    """The page with every marked place filled from the results."""
    return filled(page, TABLES, found)


def headroom(found: dict[str, Any]) -> str:
    """What thoughts are worth before training, by lines left out."""
    head = ("model", "left out", "items", "loss without", "own", "another's", "empty", "true working", "best of 16")
    rows = []
    for name, start in STARTS.items():
        for row in found["headroom"].get(name, ()):
            gains = (signed(row[key]) for key in ("own", "other", "empty", "true", "best16"))
            content = f"{signed(row['content'])} ± {row['content_error']:.3f}"
            known = (start, MISSING[row["missing"]], str(row["items"]), f"{row['l0']:.3f}")
            rows.append((*known, *gains, content, f"{row['right']:.0%}".replace("%", " %")))
    return drawn((*head, "content gain ± s.e.", "right number written"), rows)


def _anchors(cell: dict[str, Any]) -> dict[str, Any]:
    return {key: cell["settings"][key] for key in FINAL}


def scored_at_the_end(cell: dict[str, Any]) -> bool:
    """Whether a cell's thoughts had no reward at a checkpoint on the way."""
    checkpoints: list[int] | None = cell["settings"].get("thought.checkpoints")
    return checkpoints == AT_THE_END


def compared(found: dict[str, Any], *, earlier: bool = False, temperature: float | None = None) -> list[dict[str, Any]]:
    """The cells with the final anchors, of today's code or of the earlier one, at one `temperature` or at all, in the
    order of names and seeds, larger windows first."""
    cells = [
        cell
        for cell in found["cells"]
        if _anchors(cell) == FINAL
        and not scored_at_the_end(cell)
        and cell.get("start") != CAREFUL
        and usual(cell)
        and (cell.get("code") == EARLIER) == earlier
        and temperature in (None, cell["settings"]["sampling.temperature"])
    ]
    return sorted(
        cells,
        key=lambda cell: (
            list(NAMES).index(cell["method"]),
            cell["settings"]["run.seed"],
            -cell["settings"]["window.items"],
        ),
    )


def answering(found: dict[str, Any], temperature: float) -> dict[str, dict[str, Any]]:
    """Accuracies on the test problems by the name of the model: those before training, then the cells'."""
    models = {STARTS[name]: found["accuracy"][name] for name in STARTS if name in found.get("accuracy", {})}
    cells = [cell for cell in compared(found, temperature=temperature) if "accuracy" in cell]
    return models | {title(cell): cell["accuracy"] for cell in cells}


def accuracy(found: dict[str, Any], temperature: float = OWN_LAW) -> str:
    """Right answers to the test problems in per cent, and what the own thought adds, by lines left out."""
    head = ("model", "left out", "answers", "without", "own", "sampled", "another's", "empty", "true working")
    conditions = ("none", "own", "sampled", "other", "empty", "true")
    rows = []
    for name, model in answering(found, temperature).items():
        for missing, words in MISSING.items():
            row = model["results"][missing]
            shares = (percent(row["accuracy"][one][0]) for one in conditions)
            pairs = (points(row["difference"][f"own - {other}"]) for other in ("none", "other"))
            rows.append((name, words.replace("item", "answer"), f"{row['items']:,}", *shares, *pairs))
    return drawn((*head, "own − without", "own − another's"), rows)


def between(found: dict[str, Any], temperature: float = OWN_LAW) -> str:
    """Models against each other on the same answers: after the own thought, without, and after the true working."""
    models = answering(found, temperature)
    cells = {title(cell): cell for cell in compared(found, temperature=temperature) if "accuracy" in cell}
    controls = [name for name, cell in cells.items() if cell["method"] == "anchor-only"]
    rows = []
    for name, cell in cells.items():
        if cell["method"] == "anchor-only":
            continue
        same = [one for one in controls if cells[one]["settings"]["window.items"] == cell["settings"]["window.items"]]
        rows += [_against(name, other, models) for other in (*(same or controls), STARTS["warm"]) if other in models]
    head = ("model", "minus", "own thought", "without", "true working", "only the first is right", "only the second is")
    return drawn(head, rows)


def _against(name: str, other: str, models: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    first, second = models[name]["verdicts"], models[other]["verdicts"]
    own = list(zip(first["own"], second["own"]))
    alone = (str(own.count(("1", "0"))), str(own.count(("0", "1"))))
    return name, other, *(points(paired(first[one], second[one])) for one in ("own", "none", "true")), *alone


def comparison(found: dict[str, Any], temperature: float = OWN_LAW) -> str:
    """Test texts of every finished cell of today's code."""
    head = ("method, positions × thoughts", "seed", "steps", "actor thoughts", "thought gain", "gain against the start")
    rows = []
    for cell in compared(found, temperature=temperature):
        if "test" in cell:
            last = cell["test"]
            gains = (with_interval(last[key]) for key in ("thought_gain", "gain_vs_base", "content_gain"))
            controls = (signed(last[key][0]) for key in ("empty_gain", "random_gain"))
            mixed = (signed(last[key][0]) for key in ("mixed_gain", "mixed_gain_constant"))
            tail = (f"{last['no_thought_loss'][0]:.3f}", *mixed, f"{last['mean_thought_length']:.0f}")
            end = cell["measured"][-1]
            spent = (str(end["steps"]), f"{end['actor_thoughts']:,}")
            rows.append((title(cell), seed_of(cell), *spent, *gains, *controls, *tail))
    return drawn(
        (*head, "content gain", "empty", "random tokens", "loss without", "mixed gain", "constant gate",
         "tokens of a thought"),
        rows,
    )  # fmt: skip


def course(found: dict[str, Any], temperature: float = OWN_LAW) -> str:
    """Every measurement of today's cells on development texts, those that broke off included."""
    cells = [cell for cell in compared(found, temperature=temperature) if cell["measured"][-1]["window"]]
    windows = sorted({one["window"] for cell in cells for one in cell["measured"]})
    rows = []
    for measure, words in (
        ("thought_gain", "thought gain"),
        ("gain_vs_base", "gain against the start"),
        ("no_thought_loss", "loss without a thought"),
    ):
        for cell in cells:
            at = {one["window"]: one[measure][0] for one in cell["measured"]}
            form = "{:.3f}".format if measure == "no_thought_loss" else signed
            values = tuple(form(at[window]) if window in at else "–" for window in windows)
            rows.append((words, title(cell), seed_of(cell), *values))
    return drawn(("", "method, positions × thoughts", "seed", *(f"window {window}" for window in windows)), rows)


def earlier(found: dict[str, Any]) -> str:
    """The last measurement of every cell of the earlier code with the final anchors, on development texts."""
    head = ("method", "windows", "actor thoughts", "thought gain", "gain against the start", "content gain")
    rows = []
    for cell in compared(found, earlier=True):
        last = cell["measured"][-1]
        gains = (with_interval(last[key]) for key in ("thought_gain", "gain_vs_base", "content_gain"))
        controls = (signed(last[key][0]) for key in ("other_gain", "empty_gain", "random_gain"))
        tail = (f"{last['no_thought_loss'][0]:.3f}", f"{last['mean_thought_length']:.0f}")
        rows.append(
            (NAMES[cell["method"]], str(last["window"]), f"{last['actor_thoughts']:,}", *gains, *controls, *tail)
        )
    return drawn((*head, "another's", "empty", "random tokens", "loss without", "tokens of a thought"), rows)


def ends(found: dict[str, Any]) -> str:
    """Cells whose thoughts are scored at their end alone, with several anchors: gains on development texts, right
    answers to the test problems and to the benchmark's questions in per cent; before them the warm-started model."""
    head = (
        "method, positions × thoughts",
        "seed",
        "next-token anchor",
        "conditioned anchor",
        "tokens scored",
        "windows",
    )
    gains = ("thought gain", "gain against the start", "content gain", "loss without")
    shares = ("right after own thought", "without", "after the true working", "right number in the thought")
    rows = []
    begun = asked_starts(found, GSM8K)
    if "warm" in begun:
        answers = (*_answers(found["accuracy"]["warm"]), *_on_benchmark(begun["warm"]))
        rows.append((STARTS["warm"], *["–"] * (len(head) + len(gains) - 1), *answers))
    cells = [
        cell for cell in found["cells"] if scored_at_the_end(cell) and cell.get("start") != CAREFUL and usual(cell)
    ]
    for cell in sorted(cells, key=lambda one: _rank(one)):
        settings = cell["settings"]
        known = (f"{settings[key]:g}" for key in ("anchor.next_token", "anchor.conditioned", "thought.horizon"))
        row = [title(cell), seed_of(cell), *known, cell["status"].removesuffix(" windows")]
        last = cell["measured"][-1]
        row += (
            [signed(last[key][0]) for key in ("thought_gain", "gain_vs_base", "content_gain")]
            + [f"{last['no_thought_loss'][0]:.3f}"]
            if last["window"]
            else ["–"] * len(gains)
        )
        answered = cell.get("accuracy")
        row += [*_answers(answered), *_on_benchmark(asked_of(cell))] if answered else ["–"] * 7
        rows.append(tuple(row))
    return drawn((*head, *gains, *shares, "GSM8K: own thought", "without", "difference"), rows)


def careful(found: dict[str, Any]) -> str:
    """The model before and after careful reading and the cells that begin with it: gains on development texts, right
    answers to the development problems in per cent, and how they differ from those of the start."""
    head = ("model", "rate", "steps", "actor thoughts", "thought gain", "gain against the start", "content gain")
    tail = ("right after own thought", "sampled", "without", "after the true working", "own, minus the start's")
    answered, course = found[CAREFUL]["accuracy"], found[CAREFUL]["reading"]
    start = answered[CAREFUL]["verdicts"]["own"]

    def shares(model: dict[str, Any]) -> list[str]:
        own = model["results"]["every"]["accuracy"]
        shown = [percent(own[name][0]) for name in ("own", "sampled", "none", "true")]
        verdicts = model["verdicts"]["own"]
        return [*shown, "–" if verdicts == start else points(paired(verdicts, start))]

    def gains(one: dict[str, float]) -> list[str]:
        shown = [signed(one["thought_gain"]), "–", signed(one["content_gain"])]
        return [*shown, f"{one['no_thought_loss']:.3f}", f"{one['mean_thought_length']:.0f}"]

    rows = [
        ["after the warm start", "–", "–", "–", *gains(course["before"]), *shares(answered["warm"])],
        ["after careful reading", "–", "–", "–", *gains(course["after"]), *shares(answered[CAREFUL])],
    ]
    cells = [cell for cell in found["cells"] if cell.get("start") == CAREFUL and cell.get("code") == PILOT]
    for cell in sorted(cells, key=lambda one: (list(NAMES).index(one["method"]), one["settings"]["optimizer.lr"])):
        last = cell["measured"][-1]
        known = [f"{cell['settings']['optimizer.lr']:g}", str(last["steps"]), f"{last['actor_thoughts']:,}"]
        shown = [with_interval(last[key]) for key in ("thought_gain", "gain_vs_base", "content_gain")]
        left = [f"{last['no_thought_loss'][0]:.3f}", f"{last['mean_thought_length']:.0f}"]
        rows.append([title(cell), *known, *shown, *left, *shares(cell["accuracy"])])
    return drawn((*head, "loss without", "tokens of a thought", *tail), rows)


def foresight(found: dict[str, Any]) -> str:
    """What is foreseen of a thought's return, by the depth that is read, the thoughts that are fitted, and what is seen
    of the text that scores them: R² over all tokens and within positions."""
    rows = found[CAREFUL]["foresight"][CAREFUL]["rows"]
    hows = {"ridge": "linear", "network, 20": "network"}
    cells = {
        (row["block"], row["fitted"], shown, row["sees"]): f"{signed(row['all'])} / {signed(row['within'])}"
        for row in rows
        for how, shown in hows.items()
        if row["how"].startswith(how)
    }
    kinds = list(dict.fromkeys(key[:3] for key in cells))
    seen = list(dict.fromkeys(key[3] for key in cells))
    shown = [[str(block), f"{fitted:,}", how, *(cells[block, fitted, how, one] for one in seen)]
             for block, fitted, how in kinds]  # fmt: skip
    return drawn(("blocks below", "thoughts fitted", "value", *seen), shown)


def _rank(cell: dict[str, Any]) -> tuple[int, float, float, str]:
    settings = cell["settings"]
    method = list(NAMES).index(cell["method"])
    return method, -settings["anchor.next_token"], -settings["anchor.conditioned"], cell["name"]


def _answers(model: dict[str, Any]) -> list[str]:
    shares = model["results"]["every"]["accuracy"]
    return [*(percent(shares[one][0]) for one in ("own", "none", "true")), percent(model["right_number_in_thought"])]


def _on_benchmark(model: dict[str, Any] | None) -> list[str]:
    if model is None:
        return ["–"] * 3
    every = model["results"]["every"]
    shares = (percent(every["accuracy"][one][0]) for one in ("own", "none"))
    return [*shares, points(every["difference"]["own - none"])]


def every(found: dict[str, Any]) -> str:
    """Every cell that was run with the earlier code, failed ones too."""
    head = ("next-token anchor", "answers in it", "conditioned anchor", "method", "rate", "η", "how far")
    rows = []
    old = [cell for cell in found["cells"] if cell.get("code") == EARLIER]
    for cell in sorted(old, key=lambda one: (one["settings"]["anchor.conditioned"] != 0.3, one["name"])):
        settings, last = cell["settings"], cell["measured"][-1]
        trained = last["window"] > 0
        shown = (signed(last[key][0]) if trained else "–" for key in ("thought_gain", "gain_vs_base", "content_gain"))
        eta = f"{settings['qualify.eta']:g}" if cell["method"] == "t5" else ""
        rows.append(
            (
                f"{settings['anchor.next_token']:g}",
                "yes" if settings["anchor.answers"] else "no",
                f"{settings['anchor.conditioned']:g}",
                NAMES[cell["method"]],
                f"{settings['optimizer.lr']:g}",
                eta,
                cell["status"],
                *shown,
                f"{last['no_thought_loss'][0]:.3f}" if trained else "–",
            )
        )
    return drawn((*head, "thought gain", "gain against the start", "content gain", "loss without"), rows)


def critics(found: dict[str, Any]) -> str:
    """Held-out R² of T⁵'s critics and the policy's movement, window by window, in cells with the final anchors."""
    rows = []
    for cell in (*compared(found, earlier=True), *compared(found)):
        if cell["method"] == "t5":
            for one in cell["windows"]:
                moved = (f"{one['policy_kl']:.3f}", f"{one['clip_fraction']:.1%}".replace("%", " %"))
                rows.append((seed_of(cell), str(one["window"]), signed(one["r2.1"]), signed(one["r2.2"]), *moved))
    return drawn(("seed", "window", "R² of critic 1", "R² of critic 2", "policy KL", "tokens clipped"), rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "headroom": headroom, "accuracy": accuracy, "between": between, "comparison": comparison, "course": course,
    "accuracy_cold": partial(accuracy, temperature=COLD), "between_cold": partial(between, temperature=COLD),
    "comparison_cold": partial(comparison, temperature=COLD), "course_cold": partial(course, temperature=COLD),
    "earlier": earlier, "critics": critics, "every": every, "ends": ends, "careful": careful, "foresight": foresight,
    **CLOCKED_TABLES, "lengths": lengths, "against_grpo": against_grpo, "in_short": in_short,
    "in_brief": partial(in_short, settings=BRIEF),
}  # fmt: skip
