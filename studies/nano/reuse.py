"""What a model learns of texts that it meets again: `python studies/nano/reuse.py --out results/nano-reuse.json`.

Trains nano with so little training text that the actor meets each text several times, then measures the loss without a
thought, before and after training, on the texts of every split and role. Where those that teach and those that qualify,
normalise, calibrate or are measured part, critics are judged and advantages are normalised on another distribution than
the one the actor learns from. Given again, the command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch

from tfive.cli.options import script
from tfive.config.config import Config
from tfive.inference.thought_model import ThoughtModel
from tfive.models.load import load_model
from tfive.report.runs import Run, done
from tfive.rl.gains import no_thought_losses
from tfive.text.prepared import PreparedCorpus
from tfive.training.compare import compare
from tfive.training.corpus import corpus_of
from tfive.training.export import export
from tfive_lab.study_files import write_json

ROWS = 32
"""Texts in one forward pass."""


def losses(model: ThoughtModel, corpus: PreparedCorpus) -> dict[str, float]:
    """Mean loss without a thought over the items of each split and role, in nats a token."""
    found = {}
    for stretch in corpus.ranges:
        texts = corpus.batch(stretch.numbers)
        loss_BP = no_thought_losses(model.engine(), texts, rows=ROWS)
        found[f"{stretch.split}/{stretch.role}"] = round(float(loss_BP[texts.positions_BP >= 0].mean()), 4)
    return found


def measured(run: Run, corpus: PreparedCorpus, before: dict[str, float]) -> dict[str, Any]:
    """One run: how often it drew its texts, and its losses beside the base model's."""
    exported = run.folder / "exported"
    shutil.rmtree(exported, ignore_errors=True)
    export(run.folder, exported)
    after = losses(ThoughtModel.from_pretrained(exported, device="cpu", dtype=torch.float32), corpus)
    shutil.rmtree(exported)
    groups = {group: {"before": before[group], "after": after[group]} for group in before}
    return {"label": run.label, "seed": run.seed, "draws": run.summary.get("draws"), "groups": groups}


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each run and group of texts."""
    lines = ["| method | seed | texts | before | after |", "|---|---|---|---|---|"]
    for row in rows:
        for group, loss in row["groups"].items():
            lines.append(f"| {row['label']} | {row['seed']} | {group} | {loss['before']:.3f} | {loss['after']:.3f} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    """Train what is left, measure, write the results file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["t5", "ntp"])
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--train", type=int, default=97, help="training sequences; 97 hold one window of the preset")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a core each")
    parser.add_argument("--runs", type=Path, default=Path("runs/nano-reuse"))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(given)
    overrides = [f"text.sequences.train={asked.train}", *asked.overrides]
    runs = compare(["nano"], asked.methods, list(range(asked.seeds)), overrides, asked.runs, jobs=asked.jobs)[1]
    config = Config.load("nano", overrides=overrides)
    loaded = load_model(config.model.name, device="cpu", dtype=torch.float32)
    corpus = corpus_of(config, loaded=loaded)
    before = losses(ThoughtModel(loaded.model, loaded.tokenizer, config.thought), corpus)
    rows = [measured(run, corpus, before) for run in done(runs)]
    write_json(asked.out, {"command": "python studies/nano/reuse.py", "train": asked.train, "runs": rows})
    print(table(rows))
    return 0


if __name__ == "__main__":
    script(main)
