"""Messages between the pool and its workers: four bytes of length, then JSON in ASCII.

Both ends check what arrives. A worker reads text that a model wrote, so what it sends is data to validate,
never something to unpickle.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from typing import Any

_HEADER = struct.Struct(">Q")
MAX_REPLY_BYTES = 1 << 20


class ProtocolError(Exception):
    """The other side sent something that is no message."""


def encode(message: Mapping[str, Any]) -> bytes:
    """The bytes of one message. ASCII escapes carry lone surrogates and control characters unharmed."""
    body = json.dumps(message, ensure_ascii=True).encode("ascii")
    return _HEADER.pack(len(body)) + body


class Decoder:
    """Cuts a byte stream into messages, whatever the pieces it arrives in."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> dict[str, Any] | None:
        """The next whole message, or None.

        Raises:
            ProtocolError: a message over the limit, or not a JSON object.
        """
        if len(self._buffer) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._buffer)
        if self._limit is not None and length > self._limit:
            raise ProtocolError(f"message of {length} bytes, at most {self._limit} are allowed")
        if len(self._buffer) < _HEADER.size + length:
            return None
        body = bytes(self._buffer[_HEADER.size : _HEADER.size + length])
        del self._buffer[: _HEADER.size + length]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not JSON: {error}") from error
        if not isinstance(message, dict):
            raise ProtocolError(f"not an object: {type(message).__name__}")
        return message


def read_blocking(fd: int, decoder: Decoder) -> dict[str, Any] | None:
    """The next message from a blocking descriptor; None at its end."""
    while (message := decoder.next()) is None:
        data = os.read(fd, 1 << 16)
        if not data:
            return None
        decoder.feed(data)
    return message


def write_blocking(fd: int, message: Mapping[str, Any]) -> None:
    """Send one message whole."""
    data = memoryview(encode(message))
    while data:
        data = data[os.write(fd, data) :]
