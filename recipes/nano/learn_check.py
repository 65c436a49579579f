"""Can sampled thoughts become useful from this model? A small group-relative policy gradient, written as plainly as
possible.

    python recipes/nano/learn_check.py --model FOLDER --steps 40 [--group 8] [--places 32] [--rate 5e-5]

Not tfive's method: no critics, no windows, one row a thought. Advantage = gain − mean gain of the group (with
`--group 1`: of the step's places of the same kind); the policy gradient and a next-token term on the same texts in one
loss. It shows whether the world is learnable, and prints gains and controls on places of
unseen texts before and after.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import measure
import torch
from plain_thoughts import Law, Place, losses, sample
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def draw_places(pools: dict[str, list[Place]], shares: dict[str, float], count: int, rng: random.Random) -> list[Place]:
    kinds = rng.choices(list(shares), weights=list(shares.values()), k=count)
    return [rng.choice(pools[kind]) for kind in kinds]


def thought_log_probabilities(
    model: PreTrainedModel, places: list[Place], thoughts: list[list[int]], law: Law
) -> Tensor:
    """Sum of the log-probabilities of each thought's actions (a sampled close is one), under the sampling law."""
    rows, starts = [], []
    for place, thought in zip(places, thoughts, strict=True):
        actions = thought if len(thought) == law.longest else [*thought, law.close]
        rows.append([*place.before, law.open, *actions])
        starts.append(len(place.before) + 1)
    width = max(map(len, rows))
    device = next(model.parameters()).device
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
    logits[..., list(law.forbidden)] = -torch.inf
    chosen = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    index = torch.arange(1, width)[None]
    mask = (index >= torch.tensor(starts)[:, None]) & (index < torch.tensor([len(row) for row in rows])[:, None])
    mask = mask.to(device)
    return chosen.masked_fill(~mask, 0.0).sum(1)


def text_loss(model: PreTrainedModel, places: list[Place]) -> Tensor:
    """Next-token loss on the places' texts without thoughts."""
    rows = [[*place.before, *place.after] for place in places]
    width = max(map(len, rows))
    device = next(model.parameters()).device
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows], device=device)
    return model(input_ids=tokens, labels=labels, use_cache=False).loss


def advantages(gains: Tensor, places: list[Place], group: int) -> Tensor:
    if group > 1:
        by_place = gains.view(-1, group)
        return (by_place - by_place.mean(1, keepdim=True)).flatten() * group / (group - 1)
    kinds = [place.kind for place in places]
    means = {kind: gains[[k == kind for k in kinds]].mean() for kind in set(kinds)}
    return gains - torch.stack([means[kind] for kind in kinds])


def learn(args: argparse.Namespace) -> dict[str, object]:
    """Gains by kind before and after, and the mean over the mixture of places."""
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device).eval()
    law = measure.thought_law(tokenizer)
    held = measure.all_places(args.corpus, tokenizer, args.evaluate, args.seed)
    seen = measure.TEXTS_PER_PLACE * args.evaluate
    train = measure.all_places(args.corpus, tokenizer, args.pool, args.seed, skip=seen)
    pools: dict[str, list[Place]] = {}
    for place in train:
        pools.setdefault(place.kind, []).append(place)
    shares = measure.selected_shares(args.match, args.real)
    before = measure.measure(model, tokenizer, held, seed=1, selected=shares)
    rng, generator = random.Random(args.seed), torch.Generator().manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0)
    begun = time.perf_counter()
    for step in range(args.steps):
        places = [place for place in draw_places(pools, shares, args.places, rng) for _ in range(args.group)]
        thoughts = sample(model, places, law, generator)
        with torch.no_grad():
            gains = losses(model, places, None, law) - losses(model, places, thoughts, law)
        advantage = advantages(gains, places, args.group)
        advantage = (advantage / (advantage.std() + 1e-6)).clamp(-3, 3)
        actions = sum(min(law.longest, len(thought) + 1) for thought in thoughts)
        policy = -(advantage * thought_log_probabilities(model, places, thoughts, law)).sum() / actions
        loss = policy + args.anchor * text_loss(model, places[:: args.group])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 4 or step == args.steps - 1:
            print(f"step {step + 1}: mean gain {gains.mean():+.3f}, {time.perf_counter() - begun:.0f} s", flush=True)
    after = measure.measure(model, tokenizer, held, seed=1, selected=shares)
    measure.show(after)
    return {"shares": shares, "before": summary(before), "after": summary(after)}


def summary(table: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """The columns that tell learning, by kind of place and over the mixture."""
    columns = ("sampled", "content", "empty", "no-thought loss", "mean length", "share of true workings")
    return {kind: {column: row[column] for column in columns} for kind, row in table.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=measure.SHIPPED)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--corpus", type=Path, default=measure.SHIPPED / "corpus")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--places", type=int, default=32, help="places a step")
    parser.add_argument("--group", type=int, default=8, help="thoughts a place")
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--anchor", type=float, default=0.2, help="weight of the next-token loss")
    parser.add_argument("--match", type=float, default=measure.MATCH, help="share of places right before a result")
    parser.add_argument("--real", type=float, default=measure.REAL, help="share of real text among the other places")
    parser.add_argument("--pool", type=int, default=400, help="places of each kind to draw from")
    parser.add_argument("--evaluate", type=int, default=100, help="held-out places of each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(learn(args), indent=1))


if __name__ == "__main__":
    main()
