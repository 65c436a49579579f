"""Tables of right answers, all from careful reading: to the test problems, to questions of benchmarks, and what a
program that writes no working would score.

Each cell stands beside the start that it began with itself. Where cells have several starts each has a row, which says
of which seeds it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from estimates import Cell, common, over_problems, verdicts_apart
from forms import interval, over_both, percent, points, points_of, seed_of, signed, told
from seed_tables import Start, begun_careful, ended, methods, start_of, starts, which_seeds

from tfive_lab.estimates import over_seeds
from tfive_lab.study_tables import drawn

Model = dict[str, Any]
"""What was asked of a model, and which answers were right."""


def answered(cells: Sequence[Cell]) -> list[Cell]:
    """The cells whose model answered the test problems."""
    return [cell for cell in cells if cell.get("accuracy", {}).get("problems") == "test"]


def verdicts(cells: Sequence[Cell], condition: str) -> list[str]:
    """Which answers of each cell were right after such a thought."""
    return [cell["accuracy"]["verdicts"][condition] for cell in cells]


def problems_apart(first: Sequence[str], second: Sequence[str], clusters: str) -> str:
    """Right answers of some models in points, minus those of others, pair by pair and answer by answer, with their
    intervals; a dash where they are not of the same answers."""
    return over_both(over_problems(first, second, clusters), verdicts_apart(first, second), points_of)


def right_answers(found: dict[str, Any], start: str) -> Model | None:
    """What a start answered of the test problems; None where it was not asked them."""
    model: Model = found.get("accuracy", {}).get(start, {})
    return model if model.get("problems") == "test" else None


def in_words(words: str, start: Start) -> str:
    """How a start is called in a row, with its seeds where there are several starts."""
    return f"{words}, {'seeds' if ',' in start.seeds else 'seed'} {start.seeds}" if start.seeds else words


def seeds_lazy(found: dict[str, Any]) -> str:
    """What a program that writes no working would score in the trained models' hands: gains on test texts, and right
    answers to the test problems in per cent; means over seeds. Before them the start's, where it was asked."""
    head = ("method, positions × thoughts", "seeds", "own", "nothing", "random tokens", "another's")
    shares = ("own", "none", "empty", "random", "other")
    groups = methods([cell for cell in begun_careful(found) if "test" in cell])
    rows = []
    for start in starts([cell for cells in groups.values() for cell in cells]):
        begun = right_answers(found, start.name)
        if begun is not None:
            asked = begun["results"]["every"]["accuracy"]
            rows.append((in_words("the start", start), *["–"] * 5, *(percent(asked[key][0]) for key in shares)))
    for name, cells in groups.items():
        gains = [signed(statistics.fmean(cell["test"][key][0] for cell in cells)) for key in
                 ("thought_gain", "empty_gain", "random_gain")]  # fmt: skip
        other = statistics.fmean(cell["test"]["thought_gain"][0] - cell["test"]["content_gain"][0] for cell in cells)
        known = [cell["accuracy"]["results"]["every"]["accuracy"] for cell in answered(cells)]
        right = [percent(statistics.fmean(one[key][0] for one in known)) if known else "–" for key in shares]
        rows.append((name, which_seeds(cells, groups.values()), *gains, signed(other), *right))
    return drawn((*head, "right after own, %", "without", "nothing", "random tokens", "another's"), rows)


def seeds_answers(found: dict[str, Any]) -> str:
    """Right answers to the test problems in per cent, and paired with those of the start that each cell began with."""
    head = ("model", "seeds", "own", "95 % over seeds", "sampled", "without", "true working", "own − without")
    tail = ("own, minus the start's (95 % over seeds)", "95 % over problems", "sampled, minus the start's", "95 %")
    groups = methods(answered(begun_careful(found)))
    rows: list[Sequence[str]] = []
    for start in starts([cell for cells in groups.values() for cell in cells]):
        begun = right_answers(found, start.name)
        if begun is not None:
            every = begun["results"]["every"]["accuracy"]
            own, *others = (every[name][0] for name in ("own", "sampled", "none", "true"))
            known = (percent(own), "–", *map(percent, others), points_of(own - every["none"][0]))
            rows.append((in_words("after careful reading", start), "–", *known, *["–"] * len(tail)))
    for name, cells in groups.items():
        results = [cell["accuracy"]["results"]["every"]["accuracy"] for cell in cells]
        values = {key: [one[key][0] for one in results] for key in ("own", "sampled", "none", "true")}
        means = [percent(statistics.fmean(values[key])) for key in values]
        row = [name, which_seeds(cells, groups.values()), means[0], interval(over_seeds(values["own"]), percent)]
        row += [*means[1:], told([a - b for a, b in zip(values["own"], values["none"])], points_of)]
        rows.append([*row, *(text for key in ("own", "sampled") for text in minus_start(found, cells, key))])
    return drawn((*head, *tail), rows)


def minus_start(found: dict[str, Any], cells: Sequence[Cell], condition: str) -> tuple[str, str]:
    """Right answers of cells, each minus its own start's: the mean with its interval over seeds, and that over
    problems. Dashes where a start was not asked."""
    known = [right_answers(found, start_of(cell)) for cell in cells]
    begun = [one for one in known if one is not None]
    if len(begun) < len(cells):
        return "–", "–"
    shares = [
        [one["results"]["every"]["accuracy"][condition][0] for one in side]
        for side in ((cell["accuracy"] for cell in cells), begun)
    ]
    asked = [one["verdicts"][condition] for one in begun]
    over = over_problems(verdicts(cells, condition), asked, found.get("clusters", {}).get("test", ""))
    less = [own - start for own, start in zip(*shares, strict=True)]
    return told(less, points_of), "–" if over is None else interval(over, points_of)


CONDITIONS = {"own": "own", "sampled": "sampled", "none": "without", "empty": "nothing", "random": "random tokens",
              "other": "another's"}  # fmt: skip


GSM8K = "gsm8k"
"""The benchmark of results that do not say of which they are."""
OTHERS = {"test-math_train": "fresh problems of MATH", "math500": "MATH-500", "csqa": "CommonsenseQA"}
"""Benchmarks that share a table, and their titles."""


def long_benchmark(found: dict[str, Any], name: str = GSM8K) -> str:
    """Right answers to the benchmark's questions: each start, each run, and the mean over the seeds of each method that
    has several; and what they differ by from their own starts and from the first method's of the same seeds."""
    return drawn(benchmark_head(found), benchmark_rows(found, name))


def long_benchmarks(found: dict[str, Any]) -> str:
    """The same of the other benchmarks, one below the other, each with what blind choice gets right where there are
    options; nothing where no model was asked their questions."""
    rows: list[list[str]] = []
    for name, title in OTHERS.items():
        models = [*asked_starts(found, name).values(), *benchmark(found["cells"], name)]
        blind = next((f" (blind choice {percent(model['chance'])})" for model in models if "chance" in model), "")
        rows += [[f"{title}{blind}", *row] for row in benchmark_rows(found, name)]
    return drawn(("benchmark", *benchmark_head(found)), rows) if rows else ""


def benchmark_head(found: dict[str, Any]) -> tuple[str, ...]:
    """The columns of a benchmark's table."""
    first = next(iter(ended(found)), "–")
    head = ("model", "seed", "questions", *CONDITIONS.values(), "own − without")
    leads = (f"{one} of {first}, minus this one's" for one in ("own", "sampled"))
    return (*head, "own, minus the start's", "sampled, minus the start's", *leads)


def benchmark_rows(found: dict[str, Any], name: str) -> list[list[str]]:
    """Its rows."""
    groups = {method: asked(cells, name) for method, cells in ended(found).items()}
    first = next(iter(groups), "–")
    leading = groups.get(first, [])
    begun = asked_starts(found, name)
    rows = []
    for start in starts([cell for cells in groups.values() for cell in cells]):
        if start.name in begun:
            own = [cell for cell in leading if start_of(cell) == start.name]
            ahead = (benchmark(own, name), [begun[start.name]] * len(own))
            rows.append(asked_row("the start", start.seeds or "–", [begun[start.name]], ([], []), ahead))
    single = [(method, [cell]) for method, cells in groups.items() for cell in cells]
    several = [(method, cells) for method, cells in groups.items() if len(cells) > 1]
    for method, cells in (*single, *several):
        own, others = common(leading if method != first else [], cells)
        before = [begun.get(start_of(cell), {}) for cell in cells]
        pairs = ((benchmark(cells, name), before), (benchmark(own, name), benchmark(others, name)))
        rows.append(asked_row(method, ", ".join(seed_of(cell) for cell in cells), benchmark(cells, name), *pairs))
    return rows


def asked_starts(found: dict[str, Any], name: str) -> dict[str, Model]:
    """What each start answered of a benchmark's questions."""
    unnamed: dict[str, Model] = found.get("benchmark", {}) if name == GSM8K else {}
    return {**unnamed, **found.get("benchmarks", {}).get(name, {})}


def asked_of(cell: Cell, name: str = GSM8K) -> Model | None:
    """What the model of a cell answered of a benchmark's questions; None where it was not asked them."""
    answers = cell.get("accuracy", {})
    known: Model | None = answers.get("benchmarks", {}).get(name)
    return known or (answers.get("benchmark") if name == GSM8K else None)


def asked(cells: Sequence[Cell], name: str) -> list[Cell]:
    """The cells whose model was asked the benchmark's questions."""
    return [cell for cell in cells if asked_of(cell, name) is not None]


def benchmark(cells: Sequence[Cell], name: str) -> list[Model]:
    """What the models of the cells that were asked answered of the benchmark's questions."""
    return [model for cell in cells if (model := asked_of(cell, name)) is not None]


def asked_row(name: str, seeds: str, models: Sequence[Model], *pairs: tuple[list[Model], list[Model]]) -> list[str]:
    """One model or the mean of several, and the differences of the pairs after greedy and after sampled thoughts."""
    every = [model["results"]["every"] for model in models]
    shares = (percent(statistics.fmean(one["accuracy"][key][0] for one in every)) for key in CONDITIONS)
    alone = len(every) == 1
    thought = points(every[0]["difference"]["own - none"]) if alone else questions_apart(models, models, "own", "none")
    differences = (questions_apart(*pair, one, one) for pair in pairs for one in ("own", "sampled"))
    return [name, seeds, f"{every[0]['items']:,}", *shares, thought, *differences]


def questions_apart(first: Sequence[Model], second: Sequence[Model], condition: str, other: str) -> str:
    """The same of the benchmark's questions; a dash where there is no pair, or one was not asked."""
    own, others = [verdict(model, condition) for model in first], [verdict(model, other) for model in second]
    if not own or not all((*own, *others)):
        return "–"
    questions = first[0].get("clusters") or " ".join(map(str, range(len(own[0]))))
    return problems_apart(own, others, questions)


def verdict(model: Model, condition: str) -> str:
    """Right or wrong, question by question; of several sampled thoughts the first."""
    known = model.get("verdicts", {}).get(condition, "")
    return str(known if isinstance(known, str) else known[0])
