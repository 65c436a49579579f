"""Exercise sheets with bare answers, from worked problems: plain text of exactly one packed row each.

    python studies/answers/render.py MODEL mathqa_train.jsonl.gz sheets

A sheet is one worked example, one plain one, then problems with their answers alone. A thought stands after "Answer:",
opened by "Working:" and closed by "####" as in the example; the next token of the text is the answer's first digit. Of
a solution of n lines a sheet keeps the first n − 1, n − 2 or none, so that every problem comes once with each. Written
are test.jsonl.gz (8 % of the problems, in no other file), warm.jsonl.gz (a quarter of the rest, for the warm start),
runs.jsonl.gz, and workings.json.gz: what was left out, by the text that stands before the answer. Rows hold it too, as
`workings`, one for each match of the preset's pattern.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfive.cli.options import script
from tfive.errors import UserError
from tfive.models.load import load_tokenizer

OPEN, END, CLOSE = "Working:", "\n", "####"
ANSWER = "\nAnswer:\n"
WORKED = (
    "Tom buys 3 boxes of 4 pens. He gives 5 pens to Ann and then finds 2 more. How many pens does Tom have now?",
    "Tom buys 3 * 4 = 12 pens. After giving 5 away he has 12 - 5 = 7. With 2 more he has 7 + 2 = 9",
    "9",
)
PLAIN = ("Sam has 8 apples and eats 3 of them. How many apples are left?", "5")
HEADER = (
    f"Question: {WORKED[0]}{ANSWER}{OPEN} {WORKED[1]}{END}{CLOSE}{WORKED[2]}\n\n"
    f"Question: {PLAIN[0]}{ANSWER}{PLAIN[1]}\n\n"
)
LEFT_OUT = ("1", "2", "all")
"""Lines of working that a sheet leaves out, in turn."""
ROOM = 4
"""Tokens that every sheet keeps for the start of the question that fills it up."""
Count = Callable[[str], int]


@dataclass(frozen=True)
class Problem:
    """A problem, the lines of its solution and its answer, a whole number."""

    name: str
    question: str
    lines: tuple[str, ...]
    answer: str


def read_problems(path: Path) -> tuple[list[Problem], list[Problem]]:
    """GSM8K's training problems with answers of at most five digits, in an order of their own; and those that serve
    benchmarks as examples, whose questions only fill the ends of sheets."""
    kept: list[Problem] = []
    spare: list[Problem] = []
    with gzip.open(path, "rt", encoding="utf-8") as rows:
        for row in map(json.loads, rows):
            if row["source"] != "gsm8k_train":
                continue
            question, _, solution = row["text"].partition("\n\n")
            found = re.fullmatch(r"(?s)(.*)\nThe answer is (\d[\d,]*)\.?", solution)
            if not found or len(found[2].replace(",", "")) > 5:
                continue
            lines = tuple(" ".join(one.split()).rstrip(".") for one in found[1].split("\n") if one.strip())
            problem = Problem(row["id"], " ".join(question.split()), lines, found[2].replace(",", ""))
            (spare if row["fewshot"] else kept).append(problem)
    if not kept or not spare:
        raise UserError(f"{path}: {len(kept)} problems of gsm8k_train and {len(spare)} with fewshot; both are needed")
    return sorted(kept, key=lambda one: hashlib.sha256(one.name.encode()).hexdigest()), spare


def shown(problem: Problem, missing: str) -> tuple[str, str]:
    """What stands before the answer, and the working that was left out."""
    keep = 0 if missing == "all" else max(0, len(problem.lines) - int(missing))
    so_far = f" So far: {'. '.join(problem.lines[:keep])}." if keep else ""
    return f"Question: {problem.question}{so_far}{ANSWER}", ". ".join(problem.lines[keep:])


def prefixes(text: str) -> Iterator[str]:
    """The text up to and including each "Answer:"."""
    at = text.find(ANSWER)
    while at >= 0:
        yield text[: at + len(ANSWER)]
        at = text.find(ANSWER, at + 1)


def grouped(problems: Sequence[Problem], count: Count, length: int) -> list[list[Problem]]:
    """Problems that share a sheet: as many in a row as fit whatever is left out. Too long ones are passed over."""
    base, groups, group = count(HEADER), [], list[Problem]()
    sizes = [base] * len(LEFT_OUT)
    for problem in problems:
        own = [count(f"{shown(problem, missing)[0]}{problem.answer}\n\n") for missing in LEFT_OUT]
        if base + max(own) + ROOM > length:
            continue
        ahead = [size + own[(len(group) + turn) % len(own)] for turn, size in enumerate(sizes)]
        if max(ahead) + ROOM > length:
            groups.append(group)
            group, ahead = [], [base + size for size in own]
        group.append(problem)
        sizes = ahead
    return groups


def sheet(group: Sequence[Problem], turn: int, workings: dict[str, Any]) -> str:
    """The text of one sheet; what it leaves out is added to `workings`."""
    text = HEADER
    for number, problem in enumerate(group):
        missing = LEFT_OUT[(number + turn) % len(LEFT_OUT)]
        before, working = shown(problem, missing)
        workings[before] = {"working": working, "answer": problem.answer, "missing": missing}
        text += f"{before}{problem.answer}\n\n"
    return text


def filled(text: str, fillers: Sequence[str], length: int, tokenizer: Any, draw: random.Random) -> str | None:
    """The text with a cut question behind it, `length` tokens in all; None where a cut would not be read back alike.

    The filling never shows its "Answer:" to the end, so no thought stands there.
    """

    def encode(some: str) -> list[int]:
        ids: list[int] = tokenizer.encode(some, add_special_tokens=False).ids
        return ids

    tail = draw.choice(fillers)
    while len(text + tail) < 6 * length and len(encode(text + tail)) < length + 8:
        tail = tail.replace(ANSWER, " ") + draw.choice(fillers)
    ids = encode(text + tail)[:length]
    cut: str = tokenizer.decode(ids, skip_special_tokens=False)
    same = encode(cut) == ids and cut.count("Answer:\n") == text.count("Answer:\n") and cut == cut.strip()
    return cut if same else None


def sheets(
    groups: Sequence[Sequence[Problem]], spare: Sequence[Problem], tokenizer: Any, length: int, workings: dict[str, Any]
) -> list[list[dict[str, Any]]]:
    """The rows of each group's sheets: one for every turn of what is left out."""
    draw, fillers = random.Random(0), [f"Question: {one.question}{ANSWER}" for one in spare]
    made = []
    for group in groups:
        rows = []
        for turn in range(len(LEFT_OUT)):
            text = filled(sheet(group, turn, workings), fillers, length, tokenizer, draw)
            if text is not None:
                left_out = [
                    f" {shown(one, LEFT_OUT[(number + turn) % len(LEFT_OUT)])[1]}{END}"
                    for number, one in enumerate(group)
                ]
                names = [one.name for one in group]
                rows.append({"text": text, "source": "gsm8k_train", "problems": names, "workings": left_out})
        made.append(rows)
    return made


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """JSON lines, and how many on the screen."""
    with gzip.open(path, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    problems = {name for row in rows for name in row["problems"]}
    print(f"{path}: {len(rows)} sheets of {len(problems)} problems")


def main(given: list[str] | None = None) -> int:
    """Write the four files of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="whose tokens fill a sheet: a model folder or a .gguf file")
    parser.add_argument("problems", type=Path, help="mathqa_train.jsonl.gz")
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, default=512, help="text.sequence_length of the runs")
    asked = parser.parse_args(given)
    tokenizer: Any = load_tokenizer(asked.model)
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    problems, spare = read_problems(asked.problems)
    test = len(problems) * 8 // 100
    workings: dict[str, Any] = {}
    length = asked.length - 1  # the end-of-document token is the last of a row

    def count(text: str) -> int:
        return len(backend.encode(text, add_special_tokens=False).ids)

    def made(some: Sequence[Problem]) -> list[list[dict[str, Any]]]:
        return sheets(grouped(some, count, length), spare, backend, length, workings)

    tested, rest = made(problems[:test]), made(problems[test:])
    if not rest:
        raise UserError(f"--length {asked.length}: no sheet is full; take a smaller one, or more problems")
    quarter = len(rest) // 4
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, groups in (("test", tested), ("warm", rest[:quarter]), ("runs", rest[quarter:])):
        write_rows(asked.out / f"{name}.jsonl.gz", [row for rows in groups for row in rows])
    with gzip.open(asked.out / "workings.json.gz", "wt", encoding="utf-8") as out:
        json.dump(workings, out, ensure_ascii=False)
    return 0


if __name__ == "__main__":
    script(main)
