"""Which steps of a dedup folder are done, so that a killed call goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from magicrl.files import whole_file, write_atomically

_VERSION = 1  # raised whenever equal documents and settings would give other files


class Steps:
    """Arrays made by steps, each kept under a key of everything that decides it.

    Args:
        folder: is made.
        inputs: digest of the documents.
    """

    def __init__(self, folder: Path, inputs: str) -> None:
        self.folder = folder
        self._inputs = inputs
        self._record = folder / "steps.json"
        folder.mkdir(parents=True, exist_ok=True)

    def key(self, *decides: Any) -> str:
        """A digest of the documents and of JSON values."""
        text = json.dumps([_VERSION, self._inputs, *decides], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def is_done(self, name: str, key: str) -> bool:
        """Whether the step's files are of this key."""
        return self._read().get(name) == key

    def finish(self, name: str, key: str) -> None:
        """Record that the step's files are whole."""
        write_atomically(self._record, json.dumps(self._read() | {name: key}))

    def array(self, name: str, key: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The array of a step, from its file or made now."""
        path = self.folder / f"{name}.npy"
        if not self.is_done(name, key):
            made = make()
            with whole_file(path) as file:
                np.save(file, made)
            self.finish(name, key)
        return np.load(path)

    def _read(self) -> dict[str, str]:
        if not self._record.is_file():
            return {}
        return cast("dict[str, str]", json.loads(self._record.read_text()))
