"""The model that is evaluated: any causal language model, or an exported one with its hidden thoughts."""

from __future__ import annotations

from pathlib import Path

import torch

from tfive.errors import UserError
from tfive.inference.files import DESCRIPTION, FOLDER
from tfive.inference.requests import NEVER, When
from tfive.inference.thought_model import ThoughtModel, plan_for
from tfive.models.load import load_model
from tfive.tree.forward import Delimiters
from tfive.tree.gated import ReadingGates
from tfive.tree.settings import SamplingSettings, ThoughtSettings

_NO_THOUGHTS = ThoughtSettings(length=1, checkpoints=(1,), horizon=1, delimiters="none")
"""Smallest valid thought settings, for a plain model that never writes a thought."""


def parse_thoughts(text: str, horizon: int) -> When:
    """`none`, `every` (each token), `every=K`, `horizon` (every H tokens), `entropy=X` (nats), or `answer`: once, right
    before the answer, with the controls `answer=other` and `answer=empty`."""
    whole = {"none": NEVER, "every": When(1), "horizon": When(horizon), "answer": When(at_answer="own")}
    whole |= {"answer=other": When(at_answer="other"), "answer=empty": When(at_answer="empty")}
    if text in whole:
        return whole[text]
    kind, _, number = text.partition("=")
    if kind == "every" and number.isdecimal() and int(number) > 0:
        return When(int(number))
    if kind == "entropy" and number.replace(".", "", 1).isdecimal():
        return When(entropy_above=float(number))
    raise UserError(
        f"--thoughts {text!r}: give none, answer, answer=other, answer=empty, every, every=K, horizon or entropy=NATS"
    )


def has_thoughts(source: str) -> bool:
    """Whether `source` is a folder of a model with thoughts."""
    return (Path(source).expanduser() / FOLDER / DESCRIPTION).is_file()


def load_thinker(
    source: str,
    thought: ThoughtSettings,
    sampling: SamplingSettings | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> ThoughtModel:
    """An exported model with its own thoughts, or any other model with untrained ones of the given shape."""
    if has_thoughts(source):
        return ThoughtModel.from_pretrained(Path(source).expanduser(), device=device, dtype=dtype)
    loaded = load_model(source, device=device, dtype=dtype)
    delimiters = None
    if thought.delimiters == "learned":
        delimiters = Delimiters.from_model(loaded.model, plan_for(thought, loaded.model, loaded.tokenizer))
    gates = ReadingGates.of(loaded.model) if thought.reading == "gated" else None
    return ThoughtModel(loaded.model, loaded.tokenizer, thought, sampling, None, delimiters, gates=gates)


def load_evaluated(
    source: str,
    thoughts: str,
    device: torch.device | None,
    dtype: torch.dtype | None,
    untrained: tuple[ThoughtSettings, SamplingSettings] | None = None,
) -> tuple[ThoughtModel, When, str]:
    """The model, when it writes thoughts, and its name; with `thoughts` = none it is the plain actor.

    `untrained` shapes the thoughts of a model that has none of its own.
    """
    parse_thoughts(thoughts, 1)
    if thoughts == "none":
        loaded = load_model(source, device=device, dtype=dtype)
        return ThoughtModel(loaded.model, loaded.tokenizer, _NO_THOUGHTS), NEVER, loaded.name
    if not has_thoughts(source) and untrained is None:
        raise UserError(
            f"--thoughts {thoughts}: {source} has no {FOLDER}/{DESCRIPTION}; give a folder that tfive export wrote, or "
            "shape untrained thoughts with --config"
        )
    thought, sampling = untrained or (_NO_THOUGHTS, SamplingSettings())
    model = load_thinker(source, thought, sampling, device, dtype)
    return model, parse_thoughts(thoughts, model.plan.horizon), Path(source).expanduser().name
