"""The live display of a run: a panel that updates itself in a terminal, plain lines anywhere else."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from magicrl.records import StepMetrics
from magicrl.reporting.wording import duration, number, percent, visible

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
RECENT_STEPS = 10
"""Steps whose mean time foretells the rest."""
SILENCE_SECONDS = 10.0
"""Without a terminal, longest time without a line while work goes on."""
STYLES = {"info": "cyan", "warning": "yellow", "critical": "bold red"}


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
        self._title = title
        self._max_steps = max_steps
        self._stage_steps = tuple(stage_steps)
        self._interval = interval
        self._clock = clock
        self._began = clock()
        self._last_line = -float("inf")
        self._last_step_line = -float("inf")
        self._last_step_end: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._accuracy: list[float] = []
        self._validation: tuple[int, float] | None = None
        self._metrics: StepMetrics | None = None
        self._stage_began: dict[int, int] = {0: 1}
        self._phase: tuple[str, int, int] | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self.panel, refresh_per_second=4, vertical_overflow="ellipsis"
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phase = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, metrics: StepMetrics) -> None:
        """A training step is over."""
        now = self._clock()
        self._count_time(metrics, now)
        known = metrics.stage in self._stage_began
        self._stage_began.setdefault(metrics.stage, metrics.step)
        first = self._metrics is None or not known
        self._metrics = metrics
        self._phase = None
        accuracy, validation = _number(metrics, "train/accuracy/mean"), _number(metrics, "validation/accuracy/mean")
        if accuracy is not None:
            self._accuracy.append(accuracy)
        if validation is not None:
            self._validation = (metrics.step, validation)
        # measured from the last step's line: a progress line just before must not silence the step itself
        if self._live is None and (first or validation is not None or now - self._last_step_line >= self._interval):
            self._last_step_line = now
            self._line(Text(self.step_line()))

    def event(self, event: Mapping[str, object]) -> None:
        """Something rarer happened: a line of its own, above the panel."""
        kind = str(event.get("kind", "event"))
        if kind == "health":
            style = STYLES.get(str(event.get("severity")), "")
            rule = str(event.get("rule", "")).replace("_", " ")
            text = Text.assemble((f"{rule}: ", style), _clean(event.get("message")))
            if event.get("remedy"):
                text.append(f"\n  remedy: {_clean(event.get('remedy'))}", style="dim")
        else:
            text = Text.assemble((f"{_clean(kind).replace('_', ' ')}: ", "bold"), _clean(event.get("message")))
        step = event.get("step")
        self._line(Text(f"[step {step}] " if step is not None else "").append_text(text))

    def progress(self, phase: str, done: int, total: int) -> None:
        """Work inside a step or a test goes on."""
        self._phase = (phase, done, total)
        if self._live is None and self._clock() - self._last_line >= SILENCE_SECONDS:
            self._line(Text(f"{_clean(phase)}: {done} of {total}"))

    def _line(self, text: Text) -> None:
        self._last_line = self._clock()
        self._console.print(text, soft_wrap=True, highlight=False)

    def _count_time(self, metrics: StepMetrics, now: float) -> None:
        """Seconds from one step's end to the next, validation and checkpoints included."""
        measured = _number(metrics, "time/step")
        seconds = now - self._last_step_end if self._last_step_end is not None else measured
        if seconds is not None:
            self._step_seconds.append(seconds)
        self._last_step_end = now

    @property
    def most_steps_left(self) -> int | None:
        """Upper bound on the training steps to come; a stage may end early. None if no limit is known."""
        done = self._metrics
        if done is None:
            return sum(self._stage_steps) or self._max_steps
        if done.stage < len(self._stage_steps):
            inside = done.step - self._stage_began[done.stage] + 1
            return max(0, self._stage_steps[done.stage] - inside) + sum(self._stage_steps[done.stage + 1 :])
        return None if self._max_steps is None else max(0, self._max_steps - done.step)

    @property
    def time_left(self) -> str:
        """``at most 3 min 20 s``; empty before the first step, and where no limit is known."""
        left = self.most_steps_left
        if left is None or not self._step_seconds:
            return ""
        return f"at most {duration(left * sum(self._step_seconds) / len(self._step_seconds))}"

    def step_line(self) -> str:
        """The last step in one plain line."""
        metrics = self._metrics
        if metrics is None:
            return ""
        parts = [f"step {metrics.step}", f"stage {metrics.stage + 1}"]
        parts += [f"{label} {value}" for label, value in self._facts(metrics)]
        if self._validation is not None and self._validation[0] == metrics.step:
            parts.append(f"validation {self._validation[1]:.3f}")
        left = self.time_left
        return ", ".join([*parts, *([f"left {left}"] if left else [])])

    def _facts(self, metrics: StepMetrics) -> list[tuple[str, str]]:
        """Label and value of what the step measured."""
        shown: list[tuple[str, str]] = []
        accuracy, target = _number(metrics, "train/accuracy/mean"), _number(metrics, "entropy/target")
        entropy = _number(metrics, "entropy/exact/mean")
        entropy = _number(metrics, "entropy/sampled/mean") if entropy is None else entropy
        if accuracy is not None:
            shown.append(("accuracy", f"{accuracy:.3f}"))
        if entropy is not None:
            shown.append(("entropy", f"{entropy:.3f}" + (f" (target {target:g})" if target is not None else "")))
        for label, key in (("alpha", "entropy/alpha"), ("length", "length/mean")):
            value = _number(metrics, key)
            if value is not None:
                shown.append((label, number(value)))
        for label, key in (("truncated", "train/truncation/ratio"), ("rejected", "groups/rejected/ratio")):
            value = _number(metrics, key)
            if value is not None:
                shown.append((label, percent(value, 0)))
        speed = _number(metrics, "tokens/per_second")
        if speed is not None:
            shown.append(("tokens/s", f"{speed:,.0f}"))
        return shown

    def panel(self) -> RenderableType:
        """The panel as it stands now."""
        parts: list[RenderableType] = []
        if self._metrics is not None:
            facts = Table.grid(padding=(0, 3))
            measured = [fact for fact in self._facts(self._metrics) if fact[0] != "accuracy"]  # it has its own line
            cells = [Text.assemble((f"{label} ", "dim"), value) for label, value in measured]
            for i in range(0, len(cells), 3):
                facts.add_row(*cells[i : i + 3])
            parts += [self._curve(), facts]
        parts.append(self._times())
        if self._phase is not None:
            parts.append(_bar(*self._phase))
        return Panel(Group(*parts), title=Text(self._heading(), style="bold"), title_align="left", expand=False)

    def _heading(self) -> str:
        heading = _clean(self._title) or "magicrl"
        if self._metrics is None:
            return heading
        limit = _number(self._metrics, "stage/max_tokens")
        stage = f"stage {self._metrics.stage + 1}" + (f" (T = {limit:.0f})" if limit is not None else "")
        left = self.most_steps_left
        most = "" if left is None else f" of at most {self._metrics.step + left}"
        return f"{heading} · {stage} · step {self._metrics.step}{most}"

    def _curve(self) -> Text:
        curve = "" if self._console.options.ascii_only else sparkline(self._accuracy, SPARK_WIDTH)
        text = Text.assemble(("accuracy ", "dim"), (curve, "green"))
        if self._accuracy:
            text.append(f" {percent(self._accuracy[-1])}", style="bold")
        if self._validation is not None:
            text.append(f"   validation {percent(self._validation[1])} (step {self._validation[0]})")
        return text

    def _times(self) -> Text:
        words = f"elapsed {duration(self._clock() - self._began)}"
        if self._step_seconds:
            words += f" · {duration(sum(self._step_seconds) / len(self._step_seconds))} a step"
        left = self.time_left
        return Text(f"{words} · left {left}" if left else words, style="dim")


def sparkline(shares: Sequence[float], width: int) -> str:
    """The whole series of shares in [0, 1] in at most ``width`` characters: means of neighbours, fixed scale."""
    if not shares:
        return ""
    count = min(width, len(shares))
    edges = [i * len(shares) // count for i in range(count + 1)]
    bins = [shares[a:b] for a, b in itertools.pairwise(edges)]
    means = [sum(part) / len(part) for part in bins]
    return "".join(BLOCKS[min(len(BLOCKS) - 1, max(0, int(m * len(BLOCKS))))] for m in means)


def _bar(phase: str, done: int, total: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        Text(_clean(phase), style="dim"), ProgressBar(total=max(1, total), completed=done, width=24), f"{done}/{total}"
    )
    return grid


def _clean(value: object) -> str:
    """Foreign text without terminal control characters."""
    return visible("" if value is None else str(value))


def _number(metrics: StepMetrics, key: str) -> float | None:
    value = metrics.values.get(key)
    return float(value) if isinstance(value, (int, float)) and value == value else None
