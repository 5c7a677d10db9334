"""The last words of a run in the terminal: before against after, and where everything is."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from magicrl.reporting.comparison import Comparison, ScorePair, comparisons
from magicrl.reporting.run_folder import Interval, RecordedRun, TemperatureScore
from magicrl.reporting.wording import duration, number, percent, points, temperature, visible


def summary(run: RecordedRun) -> RenderableType:
    """A table a test set, the rise in words, cost, and the paths of what was made."""
    parts: list[RenderableType] = []
    for comparison in comparisons(run):
        parts += [score_table(comparison), *rise_lines(comparison), cost_table(comparison)]
    parts += verdict_lines(run)
    parts.append(Text(f"{len(run.metrics)} training steps in {duration(training_seconds(run))} ({run.status})"))
    for label, name in (("model", "model"), ("report", "report.html"), ("metrics", "metrics.jsonl")):
        path = run.path / name
        if path.exists():
            parts.append(Text(f"{label:8}{path}"))
    return Group(*parts)


def verdict_lines(run: RecordedRun) -> list[Text]:
    """Did it learn, why, and what helps."""
    learning = run.learning
    if learning is None:
        return []
    style = "bold green" if learning.outcome == "learned" else "bold red" if learning.failed else "bold yellow"
    first = Text.assemble(
        ("Did it learn? ", "bold"), (visible(learning.title), style), f": {visible(learning.reason)}."
    )
    return [first, *(Text(f"  remedy: {visible(sentence)}", style="dim") for sentence in learning.advice)]


def training_seconds(run: RecordedRun) -> float | None:
    """Wall clock of the training steps together, over every resumption; None where no step recorded it."""
    steps = run.points("time/step")
    return sum(seconds for _, seconds in steps) if steps else None


def score_table(comparison: Comparison) -> Table:
    """Accuracy by temperature with 95 % intervals, the rise in points, and pass@k."""
    table = Table(
        title=f"Test set: {visible(comparison.set_name)} (accuracy in %, with 95 % intervals)",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.add_column("temperature", no_wrap=True)
    for name in ("before", "after", "rise in points"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in comparison.pairs:
        table.add_row(
            temperature(pair.temperature),
            interval_words(None if pair.before is None else pair.before.accuracy),
            interval_words(None if pair.after is None else pair.after.accuracy),
            Text(change_words(pair.rise), style="green" if pair.rise is not None and pair.rise.low > 0 else ""),
        )
    _add_pass_rows(table, comparison)
    return table


def cost_table(comparison: Comparison) -> Table:
    """Entropy, length and truncation by temperature, before and after."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("temperature", no_wrap=True)
    for name in ("entropy", "mean length", "truncated"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in comparison.pairs:
        cells = [_arrow(pair, field) for field in ("entropy", "length_mean", "truncation")]
        table.add_row(temperature(pair.temperature), *cells)
    return table


def rise_lines(comparison: Comparison) -> list[Text]:
    """The rise over the start's best temperature, in words."""
    at = comparison.training_temperature
    rise = None if at is None else comparison.rise_over_best(at)
    if rise is None:
        return []
    return [
        Text(
            f"At temperature {temperature(rise.after_temperature)}: {percent(rise.after.mean)}, "
            f"{change_words(rise.change)} points against the start's best temperature "
            f"({temperature(rise.before_temperature)}: {percent(rise.before.mean)})",
            style="bold green" if rise.clear else "bold",
        )
    ]


def interval_words(interval: Interval | None) -> str:
    """``45.7 (43.1–48.3)``, in per cent."""
    if interval is None:
        return "–"
    return f"{100 * interval.mean:.1f} ({100 * interval.low:.1f}–{100 * interval.high:.1f})"


def change_words(change: Interval | None) -> str:
    """``+45.1 (+41.9 to +48.0)``, in percentage points."""
    if change is None:
        return "–"
    return f"{points(change.mean)} ({points(change.low)} to {points(change.high)})"


def _add_pass_rows(table: Table, comparison: Comparison) -> None:
    before, after = comparison.pass_at("before"), comparison.pass_at("after")
    for k in sorted({*before, *after}):
        old, new = before.get(k), after.get(k)
        at = (old or new or (0.0,))[0]
        table.add_row(
            f"pass@{k}, {at:g}",
            interval_words(old[1] if old else None),
            interval_words(new[1] if new else None),
            "",
        )


def _arrow(pair: ScorePair, field: str) -> str:
    """``0.61 → 0.18``."""

    def word(score: TemperatureScore | None) -> str:
        value: float | None = None if score is None else getattr(score, field)
        return percent(value) if field == "truncation" else number(value)

    return f"{word(pair.before)} → {word(pair.after)}"
