"""The start of the study's cells in one go: the warm start, then careful reading, nothing written in between.

    python studies/answers/start.py models/qwen2.5-coder-0.5b sheets models/careful

The weights are those of `warm_start.py` and `careful.py` one after the other. `--warm FOLDER` writes the model between
the two as well; gains before and after careful reading are measured and printed only with `--measure`. With `--steps 0
--set warmstart.source=hindsight --set warmstart.path=none` no working stands where a thought would: the model learns of
its own thoughts those that help, round by round, on the sheets of the runs; with `--by-luck` as many that are drawn by
lot among all, in the same updates, which tells what the choice is worth.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from careful import read, reading_config
from torch import Tensor
from warm_start import options, warm

from tfive import rng
from tfive.cli.options import script
from tfive.errors import UserError
from tfive.models.load import save_model
from tfive.rl.hindsight import chosen
from tfive.training.devices import place


class ByLuck:
    """As many positions as `chosen` takes, by lot among those with thoughts, and of each its first thought."""

    def __init__(self, seed: int) -> None:
        self.seed, self.round = seed, 0

    def __call__(
        self, own_BR: Tensor, other_BR: Tensor, none_BR: Tensor, valid_BR: Tensor, group: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The next round's choice."""
        count = int(chosen(own_BR, other_BR, none_BR, valid_BR, group)[2].sum())
        first_BP = valid_BR.unflatten(1, (-1, group))[..., 0]
        places = first_BP.flatten().nonzero()[:, 0].cpu()
        order = rng.permutation(self.seed, "warmstart/lot", self.round, len(places))
        taken_BP = torch.zeros(first_BP.numel(), dtype=torch.bool)
        taken_BP[places[torch.from_numpy(order)[:count]]] = True
        branch_BP = torch.arange(0, own_BR.shape[1], group, device=own_BR.device).expand(first_BP.shape)
        gain_BP = other_BR.unflatten(1, (-1, group)).mean(-1) - own_BR.gather(1, branch_BP)
        self.round += 1
        return branch_BP, gain_BP, taken_BP.view(first_BP.shape).to(own_BR.device)


def main(given: list[str] | None = None) -> int:
    """Learn to write and to read, and write the model as a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options(parser)
    parser.add_argument("--warm", type=Path, help="folder for the model before careful reading, too")
    parser.add_argument("--reading", type=int, default=100, help="updates of careful reading")
    parser.add_argument("--reading-rate", type=float, default=1e-5)
    parser.add_argument("--measure", action="store_true", help="gains on the development texts before and after it")
    parser.add_argument("--by-luck", action="store_true", help="hindsight: learn as many thoughts drawn by lot")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    asked = parser.parse_args(given)
    config = reading_config(asked.reading, asked.reading_rate, asked.overrides)
    for folder in (asked.out, asked.warm):
        if folder is not None and folder.exists():
            raise UserError(f"{folder} already exists; choose another folder, or remove it")
    loaded = warm(asked)
    if asked.warm is not None:
        save_model(loaded.model, loaded.tokenizer, asked.warm)
    placement = place(config.model.device, config.model.compute)
    placement.apply(config.run.seed)
    model: Any = loaded.model
    model.to(placement.device)
    for weight in model.parameters():
        # Weights alone, as loading does: what else a model holds, such as its rotations, stays as exact as it was.
        weight.data = weight.data.to(placement.compute)
    lot = ByLuck(config.run.seed) if asked.by_luck else None
    print(
        json.dumps(read(config, loaded, measured=asked.measure, choose=lot)),
        flush=True,
    )
    save_model(loaded.model, loaded.tokenizer, asked.out)
    return 0


if __name__ == "__main__":
    script(main)
