"""Bytes that a process holds, and bytes by collective of one update, of weights in shards over 1, 2, 4, … processes.

    python benchmarks/shards.py --processes 1 2 4

trains a made-up model for two updates in each number of processes, the second under torch's profiler, and prints a
JSON document a line. `held` are the live tensors that training keeps (master weights, moments, gradients), `whole` the
copy that samples and scores. `peak` is the most that was allocated in that update above what was live before it: the
blocks in use, activations, and what is being sent. `sent` counts the collectives in the profiler's trace, by the bytes
that the process hands over; `expected` is what the shapes say. In a world of one nothing is sent, and the losses are
those of a model that is not sharded (`same_loss`; `apart` is their largest relative difference). With `--device cuda`
processes have a GPU each over NCCL, or share what there is over gloo; `peak` is then the device's.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import socket
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from tfive.distributed.shards import Shards, shard_mesh
from tfive.rl.optimizer import MasterOptimizer
from tfive.rl.weight_slots import wide
from tfive.tree.forward import TreeModel
from tfive.tree.grow import full_thoughts
from tfive.tree.layout import TextBatch, ThoughtPlan
from tfive.tree.settings import EngineSettings

OPERATIONS = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
}
"""What the profiler calls the collectives that are counted."""

SENT = {"c10d::_allgather_base_": 1, "c10d::_reduce_scatter_base_": 1, "c10d::allreduce_": 0}
"""Which of an operation's tensors the process hands over."""

WIDTHS = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}
PLAN = ThoughtPlan(length=4, checkpoints=(2, 4), horizon=4, open_ids=(3,), close_ids=(4,), variable_length=False)


def model_of(asked: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=asked.vocabulary, hidden_size=asked.width, intermediate_size=3 * asked.width,
        num_hidden_layers=asked.blocks, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(shape).to(getattr(torch, asked.compute)).eval().to(asked.device)


def engine_of(model: Any) -> TreeModel:
    """Both sides by the model's own blocks: fused ones, which shards do without, round elsewhere."""
    return TreeModel(model, PLAN, EngineSettings(fast="off").options())


def texts_of(asked: argparse.Namespace, number: int) -> TextBatch:
    """One made-up text a pass."""
    draw = torch.Generator().manual_seed(number)
    tokens_BS = torch.randint(5, asked.vocabulary, (1, 48), generator=draw)
    positions_BP = torch.tensor([[12, 30]])
    return TextBatch(tokens_BS, torch.zeros_like(tokens_BS), positions_BP, torch.arange(2)[None]).to(asked.device)


class Side:
    """A model in training: in shards, or whole."""

    def __init__(self, asked: argparse.Namespace, shards: Shards | None, model: Any) -> None:
        self.asked, self.shards = asked, shards
        self.engine = engine_of(model if shards is None else shards.model)
        named = list(model.named_parameters()) if shards is None else shards.named_parameters()
        self.optimizer = MasterOptimizer(named, lr=1e-4, shards=shards)

    def update(self, first: int) -> float:
        """One update by this process's passes, its texts numbered from `first`; returns their loss."""
        total = 0.0
        for number in range(first, first + self.asked.passes):
            texts = texts_of(self.asked, number)
            thoughts = full_thoughts(texts, PLAN)

            def read(texts: TextBatch = texts, thoughts: Any = thoughts) -> Any:
                return self.engine.policy(texts, thoughts, text=True, continuations=True)

            output = read() if self.shards is None else self.shards.run(read)
            loss = -(output.need("log_prob_BRT").sum() + output.need("text_log_prob_BS").sum()) / 100
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        return total

    def held(self) -> dict[str, int]:
        """Bytes of the tensors that training keeps between updates, by their storages."""
        found: Counter[str] = Counter()
        for slot in self.optimizer._slots:
            found["masters"] += slot.weights.untyped_storage().nbytes()
            found["moments"] += sum(moment.untyped_storage().nbytes() for moment in (slot.moments or ())[:2])
        return dict(found)


def counted(trace: Path, summed: str) -> tuple[dict[str, dict[str, int]], int]:
    """Collectives and their bytes in a profiler's trace, and the most memory it saw allocated above its beginning."""
    sent: dict[str, Counter[str]] = {}
    allocated, most = 0, 0
    for event in json.loads(trace.read_text("utf-8"))["traceEvents"]:
        given, name = event.get("args", {}), event.get("name")
        if name == "[memory]":
            allocated += int(given["Bytes"])
            most = max(most, allocated)
        elif name in OPERATIONS:
            place = SENT[name]
            shape, kind = given["Input Dims"][place], given["Input type"][place]
            if kind == "TensorList":
                # A list has no types in the trace; what is summed over copies is summed in float32 or float64.
                shape, kind = shape[0], summed
            own = sent.setdefault(OPERATIONS[name], Counter())
            own["times"] += 1
            own["bytes"] += math.prod(shape) * WIDTHS[kind]
    return {name: dict(own) for name, own in sent.items()}, most


def expected(model: Any, blocks: int, ways: int, copies: int, passes: int) -> dict[str, dict[str, int]]:
    """Gathered once an update are the weights in compute precision, and the norm; gradients are summed in float32 (or
    float64) every pass. A process sends rows that fill its share, so a tensor counts for a multiple of `ways` rows."""
    found: dict[str, dict[str, int]] = {}
    if ways > 1:
        rows = [math.ceil(len(p) / ways) * ways * math.prod(p.shape[1:]) for p in model.parameters()]
        compute, summed = model.dtype.itemsize, wide(model.dtype).itemsize
        found["all-gather"] = {"times": blocks + 2, "bytes": sum(rows) // ways * compute + 8}
        found["reduce-scatter"] = {"times": passes * (blocks + 1), "bytes": passes * sum(rows) * summed}
        if copies > 1:
            found["all-reduce"] = {"times": passes * (blocks + 1), "bytes": passes * sum(rows) // ways * summed}
    return found


def placed(device: str, rank: int, size: int) -> tuple[str, str]:
    """The device of a process and what it exchanges by: a GPU of its own and NCCL, or a shared one and gloo, as NCCL
    refuses to have a device twice."""
    if device == "cpu":
        return device, "gloo"
    devices = torch.cuda.device_count()
    torch.cuda.set_device(rank % devices)
    return f"cuda:{rank % devices}", "nccl" if size <= devices else "gloo"


def work(rank: int, size: int, port: int, asked: argparse.Namespace, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    asked.device, backend = placed(asked.device, rank, size)
    dist.init_process_group(backend, rank=rank, world_size=size)
    model = model_of(asked)
    alone = Side(asked, None, copy.deepcopy(model).requires_grad_(True)) if size == 1 else None
    mesh = shard_mesh(asked.device.partition(":")[0], range(size), asked.shard)
    ways, on_gpu = mesh.size(-1), asked.device != "cpu"
    side = Side(asked, Shards(model, engine_of(model).backbone.block_names, mesh, trained_in=wide), model)
    losses = [side.update(rank * asked.passes)]
    held = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    trace = Path(folder) / f"trace-{size}-{rank}.json"
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as seen:
        losses.append(side.update(rank * asked.passes))
    seen.export_chrome_trace(str(trace))
    sent, peak = counted(trace, "double" if asked.compute == "float64" else "float")
    peak = torch.cuda.max_memory_allocated() - held if on_gpu else peak
    if rank == 0:
        said: dict[str, Any] = {"processes": size, "shard": ways, "device": asked.device, "compute": asked.compute}
        said |= {"backend": dist.get_backend(), **side.held()}
        said["whole"] = sum(parameter.nbytes for parameter in model.parameters())
        said |= {"peak": peak, "sent": sent, "passes": asked.passes}
        said["expected"] = expected(model, asked.blocks, ways, size // ways, asked.passes)
        if alone is not None:
            whole = [alone.update(0), alone.update(0)]
            said |= {"losses": losses, "same_loss": losses == whole}
            said["apart"] = max(abs(one - other) / abs(other) for one, other in zip(losses, whole))
        print(json.dumps(said), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--shard", type=int, default=0, help="processes that share one copy; 0: all")
    parser.add_argument("--passes", type=int, default=2, help="passes of a process in an update")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--compute", choices=("float32", "bfloat16", "float64"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for size in asked.processes:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            mp.spawn(work, (size, port, asked, folder), nprocs=size)


if __name__ == "__main__":
    main()
