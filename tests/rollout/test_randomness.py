"""The generator against its published vectors, and the properties that rollouts rely on."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from magicrl.rollout.sampling import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The known-answer vectors that the generator's authors published for philox4x32-10."""
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in counter)
    k0, k1 = (np.array([word], dtype=np.uint64) for word in key)
    assert tuple(int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def test_golden_values_and_broadcasting() -> None:
    """(0, 0, 0, 0): words 0x6627e8d5, 0xe169c58d give (w0 >> 5) * 2^26 + (w1 >> 6) of 2^53."""
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert float(uniforms(0, 0, 0, 0)) == expected
    grid = uniforms(np.array([[3]]), np.arange(2**33, 2**33 + 4)[:, None], 5, np.arange(6))
    assert grid.shape == (4, 6)
    assert grid[2, 4] == float(uniforms(3, 2**33 + 2, 5, 4))


def test_every_argument_matters() -> None:
    base = (1, 2, 3, 4)
    values = {float(uniforms(*base))}
    for place in range(4):
        for step in (1, 2, 2**20):
            changed = list(base)
            changed[place] += step
            values.add(float(uniforms(*changed)))
    values.add(float(uniforms(2**40 + 1, 2, 3, 4)))
    values.add(float(uniforms(1, 2**40 + 2, 3, 4)))
    assert len(values) == 15


def test_uniform_and_independent_along_every_axis() -> None:
    grid = uniforms(11, np.arange(20)[:, None, None], np.arange(20)[:, None], np.arange(100))
    assert grid.min() >= 0.0
    assert grid.max() < 1.0
    assert kstest(grid.ravel(), "uniform").pvalue > 0.01
    bins = np.floor(grid * 8).astype(int)
    for left, right in ((bins[1:], bins[:-1]), (bins[:, 1:], bins[:, :-1]), (bins[..., 1:], bins[..., :-1])):
        assert chisquare(np.bincount((left * 8 + right).ravel(), minlength=64)).pvalue > 0.01
