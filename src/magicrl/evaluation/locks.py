"""One writer per folder: a lock that the kernel lets go of when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


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
            raise ValueError(
                f"{folder} is being written by another process (pid {holder}); "
                "wait for it, stop it, or choose another --output"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
