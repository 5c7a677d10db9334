"""The live display of a run: a panel that updates itself in a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from magicrl.cli.panel import RunPanel, event_text, figure, progress_text
from magicrl.records import StepMetrics

SILENCE_SECONDS = 10.0
"""Without a terminal, longest time without a line while work goes on."""


class LiveDisplay:
    """A ``RunObserver`` for people.

    Use it as a context manager; it may be updated before and after, too. It only reads, and holds a number
    or two a step.

    Args:
        console: where to write; default standard output.
        title: the run's name.
        max_steps: most training steps of the whole run; None where that makes no sense.
        stage_steps: most steps of each stage: makes the time left tighter after a stage that ended early.
        interval: without a terminal, seconds between lines of steps (the first and a stage's first always show).
        clock: seconds; a test puts its own here.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        title: str = "",
        max_steps: int | None = None,
        stage_steps: Sequence[int] = (),
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._interval = interval
        self._clock = clock
        self._began = clock()
        self._last_line = -float("inf")
        self._last_step_line = -float("inf")
        self._last_step_end: float | None = None
        self._live: Live | None = None
        self.panel = RunPanel(
            title=title, max_steps=max_steps, stage_steps=stage_steps, elapsed=lambda: clock() - self._began
        )

    def __enter__(self) -> Self:
        self._live = start_panel(self._console, self.panel)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.panel.phase = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, metrics: StepMetrics) -> None:
        """A training step is over."""
        now = self._clock()
        # from one step's end to the next, validation and checkpoints included
        seconds = now - self._last_step_end if self._last_step_end is not None else figure(metrics, "time/step")
        self._last_step_end = now
        first = self.panel.step(metrics, seconds)
        validated = figure(metrics, "validation/accuracy/mean") is not None
        # measured from the last step's line: a progress line just before must not silence the step itself
        if self._live is None and (first or validated or now - self._last_step_line >= self._interval):
            self._last_step_line = now
            self._line(Text(self.panel.step_line()))

    def event(self, event: Mapping[str, object]) -> None:
        """Something rarer happened: a line of its own, above the panel."""
        self._line(event_text(event))

    def progress(self, phase: str, done: int, total: int) -> None:
        """Work inside a step or a test goes on."""
        self.panel.phase = (phase, done, total)
        if self._live is None and self._clock() - self._last_line >= SILENCE_SECONDS:
            self._line(progress_text(phase, done, total))

    def _line(self, text: Text) -> None:
        self._last_line = self._clock()
        self._console.print(text, soft_wrap=True, highlight=False)


def start_panel(console: Console, panel: RunPanel) -> Live | None:
    """Draw the panel four times a second; None where nothing can be redrawn (a file, a pipe, a dumb terminal)."""
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    live = Live(console=console, get_renderable=lambda: panel, refresh_per_second=4, vertical_overflow="ellipsis")
    live.start()
    return live
