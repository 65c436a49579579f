"""What `tfive eval gains` does: a model's gains, with every control, on texts of one's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import PreTrainedModel

from tfive.config.config import Config, presets
from tfive.distributed.launch import joined
from tfive.distributed.meeting import meeting
from tfive.distributed.pulse import Pulse
from tfive.errors import UserError
from tfive.evaluate.diagnostics import Corpus, SampleSize, diagnose, gains_table, sample_texts
from tfive.evaluate.evaluated import load_thinker
from tfive.inference.thought_model import ThoughtModel
from tfive.models.load import load_model, tokenizer_fingerprint
from tfive.report.meanings import meanings
from tfive.telemetry import Silent
from tfive.text.corpus import source_files
from tfive.text.settings import KINDS, Positions, TextSource, Where
from tfive.text.sources import local_files
from tfive.text.views import rare_pattern
from tfive.training.agreement import require_same_evaluation
from tfive.training.corpus import cache_folder
from tfive.training.devices import place
from tfive.training.watchdog import watching
from tfive.tree.settings import ThoughtSettings

LIMIT = "--timeout"
"""What a person sets the watchdog's patience with an evaluation by."""


def parse_corpus(texts: Sequence[str], where: Where | None = None) -> list[Corpus]:
    """FILE or FILE=SHARE, each; a folder is all its files, and a preset or TOML file all sources it trains on, as it
    reads them. `where` says which rows of a file are kept."""
    found: list[Corpus] = []
    for number, text in enumerate(texts):
        path, sign, share = text.rpartition("=")
        if not sign:
            path, share = text, "1"
        try:
            weight = float(share)
        except ValueError as error:
            raise UserError(f"--corpus {text!r}: the share {share!r} is not a number") from error
        if not 0 < weight < float("inf"):
            raise UserError(f"--corpus {text!r}: the share must be above 0")
        if path.endswith(".toml") or (path in presets() and not Path(path).exists()):
            found += _configured(path, weight)
            continue
        files = local_files(TextSource(name=f"source-{number}", path=path, where=where))
        found.append(Corpus(files[0].name if len(files) == 1 else Path(path).name, files, weight))
    if not found:
        raise UserError("--corpus: name at least one file of text")
    return found


def _configured(name: str, weight: float) -> list[Corpus]:
    """The sources of a configuration, with their filters, fields, separators and shares."""
    config = Config.load(name)
    total = sum(source.share for source in config.text.sources)
    found = []
    for source in config.text.sources:
        files, _ = source_files(source, cache_folder(config), Silent(), skip_bad=config.text.bad_rows == "skip")
        found.append(Corpus(source.name, files, weight * source.share / total))
    return found


def thinker_of(source: str, device: str, compute: str, process: int | None = None) -> ThoughtModel:
    """An exported model with its thoughts, or any other model with thoughts of the default shape. `process`: this one's
    number among several on this machine."""
    placed = place(device, compute, process=process)
    return load_thinker(source, ThoughtSettings(), None, placed.device, placed.compute)


def base_of(source: str, model: ThoughtModel) -> PreTrainedModel:
    """The model before training; it must read the same tokens."""
    loaded = load_model(source, device=model.model.device, dtype=model.model.dtype)
    if loaded.fingerprint != tokenizer_fingerprint(model.tokenizer):
        raise UserError(f"--base {source}: its tokenizer is not the model's; give the model it was trained from")
    return loaded.model


def positions_of(per_text: int, entropy: float, pattern: str) -> Positions:
    """A share of positions by entropy, the others uniform; with a pattern, half of all stand right after it."""
    if not 0 <= entropy <= 1:
        raise UserError(f"--entropy {entropy}: a share of positions between 0 and 1")
    rest = 0.5 if pattern else 1.0
    shares = {"uniform": rest * (1 - entropy), "entropy": rest * entropy, "match": 1 - rest}
    try:
        return Positions(per_text=per_text, pattern=pattern, **shares)
    except ValidationError as error:
        raise UserError(f"--pattern {pattern!r}: {error.errors()[0]['msg']}") from error


def gains_command(
    source: str,
    corpus: Sequence[str],
    *,
    base: str | None,
    size: SampleSize,
    per_text: int,
    entropy: float,
    pattern: str,
    device: str,
    compute: str,
    timeout: float = 600.0,
    as_json: bool,
) -> str | None:
    """Measure and tabulate, with the other processes of this launch; None where another one prints. One of them that
    gives no sign for `timeout` seconds ends the others."""
    with meeting() as met, watching(met, pulse := Pulse(), timeout, LIMIT):
        with met.refusals("evaluation"):
            if size.texts < 2 or size.tokens < 2 or size.rows < 1:
                raise UserError(f"{size.texts} texts of {size.tokens} tokens: give at least 2 texts, 2 tokens, 1 row")
            positions = positions_of(per_text, entropy, pattern)
            files = parse_corpus(corpus)
            model = thinker_of(source, device, compute, met.place.local_rank if met.place.size > 1 else None)
            if model.limit is not None and size.tokens + model.plan.reach > model.limit:
                needed = f"{size.tokens} tokens and {model.plan.reach} of a thought"
                raise UserError(f"--tokens {size.tokens}: {needed} need more than the model's {model.limit} positions")
            other = None if base is None else base_of(base, model)
        asked = {**asdict(size), "positions": positions.model_dump(), "precision": model.model.dtype}
        asked |= {"thought": model.thought.model_dump(), "law": model.sampling.model_dump(), "base": base is not None}
        require_same_evaluation(met, asked, model.model, (file for one in files for file in one.files))
        with joined(model.model.device, store=met.store, pulse=pulse) as world:
            pulse.at("texts")
            sample = sample_texts(files, model, positions, size, world)
            pulse.at("gains")
            found: dict[str, Any] = diagnose(model, sample, size, other, world)
    if not world.leads:
        return None
    matched, items = int((sample.kind_BP == KINDS.index("match")).sum()), int((sample.kind_BP >= 0).sum())
    rare = rare_pattern(positions, matched, items)
    found["notes"] = [rare] if rare else []
    facts = {"model": source, "base": base, "corpus": list(corpus), "size": asdict(size)}
    facts |= {"positions": positions.model_dump(mode="json"), "thought": model.thought.model_dump(mode="json")}
    if as_json:
        return json.dumps(facts | found, ensure_ascii=False)
    said = [line for line in (worse(found["all"]), verdict(found["all"])) if line]
    return "\n".join([gains_table(found), *legend(found["all"]), *found["notes"], *said])


def legend(whole: dict[str, Any]) -> list[str]:
    """What the table's measures are, those of one meaning in one line."""
    known = meanings({name for name, value in whole.items() if isinstance(value, dict)} | {"useful_fraction"})
    named: dict[str, list[str]] = {}
    for name in (name for name in whole if name in known and known[name]["what"]):
        named.setdefault(known[name]["what"], []).append(name)
    return [f"{', '.join(names)}: {what}" for what, names in named.items()]


def worse(whole: dict[str, Any]) -> str:
    """Whether the model predicts these texts worse than its base without any thought, which training must not do."""
    drift = whole.get("no_thought_drift")
    if drift is None or drift["mean"] - 1.96 * drift["error"] <= 0:
        return ""
    shown = f"{drift['mean']:+.4f} ± {1.96 * drift['error']:.4f} nats a token"
    return f"without a thought it predicts these texts worse than its base ({shown}): training took from it"


def verdict(whole: dict[str, Any]) -> str:
    """What content gain, the loss after another text's thought less that after one's own, says of these texts."""
    found = whole.get("content_gain")
    if found is None:
        return "content gain is no number here, so nothing can be said of what its thoughts say"
    mean, half = found["mean"], 1.96 * found["error"]
    if not mean and not half:
        return "what its thoughts say changes nothing here (content gain 0 everywhere: they are not read)"
    shown = f"content gain {mean:+.4f} ± {half:.4f}"
    if mean > half:
        told = f"what its thoughts say helps here: {shown}"
    elif mean < -half:
        told = f"what its thoughts say harms here: {shown}"
    else:
        return f"whether what its thoughts say helps here cannot be told: {shown}; more --texts narrow it"
    own, spread = whole["thought_gain"]["mean"], 1.96 * whole["thought_gain"]["error"]
    dearer = mean > half and own < -spread
    return told + (f", but having one at all costs more (thought gain {own:+.4f} ± {spread:.4f})" if dearer else "")
