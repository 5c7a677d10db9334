"""Files that are complete or absent, their checksums, and the lock of a folder."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import pytest

from magicrl.files import checksum, named_errors, only_writer, whole_file, write_atomically


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "kept.txt"
    write_atomically(path, "old")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"half of the n")
            file.flush()
            assert path.read_text() == "old", "a reader in between sees the old file"
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("kept.txt", "old")]
    write_atomically(path, "new")
    assert path.read_bytes() == b"new"


def test_an_error_of_a_full_disk_names_the_file(
    tmp_path: Path, room_for: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "kept.txt"
    with room_for(10), pytest.raises(OSError, match=r"kept\.txt'$") as full:
        write_atomically(path, "x" * 20)
    assert (full.value.errno, list(tmp_path.iterdir())) == (errno.EFBIG, [])
    for rust in (Exception("No space left on device (os error 28)"), OSError(errno.ENOSPC, "full")):
        with pytest.raises(OSError, match=r"No space left.*kept\.txt'$") as found, named_errors(path):
            raise rust
        assert found.value.errno == errno.ENOSPC
    for other in (ValueError("wrong"), OSError(errno.EACCES, "closed", "another")):
        with pytest.raises(type(other)) as found, named_errors(path):
            raise other
        assert found.value is other


def test_a_link_or_a_pipe_remains_one(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("target")
    os.mkfifo(pipe)  # as root, /dev/null and /dev/stdout would be replaced likewise
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (link, pipe):
        write_atomically(path, "new")
    assert (link.readlink(), (tmp_path / "target").read_text()) == (Path("target"), "new")
    assert (pipe.is_fifo(), os.read(reader, 10)) == (True, b"new")
    os.close(reader)


def test_a_checksum_is_of_the_names_too(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    found: list[str] = []
    for contents in (("1", "2"), ("2", "1")):
        for path, text in zip(paths, contents, strict=True):
            path.write_text(text)
        found += [checksum(paths), checksum([paths[1], paths[0]])]
    (tmp_path / "c").write_text("1")
    found.append(checksum([paths[0], tmp_path / "c"]))
    assert len(set(found)) == 5


def test_the_holder_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("123456789012")  # left by an earlier process
    with only_writer(tmp_path, wait=False):
        message = rf"being written by another process \(pid {os.getpid()}\); it is this one"
        with pytest.raises(ValueError, match=message), only_writer(tmp_path, wait=False):
            pass
    with only_writer(tmp_path, wait=False):
        pass
    with patch("os.open", side_effect=OSError(errno.ENOSPC, "full", "a")), pytest.raises(OSError, match="full"):
        only_writer(tmp_path, wait=False).__enter__()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as on a full disk
    try:
        with pytest.raises(OSError, match=f"'{tmp_path}'"), only_writer(tmp_path, wait=False):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
