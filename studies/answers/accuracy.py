"""How often a model answers the test problems rightly: without a thought, after its own, and after controls.

    python studies/answers/accuracy.py models/warm sheets --out runs/answers-study/accuracy-warm.json

MODEL is a model folder, a .gguf file or an export. The text of a sheet up to an answer is the prompt; the first line
that is written is the answer. Conditions: `none` (no thought), `own` (a greedy thought), `sampled` (thoughts drawn as
in training, their mean, and `vote`, the answer most of them lead to), `other` (another problem's greedy thought),
`empty` (nothing between the delimiters), `random` (as many random tokens as the own thought has), `true` (the working
that the sheet leaves out), and for a model with a prediction gate `mixed` (the greedy thought, mixed by the gate).
Thoughts serve the whole answer. Each difference is paired, with a 95 % interval over problems. One JSON object is
printed. With `--benchmark gsm8k.jsonl.gz` (or `math500.jsonl.gz`, `csqa.jsonl.gz`) the questions of a benchmark stand
where the last problem of a sheet does, with nothing of their working before the answer (`questions.py`); with several
files each result stands under its benchmark's name in `benchmarks`. `test-math_train.jsonl.gz` of a folder of sheets is
asked like one of them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from questions import (
    BENCHMARKS,
    FORMS,
    FRESH,
    NUMBERS,
    Form,
    Item,
    benchmark_items,
    benchmark_name,
    benchmark_rows,
    chance,
    different,
)

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
from tfive.text.sheets import ANSWER, END, prefixes
from tfive.training.corpus import corpus_of
from tfive.tree.settings import SamplingSettings
from tfive_lab.study_files import software_versions

PRESET = Path(__file__).with_name("answers.toml")
GREEDY = SamplingSettings(top_k=1)
PAIRS = (("own", "none"), ("sampled", "none"), ("vote", "none"), ("own", "other"), ("own", "empty"), ("own", "random"),
         ("true", "none"), ("mixed", "none"))  # fmt: skip


def test_texts(folder: Path) -> list[str]:
    """The sheets of the test problems."""
    return texts_of(folder / "test.jsonl.gz")


def texts_of(path: Path) -> list[str]:
    """The sheets of a file."""
    with gzip.open(known_file(path), "rt", encoding="utf-8") as rows:
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


class Answers:
    """Answers of one model to all items, condition by condition."""

    def __init__(self, model: ThoughtModel, items: Sequence[Item], seed: int, longest: int = NUMBERS.longest) -> None:
        self.model, self.items, self.seed, self.longest = model, items, seed, longest
        width = max(len(item.prompt) for item in items) + longest
        if model.limit is not None and width + model.plan.reach > model.limit:
            raise UserError(
                f"a question takes {width} tokens with its answer and {model.plan.reach} with a thought, the model has "
                f"{model.limit} positions; take a model with more, or fewer questions (--limit)"
            )
        self.rows = rows_that_fit(model, width, True)

    def write(
        self,
        when: When,
        law: SamplingSettings = GREEDY,
        thoughts: Sequence[tuple[int, ...]] | None = None,
        sample: int = 0,
    ) -> list[Completion]:
        """A greedy first line for every item, after a thought by `law` or after the given ones."""
        requests = [
            TokenRequest(item.prompt, self.longest, number, sample, None if thoughts is None else thoughts[number])
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


def vote(texts: Sequence[str], answer: str, form: Form = NUMBERS) -> bool:
    """Whether the answer that most texts give is the right one; texts that give none do not count."""
    said = [one for text in texts if (one := form.says(text)) is not None]
    return bool(said) and Counter(said).most_common(1)[0][0] == form.says(answer)


def scored(
    items: Sequence[Item], written: Mapping[str, list[list[str]]], form: Form = NUMBERS
) -> tuple[dict[str, list[float]], Any]:
    """Per condition the share of right answers of every item, and the share of lines that give an answer."""
    values: dict[str, list[float]] = {}
    coverage = {}
    for name, drawn in written.items():
        verdicts = [[form.right(texts[n], item.answer) for texts in drawn] for n, item in enumerate(items)]
        values[name] = [sum(map(bool, own)) / len(own) for own in verdicts]
        coverage[name] = sum(one is not None for own in verdicts for one in own) / (len(items) * len(drawn))
    if len(written["sampled"]) > 1:
        voted = [vote([texts[n] for texts in written["sampled"]], item.answer, form) for n, item in enumerate(items)]
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


def measure(
    model: ThoughtModel, items: Sequence[Item], samples: int, seed: int, form: Form = NUMBERS
) -> dict[str, Any]:
    """Accuracies of one model on the items, and some of what it wrote."""
    began = time.monotonic()
    written, thoughts = conditions(Answers(model, items, seed, form.longest), samples)
    values, coverage = scored(items, written, form)
    named = sum(form.in_thought(item, one) for item, one in zip(items, thoughts))
    shown = [
        {"question": item.problem, "answer": item.answer, "thought": thoughts[n], "after": written["own"][0][n]}
        | {"without": written["none"][0][n]}
        for n, item in enumerate(items[:8])
    ]
    return {
        "results": summarised(items, values),
        form.begins: {name: round(share, 4) for name, share in coverage.items()},
        form.named: round(named / len(items), 4),
        "verdicts": {name: "".join("1" if one == 1 else "0" for one in own) for name, own in values.items()},
        "clusters": clusters(items),
        "missing": " ".join(item.missing for item in items),
        "samples": samples,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "examples": shown,
    }


def measure_benchmark(model: ThoughtModel, path: Path, limit: int, samples: int, seed: int) -> dict[str, Any]:
    """The same on a benchmark's first questions, 0 for all: which one it is, and what blind choice would get right."""
    name = benchmark_name(path)
    if name == FRESH:
        items = read_items(path.parent, texts_of(path), model.tokenizer)[: limit or None]
    else:
        items = benchmark_items(path, model.tokenizer)[: limit or None]
    found = {"problems": name, **chance(items), "longest_prompt": max(len(item.prompt) for item in items)}
    return found | measure(model, items, samples, seed, FORMS[name])


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
    parser.add_argument("--benchmark", type=Path, action="append", default=[], help=f"instead: {BENCHMARKS}")
    parser.add_argument("--limit", type=int, default=0, help="only the first answers; 0: all")
    parser.add_argument("--samples", type=int, default=4, help="sampled thoughts an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    asked = parser.parse_args(given)
    if asked.samples < 1 or asked.limit < 0:
        raise UserError(f"--samples {asked.samples}, --limit {asked.limit}: give at least 1, and 0 or more")
    config = Config.load(str(PRESET), overrides=asked.overrides)
    benchmarks = different(asked.benchmark)
    for path in benchmarks.values():
        benchmark_rows(path)  # a mistake in one of them is told before the model is read
    model = load(asked.model, config, asked.device)
    found: dict[str, Any] = {"model": Path(asked.model).name, "versions": software_versions()}
    how = (asked.limit, asked.samples, asked.seed)
    if benchmarks:
        each = {name: measure_benchmark(model, path, *how) for name, path in benchmarks.items()}
        found |= {"benchmarks": each} if len(each) > 1 else next(iter(each.values()))
    else:
        held_out = asked.problems == "test"
        texts = test_texts(asked.sheets) if held_out else development_texts(config, model.tokenizer)
        items = read_items(asked.sheets, texts, model.tokenizer)
        # Kinds of an item alternate by sheet, so the first sheets hold all of them.
        own = measure(model, items[: asked.limit or None], asked.samples, asked.seed)
        found |= {"problems": asked.problems, **own}
    text = json.dumps(found, ensure_ascii=False)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(text + "\n", "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    script(main)
