"""`ThoughtModel`: a trained model with its thoughts and its gate, ready to predict and to write.

A thought after token p serves the next H tokens, then it is dropped; the newest wins. Predictions with and without it
are mixed in probability by the gate. Plain `transformers` loads the same folder as the actor alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tfive import chance
from tfive.errors import UserError
from tfive.models.gate import PredictionGate
from tfive.models.thinker_files import ThinkerParts, load_thinker, save_thinker
from tfive.models.thinker_results import Generation, Prediction, Thought, TokenScores
from tfive.models.thinker_stream import NextToken, Writing, thought_uniforms
from tfive.tree.decode import Reading
from tfive.tree.forward import Delimiters, TreeModel
from tfive.tree.head import Source, mix_log_probs, policy_terms, reduce_vocabulary
from tfive.tree.law import draw, lawful
from tfive.tree.layout import TextBatch, ThoughtPlan, Thoughts, plan_thoughts
from tfive.tree.settings import EngineSettings, SamplingSettings, ThoughtSettings

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
        engine: EngineSettings | None = None,
        origin: dict[str, Any] | None = None,
    ) -> None:
        """`sampling` is the law of thought tokens. Without a `gate` a thought is trusted fully where it serves."""
        embedding: Any = model.get_input_embeddings()
        if (thought.delimiters == "learned") != (delimiters is not None):
            raise UserError(
                f"thought.delimiters = {thought.delimiters!r}: learned delimiters, and only they, have weights"
            )
        if gate is not None and (gate.features != embedding.embedding_dim or gate.extras):
            wanted = f"{gate.features} features and {gate.extras} extras"
            raise UserError(
                f"the gate reads {wanted}, the model gives {embedding.embedding_dim} and 0; use its own gate"
            )
        self.model = model.eval()
        self.gate = None if gate is None else gate.to(model.device).eval()
        self.delimiters = None if delimiters is None else delimiters.to(model.device)
        self.tokenizer, self.thought, self.sampling = tokenizer, thought, sampling or SamplingSettings()
        self.origin = origin or {}
        self.plan = replace(plan_for(thought, model, tokenizer), checkpoints=(thought.length,), group=1)
        self._settings = engine or EngineSettings(max_nodes=_PASS_NODES)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> ThoughtModel:
        """The model in a folder that `save_pretrained` or `tfive export` wrote."""
        parts = load_thinker(folder, device=device, dtype=dtype)
        thoughts = parts.thought, parts.sampling, parts.gate, parts.delimiters
        return cls(parts.model, parts.tokenizer, *thoughts, origin=parts.origin)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a Hugging Face folder for the actor and, in `thoughts/`, everything else; refuses a full folder."""
        parts = self.thought, self.sampling, self.gate, self.delimiters, self.origin
        save_thinker(ThinkerParts(self.model, self.tokenizer, *parts), folder)

    @property
    def limit(self) -> int | None:
        """The most positions the model takes, where it says so."""
        learned = self._engine().backbone.position_limit
        return learned or getattr(self.model.config, "max_position_embeddings", None)

    def _engine(self) -> TreeModel:
        # A fresh one a call: it keeps sampling buffers for every shape it meets, and texts come in all lengths.
        return TreeModel(self.model, self.plan, self._settings, self.delimiters)

    def _encode(self, text: str, least: int, what: str) -> list[int]:
        tokenizer: Any = self.tokenizer
        ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
        if len(ids) < least:
            raise UserError(f"{what} of {len(ids)} tokens: at least {least} are needed; give more text")
        return ids

    def _check_length(self, tokens: int, thinking: bool, what: str) -> None:
        needed = tokens + (self.plan.reach if thinking else 0)
        if self.limit is not None and needed > self.limit:
            aside = f" and {self.plan.reach} for a thought" if thinking else ""
            raise UserError(f"{what} needs {tokens} positions{aside}, the model has {self.limit}; give less text")

    def _decode(self, ids: Sequence[int], specials: bool = True) -> str:
        tokenizer: Any = self.tokenizer
        return tokenizer.decode(list(ids), skip_special_tokens=not specials, clean_up_tokenization_spaces=False)

    def _thought(self, position: int, ids: Sequence[int], closed: bool) -> Thought:
        return Thought(position, self._decode(ids[:-1] if closed else ids), tuple(ids), closed)

    @torch.no_grad()
    def predict(
        self,
        text: str,
        *,
        positions: Sequence[int] | None = None,
        every: int | None = None,
        entropy_above: float | None = None,
        seed: int = 0,
    ) -> Prediction:
        """How well `text` is predicted with and without thoughts, and what the thoughts say.

        Thoughts stand after the tokens in `positions`, after every `every`-th token, or wherever the plain prediction's
        entropy is above `entropy_above` nats (and no earlier thought still serves); by default after every H-th.
        """
        if sum(choice is not None for choice in (positions, every, entropy_above)) > 1:
            raise UserError("predict: give one of positions, every and entropy_above")
        ids = self._encode(text, 2, "text")
        self._check_length(len(ids), True, "text")
        every = _positive("every", self.plan.horizon if every is None else every)
        chosen = list(range(every - 1, len(ids) - 1, every)) if positions is None else _checked(positions, len(ids))
        engine = self._engine()
        texts = _texts(torch.tensor([ids], device=engine.device), chosen if entropy_above is None else [])
        reading = engine.read(texts)
        plain, entropy = _plain(engine, texts, reading)
        if entropy_above is not None:
            # Recurrent layers keep their states at the positions known when the text is read.
            texts = _texts(texts.tokens_BS, _uncertain(entropy, entropy_above, self.plan.horizon))
            reading = engine.read(texts)
        scores, thoughts = self._served(engine, texts, reading, seed, plain)
        return Prediction(
            **vars(scores),
            ids=tuple(ids),
            tokens=tuple(self._decode([i]) for i in ids),
            entropy=entropy,
            thoughts=tuple(thoughts),
        )

    def _served(
        self, engine: TreeModel, texts: TextBatch, reading: Reading, seed: int, plain: Tensor
    ) -> tuple[TokenScores, list[Thought]]:
        """Thoughts at the texts' positions and what they make of the tokens they serve; later ones overrule."""
        thoughtful, beta = torch.full_like(plain, torch.nan), torch.zeros_like(plain)
        chosen = texts.positions_BP[0].tolist()
        if not chosen:
            return TokenScores(plain, thoughtful, beta, plain.clone()), []
        numbers = [torch.from_numpy(thought_uniforms(seed, p, self.plan.length)) for p in chosen]
        thoughts = engine.sample(texts, torch.stack(numbers)[None], self.sampling, reading)
        scores = engine.score(texts, thoughts, reading, features=self.gate is not None)
        trust_RH = torch.ones_like(scores.token_BRH[0])
        if self.gate is not None:
            pair = scores.features_BRHD, scores.no_thought_features_BRHD
            trust_RH = torch.sigmoid(self.gate(*(features[0] for features in pair if features is not None)))
        for r, position in enumerate(chosen):
            count = int(scores.token_mask_BRH[0, r].sum())
            here = slice(position, position + count)
            thoughtful[here] = -scores.token_BRH[0, r, :count].to(thoughtful)
            beta[here] = trust_RH[r, :count].to(beta)
        mixed = torch.where(thoughtful.isnan(), plain, mix_log_probs(plain, thoughtful.nan_to_num(), beta))
        return TokenScores(plain, thoughtful, beta, mixed), self._listed(chosen, thoughts)

    def _listed(self, positions: list[int], thoughts: Thoughts) -> list[Thought]:
        rows = zip(positions, thoughts.tokens_BRT[0].tolist(), thoughts.length_BR[0].tolist(), thoughts.closed_BR[0])
        return [self._thought(position, ids[:length], bool(closed)) for position, ids, length, closed in rows]

    @torch.no_grad()
    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 128,
        every: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        show: bool = False,
    ) -> Generation:
        """Go on from `prompt`, thinking at its end and after every `every` (default H) new tokens; 0: never.

        `temperature`, `top_k` and `top_p` shape the draw of text tokens from the mixed prediction (0: always the most
        likely); thoughts follow the sampling law they were trained with.
        """
        every = self.plan.horizon if every is None else every
        if every < 0:
            raise UserError(f"every = {every}: give 0 (no thoughts) or how many tokens to write between two thoughts")
        law = _law(temperature, top_k, top_p)
        ids = self._encode(prompt, 1, "prompt")
        width = len(ids) + _positive("max_new_tokens", max_new_tokens)
        self._check_length(width, every > 0, "prompt with max_new_tokens")
        writing = Writing(self._engine(), self.gate, self.sampling, seed, width)
        page = _Page(self, (stop,) if isinstance(stop, str) else tuple(stop or ()))
        upcoming = ids
        for number in range(max_new_tokens):
            writing.read(upcoming)
            if every and number % every == 0:
                page.thoughts += self._listed([len(writing.ids) - 1], writing.think())
            expected = writing.expects()
            upcoming = [_drawn(expected.mixed_V, law, seed, len(writing.ids))]
            if page.add(expected, upcoming[0]):
                break
        return page.finished(len(ids), show)

    @property
    def ends(self) -> set[int]:
        """Tokens that end a text."""
        declared = getattr(self.model.generation_config, "eos_token_id", None)
        found = getattr(self.tokenizer, "eos_token_id", None) if declared is None else declared
        return set(found) if isinstance(found, list | tuple) else set() if found is None else {int(found)}


@dataclass
class _Page:
    """What has been written so far, and when it is done."""

    model: ThoughtModel
    stops: tuple[str, ...]
    ids: list[int] = field(default_factory=list)
    rows: list[tuple[float, float, float, float]] = field(default_factory=list)
    thoughts: list[Thought] = field(default_factory=list)
    ended: str = "length"

    def add(self, expected: NextToken, token: int) -> bool:
        """Note a token with its log-probabilities; whether the text ends with it."""
        other = float("nan") if expected.thoughtful_V is None else float(expected.thoughtful_V[token])
        self.rows.append((float(expected.plain_V[token]), other, expected.gate, float(expected.mixed_V[token])))
        self.ids.append(token)
        if token in self.model.ends:
            self.ended = "end"
        elif self.stops and any(stop in self._text() for stop in self.stops):
            self.ended = "stop"
        return self.ended != "length"

    def _text(self) -> str:
        return self.model._decode(self.ids[:-1] if self.ended == "end" else self.ids, specials=False)

    def finished(self, prompt: int, show: bool) -> Generation:
        text = self._text()
        if self.ended == "stop":
            text = text[: min(at for stop in self.stops if (at := text.find(stop)) >= 0)]
        if show:
            text = self._with_thoughts(text, prompt)
        plain, thoughtful, gate, mixed = torch.tensor(self.rows, dtype=torch.float64).T
        ids, thoughts = tuple(self.ids), tuple(self.thoughts)
        return Generation(plain, thoughtful, gate, mixed, text, ids, thoughts, self.ended)

    def _with_thoughts(self, text: str, prompt: int) -> str:
        """The text with every thought between ⟨ and ⟩ where it was had."""
        parts, done = [], 0
        for thought in self.thoughts:
            before = self.model._decode(self.ids[: thought.position - prompt + 1], specials=False)
            upto = min(len(before), len(text))
            parts += [text[done:upto], f"⟨{thought.text}⟩"]
            done = upto
        return "".join([*parts, text[done:]])


def _texts(tokens_1S: Tensor, positions: list[int]) -> TextBatch:
    positions_1P = torch.tensor([positions], dtype=torch.int64, device=tokens_1S.device)
    return TextBatch(tokens_1S, torch.zeros_like(tokens_1S), positions_1P, positions_1P)


def _plain(engine: TreeModel, texts: TextBatch, reading: Reading) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy `[S−1]` of every token's plain prediction."""
    source, target = Source(engine.head, reading.hidden_BSD[0, :-1]), {"target": texts.tokens_BS[0, 1:]}
    found = reduce_vocabulary([source], policy_terms, target, engine.engine.head_chunk, engine.engine.head_bytes)
    return found["log_prob"].cpu(), found["entropy"].cpu()


def _checked(positions: Sequence[int], tokens: int) -> list[int]:
    chosen = sorted(set(positions))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < tokens - 1:
        raise UserError(
            f"positions {chosen[0]} … {chosen[-1]}: thoughts of this text stand after tokens 0 … {tokens - 2}"
        )
    return chosen


def _uncertain(entropy: Tensor, above: float, horizon: int) -> list[int]:
    """Positions whose prediction is more uncertain than that, left to right, at least H apart."""
    chosen: list[int] = []
    for position in torch.nonzero(entropy > above).flatten().tolist():
        if not chosen or position - chosen[-1] >= horizon:
            chosen.append(position)
    return chosen


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise UserError(f"{name} = {value}: at least 1 is needed")
    return value


def _law(temperature: float, top_k: int, top_p: float) -> SamplingSettings | None:
    """The law of text tokens; None is the greedy one."""
    try:
        return SamplingSettings(temperature=temperature or 1.0, top_k=top_k, top_p=top_p) if temperature else None
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(f"{wrong['loc'][0]} = {wrong['input']}: {wrong['msg'].lower()}") from error


def _drawn(log_prob_V: Tensor, law: SamplingSettings | None, seed: int, place: int) -> int:
    """The token at index `place` of the text, drawn with that place's own random number."""
    if law is None:
        return int(log_prob_V.argmax())
    number_1 = torch.tensor([chance.uniforms(seed, "text", 0, place).item()], dtype=torch.float64)
    return int(draw(lawful(log_prob_V[None], law), number_1.to(log_prob_V.device))[0])
