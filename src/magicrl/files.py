"""Files that are whole or not there, their checksums, and folders that one process writes at a time. Imports nothing of
magicrl."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """A file to write; at the end of the block ``path`` is it. Where the block fails ``path`` is what it was."""
    writing = path.with_name(f".{path.name}.writing")
    try:
        with writing.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave an empty file under the name
        writing.replace(path)
    except BaseException:
        writing.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes so that ``path`` holds either the old or the new content, never a part."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(paths: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files in their order, in 64 hex digits."""
    return hashlib.sha256("".join(f"{path.name} {sha256_of(path)}\n" for path in paths).encode()).hexdigest()


@contextmanager
def only_writer(folder: Path, *, wait: bool) -> Generator[None]:
    """Hold ``folder/.lock`` for the length of the block. The file stays; only the lock on it counts.

    Args:
        folder: made if it is absent.
        wait: wait for another holder to finish; otherwise raise.

    Raises:
        ValueError: another process holds it, and ``wait`` is False; or the folder cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder; choose another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ValueError(f"{folder} cannot be written: {error}; choose another --output") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip() or "unknown"
            here = holder == str(os.getpid())
            remedy = "it is this one: close() that run" if here else "wait for it, stop it"
            raise ValueError(
                f"{folder} is being written by another process (pid {holder}); {remedy}, or choose another --output"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
