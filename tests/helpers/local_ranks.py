"""Learner ranks as processes of this machine, without Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from magicrl.distributed.learner.launchers import Fault, RankGroup, answer_call
from magicrl.distributed.learner.rank import LearnerRank

CHILD = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
from local_ranks import answer_calls

answer_calls(int(sys.argv[1]))
"""
_STOP_SECONDS = 30.0  # limit for the exit status of a process whose pipe is closed


@dataclass(frozen=True, kw_only=True)
class LocalLauncher:
    """Starts ranks as child processes, which end with this process."""

    grace: float = 3.0  # as in `RankGroup`
    environment: Mapping[str, str] | None = None  # additional environment variables of the processes

    def start(self, ranks: int, *, timeout: float) -> RankGroup:
        """Start ranks; see ``Launcher.start``."""
        return LocalRanks(ranks, self.grace, self.environment or {}).answering(ranks, timeout, "start")


class LocalRanks(RankGroup):
    """Child processes with one pipe each."""

    def __init__(self, ranks: int, grace: float, environment: Mapping[str, str]) -> None:
        self._grace = grace
        self._pipes: list[Connection[Any, Any]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        for _ in range(ranks):
            ours, theirs = Pipe()
            self._pipes.append(ours)
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", CHILD, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **environment},
                )
            )
            # Close our copy of the child's end, or the pipe of a dead child would never report its end.
            theirs.close()

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # an idle rank then ends
        for process in self.processes:
            process.kill()
            process.wait()

    def _send(self, process: int, method: str, arguments: tuple[Any, ...]) -> Any:
        with contextlib.suppress(OSError):  # the pipe of a dead rank is ready at once and empty
            self._pipes[process].send((method, arguments))
        return self._pipes[process]

    def _ready(self, calls: list[Any], seconds: float) -> Sequence[Any]:
        return wait(calls, seconds)

    def _receive(self, process: int, call: Any) -> Any:
        try:
            return call.recv()
        except (EOFError, OSError):
            pass
        try:
            # The exit status separates an out-of-memory kill (signal 9) from an error in the code.
            code = self.processes[process].wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return Fault(died=True, text="closed its connection")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
        return Fault(died=True, text=how)


def answer_calls(descriptor: int) -> None:
    """Answer calls in a rank's process until the driver closes the pipe or ends."""
    pipe: Connection[Any, Any] = Connection(descriptor)
    target = LearnerRank(socket.gethostname())
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(answer_call(target, *pipe.recv()))
