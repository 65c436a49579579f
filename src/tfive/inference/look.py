"""A text as a model with thoughts reads it: where it thinks, what it thinks, and what it expects next, as plain data.

The last prediction is about the token after the text, so a prompt can be looked at as well as a whole text. What a page
or a terminal may ask for is bounded here.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from tfive.errors import UserError
from tfive.inference.places import Places, uncertain_places
from tfive.inference.results import TextScores, Thought
from tfive.inference.rows import token_rows
from tfive.inference.thought_model import ThoughtModel
from tfive.tree.forward import TreeModel
from tfive.tree.head import chunk_rows
from tfive.tree.layout import Thoughts

MAX_CHARACTERS, MAX_TOKENS, MAX_PLACES, MAX_SEED = 8000, 1024, 128, 2**31
LIKELIEST = 5
"""Tokens shown of each prediction."""
UNSURE = 2.0
"""Nats of entropy from which a place counts as unsure."""
TRUSTED = 0.5
"""Trust of the gate from which a place counts as trusted."""
NEW_TOKENS = 24
"""Tokens written when the model is asked to go on."""

Way = Literal["every", "end", "unsure", "gate", "chosen", "none"]


class Question(BaseModel):
    """What is asked about a text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    text: str = Field(max_length=MAX_CHARACTERS)
    places: Way = "every"
    """After every H-th token and at the end, at the end alone, where the plain prediction is unsure, where the gate
    trusts the thought, after the chosen `positions`, or nowhere."""
    positions: list[int] = Field(default_factory=list, max_length=MAX_PLACES)
    seed: int = Field(default=0, ge=0, lt=MAX_SEED)


def question_from(content: Any) -> Question:
    """The question in a JSON object; one line for anything else."""
    try:
        return Question.model_validate(content)
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"])) or "question"
        raise UserError(f"{place}: {wrong['msg'][:200].lower()}") from error


def described(model: ThoughtModel) -> dict[str, Any]:
    """What a reader should know of a model before they look at its thoughts."""
    origin = model.origin
    return {
        "model": repr(model),
        "trained": bool(origin.get("method")) and origin.get("actor_updates", 1) != 0,
        "gate": model.gate is not None,
        "length": model.plan.length,
        "horizon": model.plan.horizon,
        "characters": MAX_CHARACTERS,
    }


@torch.no_grad()
def look(model: ThoughtModel, question: Question) -> dict[str, Any]:
    """Tokens, thoughts, and after every token the prediction of the next: log-probabilities of the token that follows
    (without a thought, with it, as the gate mixes them; None after the last) and the likeliest tokens of both."""
    ids = _tokens(model, question.text)
    # A token after the last makes room for the thought at the end; what is predicted does not depend on it.
    row = [*ids, ids[-1]]
    scores = _scores(model, row, question)
    if len(scores.thoughts) > MAX_PLACES:
        raise UserError(f"{len(scores.thoughts)} places: at most {MAX_PLACES} are thought about; give less text")
    likeliest = _likeliest(model, row, scores)
    columns = [scores.plain, scores.thoughtful, scores.gate, scores.mixed]
    gains = (scores.mixed - scores.plain)[: len(ids) - 1]
    return {
        "tokens": [model._decode([i]) for i in ids],
        "thoughts": [_thought(model, thought) for thought in scores.thoughts],
        "predictions": [
            _prediction(values, top, known=number < len(ids) - 1)
            for number, (values, top) in enumerate(zip(torch.stack(columns, 1).tolist(), likeliest))
        ],
        "mean_gain": float(gains.mean()) if len(gains) else None,
        "served": int(scores.served[: len(ids) - 1].sum()),
        "places": [thought.position for thought in scores.thoughts],
        "seed": question.seed,
    }


@torch.no_grad()
def goes_on(model: ThoughtModel, question: Question) -> dict[str, str]:
    """How the model goes on from a text, always by the likeliest token: without thoughts, and with them shown."""
    ids = _tokens(model, question.text)
    room = NEW_TOKENS if model.limit is None else min(NEW_TOKENS, model.limit - model.plan.reach - len(ids))
    if room < 1:
        raise UserError(f"text of {len(ids)} tokens: the model has no room to go on; give less text")
    settings: dict[str, Any] = {"max_new_tokens": room, "temperature": 0.0, "seed": question.seed}
    return {
        "without": model.generate(question.text, every=0, **settings).text,
        "with": model.generate(question.text, show=True, **settings).text,
    }


def _tokens(model: ThoughtModel, text: str) -> list[int]:
    ids = model._encode(text, 1, "text")
    if len(ids) > MAX_TOKENS:
        raise UserError(f"text of {len(ids)} tokens: at most {MAX_TOKENS} are looked at; give less text")
    model._check_length(len(ids) + 1, True, "text")
    return ids


def _scores(model: ThoughtModel, row: list[int], question: Question) -> TextScores:
    horizon, end = model.plan.horizon, len(row) - 2

    def unsure(_: int, entropy: Tensor) -> list[int]:
        return uncertain_places(entropy, UNSURE, horizon)[:MAX_PLACES]

    if question.places == "unsure":
        return model.score([row], unsure, seed=question.seed)[0]
    if question.places == "chosen":
        chosen = Places(positions=question.positions).chosen(row, horizon, model._decode)
    elif question.places in ("end", "none"):
        chosen = [end] if question.places == "end" else []
    else:
        chosen = sorted({*Places().chosen(row, horizon, model._decode), end})
    (scores,) = model.score([row], [chosen], seed=question.seed)
    if question.places == "gate":
        (scores,) = model.score([row], [model._trusted(scores, TRUSTED)], seed=question.seed)
    return scores


def _thought(model: ThoughtModel, thought: Thought) -> dict[str, Any]:
    tokens = [model._decode([i]) for i in thought.ids]
    return {"position": thought.position, "text": thought.text, "tokens": tokens, "closed": thought.closed}


def _prediction(values: list[float], top: list[list[Any]], *, known: bool) -> dict[str, Any]:
    plain, thoughtful, gate, mixed = values
    served = not math.isnan(thoughtful)
    found: dict[str, Any] = {"served": served, "gate": gate if served else None, "top": top}
    given = {"plain": plain, "thoughtful": thoughtful if served else None, "mixed": mixed}
    return found | (given if known else dict.fromkeys(given))


def _likeliest(model: ThoughtModel, row: list[int], scores: TextScores) -> list[list[list[Any]]]:
    """After every token the likeliest next ones, as `[token, without, with the thought, mixed]`, the model's own order;
    the third is None where no thought serves."""
    engine = model.engine()
    plain_SD, thoughtful_SD = _hidden(engine, row, scores.thoughts)
    step = chunk_rows(engine.head.vocabulary, 2, engine.engine.head_bytes)
    found = []
    for start in range(0, len(plain_SD), step):
        part = slice(start, start + step)
        without_SV, with_SV = (engine.head.logits(hidden[part]).softmax(-1) for hidden in (plain_SD, thoughtful_SD))
        gate_S1 = scores.gate[part, None].to(without_SV)
        mixed_SV = (1 - gate_S1) * without_SV + gate_S1 * with_SV
        count = min(LIKELIEST, without_SV.shape[-1])
        best_S2 = torch.cat([without_SV.topk(count).indices, mixed_SV.topk(count).indices], -1)
        columns = [x.gather(-1, best_S2).tolist() for x in (without_SV, with_SV, mixed_SV)]
        for ids, served, *values in zip(best_S2.tolist(), scores.served[part].tolist(), *columns):
            unique = {i: (a, b if served else None, c) for i, a, b, c in zip(ids, *values)}
            ranked = sorted(unique.items(), key=lambda entry: -entry[1][2])
            found.append([[model._decode([i]), *numbers] for i, numbers in ranked])
    return found


def _hidden(engine: TreeModel, row: list[int], thoughts: tuple[Thought, ...]) -> tuple[Tensor, Tensor]:
    """Hidden states that predict each next token, without a thought and with the newest that serves it."""
    texts = token_rows([row], [[thought.position for thought in thoughts]], engine.device)
    reading = engine.read(texts)
    plain_SD = reading.hidden_BSD[0, :-1]
    thoughtful_SD = plain_SD.clone()
    if thoughts:
        scores = engine.score(texts, _given(engine, thoughts), reading, features=True, whole=True)
        counts = scores.token_mask_BRH[0].sum(-1).tolist()
        for thought, count, hidden_HD in zip(thoughts, counts, scores.need("features_BRHD")[0]):
            thoughtful_SD[thought.position : thought.position + count] = hidden_HD[:count]
    return plain_SD, thoughtful_SD


def _given(engine: TreeModel, thoughts: tuple[Thought, ...]) -> Thoughts:
    """Thoughts that were had, for the engine."""
    width = engine.plan.length
    tokens_BRT = torch.tensor([[[*t.ids, *[0] * (width - len(t.ids))] for t in thoughts]], device=engine.device)
    length_BR = torch.tensor([[len(t.ids) for t in thoughts]], device=engine.device)
    closed_BR = torch.tensor([[t.closed for t in thoughts]], device=engine.device)
    log_q_BRT = torch.zeros(tokens_BRT.shape, device=engine.device)
    return Thoughts(tokens_BRT, length_BR, torch.ones_like(closed_BR), closed_BR, log_q_BRT)
