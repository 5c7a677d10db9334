"""The progress display of a run in a terminal, for ``magicrl train`` and ``magicrl watch``.

It is a panel where the terminal can redraw it, and plain lines elsewhere. With a cluster it has a row per worker.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self, TypeAlias

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from magicrl.records import StepMetrics
from magicrl.reporting.wording import number_text, percent, print_prose, visible
from magicrl.training.diagnosis import ACCURACY, REWARD, Measure, measure_of
from magicrl_verifiers.progress import TimeLeft, duration, plural

MOST_REPLICAS, MOST_VERIFIERS = 4, 2  # rows: the slowest replicas and the busiest verifiers
COLUMN_GAP = 2
COLUMNS = ("tokens/s", "busy", "queue", "memory", "MFU", "per device")
"""Columns in order of importance: the last ones are dropped in a narrow terminal. ``queue`` is the current length and
the largest of the step, ``per device`` is tokens/s per device."""
_LOST = (("replicas", "replica"), ("learner", "learner rank"), ("verifiers", "verifier node"))


WorkerRow: TypeAlias = tuple[str, Mapping[str, str]]
"""Name of a worker, or of all workers of a kind, and its measured cells by column."""


def worker_rows(metrics: StepMetrics) -> tuple[list[WorkerRow], Text]:
    """Return the rows of a step and a note below them; empty where the run has no cluster."""
    replicas, verifiers = _workers(metrics, "replica", "tokens"), _workers(metrics, "verifier", "judged")
    if not replicas and not verifiers:
        return [], Text()
    slowest = sorted(replicas, key=lambda n: figure(metrics, f"{n}/tokens_per_second") or 0.0)[:MOST_REPLICAS]
    busiest = sorted(verifiers, key=lambda n: -(figure(metrics, f"{n}/busy_seconds") or 0.0))[:MOST_VERIFIERS]
    # learner and engine as a whole, which work during these parts of a step
    rows = [
        _worker(metrics, "learner", "speed/learner", "memory/learner", ("time/train", "time/other/old_logprobs")),
        _worker(metrics, "engine", "speed/engine", "memory/engine", ("time/rollout",)),
    ]
    for kind, shown in (("replica", slowest), ("verifier", busiest)):
        for index, key in sorted((int(key.rpartition("_")[2]), key) for key in shown):
            rows.append(_worker(metrics, f"{kind} {index}", key, key, (f"{key}/busy_seconds",)))
    left_out = [
        f"{len(shown)} {which} of {len(there)}"
        for shown, there, which in ((slowest, replicas, "slowest replicas"), (busiest, verifiers, "busiest verifiers"))
        if len(shown) < len(there)
    ]
    lost = [(int(figure(metrics, f"cluster/{key}/lost") or 0), name) for key, name in _LOST]
    losses = [plural(count, name) for count, name in lost if count]
    notes = [Text(", ".join(left_out), style="dim")] if left_out else []
    notes += [Text(f"lost: {', '.join(losses)}", style="yellow")] if losses else []
    return [row for row in rows if row[1]], Text("; ").join(notes)


def _workers(metrics: StepMetrics, kind: str, measured: str) -> list[str]:
    """Return the keys of the workers of a kind: ``cluster/replica_0``, ..."""
    pattern = re.compile(rf"(cluster/{kind}_\d+)/{measured}")
    return [match[1] for match in map(pattern.fullmatch, metrics.values) if match]


def _worker(metrics: StepMetrics, name: str, speed: str, memory_key: str, busy: Sequence[str]) -> WorkerRow:
    """Return a row with the metrics under these keys. ``busy`` has the metrics of the seconds of work."""
    found = {key: figure(metrics, f"{speed}/{key}") for key in ("tokens_per_second", "mfu", "queue", "queue_max")}
    each, peak = figure(metrics, f"{speed}/tokens_per_second_per_device"), figure(metrics, f"{memory_key}/peak_mb")
    step, seconds = figure(metrics, "time/step"), [s for part in busy if (s := figure(metrics, part)) is not None]
    cells: dict[str, str] = {}
    for column, value in (("tokens/s", found["tokens_per_second"]), ("per device", each)):
        if value is not None:
            cells[column] = f"{value:,.0f}"
    if step and seconds:
        cells["busy"] = percent(min(1.0, sum(seconds) / step), 0)
    if peak:
        cells["memory"] = memory_text(peak)
    if found["mfu"] is not None:
        cells["MFU"] = percent(found["mfu"], 0)
    if found["queue"] is not None:
        most = found["queue_max"]
        cells["queue"] = f"{found['queue']:.0f}" + ("" if most is None else f" ({most:.0f})")
    return name, cells


def worker_table(rows: Sequence[WorkerRow], width: int) -> Table:
    """Return a table of the rows with as many columns as fit into ``width`` characters."""
    columns = [column for column in COLUMNS if any(column in cells for _, cells in rows)]
    wide = {column: max(len(column), *(len(cells.get(column, "")) for _, cells in rows)) for column in columns}
    longest = max(len(name) for name, _ in rows)
    while len(columns) > 1 and longest + sum(COLUMN_GAP + wide[column] for column in columns) > width:
        columns.pop()
    table = Table.grid(padding=(0, COLUMN_GAP))
    table.add_column(no_wrap=True)
    for _ in columns:
        table.add_column(justify="right", no_wrap=True)
    table.add_row("", *(Text(column, style="dim") for column in columns))
    for name, cells in rows:
        table.add_row(Text(name, style="dim"), *(cells.get(column, "") for column in columns))
    return table


def memory_text(mebibytes: float) -> str:
    """Write ``1536.0`` as ``1.5 GiB``, and less than one GiB in whole MiB."""
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1024 else f"{mebibytes:.0f} MiB"


BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
BAR_WIDTH = 24
FRAME = 4  # columns of a panel's border and padding
GAP = 3
RECENT_STEPS = 10  # steps whose mean time predicts the rest
STYLES = {"info": "cyan", "warning": "yellow", "critical": "bold red"}


class RunPanel:
    """The state of the display, and a panel that adapts to the width of the terminal.

    Args:
        title: the run's name.
        max_steps: maximum number of training steps of the run; None where there is no such limit.
        stage_steps: maximum number of steps of each stage. Improves the time left after a stage that ended early.
        elapsed: returns the seconds since the run began; called whenever the panel is drawn.
    """

    def __init__(
        self,
        *,
        title: str,
        max_steps: int | None,
        stage_steps: Sequence[int],
        elapsed: Callable[[], float | None],
    ) -> None:
        self.phase: tuple[str, int, int, str] | None = None
        self.metrics: StepMetrics | None = None
        self._title = _clean(title) or "magicrl"
        self._max_steps = max_steps
        self._stage_steps = tuple(stage_steps)
        self._elapsed = elapsed
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._measure = ACCURACY
        self._scores: dict[str, list[float]] = {ACCURACY.key: [], REWARD.key: []}
        self._validation: tuple[int, str] | None = None
        self._stage_began: dict[int, int] = {0: 1}

    def step(self, metrics: StepMetrics, seconds: float | None) -> bool:
        """Record a step that took ``seconds``. Return True for the first step and the first step of a stage."""
        first = self.metrics is None or metrics.stage not in self._stage_began
        # a resumed run shows no first step of its stage, and earlier stages had at most these steps
        latest = sum(self._stage_steps[: metrics.stage]) + 1
        self._stage_began.setdefault(metrics.stage, min(metrics.step, latest))
        self.metrics = metrics
        self.phase = None
        if seconds is not None:
            self._step_seconds.append(seconds)
        if self._measure is ACCURACY:  # rewards may be graded although accuracy and reward agreed so far
            self._measure = measure_of([metrics])
        for key, scores in self._scores.items():
            scores += [value] if (value := figure(metrics, f"train/{key}/mean")) is not None else []
        validated = measure_of(rewards=[metrics.values.get("validation/reward/mean")])
        validation = figure(metrics, f"validation/{validated.key}/mean")
        if validation is not None:
            self._validation = (metrics.step, validated.value(validation))
        return first

    @property
    def most_steps_left(self) -> int | None:
        """Upper bound on the remaining training steps, since a stage may end early; None if no limit is known."""
        done = self.metrics
        if done is None:
            return sum(self._stage_steps) or self._max_steps
        if done.stage < len(self._stage_steps):
            inside = done.step - self._stage_began[done.stage] + 1
            return max(0, self._stage_steps[done.stage] - inside) + sum(self._stage_steps[done.stage + 1 :])
        return None if self._max_steps is None else max(0, self._max_steps - done.step)

    @property
    def time_left(self) -> str:
        """Text such as ``at most 3 min 20 s``; empty before the first and after the last step and without a limit."""
        left = self.most_steps_left
        if not left or not self._step_seconds:
            return ""
        return f"at most {duration(left * sum(self._step_seconds) / len(self._step_seconds))}"

    def step_line(self) -> str:
        """Return the last step in one plain line."""
        metrics = self.metrics
        if metrics is None:
            return ""
        parts = [f"step {metrics.step}", f"stage {metrics.stage + 1}"]
        parts += [f"{label} {value}" for label, value in facts(metrics, self._measure)]
        if self._validation is not None and self._validation[0] == metrics.step:
            parts.append(f"validation {self._validation[1]}")
        left = self.time_left
        return ", ".join([*parts, *([f"left {left}"] if left else [])])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width - FRAME)
        parts: list[RenderableType] = []
        if self.metrics is not None:
            parts.append(self._curve(width, plain=options.ascii_only))
            rows, note = worker_rows(self.metrics)
            elsewhere = {self._measure.name, *(["memory"] if rows else [])}  # in another line or column
            measured = [fact for fact in facts(self.metrics, self._measure) if fact[0] not in elsewhere]
            cells = [Text.assemble((f"{label} ", "dim"), value) for label, value in measured]
            for columns in (3, 2):
                widest = [max((len(c) for c in cells[i::columns]), default=0) for i in range(columns)]
                if sum(widest) + GAP * (columns - 1) <= width:
                    break
            else:
                columns = 1
            grid = Table.grid(padding=(0, GAP))
            for i in range(0, len(cells), columns):
                grid.add_row(*cells[i : i + columns])
            parts.append(grid)
            parts += [worker_table(rows, width)] if rows else []
            parts += [note] if note else []
        elapsed, left = self._elapsed(), self.time_left
        words = [] if elapsed is None else [f"elapsed {duration(elapsed)}"]
        if self._step_seconds:
            words.append(f"{duration(sum(self._step_seconds) / len(self._step_seconds))} per step")
        parts.append(Text(" · ".join([*words, *([f"left {left}"] if left else [])]), style="dim"))
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
        room = width - 2  # without the border's columns next to a title
        return next((heading for heading in headings if len(heading) <= room), short)

    def _curve(self, width: int, *, plain: bool) -> Text:
        measure, scores = self._measure, self._scores[self._measure.key]
        text = Text.assemble((f"{measure.name} ", "dim"))
        last = f" {measure.value(scores[-1])}" if scores else ""
        room = min(SPARK_WIDTH, width - len(text) - len(last))
        if not plain and room >= len(BLOCKS):
            low = min(0.0, *scores) if measure is REWARD else 0.0
            shares = [(score - low) / measure.span([low], scores) for score in scores]
            text.append(sparkline(shares, room), style="green")
        text.append(last, style="bold")
        if self._validation is not None:
            words = f"validation {self._validation[1]} (step {self._validation[0]})"
            text.append(f"   {words}" if len(text) + GAP + len(words) <= width else f"\n{words}")
        return text


def facts(metrics: StepMetrics, measure: Measure) -> list[tuple[str, str]]:
    """Return label and text of the metrics that a step has."""
    found: dict[str, float | None] = {key: figure(metrics, key) for key in metrics.values}
    target = found.get("entropy/target")
    found["entropy"] = found.get("entropy/exact/mean")
    if found["entropy"] is None:
        found["entropy"] = found.get("entropy/sampled/mean")
    if not found.get("learner/clip_ratio") and (found.get("learner/sgd_steps") or 0) <= 1:
        found["learner/clip_ratio"] = None  # a single on-policy update has ratio 1 and nothing to clip
    peaks = [found.get(f"memory/{who}/peak_mb") or 0.0 for who in ("learner", "engine")]
    found["memory"] = max(peaks) or None
    shown: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        (measure.name, f"train/{measure.key}/mean", measure.value),
        ("entropy", "entropy", lambda e: f"{e:.3f}" + (f" (target {target:g})" if target is not None else "")),
        ("alpha", "entropy/alpha", number_text),
        ("length", "length/mean", number_text),
        ("staleness", "staleness/mean", number_text),
        ("truncated", "train/truncation/ratio", lambda share: percent(share, 0)),
        ("rejected", "groups/rejected/ratio", lambda share: percent(share, 0)),
        ("clipped", "learner/clip_ratio", percent),
        ("tokens/s", "tokens/per_second", lambda speed: f"{speed:,.0f}"),
        ("memory", "memory", memory_text),
    )
    return [(label, form(value)) for label, key, form in shown if (value := found.get(key)) is not None]


def event_text(event: Mapping[str, object]) -> Text:
    """Return the text of a line of ``events.jsonl``, with the remedy below a finding."""
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


def sparkline(shares: Sequence[float], width: int) -> str:
    """Return shares in [0, 1] as at most ``width`` block characters: means of neighbours on a fixed scale."""
    if not shares:
        return ""
    count = min(width, len(shares))
    edges = [i * len(shares) // count for i in range(count + 1)]
    bins = [shares[a:b] for a, b in itertools.pairwise(edges)]
    means = [sum(part) / len(part) for part in bins]
    return "".join(BLOCKS[min(len(BLOCKS) - 1, max(0, int(m * len(BLOCKS))))] for m in means)


def figure(metrics: StepMetrics, key: str) -> float | None:
    """Return a finite or infinite number of a step, None where it has none."""
    value = metrics.values.get(key)
    return float(value) if isinstance(value, (int, float)) and value == value else None


def _bar(phase: str, done: int, total: int, left: str, width: int) -> RenderableType:
    label, count = _clean(phase), f"{done}/{total}"
    count += left if len(label) + len(count) + len(left) < width else ""
    room = width - len(label) - len(count) - 2
    grid = Table.grid(padding=(0, 1))
    if room >= len(BLOCKS):
        bar = ProgressBar(total=max(1, total), completed=done, width=min(BAR_WIDTH, room))
        grid.add_row(Text(label, style="dim"), bar, count)
    else:
        grid.add_row(Text(label, style="dim"), count)
    return grid


def _clean(value: object) -> str:
    """Return foreign text without terminal control characters."""
    return visible("" if value is None else str(value))


SILENCE_SECONDS = 10.0  # without a terminal, maximum time without a line during work


class LiveDisplay:
    """A ``RunObserver`` that displays progress in a terminal.

    Use it as a context manager. It may also be updated outside. It stores only one or two numbers per step.

    Args:
        console: output. Default: standard output.
        title: the run's name.
        max_steps: maximum number of training steps of the run; None where there is no such limit.
        stage_steps: maximum number of steps of each stage. Improves the time left after a stage that ended early.
        interval: without a terminal, seconds between lines. The first line of a stage is always shown.
        clock: returns seconds; for tests.
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
        self._console = console or Console(emoji=False)
        self._interval = interval
        self._clock = clock
        self._began = clock()
        self._last_line = -float("inf")
        self._last_step_line = -float("inf")
        self._last_step_end: float | None = None
        self._live: Live | None = None
        self._left = TimeLeft(clock)
        self.panel = RunPanel(
            title=title, max_steps=max_steps, stage_steps=stage_steps, elapsed=lambda: clock() - self._began
        )

    def __enter__(self) -> Self:
        self._live = start_panel(self._console, lambda: self.panel)
        return self

    def __exit__(self, *error: object) -> None:
        self.panel.phase = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, metrics: StepMetrics) -> None:
        """Show a finished training step."""
        now = self._clock()
        # from one step's end to the next, validation and checkpoints included
        seconds = now - self._last_step_end if self._last_step_end is not None else figure(metrics, "time/step")
        self._last_step_end = now
        first = self.panel.step(metrics, seconds)
        validated = figure(metrics, "validation/accuracy/mean") is not None
        # measured from the last line of a step, so that a progress line just before does not suppress the step
        if self._live is None and (first or validated or now - self._last_step_line >= self._interval):
            self._last_step_line = now
            self._line(Text(self.panel.step_line()))

    def event(self, event: Mapping[str, object]) -> None:
        """Print an event as a line above the panel."""
        self._line(event_text(event))

    def progress(self, phase: str, done: int, total: int) -> None:
        """Show the progress of work inside a step or an evaluation."""
        left = self._left.words(phase, done, total)
        self.panel.phase = (phase, done, total, left)
        if self._live is None and self._clock() - self._last_line >= SILENCE_SECONDS:
            self._line(Text(f"{_clean(phase)}: {done} of {total}{left}"))

    def _line(self, text: Text) -> None:
        self._last_line = self._clock()
        print_prose(self._console, text)


def start_panel(console: Console, panel: Callable[[], RunPanel]) -> Live | None:
    """Draw the panel four times per second; None where nothing can be redrawn (a file, a pipe, a dumb terminal)."""
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    live = Live(console=console, get_renderable=panel, refresh_per_second=4, vertical_overflow="ellipsis")
    live.start()
    return live
