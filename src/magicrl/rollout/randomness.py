"""Random numbers as a pure function of (run seed, draw, sample, position): nothing is stored, nothing drifts.

A counter-based generator, Philox-4x32 with ten rounds (Salmon, Moraes, Dror, Shaw: "Parallel random
numbers: as easy as 1, 2, 3", SC11), is keyed by the run seed; its 128-bit counter holds the other three.
So a token's random number does not depend on the batch it is decoded in, on the order of requests or
on what was generated before, and a resumed run needs no generator state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

Words = NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Ten rounds of Philox-4x32.

    Args:
        counter: four arrays of 32-bit words (held as uint64), broadcast against each other.
        key: two arrays of 32-bit words, broadcast likewise.

    Returns:
        Four arrays of 32-bit words (as uint64).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high, low = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (low >> _32) ^ c1 ^ k0, low & _LOW, (high >> _32) ^ c3 ^ k1, high & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _words(value: ArrayLike) -> Words:
    return np.asarray(value).astype(np.uint64)


def uniforms(seed: ArrayLike, draw: ArrayLike, sample: ArrayLike, position: ArrayLike) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for every (seed, draw, sample, position), broadcast.

    ``seed`` and ``draw`` may have 64 bits, ``sample`` and ``position`` 32; none may be negative.
    """
    seeds, draws = _words(seed), _words(draw)
    counter = (_words(position), _words(sample), draws & _LOW, draws >> _32)
    first, second, *_ = philox4x32(counter, (seeds & _LOW, seeds >> _32))
    bits: Any = ((first >> np.uint64(5)) << np.uint64(26)) | (second >> np.uint64(6))
    return np.asarray(bits, dtype=np.float64) * 2.0**-53
