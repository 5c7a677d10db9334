"""Atomic writes, checksums, and locks of folders. This module imports nothing else of magicrl."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a full disk or quota."""


@contextmanager
def named_errors(path: Path) -> Generator[None]:
    """Raise an error of the file system in this block as an ``OSError`` that names ``path``.

    A failed write does not name its file. safetensors and tokenizers, written in Rust, raise errors of other types.
    """
    try:
        yield
    except Exception as error:  # tokenizers raises a plain Exception
        rust = re.search(r"\(os error (\d+)\)", str(error))
        number = error.errno if isinstance(error, OSError) else int(rust[1]) if rust else None
        if number is None or getattr(error, "filename", None):
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def unwritable(folder: Path, error: OSError) -> Exception:
    """Return the error of an output that cannot be written. A full disk is failed work, not a wrong command line."""
    if error.errno in NO_ROOM:
        return error
    return ValueError(f"{folder} cannot be written: {error}; choose another --output")


@contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """Open a temporary file for writing that replaces ``path`` at the end of the block, unless the block fails.

    A link remains: the file that it names is replaced. A device or pipe, such as /dev/null, is written in its place.
    """
    if path.exists() and not path.is_file():
        with named_errors(path), path.open("wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    writing = target.with_name(f".{target.name}.writing")
    try:
        with named_errors(path), writing.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power cut may leave an empty file under the name
        writing.replace(target)
    except BaseException:
        writing.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes atomically: ``path`` holds either the old or the new content."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file (64 hex digits)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(paths: Iterable[Path]) -> str:
    """Return a SHA-256 (64 hex digits) of the names and contents of files in their order."""
    return hashlib.sha256("".join(f"{path.name} {sha256_of(path)}\n" for path in paths).encode()).hexdigest()


@contextmanager
def only_writer(folder: Path, *, wait: bool) -> Generator[Callable[[], None]]:
    """Hold a lock on ``folder/.lock`` for the block. The file remains; only its lock counts.

    Yields a function that raises ``OSError`` if the folder was deleted, renamed or replaced since: another process may
    hold the lock of a new folder with this name.

    Args:
        folder: made if it is absent.
        wait: wait for another holder to finish; otherwise raise.

    Raises:
        ValueError: another process holds it, and ``wait`` is False; or the folder cannot be written.
        OSError: the disk is full.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder; choose another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(folder, error) from None
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
        with named_errors(folder):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        lock = (folder / ".lock").absolute()

        def check() -> None:
            if not (lock.exists() and os.path.samestat(lock.stat(), os.fstat(descriptor))):
                raise OSError(errno.ESTALE, "the folder was deleted, renamed or replaced during the work", str(folder))

        yield check
    finally:
        os.close(descriptor)
