"""The files of a folder that two processes keep alike, each in a file system of its own.

Test code writes a file and gives its name to the program, which writes another. What changed since the last message
goes with the next one. Where nothing can be written (tier A) there is nothing to tell.
"""

from __future__ import annotations

import os
import stat
from os import close, lstat, makedirs, pread, remove, rmdir, scandir, write
from os import open as open_file
from typing import Any

_MAX_BYTES = 16 << 20
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC


class Files:
    """One side's view. Holds system calls by name: test code may put mocks in the place of Python's own functions."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._known: dict[str, tuple[int, ...]] = {}

    def changes(self) -> dict[str, Any] | None:
        """What is new since the last look: content by path, None for a folder; and what is gone. None: nothing."""
        if self._folder == "/":
            return None
        found: dict[str, tuple[int, ...]] = {}
        self._walk("", found)
        if found == self._known:
            return None
        new: dict[str, str | None] = {}
        room = _MAX_BYTES
        for path, state in found.items():
            if self._known.get(path) != state:
                content = None if len(state) == 1 else self._read(path, min(state[1], room))
                room -= len(content or "")
                new[path] = content
        gone = [path for path in self._known if path not in found]
        self._known = found
        return {"new": new, "gone": gone}

    def apply(self, changed: Any) -> None:
        """Make the other side's changes here; what is no plain path below the folder is left out."""
        if not isinstance(changed, dict) or self._folder == "/":
            return
        new, gone = changed.get("new"), changed.get("gone")
        if isinstance(gone, list):
            for path in reversed([path for path in gone if _below(path)]):
                self._attempt(self._remove, path)
        if isinstance(new, dict):
            for path, content in new.items():
                if _below(path) and (content is None or isinstance(content, str)):
                    self._attempt(self._write, path, content)
        self._known = {}
        self._walk("", self._known)

    def _attempt(self, action: Any, *given: Any) -> None:
        try:
            action(*given)
        except (OSError, ValueError):
            return  # a file where a folder is wanted, a name too long, no room: the other side sees it missing

    def _walk(self, below: str, found: dict[str, tuple[int, ...]]) -> None:
        try:
            with scandir(f"{self._folder}/{below}") as entries:
                for entry in entries:
                    path = f"{below}{entry.name}"
                    state = lstat(f"{self._folder}/{path}")
                    if stat.S_ISDIR(state.st_mode):
                        found[path] = (0,)
                        self._walk(path + "/", found)
                    elif stat.S_ISREG(state.st_mode):
                        found[path] = (state.st_mtime_ns, state.st_size, state.st_ino)
        except OSError:
            return

    def _read(self, path: str, size: int) -> str:
        fd = open_file(f"{self._folder}/{path}", os.O_RDONLY | _SAFE)
        try:
            return pread(fd, size, 0).decode("latin-1")
        finally:
            close(fd)

    def _write(self, path: str, content: str | None) -> None:
        whole = f"{self._folder}/{path}"
        if content is None:
            makedirs(whole, exist_ok=True)
            return
        fd = open_file(whole, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _SAFE, 0o666)
        try:
            data = content.encode("latin-1")
            while data:
                data = data[write(fd, data) :]
        finally:
            close(fd)

    def _remove(self, path: str) -> None:
        whole = f"{self._folder}/{path}"
        if stat.S_ISDIR(lstat(whole).st_mode):
            rmdir(whole)
        else:
            remove(whole)


def _below(path: Any) -> bool:
    return isinstance(path, str) and bool(path) and ".." not in path.split("/") and not path.startswith("/")
