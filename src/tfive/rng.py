"""Counter-based random numbers: a number depends on *what* is drawn, never on what was drawn before.

Philox-4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). The key is a digest of
the run's seed and the role, the counter is (window, item, sample, step), so re-batching, resuming or adding ranks draws
the same numbers.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)

Integers = int | npt.NDArray[np.integer]


def _key(seed: int, role: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}/{role}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox(
    seed: int, role: str, window: Integers, item: Integers, sample: Integers = 0, step: Integers = 0
) -> np.ndarray:
    """Four 32-bit words per counter, shape `broadcast(window, item, sample, step) + (4,)`, dtype uint64."""
    counters = [np.asarray(x, dtype=np.int64) for x in (window, item, sample, step)]
    if any(c.size and (c.min() < 0 or c.max() > 0xFFFFFFFF) for c in counters):
        raise ValueError("window, item, sample and step must lie in 0 … 2**32 − 1")
    # Numbers stay numbers until they meet an array: most draws are small, and take as long as their operations do.
    c0, c1, c2, c3 = (c.astype(np.uint64)[()] for c in counters)
    k0, k1 = _key(seed, role)
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    words = np.empty((*np.broadcast_shapes(*(c.shape for c in counters)), 4), dtype=np.uint64)
    for place, word in enumerate((c0, c1, c2, c3)):
        words[..., place] = word
    return words


def uniforms(
    seed: int, role: str, window: Integers, item: Integers, sample: Integers = 0, step: Integers = 0
) -> npt.NDArray[np.float64]:
    """One number in the open interval (0, 1) per counter, with 52 random bits."""
    words = philox(seed, role, window, item, sample, step)
    return _unit(words[..., 0], words[..., 1])


def _unit(high: np.ndarray, low: np.ndarray) -> npt.NDArray[np.float64]:
    """Pairs of 32-bit words as numbers in (0, 1)."""
    bits = (high << np.uint64(20)) ^ (low >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def permutation(seed: int, role: str, window: int, count: int) -> npt.NDArray[np.int64]:
    """A random order of `0 … count−1`, the same for any batching."""
    words = philox(seed, role, window, np.arange(count))
    return np.lexsort((np.arange(count), words[..., 1], words[..., 0])).astype(np.int64)


def normals(seed: int, role: str, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Standard normal numbers by Box and Muller, a pair per counter."""
    count = math.prod(shape)
    words = philox(seed, role, 0, np.arange((count + 1) // 2))
    first, second = _unit(words[..., 0], words[..., 1]), _unit(words[..., 2], words[..., 3])
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1)[:count].reshape(shape)
