"""Worked problems as exercise sheets: text that rewards thinking, because what decides the next token is left out.

A sheet is one worked example, one plain one, then problems with their answers alone, and fills one packed row. A
thought stands after "Answer:", opened by "Working:" and closed by "####" as in the example; the next token of the text
is the answer's first. Of a solution of n lines a sheet keeps the first n − 1, n − 2 or none, so that every problem
comes once with each. What was left out goes with the row, one working for each position. Problems of which no working
is known come once, with their answers.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfive.errors import UserError
from tfive.text.boxed import worked
from tfive.text.formats import RawRow, raw_rows
from tfive.text.workings import TOKENS, enough_for

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
EXAMPLES = tuple(" ".join(question.split()[-12:]) for question in (WORKED[0], PLAIN[0]))
"""How the questions of the two examples end."""
PATTERN = "".join(f"(?<!{re.escape(one)})" for one in EXAMPLES).replace("\\ ", " ") + ANSWER.replace("\n", r"\n")
"""Where thoughts stand: right before answers, but for those of the examples."""
LEFT_OUT = ("1", "2", "all")
"""Lines of working that a sheet leaves out, in turn."""
ROOM = 4
"""Tokens that every sheet keeps for the start of the question that fills it up."""
LONGEST = 12
"""Most characters of an answer: it should be scored within a few tokens."""
ROWS = "question, working and answer"
WHOLE = "question and answer, and working in all of them or none"
NAMED = ({"question", "answer"}, {"question", "solution"}, {"problem", "solution"})
"""Fields of which a row without a value in one of them is left out instead of refused."""
STEPS = re.compile(r"<<[^<>]*>>")
"""Calculator notes in the workings of GSM8K as it is published."""
SPARE = 100
"""One problem in so many only fills the ends of sheets, where no row is marked for that."""
TESTED, WARMED = 8, 25
"""Per cent of the problems that nothing else sees, and of the rest's sheets that serve the warm start alone."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A problem, the lines of its solution, and its answer, a single word or number."""

    name: str
    question: str
    lines: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Problems:
    """Problems in an order of their own, and those that only fill the ends of sheets."""

    kept: list[Problem]
    spare: list[Problem]
    unfit: tuple[int, ...] = ()
    """Numbers of the rows without question or working, with several blank lines in `text`, or whose answer is no single
    short word."""
    again: tuple[int, ...] = ()
    """Numbers of the rows whose question came before."""
    unsolved: dict[str, list[int]] = field(default_factory=dict)
    """Numbers of the rows with `solution` of which no steps and answer are told, by the reason."""

    @property
    def worked(self) -> bool:
        """Whether their workings are known: of all, or of none."""
        return bool(self.kept[0].lines)


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """An order by the problems' names, which has nothing to do with their place in a file."""
    return sorted(problems, key=lambda one: hashlib.sha256(one.name.encode()).hexdigest())


def read_problems(path: Path) -> Problems:
    """The problems of a file: rows with `question`, `working` and `answer`; with `question` and an `answer` that ends
    in `#### 42` (GSM8K as it is published); with `problem` (or `question`) and a `solution` whose result stands in
    `\\boxed{42}` (MATH as it is published); or with `text`, whose last line is `The answer is 42.` Rows marked
    `fewshot` only fill the ends of sheets; where none is, a few others do. Rows without a working are left out, unless
    no row has one."""
    kept: list[Problem] = []
    spare: list[Problem] = []
    bare: dict[int, tuple[Problem, bool]] = {}
    unfit: list[int] = []
    again: list[int] = []
    unsolved: dict[str, list[int]] = {}
    seen: set[str] = set()
    count = 0
    for number, raw in raw_rows(path, ()):
        count += 1
        row = _parsed(raw, path, number)
        solved = _solved(row, path, number)
        if isinstance(solved, str):
            unsolved.setdefault(solved, []).append(number + 1)
            continue
        question, working, answer = solved or _parts(row, path, number)
        lines = tuple(" ".join(STEPS.sub("", one).split()).rstrip(".") for one in working.split("\n") if one.strip())
        short = len(answer) <= LONGEST and answer.split() == [answer]
        if not question or not lines or not short:
            unfit.append(number + 1)
            if question and short:
                bare[number + 1] = Problem(f"row {number + 1}", question, (), answer), row.get("fewshot") is True
        elif question.casefold() in seen:
            again.append(number + 1)
        else:
            seen.add(question.casefold())
            problem = Problem(f"row {number + 1}", question, lines, answer)
            (spare if row.get("fewshot") is True else kept).append(problem)
    if not count:
        raise UserError(f"{path}: is empty; give rows with {WHOLE}")
    if not kept and not spare and bare:
        unfit = [row for row in unfit if row not in bare]
        for place, (problem, fills) in bare.items():
            if problem.question.casefold() in seen:
                again.append(place)
            else:
                seen.add(problem.question.casefold())
                (spare if fills else kept).append(problem)
    kept = in_order(kept)
    if not spare:
        few = max(len(kept) // SPARE, 1)
        kept, spare = kept[:-few], kept[-few:]
    if not kept:
        marked = f", {len(spare)} of them marked fewshot, which only fill sheets" if len(spare) > 1 else ""
        reasons = {
            "have no working": [row for row in unfit if row in bare],
            f"have no question that can be told, or no answer of one word of at most {LONGEST} characters":
                [row for row in unfit if row not in bare],
            **unsolved,
        }  # fmt: skip
        found = ", ".join(f"{len(rows)} {why} (row {rows[0]} first)" for why, rows in reasons.items() if rows)
        said = f"of {count} rows {found}" if found else f"rows that can be used: {len(spare)}"
        raise UserError(f"{path}: {said}{marked}; give some hundred rows with {WHOLE}")
    return Problems(kept, spare, tuple(unfit), tuple(again), unsolved)


def _parsed(raw: RawRow, path: Path, number: int) -> Row:
    try:
        row = raw if isinstance(raw, dict) else json.loads(raw)
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{path}, row {number + 1}: no JSON in UTF-8 ({reason}); give JSON lines or Parquet") from error
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise UserError(f"{path}, row {number + 1}: {kind}, not an object; give rows with {ROWS}")
    return row


def _solved(row: Row, path: Path, number: int) -> tuple[str, str, str] | str | None:
    """Question, working and answer of a row with `solution`, or why it has none; nothing for rows of other forms."""
    asked, other = ("problem", "text") if row.get("question") is None else ("question", "working")
    closed = isinstance(row.get("answer"), str) and CLOSE in row["answer"]
    if row.get(asked) is None or row.get("solution") is None or row.get(other) is not None or closed:
        return None
    for name in (asked, "solution"):
        if not isinstance(row[name], str):
            raise UserError(f"{path}, row {number + 1}: {name} is a {type(row[name]).__name__}; give it as text")
    question: str = row[asked]
    if CLOSE in row["solution"]:
        return f"have {CLOSE}, which closes a thought, in their solution"
    found = worked(question, row["solution"])
    return found if isinstance(found, str) else (" ".join(question.split()), "\n".join(found[0]), found[1])


def _parts(row: Row, path: Path, number: int) -> tuple[str, str, str]:
    """Question, working and answer of a row in any of the other forms; empty where they cannot be told apart."""
    where = f"{path}, row {number + 1}"
    told = {name: row.get(name) for name in ("question", "working", "answer", "text")}
    for name, value in told.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, str | int | float)):
            raise UserError(f"{where}: {name} is a {type(value).__name__}; give it as text")
    question, working, answer, text = (
        None if value is None else str(value).replace("\r\n", "\n").strip() for value in told.values()
    )
    if question is None and text is not None:
        if text.count("\n\n") > 1:
            return "", "", ""  # where the question ends is not told
        question, _, solution = text.partition("\n\n")
        working, _, last = solution.rpartition("\n")
        found = re.fullmatch(r"The answer is (.*)", last.strip())
        answer = found[1] if found else ""
    elif question is not None and answer is not None and working is None:
        working, _, answer = answer.rpartition(CLOSE)
    if question is None or working is None or answer is None:
        if any(row.keys() >= names for names in NAMED):
            return "", "", ""  # fields without a value: left out, as rows without a working are
        raise UserError(
            f"{where}: has {', '.join(sorted(row)) or 'no fields'}; give {ROWS}, or question and an answer that ends "
            f"in {CLOSE} and the result, or problem and a solution with the result in \\boxed{{}}, or text whose last "
            "line is The answer is 42."
        )
    answer = answer.strip().rstrip(".")
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", answer):
        answer = answer.replace(",", "")
    return " ".join(question.split()), working.partition(CLOSE)[0], answer


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


class Sheets:
    """Makes sheets of `length` tokens, the end of the document left out, by a model's tokenizer."""

    def __init__(self, backend: Any, length: int, spare: Sequence[Problem]) -> None:
        backend.encode_special_tokens = True
        self.backend, self.length = backend, length - 1
        self.fillers = [f"Question: {one.question}{ANSWER}" for one in spare]
        self.workings: dict[str, Any] = {}
        """What was left out, by the text that stands before the answer."""
        self.too_long = 0
        """Problems that fill more than a sheet."""
        self.needs: list[int] = []
        """Tokens of the shortest sheet that would hold each problem."""
        self.uncut = 0
        """Sheets that could not be cut so that they are read back alike."""

    def encode(self, text: str) -> list[int]:
        """Its tokens."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def grouped(self, problems: Sequence[Problem]) -> list[list[Problem]]:
        """Problems that share a sheet: as many in a row as fit whatever is left out. Too long ones are passed over."""
        base, groups, group = len(self.encode(HEADER)), [], list[Problem]()
        sizes = [base] * len(LEFT_OUT)
        for problem in problems:
            own = [len(self.encode(f"{shown(problem, missing)[0]}{problem.answer}\n\n")) for missing in LEFT_OUT]
            self.needs.append(base + max(own) + ROOM + 1)
            if base + max(own) + ROOM > self.length:
                self.too_long += 1
                continue
            ahead = [size + own[(len(group) + turn) % len(own)] for turn, size in enumerate(sizes)]
            if max(ahead) + ROOM > self.length:
                groups.append(group)
                group, ahead = [], [base + size for size in own]
            group.append(problem)
            sizes = ahead
        return groups

    def made(self, problems: Sequence[Problem]) -> list[list[Row]]:
        """The rows of each group's sheets: one for every turn of what is left out."""
        draw, made = random.Random(0), []
        for group in self.grouped(problems):
            rows = []
            worked = bool(group[0].lines)
            turns = LEFT_OUT if worked else ("all",)
            for turn in range(len(turns)):
                left_out = [turns[(number + turn) % len(turns)] for number in range(len(group))]
                text = self._filled(self._sheet(group, left_out), draw)
                if text is None:
                    self.uncut += 1
                    continue
                row: Row = {"text": text, "problems": [one.name for one in group]}
                if worked:
                    row["workings"] = [f" {shown(one, missing)[1]}{END}" for one, missing in zip(group, left_out)]
                rows.append({**row, TOKENS: self.length})
            made.append(rows)
        return made

    def _sheet(self, group: Sequence[Problem], left_out: Sequence[str]) -> str:
        text = HEADER
        for problem, missing in zip(group, left_out):
            before, working = shown(problem, missing)
            if problem.lines:
                self.workings[before] = {"working": working, "answer": problem.answer, "missing": missing}
            text += f"{before}{problem.answer}\n\n"
        return text

    def _filled(self, text: str, draw: random.Random) -> str | None:
        """The text with a cut question behind it, as long as a sheet is; None where a cut would not be read back alike.

        The filling never shows its "Answer:" to the end, so no thought stands there.
        """
        tail = draw.choice(self.fillers)
        while len(text + tail) < 6 * self.length and len(self.encode(text + tail)) < self.length + 8:
            tail = tail.replace(ANSWER, " ") + draw.choice(self.fillers)
        ids = self.encode(text + tail)[: self.length]
        cut: str = self.backend.decode(ids, skip_special_tokens=False)
        same = self.encode(cut) == ids and cut.count("Answer:\n") == text.count("Answer:\n") and cut == cut.strip()
        return cut if same else None


@dataclass(frozen=True)
class Files:
    """The rows of `test` (problems that nothing else sees), `warm` (for a warm start from workings) and `runs`; what
    all of them leave out, by the text before the answer, and the tokens of each working; and what came to no sheet."""

    rows: dict[str, list[Row]]
    workings: dict[str, Any]
    sizes: list[int]
    too_long: int
    uncut: int
    most: int
    """Most answers on a sheet."""
    unused: int
    """Problems that are short enough and on no sheet: what is left over when sheets are filled, and of sheets that
    could not be cut."""


def sheet_files(problems: Problems, backend: Any, length: int) -> Files:
    """Sheets of all problems; refuses where a file would have none. Where no working is known there is no `warm`."""
    maker = Sheets(backend, length, problems.spare)
    header = len(maker.encode(HEADER))
    if header + 2 * ROOM > length:
        raise UserError(f"--length {length}: the two examples of a sheet alone take {header} tokens; give more")
    test = len(problems.kept) * TESTED // 100
    tested, rest = maker.made(problems.kept[:test]), maker.made(problems.kept[test:])
    warm = len(rest) * WARMED // 100 if problems.worked else 0
    parts = {"test": tested, **({"warm": rest[:warm]} if problems.worked else {}), "runs": rest[warm:]}
    rows = {name: [row for group in groups for row in group] for name, groups in parts.items()}
    empty = next((name for name in rows if not rows[name]), None)
    if empty is not None:
        count = f"of {len(problems.kept)} problems"
        if maker.too_long:
            enough = -(-enough_for(maker.needs) // 64) * 64
            raise UserError(
                f"--length {length}: {count} {maker.too_long} are too long for a sheet, and none is left for "
                f"{empty}.jsonl.gz; give --length {enough}, which holds nine of ten"
            )
        raise UserError(f"{count} none is left for {empty}.jsonl.gz; give some hundred problems")
    written = (working for part in rows.values() for row in part for working in row.get("workings", ()))
    sizes = [len(maker.encode(working)) for working in written]
    used = {one for part in rows.values() for row in part for one in row["problems"]}
    unused = len(problems.kept) - maker.too_long - len(used)
    most = max(len(row["problems"]) for part in rows.values() for row in part)
    return Files(rows, maker.workings, sizes, maker.too_long, maker.uncut, most, unused)
