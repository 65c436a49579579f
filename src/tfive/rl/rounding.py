"""Stochastic rounding of float32 to bfloat16 by counter-based noise: the same bits on every device, batch size, restart
and number of processes."""

from __future__ import annotations

import torch
from torch import Tensor

from tfive.rng import philox

_CHUNK = 1 << 24
"""Elements that share one key of the rounding noise: bounds temporary memory, and keeps element numbers below 2**32."""

_LOW16 = 0xFFFF


def _signed(word: int) -> int:
    """The 32-bit word as the int32 of the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _mixed(x: Tensor) -> Tensor:
    """A bijective 32-bit hash (xor-shift and multiply, constants of Wellons' "lowbias32"); int32 products wrap."""
    x = (x ^ ((x >> 16) & _LOW16)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _signed(0x846CA68B)
    return x ^ ((x >> 16) & _LOW16)


def noise16(count: int, words: tuple[int, int], device: torch.device | str, first: int = 0) -> Tensor:
    """`count` int32 numbers uniform on 0 … 65535, for the elements from `first` on; element i is a function of i and
    the two key words alone."""
    i = torch.arange(first, first + count, dtype=torch.int32, device=device)
    return (_mixed(_mixed(i ^ _signed(words[0])) + _signed(words[1])) >> 16) & _LOW16


def round_stochastically(source: Tensor, target: Tensor, *, seed: int, step: int, number: int, first: int = 0) -> None:
    """Write float32 `source` into bfloat16 `target`, rounding up with the probability that makes the mean exact.

    Round to nearest loses every update smaller than half a spacing (2⁻⁸ of the weight), which is most of them at
    learning rates of mid-training; here the expected weight moves by the whole update. `number` tells tensors apart;
    a piece of a tensor gives the place of its first element as `first`, and is rounded as in the whole.
    """
    flat, out = source.reshape(-1), target.view(-1)
    start = 0
    while start < flat.numel():
        chunk, inside = divmod(first + start, _CHUNK)
        part = flat[start : start + _CHUNK - inside]
        words = philox(seed, "stochastic-rounding", step, number, chunk)
        noise = noise16(part.numel(), (int(words[0]), int(words[1])), part.device, inside)
        carried = ((part.view(torch.int32) + noise) & ~_LOW16).view(torch.float32)
        out[start : start + part.numel()] = torch.where(part.isfinite(), carried, part).to(torch.bfloat16)
        start += part.numel()
