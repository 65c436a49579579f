"""Every touch of transformers' internals: finding a model's parts, and driving it over tree rows.

Models are not modified. For the length of a call the attention implementation named in the model's config is ours; it
receives the pass (an `attention.Attending`) as a keyword that transformers hands down to every layer, together with
what the layer knows about itself (scale, sliding window, soft cap). Keys and values are held by the pass, so
transformers' cache classes, whose interfaces move between versions, are never used, and neither are its masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from tfive.errors import UserError
from tfive.tree.attention import Attending
from tfive.tree.head import VocabularyHead
from tfive.tree.recurrent.deltanet import RecurrentParts
from tfive.tree.stretches import stretched

IMPLEMENTATION = "tfive_tree"
_NOT_COMPUTED = ("s_aux", "position_bias", "sinks")
"""What a layer may hand to its attention function that changes the result and that no kernel of ours computes."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree: Attending | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if tree is None:
        raise UserError(f"{type(module).__name__} does not hand keywords to its attention; this model cannot be driven")
    strange = [name for name in _NOT_COMPUTED if others.get(name) is not None]
    if strange:
        raise UserError(f"{type(module).__name__} uses {', '.join(strange)}, which the tree engine does not compute")
    return tree.attend(module.layer_idx, query, key, value, scaling, sliding_window, softcap), None  # type: ignore[arg-type]


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def recurrent_parts(module: nn.Module) -> RecurrentParts:
    """A gated delta net layer of transformers (Qwen3.5 naming) as `recurrent/deltanet.py` sees it."""
    m: Any = module

    def project(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return m.in_proj_qkv(hidden), m.in_proj_z(hidden), m.in_proj_b(hidden), m.in_proj_a(hidden)

    def finish(output: Tensor, gate: Tensor) -> Tensor:
        normed = m.norm(output.reshape(-1, m.head_v_dim), gate.reshape(-1, m.head_v_dim))
        return m.out_proj(normed.reshape(*gate.shape[:-1], -1))

    return RecurrentParts(
        layer=m.layer_idx,
        project=project,
        finish=finish,
        activate=F.silu,
        taps_UJ=m.conv1d.weight.squeeze(1),
        tap_bias_U=m.conv1d.bias,
        log_rate_I=m.A_log,
        rate_bias_I=m.dt_bias,
        key_heads=m.num_k_heads,
        key_features=m.head_k_dim,
        value_features=m.head_v_dim,
        norm_F=m.norm.weight,
        norm_epsilon=m.norm.variance_epsilon,
        outward=m.out_proj,
    )


def is_recurrent(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("in_proj_qkv", "in_proj_z", "conv1d", "A_log", "dt_bias"))


class Backbone:
    """A transformers model, with or without a vocabulary head, as something to run tree rows through."""

    def __init__(self, model: PreTrainedModel, fuse: Callable[[torch.device], bool] = lambda _: False) -> None:
        """`fuse` says on which devices root-mean-square norms are computed by one kernel, not the model's seven."""
        self.model, self._fuse = model, fuse
        self._fused: list[tuple[nn.Module, RootMeanSquare]] | None = None
        self._stretched: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] | None = None
        self.base: Any = model.base_model
        self.config: Any = self.base.config
        self.blocks = self._find_blocks()
        self.recurrent = {i: m for i, b in enumerate(self.blocks) for m in b.children() if is_recurrent(m)}
        if any(module.activation not in ("silu", "swish") for module in self.recurrent.values()):
            raise UserError(f"{self.name}: recurrent layers with an activation other than silu are not computed")

    @property
    def name(self) -> str:
        """How to call the model in messages."""
        return getattr(self.config, "_name_or_path", "") or type(self.model).__name__

    def _find_blocks(self) -> list[nn.Module]:
        count = self.config.num_hidden_layers
        found = [m for m in self.base.children() if isinstance(m, nn.ModuleList) and len(m) == count]
        if len(found) != 1:
            raise UserError(
                f"{self.name}: no list of {count} blocks in {type(self.base).__name__}; it cannot be driven"
            )
        return list(found[0])

    @property
    def block_names(self) -> list[str]:
        """The names of the model's blocks, but for stand-ins without weights."""
        own = [block for block in self.blocks if next(block.parameters(), None) is not None]
        return [name for name, module in self.model.named_modules() if any(module is block for block in own)]

    @property
    def embedding(self) -> nn.Module:
        """The input embedding, scaling of its own included."""
        return self.base.get_input_embeddings()

    @property
    def position_limit(self) -> int | None:
        """How many positions there are, for models that learn them; None for rotary ones."""
        table = getattr(self.base, "wpe", None) or getattr(self.base, "embed_positions", None)
        return table.num_embeddings if isinstance(table, nn.Embedding) else None

    @property
    def heads(self) -> tuple[int, int, int] | None:
        """Query heads, key heads and features of a head, where the config tells."""
        queries = getattr(self.config, "num_attention_heads", None)
        if not isinstance(queries, int) or queries < 1:
            return None
        keys = getattr(self.config, "num_key_value_heads", None) or queries
        return queries, keys, getattr(self.config, "head_dim", None) or self.config.hidden_size // queries

    @property
    def windows(self) -> set[int]:
        """Every number in the config that may bound how far attention looks back."""
        bounds = ("window", "chunk")
        return {
            value
            for key, value in self.config.to_dict().items()
            if any(word in key for word in bounds) and type(value) is int and value > 0
        }

    def head(self) -> VocabularyHead:
        """The vocabulary head with the transforms transformers applies to its logits."""
        module = self.model.get_output_embeddings()
        if module is None:
            raise UserError(f"{self.name} has no vocabulary head")
        cap = getattr(self.config, "final_logit_softcapping", None)
        factor = getattr(self.config, "logit_scale", None) or 1.0
        divisor = getattr(self.config, "logits_scaling", None) or 1.0
        return VocabularyHead(module, cap=cap, factor=factor / divisor)

    def run(
        self,
        embeds_BnD: Tensor,
        position_Bn: Tensor,
        tree: Attending,
        first_block: int = 0,
        stop_block: int | None = None,
        recompute: bool = False,
        fused: Sequence[Callable[..., Tensor]] | None = None,
        trained: Sequence[Callable[..., Tensor]] | None = None,
        note: tuple[int, list[Tensor]] | None = None,
    ) -> Tensor:
        """Final hidden states (after the last norm) of the pass's nodes, `[B, n, D]`.

        With `first_block` = k, `embeds_BnD` are activations that enter block k and the blocks before it are skipped;
        with `stop_block` = k the activations entering block k are returned instead. So the frozen lower part of a model
        can be computed once and its top run from there many times. `recompute` keeps no activations inside blocks.
        `fused` are forwards to run instead of the blocks' own (see `fast/hf_fused.py`); they have no gradients, write
        over their input and begin at the first block.
        `trained` are such forwards that have them (`fast/hf_training.py`). `note` names a block and takes a copy of the
        activations that enter it on the way.
        """
        if self.model.training:
            self.model.eval()
        entering: list[Tensor] = []
        with ExitStack() as patches:
            patches.enter_context(self._attached())
            if tree.angles is not None:
                patches.enter_context(replaced(self.base.rotary_emb, _handing(tree.angles)))
            for index, block in enumerate(self.blocks):
                whole = block.forward if trained is None else trained[index]
                if index < first_block or (stop_block is not None and index > stop_block):
                    patches.enter_context(replaced(block, _pass_through))
                elif index == stop_block:
                    patches.enter_context(replaced(block, _noting(entering)))
                elif fused is not None:
                    patches.enter_context(replaced(block, fused[index]))
                elif index == first_block > 0:
                    patches.enter_context(replaced(block, self._block(_entered_by(whole, embeds_BnD), recompute)))
                elif recompute or trained is not None:
                    patches.enter_context(replaced(block, self._block(whole, recompute)))
                if note is not None and index == note[0]:
                    patches.enter_context(replaced(block, _noted(block.forward, note[1])))
            output = self.base(
                inputs_embeds=embeds_BnD,
                position_ids=position_Bn,
                # A mask of four dimensions stops transformers from making one; the pass brings its own.
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=embeds_BnD.device),
                use_cache=False,
                tree=tree,
            )
        return entering[0] if stop_block is not None and stop_block < len(self.blocks) else output.last_hidden_state

    def plain(self, embeds_BnD: Tensor, position_Bn: Tensor) -> Tensor:
        """Logits of the stock model on plain rows, with the attention that is spelled out in its own file: fused ones
        silently leave things out (a soft cap, say) in some versions."""
        with self.attending_by("eager"):
            output = self.model(inputs_embeds=embeds_BnD, position_ids=position_Bn, use_cache=False)
        return output.logits

    @contextmanager
    def attending_by(self, implementation: str) -> Iterator[None]:
        before = self.config._attn_implementation
        self.config._attn_implementation = implementation
        try:
            yield
        finally:
            self.config._attn_implementation = before

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Our attention in place of the model's own, recurrent layers handed to the pass, norms fused where asked."""
        with self.attending_by(IMPLEMENTATION), ExitStack() as patches:
            if self._fuse(next(self.base.parameters()).device):
                if self._fused is None:
                    self._fused = [(m, f) for m in self.base.modules() if (f := fused_norm(m)) is not None]
                for module, forward in self._fused:
                    patches.enter_context(replaced(module, forward))
            for module in self.recurrent.values():
                patches.enter_context(replaced(module, mixing(module)))
            for module, product in self._products():
                patches.enter_context(replaced(module, product))
            yield

    def _products(self) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """Blocks' gated products with forwards in stretches, on processors and without gradients; not those that have
        another forward for now."""
        if torch.is_grad_enabled() or next(self.base.parameters()).device.type != "cpu":
            return []
        if self._stretched is None:
            parts = (part for block in self.blocks for part in block.children())
            self._stretched = [(part, own) for part in parts if (own := stretched(part)) is not None]
        return [(part, own) for part, own in self._stretched if "forward" not in part.__dict__]

    def _block(self, forward: Callable[..., Any], recompute: bool) -> Callable[..., Any]:
        if not recompute:
            return forward

        def attached(*args: Any, **kwargs: Any) -> Any:
            # It runs again in the backward pass, when our attention is no longer attached.
            with self._attached():
                return forward(*args, **kwargs)

        def block(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(attached, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return block


class RootMeanSquare:
    """A root-mean-square norm by one kernel, with the module's weight or (`shift`) one plus it."""

    def __init__(self, module: nn.Module, epsilon: float, shift: bool) -> None:
        self.module, self.epsilon, self.shift = module, epsilon, shift

    @property
    def weight(self) -> Tensor:
        """What the normed features are multiplied with, as of now."""
        own: Any = self.module.weight
        return 1.0 + own if self.shift else own

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        return F.rms_norm(hidden_states, weight.shape, weight, self.epsilon)


@torch.no_grad()
def fused_norm(module: nn.Module) -> RootMeanSquare | None:
    """A one-kernel forward for a root-mean-square norm, None for any other module.

    What counts is what the module computes, not what it is called: with its weight, or with one plus it.
    """
    m: Any = module
    epsilon = getattr(m, "variance_epsilon", getattr(m, "eps", None))
    weight = m._parameters.get("weight")
    if epsilon is None or weight is None or weight.ndim != 1 or len(m._parameters) != 1 or m._modules:
        return None
    trial = torch.randn(8, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        wanted = m(trial)
    except TypeError:
        return None  # it asks for more than hidden states: another kind of norm
    tolerance = 2e-2 if weight.dtype in (torch.bfloat16, torch.float16) else 1e-5
    for forward in (RootMeanSquare(m, epsilon, False), RootMeanSquare(m, epsilon, True)):
        if torch.allclose(forward(trial), wanted, rtol=tolerance, atol=tolerance):
            return forward
    return None


def mixing(module: nn.Module) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, tree: Attending, **_: Any) -> Tensor:
        if tree.recurrence is None:
            raise RuntimeError("this pass has no recurrence for a recurrent layer")
        return tree.recurrence.mix(recurrent_parts(module), hidden_states)

    return forward


def _pass_through(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _handing(angles: tuple[Tensor, Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def forward(*_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return angles

    return forward


def _noting(entering: list[Tensor]) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        entering.append(hidden_states)
        return hidden_states

    return forward


def _noted(forward: Callable[..., Any], entering: list[Tensor]) -> Callable[..., Any]:
    def noted(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        entering.append(hidden_states.clone())  # a fused block writes over its input
        return forward(hidden_states, *args, **kwargs)

    return noted


def _entered_by(forward: Callable[..., Any], activations: Tensor) -> Callable[..., Any]:
    # Between embeddings and blocks a model may add positions or scale; entering activations must skip that.
    def entered(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(activations, *args, **kwargs)

    return entered


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module.forward` replaced on this object for the length of the context."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own
