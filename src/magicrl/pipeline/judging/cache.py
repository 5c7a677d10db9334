"""Votes on disk, a line each, written as they arrive: a vote that is there is never asked for again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from magicrl.files import only_writer
from magicrl.pipeline.judging.problems import JudgedProblem, Vote
from magicrl.pipeline.judging.settings import JudgeSettings

_VERSION = 1  # raised when the questions' wording changes: older votes answered another question


def vote_key(problem: JudgedProblem, judge: JudgeSettings, index: int, *, instructions: str, seed: int) -> bytes:
    """What decides a vote, as 12 bytes. The judge's address, its retries and its prices do not."""
    decides = [
        _VERSION,
        problem.text,
        judge.model,
        judge.temperature,
        judge.max_tokens,
        judge.structured,
        judge.extra,
        index,
        instructions,
        seed,
    ]
    if judge.reasons_characters is not None:
        decides.append({"reasons_characters": judge.reasons_characters})
    text = json.dumps(decides, sort_keys=True).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=12).digest()


class VoteCache:
    """Votes by key. Memory holds a key and a place a vote, not the vote.

    Use ``open_cache``, so that two processes never write one file.
    """

    def __init__(self, path: Path) -> None:
        self._places: dict[bytes, int] = {}
        self._file = path.open("a+b")
        self._load()

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: bytes, problem: str, judge: str) -> Vote:
        """The vote, under the names that problem and judge have now."""
        self._file.seek(self._places[key])
        fields = cast("dict[str, Any]", json.loads(self._file.readline()))
        del fields["key"]
        fields |= {"problem": problem, "judge": judge}
        return Vote(**fields)

    def put(self, key: bytes, vote: Vote) -> None:
        """Write a vote; when this returns, it outlives the process."""
        line = json.dumps({"key": key.hex(), **asdict(vote)}) + "\n"
        place = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise ValueError(
                f"{self._file.name}: a vote could not be written ({error}); make room and go on"
            ) from error
        self._places[key] = place

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _load(self) -> None:
        """Read the keys; a line that a kill or a full disk cut short is cut off."""
        self._file.seek(0)
        place = 0
        for line in self._file:
            try:
                key = bytes.fromhex(json.loads(line)["key"])
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            self._places[key] = place
            place += len(line)
        rest = self._file.seek(0, os.SEEK_END) - place
        if rest:
            self._file.truncate(place)


@contextmanager
def open_cache(folder: Path) -> Generator[VoteCache]:
    """The folder's cache, for one process at a time.

    Raises:
        ValueError: another process writes it.
    """
    with only_writer(folder, wait=False):
        cache = VoteCache(folder / "votes.jsonl")
        try:
            yield cache
        finally:
            cache.close()
