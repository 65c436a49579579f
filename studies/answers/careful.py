"""Careful reading: a warm-started model learns what follows its own thoughts, and goes on learning to write workings.

    python studies/answers/careful.py models/warm models/careful

These are the updates of `warmstart.reading`, done once for all cells, on the problems of the warm start. Gains on the
development texts before and after are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfive.cli.options import script
from tfive.config.config import Config
from tfive.inference.thought_model import plan_for
from tfive.models.load import Loaded, load_model, save_model
from tfive.rl.hindsight import Choice
from tfive.telemetry import Silent
from tfive.training.corpus import corpus_of
from tfive.training.devices import place
from tfive.training.warmstart import Teaching
from tfive.tree.forward import TreeModel

PRESET = Path(__file__).with_name("answers.toml")


def reading_config(steps: int, rate: float, overrides: Sequence[str]) -> Config:
    """The preset with so many updates of reading on the sheets of the warm start."""
    own = ["warmstart.source=given", "warmstart.path=sheets/warm.jsonl.gz", "warmstart.steps=1"]
    own += [f"warmstart.reading={steps}", f"warmstart.lr={rate}"]
    return Config.load(str(PRESET), overrides=[*own, *overrides])


def read(config: Config, loaded: Loaded, *, measured: bool = True, choose: Choice | None = None) -> dict[str, Any]:
    """Teach the model, whose weights are in float32 afterwards; what that came to, with gains on the development texts
    before and after where it is `measured`. With `warmstart.source = hindsight` it learns to write first, round by
    round, what `choose` takes of its thoughts."""
    model = loaded.model.requires_grad_(True)
    plan = replace(plan_for(config.thought, model, loaded.tokenizer), group=1)
    engine = TreeModel(model, plan, config.engine.options())
    began = time.monotonic()
    teaching = Teaching(config, loaded, corpus_of(config, loaded=loaded), engine, choose=choose)
    found: dict[str, Any] = {"before": teaching.measured()} if measured else {}
    if config.warmstart.source == "hindsight":
        rounds, found["rounds"] = range(teaching.rounds), []
        for number in rounds:
            found["rounds"].append({**teaching.round(number, Silent()), "learned": _learned(teaching, 6)})
    if config.warmstart.reading:
        found["reading"] = teaching.read(Silent())
    found |= {"after": teaching.measured()} if measured else {}
    exact = teaching.optimizer.masters()
    model.float()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(exact[name])
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def _learned(teaching: Teaching, count: int) -> list[str]:
    """The first thoughts that a round learned, as text, each with the tokens that follow it."""
    data, found = teaching.last, list[str]()
    if data is None:
        return found
    for row, slot in data.thoughts.valid_BR.nonzero()[:count].tolist():
        ids = data.thoughts.tokens_BRT[row, slot, : int(data.thoughts.length_BR[row, slot])].tolist()
        p = int(data.texts.positions_BP[row, slot])
        after = data.texts.tokens_BS[row, p + 1 : p + 1 + teaching.engine.plan.horizon].tolist()
        found.append(" → ".join(teaching.tokenizer.decode(one) for one in (ids, after)))
    return found


def main(given: list[str] | None = None) -> int:
    """Learn to read and write the model as a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="the folder that warm_start.py wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    asked = parser.parse_args(given)
    config = reading_config(asked.steps, asked.rate, asked.overrides)
    placement = place(config.model.device, config.model.compute)
    placement.apply(config.run.seed)
    loaded = load_model(asked.model, device=placement.device, dtype=placement.compute)
    print(json.dumps(read(config, loaded)), flush=True)
    save_model(loaded.model, loaded.tokenizer, asked.out)
    return 0


if __name__ == "__main__":
    script(main)
