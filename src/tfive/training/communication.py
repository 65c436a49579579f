"""What the processes of a run send each other in a window, in bytes by collective, and how long that takes.

A window is counted whose critics qualify at their first test. Bytes are what one process hands to a collective; how
much of it passes a link follows from the collective (`Network.seconds`). Gradients and replayed trajectories are nearly
all of it; agreements, sums of losses and what only measures are left out. Held against a counted run in
`tests/distributed/test_communication.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfive.config.config import Config
from tfive.methods.spec import CRITIC_ROLES
from tfive.models.shape import ModelShape
from tfive.training.memory import LASTING, Estimate, Nodes, nodes_of, trained_by_critic

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"

FLOAT, LONG = 4, 8
"""Bytes of a float32 and of an int64."""


@dataclass(frozen=True)
class Layout:
    """How many processes work, on how many nodes, and over how many of them the actor's weights are spread."""

    processes: int
    nodes: int = 1
    shard: int = 1

    @property
    def a_node(self) -> int:
        """Processes of one node."""
        return self.processes // self.nodes


@dataclass(frozen=True)
class Exchange:
    """One kind of exchange: which collective, of what, how often in a window, bytes of one process each time."""

    collective: str
    what: str
    times: int
    bytes: int
    group: int
    """How many processes take part: neighbours, node by node."""
    copies: bool = False
    """Whether they are instead the holders of one shard, each on another node."""

    @property
    def total(self) -> int:
        """Bytes that one process hands over in a window."""
        return self.times * self.bytes


def exchanges(config: Config, shape: ModelShape, layout: Layout, compute: int) -> list[Exchange]:
    """Everything large that is exchanged in one window; `compute`: bytes of a weight of the compute copy."""
    if layout.processes == 1:
        return []
    found = _actor_gradients(config, shape, layout, compute) if config.spec.trains else []
    found += _critic_gradients(config, shape, layout)
    return [*found, *_trajectories(config, shape, layout, compute)]


def _actor_gradients(config: Config, shape: ModelShape, layout: Layout, compute: int) -> list[Exchange]:
    steps, whole = config.window.actor_steps, FLOAT * shape.parameters
    if layout.shard == 1:
        return [Exchange(ALL_REDUCE, "gradients of the actor", steps, whole, layout.processes)]
    part = math.ceil(shape.parameters / layout.shard)
    texts = _texts(config, "actor") / min(config.actor.minibatches, _texts(config, "actor"))
    passes = math.ceil(math.ceil(texts / layout.processes) / config.run.texts_per_pass)
    found = [
        Exchange(REDUCE_SCATTER, "gradients of the actor, every pass", steps * passes, whole, layout.shard),
        Exchange(ALL_GATHER, "weights of the actor, every step", steps, compute * part, layout.shard),
    ]
    if layout.shard < layout.processes:
        copies = layout.processes // layout.shard
        found.insert(1, Exchange(ALL_REDUCE, "the shards' gradients", steps * passes, FLOAT * part, copies, True))
    return found


def _critic_gradients(config: Config, shape: ModelShape, layout: Layout) -> list[Exchange]:
    """Critics are whole on every process. The passes of the value heads alone, at a run's start, send less."""
    count = config.spec.critics
    if not count:
        return []
    steps = config.critic.passes * min(config.critic.minibatches, _texts(config, "critic_fit"))
    size = FLOAT * trained_by_critic(config, shape)
    return [Exchange(ALL_REDUCE, "gradients of the critics", count * steps, size, layout.processes)]


def _trajectories(config: Config, shape: ModelShape, layout: Layout, compute: int) -> list[Exchange]:
    """Thoughts of every role with their losses; values and features by the critics; the states calibration reads."""
    spec, nodes = config.spec, nodes_of(config)
    drawn = [role for role in spec.roles_of(config) if role != "probe"] if spec.thinks else []

    def rows(role: str) -> int:
        return math.ceil(_texts(config, role) / layout.processes) * nodes.R

    def gathered(what: str, roles: Sequence[str], size: Callable[[str], int]) -> Exchange:
        return Exchange(ALL_GATHER, what, 1, sum(rows(role) * size(role) for role in roles), layout.processes)

    found = [gathered("thoughts and their losses", drawn, lambda role: _thought(config, nodes, role))]
    read = [role for role in CRITIC_ROLES if role in drawn and spec.critics]
    if read:
        width = config.critic.width or 1
        found.append(
            gathered("values and features of the critics", read, lambda _: spec.critics * nodes.T * (1 + width) * FLOAT)
        )
    kept = [role for role in ("head_train", "head_validate", "actor") if role in drawn and "calibration" in spec.uses]
    if kept:
        states = nodes.T * shape.hidden * compute + (shape.hidden + nodes.H + 1) * FLOAT
        found.append(gathered("states that calibration reads", kept, lambda _: states))
    return found


def _thought(config: Config, nodes: Nodes, role: str) -> int:
    """Bytes of one thought (`Trajectories`): tokens, log q and perhaps log π_old; length, two flags; losses."""
    drawn = nodes.T * (LONG + FLOAT) + LONG + 2
    scored = FLOAT + nodes.K * (FLOAT + LONG + 1) if role != "scale" else 0
    recorded = nodes.T * FLOAT if role in config.spec.recorded else 0
    return drawn + scored + recorded


def _texts(config: Config, role: str) -> int:
    """Rows of a role's set: one text has several positions."""
    return math.ceil(config.window.count(role) / config.text.positions.per_text)


@dataclass(frozen=True)
class Network:
    """Bytes a second: of one GPU to the others of its node, and of a node to the others, one way each."""

    inside: float = 450e9
    """NVLink of the fourth generation: 900 GB/s a GPU, both ways together."""
    between: float = 50e9
    """One link of 400 Gb/s a node."""

    def seconds(self, exchange: Exchange, layout: Layout) -> float:
        """The time of all exchanges of one kind by rings, without latency and without anything computed meanwhile.

        Across nodes, the processes of a node share its link; a sum goes around inside the node first.
        """
        sums = 2 if exchange.collective == ALL_REDUCE else 1
        # All-gather is counted by a process's own part, the others by the whole that they add up.
        whole = exchange.total * (exchange.group if exchange.collective == ALL_GATHER else 1)
        if exchange.copies and layout.nodes > 1:
            # Every process of a node sends its own shard at the same time.
            return sums * whole * layout.a_node * _passed(exchange.group) / self.between
        near, nodes = min(exchange.group, layout.a_node), math.ceil(exchange.group / layout.a_node)
        return sums * whole * (_passed(near) / self.inside + _passed(nodes) / self.between)


def _passed(members: int) -> float:
    """The part of the whole that passes each member of a ring once around."""
    return (members - 1) / members


def communication_seconds(found: list[Exchange], layout: Layout, network: Network) -> float:
    """Seconds of one window in which processes only exchange."""
    return sum(network.seconds(exchange, layout) for exchange in found)


def bytes_per_rank(table: Estimate, shape: ModelShape, layout: Layout, compute: int) -> int:
    """Bytes of one process: everything as in a run of one, except that the actor's master weights, moments and
    gradients are spread over the processes of a shard, beside one whole compute copy."""
    if layout.shard == 1:
        return table.total
    actor = next(row for row in table.rows if row.role == "actor")
    held = sum(actor.bytes[column] for column in LASTING)
    spread = math.ceil((FLOAT + 2 * FLOAT + FLOAT) * shape.parameters / layout.shard)
    return table.total - held + compute * shape.parameters + spread
