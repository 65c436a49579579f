"""What recurrent layers keep in memory, by the kernels of `tree.fast` and by PyTorch's delta rule.

Part of the estimate (`training.memory`): bytes of a pass with gradients, of one layer without, and of sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfive.config.config import Config
from tfive.models.shape import ModelShape

CHUNK = 64
"""Trunk tokens between two kept recurrent states of PyTorch's rule, and places of sampling's window."""


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
    def own(self) -> int:
        """Nodes of one thought: open + T."""
        return self.delimiter + self.T

    @property
    def after(self) -> int:
        """Nodes of one scored continuation: close + H − 1, one more with gated reading."""
        return self.delimiter + self.reread + self.H - 1

    @property
    def policy(self) -> int:
        """Nodes of a row when thoughts are sampled or trained on: S + R (open + T), + P (close + H − 1) if anchored."""
        return self.S + self.R * self.own + self.anchored * self.P * self.after

    @property
    def path(self) -> int:
        """Tokens PyTorch's delta rule keeps for a row: the trunk, a chunk for the state at each position, and each
        branch's own nodes, padded as the rule pads them."""
        branches = self.R * _padded(self.own) + self.anchored * self.P * _padded(self.after)
        return self.S + self.P * CHUNK + branches

    @property
    def score(self) -> int:
        """Nodes of a row when continuations are scored: the above + R K (close + H − 1)."""
        return self.policy + self.R * self.K * self.after


def _padded(own: int) -> int:
    """A path's tokens as PyTorch's delta rule pads them."""
    return next((size for size in (16, 32) if own <= size), CHUNK * math.ceil(own / CHUNK))


def by_kernels(config: Config, on_gpu: bool, trained: bool = False) -> bool:
    """Whether recurrent layers are reckoned as kernels run them; over shards, passes in which weights are `trained`
    have PyTorch's rule. So has a device on which kernels disagree, and keeps more (`tfive bench selfcheck` tells)."""
    return on_gpu and config.engine.fast != "off" and not (trained and config.distributed.shard != 1)


def _matrix(shape: ModelShape) -> int:
    """Numbers of one layer's state."""
    return shape.linear_key_head * shape.linear_value


def _paths(shape: ModelShape, length: int, count: int, compute: int) -> int:
    """Bytes that kernels keep of one layer for `count` paths of so many tokens.

    A token: the convolution's inputs, queries and keys of every head, values and writes, and in float32 decay, strength
    and running decay. A chunk of 16 or 32 tokens: a triangle's inverse a head, and (but for a path's first) a state.
    """
    channels, keys = 2 * shape.linear_key + shape.linear_value, shape.linear_heads * shape.linear_key_head
    chunk = 16 if length <= 16 else 32
    chunks = math.ceil(length / chunk)
    token = compute * (channels + 2 * keys + 2 * shape.linear_value) + 12 * shape.linear_heads
    before = compute * channels * max(shape.conv_kernel - 1, 0)
    return count * (
        length * token + before + 4 * chunks * chunk**2 * shape.linear_heads + 4 * (chunks - 1) * _matrix(shape)
    )


def kept_by_kernels(shape: ModelShape, nodes: Nodes, compute: int) -> int:
    """Bytes one recurrent mixer keeps of a row for the backward pass.

    Beside its paths: the joined product that its gate is a part of, outputs before and after their norm, and the states
    at positions (and behind the thoughts that continuations hang on) in float32.
    """
    channels = 2 * shape.linear_key + shape.linear_value
    node = compute * (channels + 3 * shape.linear_value + 2 * shape.linear_heads)
    paths = _paths(shape, nodes.S, 1, compute) + _paths(shape, nodes.own, nodes.R, compute)
    paths += _paths(shape, nodes.after, nodes.P, compute) if nodes.anchored else 0
    return nodes.policy * node + paths + 4 * (1 + nodes.anchored) * nodes.P * _matrix(shape)


def scored_by_kernels(shape: ModelShape, nodes: Nodes, scored: int, compute: int) -> int:
    """Bytes of one recurrent layer while `scored` branch nodes of a row are: every thought is read on from its
    position's state, and every continuation from a state of its own."""
    thoughts, ends = nodes.R * nodes.own, nodes.R * nodes.K * nodes.after
    part = min(1.0, scored / max(1, thoughts + ends))
    paths = _paths(shape, nodes.own, nodes.R, compute) + _paths(shape, nodes.after, nodes.R * nodes.K, compute)
    states = 4 * (nodes.P + nodes.R * nodes.K) * _matrix(shape)
    wide = compute * (2 * (2 * shape.linear_key + shape.linear_value) + 4 * shape.linear_value)
    return round(part * (paths + states) + scored * wide)


def sampling_by_kernels(shape: ModelShape, nodes: Nodes, compute: int) -> int:
    """Bytes of a row's buffers for sampling: fork states in the model's precision; of every branch's places the
    convolution's inputs, keys, and in float32 writes and running decays."""
    window = min(nodes.own, CHUNK)
    forks = nodes.P if nodes.own <= CHUNK else nodes.R
    channels, keys = 2 * shape.linear_key + shape.linear_value, shape.linear_heads * shape.linear_key_head
    past = compute * channels * (max(shape.conv_kernel - 1, 0) + window)
    place = compute * keys + 4 * (shape.linear_value + shape.linear_heads)
    return forks * compute * shape.recurrent_matrices + nodes.R * shape.linear_layers * (past + window * place)


def sampling_by_torch(shape: ModelShape, nodes: Nodes) -> int:
    """The same where PyTorch takes the step: fork states, keys and writes in float32."""
    forks = nodes.P if nodes.own <= CHUNK else nodes.R
    written = shape.written_per_token * min(nodes.own, CHUNK)
    return 4 * (forks * shape.recurrent_matrices + nodes.R * written)
