"""`ThoughtModel`: a trained model with its thoughts and its gate, ready to predict and to write.

A thought after token p serves the next H tokens, then it is dropped; the newest wins. Predictions with and without it
are mixed in probability by the gate. Plain `transformers` loads the same folder as the actor alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tfive import rng
from tfive.errors import UserError
from tfive.inference.files import ThoughtModelParts, load_parts, save_parts
from tfive.inference.places import Places, uncertain_places
from tfive.inference.requests import Completion, TokenRequest, When, WritingMode, text_law
from tfive.inference.results import Generation, Prediction, TextScores, Thought
from tfive.inference.rows import plain_predictions, token_rows
from tfive.inference.writer import write
from tfive.inference.written import completed_text, stop_finder, with_thoughts
from tfive.rl.gate import PredictionGate
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.gated import ReadingGates
from tfive.tree.head import mix_log_probs
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts, plan_thoughts
from tfive.tree.outputs import Reading
from tfive.tree.settings import EngineOptions, SamplingSettings, ThoughtSettings

_PASS_NODES = 4096
"""Branch nodes scored in one pass: keeps the mask of a long text small."""


def plan_for(thought: ThoughtSettings, model: PreTrainedModel, tokenizer: Any) -> ThoughtPlan:
    """The plan of `thought` in this vocabulary; special tokens, and rows beyond the tokenizer, are never an action."""
    embedding: Any = model.get_input_embeddings()
    vocabulary = embedding.num_embeddings
    special = {i for i in tokenizer.all_special_ids if i < vocabulary} | set(range(len(tokenizer), vocabulary))
    return plan_thoughts(thought, lambda text: tokenizer.encode(text, add_special_tokens=False), sorted(special))


class ThoughtModel:
    """A language model that thinks before some of its predictions.

    >>> model = ThoughtModel.from_pretrained("out/")
    >>> found = model.predict("37 boxes of 48 pencils each, which makes 1776 pencils.")
    >>> found.mixed_gain, [thought.text for thought in found.thoughts]
    >>> model.generate("37 boxes of 48 pencils each, which makes", max_new_tokens=20, show=True).text
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        thought: ThoughtSettings,
        sampling: SamplingSettings | None = None,
        gate: PredictionGate | None = None,
        delimiters: Delimiters | None = None,
        *,
        gates: ReadingGates | None = None,
        engine: EngineOptions | None = None,
        origin: dict[str, Any] | None = None,
    ) -> None:
        """`sampling` is the law of thought tokens. Without a `gate` a thought is trusted fully where it serves.
        `gates` are those of gated reading, through which thoughts are read at all."""
        embedding: Any = model.get_input_embeddings()
        if (thought.delimiters == "learned") != (delimiters is not None):
            raise UserError(
                f"thought.delimiters = {thought.delimiters!r}: learned delimiters, and only they, have weights"
            )
        if (thought.reading == "gated") != (gates is not None):
            raise UserError(f"thought.reading = {thought.reading!r}: gated reading, and only it, has reading gates")
        if gates is not None and gates.gate.shape != ReadingGates.of(model).gate.shape:
            raise UserError(
                f"the reading gates are of {gates.layers} layers of {gates.heads} heads, not of this model; use its own"
            )
        if gate is not None and gate.features != embedding.embedding_dim:
            raise UserError(
                f"the gate reads {gate.features} features, the model gives {embedding.embedding_dim}; use its own gate"
            )
        self.model = model.eval()
        self.gate = gate and gate.to(model.device).eval()
        self.delimiters = delimiters and delimiters.to(model.device)
        self.gates = gates and gates.to(model.device)
        self.tokenizer, self.thought, self.sampling = tokenizer, thought, sampling or SamplingSettings()
        self.origin, self._visible = origin or {}, partial(self._decode, specials=False)
        self.plan = replace(plan_for(thought, model, tokenizer), checkpoints=(thought.length,), group=1)
        # Engines are made for a call: admitting fused blocks, which asks for a trial, would not pay.
        self.settings = engine or EngineOptions(max_nodes=_PASS_NODES, fused_blocks="off")

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        *,
        thought: ThoughtSettings | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> ThoughtModel:
        """The model in a folder that `save_pretrained` or `tfive export` wrote; or any model (`nano`, a hub id, a
        folder, a `.gguf` file) with thoughts that nobody trained, shaped by `thought` and trusted fully."""
        parts = load_parts(source, thought=thought, device=device, dtype=dtype)
        thoughts = parts.thought, parts.sampling, parts.gate, parts.delimiters
        return cls(parts.model, parts.tokenizer, *thoughts, gates=parts.gates, origin=parts.origin)

    def __repr__(self) -> str:
        weights = sum(weight.numel() for weight in self.model.parameters())
        origin = f"{self.origin.get('method', 'untrained thoughts')} on {self.origin.get('base', 'a model of yours')}"
        gate = "no gate" if self.gate is None else "a gate"
        shape = f"thoughts of {self.plan.length} tokens that serve {self.plan.horizon}, {gate}"
        return f"ThoughtModel({origin}; {weights / 1e6:.1f} M weights; {shape}; {self.model.device})"

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a Hugging Face folder for the actor and, in `thoughts/`, everything else; refuses a full folder."""
        parts = self.thought, self.sampling, self.gate, self.delimiters, self.origin, self.gates
        save_parts(ThoughtModelParts(self.model, self.tokenizer, *parts), folder)

    @property
    def limit(self) -> int | None:
        """The most positions the model takes, where it says so."""
        learned = self.engine().backbone.position_limit
        return learned or getattr(self.model.config, "max_position_embeddings", None)

    def engine(self) -> TreeModel:
        """The model as a tree engine with this plan."""
        # A fresh one a call: it keeps sampling buffers for every shape it meets.
        return TreeModel(self.model, self.plan, self.settings, self.delimiters, self.gates)

    def _encode(self, text: str, least: int, what: str) -> list[int]:
        tokenizer: Any = self.tokenizer
        ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
        if len(ids) < least:
            raise UserError(f"{what} of {len(ids)} tokens: at least {least} are needed; give more text")
        return ids

    def _check_length(self, tokens: int, thinking: bool, what: str) -> None:
        needed = tokens + (self.plan.reach if thinking else 0)
        if self.limit is not None and needed > self.limit:
            extra = f" and {self.plan.reach} for a thought" if thinking else ""
            raise UserError(f"{what} needs {tokens} positions{extra}, the model has {self.limit}; give less text")

    def _decode(self, ids: Sequence[int], specials: bool = True) -> str:
        tokenizer: Any = self.tokenizer
        return tokenizer.decode(list(ids), skip_special_tokens=not specials, clean_up_tokenization_spaces=False)

    def _thought(self, position: int, ids: Sequence[int], closed: bool) -> Thought:
        return Thought(position, self._decode(ids[:-1] if closed else ids), tuple(ids), closed)

    @overload
    def predict(
        self,
        text: str,
        *,
        positions: Sequence[int] | None = ...,
        every: int | None = ...,
        after: str | Sequence[str] | None = ...,
        pattern: str | None = ...,
        entropy_above: float | None = ...,
        gate_above: float | None = ...,
        seed: int = ...,
    ) -> Prediction: ...

    @overload
    def predict(
        self,
        text: list[str] | tuple[str, ...],
        *,
        positions: Sequence[int] | None = ...,
        every: int | None = ...,
        after: str | Sequence[str] | None = ...,
        pattern: str | None = ...,
        entropy_above: float | None = ...,
        gate_above: float | None = ...,
        seed: int = ...,
    ) -> list[Prediction]: ...

    def predict(
        self,
        text: str | list[str] | tuple[str, ...],
        *,
        positions: Sequence[int] | None = None,
        every: int | None = None,
        after: str | Sequence[str] | None = None,
        pattern: str | None = None,
        entropy_above: float | None = None,
        gate_above: float | None = None,
        seed: int = 0,
    ) -> Prediction | list[Prediction]:
        """How well a text, or each of several, is predicted with and without thoughts, and what the thoughts say.

        Thoughts stand after every H-th token, or as one of these says: `positions` (after these tokens), `every` (a
        stride), `after` (a text, or several), `pattern` (a regular expression), `entropy_above` (where the plain
        prediction is more uncertain than so many nats) or `gate_above` (where the gate trusts the thought more).
        """
        where = Places(positions, every, after, pattern, entropy_above, gate_above)
        if isinstance(text, str):
            return self._predict(text, where, seed)
        return [self._predict(one, where, seed) for one in text]

    @torch.no_grad()
    def _predict(self, text: str, where: Places, seed: int) -> Prediction:
        ids = self._encode(text, 2, "text")
        self._check_length(len(ids), True, "text")

        def uncertain(_: int, entropy: Tensor) -> list[int]:
            return uncertain_places(entropy, where.entropy_above or 0.0, self.plan.horizon)

        chosen = where.chosen(ids, self.plan.horizon, self._decode)
        (scores,) = self.score([ids], [chosen] if where.entropy_above is None else uncertain, seed=seed)
        if where.gate_above is not None:
            (scores,) = self.score([ids], [self._trusted(scores, where.gate_above)], seed=seed)
        return Prediction(**vars(scores), ids=tuple(ids), tokens=tuple(self._decode([i]) for i in ids))

    def _trusted(self, scores: TextScores, above: float) -> list[int]:
        """Places whose thoughts the gate trusts more than that, on average over the tokens they serve."""
        if self.gate is None:
            raise UserError("gate_above: this model has no gate; choose places in another way")
        starts = [thought.position for thought in scores.thoughts]
        ends = [*starts[1:], len(scores.gate)]
        spans = ((at, min(end, at + self.plan.horizon)) for at, end in zip(starts, ends))
        return [at for at, end in spans if float(scores.gate[at:end].mean()) > above]

    @torch.no_grad()
    def score(
        self,
        rows: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]] | Callable[[int, Tensor], list[int]],
        *,
        seed: int = 0,
        items: Sequence[int] | None = None,
    ) -> list[TextScores]:
        """How well each row of tokens is predicted with thoughts after its `positions`, all rows in one pass.

        `positions` may be a function of the row's number and the entropies of its plain predictions. `items` says which
        random numbers a row's thoughts get (default 0).
        """
        engine, numbers = self.engine(), items or [0] * len(rows)
        known = None if callable(positions) else [list(chosen) for chosen in positions]
        texts = token_rows(rows, known or [[] for _ in rows], engine.device)
        reading = engine.read(texts)
        plain, entropy = plain_predictions(engine, texts, reading)
        lengths = [len(ids) - 1 for ids in rows]
        if callable(positions):
            known = [positions(n, entropy[n, :length]) for n, length in enumerate(lengths)]
            # Recurrent layers keep their states at the positions known when the text is read.
            texts = token_rows(rows, known, engine.device)
            reading = engine.read(texts)
        thoughtful, beta, thoughts = self._served(engine, texts, reading, seed, numbers, plain)
        if engine.unread:
            thoughtful = torch.where(thoughtful.isnan(), thoughtful, plain)  # bit for bit, whatever the head's chunks
        as_plain = thoughtful.isnan() | (thoughtful == plain)
        mixed = torch.where(as_plain, plain, mix_log_probs(plain, thoughtful.nan_to_num(), beta))
        return [
            TextScores(plain[n, :m], thoughtful[n, :m], beta[n, :m], mixed[n, :m], entropy[n, :m], tuple(thoughts[n]))
            for n, m in enumerate(lengths)
        ]

    def _served(
        self, engine: TreeModel, texts: TextBatch, reading: Reading, seed: int, items: Sequence[int], plain: Tensor
    ) -> tuple[Tensor, Tensor, list[list[Thought]]]:
        """Thoughts at the texts' positions and what they make of the tokens they serve; later ones overrule."""
        thoughtful, beta = torch.full_like(plain, torch.nan), torch.zeros_like(plain)
        chosen = [[p for p in row if p >= 0] for row in texts.positions_BP.tolist()]
        if not any(chosen):
            return thoughtful, beta, [[] for _ in chosen]
        numbers = np.stack(
            [
                rng.uniforms(seed, "thought", item, np.maximum(row, 0)[:, None], 0, np.arange(self.plan.length))
                for item, row in zip(items, texts.positions_BP.cpu().numpy())
            ]
        )
        thoughts = engine.sample(texts, torch.from_numpy(numbers), self.sampling, reading)
        scores = engine.score(texts, thoughts, reading, features=self.gate is not None, whole=True)
        trust_BRH = torch.ones_like(scores.token_BRH)
        if self.gate is not None:
            trust_BRH = torch.sigmoid(self.gate(scores.need("features_BRHD"), scores.need("no_thought_features_BRHD")))
        loss, trust, mask = (x.cpu() for x in (scores.token_BRH, trust_BRH, scores.token_mask_BRH))
        for b, row in enumerate(chosen):
            for r, position in enumerate(row):
                count = int(mask[b, r].sum())
                here = slice(position, position + count)
                thoughtful[b, here] = -loss[b, r, :count].to(thoughtful)
                beta[b, here] = trust[b, r, :count].to(beta)
        return thoughtful, beta, [self._listed(row, thoughts.rows(b, b + 1)) for b, row in enumerate(chosen)]

    def _listed(self, positions: list[int], thoughts: Thoughts) -> list[Thought]:
        rows = zip(positions, thoughts.tokens_BRT[0].tolist(), thoughts.length_BR[0].tolist(), thoughts.closed_BR[0])
        return [self._thought(position, ids[:length], bool(closed)) for position, ids, length, closed in rows]

    @overload
    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = ...,
        every: int | None = ...,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        seed: int = ...,
        stop: str | Sequence[str] | None = ...,
        show: bool = ...,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...],
        *,
        max_new_tokens: int = ...,
        every: int | None = ...,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        seed: int = ...,
        stop: str | Sequence[str] | None = ...,
        show: bool = ...,
    ) -> list[Generation]: ...

    @torch.no_grad()
    def generate(
        self,
        prompt: str | list[str] | tuple[str, ...],
        *,
        max_new_tokens: int = 128,
        every: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        show: bool = False,
    ) -> Generation | list[Generation]:
        """Go on from a prompt, or from each of several, thinking at its end and after every `every` (default H) new
        tokens; 0: never.

        `temperature`, `top_k` and `top_p` shape the draw of text tokens from the mixed prediction (0: always the most
        likely); thoughts follow the sampling law they were trained with.
        """
        every = self.plan.horizon if every is None else every
        if every < 0:
            raise UserError(f"every = {every}: give 0 (no thoughts) or how many tokens to write between two thoughts")
        law = text_law(temperature, top_k, top_p)
        ids = [self._encode(one, 1, "prompt") for one in ([prompt] if isinstance(prompt, str) else prompt)]
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens = {max_new_tokens}: at least 1 is needed")
        width = max(map(len, ids), default=0) + max_new_tokens
        self._check_length(width, every > 0, "prompt with max_new_tokens")
        mode = WritingMode(law, self.sampling, When(every), tuple(self.ends), seed)
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        requests = [TokenRequest(tuple(one), max_new_tokens, item=number) for number, one in enumerate(ids)]
        written = dict(self.write(requests, mode, stops, rows=max(1, len(requests))))
        found = [self._generation(written[n], len(one), stops, show) for n, one in enumerate(ids)]
        return found[0] if isinstance(prompt, str) else found

    def write(
        self,
        requests: Sequence[TokenRequest],
        mode: WritingMode,
        stops: tuple[str, ...] = (),
        *,
        rows: int = 1,
        **how: Any,
    ) -> Iterator[tuple[int, Completion]]:
        """Many texts at once, as they are done: each with the number of its request; `how` as in `writer.write`."""
        return write(self.engine(), self.gate, mode, requests, stop_finder(self._visible, stops), rows=rows, **how)

    def text_of(self, written: Completion, stops: tuple[str, ...] = ()) -> str:
        """The written text, without what ended it."""
        return completed_text(self._visible, written, stops)

    def thoughts_of(self, written: Completion) -> tuple[Thought, ...]:
        """The thoughts of a written text."""
        return tuple(self._thought(*thought) for thought in written.thoughts)

    def _generation(self, written: Completion, prompt: int, stops: tuple[str, ...], show: bool) -> Generation:
        text = self.text_of(written, stops)
        thoughts = self.thoughts_of(written)
        if show:
            text = with_thoughts(self._visible, text, written.ids, thoughts, prompt)
        plain, thoughtful, gate, mixed = written.log_probs.double().T
        tokens = tuple(self._decode([i]) for i in written.ids)
        return Generation(
            plain, thoughtful, gate, mixed, text, tuple(written.ids), tokens, thoughts, written.finish_reason, prompt
        )

    @property
    def ends(self) -> set[int]:
        """Tokens that end a text."""
        declared = getattr(self.model.generation_config, "eos_token_id", None)
        found = getattr(self.tokenizer, "eos_token_id", None) if declared is None else declared
        return set(found) if isinstance(found, list | tuple) else set() if found is None else {int(found)}
