"""`tfive eval` against lm-evaluation-harness on the same items and prompts, and the speed of generation.

    python studies/real_model/evaluation.py reference --model MODEL.gguf --data BENCHMARKS --out reference
    python studies/real_model/evaluation.py measure --model MODEL.gguf --data BENCHMARKS --out measured \\
        --summary found.json
    python studies/real_model/evaluation.py agree --out measured --reference reference --summary found.json

`reference` needs the package lm_eval: its task declarations are run by its Hugging Face model class, only the dataset
is read from local files. `measure` evaluates the same items with `tfive eval`, generates GSM8K answers, and measures
tokens a second and how often an output depends on its batch. `agree` compares every log-likelihood with the reference
and adds the differences to the summary.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tfive.cli.evaluate_suite import Wanted, evaluate
from tfive.cli.options import script
from tfive.errors import UserError
from tfive.evaluate.records import OPTIONS, answers_file, read_answers
from tfive.evaluate.tasks import LETTERS, TASKS, Item, load_items
from tfive.models.load import load_model
from tfive_lab.study_files import file_sha256, software_versions, without_folders, write_json

TWINS = {
    "piqa": ("piqa/piqa.yaml",),
    "arc_challenge": ("arc/arc_easy.yaml", "arc/arc_challenge.yaml"),
    "csqa": ("commonsense_qa/default.yaml",),
}
"""Tasks both evaluations have, with their declarations in lm-evaluation-harness (later files add to earlier ones)."""

ELSEWHERE = ("include", "tag", "training_split", "test_split", "dataset_name", "fewshot_split")
"""Keys of a declaration that name the hub's dataset; they are dropped, since items are read from a local file."""


def arguments(given: list[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("reference", "measure"):
        one = commands.add_parser(name)
        one.add_argument("--model", required=True, help="a .gguf file, a model folder or a hub id")
        one.add_argument("--data", type=Path, required=True, help="folder of benchmark files")
        one.add_argument("--out", type=Path, required=True, help="folder to write")
        one.add_argument("--tasks", nargs="+", choices=TWINS, default=list(TWINS))
        one.add_argument("--limit", type=int, help="only the first items of each task")
        one.add_argument("--device", default="auto")
    measure = commands.choices["measure"]
    measure.add_argument("--generate", default="gsm8k", help="task to generate answers for; none: do not")
    measure.add_argument("--max-new-tokens", type=int, default=512)
    measure.add_argument("--flips", type=int, default=16, help="outputs also written alone")
    measure.add_argument("--compute", nargs="+", default=["float32"], help="precisions to generate in")
    measure.add_argument("--forms", nargs="+", choices=("few-shot", "chat"), default=["few-shot", "chat"])
    measure.add_argument("--summary", type=Path, help="the JSON file of everything measured")
    agree = commands.add_parser("agree")
    agree.add_argument("--out", type=Path, required=True, help="folder that `measure` wrote")
    agree.add_argument("--reference", type=Path, required=True, help="folder that `reference` wrote")
    agree.add_argument("--tasks", nargs="+", choices=TWINS, default=list(TWINS))
    agree.add_argument("--summary", type=Path, required=True, help="the JSON file that `measure` wrote")
    return parser.parse_args(given)


def harness_row(task: str, item: Item) -> dict[str, Any]:
    """An item with the field names of the dataset that lm-evaluation-harness reads."""
    if task == "piqa":
        sides = {"sol1": item.choices[0], "sol2": item.choices[1]}
        return {"id": item.id, "goal": item.question, **sides, "label": LETTERS.index(item.answer)}
    labels = list(LETTERS[: len(item.choices)])
    choices = {"text": list(item.choices), "label": labels}
    return {"id": item.id, "question": item.question, "choices": choices, "answerKey": item.answer}


def declare(task: str, data: Path, folder: Path) -> None:
    """The harness's declaration of a task, with its dataset in a local file."""
    import lm_eval.tasks
    import yaml

    rows = [harness_row(task, item) for item in load_items(TASKS[task], data)]
    path = folder / f"{task}.items.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", "utf-8")
    content: dict[str, Any] = {}
    for name in TWINS[task]:
        content |= yaml.safe_load((Path(lm_eval.tasks.__file__).parent / name).read_text("utf-8"))
    content = {key: value for key, value in content.items() if key not in ELSEWHERE}
    content |= {"task": f"local_{task}", "dataset_path": "json", "validation_split": "validation"}
    content["dataset_kwargs"] = {"data_files": {"validation": str(path.resolve())}}
    (folder / f"{task}.yaml").write_text(yaml.safe_dump(content), "utf-8")


def reference(asked: argparse.Namespace) -> None:
    """Run the harness itself; one JSON line per item with its log-likelihoods, and a summary."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    asked.out.mkdir(parents=True, exist_ok=True)
    declarations = asked.out / "tasks"
    declarations.mkdir(exist_ok=True)
    for task in asked.tasks:
        declare(task, asked.data, declarations)
    device = None if asked.device == "auto" else asked.device
    loaded = load_model(asked.model, dtype=torch.float32, device=device)
    model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=8, dtype="float32")
    manager = TaskManager(include_path=str(declarations), include_defaults=False)
    for task in asked.tasks:
        found: Any = lm_eval.simple_evaluate(
            model=model,
            tasks=[f"local_{task}"],
            task_manager=manager,
            limit=asked.limit,
            log_samples=True,
            bootstrap_iters=0,
        )
        lines = [harness_line(sample) for sample in found["samples"][f"local_{task}"]]
        (asked.out / f"reference-{task}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
        print(task, {key: value for key, value in found["results"][f"local_{task}"].items() if "acc" in key})


def harness_line(sample: dict[str, Any]) -> str:
    """What the comparison needs of one sample of the harness's log."""
    pairs = [list(pair) for pair in sample["arguments"]]
    record = {"id": sample["doc"]["id"], "ll": [response[0][0] for response in sample["resps"]]}
    record |= {"context": pairs[0][0], "options": [pair[1] for pair in pairs]}
    return json.dumps(record | {"acc": sample["acc"], "acc_norm": sample.get("acc_norm")}, ensure_ascii=False)


def agreement(task: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Both sides item by item: differences of log-likelihoods, and every item on which a choice differs."""
    by_id = {record["id"]: record for record in theirs}
    pairs = [(record, by_id[record["id"]]) for record in ours if record["id"] in by_id]
    if not pairs:
        raise UserError(f"{task}: the reference holds none of these items; make it again from the same files")
    gaps = [abs(a - b) for mine, other in pairs for a, b in zip(mine["log_likelihood"], other["ll"], strict=True)]
    found: dict[str, Any] = {
        "items": len(pairs),
        "options": len(gaps),
        "largest_difference": max(gaps),
        "mean_difference": sum(gaps) / len(gaps),
    }
    ways = {"raw": "acc"} if pairs[0][1]["acc_norm"] is None else {"raw": "acc", "per_character": "acc_norm"}
    for way, name in ways.items():
        apart = [(mine, other) for mine, other in pairs if float(mine[way]) != other[name]]
        found[name] = {
            "ours": sum(float(mine[way]) for mine, _ in pairs) / len(pairs),
            "theirs": sum(other[name] for _, other in pairs) / len(pairs),
            "verdicts_that_differ": [
                {"id": mine["id"], "ours": mine["log_likelihood"], "theirs": other["ll"]} for mine, other in apart
            ],
        }
    return found


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Score the options, generate answers, and time it."""
    began = time.perf_counter()
    report = origin(asked)
    shared: dict[str, Any] = {"data": asked.data, "device": asked.device, "limit": asked.limit}
    wanted = Wanted(
        asked.model, tuple(asked.tasks), out=asked.out / "options", ways=("likelihood",), compute="float32", **shared
    )
    report["options"] = evaluate(wanted)
    report["model"] = report["options"]["model"]["name"]
    print_scores(report["options"])
    report["generated"] = {}
    kinds = [(compute, form) for compute in asked.compute for form in asked.forms if asked.generate != "none"]
    for compute, form in kinds:
        wanted = Wanted(
            asked.model,
            (asked.generate,),
            out=asked.out / f"{asked.generate}-{compute}-{form}",
            ways=("generated",),
            samples=1,
            temperature=0.0,
            max_new_tokens=asked.max_new_tokens,
            chat=form == "chat",
            flips=asked.flips,
            compute=compute,
            **shared,
        )
        found = report["generated"][f"{compute} {form}"] = evaluate(wanted)
        own = found["tasks"][asked.generate]
        own["tokens_per_second"] = own["written_tokens"] / max(own["seconds"], 1e-9)
        print_scores(found)
        speed = f"{own['tokens_per_second']:.0f} new tokens a second"
        print(compute, form, speed, "flips", found.get("flips"), flush=True)
    report["seconds"] = round(time.perf_counter() - began, 1)
    return report


def agree(asked: argparse.Namespace) -> dict[str, Any]:
    """The summary of `measure` with the comparison added."""
    report: dict[str, Any] = json.loads(asked.summary.read_text("utf-8"))
    report["lm_eval"] = {}
    for task in asked.tasks:
        ours = list(read_answers(answers_file(asked.out / "options", task, OPTIONS)))
        theirs = list(read_answers(asked.reference / f"reference-{task}.jsonl"))
        report["lm_eval"][task] = agreement(task, ours, theirs)
        print(task, json.dumps(report["lm_eval"][task]), flush=True)
    return report


def tables(report: dict[str, Any]) -> str:
    """The summary as Markdown, for a page."""

    def percent(value: float) -> str:
        return f"{100 * value:.2f}"

    lines = [
        "| task | items | measure | tfive | lm-evaluation-harness | verdicts that differ | largest difference, nats |"
    ]
    lines.append("|---|---:|---|---:|---:|---:|---:|")
    for task, found in report.get("lm_eval", {}).items():
        for name in ("acc", "acc_norm"):
            if name in found:
                both = f"{percent(found[name]['ours'])} | {percent(found[name]['theirs'])}"
                apart = len(found[name]["verdicts_that_differ"])
                gap = f"{found['largest_difference']:.1e}"
                lines.append(f"| {task} | {found['items']} | {name} | {both} | {apart} | {gap} |")
    lines += ["", "| generated | items | primary (95 %) | coverage | tokens an item | new tokens a second | flips |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for kind, found in report["generated"].items():
        for task, own in found["tasks"].items():
            score, scores = own["scores"][own["primary"]], own["scores"]
            spread = f"{percent(score['mean'])} ({percent(score['low'])} … {percent(score['high'])})"
            flips = found.get("flips", {}).get(task)
            flipped = "" if flips is None else f"{flips['flipped']} of {flips['outputs']}"
            facts = f"{percent(scores['coverage']['mean'])} | {scores['tokens']['mean']:.0f}"
            speed = f"{own['tokens_per_second']:,.0f}"
            lines.append(f"| {task}, {kind} | {own['items']} | {spread} | {facts} | {speed} | {flipped} |")
    return "\n".join(lines)


def print_scores(scores: dict[str, Any]) -> None:
    """Print one line per task."""
    for name, task in scores["tasks"].items():
        shown = {key: round(one["mean"], 4) for key, one in task["scores"].items()}
        print(name, task["items"], "items", f"{task['seconds']} s", shown, flush=True)


def origin(asked: argparse.Namespace) -> dict[str, Any]:
    """Which model, which software, which machine."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and asked.device != "cpu" else "cpu"
    command = " ".join(["python studies/real_model/evaluation.py", *without_folders(sys.argv[1:])])
    digest = file_sha256(Path(asked.model))
    return {"command": command, "model_sha256": digest, "device": device, "versions": software_versions()}


def main(given: list[str] | None = None) -> int:
    """Run what was asked for."""
    asked = arguments(given)
    if asked.command == "reference":
        reference(asked)
        return 0
    report = agree(asked) if asked.command == "agree" else measure(asked)
    print(tables(report), f"{report['seconds']} seconds in all", sep="\n\n")
    if asked.summary is not None:
        write_json(asked.summary, report)
    return 0


if __name__ == "__main__":
    script(main)
