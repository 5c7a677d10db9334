"""Answers that were paid for, on disk under the key of everything that decides them: none is asked for twice."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO


def key_of(decides: Any) -> bytes:
    """12 bytes that identify what decides an answer, anything that JSON has a form for."""
    text = json.dumps(decides, sort_keys=True).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=12).digest()


class AnswerFile:
    """Rows by key in a file of JSON lines. Memory holds a key and a place a row, not the row.

    Several processes may append to one file; each knows what was there when it began, and what it wrote itself.

    Args:
        file: open for reading and appending.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._places: dict[bytes, int] = {}
        self._file = file
        with self._locked():
            self._file.seek(0)
            place = 0
            for line in self._file:
                if not line.endswith(b"\n"):
                    self._file.truncate(place)  # a kill or a full disk may have cut the last line short
                    break
                # one that cannot be read is of a process that was killed while another one wrote
                with suppress(ValueError, KeyError, TypeError):
                    self._places[bytes.fromhex(json.loads(line)["key"])] = place
                place += len(line)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def get(self, key: bytes) -> dict[str, Any]:
        """The row of a key that is there."""
        self._file.seek(self._places[key])
        row: dict[str, Any] = json.loads(self._file.readline())
        del row["key"]
        return row

    def put(self, key: bytes, row: Mapping[str, Any]) -> None:
        """Write a row; when this returns, it outlives the process.

        Raises:
            ValueError: it could not be written; says where.
        """
        with self._locked():
            place = self._file.seek(0, 2)
            try:
                self._file.write((json.dumps({"key": key.hex(), **row}) + "\n").encode())
                self._file.flush()
            except OSError as error:
                name = self._file.name
                raise ValueError(f"{name}: an answer could not be written ({error}); make room and go on") from error
        self._places[key] = place

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _locked(self) -> Generator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
