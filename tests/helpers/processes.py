"""The command line in a new process or in the test's, and parallel scripts in copies of the test's process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import CodeType
from unittest.mock import patch

LIMIT = 600.0
"""Time limit of a process in seconds."""


def magicrl(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``magicrl WORDS`` in ``cwd`` and return its exit status and output.

    It is a new process: a command chooses its number of threads, and OpenMP does not survive a fork once its parent has
    computed with several.
    """
    command = [sys.executable, "-m", "magicrl", *words]
    return subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True, timeout=LIMIT)


def magicrl_here(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``magicrl WORDS`` in ``cwd`` within this process and return its exit status and output.

    This saves the CPU seconds in which a new process imports torch and transformers. It computes with one thread, since
    other tests fork this process. It is not for a command that is killed.
    """
    from magicrl.commands.main import app, main

    output, errors = StringIO(), StringIO()
    one_core = patch("os.sched_getaffinity", lambda _: {0})
    try:
        with chdir(cwd), redirect_stdout(output), redirect_stderr(errors), one_core:
            main(partial(app, words))
    except SystemExit as end:
        return subprocess.CompletedProcess(words, int(end.code or 0), output.getvalue(), errors.getvalue())
    raise AssertionError("the entry point always exits")


def scripts(text: str, arguments: Sequence[Sequence[str]], cwd: Path) -> list[str]:
    """Run a Python script in parallel, once per argument list, and return the standard outputs.

    The processes are forked, so none imports torch and transformers again. The script must compute with one thread.
    """
    code, fork = compile(text, "script.py", "exec"), multiprocessing.get_context("fork")
    outputs = [cwd / f"script-{number}.out" for number in range(len(arguments))]
    running = [
        fork.Process(target=_execute, args=(code, ["script.py", *words], output, cwd), daemon=True)
        for words, output in zip(arguments, outputs, strict=True)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(LIMIT)
        assert process.exitcode == 0, f"status {process.exitcode}; its standard error has the reason"
    return [output.read_text() for output in outputs]


def _execute(code: CodeType, words: list[str], output: Path, cwd: Path) -> None:
    os.chdir(cwd)
    sys.argv = words
    with output.open("w") as file, redirect_stdout(file):
        exec(code, {"__name__": "__main__"})
