"""Whether a small text holds what a run needs: it is prepared to see. Documents go whole into one split, so of few
documents a split may hold half of its share."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from tfive.config.config import Config
from tfive.errors import UserError
from tfive.models.folder import EMBEDDED
from tfive.text.settings import TextSource
from tfive.text.sources import local_files
from tfive.training.build import ledger_of
from tfive.training.corpus import corpus_of, require_other_texts

PREPARED_BYTES = 8_000_000
"""Up to so much text is prepared; more takes too long for a look beforehand."""
_PACKED = {".gz": 4, ".zst": 4, ".parquet": 2}
"""About how many bytes of text a byte of such a file holds."""


def _bytes(sources: Sequence[TextSource]) -> float:
    """About how much text the files of these sources hold."""
    paths = [file.path for source in sources for file in local_files(source)]
    return sum(path.stat().st_size * _PACKED.get(path.suffix, 1) for path in paths)


def lacking(config: Config, size: int | None = None, cache: str | None = None) -> str | None:
    """Why the text cannot be prepared, or what it then lacks of what every role of a window needs and of what is
    measured: nothing, or a line. None where that is not known: of large texts (`size`: bytes, where they have been
    counted), of such as are not here, and where the tokenizer is not or positions need the model itself. The folder
    `cache`, if one is given, keeps what is prepared."""
    name, text = config.model.name, config.text
    here = name in EMBEDDED or Path(name).expanduser().exists()
    if not here or text.positions.entropy > 0 or any(source.hub is not None for source in text.sources):
        return None
    with nullcontext(cache) if cache else tempfile.TemporaryDirectory() as folder:
        kept = config.model_copy(update={"text": text.model_copy(update={"cache": folder})})
        try:
            if (_bytes(text.sources) if size is None else size) > PREPARED_BYTES:
                return None
            corpus = corpus_of(kept)
            ledger_of(config, corpus)
            require_other_texts(config, corpus)
        except UserError as error:
            return str(error)
    return ""
