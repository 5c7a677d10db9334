"""A judge's server that is started for the step and stopped after it, where the pipeline names a command for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from magicrl.models.small_models import prepare_gguf_package
from magicrl.pipeline.settings import JudgeStep
from magicrl.pipeline.steps.base import Context
from magicrl.verifiers.code import kernel

_LOOK_SECONDS = 0.5
_STOP_SECONDS = 20.0


@contextmanager
def served(settings: JudgeStep, context: Context, log: Path) -> Generator[None]:
    """Run ``settings.serve`` for the length of the block, once it answers; nothing where there is no command.

    Raises:
        ValueError: it ends or does not answer in time; says where its output is.
    """
    if not settings.serve:
        yield
        return
    model = ""
    if settings.serve_gguf_package is not None:
        folder = context.output / "models" / settings.serve_gguf_package
        model = str(prepare_gguf_package(settings.serve_gguf_package, folder))
    words = [word.replace("{model}", model).replace("{python}", sys.executable) for word in settings.serve]
    beside = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        with log.open("wb") as output:
            server = subprocess.Popen(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=beside,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
    except OSError as error:
        raise ValueError(f"the judge's server {words[0]!r} cannot be started: {error.strerror}") from None
    try:
        _wait(server, settings, log)
        yield
    finally:
        _stop(server)


def _die_with_parent() -> None:
    """A killed run leaves no server behind."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(server: subprocess.Popen[bytes], settings: JudgeStep, log: Path) -> None:
    address = settings.settings.judges[0].base_url.rstrip("/") + "/models"
    until = time.monotonic() + settings.serve_seconds
    while time.monotonic() < until:
        if server.poll() is not None:
            raise ValueError(f"the judge's server ended with status {server.returncode}; its output is in {log}")
        try:
            if httpx2.get(address, timeout=5).status_code < 500:
                return
        except httpx2.HTTPError:
            pass
        time.sleep(_LOOK_SECONDS)
    raise ValueError(f"the judge's server did not answer at {address} in {settings.serve_seconds:g} s; see {log}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """The server and what it started: it leads a session of its own."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if server.poll() is None:
            os.killpg(server.pid, sign)
            try:
                server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
