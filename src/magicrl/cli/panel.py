"""The picture of a run in a terminal: of its own for ``magicrl train``, of another's for ``magicrl watch``."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from magicrl.cli.worker_table import memory, worker_rows, worker_table
from magicrl.records import StepMetrics
from magicrl.reporting.wording import duration, number, percent, visible

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
BAR_WIDTH = 24
FRAME = 4
"""Columns of a panel's border and padding."""
GAP = 3
RECENT_STEPS = 10
"""Steps whose mean time foretells the rest."""
STYLES = {"info": "cyan", "warning": "yellow", "critical": "bold red"}


class RunPanel:
    """Everything that is shown of a run, and the panel, which fits the width it is drawn at.

    Args:
        title: the run's name.
        max_steps: most training steps of the whole run; None where that makes no sense.
        stage_steps: most steps of each stage: makes the time left tighter after a stage that ended early.
        elapsed: seconds since the run began, asked for each time the panel is drawn.
    """

    def __init__(
        self,
        *,
        title: str,
        max_steps: int | None,
        stage_steps: Sequence[int],
        elapsed: Callable[[], float | None],
    ) -> None:
        self.phase: tuple[str, int, int] | None = None
        self.metrics: StepMetrics | None = None
        self._title = _clean(title) or "magicrl"
        self._max_steps = max_steps
        self._stage_steps = tuple(stage_steps)
        self._elapsed = elapsed
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._accuracy: list[float] = []
        self._validation: tuple[int, float] | None = None
        self._stage_began: dict[int, int] = {0: 1}

    def step(self, metrics: StepMetrics, seconds: float | None) -> bool:
        """Take in a step that took ``seconds``; True if it is the first shown, or the first of its stage."""
        first = self.metrics is None or metrics.stage not in self._stage_began
        self._stage_began.setdefault(metrics.stage, metrics.step)
        self.metrics = metrics
        self.phase = None
        if seconds is not None:
            self._step_seconds.append(seconds)
        accuracy, validation = figure(metrics, "train/accuracy/mean"), figure(metrics, "validation/accuracy/mean")
        if accuracy is not None:
            self._accuracy.append(accuracy)
        if validation is not None:
            self._validation = (metrics.step, validation)
        return first

    @property
    def most_steps_left(self) -> int | None:
        """Upper bound on the training steps to come; a stage may end early. None if no limit is known."""
        done = self.metrics
        if done is None:
            return sum(self._stage_steps) or self._max_steps
        if done.stage < len(self._stage_steps):
            inside = done.step - self._stage_began[done.stage] + 1
            return max(0, self._stage_steps[done.stage] - inside) + sum(self._stage_steps[done.stage + 1 :])
        return None if self._max_steps is None else max(0, self._max_steps - done.step)

    @property
    def time_left(self) -> str:
        """``at most 3 min 20 s``; empty before the first step, after the last, and where no limit is known."""
        left = self.most_steps_left
        if not left or not self._step_seconds:
            return ""
        return f"at most {duration(left * sum(self._step_seconds) / len(self._step_seconds))}"

    def step_line(self) -> str:
        """The last step in one plain line."""
        metrics = self.metrics
        if metrics is None:
            return ""
        parts = [f"step {metrics.step}", f"stage {metrics.stage + 1}"]
        parts += [f"{label} {value}" for label, value in facts(metrics)]
        if self._validation is not None and self._validation[0] == metrics.step:
            parts.append(f"validation {percent(self._validation[1])}")
        left = self.time_left
        return ", ".join([*parts, *([f"left {left}"] if left else [])])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width - FRAME)
        parts: list[RenderableType] = []
        if self.metrics is not None:
            parts.append(self._curve(width, plain=options.ascii_only))
            rows, note = worker_rows(self.metrics)
            elsewhere = {"accuracy", "memory"} if rows else {"accuracy"}  # in a line or a column of its own
            measured = [fact for fact in facts(self.metrics) if fact[0] not in elsewhere]
            parts.append(_grid([Text.assemble((f"{label} ", "dim"), value) for label, value in measured], width))
            parts += [worker_table(rows, width)] if rows else []
            parts += [note] if note else []
        parts.append(self._times())
        if self.phase is not None:
            parts.append(_bar(*self.phase, width))
        title = Text(self._heading(width), style="bold")
        yield Panel(Group(*parts), title=title, title_align="left", expand=False)

    def _heading(self, width: int) -> str:
        if self.metrics is None:
            return self._title
        limit = figure(self.metrics, "stage/max_tokens")
        stage = f"stage {self.metrics.stage + 1}" + (f" (T = {limit:.0f})" if limit is not None else "")
        left = self.most_steps_left
        most = "" if left is None else f" of at most {self.metrics.step + left}"
        step = f"step {self.metrics.step}{most}"
        short = step if left is None else f"{self.metrics.step}/{self.metrics.step + left}"
        headings = (f"{self._title} · {stage} · {step}", f"{stage} · {step}", step, short)
        room = width - 2  # the border's own columns beside a title
        return next((heading for heading in headings if len(heading) <= room), short)

    def _curve(self, width: int, *, plain: bool) -> Text:
        text = Text.assemble(("accuracy ", "dim"))
        last = f" {percent(self._accuracy[-1])}" if self._accuracy else ""
        room = min(SPARK_WIDTH, width - len(text) - len(last))
        if not plain and room >= len(BLOCKS):
            text.append(sparkline(self._accuracy, room), style="green")
        text.append(last, style="bold")
        if self._validation is not None:
            words = f"validation {percent(self._validation[1])} (step {self._validation[0]})"
            text.append(f"   {words}" if len(text) + GAP + len(words) <= width else f"\n{words}")
        return text

    def _times(self) -> Text:
        elapsed = self._elapsed()
        words = [] if elapsed is None else [f"elapsed {duration(elapsed)}"]
        if self._step_seconds:
            words.append(f"{duration(sum(self._step_seconds) / len(self._step_seconds))} a step")
        left = self.time_left
        return Text(" · ".join([*words, *([f"left {left}"] if left else [])]), style="dim")


def facts(metrics: StepMetrics) -> list[tuple[str, str]]:
    """Label and value of what a step measured; what it did not measure is left out."""
    shown: list[tuple[str, str]] = []
    accuracy, target = figure(metrics, "train/accuracy/mean"), figure(metrics, "entropy/target")
    entropy = figure(metrics, "entropy/exact/mean")
    entropy = figure(metrics, "entropy/sampled/mean") if entropy is None else entropy
    if accuracy is not None:
        shown.append(("accuracy", percent(accuracy)))
    if entropy is not None:
        shown.append(("entropy", f"{entropy:.3f}" + (f" (target {target:g})" if target is not None else "")))
    for label, key in (("alpha", "entropy/alpha"), ("length", "length/mean"), ("staleness", "staleness/mean")):
        value = figure(metrics, key)
        if value is not None:
            shown.append((label, number(value)))
    for label, key in (("truncated", "train/truncation/ratio"), ("rejected", "groups/rejected/ratio")):
        value = figure(metrics, key)
        if value is not None:
            shown.append((label, percent(value, 0)))
    clipped = figure(metrics, "learner/clip_ratio")
    if clipped is not None and (clipped > 0 or (figure(metrics, "learner/sgd_steps") or 0) > 1):
        shown.append(("clipped", percent(clipped)))  # a single on-policy update has ratio 1 and nothing to clip
    speed = figure(metrics, "tokens/per_second")
    if speed is not None:
        shown.append(("tokens/s", f"{speed:,.0f}"))
    peaks = [figure(metrics, f"memory/{who}/peak_mb") or 0.0 for who in ("learner", "engine")]
    if max(peaks):
        shown.append(("memory", memory(max(peaks))))
    return shown


def event_text(event: Mapping[str, object]) -> Text:
    """A line of ``events.jsonl`` in words, a finding with its remedy below."""
    kind = str(event.get("kind", "event"))
    if kind == "health":
        style = STYLES.get(str(event.get("severity")), "")
        rule = _clean(event.get("rule")).replace("_", " ")
        text = Text.assemble((f"{rule}: ", style), _clean(event.get("message")))
        if event.get("remedy"):
            text.append(f"\n  remedy: {_clean(event.get('remedy'))}", style="dim")
    else:
        text = Text.assemble((f"{_clean(kind).replace('_', ' ')}: ", "bold"), _clean(event.get("message")))
    step = event.get("step")
    return Text(f"[step {step}] " if isinstance(step, int) else "").append_text(text)


def progress_text(phase: str, done: int, total: int) -> Text:
    """``rollout: 4 of 16``."""
    return Text(f"{_clean(phase)}: {done} of {total}")


def sparkline(shares: Sequence[float], width: int) -> str:
    """The whole series of shares in [0, 1] in at most ``width`` characters: means of neighbours, fixed scale."""
    if not shares:
        return ""
    count = min(width, len(shares))
    edges = [i * len(shares) // count for i in range(count + 1)]
    bins = [shares[a:b] for a, b in itertools.pairwise(edges)]
    means = [sum(part) / len(part) for part in bins]
    return "".join(BLOCKS[min(len(BLOCKS) - 1, max(0, int(m * len(BLOCKS))))] for m in means)


def figure(metrics: StepMetrics, key: str) -> float | None:
    """A finite or infinite number of a step; None where it has none."""
    value = metrics.values.get(key)
    return float(value) if isinstance(value, (int, float)) and value == value else None


def _grid(cells: Sequence[Text], width: int) -> RenderableType:
    """The cells in as many columns, up to three, as fit without breaking a cell."""
    for columns in (3, 2):
        widest = [max((len(c) for c in cells[i::columns]), default=0) for i in range(columns)]
        if sum(widest) + GAP * (columns - 1) <= width:
            break
    else:
        columns = 1
    grid = Table.grid(padding=(0, GAP))
    for i in range(0, len(cells), columns):
        grid.add_row(*cells[i : i + columns])
    return grid


def _bar(phase: str, done: int, total: int, width: int) -> RenderableType:
    label, count = _clean(phase), f"{done}/{total}"
    room = width - len(label) - len(count) - 2
    grid = Table.grid(padding=(0, 1))
    if room >= len(BLOCKS):
        bar = ProgressBar(total=max(1, total), completed=done, width=min(BAR_WIDTH, room))
        grid.add_row(Text(label, style="dim"), bar, count)
    else:
        grid.add_row(Text(label, style="dim"), count)
    return grid


def _clean(value: object) -> str:
    """Foreign text without terminal control characters."""
    return visible("" if value is None else str(value))
