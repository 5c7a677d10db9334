"""Ranks as processes of this machine: for tests, and for several GPUs of one machine without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from magicrl.distributed.learner.ranks import Answer, Fault, RankGroup, settled
from magicrl.distributed.learner.settings import LOCAL_RANK

_CHILD = "magicrl.distributed.learner.local_process"
_STOP_SECONDS = 30.0
"""For the exit status of a process whose pipe is closed."""


class LocalLauncher:
    """Starts ranks as child processes, which end with this one.

    Args:
        grace: seconds that other ranks get to answer after the first one failed.
        environment: further variables of theirs.
    """

    def __init__(self, *, grace: float = 3.0, environment: dict[str, str] | None = None) -> None:
        self._grace = grace
        self._environment = environment or {}

    def start(self, ranks: int, *, timeout: float) -> RankGroup:
        """See ``Launcher.start``."""
        group = LocalRanks(ranks, self._grace, self._environment)
        try:
            group.call("address", [()] * ranks, timeout=timeout, waiting_for="learner ranks to start")
        except BaseException:
            group.stop()
            raise
        return group


class LocalRanks:
    """Child processes with a pipe each; see ``RankGroup``."""

    def __init__(self, ranks: int, grace: float, environment: dict[str, str]) -> None:
        self._grace = grace
        self._pipes: list[Connection[Any, Any]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(ranks):
            ours, theirs = Pipe()
            self._pipes.append(ours)
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", _CHILD, str(theirs.fileno()), str(rank)],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, LOCAL_RANK: str(rank), **environment},
                )
            )
            theirs.close()

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], *, timeout: float, waiting_for: str) -> list[Any]:
        """See ``RankGroup.call``."""
        answers: list[Answer | None] = [None] * len(self._pipes)
        for rank, (pipe, given) in enumerate(zip(self._pipes, arguments, strict=True)):
            try:
                pipe.send((method, given))
            except OSError:
                answers[rank] = self._death(rank)
        self._collect(answers, time.monotonic() + timeout)
        return settled(answers, waiting_for=waiting_for, seconds=timeout)

    def _collect(self, answers: list[Answer | None], deadline: float) -> None:
        """Fill ``answers`` until all are there, the time is over, or the grace after a first failure is."""
        failed = any(answer is not None for answer in answers)
        while None in answers:
            if failed:
                deadline = min(deadline, time.monotonic() + self._grace)
                failed = False
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if answers[rank] is None]
            ready = cast("list[Connection[Any, Any]]", wait(open_pipes, max(0.0, deadline - time.monotonic())))
            if not ready:
                return
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    found = cast(Answer, pipe.recv())
                except (EOFError, OSError):
                    found = self._death(rank)
                answers[rank] = found
                failed = failed or found.fault is not None

    def _death(self, rank: int) -> Answer:
        try:
            code = self.processes[rank].wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return Answer(fault=Fault(died=True, kind="", text="closed its connection"))
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
        return Answer(fault=Fault(died=True, kind="", text=how))

    def stop(self) -> None:
        """See ``RankGroup.stop``."""
        for pipe in self._pipes:
            pipe.close()  # an idle rank ends by itself
        for process in self.processes:
            process.kill()
            process.wait()
