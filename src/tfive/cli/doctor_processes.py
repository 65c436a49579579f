"""What `tfive doctor --processes N` adds: memory of each process, what they exchange, and how long a step takes."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from tfive.config.config import Config
from tfive.distributed.roles import rank_duties
from tfive.models.shape import ModelShape
from tfive.training.communication import GPU, MEMORY, Layout, Network, Prediction, predicted
from tfive.training.memory import estimate, readable_bytes
from tfive.training.memory_limits import copies_shown
from tfive.training.processes import require_possible
from tfive.training.remedies import fewer_copies, smaller_passes, smaller_weights
from tfive.training.save_memory import checkpoint_bytes

A_NODE = 8
"""GPUs of a node."""


def processes_facts(config: Config, shape: ModelShape, processes: int, memory: int = MEMORY) -> dict[str, Any]:
    """The prediction for so many GPUs with so much memory each, eight a node."""
    require_possible(config, processes)
    nodes = math.ceil(processes / A_NODE)
    if processes % nodes:
        nodes = processes // math.gcd(processes, A_NODE)
    network = Network()
    found = predicted(config, shape, Layout.of(config, processes, nodes), network)
    host = checkpoint_bytes(estimate(config, shape, on_gpu=True), config, shape) // processes
    return {
        "processes": processes,
        "nodes": nodes,
        "profile": config.distributed.profile,
        "shard": found.layout.shard,
        "bytes": found.bytes,
        "bytes_by_role": found.by_role,
        "whole_copies": found.copies,
        "memory": memory,
        "fits": found.bytes <= memory,
        "duties": _duties(config, processes),
        "checkpoint_host_bytes": host,
        "exchanges": [{**asdict(one), "total": one.total} for one in found.exchanges],
        "seconds": {"computing": found.computing, "exchanging": found.exchanging, "step": found.step},
        "steps": found.steps,
        "assumed": {"operations": GPU, **asdict(network)},
        "shown": [*_shown(config, found, network, host), _verdict(config, found, memory)],
    }


def _duties(config: Config, processes: int) -> list[str]:
    return rank_duties(config.distributed.profile, processes, config.spec.critics)


def _bytes_shown(found: Prediction) -> str:
    shown = []
    for role, size in found.by_role.items():
        whose = "each" if role == "all" else f"for each of the {role}'s"
        whole = sum(found.copies[role].values())
        shown.append(f"{readable_bytes(size)} {whose} ({readable_bytes(whole)} in whole copies)")
    return ", ".join(shown)


def _verdict(config: Config, found: Prediction, memory: int) -> str:
    """Whether a process's part fits on its GPU, and if not, whether shards could help."""
    gpu = f"GPUs of {readable_bytes(memory)}"
    if found.bytes <= memory:
        return f"fits on {gpu}"
    copies = max(found.copies.values(), key=lambda one: sum(one.values()))
    remedies = fewer_copies(config, found.layout.processes, copies, memory)
    if sum(copies.values()) > memory:
        return (
            f"does not fit on {gpu}, and no shard makes it fit: whole copies take {copies_shown(copies)} of a process; "
            f"{' or '.join(remedies)}"
        )
    shards = ["use distributed.shard = 0"] if found.layout.shard == 1 else []
    remedies = [*shards, *remedies, *smaller_weights(config), *smaller_passes(config)]
    return f"does not fit on {gpu}; {' or '.join(dict.fromkeys(remedies))}"


def _shown(config: Config, found: Prediction, network: Network, host: int) -> list[str]:
    """The same for a person."""
    layout = found.layout
    shards = f"shards over {layout.shard}" if layout.shard > 1 else "all weights on each"
    lines = [
        f"{layout.processes} processes on {layout.nodes} node{'s' * (layout.nodes > 1)}, distributed.profile = "
        f"{config.distributed.profile}, {shards}: {_bytes_shown(found)}, and {readable_bytes(host)} of host memory "
        "while a checkpoint is written",
        *(f"  {line}" for line in _duties(config, layout.processes)),
        "what one process hands over in a window:",
    ]
    lines += [
        f"  {one.collective:<15}{one.what:<38}{one.times:>5} × {readable_bytes(one.bytes):>11}, {one.group} take part"
        for one in found.exchanges
    ]
    lines.append(
        f"a window: {found.computing:.1f} s computing + {found.exchanging:.1f} s exchanging; {found.step:.2f} s for "
        f"each of {found.steps} steps of the actor"
    )
    lines.append(
        f"assumed: GPUs of {GPU / 1e12:.0f} Tflop/s, {network.inside / 1e9:.0f} GB/s each way between those of a node, "
        f"{network.between * 8 / 1e9:.0f} Gb/s between nodes, nothing exchanged while computing; good to a factor of "
        "two"
    )
    return lines
