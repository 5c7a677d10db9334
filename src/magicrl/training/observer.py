"""The seam between the loop and whatever shows it: a live display, plain lines, a test, nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from magicrl.records import StepMetrics


@runtime_checkable
class RunObserver(Protocol):
    """Is told what happens while it happens. It only watches: nothing it does may change the run."""

    def step(self, metrics: StepMetrics) -> None:
        """One training step is over; ``metrics`` is its line of ``metrics.jsonl``."""
        ...

    def event(self, event: Mapping[str, object]) -> None:
        """Something rarer happened: the line of ``events.jsonl``, with at least ``kind`` and ``message``."""
        ...

    def progress(self, phase: str, done: int, total: int) -> None:
        """Work inside a step or an evaluation: ``done`` of ``total`` units of ``phase`` (e.g. ``rollout``)."""
        ...


class NullObserver:
    """Watches nothing."""

    def step(self, metrics: StepMetrics) -> None:
        """Ignore the step."""

    def event(self, event: Mapping[str, object]) -> None:
        """Ignore the event."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """Ignore the progress."""


class Observers:
    """Tells several observers, in their order.

    Args:
        observers: each is told everything.
    """

    def __init__(self, *observers: RunObserver) -> None:
        self._observers = observers

    def step(self, metrics: StepMetrics) -> None:
        """Pass the step on."""
        for observer in self._observers:
            observer.step(metrics)

    def event(self, event: Mapping[str, object]) -> None:
        """Pass the event on."""
        for observer in self._observers:
            observer.event(event)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Pass the progress on."""
        for observer in self._observers:
            observer.progress(phase, done, total)
