"""The command line in a process of its own, and scripts in forked processes, which need not import torch again.

A forked process is a copy of the test's process with the modules that it has imported. What must see other environment
variables while modules are imported, or needs a terminal, uses ``subprocess``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import magicrl.training.session

LIMIT = 600.0
"""Seconds after which a process is killed."""


class Forked:
    """A process that runs ``function`` in ``cwd`` with ``words`` as its ``sys.argv``.

    An exception that the function does not handle ends the process with status 1 and a traceback, as in Python.
    """

    def __init__(self, function: Callable[[], object], words: Sequence[str], cwd: Path) -> None:
        self._words = list(words)
        self._outputs = [os.memfd_create(name) for name in ("stdout", "stderr")]
        self._process = os.fork()
        if self._process == 0:
            self._run(function, cwd)

    def result(self) -> subprocess.CompletedProcess[str]:
        """Wait for the end and return exit status and output.

        Raises:
            TimeoutError: The process ran into the limit and was killed.
        """
        end = time.monotonic() + LIMIT
        while not (ended := os.waitpid(self._process, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.killpg(self._process, signal.SIGKILL)
                os.waitpid(self._process, 0)
                raise TimeoutError(f"{' '.join(self._words)} ran for more than {LIMIT:g} seconds")
            time.sleep(0.01)
        texts: list[str] = []
        for output in self._outputs:
            with os.fdopen(output, "rb") as file:
                file.seek(0)
                texts.append(file.read().decode("utf-8", "replace"))
        return subprocess.CompletedProcess(self._words, os.waitstatus_to_exitcode(ended[1]), *texts)

    def _run(self, function: Callable[[], object], cwd: Path) -> None:
        status = 1
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, output in enumerate(self._outputs, 1):
                os.dup2(output, number)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            os.chdir(cwd)
            sys.argv = self._words
            function()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001  the child must never return into pytest
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def magicrl(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``magicrl WORDS`` in ``cwd`` and return its exit status and output.

    It is a new process: a command chooses its number of threads, and OpenMP does not survive a fork once its parent has
    computed with several.
    """
    command = [sys.executable, "-m", "magicrl", *words]
    return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=LIMIT)


def scripts(text: str, arguments: Sequence[Sequence[str]], cwd: Path) -> list[str]:
    """Run a Python script side by side, once with each of the argument lists, and return the standard outputs."""
    code = compile(text, "script.py", "exec")
    running = [Forked(lambda: exec(code, {"__name__": "__main__"}), ["script.py", *one], cwd) for one in arguments]
    results = [process.result() for process in running]
    for result in results:
        assert result.returncode == 0, result.stderr
    return [result.stdout for result in results]
