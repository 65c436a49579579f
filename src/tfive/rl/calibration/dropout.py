"""Dropout whose masks can be used again: several regressions of one seed drop the same units, so they are drawn once.

A processor draws a mask's numbers one after the other, which takes longer than the rest of a small head's step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KEPT_BYTES = 256 * 2**20
"""What a tape keeps at most; masks beyond it are drawn again."""


class MaskTape:
    """The masks that torch's generator of processors draws from one seed on, in order, kept for the next to ask.

    Whoever asks seeds the generator in the same way before, and gets the very masks it would have drawn.
    """

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._kept: list[Tensor] = []
        self._room = most
        self._after: Tensor | None = None
        """The generator's state after the last mask that is kept."""
        self._at = 0

    def rewind(self) -> None:
        """The next mask is the first again."""
        self._at = 0

    def next(self, shape: torch.Size, keep: float) -> Tensor:
        """bool: the next mask, true with probability `keep`."""
        if self._at < len(self._kept):
            mask = self._kept[self._at]
            if mask.shape != shape:
                raise ValueError(f"the kept mask is of shape {tuple(mask.shape)}, not {tuple(shape)}")
        else:
            if self._at == len(self._kept) and self._after is not None:
                torch.set_rng_state(self._after)
            mask = torch.empty(shape, dtype=torch.bool).bernoulli_(keep)
            if self._at == len(self._kept) and mask.numel() <= self._room:
                self._kept.append(mask)
                self._room -= mask.numel()
                self._after = torch.get_rng_state()
        self._at += 1
        return mask


class Dropout(nn.Module):
    """`nn.Dropout`; between `taped` and its end the masks come from a tape."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.tape: MaskTape | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tape is None or not self.training or self.p == 0 or not x.numel():
            return F.dropout(x, self.p, self.training)
        # As torch does it on processors, bit for bit.
        return x * self.tape.next(x.shape, 1 - self.p).to(x.dtype).div_(1 - self.p)


@contextmanager
def taped(head: nn.Module, tape: MaskTape | None, device: torch.device) -> Iterator[None]:
    """The head takes its masks from the tape, from the beginning; elsewhere than on processors it draws them itself."""
    layers = [module for module in head.modules() if isinstance(module, Dropout)]
    if tape is None or device.type != "cpu":
        yield
        return
    tape.rewind()
    for layer in layers:
        layer.tape = tape
    try:
        yield
    finally:
        for layer in layers:
            layer.tape = None
