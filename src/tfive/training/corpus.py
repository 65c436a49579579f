"""What `tfive data` does: prepare the corpus of a configuration, show its texts and positions, count what it holds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.evaluate.overlap import OverlapIndex
from tfive.evaluate.tasks import find_tasks, load_items
from tfive.models.load import Loaded, load_model, load_tokenizer
from tfive.models.precision import choose_device, choose_dtype
from tfive.models.weights import weights_fingerprint
from tfive.rl.roles import role_shares
from tfive.telemetry import Silent, Telemetry
from tfive.text.corpus import prepare as prepare_text
from tfive.text.items import Entropies, segments
from tfive.text.prepared import PreparedCorpus
from tfive.text.settings import TextSettings
from tfive.text.sources import Exclusion
from tfive.text.spool import spooled
from tfive.text.views import corpus_counts, counts_table, marked_text, sequence_view
from tfive.training.inputs import require
from tfive.training.progress import ProgressReport, Waiting
from tfive.training.recorder import Recorder

LOGIT_BYTES = 1 << 28
"""Bytes of float32 logits that measuring entropy holds at once (one document at least)."""


def cache_folder(config: Config) -> Path:
    """Where prepared corpora are kept: `text.cache`, else `$TFIVE_CACHE`, else the user's cache folder."""
    named = config.text.cache or os.environ.get("TFIVE_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfive" / "corpora"


def corpus_of(
    config: Config,
    *,
    loaded: Loaded | None = None,
    texts: Iterable[str] | None = None,
    telemetry: Telemetry | None = None,
    trust_remote_code: bool = False,
) -> PreparedCorpus:
    """The prepared corpus of a configuration, from the cache or made now.

    `loaded` saves loading the base model's tokenizer (and its weights, when positions go by entropy). `texts` are
    the caller's own documents, taken instead of `text.sources`.
    """
    telemetry = telemetry or Silent()
    cache = cache_folder(config)
    settings = config.text
    if texts is not None:
        settings = settings.model_copy(update={"sources": (spooled(texts, cache),)})
    if settings.positions.entropy > 0 and loaded is None:
        device = choose_device(config.model.device)
        loaded = load_model(
            config.model.name,
            device=device,
            dtype=choose_dtype(config.model.compute, device),
            revision=config.model.revision,
            trust_remote_code=trust_remote_code,
        )
    options: dict[str, Any] = {"revision": config.model.revision, "trust_remote_code": trust_remote_code}
    tokenizer: Any = loaded.tokenizer if loaded else load_tokenizer(config.model.name, **options)
    by_entropy = settings.positions.entropy > 0 and loaded is not None
    return prepare_text(
        settings,
        horizon=config.thought.horizon,
        roles=role_shares(config.window, settings.positions.per_text),
        tokenizer=tokenizer,
        cache=cache,
        entropies=base_entropies(loaded.model) if by_entropy and loaded else None,
        base_model=f"{loaded.name} {weights_fingerprint(loaded.model)}" if by_entropy and loaded else None,
        exclusion=exclusion_of(settings),
        telemetry=telemetry,
    )


def benchmark_index(tasks: Sequence[str], folder: Path | None) -> OverlapIndex:
    """The word sequences of these tasks and suites, to search texts for; tasks that share a file are read once."""
    chosen = {task.file: task for task in find_tasks(tasks, folder)}
    return OverlapIndex(load_items(task, folder) for task in chosen.values())


def exclusion_of(settings: TextSettings) -> Exclusion | None:
    """What `text.decontaminate` leaves out, None when it names no task."""
    asked = settings.decontaminate
    if not asked.tasks:
        return None
    index = benchmark_index(asked.tasks, Path(asked.data).expanduser() if asked.data else None)
    return Exclusion(index.fingerprint, index.overlaps)


def base_entropies(model: Any) -> Entropies:
    """A function that measures the entropy of the model's next-token law after every token, document by document."""
    import torch

    width = model.get_output_embeddings().weight.shape[0]
    most = max(1, LOGIT_BYTES // (4 * width))

    @torch.inference_mode()
    def measure(tokens_BS: npt.NDArray[np.integer], document_BS: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
        spans = [(row, *ends) for row, document_S in enumerate(document_BS) for ends in segments(document_S)]
        spans.sort(key=lambda one: one[2] - one[1])
        entropy_BS = np.zeros(tokens_BS.shape, dtype=np.float32)
        while spans:
            longest = spans[-1][2] - spans[-1][1]
            batch = [spans.pop() for _ in range(min(len(spans), max(1, most // longest)))]
            ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            for number, (row, start, end) in enumerate(batch):
                ids[number, : end - start] = torch.from_numpy(tokens_BS[row, start:end].astype(np.int64))
            # Padding stands on the right, where no earlier token can see it.
            log_p = model(input_ids=ids.to(model.device), use_cache=False).logits.float().log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1).cpu().numpy()
            for number, (row, start, end) in enumerate(batch):
                entropy_BS[row, start:end] = entropy[number, : end - start]
        return entropy_BS

    return measure


def prepare(
    sources: Sequence[str],
    overrides: Sequence[str],
    *,
    as_json: bool = False,
    quiet: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Prepare the corpus of a configuration; returns what to print."""
    corpus = _opened(sources, overrides, quiet=quiet or as_json, trust=trust_remote_code)
    counts = corpus_counts(corpus)
    if as_json:
        return json.dumps(
            {
                "folder": str(corpus.folder),
                "fingerprint": corpus.fingerprint,
                **counts["total"],
                "notes": counts["notes"],
            },
            indent=1,
        )
    total = counts["total"]
    made = (
        f"{total['sequences']:,} sequences of {corpus.sequence_length} tokens with {total['items']:,} positions from "
        f"{total['documents']:,} documents, in {corpus.folder}"
    )
    return "\n".join([*counts["notes"], made])


def stats(
    sources: Sequence[str],
    overrides: Sequence[str],
    *,
    as_json: bool = False,
    quiet: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Counts per split, role, source and kind of position; returns what to print."""
    corpus = _opened(sources, overrides, quiet=quiet or as_json, trust=trust_remote_code)
    counts = corpus_counts(corpus)
    return json.dumps(counts, indent=1, ensure_ascii=False) if as_json else counts_table(corpus, counts)


def inspect(
    sources: Sequence[str],
    overrides: Sequence[str],
    *,
    split: str | None = None,
    role: str | None = None,
    start: int = 0,
    count: int = 3,
    as_json: bool = False,
    quiet: bool = False,
    colour: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Sequences as text with their positions marked; returns what to print."""
    if start < 0 or count < 1:
        raise UserError(f"--start {start} --count {count}: start must be at least 0 and count at least 1")
    corpus = _opened(sources, overrides, quiet=quiet or as_json, trust=trust_remote_code)
    numbers = corpus.sequences(split, role)[start : start + count]
    if not len(numbers):
        raise UserError(f"--start {start}: there are only {len(corpus.sequences(split, role))} such sequences")
    if as_json:
        return json.dumps([sequence_view(corpus, int(number)) for number in numbers], indent=1, ensure_ascii=False)
    return "\n\n".join(marked_text(corpus, int(number), colour=colour) for number in numbers)


def _opened(sources: Sequence[str], overrides: Sequence[str], *, quiet: bool, trust: bool) -> PreparedCorpus:
    config = Config.load(*sources, overrides=overrides)
    require(config)
    progress = ProgressReport(sys.stderr)
    with (
        Recorder(quiet=quiet, progress=progress) as recorder,
        progress.showing(Waiting("preparing the text"), drawn=not quiet),
    ):
        return corpus_of(config, telemetry=recorder, trust_remote_code=trust)


def measured_sequences(corpus: PreparedCorpus, split: str, items: int | None = None) -> npt.NDArray[np.int64]:
    """The first sequences of a split that together hold the items asked for, or all."""
    numbers = corpus.sequences(split)
    if items is None:
        return numbers
    return numbers[: int((corpus.items_in[numbers].cumsum() < items).sum()) + 1]


def require_other_texts(config: Config, corpus: PreparedCorpus) -> None:
    """Refuse measured texts of which one holds most items: each thought is compared with one of another text. Fewer
    texts than the configuration asks for are there where `text.allow_fewer` allows it."""
    for split, items in (("development", config.run.develop_items), ("test", None)):
        held = corpus.items_in[measured_sequences(corpus, split, items)]
        most = int(held.max(initial=0))
        if not most or held.sum() < 2 * most:
            raise UserError(
                f"text.sequences.{split}: {len(held)} sequence{'s' * (len(held) != 1)} with {held.sum()} positions, "
                f"{most} of them in one, and thoughts are compared with those of other texts; raise it, or give more "
                "text"
            )
