"""Pre-train the nano model: a small Llama-shaped decoder on the streams of `asides.py`.

    python recipes/nano/train_model.py --text WORK --out WORK/model                      # a GPU: a minute or two
    python recipes/nano/train_model.py --text WORK --out WORK/smoke --smoke              # CPU, seconds: same path, tiny

Weights and moments are float32, matrix products bf16 (autocast) on a GPU. The streams are made by worker processes
while the model trains; shard k does not depend on who makes it. The saved weights are bf16 safetensors.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import asides
import numpy as np
import torch
from muon import MuonWithAdamW
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
CONTEXT = 512
HELD_OUT = 96
_book: asides.Book | None = None


def read_texts(path: Path, limit: int | None = None) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for _, line in zip(range(limit or 10**9), lines)]


def _shard(shard: int, seed: int, tokens: int) -> asides.Tokens:
    assert _book is not None
    return asides.make_shard(seed, shard, tokens, _book)


def shards(count: int, seed: int, tokens: int, workers: int) -> Iterator[asides.Tokens]:
    """Shards 0 … count−1 in order, made ahead by `workers` forked processes (0: made here)."""
    make = partial(_shard, seed=seed, tokens=tokens)
    if workers == 0:
        yield from map(make, range(count))
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(make, range(count))


def build_model(vocabulary: int, end: int, seed: int, shape: dict[str, int]) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(shape)
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        initializer_range=0.02,
        attention_dropout=0.0,
        **sizes,
    )
    return LlamaForCausalLM(config)


def hidden_states(model: LlamaForCausalLM, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """The decoder's output over whole rows, as the stock forward gives it, with activations in `dtype`.

    Written out for speed: float32 weights are cast where they are used, projections are joined, norms are fused, and
    the host is never waited for. A test holds it to the stock forward.
    """
    config: Any = model.config
    decoder = model.model
    rows, length = tokens.shape
    heads, shared, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden = functional.embedding(tokens, decoder.embed_tokens.weight).to(dtype)
    position_ids = torch.arange(length, device=tokens.device)[None]
    cos, sin = (part[:, :, None] for part in decoder.rotary_emb(hidden, position_ids=position_ids))
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        seen = _norm(hidden, layer.input_layernorm.weight, config.rms_norm_eps)
        joint = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).to(dtype)
        together = functional.linear(seen, joint).view(rows, length, heads + 2 * shared, size)
        turning, value = together.split([heads + shared, shared], dim=2)
        first, second = turning.chunk(2, dim=-1)
        turned = turning * cos + torch.cat([-second, first], dim=-1) * sin
        query, key = turned.split([heads, shared], dim=2)
        key, value = (x.repeat_interleave(heads // shared, dim=2) for x in (key, value))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(rows, length, heads * size)
        hidden = hidden + functional.linear(mixed, attention.o_proj.weight.to(dtype))
        seen = _norm(hidden, layer.post_attention_layernorm.weight, config.rms_norm_eps)
        joint = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype)
        gate, up = functional.linear(seen, joint).chunk(2, dim=-1)
        hidden = hidden + functional.linear(functional.silu(gate) * up, mlp.down_proj.weight.to(dtype))
    return _norm(hidden, decoder.norm.weight, config.rms_norm_eps)


def _norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(hidden, (hidden.shape[-1],), weight.to(hidden.dtype), eps)


def stream_loss(model: LlamaForCausalLM, rows: Tensor) -> Tensor:
    """Mean next-token loss over the targets that are not silent; activations are bf16 on a GPU."""
    dtype = torch.bfloat16 if rows.is_cuda else torch.float32
    tokens = rows & (asides.SILENT - 1)
    targets = torch.where(rows >= asides.SILENT, -100, tokens)[:, 1:]
    hidden = hidden_states(model, tokens[:, :-1], dtype)
    logits = functional.linear(hidden, model.lm_head.weight.to(dtype)).float()
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-100)


def learning_rate(progress: float, peak: float) -> float:
    """Short warm-up, then a half cosine down to a hundredth of the peak."""
    return peak * min(1.0, progress / 0.02 + 0.01) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train_step(model: LlamaForCausalLM, optimizer: MuonWithAdamW, rows: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = stream_loss(model, rows)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def plain_loss(model: LlamaForCausalLM, texts: list[list[int]], end: int) -> float:
    """Next-token loss on plain texts, one text a row."""
    device = next(model.parameters()).device
    width = max(map(len, texts))
    rows = torch.tensor([text + [end | asides.SILENT] * (width - len(text)) for text in texts], device=device)
    return stream_loss(model, rows).item()


def held_out_texts(folder: Path, tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """The first texts of either corpus file; the model is trained on none of them."""
    files = {name: folder / "corpus" / f"{name}.jsonl.gz" for name in ("real", "worked")}
    return {
        name: [tokenizer.encode(text).ids[:CONTEXT] for text in read_texts(path, HELD_OUT)]
        for name, path in files.items()
    }


def batches(args: argparse.Namespace, fresh: Iterator[asides.Tokens]) -> Iterator[Tensor]:
    """`args.steps` batches of rows: the shards as they come, then the same rows again in another order, pass after
    pass.
    """
    kept: list[Tensor] = []
    done = 0
    for shard in fresh:
        rows = torch.from_numpy(shard.astype(np.int32)).to(args.device).view(-1, CONTEXT)
        kept.append(rows)
        for batch in rows.split(args.rows)[: args.steps - done]:
            yield batch
            done += 1
    every = torch.cat(kept)
    order = torch.Generator().manual_seed(args.seed)
    while done < args.steps:
        shuffled = torch.randperm(len(every), generator=order).to(args.device)
        for chosen in shuffled.split(args.rows)[: args.steps - done]:
            yield every[chosen]
            done += 1


def train(args: argparse.Namespace) -> dict[str, float]:
    """The trained model in `args.out`; returns the figures of the run."""
    global _book
    started = time.perf_counter()
    tokenizer = Tokenizer.from_file(str(args.text / "tokenizer" / "tokenizer.json"))
    stored = np.load(args.text / "pretrain_tokens.npz")
    _book = asides.Book(tokenizer, np.split(stored["tokens"], np.cumsum(stored["lengths"])[:-1]))
    held = held_out_texts(args.text, tokenizer)
    unique = math.ceil(args.steps / args.passes)
    per_shard = min(unique, 16)
    fresh = shards(math.ceil(unique / per_shard), args.seed, per_shard * args.rows * CONTEXT, args.workers)
    first = next(fresh)  # forks the workers before CUDA starts in this process
    model = build_model(tokenizer.get_vocab_size(), _book.end, args.seed, args.shape).to(args.device)
    lr = torch.zeros((), device=args.device)
    optimizer = MuonWithAdamW(model, lr)
    log = {"parameters": sum(p.numel() for p in model.parameters()), "real_tokens": float(_book.weights[-1])}
    begun, taken = time.perf_counter(), 0
    for done, batch in enumerate(batches(args, chain([first], fresh))):
        progress = max(done / args.steps, (time.perf_counter() - begun) / args.seconds)
        if progress >= 1:
            break
        lr.fill_(learning_rate(progress, args.rate))
        loss = train_step(model, optimizer, batch.long())
        taken += 1
        if taken % max(1, args.steps // args.reports) == 0:
            losses = {name: plain_loss(model, texts, _book.end) for name, texts in held.items()}
            log |= {"stream_loss": loss.item(), **{f"{name}_loss": value for name, value in losses.items()}}
            shown = " ".join(f"{name} {value:.3f}" for name, value in log.items() if name.endswith("loss"))
            print(f"step {taken}/{args.steps} {time.perf_counter() - begun:.0f} s: {shown}", flush=True)
    log |= {"steps": taken, "tokens": taken * args.rows * CONTEXT, "train_s": time.perf_counter() - begun}
    model.to(torch.bfloat16).save_pretrained(args.out)
    log["total_s"] = time.perf_counter() - started
    names = ("steps", "rows", "rate", "passes", "seed", "shape")
    recipe = {name: getattr(args, name) for name in names}
    text = {
        name.lower(): getattr(asides, name) for name in ("RECKONED", "AT_RESULTS", "ANYWHERE", "SHARES", "DENSITIES")
    }
    (args.out / "training.json").write_text(json.dumps({"recipe": recipe, "text": text, "log": log}, indent=1) + "\n")
    return log


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--text", type=Path, required=True, help="folder written by make_text.py and train_tokenizer.py"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="end sooner, the schedule fitted to the clock")
    parser.add_argument("--rows", type=int, default=128, help="rows of 512 tokens in a step")
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--passes", type=int, default=3, help="how often each row of the stream is used")
    parser.add_argument("--reports", type=int, default=12, help="how often the losses are shown")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--width", type=int, default=SHAPE["intermediate_size"], help="width of the feed-forward part")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--smoke", action="store_true", help="a few steps of a very small model, to try the path")
    args = parser.parse_args()
    args.shape = SHAPE | {"num_hidden_layers": args.layers, "intermediate_size": args.width}
    if args.smoke:
        args.steps, args.rows, args.workers, args.reports = 4, 2, 0, 1
        args.shape = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    return args


if __name__ == "__main__":
    print(json.dumps(train(parse()), indent=1))
