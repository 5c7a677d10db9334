"""Finished samples on their way to the disk: judged beside the engine, handed on in the order they ended.

An engine may be silent for many minutes while its longest responses grow. What ended before must not wait for that:
a timer looks for verdicts too, so that a kill loses no sample that was judged more than a second before.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from magicrl.records import FinishedSample, Verdict
from magicrl.verifiers.base import VerifierService

LOOK_EVERY = 1.0
"""Seconds between two looks for verdicts while the engine is silent."""


class Settling:
    """Takes samples as they end and hands each on with its verdict.

    Leaving the block waits for the verdicts of all that were added, also where the engine failed or was interrupted.

    Args:
        judge: the verifiers.
        judged: gets each sample and its verdict, from one thread at a time.
        look_every: seconds of the timer.
    """

    def __init__(
        self,
        judge: VerifierService,
        judged: Callable[[FinishedSample, Verdict], None],
        *,
        look_every: float,
    ) -> None:
        self._judge = judge
        self._judged = judged
        self._every = look_every
        self._waiting: deque[tuple[FinishedSample, Any]] = deque()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._timer = threading.Thread(target=self._look, name="magicrl-settling", daemon=True)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def add(self, sample: FinishedSample) -> None:
        """Have a sample judged, and hand on those that are.

        Raises:
            BaseException: what ``judged`` raised, here or in the timer.
        """
        with self._lock:
            self._raise_failure()
            self._waiting.append((sample, self._judge.submit(sample.request.problem, [sample.completion.text])))
            self._settle()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._timer.join()
        while self._waiting:
            self._hand_on()
        if error is None:
            self._raise_failure()

    def _look(self) -> None:
        while not self._over.wait(self._every):
            with self._lock:
                try:
                    self._settle()
                except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                    self._failure = error
                    return

    def _settle(self) -> None:
        while self._waiting and self._judge.ready(self._waiting[0][1]):
            self._hand_on()

    def _hand_on(self) -> None:
        sample, ticket = self._waiting.popleft()
        (verdict,) = self._judge.result(ticket)
        self._judged(sample, verdict)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
