"""Ctrl-C and SIGTERM: finish the step in progress, keep its results, then stop; a second one stops at once.

A step is minutes of work. Thrown away at the first Ctrl-C it would only be done again by ``--resume``, and a
scheduler that sends SIGTERM before it kills gives just enough time to keep it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTICE = b"\nfinishing this step, then stopping; once more stops at once (the last checkpoint stays)\n"


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; what it had done is kept.

    Attributes:
        signal_number: the signal that asked.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


class StopRequest:
    """Whether somebody asked this run to stop, and when it may."""

    def __init__(self) -> None:
        self._asked: int | None = None
        self._deferring = False

    @property
    def asked(self) -> bool:
        """A stop was asked for and waits for the end of the step."""
        return self._asked is not None

    @contextmanager
    def watching(self) -> Generator[StopRequest]:
        """Handle the two signals for the length of a run. In other threads than the main one nothing changes."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        former = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Generator[None]:
        """Put a first signal off to the end of the block; raises ``Interrupted`` there."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        if self._asked is not None:
            raise Interrupted(self._asked)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._deferring and self._asked is None:
            self._asked = number
            # os.write: the display may be in the middle of its own, and a buffered stream cannot be entered twice
            os.write(2, _NOTICE)
            return
        raise Interrupted(number)
