"""Whether a configuration fits in memory: bytes per role, with the arithmetic that gives them.

Weights, moments and the buffers of sampling stay for the whole run and add up. Gradients and activations exist while
one role works, so the largest counts once. Small heads (calibration, gate) and what they read are left out: they work
alone, and take less than a role that trains the model.
`benchmarks/memory.py` measures the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tfive.config.config import Config
from tfive.config.rules import texts_needed
from tfive.models.shape import ModelShape
from tfive.rl.settings import HEADS_ALONE, STATE_BYTES, TRAINING_ROLES, head_texts
from tfive.training.drawn import activations_come_along, featured_texts, texts_drawn_together
from tfive.training.memory_recurrent import (
    Nodes,
    by_kernels,
    kept_by_kernels,
    sampling_by_kernels,
    sampling_by_torch,
    scored_by_kernels,
)
from tfive.tree.settings import HEAD_BYTES

COLUMNS = ("weights", "moments", "gradients", "activations", "states")
LASTING = ("weights", "moments", "states")
FEATURES = "features for critics (of the frozen base)"
BASE = "frozen base"
CHUNKS = 5
"""Tensors of the size of a chunk of vocabulary logits while its gradient is computed."""
SLOPES = 1 << 30
"""Bytes of derivatives by logits that the fused vocabulary head holds at once (`tree.fast.vocabulary`)."""
SAMPLERS = 4
"""Shapes of batch whose sampling buffers are kept (`tree.forward`)."""
ROUNDED, ROUNDING = 1 << 24, 32
"""Weights that are rounded stochastically at a time (`rl.optimizer`), and bytes each takes meanwhile."""


@dataclass
class Row:
    """One role's bytes by column, and how each was reckoned."""

    role: str
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    how: dict[str, str] = field(default_factory=dict)

    @property
    def transient(self) -> int:
        """Bytes that are there while the role works."""
        return sum(amount for column, amount in self.bytes.items() if column not in LASTING)

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


def _step_texts(config: Config, role: str, minibatches: int) -> int:
    """Texts of the largest pass with gradients: as many as are asked for, or as a minibatch has."""
    return max(1, min(config.run.texts_per_pass, math.ceil(texts_needed(config, role) / minibatches)))


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
        rows.append(_actor(config, shape, nodes, compute, on_gpu))
    elif config.actor.adapt == "full":
        measured = Row("model")
        _weights(measured, config, shape.parameters, compute)
        rows.append(measured)
    if spec.thinks:
        rows.append(_rollout(config, shape, nodes, compute, on_gpu))
    rows += _critics(config, shape, nodes, compute, spec.critics, on_gpu)
    for name in spec.averages:
        average, (trained, exact) = Row(name), trained_by_actor(config, shape)
        copied = 4 if exact else compute
        average.add("weights", (4 + copied) * trained, f"P {_n(trained)} × (4 float32 + {copied} compute copy)")
        rows.append(average)
    return summed(rows)


def summed(rows: list[Row]) -> Estimate:
    """What the roles come to on one device: all that lasts, and the largest of what is there while one works."""
    lasting = sum(row.bytes[column] for row in rows for column in LASTING)
    alone = {row.role: row.transient for row in rows}
    shared = alone.pop(FEATURES, 0)
    transient = max((size + (shared if role.startswith("critic") else 0) for role, size in alone.items()), default=0)
    return Estimate(rows, lasting, transient)


def _base(shape: ModelShape, compute: int) -> Row:
    """The frozen base model: the yardstick of every measurement, and what critics and low-rank updates stand on."""
    row = Row(BASE)
    row.add("weights", compute * shape.parameters, f"P {_n(shape.parameters)} × {compute}")
    return row


def trained_by_actor(config: Config, shape: ModelShape) -> tuple[int, bool]:
    """How many weights of the actor are trained, and whether they are float32 whatever the model computes in."""
    if config.actor.adapt == "full":
        return shape.parameters, False
    return _lora(shape, shape.layers, config.actor.lora_rank, config.actor.lora_targets), True


def _weights(row: Row, config: Config, parameters: int, compute: int, exact: bool = False) -> None:
    """Weights that an optimizer holds, whether or not it ever steps; `exact`: float32 anyway."""
    count = f"P {_n(parameters)}"
    if exact or compute == 4:
        row.add("weights", 4 * parameters, f"{count} × 4 (float32)")
    elif config.optimizer.bf16_update == "stochastic":
        row.add("weights", 2 * parameters, f"{count} × 2 (bfloat16, stochastic rounding)")
    else:
        row.add("weights", 6 * parameters, f"{count} × (4 float32 + 2 bfloat16 copy)")


def _kept(
    row: Row, config: Config, shape: ModelShape, nodes: Nodes, compute: int, on_gpu: bool, adapt: str, share: float = 1
) -> None:
    """Activations kept for the backward pass of one policy or value pass, over `share` of the blocks. Kernels train
    those of a model that is adapted in full; others, and such as are computed again, are reckoned as PyTorch's own."""
    tokens, size = nodes.texts * nodes.policy, f"{nodes.texts} × {nodes.policy} nodes"
    again, kernels = config.engine.activation_checkpointing, by_kernels(config, on_gpu, trained=True)
    (attention, linear), common = shape.kept_per_node(compute), shape.kept_by_any(compute)
    if kernels and adapt == "full" and not again:
        attention, common = shape.kept_by_trained(compute)
        if shape.joined:
            row.add("activations", compute * shape.joined, f"joined weights {_n(shape.joined)} × {compute}")
    paths = nodes.texts * nodes.path * shape.kept_per_path_token
    rule = f"{nodes.texts} × {nodes.path} path tokens × {_n(shape.kept_per_path_token)} B"
    if shape.linear_layers and kernels:
        one = kept_by_kernels(shape, nodes, compute)
        linear, paths, rule = common, nodes.texts * one, f"{nodes.texts} × {_n(one)} B by kernels"
    if again:
        inputs = shape.layers * shape.hidden * share * compute
        largest = max(attention, linear if shape.linear_layers else 0)
        row.add(
            "activations", tokens * (inputs + largest), f"{size} × ({_n(inputs)} B inputs + {_n(largest)} B a block)"
        )
        if shape.linear_layers:
            row.add("activations", paths, f"{rule}, one layer")
        return
    kept = share * (shape.attention_layers * attention + shape.linear_layers * linear)
    row.add("activations", tokens * kept, f"{size} × {_n(kept)} B kept")
    if shape.linear_layers:
        count = share * shape.linear_layers
        row.add("activations", paths * count, f"{rule} × {count:g} layers")


def _mask(row: Row, shape: ModelShape, texts: int, queries: int, keys: int, compute: int) -> None:
    """The dense mask; grouped queries are folded into its length."""
    fold = shape.heads // shape.kv_heads
    size = f"mask {texts} × {fold} × {queries} × {keys} × {compute}"
    row.add("activations", texts * fold * queries * keys * compute, size)


def _actor(config: Config, shape: ModelShape, nodes: Nodes, compute: int, on_gpu: bool) -> Row:
    row, conditioned = Row("actor"), config.anchor.conditioned > 0 and config.spec.thinks
    nodes = replace(nodes, anchored=conditioned, texts=_step_texts(config, "actor", config.actor.minibatches))
    if not (config.spec.rewarded or conditioned):
        nodes = replace(nodes, R=0)  # the next-token loss alone reads no thought
    trained, exact = trained_by_actor(config, shape)
    _weights(row, config, trained, compute, exact)
    size = 2 if config.optimizer.moments == "bfloat16" else 4
    sets = 1 if config.anchor.lr is None else 2
    apart = "" if sets == 1 else " × 2 (the anchors' own)"
    row.add("moments", 2 * size * sets * trained, f"P {_n(trained)} × 2 × {size} ({config.optimizer.moments}){apart}")
    _kept(row, config, shape, nodes, compute, on_gpu, config.actor.adapt)
    _mask(row, shape, nodes.texts, nodes.policy, nodes.policy, compute)
    head = _head_bytes(shape, nodes.texts * max(nodes.S, nodes.R * nodes.T))
    row.add("activations", CHUNKS * head, f"vocabulary chunks {CHUNKS} × {readable_bytes(head)}")
    if not exact:
        row.add("activations", (4 + compute) * shape.embedding, f"gradient of the vocabulary head × (4 + {compute})")
    if not exact and on_gpu and config.engine.fast != "off":
        slopes = min(SLOPES, compute * shape.vocabulary * nodes.texts * max(nodes.S, nodes.R * nodes.T))
        row.add("activations", slopes, f"derivatives by logits {readable_bytes(slopes)}")
    _gradients(row, trained, passes_of_an_update(config))
    if size == 2 or (compute == 2 and not exact and config.optimizer.bf16_update == "stochastic"):
        part = min(ROUNDED, shape.embedding)
        row.add("activations", ROUNDING * part, f"rounding {_n(part)} weights at a time × {ROUNDING}")
    if config.calibration.score_centering:
        copied = 4 if exact else compute
        row.add("weights", copied * trained, f"π_old P {_n(trained)} × {copied}")
    return row


def texts_of_an_update(config: Config) -> int:
    """Texts of one optimizer step of the actor."""
    return math.ceil(texts_needed(config, "actor") / config.actor.minibatches)


def passes_of_an_update(config: Config) -> int:
    """Forward and backward passes of one optimizer step."""
    return math.ceil(texts_of_an_update(config) / config.run.texts_per_pass)


def _gradients(row: Row, trained: int, passes: int) -> None:
    """Accumulated gradients; in a step of one pass they take the place of activations, as these are used up."""
    whole, replaced = 4 * trained, 0 if passes > 1 else row.bytes["activations"]
    if whole > replaced:
        beyond = "" if passes > 1 else f" − {readable_bytes(replaced)} of activations that are gone by then"
        row.add("gradients", whole - replaced, f"P {_n(trained)} × 4 (float32){beyond}")


def _head_bytes(shape: ModelShape, rows: int) -> int:
    """Float32 vocabulary logits held at once; fewer where the pass has fewer rows than the chunk would hold."""
    return min(HEAD_BYTES, 4 * shape.vocabulary * rows)


def _rollout(config: Config, shape: ModelShape, nodes: Nodes, compute: int, on_gpu: bool) -> Row:
    """Sampling and scoring with the actor's own compute copy; these passes keep nothing for a backward."""
    row, texts = Row("rollout and scoring"), _texts(config, config.run.rollout_texts)
    if config.spec.scoring == "next_token":
        nodes = replace(nodes, K=1, H=1)
    if config.engine.fast == "on" or (config.engine.fast == "auto" and on_gpu):
        held = shape.from_residual
        row.add("weights", held * compute, f"weights held for sampling {_n(held)} × {compute}")
    for count in _sampled_together(config):
        _sampling(row, config, shape, replace(nodes, texts=count), compute, on_gpu)
    trunk = nodes.S * shape.cache_per_token * compute + nodes.P * 4 * shape.recurrent_matrices
    row.add("activations", texts * trunk, f"trunk, {texts} × {_n(trunk)} B")
    # Branches are scored a few at a time; the old law is that of whole rows.
    scored = min(nodes.score - nodes.S, 2 * nodes.S)
    longest = max(nodes.policy, scored, nodes.S)
    one, paths, kept = max(shape.kept_per_node(compute)), max(nodes.path, 2 * scored), shape.kept_per_path_token
    if shape.linear_layers and by_kernels(config, on_gpu):
        block = longest * shape.kept_by_any(compute)
        block += max(kept_by_kernels(shape, nodes, compute), scored_by_kernels(shape, nodes, scored, compute))
        row.add("activations", texts * block, f"one recurrent block by kernels, {texts} × {_n(block)} B")
    elif shape.linear_layers and paths * kept > longest * one:
        row.add("activations", texts * paths * kept, f"one delta rule, {texts} × {paths} path tokens × {_n(kept)} B")
    else:
        row.add("activations", texts * longest * one, f"one block, {texts} × {longest} × {_n(one)} B")
    _mask(row, shape, texts, longest, nodes.S + longest if longest == scored else longest, compute)
    head = _head_bytes(shape, texts * longest)
    row.add("activations", head, f"vocabulary chunk {readable_bytes(head)}")
    return row


def _sampled_together(config: Config) -> list[int]:
    """Texts of the batches that sampling keeps buffers for: a run's distinct ones, of at most four the largest."""
    most, sizes = config.run.rollout_texts, set()
    for texts in texts_drawn_together(config):
        sizes |= {min(texts, most), texts % most if texts > most else 0}
    return sorted(sizes - {0}, reverse=True)[:SAMPLERS]


def _sampling(row: Row, config: Config, shape: ModelShape, nodes: Nodes, compute: int, on_gpu: bool) -> None:
    """Buffers of one shape of batch: keys and values of all nodes, states of recurrent layers and what branches add."""
    cache = nodes.texts * nodes.policy * shape.cache_per_token * compute
    row.add(
        "states", cache, f"keys and values {nodes.texts} × {nodes.policy} × {_n(shape.cache_per_token)} × {compute}"
    )
    if shape.linear_layers:
        kernels = by_kernels(config, on_gpu)
        one = sampling_by_kernels(shape, nodes, compute) if kernels else sampling_by_torch(shape, nodes)
        row.add("states", nodes.texts * one, f"recurrent {nodes.texts} × {_n(one)} B{' by kernels' * kernels}")


def _critics(config: Config, shape: ModelShape, nodes: Nodes, compute: int, count: int, on_gpu: bool) -> list[Row]:
    settings = config.critic
    nodes = replace(nodes, texts=_step_texts(config, config.window.fitted_role, settings.minibatches))
    share = {"full": 1.0, "head": 0.0, "probe": 0.0}.get(settings.adapt, min(settings.blocks / shape.layers, 1.0))
    copied, exact = _copied_by_critic(config, shape), _added_by_critic(config, shape)
    rows = []
    if count and settings.adapt != "full":
        base = Row(FEATURES)
        tokens = config.window.count(config.window.fitted_role) * config.group * nodes.T
        if settings.adapt in HEADS_ALONE:
            # Captured steps read them out of one tensor, beside the passes' own.
            copies = 1 + on_gpu
            amount = copies * tokens * shape.hidden * compute
            how = f"features {_n(tokens)} × {shape.hidden} × {compute}"
            base.add("activations", amount, how + " × 2 (once for all passes)" * on_gpu)
            step = math.ceil(texts_needed(config, config.window.fitted_role) / settings.minibatches)
            states = nodes.R * nodes.T
            read = states * min(step, head_texts(config.run.texts_per_pass, step, states, shape.hidden))
            how = f"a pass of heads {_n(read)} × {shape.hidden} × {STATE_BYTES}"
            base.add("activations", read * shape.hidden * STATE_BYTES, how)
        if settings.adapt in ("top", "lora") or activations_come_along(config):
            rows_ = featured_texts(config)
            amount = rows_ * nodes.policy * shape.hidden * compute
            base.add("activations", amount, f"lower features {rows_} × {nodes.policy} × {shape.hidden} × {compute}")
        rows.append(base)
    for number in range(1, count + 1):
        row = Row(f"critic {number}")
        wide = 6 if compute == 2 else 4
        kinds = ((copied, wide, "4 float32 + 2 bfloat16 copy" if wide == 6 else "4 float32"), (exact, 4, "4 float32"))
        for size, each, how in kinds:
            if size:
                row.add("weights", each * size, f"P {_n(size)} × ({how})")
        row.add("moments", 8 * (copied + exact), f"P {_n(copied + exact)} × 2 × 4 (float32)")
        row.add("gradients", 4 * (copied + exact), f"P {_n(copied + exact)} × 4 (float32)")
        if share:
            _kept(row, config, shape, nodes, compute, on_gpu, settings.adapt, share)
            _mask(row, shape, nodes.texts, nodes.policy, nodes.policy, compute)
        rows.append(row)
    return rows


def trained_by_critic(config: Config, shape: ModelShape) -> int:
    """Parameters that one critic trains: its head, and what `critic.adapt` says of the blocks below."""
    return _copied_by_critic(config, shape) + _added_by_critic(config, shape)


def _copied_by_critic(config: Config, shape: ModelShape) -> int:
    """Weights of the base model that a critic has a trained copy of."""
    settings = config.critic
    return {"full": shape.backbone, "top": shape.top_blocks(settings.blocks)}.get(settings.adapt, 0)


def _added_by_critic(config: Config, shape: ModelShape) -> int:
    """Weights that a critic adds to the base model: its head, and low-rank updates."""
    settings = config.critic
    width, biases = settings.width or 1, 2 * bool(settings.width)
    numbers = settings.numbers_seen(config.thought.horizon)
    seen = numbers + biases // 2 if numbers else 0
    head = (shape.hidden + seen + config.thought.length + biases) * width + 1
    return head + (_lora(shape, settings.blocks, settings.lora_rank, "all") if settings.adapt == "lora" else 0)


def _lora(shape: ModelShape, blocks: int, rank: int, targets: str) -> int:
    """Parameters of low-rank updates in the last `blocks` blocks (hybrids: by the mean block)."""
    attention, linear, feed = shape.projection_ends
    mixers = (shape.attention_layers * attention + shape.linear_layers * linear) / shape.layers
    ends = {"all": mixers + feed, "attention": mixers, "mlp": feed}[targets]
    return round(min(blocks, shape.layers) * rank * ends)


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
