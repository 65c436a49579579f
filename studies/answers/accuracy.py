"""How often a model answers the test problems rightly: without a thought, after its own, and after controls.

    python studies/answers/accuracy.py models/warm sheets --out runs/answers-study/accuracy-warm.json

MODEL is a model folder, a .gguf file or an export. The text of a sheet up to an answer is the prompt; the first line
that is written is the answer. Conditions: `none` (no thought), `own` (a greedy thought), `sampled` (thoughts drawn as
in training, their mean, and `vote`, the answer most of them lead to), `other` (another problem's greedy thought),
`empty` (nothing between the delimiters), `random` (as many random tokens as the own thought has), `true` (the working
that the sheet leaves out), and for a model with a prediction gate `mixed` (the greedy thought, mixed by the gate).
Thoughts serve the whole answer. Each difference is paired, with a 95 % interval over problems. One JSON object is
printed. With `--benchmark gsm8k.jsonl.gz` the questions of a benchmark stand where the last problem of a sheet does,
with nothing of their working before the answer.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tfive import rng
from tfive.cli.options import script
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.evaluate.evaluated import load_thinker
from tfive.evaluate.generate import rows_that_fit
from tfive.inference.requests import NEVER, Completion, TokenRequest, When, WritingMode
from tfive.inference.thought_model import ThoughtModel
from tfive.models.precision import choose_device, choose_dtype
from tfive.rl.clusters import clustered_mean
from tfive.text.sheets import ANSWER, END, HEADER, prefixes
from tfive.training.corpus import corpus_of
from tfive.tree.settings import SamplingSettings
from tfive_lab.study_files import software_versions

PRESET = Path(__file__).with_name("answers.toml")
GREEDY = SamplingSettings(top_k=1)
LONGEST = 8
"""Most tokens of an answer: five digits, a sign and the end of the line."""
NUMBER = re.compile(r"\s*\$?(-?\d[\d,]*(?:\.\d+)?)")
PAIRS = (("own", "none"), ("sampled", "none"), ("vote", "none"), ("own", "other"), ("own", "empty"), ("own", "random"),
         ("true", "none"), ("mixed", "none"))  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One answer of a sheet: what stands before it, and what should follow."""

    prompt: tuple[int, ...]
    problem: str
    missing: str
    working: tuple[int, ...]
    answer: str


def test_texts(folder: Path) -> list[str]:
    """The sheets of the test problems."""
    with gzip.open(known_file(folder / "test.jsonl.gz"), "rt", encoding="utf-8") as rows:
        return [json.loads(row)["text"] for row in rows]


def development_texts(config: Config, tokenizer: Any) -> list[str]:
    """The sheets on which a run is measured: for choices, which the test problems must not see."""
    corpus = corpus_of(config)
    tokens_BS = corpus.batch(corpus.sequences("development")).tokens_BS
    return [str(tokenizer.decode(row)) for row in tokens_BS.tolist()]


def known_file(path: Path) -> Path:
    """The path, if there is such a file."""
    if not path.is_file():
        raise UserError(f"{path} is missing; give the folder that render.py wrote, or a file that is there")
    return path


def read_items(folder: Path, texts: Sequence[str], tokenizer: Any) -> list[Item]:
    """The answers of the sheets `texts` whose working is known, in their order; every question with its lines once."""
    with gzip.open(known_file(folder / "workings.json.gz"), "rt", encoding="utf-8") as file:
        workings = json.load(file)

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    found: dict[str, Item] = {}
    for before in (prefix for text in texts for prefix in prefixes(text)):
        asked = before[before.rindex("Question: ") :]
        known = workings.get(asked)
        if known is not None and asked not in found:
            question = asked.partition(" So far:")[0].removesuffix(ANSWER)
            working = encode(f" {known['working']}{END}")
            found[asked] = Item(encode(before), question, known["missing"], working, known["answer"])
    if not found:
        raise UserError(f"{folder}: no answer with a known working; render the sheets again")
    return list(found.values())


def benchmark_items(path: Path, tokenizer: Any) -> list[Item]:
    """The questions of a benchmark (rows with `question` and `answer`, a number) as the only problem of a sheet."""
    found = []
    with gzip.open(known_file(path), "rt", encoding="utf-8") as rows:
        for row in map(json.loads, rows):
            question = f"Question: {' '.join(row['question'].split())}"
            prompt = tuple(tokenizer.encode(f"{HEADER}{question}{ANSWER}", add_special_tokens=False))
            found.append(Item(prompt, question, "all", (), row["answer"].replace(",", "")))
    if not found:
        raise UserError(f"{path}: no question; give rows with question and answer")
    return found


def donors(items: Sequence[Item]) -> list[int]:
    """For each item the next one of the same kind and another problem: whose thought it gets as a control."""
    found = []
    for number, item in enumerate(items):
        later = ((number + step) % len(items) for step in range(1, len(items)))
        same = (other for other in later if items[other].missing == item.missing)
        donor = next((other for other in same if items[other].problem != item.problem), None)
        if donor is None:
            raise UserError(f"one problem alone with {item.missing!r} left out: another's thought needs two; take more")
        found.append(donor)
    return found


def right(written: str, answer: str) -> bool | None:
    """Whether the first line of what was written begins with the answer; None where it begins with no number."""
    number = NUMBER.match(written.split("\n")[0])
    return None if number is None else float(number[1].replace(",", "")) == float(answer)


class Answers:
    """Answers of one model to all items, condition by condition."""

    def __init__(self, model: ThoughtModel, items: Sequence[Item], seed: int) -> None:
        self.model, self.items, self.seed = model, items, seed
        self.rows = rows_that_fit(model, max(len(item.prompt) for item in items) + LONGEST, True)

    def write(
        self,
        when: When,
        law: SamplingSettings = GREEDY,
        thoughts: Sequence[tuple[int, ...]] | None = None,
        sample: int = 0,
    ) -> list[Completion]:
        """A greedy first line for every item, after a thought by `law` or after the given ones."""
        requests = [
            TokenRequest(item.prompt, LONGEST, number, sample, None if thoughts is None else thoughts[number])
            for number, item in enumerate(self.items)
        ]
        mode = WritingMode(None, law, when, tuple(self.model.ends), self.seed)
        poll = 8 if self.model.model.device.type == "cuda" else 2
        return [one for _, one in sorted(self.model.write(requests, mode, ("\n",), rows=self.rows, poll=poll))]

    def texts(self, written: Sequence[Completion]) -> list[str]:
        """What was written, item by item."""
        return [self.model.text_of(one, ("\n",)) for one in written]


def random_thoughts(model: ThoughtModel, own: Sequence[tuple[int, ...]], seed: int) -> list[tuple[int, ...]]:
    """Random legal tokens in place of each thought's own; its length and its close stay."""
    plan = model.plan
    out = {*plan.forbidden_ids, plan.stop_id}
    allowed = [token for token in range(model.engine().head.vocabulary) if token not in out]
    found = []
    for number, thought in enumerate(own):
        drawn = rng.uniforms(seed, "random_thought", 0, number, 0, np.arange(len(thought))) * len(allowed)
        tokens = [allowed[int(one)] for one in drawn]
        closed = bool(thought) and thought[-1] == plan.stop_id
        found.append((*tokens[: len(thought) - closed], *thought[len(thought) - closed :]))
    return found


def conditions(answers: Answers, samples: int) -> tuple[dict[str, list[list[str]]], list[str]]:
    """Per condition the answers of every item (several where thoughts were sampled), and the greedy thoughts."""
    model, items, once = answers.model, answers.items, When(at_answer="own")
    gate, model.gate = model.gate, None
    own = answers.write(once)
    thoughts = [tuple(one.thoughts[0][1]) for one in own]
    stop = () if model.plan.stop_id is None else (model.plan.stop_id,)
    workings = [(*item.working, *stop)[: model.plan.length] for item in items]
    written = {
        "none": [answers.texts(answers.write(NEVER))],
        "own": [answers.texts(own)],
        "sampled": [answers.texts(answers.write(once, model.sampling, sample=number)) for number in range(samples)],
        "other": [answers.texts(answers.write(once, thoughts=[thoughts[donor] for donor in donors(items)]))],
        "empty": [answers.texts(answers.write(once, thoughts=[()] * len(items)))],
        "random": [answers.texts(answers.write(once, thoughts=random_thoughts(model, thoughts, answers.seed)))],
    }
    if any(item.working for item in items):
        written["true"] = [answers.texts(answers.write(once, thoughts=workings))]
    if gate is not None:
        model.gate = gate
        written["mixed"] = [answers.texts(answers.write(once, thoughts=thoughts))]
    return written, [str(model.tokenizer.decode(list(thought))) for thought in thoughts]


def vote(texts: Sequence[str], answer: str) -> bool:
    """Whether the answer that most texts give is the right one; texts without a number do not count."""
    numbers = [float(found[1].replace(",", "")) for text in texts if (found := NUMBER.match(text.split("\n")[0]))]
    return bool(numbers) and Counter(numbers).most_common(1)[0][0] == float(answer)


def scored(items: Sequence[Item], written: Mapping[str, list[list[str]]]) -> tuple[dict[str, list[float]], Any]:
    """Per condition the share of right answers of every item, and the share of answers that begin with a number."""
    values: dict[str, list[float]] = {}
    coverage = {}
    for name, drawn in written.items():
        verdicts = [[right(texts[n], item.answer) for texts in drawn] for n, item in enumerate(items)]
        values[name] = [sum(map(bool, own)) / len(own) for own in verdicts]
        coverage[name] = sum(one is not None for own in verdicts for one in own) / (len(items) * len(drawn))
    if len(written["sampled"]) > 1:
        voted = [vote([texts[n] for texts in written["sampled"]], item.answer) for n, item in enumerate(items)]
        values["vote"] = [float(one) for one in voted]
    return values, coverage


def clusters(items: Sequence[Item]) -> str:
    """The number of every item's problem, in the order of the verdicts: what is paired between models is independent
    from problem to problem."""
    names = {problem: number for number, problem in enumerate(dict.fromkeys(item.problem for item in items))}
    return " ".join(str(names[item.problem]) for item in items)


def summarised(items: Sequence[Item], values: Mapping[str, list[float]]) -> dict[str, Any]:
    """Accuracies and paired differences with 95 % intervals over problems, by what is left out and over all."""
    found: dict[str, Any] = {}
    names = {problem: number for number, problem in enumerate(dict.fromkeys(item.problem for item in items))}
    for missing in (*sorted({item.missing for item in items}), "every"):
        chosen = [n for n, item in enumerate(items) if missing in ("every", item.missing)]
        problem = torch.tensor([names[items[n].problem] for n in chosen])

        def estimate(own: Sequence[float], chosen: list[int] = chosen, problem: torch.Tensor = problem) -> list[float]:
            one = clustered_mean(torch.tensor([own[n] for n in chosen]), problem)
            return [round(number, 4) for number in (one.mean, *one.interval())]

        row: dict[str, Any] = {"items": len(chosen), "problems": len(problem.unique())}
        row["accuracy"] = {name: estimate(own) for name, own in values.items()}
        row["difference"] = {
            f"{first} - {second}": estimate([a - b for a, b in zip(values[first], values[second])])
            for first, second in PAIRS
            if first in values and second in values
        }
        found[missing] = row
    return found


def measure(model: ThoughtModel, items: Sequence[Item], samples: int, seed: int) -> dict[str, Any]:
    """Accuracies of one model on the items, and some of what it wrote."""
    began = time.monotonic()
    answers = Answers(model, items, seed)
    written, thoughts = conditions(answers, samples)
    values, coverage = scored(items, written)
    number = [re.search(rf"(?<![\d.]){item.answer}(?!\d)", one.replace(",", "")) for item, one in zip(items, thoughts)]
    shown = [
        {"question": item.problem, "answer": item.answer, "thought": thoughts[n], "after": written["own"][0][n]}
        | {"without": written["none"][0][n]}
        for n, item in enumerate(items[:8])
    ]
    return {
        "results": summarised(items, values),
        "begins_with_a_number": {name: round(share, 4) for name, share in coverage.items()},
        "right_number_in_thought": round(sum(one is not None for one in number) / len(items), 4),
        "verdicts": {name: "".join("1" if one == 1 else "0" for one in own) for name, own in values.items()},
        "clusters": clusters(items),
        "samples": samples,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "examples": shown,
    }


def load(source: str, config: Config, device: str = "auto", compute: str = "auto") -> ThoughtModel:
    """The model, with its own thoughts or with untrained ones as the configuration shapes them."""
    where = choose_device(device)
    return load_thinker(source, config.thought, config.sampling, where, choose_dtype(compute, where))


def main(given: list[str] | None = None) -> int:
    """Measure, print, and keep the result where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="model folder, .gguf file or export")
    parser.add_argument("sheets", type=Path, help="the folder that render.py wrote")
    parser.add_argument("--out", type=Path, help="file for the result as well")
    parser.add_argument("--problems", choices=("test", "development"), default="test")
    parser.add_argument("--benchmark", type=Path, help="a benchmark's questions instead, say gsm8k.jsonl.gz")
    parser.add_argument("--limit", type=int, default=0, help="only the first answers; 0: all")
    parser.add_argument("--samples", type=int, default=4, help="sampled thoughts an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    asked = parser.parse_args(given)
    if asked.samples < 1 or asked.limit < 0:
        raise UserError(f"--samples {asked.samples}, --limit {asked.limit}: give at least 1, and 0 or more")
    config = Config.load(str(PRESET), overrides=asked.overrides)
    model = load(asked.model, config, asked.device)
    problems = asked.problems if asked.benchmark is None else asked.benchmark.name.partition(".")[0]
    if asked.benchmark is not None:
        items = benchmark_items(asked.benchmark, model.tokenizer)
    else:
        held_out = asked.problems == "test"
        texts = test_texts(asked.sheets) if held_out else development_texts(config, model.tokenizer)
        items = read_items(asked.sheets, texts, model.tokenizer)
    found = {"model": Path(asked.model).name, "problems": problems, "versions": software_versions()}
    # Kinds of an item alternate by sheet, so the first sheets hold all of them.
    found |= measure(model, items[: asked.limit or None], asked.samples, asked.seed)
    text = json.dumps(found, ensure_ascii=False)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(text + "\n", "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    script(main)
