"""What workers on a cluster write to stdout and stderr: a file each in the run's folder, without secrets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from magicrl_verifiers.secrets import without_secrets

_COPY = """
import os, sys
if os.fork():
    os._exit(0)
from magicrl.distributed.worker_logs import copy
copy(sys.argv[1])
"""


def keep_output(file: str) -> None:
    """Add what this process, and those that it starts, write to ``file`` from here on.

    A process of its own writes it: the last words of one that is killed, or that dies in CUDA or NCCL, are kept.
    Where the file cannot be written, output stays where it was.
    """
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with Path(file).open("a", encoding="utf-8") as opened:
            opened.write(f"--- process {os.getpid()} on {socket.gethostname()}\n")
    except OSError:
        return
    ours, theirs = os.pipe()
    nowhere = subprocess.DEVNULL
    # nobody's child, and of a session of its own: Ray ends a worker's children with it, and this one is to end when
    # nobody can write any more
    subprocess.run(
        [sys.executable, "-c", _COPY, file],
        stdin=ours,
        stdout=nowhere,
        stderr=nowhere,
        start_new_session=True,
        check=True,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(theirs, stream)
    os.close(ours)
    os.close(theirs)
    # Ray's own streams need not be these two descriptors, and keep lines that an end by a signal would lose
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, errors="replace", closefd=False) for stream in (1, 2))  # noqa: SIM115


def copy(file: str) -> None:
    """Add this process's stdin to ``file`` line by line, secrets blanked, until its writers are gone."""
    with Path(file).open("a", encoding="utf-8", buffering=1) as target:
        sys.stdin.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
        for line in sys.stdin:
            with suppress(OSError):  # on a full disk the worker is to go on: somebody has to read what it writes
                target.write(without_secrets(line))


def told(file: str | None) -> str:
    """Where to look, for the end of an error's text."""
    return "" if file is None else f" (its output: {file})"
