"""A limit on CPU time inside a worker, so that a formula that takes too long costs no process.

The pool's own limit kills the worker; this one, lower, only ends the item. It works in a main thread on systems
with interval timers, which is where workers run; elsewhere the pool's limit stands alone.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class CpuAlarm(BaseException):
    """The CPU time was used up. No `Exception`, so that no library takes it for one of its own errors."""


@contextmanager
def cpu_limit(seconds: float) -> Generator[None]:
    """Raise `CpuAlarm` in the block once it used so many seconds of CPU time."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise CpuAlarm

    before = signal.signal(signal.SIGPROF, ring)
    # again and again: a library may catch the first one in an ``except:`` of its own
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
