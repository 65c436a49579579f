"""What `tfive eval headroom` does: what thoughts could be worth on a text, before anything is trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tfive import rng
from tfive.cli.evaluate_gains import LIMIT, parse_corpus, positions_of
from tfive.config.config import resolve
from tfive.distributed.environment import Launched
from tfive.distributed.launch import joined
from tfive.distributed.meeting import meeting
from tfive.distributed.pulse import Pulse
from tfive.errors import UserError
from tfive.evaluate.diagnostics import Corpus, SampleSize, sample_texts
from tfive.evaluate.evaluated import load_thinker
from tfive.evaluate.headroom import HeadroomTexts, headroom_table, measure
from tfive.inference.thought_model import ThoughtModel
from tfive.rl.settings import CriticSettings
from tfive.text.candidates import apportion
from tfive.text.settings import KINDS
from tfive.text.workings import batched, compiled, worked_texts
from tfive.training.agreement import require_same_evaluation
from tfive.training.devices import place
from tfive.training.progress import ProgressReport, Waiting
from tfive.training.watchdog import watching
from tfive.tree.settings import SamplingSettings, ThoughtSettings


def worked_sample(
    corpora: Sequence[Corpus], model: ThoughtModel, pattern: str, per_text: int, size: SampleSize
) -> HeadroomTexts | None:
    """Texts whose workings are known, of each file by its share in a random order; None where no file has any."""
    matches, chosen = compiled(pattern, "--pattern"), []
    for number, count in enumerate(apportion(size.texts, [one.share for one in corpora])):
        there = [
            text
            for file in corpora[number].files
            for text in worked_texts(Path(file.path), model.tokenizer, matches, length=size.tokens, per_text=per_text)
        ]
        order = rng.permutation(size.seed, "headroom/texts", number, len(there)).tolist() if there else []
        chosen += [there[i] for i in order[:count]]
    if not chosen:
        return None
    texts = batched(chosen)
    working = {
        int(texts.items_BP[row, place]): ids
        for row, one in enumerate(chosen)
        for place, ids in enumerate(one.workings)
        if ids is not None
    }
    kind_BP = torch.full_like(texts.positions_BP, list(KINDS).index("match"))
    return HeadroomTexts(texts, kind_BP, tuple(KINDS), tuple(one.source for one in chosen), working)


def texts_of(
    corpora: Sequence[Corpus], model: ThoughtModel, pattern: str, per_text: int, size: SampleSize
) -> HeadroomTexts:
    """Texts with their workings where there are any, else beginnings of documents: positions after the pattern, or
    uniform ones."""
    found = worked_sample(corpora, model, pattern, per_text, size) if pattern else None
    if found is not None:
        return found
    positions = positions_of(per_text, 0.0, pattern)
    if pattern:
        positions = positions.model_copy(update={"uniform": 0.0, "match": 1.0})
    sampled = sample_texts(corpora, model, positions, size)
    if not bool((sampled.texts.positions_BP >= 0).any()):
        if pattern:
            raise UserError(
                f"--pattern {pattern!r}: it ends at no token of these texts that has room for a score behind it; give "
                "another, more --tokens, or none"
            )
        raise UserError(
            f"--tokens {size.tokens}: no place of these texts has the {model.plan.horizon} tokens behind it that score "
            "a thought; give more tokens"
        )
    return HeadroomTexts(sampled.texts, sampled.kind_BP, tuple(KINDS), sampled.source_B, {})


def headroom_command(
    source: str,
    corpus: Sequence[str],
    *,
    config: Path | None,
    size: SampleSize,
    per_text: int,
    pattern: str,
    samples: int,
    passes: int,
    device: str,
    compute: str,
    timeout: float = 600.0,
    as_json: bool,
) -> str | None:
    """Measure and tabulate, with the other processes of this launch; None where another one prints. One of them that
    gives no sign for `timeout` seconds ends the others."""
    with meeting() as met, watching(met, pulse := Pulse(), timeout, LIMIT):
        with met.refusals("evaluation"):
            if size.texts < 4 or size.tokens < 2 or samples < 2 or passes < 0:
                raise UserError(
                    f"--texts {size.texts} --tokens {size.tokens} --samples {samples} --critic-passes {passes}: give "
                    "at least 4 texts, 2 tokens, 2 samples and 0 passes"
                )
            files = parse_corpus(corpus)
            model, critic = _thinker(source, config, device, compute, met.place)
            if model.limit is not None and size.tokens + model.plan.reach > model.limit:
                raise UserError(
                    f"--tokens {size.tokens}: with the {model.plan.reach} of a thought more than the model's "
                    f"{model.limit} positions; give fewer"
                )
            if model.gates is not None and model.gates.shut:
                raise UserError(
                    f"thought.reading = gated: the gates of {source} are shut, so every thought is worth exactly 0; "
                    "measure with thought.reading = inline, or a model exported after training with gates"
                )
            sampled = texts_of(files, model, pattern, per_text, size)
        asked = critic.model_copy(update={"passes": passes, "start": None}) if passes else None
        settings = {**asdict(size), "samples": samples, "pattern": pattern, "per_text": per_text}
        settings["precision"] = model.model.dtype
        settings |= {"critic": asked, "thought": model.thought.model_dump(), "law": model.sampling.model_dump()}
        require_same_evaluation(met, settings, model.model, (file for one in files for file in one.files))
        with joined(model.model.device, store=met.store, pulse=pulse) as world:
            pulse.at("headroom")
            how: dict[str, Any] = {"many": samples, "seed": size.seed, "rows": size.rows, "critic": asked}
            going = Waiting(f"{samples} thoughts at each position of {size.texts} texts: drawing and reading them")
            with ProgressReport(sys.stderr).showing(going, drawn=world.leads and not as_json):
                found = measure(model, sampled, **how, world=world)
    if not world.leads:
        return None
    facts = {"model": source, "corpus": list(corpus), "pattern": pattern, "size": asdict(size)}
    facts["thought"] = model.thought.model_dump(mode="json")
    return json.dumps(facts | found, ensure_ascii=False) if as_json else headroom_table(found)


def _thinker(
    source: str, config: Path | None, device: str, compute: str, here: Launched
) -> tuple[ThoughtModel, CriticSettings]:
    """The model with its thoughts, and how the critic is made; from a file's settings where one is given."""
    thought, sampling, critic = ThoughtSettings(), SamplingSettings(), CriticSettings(adapt="top", lr=1e-4)
    if config is not None:
        given = resolve([config]).config
        # What is asked is how much the thought and the text before it tell.
        critic = given.critic.model_copy(update={"sees": "prefix"})
        thought, sampling = given.thought, given.sampling
    placed = place(device, compute, process=here.local_rank if here.size > 1 else None)
    return load_thinker(source, thought, sampling, placed.device, placed.compute), critic
