"""How large a language model is, from its `config.json` or from the shape facts stored beside the presets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tfive.errors import UserError

_NORMED_QUERIES = ("qwen3",)
"""Model families (by the start of `model_type`) that normalise queries and keys per head."""
_BIASED_QUERIES = ("qwen2",)
"""Model families that add a bias to queries, keys and values, whatever their configuration says."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide memory; linear (recurrent) layers have `linear_*` sizes, all zero without them."""

    source: str
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool
    heads: int
    kv_heads: int
    head_dim: int
    attention_layers: int
    linear_layers: int
    linear_key: int
    linear_value: int
    linear_heads: int
    linear_key_head: int
    conv_kernel: int
    normed_queries: bool
    gated_attention: bool
    attention_bias: bool
    """Of queries, keys, values and output."""
    query_bias: bool
    """Of queries, keys and values alone."""

    @property
    def layers(self) -> int:
        """Blocks of either kind."""
        return self.attention_layers + self.linear_layers

    @property
    def attention_block(self) -> int:
        """Parameters of one attention block with its MLP and norms."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = self.hidden * (query * (2 if self.gated_attention else 1) + 2 * key) + query * self.hidden
        bias = query + 2 * key if self.attention_bias or self.query_bias else 0
        bias += self.hidden if self.attention_bias else 0
        norms = 2 * self.head_dim if self.normed_queries else 0
        return projections + bias + norms + self._mlp

    @property
    def linear_block(self) -> int:
        """Parameters of one gated-delta-net block with its MLP and norms."""
        channels = 2 * self.linear_key + self.linear_value
        projections = (
            self.hidden * (channels + self.linear_value + 2 * self.linear_heads) + self.linear_value * self.hidden
        )
        head = self.linear_value // self.linear_heads if self.linear_heads else 0
        return projections + channels * self.conv_kernel + 2 * self.linear_heads + head + self._mlp

    @property
    def _mlp(self) -> int:
        return 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding."""
        return self.vocabulary * self.hidden

    @property
    def backbone(self) -> int:
        """Parameters without the output head: what a critic needs."""
        blocks = self.attention_layers * self.attention_block + self.linear_layers * self.linear_block
        return self.embedding + blocks + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied head adds none."""
        return self.backbone + (0 if self.tied else self.embedding)

    def top_blocks(self, count: int) -> int:
        """Parameters of the last `count` blocks and the final norm (hybrids: by the mean block)."""
        blocks = self.backbone - self.embedding - self.hidden
        return round(blocks * min(count, self.layers) / self.layers) + self.hidden

    @property
    def recurrent_state(self) -> int:
        """Numbers in the recurrent and convolution states of one row, over all linear layers."""
        value_head = self.linear_value // self.linear_heads if self.linear_heads else 0
        matrix = self.linear_heads * self.linear_key_head * value_head
        return self.linear_layers * (matrix + (2 * self.linear_key + self.linear_value) * max(self.conv_kernel - 1, 0))

    @property
    def recurrent_matrices(self) -> int:
        """Numbers in the recurrent states alone of one row, over all linear layers."""
        return self.linear_layers * self.linear_key_head * self.linear_value

    @property
    def written_per_token(self) -> int:
        """Numbers that sampling remembers of a branch's own token until they are folded into its state: key and write
        of every head, over all linear layers."""
        return self.linear_layers * (self.linear_heads * self.linear_key_head + self.linear_value)

    @property
    def from_residual(self) -> int:
        """Weights that read the residual stream: those that sampling by fused blocks holds copies of."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = query * (2 if self.gated_attention else 1) + 2 * key
        linear = 2 * self.linear_key + 2 * self.linear_value + 2 * self.linear_heads
        mixers = self.attention_layers * attention + self.linear_layers * linear
        return self.hidden * (mixers + self.layers * 2 * self.intermediate)

    @property
    def projection_ends(self) -> tuple[int, int, int]:
        """Inputs and outputs of all linear layers of attention, of a gated delta net and of a feed-forward part, added
        up: a low-rank update has so many weights per rank."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        asked = query * (2 if self.gated_attention else 1)
        attention = (self.hidden + asked) + 2 * (self.hidden + key) + (query + self.hidden)
        channels, value, heads = 2 * self.linear_key + self.linear_value, self.linear_value, self.linear_heads
        linear = 5 * self.hidden + channels + value + 2 * heads + value
        return attention, linear, 3 * (self.hidden + self.intermediate)

    @property
    def cache_per_token(self) -> int:
        """Numbers in the keys and values of one token, over all attention layers."""
        return self.attention_layers * 2 * self.kv_heads * self.head_dim

    def kept_per_node(self, compute: int) -> tuple[int, int]:
        """Bytes an attention and a linear block keep per node for the backward pass, the delta rule apart.

        Both: norm inputs (float32), normed values and their products, two residual sums (6 D); gate, up, activated and
        multiplied parts of the MLP (4 I). Attention: queries, keys, values, output (and its gate), twice more what is
        normed per head. Linear: the channels three times (projected, convolved, split), five times the value width for
        the gated norm, in float32. Compared with saved tensors of small models in `tests/training/test_memory.py`.
        """
        common = self.kept_by_any(compute)
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = compute * ((3 if self.gated_attention else 2) * query + 2 * key)
        attention += (compute + 4) * (query + key) if self.normed_queries else 0
        linear = compute * 3 * (2 * self.linear_key + self.linear_value) + 4 * 5 * self.linear_value
        return common + attention, common + linear

    def kept_by_any(self, compute: int) -> int:
        """Bytes that any block keeps per node for the backward pass, without its mixer."""
        return compute * (6 * self.hidden + 4 * self.intermediate) + 2 * self.hidden * (4 - compute)

    def kept_by_trained(self, compute: int) -> tuple[int, int]:
        """The same where blocks are trained by few kernels (`tree.fast.trained`): of an attention block, and of any
        without its mixer.

        Any: what enters both norms and what leaves them (4 D), a scale each, gate, up and their product (3 I).
        Attention: the joined products, all three rotated, the output and a mass a head, and what the gate makes of it.
        """
        common = compute * (4 * self.hidden + 3 * self.intermediate) + 8
        query, key, gate = self.heads * self.head_dim, self.kv_heads * self.head_dim, int(self.gated_attention)
        return common + compute * ((3 + 3 * gate) * query + 4 * key) + 4 * self.heads, common

    @property
    def joined(self) -> int:
        """Weights of queries, keys and values that trained blocks hold side by side until their backward pass."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.attention_layers * self.hidden * (query * (2 if self.gated_attention else 1) + 2 * key)

    @property
    def kept_per_path_token(self) -> int:
        """Bytes one linear layer keeps per token of a path through PyTorch's delta rule, which computes in float32.

        Queries, keys and values twice, the state at each chunk of 64 twice, four 64-wide matrices a head, the output.
        """
        channels = 2 * self.linear_key + self.linear_value
        state = self.linear_key_head * self.linear_value
        return 4 * (2 * channels + 2 * state // 64 + 4 * 64 * self.linear_heads + self.linear_value)


def shape_from(config: Mapping[str, Any], source: str) -> ModelShape:
    """The shape a Hugging Face `config.json` describes (its text part, for models that also see images)."""
    text = config.get("text_config") or config
    try:
        layers, heads, hidden = (int(text[k]) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
        kinds = text.get("layer_types")
        interval = int(text.get("full_attention_interval", 4))
        if kinds is None and "linear_num_value_heads" in text:
            kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
        linear = sum(kind == "linear_attention" for kind in kinds or ())
        key_head, value_head = (int(text.get(f"linear_{k}_head_dim", 0)) if linear else 0 for k in ("key", "value"))
        value_heads = int(text.get("linear_num_value_heads", 0)) if linear else 0
        family = str(text.get("model_type", ""))
        return ModelShape(
            source=source,
            hidden=hidden,
            intermediate=int(text["intermediate_size"]),
            vocabulary=int(text["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            attention_layers=layers - linear,
            linear_layers=linear,
            linear_key=int(text.get("linear_num_key_heads", 0)) * key_head,
            linear_value=value_heads * value_head,
            linear_heads=value_heads,
            linear_key_head=key_head,
            conv_kernel=int(text.get("linear_conv_kernel_dim", 0)) if linear else 0,
            normed_queries=family.startswith(_NORMED_QUERIES),
            gated_attention=family.startswith("qwen3_5"),
            attention_bias=bool(text.get("attention_bias", False)),
            query_bias=family.startswith(_BIASED_QUERIES),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{source}: no usable model shape ({error!r}); give a decoder's config.json") from error


def known_shapes() -> dict[str, dict[str, Any]]:
    """Shape facts stored beside the presets, by the last part of the model's name; some have a second name."""
    stored = json.loads(files("tfive.config").joinpath("presets", "shapes.json").read_text("utf-8"))
    return {name: stored[facts] if isinstance(facts, str) else facts for name, facts in stored.items()}


def find_shape(model: str, folders: tuple[Path, ...] = ()) -> ModelShape | None:
    """The shape of `model` from a local `config.json`, else from the stored facts, else None."""
    for folder in (Path(model), *folders):
        path = folder / "config.json"
        if path.is_file():
            try:
                return shape_from(json.loads(path.read_text("utf-8")), str(path))
            except ValueError as error:
                raise UserError(f"{path}: not valid JSON ({error}); give a readable model folder") from error
    name = model.replace("\\", "/").rstrip("/").rpartition("/")[2]
    known = known_shapes()
    matches = [key for key in known if name.lower().startswith(key.lower())]
    return shape_from(known[max(matches, key=len)], "shape facts beside the presets") if matches else None
