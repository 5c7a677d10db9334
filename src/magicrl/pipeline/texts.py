"""Texts on disk, read by number, and hashes of their shingles."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from magicrl.files import whole_file
from magicrl.pipeline.entry import Document

_SCHEMA = pa.schema([("text", pa.large_binary())])  # bytes: a text may hold half of a surrogate pair
_BATCH = 65536


class Texts:
    """Texts in a memory-mapped Arrow file, which ``write`` creates."""

    def __init__(self, path: Path) -> None:
        self._column = pa.ipc.open_file(pa.memory_map(str(path))).read_all().column("text")

    @staticmethod
    def write(path: Path, texts: Iterable[str]) -> None:
        """Write texts to a file atomically."""
        waiting = iter(texts)
        with whole_file(path) as file, pa.ipc.new_file(file, _SCHEMA) as writer:
            while batch := [text.encode("utf-8", "surrogatepass") for text in islice(waiting, _BATCH)]:
                writer.write_batch(pa.record_batch([pa.array(batch, pa.large_binary())], schema=_SCHEMA))

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, number: int) -> str:
        return self._column[number].as_py().decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (text for _, chunk in self.chunks(_BATCH) for text in chunk)

    def chunks(self, size: int) -> Iterator[tuple[int, list[str]]]:
        """Yield chunks of ``size`` texts with the number of the first."""
        for first in range(0, len(self), size):
            found = self._column.slice(first, size).to_pylist()
            yield first, [text.decode("utf-8", "surrogatepass") for text in found]


def spooled(documents: Iterable[Document], path: Path) -> tuple[list[str], list[tuple[float, ...]], Texts, str]:
    """Write the texts of documents to ``path``. Return their ids, qualities, the texts, and a hash of everything."""
    ids: list[str] = []
    qualities: list[tuple[float, ...]] = []
    digest = hashlib.sha256()

    def read() -> Iterator[str]:
        for document in documents:
            ids.append(document.id)
            qualities.append(document.quality)
            digest.update(repr((document.id, document.quality, len(document.text))).encode())
            digest.update(document.text.encode("utf-8", "surrogatepass"))
            yield document.text

    path.parent.mkdir(parents=True, exist_ok=True)
    Texts.write(path, read())
    return ids, qualities, Texts(path), digest.hexdigest()


U64 = NDArray[np.uint64]


def mixed(values: U64, seed: int) -> U64:
    """Return hashes of the values (the finaliser of splitmix64, Steele et al. 2014)."""
    x = values + np.uint64((0x9E3779B97F4A7C15 * (seed + 1)) & 0xFFFFFFFFFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shingles(texts: Sequence[str], length: int, seed: int = 0) -> tuple[U64, NDArray[np.int64]]:
    """Return the hashes of all windows of ``length`` characters, and where those of each text start.

    A shorter text is one shingle; an empty text has none.

    Returns:
        Hashes ``[S]`` and starts ``[len(texts) + 1]``. Text i has ``hashes[starts[i] : starts[i + 1]]``.
    """
    joined = "".join(text if not 0 < len(text) < length else text.ljust(length, "\x00") for text in texts)
    # utf-32: one number per character in every script
    points = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
    sizes = np.asarray([max(len(text), length) if text else 0 for text in texts], dtype=np.int64)
    return window_hashes(points, sizes, length, seed)


def window_hashes(items: U64, sizes: NDArray[np.int64], length: int, seed: int = 0) -> tuple[U64, NDArray[np.int64]]:
    """Return the hashes of all windows of ``length`` items within rows of ``sizes``, and where those of each row start.

    Returns:
        Hashes ``[S]`` and starts ``[len(sizes) + 1]``. A row shorter than ``length`` has no hash.
    """
    counts = np.maximum(sizes - length + 1, 0)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    if len(items) < length:
        return np.empty(0, dtype=np.uint64), starts
    rolled = np.zeros(len(items) - length + 1, dtype=np.uint64)
    for offset in range(length):
        # the prime of FNV-1 (64 bits); overflow is harmless in a hash
        rolled = rolled * np.uint64(0x100000001B3) + items[offset : offset + len(rolled)]
    # keep windows that end in the row in which they start
    left = np.repeat(np.cumsum(sizes), sizes) - np.arange(len(items))
    return mixed(rolled[left[: len(rolled)] >= length], seed), starts


def jaccard(a: U64, b: U64) -> float:
    """Return the Jaccard similarity of two sorted arrays of unique values; 0 if both are empty."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    union = len(a) + len(b) - common
    return common / union if union else 0.0
