"""The study's problems as exercise sheets, as `tfive data sheets` makes them of anyone's.

    python studies/answers/render.py MODEL mathqa_train.jsonl.gz sheets
    python studies/answers/render.py MODEL mathqa_train.jsonl.gz sheets --sources gsm8k_train math_train

Written are test.jsonl.gz (8 % of the problems, in no other file), warm.jsonl.gz (a quarter of the rest, for the warm
start), runs.jsonl.gz, and workings.json.gz: what was left out, by the text that stands before the answer. Rows hold it
too, as `workings`, one for each match of the preset's pattern. Problems are those of GSM8K whose answer is a number of
at most five digits; questions that serve benchmarks as examples only fill the ends of sheets.

`--bare` gives the runs what `tfive data sheets` makes of problems whose workings are not known: their answers alone,
each problem once. The test stays as it is, and there is nothing for a warm start.

`--sources` adds MATH's problems of such answers, on sheets of their own: each source is split by itself, so that those
of GSM8K stay where they are without it. The test of every source but the first is test-SOURCE.jsonl.gz.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tfive.cli.data_sheets import write_files
from tfive.cli.options import script
from tfive.errors import UserError
from tfive.models.load import load_tokenizer
from tfive.text.boxed import DRAWING, DRAWN, SEVERAL, UNBOXED, answer_of, boxes, worked
from tfive.text.sheets import Files, Problem, Problems, in_order, prefixes, sheet_files
from tfive.text.workings import enough_for

SOURCE = "gsm8k_train"
NUMBER = "have no number of at most five digits as answer"
BORDER = "have several blank lines, so that the end of the question is not told"
SHORT = "have a working of one line, of which no part can be shown"
AGAIN = "ask what another one asks"
ROOMS = (64, 128)
"""Tokens of a thought in the study's runs."""


def of_gsm8k(row: dict[str, Any]) -> Problem | str:
    """The problem of a row whose last line is `The answer is N.`, or what rows like it have."""
    question, _, solution = row["text"].partition("\n\n")
    found = re.fullmatch(r"(?s)(.*)\nThe answer is (\d[\d,]*)\.?", solution)
    if not found or len(found[2].replace(",", "")) > 5:
        return NUMBER
    lines = tuple(" ".join(one.split()).rstrip(".") for one in found[1].split("\n") if one.strip())
    return Problem(row["id"], " ".join(question.split()), lines, found[2].replace(",", ""))


def of_math(row: dict[str, Any]) -> Problem | str:
    """The problem of a row whose solution has its result in a box, or what rows like it have."""
    found = [inside for _, _, inside in boxes(row["text"])]
    if not found:
        return UNBOXED
    if not re.fullmatch(r"-?\d{1,5}", answer_of(found[-1])):
        return NUMBER
    if DRAWING.search(row["text"]):
        return DRAWN
    if row["text"].count("\n\n") > 1:
        return BORDER
    question, _, solution = row["text"].partition("\n\n")
    steps = worked(question, solution)
    if isinstance(steps, str):
        return steps
    return Problem(row["id"], " ".join(question.split()), *steps) if len(steps[0]) > 1 else SHORT


READERS: dict[str, Callable[[dict[str, Any]], Problem | str]] = {SOURCE: of_gsm8k, "math_train": of_math}
REASONS = (UNBOXED, NUMBER, DRAWN, BORDER, SEVERAL, SHORT, AGAIN)


def read_problems(path: Path, source: str = SOURCE) -> tuple[Problems, Counter[str]]:
    """A source's problems with answers of at most five digits, those that serve benchmarks as examples apart; and how
    many were left out, by the reason."""
    kept: list[Problem] = []
    spare: list[Problem] = []
    left_out: Counter[str] = Counter()
    seen: set[str] = set()
    with gzip.open(path, "rt", encoding="utf-8") as rows:
        for row in map(json.loads, rows):
            if row["source"] != source:
                continue
            problem = READERS[source](row)
            if isinstance(problem, str):
                left_out[problem] += 1
            elif source != SOURCE and problem.question.casefold() in seen:
                left_out[AGAIN] += 1
            else:
                seen.add(problem.question.casefold())
                (spare if row["fewshot"] else kept).append(problem)
    if not kept or not spare:
        raise UserError(f"{path}: {len(kept)} problems of {source} and {len(spare)} with fewshot; both are needed")
    return Problems(in_order(kept), spare), left_out


def bared(made: Files, problems: Problems, backend: Any, length: int) -> Files:
    """The test as it is, and for the runs the other problems with their answers alone."""
    kept, spare = ([replace(one, lines=()) for one in some] for some in (problems.kept, problems.spare))
    shorn = sheet_files(replace(problems, kept=kept, spare=spare), backend, length)
    runs, test = shorn.rows["runs"], made.rows["test"]
    asked = {before[before.rindex("Question: ") :] for row in test for before in prefixes(row["text"])}
    workings = {before: one for before, one in made.workings.items() if before in asked}
    sizes = [len(backend.encode(one, add_special_tokens=False).ids) for row in test for one in row["workings"]]
    used = {one for row in (*test, *runs) for one in row["problems"]}
    unused = len(problems.kept) - shorn.too_long - len(used)
    return replace(shorn, rows={"test": test, "runs": runs}, workings=workings, sizes=sizes, unused=unused)


def told(source: str, problems: Problems, left_out: Counter[str], made: Files) -> list[str]:
    """What became of a source's problems."""
    lines = [f"{source}: {len(problems.kept):,} problems, {len(problems.spare)} more fill the ends of sheets"]
    lines += [f"  left out: {left_out[why]:,} that {why}" for why in REASONS if left_out[why]]
    if made.too_long:
        lines.append(f"  left out: {made.too_long:,} that are too long for a sheet")
    if made.unused:
        lines.append(f"  left out: {made.unused:,} left over, or on sheets ({made.uncut} in all) that could not be cut")
    return lines


def counted(made: Sequence[Files], backend: Any) -> list[str]:
    """Sheets and answers, and how long workings and answers are; and how many of the answers stand in lines before."""
    rows = [row for one in made for part in one.rows.values() for row in part]
    answered = sum(len(row["problems"]) for row in rows)
    trained = [len(row["problems"]) for one in made for row in one.rows["runs"]]
    sizes = [size + 1 for one in made for size in one.sizes]  # the close is one token
    held = ", ".join(f"{100 * sum(size <= room for size in sizes) / len(sizes):.1f} % in {room}" for room in ROOMS)
    known = [(before, working["answer"]) for one in made for before, working in one.workings.items()]
    answers = [len(backend.encode(answer, add_special_tokens=False).ids) for _, answer in known]
    shown = [(before.partition(" So far: ")[2], answer) for before, answer in known if " So far: " in before]
    there = sum(re.search(rf"(?<![\d.]){answer}(?![\d.]*\d)", so_far) is not None for so_far, answer in shown)
    return [
        f"  {len(rows):,} sheets with {answered:,} answers, {len(trained):,} with {sum(trained):,} of them for runs",
        f"  workings and their close: median {median(sizes):g} tokens, nine of ten at most {enough_for(sizes)}, {held}",
        f"  answers: median {median(answers):g} tokens, at most {max(answers)}; of {len(shown):,} questions with lines "
        f"shown {100 * there / len(shown):.1f} % have the answer as a number in them",
    ]


def main(given: Sequence[str] | None = None) -> int:
    """Write the files of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="whose tokens fill a sheet: a model folder or a .gguf file")
    parser.add_argument("problems", type=Path, help="mathqa_train.jsonl.gz")
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, default=512, help="text.sequence_length of the runs")
    parser.add_argument("--sources", nargs="+", choices=tuple(READERS), default=[SOURCE], help="whose problems")
    parser.add_argument("--bare", action="store_true", help="runs see answers alone, nothing of any working")
    asked = parser.parse_args(given)
    if len(set(asked.sources)) < len(asked.sources):
        raise UserError(f"--sources {' '.join(asked.sources)}: one is named twice; name each once")
    found = {source: read_problems(asked.problems, source) for source in asked.sources}
    tokenizer: Any = load_tokenizer(asked.model)
    backend = tokenizer.backend_tokenizer
    files: dict[str, list[dict[str, Any]]] = {}
    every: list[Files] = []
    lines: list[str] = []
    for source, (problems, left_out) in found.items():
        made = sheet_files(problems, backend, asked.length)
        if asked.bare:
            made = bared(made, problems, backend, asked.length)
        for name, rows in made.rows.items():
            apart = f"{name}-{source}" if name == "test" and every else name
            files[apart] = [*files.get(apart, []), *({**row, "source": source} for row in rows)]
        every.append(made)
        lines += [*told(source, problems, left_out, made), *counted([made], backend)]
    if len(every) > 1:
        lines += ["together:", *counted(every, backend)]
    workings = {before: working for made in every for before, working in made.workings.items()}
    print("\n".join([*write_files(asked.out, files, workings), *lines]))
    return 0


if __name__ == "__main__":
    script(main)
