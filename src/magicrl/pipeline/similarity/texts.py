"""Texts that stay on disk: written once in order, read by number."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
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
