"""Outputs of a model for prompts: many at once, several per prompt, with or without hidden thoughts.

Random numbers depend on item, sample and step alone, so any request of work draws the same ones. In parity mode every
output is written by itself, in a shape of its own, so an item asked alone gives the same output as among others;
elsewhere sums depend on the batch, and `flip_rate` measures how often that changes an output.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch

from tfive.distributed.world import SINGLE, World
from tfive.errors import UserError
from tfive.inference.requests import NEVER, Completion, TokenRequest, When, WritingMode, text_law
from tfive.inference.thought_model import ThoughtModel
from tfive.telemetry import Silent, Telemetry
from tfive.tree.layout import TextBatch

_ROWS = {"cuda": 256, "cpu": 8}
"""Most texts written at once, by device."""

_POLL = {"cuda": 16, "cpu": 2}
"""Steps between two checks for finished texts, by device."""

_LOGIT_COPIES = 12
"""Copies of a step's logits that may be in memory at once."""


@dataclass(frozen=True)
class Decoding:
    """How outputs are written."""

    samples: int = 1
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    when: When = NEVER
    """At which tokens hidden thoughts are written."""
    parity: bool = False
    """Write every output in a batch of its own."""
    rows: int = 0
    """Most outputs written at once; 0: as many as fit."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.rows < 0:
            raise UserError(f"samples = {self.samples}, rows = {self.rows}: give at least 1, and 0 or more")
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature = {self.temperature}: give 0 (the likeliest token) or more")
        if self.samples > 1 and not self.temperature:
            raise UserError(
                f"samples = {self.samples} with temperature 0: all would be the same; set a temperature or 1 sample"
            )


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to be answered."""

    id: str
    prompt: str
    max_new_tokens: int
    number: int
    """Counter of its random numbers; `item_number` gives one."""


@dataclass(frozen=True)
class Output:
    """What a model wrote for a request."""

    text: str
    ids: tuple[int, ...]
    ended: str
    """`end` (the model ended it), `stop` (a stop string) or `length`."""
    prompt_tokens: int
    thoughts: tuple[dict[str, Any], ...]
    """What it thought: `text`, and the number of written tokens that stand `before` the thought."""
    thought_tokens: int


def item_number(task: str, item: str) -> int:
    """A number of the item that depends on its names alone, for counter-based random numbers."""
    return int.from_bytes(hashlib.blake2b(f"{task}\0{item}".encode(), digest_size=4).digest(), "little")


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Token ids, with the tokenizer's begin-of-text token unless the text already starts with it."""
    begin: str | None = getattr(tokenizer, "bos_token", None)
    has_it = bool(begin) and text.startswith(str(begin))
    options = {"add_special_tokens": False} if has_it else {}
    # verbose=False: no warning about long texts; callers check the length.
    return [int(i) for i in tokenizer.encode(text, verbose=False, **options)]


def generate(
    model: ThoughtModel,
    requests: Sequence[GenerationRequest],
    stops: tuple[str, ...],
    decoding: Decoding,
    *,
    done: frozenset[tuple[str, int]] = frozenset(),
    telemetry: Telemetry | None = None,
    label: str = "generate",
    world: World = SINGLE,
) -> Iterator[tuple[GenerationRequest, int, Output]]:
    """Every request's outputs with their sample numbers, as they are finished; `done` ones are left out. A process of
    `world` gives a sign of life with every step."""
    chosen = [
        (request, sample)
        for request in requests
        for sample in range(decoding.samples)
        if (request.id, sample) not in done
    ]
    in_tokens = [_token_request(model, request, sample, decoding.when.ever) for request, sample in chosen]
    mode = _mode(model, decoding)
    if decoding.when.at_answer in ("other", "empty"):
        thoughts = _control_thoughts(model, requests, decoding, world) if chosen else {}
        in_tokens = [
            replace(tokens, thought=thoughts[request.id, sample])
            for tokens, (request, sample) in zip(in_tokens, chosen)
        ]
    finished = _written(model, in_tokens, mode, stops, decoding, world)
    for number, written in (telemetry or Silent()).progress(finished, label, len(in_tokens)):
        request, sample = chosen[number]
        yield (
            request,
            sample,
            Output(
                model.text_of(written, stops),
                tuple(written.ids),
                written.finish_reason,
                len(in_tokens[number].ids),
                _thoughts(model, written, len(in_tokens[number].ids)),
                sum(len(tokens) for _, tokens, _ in written.thoughts),
            ),
        )


def _thoughts(model: ThoughtModel, written: Completion, prompt: int) -> tuple[dict[str, Any], ...]:
    listed = model.thoughts_of(written)
    return tuple({"before": thought.position + 1 - prompt, "text": thought.text} for thought in listed)


def _mode(model: ThoughtModel, decoding: Decoding) -> WritingMode:
    law = text_law(decoding.temperature, decoding.top_k, decoding.top_p)
    return WritingMode(law, model.sampling, decoding.when, tuple(model.ends), decoding.seed)


def _control_thoughts(
    model: ThoughtModel, requests: Sequence[GenerationRequest], decoding: Decoding, world: World
) -> dict[tuple[str, int], tuple[int, ...]]:
    """By request and sample the thought that stands in place of its own: the next request's, or the empty one."""
    every = [(request, sample) for sample in range(decoding.samples) for request in requests]
    if decoding.when.at_answer == "empty":
        if not model.plan.close_width:
            raise UserError(
                "--thoughts answer=empty: without delimiters an empty thought is none; take --thoughts none"
            )
        return {(request.id, sample): () for request, sample in every}
    if len(requests) < 2:
        raise UserError("--thoughts answer=other: one item has no other; ask two or more")
    drawn = replace(decoding, when=When(at_answer="own"))
    in_tokens = [replace(_token_request(model, request, sample, True), max_new_tokens=1) for request, sample in every]
    written = dict(_written(model, in_tokens, _mode(model, drawn), (), drawn, world))
    own = {
        (request.id, sample): tuple(written[number].thoughts[0][1]) for number, (request, sample) in enumerate(every)
    }
    following = {request.id: requests[(number + 1) % len(requests)].id for number, request in enumerate(requests)}
    return {(name, sample): own[following[name], sample] for name, sample in own}


def check_lengths(model: ThoughtModel, requests: Sequence[GenerationRequest], decoding: Decoding) -> None:
    """Refuse prompts that the model cannot take before anything is written."""
    for request in requests:
        _token_request(model, request, 0, decoding.when.ever)


def _written(
    model: ThoughtModel,
    requests: list[TokenRequest],
    mode: WritingMode,
    stops: tuple[str, ...],
    decoding: Decoding,
    world: World,
) -> Iterator[tuple[int, Completion]]:
    if not requests:
        return
    beat = world.pulse.beat
    if decoding.parity:
        for number, request in enumerate(requests):
            yield number, next(model.write([request], mode, stops, beat=beat))[1]
        return
    device = model.model.device.type
    rows = decoding.rows or rows_that_fit(model, max(request.width for request in requests), decoding.when.ever)
    yield from model.write(requests, mode, stops, rows=rows, poll=_POLL.get(device, 2), beat=beat)


def _token_request(model: ThoughtModel, request: GenerationRequest, sample: int, thinks: bool) -> TokenRequest:
    """The request in tokens; where the model has fewer positions than asked for, the output is shorter."""
    ids, most = encoded(model.tokenizer, request.prompt), request.max_new_tokens
    if not ids:
        raise UserError(f"item {request.id}: an empty prompt; give the model something to go on from")
    if model.limit is not None:
        room = model.limit - len(ids) - (model.plan.reach if thinks else 0)
        if room < 1:
            raise UserError(
                f"item {request.id}: a prompt of {len(ids)} tokens, the model has {model.limit} positions; "
                "take another model, --chat (no examples) or, for options, --ways likelihood"
            )
        most = min(most, room)
    return TokenRequest(tuple(ids), most, request.number, sample)


@torch.no_grad()
def rows_that_fit(model: ThoughtModel, width: int, thinks: bool) -> int:
    """How many texts of `width` tokens may be written at once: on CUDA by free memory, elsewhere a few."""
    device = model.model.device
    most = _ROWS.get(device.type, 8)
    if device.type != "cuda":
        return most
    one = torch.zeros(1, 1, dtype=torch.int64, device=device)
    read = model.engine().read(TextBatch(one, one, one, one))
    columns, lanes = (width + model.plan.reach, 2) if thinks else (width, 1)
    row = columns * sum(k.nbytes + v.nbytes for k, v in read.attention.values())
    row += lanes * sum(fork.state_XIEF.nbytes + fork.tail_XJU.nbytes for fork in read.recurrent.values())
    row += lanes * _LOGIT_COPIES * 4 * model.engine().head.vocabulary
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(most, int(0.6 * free) // row))


@dataclass(frozen=True)
class Flips:
    """How often an output depends on what was written beside it."""

    outputs: int
    flipped: int
    first_difference: float | None
    """Mean index of the first differing token among flipped outputs."""

    @property
    def rate(self) -> float:
        """Share of outputs that differ."""
        return self.flipped / max(1, self.outputs)


def flip_rate(
    together: Sequence[tuple[GenerationRequest, int, Output]], alone: Sequence[tuple[GenerationRequest, int, Output]]
) -> Flips:
    """Compares outputs written together with the same ones written by themselves (parity mode)."""
    by_name = {(request.id, sample): output.ids for request, sample, output in together}
    pairs = [(by_name[request.id, sample], output.ids) for request, sample, output in alone]
    places = [sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(a, b))) for a, b in pairs if a != b]
    return Flips(len(pairs), len(places), sum(places) / len(places) if places else None)
