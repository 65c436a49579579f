"""Collections of garbage while a run works.

Before a pass is captured all garbage is collected (`tree/fast/replayed_backward.py`). A process that has imported
transformers and built a run holds very many objects that stay to the end; looking through them takes a tenth of a
second and more, each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting() -> Iterator[None]:
    """What is there now stays: collections in this block look at what was made in it alone. Whoever has frozen objects
    before keeps them as they are."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
