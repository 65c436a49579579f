"""Whether a configuration fits in memory: bytes per role, with the arithmetic that gives them.

Weights, moments and gradients stay for the whole run and add up. Activations and states exist while one role works, so
the largest counts once. Small heads (calibration, gate) are a few megabytes and left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tfive.config.config import Config
from tfive.config.rules import texts_needed
from tfive.models.shape import ModelShape
from tfive.rl.settings import TRAINING_ROLES
from tfive.tree.settings import HEAD_BYTES

COLUMNS = ("weights", "moments", "gradients", "activations", "states")
LASTING = ("weights", "moments", "gradients")
CHUNK = 64
"""Trunk tokens between two kept recurrent states."""


@dataclass(frozen=True)
class Nodes:
    """Sizes of one pass over some texts (the letters of `tree/layout.py`)."""

    texts: int
    S: int
    P: int
    R: int
    T: int
    K: int
    H: int
    delimiter: int
    """Tokens of an opening or closing delimiter, taken as one each."""
    reread: int = 0
    """Text tokens that are read again before a continuation: 1 with gated reading."""
    anchored: bool = False
    """Whether a continuation hangs behind one thought of each position (`anchor.conditioned`)."""

    @property
    def after(self) -> int:
        """Nodes of one scored continuation: close + H − 1, one more with gated reading."""
        return self.delimiter + self.reread + self.H - 1

    @property
    def policy(self) -> int:
        """Nodes of a row when thoughts are sampled or trained on: S + R (open + T), + P (close + H − 1) if anchored."""
        return self.S + self.R * (self.delimiter + self.T) + self.anchored * self.P * self.after

    @property
    def path(self) -> int:
        """Tokens the delta rule keeps for a row: the trunk, a chunk for the state at each position, and each branch's
        own nodes, padded as the rule pads them."""
        branches = self.R * _padded(self.delimiter + self.T) + self.anchored * self.P * _padded(self.after)
        return self.S + self.P * CHUNK + branches

    @property
    def score(self) -> int:
        """Nodes of a row when continuations are scored: the above + R K (close + H − 1)."""
        return self.policy + self.R * self.K * self.after


def _padded(own: int) -> int:
    """A path's tokens as the delta rule pads them."""
    return next((size for size in (16, 32) if own <= size), CHUNK * math.ceil(own / CHUNK))


@dataclass
class Row:
    """One role's bytes by column, and how each was reckoned."""

    role: str
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    how: dict[str, str] = field(default_factory=dict)

    def add(self, column: str, amount: float, how: str) -> None:
        """Book `amount` bytes under `column`."""
        self.bytes[column] += round(amount)
        self.how[column] = f"{self.how[column]} + {how}" if column in self.how else how


@dataclass(frozen=True)
class Estimate:
    """The table, and what it comes to when all roles share one device."""

    rows: list[Row]
    lasting: int
    transient: int

    @property
    def total(self) -> int:
        """Everything that lasts plus the largest transient."""
        return self.lasting + self.transient


def nodes_of(config: Config) -> Nodes:
    """The pass sizes a configuration asks for."""
    thought = config.thought
    return Nodes(
        texts=_texts(config, config.run.texts_per_pass),
        S=config.text.sequence_length,
        P=config.text.positions.per_text,
        R=config.text.positions.per_text * config.group,
        T=thought.length,
        K=len(thought.checkpoints),
        H=thought.horizon,
        delimiter=0 if thought.delimiters == "none" else 1,
        reread=1 if thought.reading == "gated" else 0,
    )


def _texts(config: Config, asked: int) -> int:
    """Texts of the largest pass: as many as are asked for, or as any role or the development split has."""
    most = max(texts_needed(config, role) for role in (*TRAINING_ROLES, "qualify"))
    return min(asked, max(most, math.ceil(config.run.develop_items / config.text.positions.per_text)))


def compute_bytes(config: Config, on_gpu: bool) -> int:
    """Bytes of a weight of the compute copy."""
    return {"bfloat16": 2, "float32": 4, "auto": 2 if on_gpu else 4}[config.model.compute]


def estimate(config: Config, shape: ModelShape, on_gpu: bool) -> Estimate:
    """Bytes per role of `config.method` on a model of this shape."""
    compute = compute_bytes(config, on_gpu)
    nodes = nodes_of(config)
    spec = config.spec
    rows: list[Row] = [_base(shape, compute)]
    if spec.trains:
        rows.append(_actor(config, shape, nodes, compute))
    else:
        measured = Row("model")
        _weights(measured, config, shape.parameters, compute)
        rows.append(measured)
    if spec.thinks:
        rows.append(_rollout(config, shape, replace(nodes, texts=_texts(config, config.run.rollout_texts)), compute))
    rows += _critics(config, shape, nodes, compute, spec.critics)
    for name in spec.averages:
        average = Row(name)
        count = f"P {_n(shape.parameters)}"
        average.add("weights", (4 + compute) * shape.parameters, f"{count} × (4 float32 + {compute} compute copy)")
        rows.append(average)
    lasting = sum(row.bytes[column] for row in rows for column in LASTING)
    transient = max((row.bytes["activations"] + row.bytes["states"] for row in rows), default=0)
    return Estimate(rows, lasting, transient)


def _base(shape: ModelShape, compute: int) -> Row:
    """The frozen base model: the yardstick of every measurement, and what critics read."""
    row = Row("frozen base")
    row.add("weights", compute * shape.parameters, f"P {_n(shape.parameters)} × {compute}")
    return row


def _weights(row: Row, config: Config, parameters: int, compute: int) -> None:
    """Weights that an optimizer holds, whether or not it ever steps."""
    count = f"P {_n(parameters)}"
    if compute == 2 and config.optimizer.bf16_update == "stochastic":
        row.add("weights", 2 * parameters, f"{count} × 2 (bfloat16, stochastic rounding)")
    elif compute == 2:
        row.add("weights", 6 * parameters, f"{count} × (4 float32 + 2 bfloat16 copy)")
    else:
        row.add("weights", 4 * parameters, f"{count} × 4 (float32)")


def _trained(row: Row, config: Config, parameters: int, compute: int) -> None:
    """Weights, AdamW moments and accumulated gradients of trained parameters."""
    _weights(row, config, parameters, compute)
    count = f"P {_n(parameters)}"
    row.add("moments", 8 * parameters, f"{count} × 2 × 4 (float32)")
    row.add("gradients", 4 * parameters, f"{count} × 4 (float32)")


def _kept(row: Row, config: Config, shape: ModelShape, nodes: Nodes, compute: int, share: float = 1.0) -> None:
    """Activations kept for the backward pass of one policy or value pass, over `share` of the blocks."""
    tokens, size = nodes.texts * nodes.policy, f"{nodes.texts} × {nodes.policy} nodes"
    attention, linear = shape.kept_per_node(compute)
    whole = share * (shape.attention_layers * attention + shape.linear_layers * linear)
    paths = nodes.texts * nodes.path * shape.kept_per_path_token
    rule = f"{nodes.texts} × {nodes.path} path tokens × {_n(shape.kept_per_path_token)} B"
    if config.engine.activation_checkpointing:
        inputs = shape.layers * shape.hidden * share * compute
        largest = max(attention, linear if shape.linear_layers else 0)
        row.add(
            "activations", tokens * (inputs + largest), f"{size} × ({_n(inputs)} B inputs + {_n(largest)} B a block)"
        )
        if shape.linear_layers:
            row.add("activations", paths, f"{rule}, one layer")
        return
    row.add("activations", tokens * whole, f"{size} × {_n(whole)} B kept")
    if shape.linear_layers:
        count = share * shape.linear_layers
        row.add("activations", paths * count, f"{rule} × {count:g} layers")


def _mask(row: Row, shape: ModelShape, texts: int, length: int, compute: int) -> None:
    """The dense mask; grouped queries are folded into its length."""
    fold = shape.heads // shape.kv_heads
    row.add("activations", texts * fold * length**2 * compute, f"mask {texts} × {fold} × {length}² × {compute}")


def _actor(config: Config, shape: ModelShape, nodes: Nodes, compute: int) -> Row:
    row, conditioned = Row("actor"), config.anchor.conditioned > 0 and config.spec.thinks
    nodes = replace(nodes, anchored=conditioned)
    if not (config.spec.rewarded or conditioned):
        nodes = replace(nodes, R=0)  # the next-token loss alone reads no thought
    _trained(row, config, shape.parameters, compute)
    _kept(row, config, shape, nodes, compute)
    _mask(row, shape, nodes.texts, nodes.policy, compute)
    head = _head_bytes(config, shape, nodes)
    row.add("activations", 2 * head, f"vocabulary chunk and its gradient 2 × {readable_bytes(head)}")
    if config.calibration.score_centering:
        row.add("weights", compute * shape.parameters, f"π_old P {_n(shape.parameters)} × {compute}")
    return row


def _head_bytes(config: Config, shape: ModelShape, nodes: Nodes) -> int:
    """Float32 vocabulary logits held at once; fewer where the pass has fewer rows than the chunk would hold."""
    return min(HEAD_BYTES, 4 * shape.vocabulary * nodes.texts * nodes.policy)


def _rollout(config: Config, shape: ModelShape, nodes: Nodes, compute: int) -> Row:
    """Sampling and scoring with the actor's own compute copy; these passes keep nothing for a backward."""
    row = Row("rollout and scoring")
    one = max(shape.kept_per_node(compute))
    row.add("activations", nodes.texts * nodes.score * one, f"one block, {nodes.texts} × {nodes.score} × {_n(one)} B")
    _mask(row, shape, nodes.texts, nodes.score, compute)
    head = _head_bytes(config, shape, nodes)
    row.add("activations", head, f"vocabulary chunk {readable_bytes(head)}")
    cache = nodes.texts * nodes.policy * shape.cache_per_token * compute
    row.add(
        "states", cache, f"keys and values {nodes.texts} × {nodes.policy} × {_n(shape.cache_per_token)} × {compute}"
    )
    if shape.linear_layers:
        kept = nodes.R + math.ceil(nodes.S / CHUNK)
        amount = nodes.texts * kept * shape.recurrent_state * 4
        row.add(
            "states", amount, f"recurrent {nodes.texts} × ({nodes.R} + S/{CHUNK}) × {_n(shape.recurrent_state)} × 4"
        )
    return row


def _critics(config: Config, shape: ModelShape, nodes: Nodes, compute: int, count: int) -> list[Row]:
    settings = config.critic
    trained, share = trained_by_critic(config, shape), 0.0
    if settings.adapt != "head":
        share = 1.0 if settings.adapt == "full" else settings.blocks / shape.layers
    rows = []
    if count and settings.adapt != "full":
        base = Row("features for critics (of the frozen base)")
        tokens = config.window.count("critic_fit") * nodes.T
        if settings.adapt == "head":
            base.add("states", tokens * shape.hidden * compute, f"features {_n(tokens)} × {shape.hidden} × {compute}")
        else:
            rows_ = math.ceil(config.window.count("critic_fit") / config.text.positions.per_text)
            amount = rows_ * nodes.policy * shape.hidden * compute
            base.add("states", amount, f"lower features {rows_} × {nodes.policy} × {shape.hidden} × {compute}")
        rows.append(base)
    for number in range(1, count + 1):
        row = Row(f"critic {number}")
        _trained(row, config, trained, compute)
        if share:
            _kept(row, config, shape, nodes, compute, min(share, 1.0))
            _mask(row, shape, nodes.texts, nodes.policy, compute)
        rows.append(row)
    return rows


def trained_by_critic(config: Config, shape: ModelShape) -> int:
    """Parameters that one critic trains: its head, and what `critic.adapt` says of the blocks below."""
    settings = config.critic
    width = settings.width or 1
    head = shape.hidden * width + (config.thought.length + 2) * width + 1
    if settings.adapt == "full":
        return shape.backbone + head
    if settings.adapt == "top":
        return shape.top_blocks(settings.blocks) + head
    return head + (_lora(shape, settings.blocks, settings.lora_rank) if settings.adapt == "lora" else 0)


def _lora(shape: ModelShape, blocks: int, rank: int) -> int:
    """Parameters of low-rank updates on the seven projections of each block (hybrids: reckoned as attention blocks)."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ends = 2 * (shape.hidden + query) + 2 * (shape.hidden + key) + 3 * (shape.hidden + shape.intermediate)
    return min(blocks, shape.layers) * rank * ends


def _n(count: float) -> str:
    """A count a person can read: 1.72 B, 5.3 M, 720."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if letter == 'k' else size):.3g} {letter}"
    return f"{count:.0f}"


def readable_bytes(count: float) -> str:
    """Bytes a person can read, in binary units."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
