"""How an evaluation goes, for a person: a bar in a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from magicrl.evaluation.samples import SampleRow
from magicrl.reporting.wording import percent, visible
from magicrl_verifiers.progress import TimeLeft, duration

if TYPE_CHECKING:
    from magicrl.evaluation.runner import Cost

SILENCE_SECONDS = 10.0  # without a terminal, seconds between lines


class EvalDisplay:
    """Tells a person how an evaluation goes: a bar in a terminal, plain lines anywhere else.

    Args:
        console: where to write.
        clock: seconds; a test puts its own here.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last_line = -float("inf")
        self._began: dict[str, float] = {}
        self._counts: dict[str, tuple[int, int, int]] = {}  # right, judged, tokens
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        self._left = TimeLeft(clock)

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
            facts = TextColumn("{task.fields[facts]}")
            self._progress = Progress(*columns, facts, TimeRemainingColumn(), console=self._console)
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def cost(self, costs: Sequence[Cost]) -> None:
        for cost in costs:
            done = cost.wanted - cost.missing
            there = f"; {done} of them are there already" if done else ""
            paid = "" if cost.most_price is None else f", {money(cost.most_price)} at the prices given"
            self._line(
                f"{cost.name}: {cost.problems} problems x {cost.samples} samples, {cost.wanted} in this call{there}; "
                f"at most {cost.most_tokens:,} tokens to generate{paid}"
            )

    def note(self, text: str) -> None:
        self._line(f"note: {visible(text)}")

    def estimate(self, name: str, seconds: float, mean_tokens: float) -> None:
        self._line(f"{name}: about {duration(seconds)} for the rest ({mean_tokens:.0f} tokens a response in the pilot)")

    def sample(self, name: str, row: SampleRow) -> None:
        right, judged, tokens = self._counts.get(name, (0, 0, 0))
        self._counts[name] = (right + row.correct, judged + row.counted, tokens + row.tokens)

    def progress(self, name: str, done: int, total: int) -> None:
        seconds = self._clock() - self._began.setdefault(name, self._clock())
        right, judged, tokens = self._counts.get(name, (0, 0, 0))
        facts = f"{percent(right / judged)} right in this call" if judged else ""
        if judged and seconds > 0:
            facts += f", {tokens / seconds:,.0f} tokens/s"
        if self._progress is not None:
            if name not in self._bars:
                self._bars[name] = self._progress.add_task(name, total=total, facts="")
            self._progress.update(self._bars[name], completed=done, facts=facts)
        elif done == total or self._clock() - self._last_line >= SILENCE_SECONDS:
            left = self._left.words(name, done, total)
            self._line(f"{name}: {done} of {total} samples{', ' + facts if facts else ''}{left}")

    def _line(self, text: str) -> None:
        self._last_line = self._clock()
        console = self._progress.console if self._progress is not None else self._console
        say(console, text)


def say(console: Console, text: str, style: str = "") -> None:
    """A line as it is: no wrapping, no markup."""
    console.print(text, soft_wrap=True, highlight=False, markup=False, style=style)


def money(amount: float) -> str:
    """Four digits behind the point for small sums, two for others."""
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.4f}"
