"""A model over tree rows, before any verb: how its rows are laid out, embedded, run and read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tfive.errors import UserError
from tfive.tree.attention import TreePass
from tfive.tree.delimiters import Delimiters
from tfive.tree.fast import vocabulary
from tfive.tree.fast.delta_kernel import RuleChoice, choose_rule, refuse_kernels
from tfive.tree.fast.grown import GrownLayouts
from tfive.tree.fast.hf_fused import Fusion, FusionChoice, choose_fusion
from tfive.tree.fast.hf_training import TrainingChoice, choose_trained
from tfive.tree.fast.replayed import Named, ReplayedPasses
from tfive.tree.fast.tiled import tiled_trouble
from tfive.tree.gated import ReadingGates, recurrent_refusal
from tfive.tree.grow import grow, small_texts
from tfive.tree.head import Reducer, Source, VocabularyHead, reduce_vocabulary, target_log_prob
from tfive.tree.hf import Backbone, recurrent_parts
from tfive.tree.layout import PADDING, Layout, TextBatch, ThoughtPlan, Thoughts, tensors_of
from tfive.tree.outputs import Lower, Reading
from tfive.tree.packed import LARGE, packing, run_nodes
from tfive.tree.picks import Picks
from tfive.tree.recurrent.delta_rule import read_paths
from tfive.tree.recurrent.deltanet import RecurrentParts, TreeRecurrence
from tfive.tree.settings import EngineOptions


class TreeReader:
    """A language model over tree rows. It holds no weights of its own beyond the model's, the delimiters' and the
    reading gates'."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: ThoughtPlan,
        engine: EngineOptions | None = None,
        delimiters: Delimiters | None = None,
        gates: ReadingGates | None = None,
    ) -> None:
        """`gates` are needed to read continuations by a plan whose reading is gated."""
        if plan.learned and delimiters is None:
            raise ValueError("learned delimiters need a Delimiters module")
        self.model, self.plan, self.delimiters, self.gates = model, plan, delimiters, gates
        self.engine = engine or EngineOptions()
        choice = self.engine.fused_norms
        self.backbone = Backbone(model, lambda device: choice == "on" or (choice == "auto" and device.type == "cuda"))
        if plan.gated and self.backbone.recurrent:
            raise UserError(recurrent_refusal(f"{self.backbone.name} ({type(model).__name__})"))
        self.layouts = GrownLayouts(self.engine.cuda_graphs)
        self.passes = ReplayedPasses(self.engine.cuda_graphs and self.engine.replayed_passes)
        self._weights: list[Tensor] = []
        self._forbidden_V: Tensor | None = None
        self._rule: RuleChoice | None = None
        self._fusion: list[FusionChoice] = []
        self._training: TrainingChoice | None = None

    @property
    def unread(self) -> bool:
        """Whether shut gates keep every thought out of what is predicted."""
        return self.plan.gated and self.gates is not None and self.gates.shut

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def head(self) -> VocabularyHead:
        """The vocabulary head."""
        return self.backbone.head()

    @property
    def width(self) -> int:
        """D: width of the hidden states."""
        return int(self.backbone.config.hidden_size)

    @property
    def block_count(self) -> int:
        """How many blocks the model has; `lower(…, block)` counts in them."""
        return len(self.backbone.blocks)

    @property
    def forbidden_V(self) -> Tensor | None:
        """bool: vocabulary entries that are never an action; None when there are none."""
        if not self.plan.forbidden_ids:
            return None
        if self._forbidden_V is None or self._forbidden_V.device != self.device:
            self._forbidden_V = torch.zeros(self.head.vocabulary, dtype=torch.bool, device=self.device)
            self._forbidden_V[list(self.plan.forbidden_ids)] = True
        return self._forbidden_V

    def embed(self, token: Tensor, delimiter: Tensor | None = None) -> Tensor:
        """Input embeddings of vocabulary entries, or of learned delimiters where `delimiter` is 0 or 1."""
        embeds = self.backbone.embedding(token)
        if self.delimiters is not None and delimiter is not None:
            opening, close = self.delimiters.weight_2D.to(embeds.dtype)
            embeds = torch.where((delimiter == 0)[..., None], opening, embeds)
            embeds = torch.where((delimiter == 1)[..., None], close, embeds)
        return embeds

    def _grow(self, texts: TextBatch, thoughts: Thoughts | None, segments: str = "none") -> Layout:
        limit, needed = self.backbone.position_limit, texts.tokens_BS.shape[1] + self.plan.reach
        if limit is not None and needed > limit:
            raise UserError(f"text of {texts.tokens_BS.shape[1]} tokens: with a thought {needed} positions are needed, "
                            f"{self.backbone.name} has {limit}; shorten the texts")  # fmt: skip
        own = None if thoughts is None else thoughts.to(self.device)
        return self.layouts(grow, texts.to(self.device), self.plan, own, segments)

    @property
    def kernel(self) -> str:
        """How attention is computed."""
        if self.engine.attention != "auto":
            return self.engine.attention
        return "tiled" if self.tiled_trouble is None else "folded"

    @property
    def tiled_trouble(self) -> str | None:
        """Why attention is not computed by tiles, or None: it is where `auto` may choose."""
        heads = self.backbone.heads
        if heads is None:
            return "its heads are not told by its config"
        return tiled_trouble(*heads, self.device, self.model.dtype)

    def recurrence(self, layout: Layout, **options: Any) -> TreeRecurrence | None:
        """What recurrent layers need to know of a pass over `layout`; None for models without any."""
        if not self.backbone.recurrent:
            return None
        return self.rule.recurrence(layout, **options)

    @property
    def rule(self) -> RuleChoice:
        """The delta rule of recurrent layers and why it is this one; chosen once."""
        if self._rule is None:
            self._rule = choose_rule(self.engine.delta_rule, self.device, self.model.dtype, self._recurrent_layers())
        return self._rule

    def _recurrent_layers(self) -> list[RecurrentParts]:
        return [recurrent_parts(module) for module in self.backbone.recurrent.values()]

    def refuse_kernels(self, why: str) -> bool:
        """Whether the model's recurrent layers ran by kernels that nobody asked for; no engine begun later does so."""
        if not self.backbone.recurrent or self.engine.delta_rule != "auto" or self.rule.mixer is None:
            return False
        refuse_kernels(self._recurrent_layers(), self.device, why)
        return True

    @property
    def fusion(self) -> FusionChoice:
        """Fused blocks for passes without gradients, or why there are none; chosen once."""
        if not self._fusion:
            layout = self._grow(small_texts(int(self.backbone.config.vocab_size)), None)
            # Blocks are compared in float32, whatever rule the model's own precision gets.
            plain = TreeRecurrence(layout, read_paths) if self.backbone.recurrent else None
            # The step rounds as the kernels of whole passes do, so it comes with them.
            step = not self.backbone.recurrent or self.rule.mixer is not None
            self._fusion.append(choose_fusion(self.engine.fused_blocks, self.backbone, layout, plain, step))
        return self._fusion[0]

    def share_fusion(self, other: TreeReader) -> None:
        """Run the fused blocks of another engine on the same model and options, and hold no second copy of weights."""
        self._fusion = other._fusion

    @property
    def training(self) -> TrainingChoice:
        """Blocks with few kernels for passes with gradients, or why there are none; chosen once."""
        if self._training is None:
            layout = self._grow(small_texts(int(self.backbone.config.vocab_size)), None)
            try:
                plain = TreeRecurrence(layout, read_paths) if self.backbone.recurrent else None
                given = (self.backbone, self.fusion.fusion, self.fusion.reason, layout, plain)
                self._training = choose_trained(self.engine.fused_training, *given)
            except UserError as error:
                # Adapted blocks, say, are trained as they are; `engine.fast = on` is about reading and sampling.
                self._training = TrainingChoice(None, None, str(error))
        return self._training

    @property
    def _fused(self) -> Fusion | None:
        """Fused blocks where they apply: they do not follow a caller's autocast."""
        return None if self._autocast else self.fusion.fusion

    @property
    def fuses(self) -> bool:
        """Whether passes without gradients run by fused blocks."""
        return self._fused is not None

    @property
    def recomputes(self) -> bool:
        """Whether a pass keeps no activations inside blocks and is made again for its gradients."""
        return self.engine.activation_checkpointing and torch.is_grad_enabled()

    def read_only(
        self,
        embeds_BnD: Tensor,
        position_Bn: Tensor,
        tree: TreePass,
        nodes_x: Tensor | None = None,
        *,
        stop: int | None = None,
        note: tuple[int, list[Tensor]] | None = None,
    ) -> Tensor:
        """Final hidden states of a pass that needs no gradients, or the activations that enter block `stop`; where
        `nodes_x` are given, of these alone. `note` takes the activations that enter a block on the way."""
        fused = None if self._fused is None else self._fused.forwards
        given: dict[str, Any] = {"stop_block": stop, "note": note, "fused": fused}
        return run_nodes(self.backbone, embeds_BnD, position_Bn, tree, nodes_x, **given)

    def existing(self, exists_Bn: Tensor, fused: bool) -> Tensor | None:
        """The nodes that a pass computes where it leaves padding out (`packing`); None: all. `fused`: whether it runs
        by fused blocks."""
        asked = self.engine.packed
        if asked == "off" or self.backbone.recurrent:
            return None
        large = self.plan.variable_length and exists_Bn.numel() >= LARGE
        by_itself = not fused if self.device.type == "cpu" else large
        return packing(exists_Bn) if asked == "on" or by_itself else None

    def _run(
        self,
        layout: Layout,
        lower: Lower | None = None,
        stop: int | None = None,
        fuse: bool = False,
        nodes_x: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states of all nodes, `[B, N, D]`; `fuse` where no gradients are asked for. Where `nodes_x` are
        given, of these alone."""
        tree = TreePass(layout, self.kernel, recurrence=self.recurrence(layout), gates=self.gates)
        trained = None if self._autocast else self.training.forwards
        given: dict[str, Any] = {"recompute": self.recomputes, "trained": trained}
        if lower is not None:
            return self.backbone.run(lower.hidden_BND, layout.position_BN, tree, lower.block, **given)
        embeds_BND = self.embed(layout.token_BN, layout.delimiter_BN)
        if fuse:
            exists_BN = layout.kind_BN != PADDING
            nodes_x = None if stop is None else self.existing(exists_BN, self.fuses)
            return self.read_only(embeds_BND, layout.position_BN, tree, nodes_x, stop=stop)
        return run_nodes(self.backbone, embeds_BND, layout.position_BN, tree, nodes_x, stop_block=stop, **given)

    def _packing(self, layout: Layout) -> Tensor | None:
        """The nodes that a pass with gradients computes where it leaves padding out; None: all."""
        fused = not self._autocast and self.training.forwards is not None
        return None if self.recomputes else self.existing(layout.kind_BN != PADDING, fused)

    @property
    def _autocast(self) -> bool:
        """Whether the caller has asked for another precision than the weights', which fused blocks do not follow."""
        return torch.is_autocast_enabled(self.device.type)

    def reduce(self, hidden_BND: Tensor, picks: Picks, reducer: Reducer, forbidden: bool = False) -> dict[str, Tensor]:
        """The reducer's numbers at the picked nodes, in the picks' shape."""
        head, rows_XD, banned_V = self.head, picks.rows(hidden_BND), self.forbidden_V if forbidden else None
        ops = None if self._autocast else self.training.ops
        if reducer is target_log_prob and ops is not None and vocabulary.serves(head, rows_XD):
            given = (head, rows_XD, picks.target, banned_V, self.engine.head_bytes)
            return {"log_prob": picks.spread(vocabulary.log_prob(ops, *given))}
        source = Source(head, rows_XD, banned_V)
        found = reduce_vocabulary([source], reducer, {"target": picks.target}, self.engine.head_bytes)
        return {name: picks.spread(values) for name, values in found.items()}

    @property
    def replays(self) -> bool:
        """Whether passes without gradients may be captured: those of fused blocks, which never wait for the host."""
        possible = not self.backbone.recurrent and self.kernel != "flex" and self._fused is not None
        return self.passes.wanted and possible

    @property
    def takes_every(self) -> bool:
        """Whether scoring may read all that may exist rather than wait for the device to say what does: where passes
        are captured and thoughts have one length, so that hardly anything is missing."""
        graphs = self.passes.graphs is not None or self.device.type == "cuda"
        alike = not self.plan.variable_length and not self.plan.gated and self.engine.packed != "on"
        return alike and graphs and self.replays

    @property
    def replays_training(self) -> bool:
        """Whether passes with gradients may be captured: those of trained blocks and of the vocabulary's kernels, which
        never wait for the host."""
        if self.backbone.recurrent or self.plan.gated or self.kernel == "flex" or self.recomputes:
            return False
        if self._autocast or not torch.is_grad_enabled():
            return False
        head, like_1D = self.head, torch.empty(1, self.width, dtype=self.model.dtype, device="meta")
        fused = self.training.forwards is not None and self.training.ops is not None
        return fused and vocabulary.serves(head, like_1D)

    @property
    def home(self) -> tuple[int, ...]:
        """Where the weights are: captured work reads them there. Of all weights that the model began with, and of a few
        as it has them now, for listing all takes as long as a small pass."""
        if not self._weights:
            modules = [part for part in (self.model, self.delimiters) if part is not None]
            self._weights = [weight for module in modules for weight in module.parameters()]
        parts: list[Any] = [self.backbone.embedding, self.backbone.blocks[0], self.backbone.blocks[-1]]
        parts += [part for part in (self.delimiters, self.model.get_output_embeddings()) if part is not None]
        return tuple(weight.data_ptr() for weight in (*self._weights, *(next(part.parameters()) for part in parts)))

    def _read_attending(self, below: int | None, given: Sequence[Tensor]) -> Named:
        """Final hidden states of texts, what enters block `below`, and keys and values by layer."""
        layout = self._grow(TextBatch(*given), None)
        tree, entering = TreePass(layout, self.kernel, keep=True), list[Tensor]()
        note = None if below is None else (below, entering)
        found = {"hidden": self.read_only(self.embed(layout.token_BN), layout.position_BN, tree, note=note)}
        found |= zip(("entering",), entering)
        for index, both in tree.kept.items():
            found |= zip((f"key {index}", f"value {index}"), both)
        return found

    @torch.no_grad()
    def read(self, texts: TextBatch, below: int | None = None) -> Reading:
        """One pass over the texts themselves, to be handed to `sample` and `score`; with `below`, the activations that
        enter that block are kept as well."""
        if self.replays:
            read = partial(self._read_attending, below)
            found = self.passes(("read", below, self.plan), self.home, read, tensors_of(texts.to(self.device)))
            lower = None if below is None else Lower(found["entering"], below)
            layers = (int(name.removeprefix("key ")) for name in found if name.startswith("key "))
            kept = {index: (found[f"key {index}"], found[f"value {index}"]) for index in layers}
            return Reading(found["hidden"], kept, {}, lower)
        layout = self._grow(texts, None)
        recurrence = self.recurrence(layout, position_BP=texts.positions_BP.to(self.device), keep=True)
        tree = TreePass(layout, self.kernel, keep=True, recurrence=recurrence)
        entering: list[Tensor] = []
        note = None if below is None else (below, entering)
        hidden_BSD = self.read_only(self.embed(layout.token_BN), layout.position_BN, tree, note=note)
        lower = None if below is None else Lower(entering[0], below)
        return Reading(hidden_BSD, tree.kept, {} if recurrence is None else recurrence.memory, lower)
