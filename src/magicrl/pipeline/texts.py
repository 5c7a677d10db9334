"""Texts that stay on disk, read by number, and their shingles as 64-bit hashes."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from magicrl.files import whole_file


class Texts:
    """Texts in one file and their ends in another; memory holds 8 bytes a text.

    Args:
        path: of the file, ``.txt`` and ``.ends.npy`` are added; ``write`` made it.
    """

    def __init__(self, path: Path) -> None:
        self._ends: NDArray[np.int64] = np.load(path.with_name(path.name + ".ends.npy"))
        with path.with_name(path.name + ".txt").open("rb") as file:
            size = int(self._ends[-1]) if len(self._ends) else 0
            self._map: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""

    @staticmethod
    def write(path: Path, texts: Iterable[str]) -> None:
        """Write texts; the file of ends comes last, so that where it is the texts are whole."""
        ends: list[NDArray[np.int64]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name + ".ends.npy").unlink(missing_ok=True)
        end = 0
        with path.with_name(path.name + ".txt").open("wb") as file:
            block: list[int] = []
            for text in texts:
                data = text.encode("utf-8", "surrogatepass")
                file.write(data)
                end += len(data)
                block.append(end)
                if len(block) == 65536:
                    ends.append(np.asarray(block, dtype=np.int64))
                    block = []
            ends.append(np.asarray(block, dtype=np.int64))
        with whole_file(path.with_name(path.name + ".ends.npy")) as file:
            np.save(file, np.concatenate(ends))

    @staticmethod
    def exist(path: Path) -> bool:
        """Whether texts were written whole."""
        return path.with_name(path.name + ".ends.npy").is_file()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> str:
        start = int(self._ends[number - 1]) if number else 0
        return self._map[start : int(self._ends[number])].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))

    def chunks(self, size: int) -> Iterator[tuple[int, list[str]]]:
        """First number and texts of each run of ``size``."""
        for first in range(0, len(self), size):
            yield first, [self[number] for number in range(first, min(first + size, len(self)))]


U64 = NDArray[np.uint64]


def mixed(values: U64, seed: int) -> U64:
    """Each value scrambled (the finaliser of splitmix64, Steele et al. 2014)."""
    x = values + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shingles(texts: Sequence[str], length: int, seed: int = 0) -> tuple[U64, NDArray[np.int64]]:
    """Hashes of every run of ``length`` characters, and where each text's begin.

    A text shorter than that is one shingle; an empty one has none.

    Returns:
        hashes ``[S]``, and starts ``[len(texts) + 1]``: text i has ``hashes[starts[i] : starts[i + 1]]``.
    """
    joined = "".join(text if not 0 < len(text) < length else text.ljust(length, "\x00") for text in texts)
    points = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    sizes = np.asarray([max(len(text), length) if text else 0 for text in texts], dtype=np.int64)
    return runs(points, sizes, length, seed)


def runs(items: U64, sizes: NDArray[np.int64], length: int, seed: int = 0) -> tuple[U64, NDArray[np.int64]]:
    """Hashes of every run of ``length`` items within rows of ``sizes``, and where each row's begin.

    Returns:
        hashes ``[S]``, and starts ``[len(sizes) + 1]``; a row shorter than ``length`` has none.
    """
    counts = np.maximum(sizes - length + 1, 0)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    if len(items) < length:
        return np.empty(0, dtype=np.uint64), starts
    rolled = np.zeros(len(items) - length + 1, dtype=np.uint64)
    for offset in range(length):
        rolled = rolled * np.uint64(0x100000001B3) + items[offset : offset + len(rolled)]
    # a window is whole where it ends within the row in which it begins
    left = np.repeat(np.cumsum(sizes), sizes) - np.arange(len(items))
    return mixed(rolled[left[: len(rolled)] >= length], seed), starts


def jaccard(a: U64, b: U64) -> float:
    """Share of common values of two sets (sorted, unique); two empty ones have nothing in common."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    union = len(a) + len(b) - common
    return common / union if union else 0.0
