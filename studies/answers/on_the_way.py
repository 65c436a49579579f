"""What a thought is worth on the way, and what that tells of its end.

    python studies/answers/on_the_way.py models/careful --set thought.checkpoints=[64] --out on-the-way.json

Several thoughts at each position are scored after every so many tokens, as if they were closed there, and at their end.
Of the thoughts that go on: how much of the final return is foreseen, on problems that took no part in the fit, by the
mean of the position's other thoughts, by what the thought is worth so far, and by both? Where both foresee no more than
the mean, neither rewards at checkpoints nor critics that see them can tell a thought that goes well from another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from foresight import PRESET, r_squared, same_problems
from torch import Tensor

from tfive.cli.options import script
from tfive.config.config import Config
from tfive.errors import UserError
from tfive.inference.thought_model import plan_for
from tfive.models.load import load_model
from tfive.rl.reward import final_gain, gains
from tfive.rl.sampling import micro_batches, sample
from tfive.rl.siblings import mean_of_others
from tfive.training.corpus import corpus_of
from tfive.training.devices import place
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch
from tfive_lab.study_files import software_versions, write_json

LEAST = 32
"""Thoughts of either half of the problems from which a fit is made."""


@dataclass(frozen=True)
class Worth:
    """Shaped returns (eq:dense-reward, in the scale of these thoughts) at every checkpoint and in the end."""

    so_far_BRK: Tensor
    checkpoint_BRK: Tensor
    mask_BRK: Tensor
    final_BR: Tensor
    valid_BR: Tensor
    length_BR: Tensor
    closed_BR: Tensor
    gain: float
    """Mean gain in the end, in nats a token."""


@torch.no_grad()
def drawn(engine: TreeModel, texts: TextBatch, config: Config, rows: int) -> Worth:
    """Thoughts at every position, as many as the plan's group, and what they are worth at every checkpoint."""
    law, seed = config.sampling, config.run.seed
    thoughts = sample(engine, texts, law, seed=seed, role="headroom", window=0, rows=rows, record_old=False).thoughts
    parts = []
    for part in micro_batches(slice(0, len(texts.tokens_BS)), rows):
        scores = engine.score(texts.rows(part.start, part.stop), thoughts.rows(part.start, part.stop))
        given = (scores.no_thought_BR.float(), scores.losses_BRK.float(), scores.mask_BRK)
        parts.append((gains(*given), scores.checkpoint_BRK, scores.mask_BRK, final_gain(*given)))
    gain_BRK, checkpoint_BRK, mask_BRK, final_BR = (torch.cat(some) for some in zip(*parts, strict=True))
    valid_BR, clip = thoughts.valid_BR, config.reward.clip
    scale = final_BR[valid_BR].square().mean().sqrt()
    shaped_BRK, shaped_BR = ((one / scale).clamp(-clip, clip) for one in (gain_BRK, final_BR))
    gain = float(final_BR[valid_BR].mean())
    ends = (thoughts.length_BR, thoughts.closed_BR)
    return Worth(shaped_BRK, checkpoint_BRK, mask_BRK, shaped_BR * valid_BR, valid_BR, *ends, gain)


def foreseen(columns: Sequence[Tensor], truth: Tensor, half: Tensor) -> tuple[float, list[float]]:
    """R² of a value that is linear in the columns, each half of the problems foreseen by what was fitted to the other,
    and the coefficients of the columns fitted to all."""
    inputs = torch.stack([torch.ones_like(truth), *columns], 1).double()
    guess = torch.zeros_like(truth, dtype=torch.float64)
    for one in (False, True):
        fitted = torch.linalg.lstsq(inputs[half == one], truth[half == one].double()).solution
        guess[half != one] = inputs[half != one] @ fitted
    whole = torch.linalg.lstsq(inputs, truth.double()).solution
    return r_squared(guess, truth.double()), [round(float(one), 3) for one in whole[1:]]


def by_step(worth: Worth, problem_B: Tensor, group: int) -> list[dict[str, Any]]:
    """A row for every step of a checkpoint at which enough thoughts go on."""
    mean_BR = mean_of_others(worth.final_BR, worth.valid_BR, group)
    half_BR = (problem_B[:, None] % 2 == 0).expand(worth.valid_BR.shape)
    rows = []
    for step in sorted(set(worth.checkpoint_BRK[worth.mask_BRK].tolist())):
        here_BRK = worth.mask_BRK & (worth.checkpoint_BRK == step)
        # Whoever only closes after this step has written all by now.
        written_BR = worth.length_BR - worth.closed_BR.long()
        chosen_BR = here_BRK.any(-1) & worth.valid_BR & (written_BR > step)
        half = half_BR[chosen_BR]
        if min(int(half.sum()), int((~half).sum())) < LEAST:
            continue
        so_far = (worth.so_far_BRK * here_BRK).sum(-1)[chosen_BR]
        mean, truth = mean_BR[chosen_BR], worth.final_BR[chosen_BR]
        both, slopes = foreseen([mean, so_far], truth, half)
        rows.append(
            {
                "step": step,
                "thoughts": len(truth),
                "worth so far": round(float(so_far.mean()), 3),
                "in the end": round(float(truth.mean()), 3),
                "by the others' mean": foreseen([mean], truth, half)[0],
                "by its worth so far": foreseen([so_far], truth, half)[0],
                "by both": both,
                "slopes of both": slopes,
            }
        )
    return rows


def on_the_way(config: Config, model: str, sheets: int, many: int, every: int) -> dict[str, Any]:
    """All numbers."""
    length = config.thought.length
    if every >= length:
        raise UserError(f"--every {every}: no step on the way of thought.length = {length}; give fewer tokens")
    placement = place(config.model.device, config.model.compute)
    placement.apply(config.run.seed)
    loaded = load_model(model, device=placement.device, dtype=placement.compute)
    corpus = corpus_of(config, loaded=loaded)
    texts = corpus.batch(corpus.sequences("train")[:sheets])
    steps = (*range(every, length, every), length)
    plan = replace(plan_for(config.thought, loaded.model, loaded.tokenizer), group=many, checkpoints=steps)
    engine, rows = TreeModel(loaded.model, plan, config.engine.options()), max(1, config.run.rollout_texts // 16)
    worth = drawn(engine, texts.to(placement.device), config, rows)
    shown = [str(loaded.tokenizer.decode(row)) for row in texts.tokens_BS.tolist()]
    problems = same_problems(shown, config.text.sources[0].split_by)
    return {
        "model": Path(model).name,
        "versions": software_versions(),
        "thoughts": int(worth.valid_BR.sum()),
        "gain": round(worth.gain, 4),
        "rows": by_step(worth, torch.tensor(problems, device=worth.valid_BR.device), many),
    }


def main(given: list[str] | None = None) -> int:
    """Measure, print, and keep the result where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--sheets", type=int, default=384)
    parser.add_argument("--many", type=int, default=8, help="thoughts a position")
    parser.add_argument("--every", type=int, default=16, help="tokens from one checkpoint to the next")
    parser.add_argument("--out", type=Path, help="file for the result as well")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    asked = parser.parse_args(given)
    if asked.many < 2 or asked.every < 1:
        raise UserError(f"--many {asked.many} --every {asked.every}: give at least 2 and 1")
    config = Config.load(str(PRESET), overrides=asked.overrides)
    found = on_the_way(config, asked.model, asked.sheets, asked.many, asked.every)
    for row in found["rows"]:
        print(json.dumps(row))
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(asked.out, found)
    return 0


if __name__ == "__main__":
    script(main)
