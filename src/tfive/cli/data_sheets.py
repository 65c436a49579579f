"""`tfive data sheets`: worked problems into the text of the preset `worked-answers`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tfive.errors import UserError
from tfive.models.load import load_tokenizer
from tfive.text.sheets import CLOSE, LONGEST, ROWS, Files, Problems, read_problems, sheet_files
from tfive.text.workings import enough_for

PRESET, FOLDER, LENGTH = "worked-answers", "sheets", 512
THOUGHT, STEP, MOST = 128, 32, 256
"""Tokens of a thought in the preset, what they grow by, and the most that are proposed."""
PAID = (1, 2, 3, 4, 6, 8)
"""Eighths of a thought behind which the preset has its checkpoints."""
ITEMS, SHEETS = 512, 2000
"""Positions a window of the preset, and sheets that are enough for them."""
FEW = {"window.critic_fit": 0.5, "window.qualify": 0.25, "window.pilot": 0.25, "window.head_train": 0.5}
"""Of fewer sheets the small roles get a larger part each: those of the same problems stay in one role, and chance may
leave it none."""
LEAST, SCARCE = 32, {"window.actor_steps": 4, "actor.minibatches": 4}
"""The fewest positions a window, and fewer updates in a window that is so small."""
ENOUGH = 330
"""Sheets of which chance leaves a role without text in one run of a hundred; of half as many in one of seven."""
HELD = 3
"""Answers on a sheet that shows lines of workings, by which `SHEETS` are counted; bare ones hold more."""
PLACES, CROWDED = 4, 8
"""Thoughts on a sheet as the preset has them, and at most: each is eight branches of the sheet's row."""
WORKINGS = "workings.json.gz"


def window_for(sheets: int) -> dict[str, float]:
    """What a window of so many sheets has to set, so that every role finds enough of them: positions, in steps of
    `LEAST`, and where they are not the preset's also the shares of the small roles."""
    items = ITEMS if sheets >= SHEETS else max(ITEMS * sheets // (2 * SHEETS) // LEAST, 1) * LEAST
    return {} if items == ITEMS else {"window.items": items, **FEW, **(SCARCE if items <= 2 * LEAST else {})}


def thought_for(sizes: Sequence[int]) -> dict[str, Any]:
    """What thoughts have to set that should hold nine of ten workings of these sizes, if they can: their length, and
    checkpoints at the parts of it where the preset has them."""
    length = min(-(-enough_for(sizes) // STEP) * STEP, MOST)
    checkpoints = f"[{','.join(str(length * eighths // 8) for eighths in PAID)}]"
    return {} if length == THOUGHT else {"thought.length": length, "thought.checkpoints": checkpoints}


def taught_by(sizes: Sequence[int], made: Files, told: list[str]) -> dict[str, Any]:
    """What a run has to set so that workings of these sizes teach it to write, or where there are none its own
    thoughts; `told` gets a line on them."""
    if not sizes:
        told.append("workings: no row has one, so a run begins with those of the model's own thoughts that help most")
        return alone(len(made.rows["runs"]), made.most)
    thought = thought_for(sizes)
    room, enough = thought.get("thought.length", THOUGHT), enough_for(sizes)
    held = sum(size <= room for size in sizes) / len(sizes)
    more = f" ({room} is the most proposed; the warm start leaves longer ones out)" * (enough > room)
    told.append(
        f"workings: half have at most {int(median(sizes))} tokens with their close, nine of ten at most {enough}; "
        f"thoughts of {room} hold {100 * held:.0f} %{more}"
    )
    return thought


def alone(sheets: int, answers: int) -> dict[str, Any]:
    """What a run sets in which no working stands where a thought would (docs/studies/answers-hindsight.md): rounds of
    2,048 positions and 50 updates, or about half of the positions there are and as many updates a position; and
    where sheets hold more answers than the preset has thoughts for, more of these."""
    places = min(max(answers, PLACES), CROWDED)
    items = max(min(2048, sheets * places // 2), 64)
    found: dict[str, Any] = {"warmstart.source": "hindsight", "warmstart.path": "none", "warmstart.rounds": 3}
    found |= {"warmstart.items": items, "warmstart.steps": max(50 * items // 2048, 4)}
    return found | ({} if places == PLACES else {"text.positions.per_text": places})


def file_of(folder: Path, name: str) -> Path:
    """Where the sheets of one kind lie."""
    return folder / f"{name}.jsonl.gz"


def write_files(folder: Path, files: Mapping[str, Sequence[dict[str, Any]]], workings: dict[str, Any]) -> list[str]:
    """Write the rows of every kind and what they leave out, all or nothing; returns a line for each file."""
    folder.mkdir(parents=True, exist_ok=True)
    told = []
    with TemporaryDirectory(dir=folder, prefix=".writing-") as name:
        part = Path(name)
        for kind, rows in files.items():
            with gzip.open(file_of(part, kind), "wt", encoding="utf-8") as out:
                out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            problems = {one for row in rows for one in row["problems"]}
            told.append(f"{file_of(folder, kind)}: {len(rows):,} sheets of {len(problems):,} problems")
        with gzip.open(part / WORKINGS, "wt", encoding="utf-8") as out:
            json.dump(workings, out, ensure_ascii=False)
        for path in sorted(part.iterdir()):
            path.replace(folder / path.name)
    return told


def sheets(model: str, problems: Path, folder: Path, length: int, *, trust_remote_code: bool = False) -> str:
    """Read, render, write; returns what was written and the command that comes next."""
    wanted = (folder / WORKINGS, *(file_of(folder, name) for name in ("test", "warm", "runs")))
    there = next((path for path in wanted if path.exists()), None)
    if there is not None:
        raise UserError(f"{there} already exists; give another folder or remove this one's files")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; give a folder")
    if not problems.is_file():
        what = "is a folder; give a file of" if problems.is_dir() else "no such file; give"
        raise UserError(f"{problems}: {what} rows with {ROWS}")
    found = read_problems(problems)
    tokenizer: Any = load_tokenizer(model, trust_remote_code=trust_remote_code)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{model}: its tokenizer has no fast form, which sheets are cut by; take another model")
    close = len(tokenizer.encode(CLOSE, add_special_tokens=False))
    if close != 1:
        raise UserError(
            f"{model}: {CLOSE}, which closes a thought on these sheets, is {close} tokens in its vocabulary; take a "
            "model in which it is one, such as Qwen2.5 or SmolLM2"
        )
    made = sheet_files(found, tokenizer.backend_tokenizer, length)
    told = [*write_files(folder, made.rows, made.workings), *_left_out(found, made, length)]
    sets: dict[str, Any] = {"model.name": model, **({} if length == LENGTH else {"text.sequence_length": length})}
    sets |= taught_by([working + 1 for working in made.sizes], made, told)  # the close is one token
    count = len(made.rows["runs"])
    held = sum(min(len(row["problems"]), CROWDED) for row in made.rows["runs"])
    sets |= window_for(count if made.sizes else max(held // HELD, count))
    words = " ".join(f"--set {quote(f'{key}={value}')}" for key, value in sets.items())
    if folder != Path(FOLDER):
        told.append(f"the preset reads {FOLDER}/: give {folder} that name, or name its files in a TOML file after it")
    if count < ENOUGH:
        enough = -(-len(found.kept) * ENOUGH // (100 * count)) * 100
        told.append(
            f"few: chance may leave a part of a run none of {count} sheets, and then it cannot begin; about {enough:,} "
            "problems like these are enough. The last line of what comes next says whether these are; if so, train "
            f"with the same settings (tfive train {PRESET} …)"
        )
    told.append(f"next: tfive {'doctor' if count < ENOUGH else 'train'} {PRESET} {words}")
    return "\n".join(told)


def _left_out(found: Problems, made: Files, length: int) -> list[str]:
    """A line for each reason why something is in no sheet."""
    unfit = (
        f"rows without a working or with several blank lines, or whose answer is no word of 1 to {LONGEST} characters"
        if found.worked
        else f"rows whose answer is no word of 1 to {LONGEST} characters, or with several blank lines"
    )
    told = [
        (len(found.unfit), f"{unfit} (row {found.unfit[0]} first)" if found.unfit else ""),
        *((len(rows), f"rows that {why} (row {rows[0]} first)") for why, rows in found.unsolved.items()),
        (len(found.again), f"rows whose question came before (row {found.again[0]} first)" if found.again else ""),
        (made.too_long, f"problems that are too long for sheets of {length} tokens; --length makes them longer"),
        (made.uncut, "sheets that could not be cut to their length and read back alike"),
        (
            made.unused,
            f"problems that were left over when sheets were filled{', or on such sheets alone' if made.uncut else ''}",
        ),
    ]
    filled = (
        f"at the ends of sheets stand the questions of {len(found.spare):,} further problems, cut before their answers"
    )
    return [*(f"left out: {count:,} {what}" for count, what in told if count), filled]
