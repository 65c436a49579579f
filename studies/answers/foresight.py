"""What a critic can know: how much of a thought's return is foreseen, from which activations and how many thoughts.

    python studies/answers/foresight.py models/careful --out runs/answers-study/foresight-careful.json

Thoughts are drawn at positions of the training texts, several at each, and scored. A value that is linear in the
model's own activations (ridge regression, its strength chosen on other problems) and a small network on the same inputs
are fitted to the shaped return of whole thoughts at every token, and tested on problems that took part in neither: R²
over all tokens, at the first and the last, and within positions at the last, where only the difference between
thoughts of one position counts. `left_out` is what knowing how many lines are left out explains by itself. Rows with
`sees` = losses know the tokens' losses of the text that scores the thought as well (as `critic.sees` = continuation
does), those with `losses and state` the scorer's state at its end too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from headroom import left_out, workings_file
from torch import Tensor, nn
from torch.nn import functional as F

from tfive.cli.options import script
from tfive.config.config import Config
from tfive.inference.thought_model import plan_for
from tfive.models.load import load_model
from tfive.rl.sampling import micro_batches, sample, scoring_features
from tfive.rl.trajectory import last_loss
from tfive.training.corpus import corpus_of
from tfive.training.devices import place
from tfive.tree.forward import TreeModel
from tfive.tree.layout import TextBatch, Thoughts

PRESET = Path(__file__).with_name("answers.toml")
STRENGTHS = (1e1, 1e2, 1e3, 1e4, 1e5, 1e6)
BUDGETS = (512, 1024, 2048)
PASSES = (2, 6, 20)
WIDTH = 256
Value = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Drawn:
    """Thoughts of some sheets, what each gained and its shaped return (eq:dense-reward, at these thoughts' scale)."""

    texts: TextBatch
    thoughts: Thoughts
    many: int
    gain_BR: Tensor
    return_BR: Tensor
    scoring_BRF: Tensor
    """What the scorer knows of the continuation: its state, the tokens' losses without a thought, and their mean."""


@torch.no_grad()
def draw(engine: TreeModel, texts: TextBatch, config: Config, rows: int) -> Drawn:
    """Thoughts at every position, as many as the plan's group, and what they are worth."""
    law, seed = config.sampling, config.run.seed
    thoughts = sample(engine, texts, law, seed=seed, role="headroom", window=0, rows=rows, record_old=False).thoughts
    found, known = [], []
    for part in micro_batches(slice(0, len(texts.tokens_BS)), rows):
        some = texts.rows(part.start, part.stop), thoughts.rows(part.start, part.stop)
        scores = engine.score(*some, features=True, whole=True)
        known.append(scoring_features(scores))
        found.append(scores.no_thought_BR.float() - last_loss(scores.losses_BRK, scores.mask_BRK).float())
    gain_BR = torch.cat(found) * thoughts.valid_BR
    scale, clip = gain_BR[thoughts.valid_BR].square().mean().sqrt(), config.reward.clip
    shaped_BR = (gain_BR / scale).clamp(-clip, clip)
    return Drawn(texts, thoughts, engine.plan.group, gain_BR, shaped_BR, torch.cat(known))


@torch.no_grad()
def activations(engine: TreeModel, drawn: Drawn, block: int, rows: int) -> Tensor:
    """`[B, R, T, D]` before each action, normalised: what enters a block, or the final states behind the last one."""
    found = []
    for part in micro_batches(slice(0, len(drawn.texts.tokens_BS)), rows):
        some = drawn.texts.rows(part.start, part.stop), drawn.thoughts.rows(part.start, part.stop)
        last = block == engine.block_count
        found.append(engine.features(*some) if last else engine.states(*some, engine.lower(*some, block)))
    return F.layer_norm(torch.cat(found).float(), found[0].shape[-1:]).half()


class Fitting:
    """Inputs and returns of every token: normalised activations, the step in steps of eight, a constant; and what is
    seen of the continuation, `[B, R, C]`."""

    def __init__(self, states_BRTD: Tensor, drawn: Drawn, seen_BRC: Tensor | None = None) -> None:
        self.states_BRTD, self.drawn, self.mask_BRT, self.seen_BRC = (
            states_BRTD,
            drawn,
            drawn.thoughts.mask_BRT,
            seen_BRC,
        )
        self.return_BRT = drawn.return_BR[..., None].expand(self.mask_BRT.shape)

    def inputs(self, keep_BRT: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Those of the kept tokens of some sheets."""
        steps = keep_BRT.shape[-1]
        step_BRT = torch.arange(steps, device=keep_BRT.device).expand(keep_BRT.shape)
        place = F.one_hot(step_BRT[keep_BRT] // 8, (steps + 7) // 8).float()
        parts = [self.states_BRTD[rows][keep_BRT].float(), place, torch.ones_like(place[:, :1])]
        if self.seen_BRC is not None:
            seen_BRC = self.seen_BRC[rows]
            parts.append(seen_BRC[:, :, None].expand(*keep_BRT.shape, -1)[keep_BRT])
        return torch.cat(parts, 1)

    def of(self, chosen_BR: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and returns of every token of the chosen thoughts."""
        keep_BRT = self.mask_BRT & chosen_BR[..., None]
        return self.inputs(keep_BRT), self.return_BRT[keep_BRT]

    def ridge(self, train_BR: Tensor, tune_BR: Tensor) -> tuple[Value, str]:
        """The best linear value of the training thoughts, its strength chosen on the tuning ones."""
        inputs, returns = self.of(train_BR)
        others, expected = self.of(tune_BR)
        exact = inputs.double()
        square, product = exact.T @ exact, exact.T @ returns.double()
        found = []
        for strength in STRENGTHS:
            damped = square + strength * torch.eye(len(square), device=square.device, dtype=square.dtype)
            weights = torch.linalg.solve(damped, product).float()
            found.append((float((others @ weights - expected).square().mean()), strength, weights))
        _, strength, best = min(found, key=lambda one: one[0])
        return lambda given: given @ best, f"ridge {strength:g}"

    def network(self, train_BR: Tensor, passes: int) -> tuple[Value, str]:
        """A head like a critic's, fitted in minibatches of an eighth of the tokens."""
        torch.manual_seed(0)
        inputs, returns = self.of(train_BR)
        head = nn.Sequential(nn.Linear(inputs.shape[1], WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)).to(inputs.device)
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
        for _ in range(passes):
            for part in torch.randperm(len(inputs), device=inputs.device).chunk(8):
                optimizer.zero_grad()
                (head(inputs[part])[:, 0] - returns[part]).square().mean().backward()
                optimizer.step()
        return lambda given: head(given)[:, 0], f"network, {passes} passes"

    @torch.no_grad()
    def scores(self, test_BR: Tensor, value: Value) -> dict[str, float]:
        """R² of the values of other sheets' thoughts."""
        guess_BRT = torch.zeros(self.mask_BRT.shape, device=self.mask_BRT.device)
        for rows in test_BR.any(1).nonzero()[:, 0].split(32):
            keep = self.mask_BRT[rows]
            guess_BRT[rows] = guess_BRT[rows].masked_scatter(keep, value(self.inputs(keep, rows)))
        keep_BRT, truth_BR = self.mask_BRT & test_BR[..., None], self.drawn.return_BR
        last_BR1 = (self.drawn.thoughts.length_BR.clamp(min=1) - 1)[..., None]
        end_BR = guess_BRT.gather(-1, last_BR1)[..., 0]
        end, truth = (in_positions(one, test_BR, self.drawn.many) for one in (end_BR, truth_BR))
        return {
            "all": r_squared(guess_BRT[keep_BRT], self.return_BRT[keep_BRT]),
            "first": r_squared(guess_BRT[..., 0][test_BR], truth_BR[test_BR]),
            "last": r_squared(end_BR[test_BR], truth_BR[test_BR]),
            "within": r_squared(end - end.mean(-1, keepdim=True), truth - truth.mean(-1, keepdim=True)),
        }


def sights(drawn: Drawn, horizon: int) -> dict[str, Tensor | None]:
    """What values may see of the continuation: nothing, its losses without a thought, or the scorer's state too."""
    losses_BRN, state_BRD = drawn.scoring_BRF[..., -horizon - 1 :].float(), drawn.scoring_BRF[..., : -horizon - 1]
    whole_BRC = torch.cat([F.layer_norm(state_BRD.float(), state_BRD.shape[-1:]), losses_BRN], -1)
    return {"prefix": None, "losses": losses_BRN, "losses and state": whole_BRC}


def same_problems(sheets: Sequence[str], split_by: str | None) -> list[int]:
    """A number for each sheet, the same for sheets of the same problems: they come with other lines left out, and a
    value that was fitted to one of them knows the others' questions."""
    found: dict[str, int] = {}
    matches = [None if split_by is None else re.search(split_by, sheet) for sheet in sheets]
    keys = [sheet if match is None else match[1] for sheet, match in zip(sheets, matches)]
    return [found.setdefault(key, len(found)) for key in keys]


def in_positions(value_BR: Tensor, chosen_BR: Tensor, many: int) -> Tensor:
    """`[positions, many]`: the values of positions all of whose thoughts are chosen."""
    whole = chosen_BR.view(len(chosen_BR), -1, many).all(-1)
    return value_BR.view(len(value_BR), -1, many)[whole]


def r_squared(guess: Tensor, truth: Tensor) -> float:
    """One minus the share of the variance that is left."""
    return round(float(1 - (guess - truth).square().mean() / truth.var(correction=0)), 4)


def explained_by_kind(drawn: Drawn, kind_BR: Tensor, train_BR: Tensor, test_BR: Tensor) -> float:
    """R² of the mean return of thoughts with as many lines left out."""
    mean_BR = torch.zeros_like(drawn.return_BR)
    for kind in kind_BR.unique():
        chosen_BR = kind_BR == kind
        mean_BR[chosen_BR] = drawn.return_BR[chosen_BR & train_BR].mean()
    return r_squared(mean_BR[test_BR], drawn.return_BR[test_BR])


def foresight(config: Config, model: str, sheets: int, many: int) -> dict[str, Any]:
    """All numbers; a line for each is printed as it comes."""
    began = time.monotonic()
    placement = place(config.model.device, config.model.compute)
    placement.apply(config.run.seed)
    loaded = load_model(model, device=placement.device, dtype=placement.compute)
    corpus = corpus_of(config, loaded=loaded)
    texts = corpus.batch(corpus.sequences("train")[:sheets])
    with gzip.open(workings_file(config), "rt", encoding="utf-8") as file:
        known = left_out(texts, json.load(file), loaded.tokenizer.decode)
    kinds = ["", *sorted({one.missing for one in known.values()})]
    kind = [
        [kinds.index(known[item].missing) if item in known else 0 for item in row] for row in texts.items_BP.tolist()
    ]
    plan = replace(plan_for(config.thought, loaded.model, loaded.tokenizer), group=many)
    engine, rows = TreeModel(loaded.model, plan, config.engine.options()), max(1, config.run.rollout_texts // 16)
    drawn = draw(engine, texts.to(placement.device), config, rows)
    valid_BR = drawn.thoughts.valid_BR
    shown = [str(loaded.tokenizer.decode(row)) for row in texts.tokens_BS.tolist()]
    problems = same_problems(shown, config.text.sources[0].split_by)
    problem_B1 = torch.tensor(problems, device=valid_BR.device)[:, None]
    test_BR, tune_BR = valid_BR & (problem_B1 % 4 == 0), valid_BR & (problem_B1 % 8 == 1)
    train_BR = valid_BR & ~test_BR & ~tune_BR
    kind_BR = torch.tensor(kind, device=valid_BR.device).repeat_interleave(many, 1)
    within = in_positions(drawn.return_BR, valid_BR, many).var(-1).mean() / drawn.return_BR[valid_BR].var()
    found: dict[str, Any] = {
        "thoughts": int(valid_BR.sum()),
        "gain": round(float(drawn.gain_BR[valid_BR].mean()), 4),
        "left_out": explained_by_kind(drawn, kind_BR, train_BR, test_BR),
        "within_share": round(float(within), 4),
        "rows": [],
    }
    first = (train_BR & (torch.arange(valid_BR.shape[1], device=valid_BR.device) % many == 0)).flatten()
    budgets = [(first & (first.cumsum(0) <= count)).view(valid_BR.shape) for count in BUDGETS]
    depth = engine.block_count
    for block in sorted({max(1, part) for part in (depth // 3, depth // 2, 2 * depth // 3, depth - 4, depth)}):
        states = activations(engine, drawn, block, rows)
        for sees, seen_BRC in sights(drawn, engine.plan.horizon).items():
            fitting = Fitting(states, drawn, seen_BRC)
            for chosen_BR in (*budgets, train_BR):
                values = [fitting.ridge(chosen_BR, tune_BR)]
                if chosen_BR is budgets[-1] or chosen_BR is train_BR:
                    values += [fitting.network(chosen_BR, passes) for passes in PASSES]
                for value, how in values:
                    row = {"block": block, "sees": sees, "fitted": int(chosen_BR.sum()), "how": how}
                    row |= fitting.scores(test_BR, value)
                    found["rows"].append(row)
                    print(json.dumps(row), flush=True)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def main(given: list[str] | None = None) -> int:
    """Measure, print, and keep the result where a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--sheets", type=int, default=768)
    parser.add_argument("--many", type=int, default=4, help="thoughts a position")
    parser.add_argument("--out", type=Path, help="file for the result as well")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    asked = parser.parse_args(given)
    found = foresight(Config.load(str(PRESET), overrides=asked.overrides), asked.model, asked.sheets, asked.many)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(found) + "\n", "utf-8")
    print(json.dumps({name: value for name, value in found.items() if name != "rows"}))
    return 0


if __name__ == "__main__":
    script(main)
