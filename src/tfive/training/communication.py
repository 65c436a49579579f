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
from tfive.distributed.roles import critics_each
from tfive.methods.spec import CRITIC_ROLES
from tfive.models.shape import ModelShape
from tfive.training.cost import fitting_nodes, nodes_per_item
from tfive.training.drawn import activations_come_along
from tfive.training.duration import expected
from tfive.training.memory import (
    BASE,
    FEATURES,
    Estimate,
    Nodes,
    Row,
    compute_bytes,
    estimate,
    nodes_of,
    summed,
    trained_by_actor,
    trained_by_critic,
)

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST = "all-reduce", "all-gather", "reduce-scatter", "broadcast"

FUSED = "weights that fused blocks hold"
"""What they are called among the whole copies of a process."""

FLOAT, LONG = 4, 8
"""Bytes of a float32 and of an int64."""


@dataclass(frozen=True)
class Layout:
    """How many processes work, on how many nodes, over how many of them weights are spread, and who fits critics."""

    processes: int
    nodes: int = 1
    shard: int = 1
    fitting: int = 0
    """Processes of each critic, where it has some of its own; 0 where all have all."""
    critics: int = 0
    """How many critics have processes of their own."""

    @classmethod
    def of(cls, config: Config, processes: int, nodes: int = 1) -> Layout:
        """The layout that `[distributed]` asks for."""
        each = critics_each(config.distributed.profile, processes, config.spec.critics)
        critics = config.spec.critics if each else 0
        return cls(processes, nodes, config.distributed.shard or processes - critics * each, each, critics)

    @property
    def acting(self) -> int:
        """Processes of the actor."""
        return self.processes - self.critics * self.fitting

    @property
    def fitting_shard(self) -> int:
        """Processes over which a critic's weights are spread."""
        return min(self.shard, self.fitting) if self.fitting else self.shard

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
    found += _critic_gradients(config, shape, layout, compute)
    return [*found, *_trajectories(config, shape, layout, compute)]


def _actor_gradients(config: Config, shape: ModelShape, layout: Layout, compute: int) -> list[Exchange]:
    steps, texts = config.window.actor_steps, _texts(config, "actor")
    passes = _passes(config, layout.acting, texts / min(config.actor.minibatches, texts))
    shard = 1 if config.actor.adapt == "lora" else layout.shard
    weights = trained_by_actor(config, shape)[0]
    found = _gradients("the actor", weights, steps, passes, (layout.acting, shard), compute)
    if shard > 1:
        # Put together when they are asked, which is once a window.
        rows = FLOAT * math.ceil(weights / shard)
        found += [Exchange(ALL_GATHER, f"weights of the {name}", 1, rows, shard) for name in config.spec.averages]
    return found


def _gradients(whose: str, weights: int, steps: int, passes: int, by: tuple[int, int], compute: int) -> list[Exchange]:
    """Sums of gradients `by` so many processes and shards: once a step where every process has all weights; in shards
    once a pass, and the weights that came out once a step."""
    processes, shard = by
    if processes == 1:
        return []
    whole, part = FLOAT * weights, math.ceil(weights / shard)
    if shard == 1:
        return [Exchange(ALL_REDUCE, f"gradients of {whose}", steps, whole, processes)]
    found = [Exchange(REDUCE_SCATTER, f"gradients of {whose}", steps * passes, whole, shard)]
    if shard < processes:
        copies = processes // shard
        found.append(Exchange(ALL_REDUCE, f"shards' gradients of {whose}", steps * passes, FLOAT * part, copies, True))
    return [*found, Exchange(ALL_GATHER, f"weights of {whose}", steps, compute * part, shard)]


def _critic_gradients(config: Config, shape: ModelShape, layout: Layout, compute: int) -> list[Exchange]:
    """The passes of the value heads alone, at a run's start, send less."""
    count, texts = config.spec.critics, _texts(config, config.window.fitted_role)
    if not count:
        return []
    settings, weights = config.critic, trained_by_critic(config, shape)
    minibatches = min(settings.minibatches, texts)
    steps = settings.passes * minibatches
    members, shard = layout.fitting or layout.processes, layout.fitting_shard
    if settings.adapt not in ("top", "full"):
        shard = 1
    passes = _passes(config, members, texts / minibatches)
    # Critics with processes of their own are fitted at the same time.
    fitted = steps if layout.fitting else count * steps
    return _gradients("the critics", weights, fitted, passes, (members, shard), compute)


def _passes(config: Config, processes: int, texts: float) -> int:
    """Passes that the texts of one step take on the process with most of them."""
    return math.ceil(math.ceil(texts / processes) / config.run.texts_per_pass)


def _trajectories(config: Config, shape: ModelShape, layout: Layout, compute: int) -> list[Exchange]:
    """Thoughts of every role with their losses; values and features by the critics; the states calibration reads.
    Critics with processes of their own tell all others what they say."""
    spec, nodes = config.spec, nodes_of(config)
    drawn = [role for role in spec.roles_of(config) if role != "probe"] if spec.thinks else []

    def rows(role: str) -> int:
        return math.ceil(_texts(config, role) / layout.acting) * nodes.R

    def gathered(what: str, roles: Sequence[str], size: Callable[[str], int]) -> Exchange:
        return Exchange(ALL_GATHER, what, 1, sum(rows(role) * size(role) for role in roles), layout.processes)

    found = [gathered("thoughts and their losses", drawn, lambda role: _thought(config, nodes, role))]
    read = [role for role in CRITIC_ROLES if role in drawn and spec.critics]
    if read:
        seen = config.critic.numbers_seen(nodes.H)
        width = config.critic.width or shape.hidden + seen
        what, said = "values and features of the critics", nodes.T * (1 + width) * FLOAT
        if layout.fitting:
            whole = sum(_texts(config, role) * nodes.R for role in read) * said
            found.append(Exchange(BROADCAST, what, spec.critics, whole, layout.processes))
        else:
            found.append(gathered(what, read, lambda _: spec.critics * said))
    if read and activations_come_along(config):
        activations = nodes.policy * shape.hidden * compute // nodes.R
        found.append(gathered("activations that critics stand on", read, lambda _: activations))
    kept = [role for role in ("head_train", "head_validate", "actor") if role in drawn and "calibration" in spec.uses]
    if kept:
        states = nodes.T * shape.hidden * compute + (shape.hidden + nodes.H + 1) * FLOAT
        found.append(gathered("states that calibration reads", kept, lambda _: states))
    return found


def _thought(config: Config, nodes: Nodes, role: str) -> int:
    """Bytes of one thought (`Trajectories`): tokens, log q and perhaps log π_old; length, two flags; losses."""
    drawn = nodes.T * (LONG + FLOAT) + LONG + 2
    scored = FLOAT * (1 + nodes.H) + nodes.K * (FLOAT + LONG + 1) if role != "scale" else 0
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


GPU = 989e12
"""Operations a second of one GPU in a product of bfloat16 matrices (H100 and H200, without sparsity)."""

MEMORY = 141_000_000_000
"""Bytes of one GPU (H200)."""


@dataclass(frozen=True)
class Prediction:
    """What a run needs by so many processes: bytes of each, what it hands to collectives, and seconds of a window."""

    layout: Layout
    bytes: int
    """Of the process with most of them."""
    by_role: dict[str, int]
    """Of a process of the actor and of one of a critic, or under `all` where they are the same."""
    copies: dict[str, dict[str, int]]
    """Bytes of these that are whole copies, by what they are copies of."""
    exchanges: list[Exchange]
    computing: float
    exchanging: float
    steps: int
    """Optimizer steps of the actor in a window."""

    @property
    def step(self) -> float:
        """Seconds of a window by step of the actor, nothing exchanged while anything is computed."""
        return (self.computing + self.exchanging) / self.steps


def predicted(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    network: Network | None = None,
    *,
    speed: float = GPU,
    device: str = "cuda",
) -> Prediction:
    """Memory, communication and time by processes with a device of `speed` each; texts are split evenly."""
    network, compute = network or Network(), compute_bytes(config, device == "cuda")
    found = exchanges(config, shape, layout, compute)
    alone = expected(config, shape, device, speed).window
    table = estimate(config, shape, device == "cuda")
    by_role = bytes_by_role(table, config, shape, layout, compute)
    return Prediction(
        layout,
        max(by_role.values()),
        by_role,
        whole_copies(table, config, shape, layout, compute),
        found,
        _computing(config, shape, layout, alone),
        sum(network.seconds(exchange, layout) for exchange in found),
        config.window.actor_steps,
    )


def _computing(config: Config, shape: ModelShape, layout: Layout, alone: float) -> float:
    """Seconds of a window that takes one process `alone`: all work split evenly, or each role's over its processes. The
    actor's draw later sets while critics are fitted; of everything else, one role waits for the other."""
    if not layout.fitting:
        return alone / layout.processes
    parts = nodes_per_item(config, shape.layers)
    second = alone / sum(parts.values())
    fitting = second * fitting_nodes(config, shape.layers)
    critics = second * (parts["critics"] + parts["lower features"])
    drawn = second * (parts["sample"] + parts["score"] + parts["old law"]) * drawn_meanwhile(config)
    # Both critics read the same activations of the base, each group for itself.
    each = (critics - second * parts["lower features"]) / layout.critics + second * parts["lower features"]
    apart = fitting / layout.critics / layout.fitting
    acting = (alone - critics - drawn) / layout.acting
    return acting + each / layout.fitting - apart + max(apart, drawn / layout.acting)


def drawn_meanwhile(config: Config) -> float:
    """The share of a window's thoughts that the actor's processes draw while the critics are fitted: a set a pass."""
    if config.window.history:
        return 0.0
    order = ("qualify", "pilot", "head_train", "head_validate", "actor", "scale")
    drawn = [role for role in order if role in config.spec.roles_of(config)]
    every = sum(config.window.count(role) for role in config.spec.roles_of(config) if role != "probe")
    return sum(config.window.count(role) for role in drawn[: config.critic.passes]) / every


def bytes_per_rank(table: Estimate, config: Config, shape: ModelShape, layout: Layout, compute: int) -> int:
    """Bytes of the process with most of them."""
    return max(bytes_by_role(table, config, shape, layout, compute).values())


def bytes_by_role(table: Estimate, config: Config, shape: ModelShape, layout: Layout, compute: int) -> dict[str, int]:
    """Bytes of one process of each role: everything as in a run of one, except that it has nothing of other roles but
    the frozen base, and that master weights, moments and gradients of what is sharded are spread over the processes of
    a shard, beside one whole compute copy."""
    whole = compute * trained_by_actor(config, shape)[0]
    ways = {"actor": (whole, _policy_before(config, shape, compute), layout.shard)}
    ways |= dict.fromkeys(config.spec.averages, (whole, 0, layout.shard))
    if config.actor.adapt == "lora":
        ways = {}
    if config.critic.adapt in ("top", "full"):
        whole = compute * trained_by_critic(config, shape)
        ways |= {f"critic {number}": (whole, 0, layout.fitting_shard) for number in (1, 2)}
    rows = []
    for row in table.rows:
        copy, beside, shard = ways.get(row.role, (0, 0, 1))
        rows.append(row if shard == 1 else _spread(row, copy, beside, shard))
    if not layout.fitting:
        return {"all": summed(rows).total}
    critics = {row.role for row in rows if row.role.startswith("critic")} | {FEATURES}
    acting = [row for row in rows if row.role not in critics]
    fitting = [row for row in rows if row.role in (BASE, FEATURES, "critic 1")]
    return {"actor": summed(acting).total, "critic": summed(fitting).total}


def whole_copies(
    table: Estimate, config: Config, shape: ModelShape, layout: Layout, compute: int
) -> dict[str, dict[str, int]]:
    """Bytes of one process of each role, by what they are, that no shard makes smaller: sampling, scoring and valuing
    read the frozen base and the role's own weights whole, in compute precision. Block by block, every step of a thought
    would move the whole model between the processes."""
    weights = {row.role: row.bytes["weights"] for row in table.rows}
    base, acting, fitting = {BASE: weights[BASE]}, dict[str, int](), dict[str, dict[str, int]]()
    if config.actor.adapt == "full":
        acting = dict.fromkeys(("actor", *config.spec.averages), compute * shape.parameters)
    if held := weights.get("rollout and scoring"):
        acting[FUSED] = held
    if before := _policy_before(config, shape, compute):
        acting["policy before the update"] = before
    if config.critic.adapt in ("top", "full"):
        own = compute * trained_by_critic(config, shape)
        fitting = {name: {name: own} for name in weights if name.startswith("critic ")}
    if layout.fitting:
        return {"actor": base | acting, "critic": base | fitting.get("critic 1", {})}
    return {"all": base | acting | {name: size for one in fitting.values() for name, size in one.items()}}


def _policy_before(config: Config, shape: ModelShape, compute: int) -> int:
    """Bytes of the policy's weights before an update, which the actor keeps where scores are centred by its law."""
    trained, exact = trained_by_actor(config, shape)
    return (4 if exact else compute) * trained if config.calibration.score_centering else 0


def _spread(row: Row, copy: int, beside: int, ways: int) -> Row:
    """A role's bytes in a process where its weights are in shards; `copy`: bytes of the whole compute copy, `beside`:
    of another one that is not trained."""
    # Weights in compute precision are their own masters where no others are kept.
    masters = row.bytes["weights"] - copy - beside or copy
    parts = {name: math.ceil(row.bytes[name] / ways) for name in ("moments", "gradients")}
    return Row(row.role, row.bytes | parts | {"weights": copy + beside + math.ceil(masters / ways)}, row.how)
