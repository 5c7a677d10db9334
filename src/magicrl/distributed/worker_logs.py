"""Output of workers on a cluster: a file per worker in the run's folder, with secrets removed."""

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
    """Append the output of this process and its children to ``file`` from now on.

    A separate process writes the file, so that the last output of a killed process is kept. If the file cannot be
    written, nothing changes.
    """
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with Path(file).open("a", encoding="utf-8") as opened:
            opened.write(f"--- process {os.getpid()} on {socket.gethostname()}\n")
    except OSError:
        return
    # A pipe and not the file itself: the copying process removes secrets from each line before it is stored.
    ours, theirs = os.pipe()
    nowhere = subprocess.DEVNULL
    # no child of this process, and in a separate session: Ray ends a worker's children with it, and the copying
    # process has to run until the last writer has ended
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
    # Ray's streams may use other descriptors, and buffer lines that would be lost when the process is killed
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, errors="replace", closefd=False) for stream in (1, 2))  # noqa: SIM115


def copy(file: str) -> None:
    """Append stdin to ``file`` line by line, with secrets removed, until its writers have ended."""
    with Path(file).open("a", encoding="utf-8", buffering=1) as target:
        sys.stdin.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
        for line in sys.stdin:
            with suppress(OSError):  # on a full disk keep reading, so that the worker does not block
                target.write(without_secrets(line))


def output_hint(file: str | None) -> str:
    """Return the file of the output as the end of an error's text."""
    return "" if file is None else f" (its output: {file})"
