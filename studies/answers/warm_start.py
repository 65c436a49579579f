"""A warm start by likelihood: workings of problems that no run sees, written where a thought would stand.

    python studies/answers/warm_start.py MODEL sheets models/warm

MODEL is a model folder or a .gguf file; weights are read in float32, and input and output embeddings that a file holds
at two precisions become one, the output's. At each position of sheets/warm.jsonl.gz the working that the sheet leaves
out follows, then the answer. The sheet itself is learned beside it, so that prediction without a thought does not get
worse; the opening never is. `--steps 0` only writes the model as a folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tfive.cli.options import script
from tfive.errors import UserError
from tfive.models.load import Loaded, load_model, save_model
from tfive.text.sheets import CLOSE, END, OPEN, prefixes
from tfive.tree.attention import without_cudnn

NOTHING, TEXT, THOUGHT, AFTER = 0, 1, 2, 3
"""What a token is when it is predicted: no target, sheet, working and its close, answer after it."""
WEIGHTS = {TEXT: 0.5, THOUGHT: 1.0, AFTER: 1.0}
Example = tuple[list[int], list[int]]


def examples(folder: Path, tokenizer: Any, longest: int) -> list[Example]:
    """Token ids and what each token is, one example a position, in a fixed random order."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    with gzip.open(folder / "workings.json.gz", "rt", encoding="utf-8") as file:
        workings = json.load(file)
    found: list[Example] = []
    with gzip.open(folder / "warm.jsonl.gz", "rt", encoding="utf-8") as rows:
        for before in (prefix for row in rows for prefix in prefixes(json.loads(row)["text"])):
            known = workings.get(before[before.rindex("Question: ") :])
            if known is None or len(thought := encode(f" {known['working']}{END}")) > longest:
                continue
            text, opening, after = encode(before), encode(OPEN), encode(f"{known['answer']}\n\n")
            thought += encode(CLOSE)
            kinds = [NOTHING] + [TEXT] * (len(text) - 1) + [NOTHING] * len(opening)
            kinds += [THOUGHT] * len(thought) + [AFTER] * len(after)
            found.append((text + opening + thought + after, kinds))
    if not found:
        raise UserError(f"{folder}: no working of at most {longest} tokens; render the sheets again")
    random.Random(0).shuffle(found)
    return found


def tied(model: PreTrainedModel) -> PreTrainedModel:
    """The model with one matrix for input and output embeddings, the output's."""
    if model.config.tie_word_embeddings:
        return model
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    state = model.state_dict()
    name = next(name for name, value in model.named_parameters() if value is embedding.weight)
    state[name] = head.weight.detach()
    model.config.tie_word_embeddings = True
    fresh: PreTrainedModel = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    fresh.load_state_dict(state)
    fresh.tie_weights()
    fresh.generation_config = model.generation_config
    return fresh


def counts(some: Sequence[Example]) -> dict[int, int]:
    """How many targets of every kind some examples have."""
    found = Counter(kind for _, kinds in some for kind in kinds[1:])
    return {kind: found[kind] for kind in WEIGHTS}


def losses(
    model: Any, some: Sequence[Example], pad: int, device: torch.device, among: dict[int, int]
) -> dict[int, Tensor]:
    """What some examples add to the mean loss of every kind of target `among` those of a batch."""
    size = max(len(ids) for ids, _ in some)
    ids_BS = torch.tensor([ids + [pad] * (size - len(ids)) for ids, _ in some], device=device)
    kind_BS = torch.tensor([kinds + [NOTHING] * (size - len(kinds)) for _, kinds in some], device=device)
    length_B1 = torch.tensor([[len(ids)] for ids, _ in some], device=device)
    mask_BS = (torch.arange(size, device=device) < length_B1).long()
    wanted_BS = kind_BS[:, 1:] > NOTHING
    # The model's own masked attention: by cuDNN its gradient can be no number where texts are of some lengths.
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"), without_cudnn():
        hidden_BSD = model.base_model(ids_BS, attention_mask=mask_BS).last_hidden_state
        logits = model.get_output_embeddings()(hidden_BSD[:, :-1][wanted_BS])
    loss = torch.nn.functional.cross_entropy(logits.float(), ids_BS[:, 1:][wanted_BS], reduction="none")
    return {kind: loss[kind_BS[:, 1:][wanted_BS] == kind].sum() / among[kind] for kind in WEIGHTS}


def learn(
    model: Any, data: Sequence[Example], pad: int, *, steps: int, batch: int, rate: float, passes: int = 1
) -> list[float]:
    """AdamW steps with a short warm-up and a linear decay to a tenth; returns every step's loss. A batch is read in so
    many passes."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.95))
    began, course = time.monotonic(), []
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 10) * (0.1 + 0.9 * (1 - step / steps))
        some = [data[(step * batch + i) % len(data)] for i in range(batch)]
        among, found = counts(some), dict.fromkeys(WEIGHTS, torch.zeros((), device=device))
        for share in range(min(passes, batch)):
            added = losses(model, some[share::passes], pad, device, among)
            torch.stack([WEIGHTS[kind] * added[kind] for kind in WEIGHTS]).sum().backward()
            found = {kind: found[kind] + added[kind].detach() for kind in WEIGHTS}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        course.append(float(sum(WEIGHTS[kind] * found[kind] for kind in WEIGHTS)))
        if step % 20 == 0 or step == steps - 1:
            text, thought, after = (float(found[kind]) for kind in WEIGHTS)
            shown = f"text {text:.3f}, working {thought:.3f}, answer after it {after:.3f}"
            print(f"step {step}: {shown}, {time.monotonic() - began:.0f} s", flush=True)
    model.eval()
    return course


def warm(asked: argparse.Namespace) -> Loaded:
    """The model in float32, with one matrix for its embeddings, after the steps asked for."""
    loaded = load_model(asked.model, dtype=torch.float32, device=asked.device)
    model: Any = tied(loaded.model)
    model.to(next(loaded.model.parameters()).device)
    if asked.steps > 0:
        data = examples(asked.sheets, loaded.tokenizer, asked.longest)
        print(f"{len(data)} workings of at most {asked.longest} tokens")
        pad = int(loaded.tokenizer.pad_token_id or 0)
        learn(model, data, pad, steps=asked.steps, batch=asked.batch, rate=asked.rate, passes=asked.passes)
    return replace(loaded, model=model)


def options(parser: argparse.ArgumentParser) -> None:
    """What the warm start is told."""
    parser.add_argument("model", help="a model folder or a .gguf file")
    parser.add_argument("sheets", type=Path, help="the folder that render.py wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--longest", type=int, default=62, help="most tokens of a working; with its close a thought")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--passes", type=int, default=1, help="in how many a batch is read; more need less memory")
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--device", help="CUDA where there is one, unless given")


def main(given: list[str] | None = None) -> int:
    """Learn the workings and write the model as a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options(parser)
    asked = parser.parse_args(given)
    loaded = warm(asked)
    save_model(loaded.model, loaded.tokenizer, asked.out)
    return 0


if __name__ == "__main__":
    script(main)
