"""The study's problems as exercise sheets, as `tfive data sheets` makes them of anyone's.

    python studies/answers/render.py MODEL mathqa_train.jsonl.gz sheets

Written are test.jsonl.gz (8 % of the problems, in no other file), warm.jsonl.gz (a quarter of the rest, for the warm
start), runs.jsonl.gz, and workings.json.gz: what was left out, by the text that stands before the answer. Rows hold it
too, as `workings`, one for each match of the preset's pattern. Problems are those of GSM8K alone whose answer is a
number of at most five digits; questions that serve benchmarks as examples only fill the ends of sheets.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path
from typing import Any

from tfive.cli.data_sheets import write_files
from tfive.cli.options import script
from tfive.errors import UserError
from tfive.models.load import load_tokenizer
from tfive.text.sheets import Problem, Problems, in_order, sheet_files

SOURCE = "gsm8k_train"


def read_problems(path: Path) -> Problems:
    """GSM8K's training problems with answers of at most five digits; and those that serve benchmarks as examples."""
    kept: list[Problem] = []
    spare: list[Problem] = []
    with gzip.open(path, "rt", encoding="utf-8") as rows:
        for row in map(json.loads, rows):
            if row["source"] != SOURCE:
                continue
            question, _, solution = row["text"].partition("\n\n")
            found = re.fullmatch(r"(?s)(.*)\nThe answer is (\d[\d,]*)\.?", solution)
            if not found or len(found[2].replace(",", "")) > 5:
                continue
            lines = tuple(" ".join(one.split()).rstrip(".") for one in found[1].split("\n") if one.strip())
            problem = Problem(row["id"], " ".join(question.split()), lines, found[2].replace(",", ""))
            (spare if row["fewshot"] else kept).append(problem)
    if not kept or not spare:
        raise UserError(f"{path}: {len(kept)} problems of {SOURCE} and {len(spare)} with fewshot; both are needed")
    return Problems(in_order(kept), spare)


def main(given: list[str] | None = None) -> int:
    """Write the four files of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="whose tokens fill a sheet: a model folder or a .gguf file")
    parser.add_argument("problems", type=Path, help="mathqa_train.jsonl.gz")
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, default=512, help="text.sequence_length of the runs")
    asked = parser.parse_args(given)
    tokenizer: Any = load_tokenizer(asked.model)
    made = sheet_files(read_problems(asked.problems), tokenizer.backend_tokenizer, asked.length)
    files = {name: [{**row, "source": SOURCE} for row in rows] for name, rows in made.rows.items()}
    print("\n".join(write_files(asked.out, files, made.workings)))
    return 0


if __name__ == "__main__":
    script(main)
