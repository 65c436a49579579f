"""Texts a pass: as many as asked for, and where memory does not hold them half as many from there on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from tfive.errors import out_of_memory

T = TypeVar("T")


@dataclass
class PassSize:
    """How many texts a pass has, for all parts of a run that share the number."""

    rows: int
    key: str = "run.texts_per_rollout"
    """The key of the configuration by which a user sets it."""
    what: str = "a set of texts"
    """What is made again."""
    alone: bool = True
    """False where the work of several processes must stay in step: nothing is made again."""
    forget: list[Callable[[], object]] = field(default_factory=list)
    """What gives memory back before work is made again, whichever it is."""
    tell: Callable[[str], None] | None = None
    """Called with a line when fewer texts a pass went through."""

    @classmethod
    def of(cls, rows: int | PassSize, *, alone: bool = True) -> PassSize:
        """The size that others share, or one of its own."""
        return rows if isinstance(rows, PassSize) else cls(rows, alone=alone)

    def fit(self, work: Callable[[], T], *forget: Callable[[], object]) -> T:
        """What `work` gives, which makes passes of `rows` texts. Where memory does not hold them it begins again with
        half of them, and so does all that follows: the result is that of the smaller number from the start. So work
        must leave nothing behind that counts, or `forget` must undo it. One text that does not fit is an error."""
        before = self.rows
        while True:
            try:
                found = work()
                break
            except (MemoryError, RuntimeError) as error:
                if self.rows == 1 or not self.alone or not out_of_memory(error):
                    raise
            for let_go in (*self.forget, *forget):
                let_go()
            gc.collect()  # what failed lived in the error's frames, which are gone
            torch.cuda.empty_cache()
            self.rows = (self.rows + 1) // 2
        if self.rows < before and self.tell is not None:
            fewer = f"{self.rows} texts a pass from here on instead of {before} ({self.key})"
            self.tell(f"{self.what} did not fit and was made again: {fewer}")
        return found

    def fit_told(self, work: Callable[..., T], *forget: Callable[[], object]) -> T:
        """The same of work that is told the number, as `rows`."""
        return self.fit(lambda: work(rows=self.rows), *forget)
