"""The terminal's view of an evaluation: progress while it runs, then tables of scores and comparisons."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from magicrl.commands.tables import listing
from magicrl.evaluation.benchmarks import known_benchmarks
from magicrl.evaluation.presets import TABLE13_SETS
from magicrl.evaluation.samples import SampleRow
from magicrl.reporting.wording import number_text, percent, points, unjudged_note, visible
from magicrl_verifiers.progress import TimeLeft, duration, plural

if TYPE_CHECKING:
    from magicrl.evaluation.options import JobCost

SILENCE_SECONDS = 10.0  # without a terminal, seconds between lines


class EvalDisplay:
    """Display of an evaluation's progress: a bar in a terminal, plain lines elsewhere.

    Args:
        console: Output.
        clock: Returns seconds; for tests.
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

    def cost(self, costs: Sequence[JobCost]) -> None:
        for cost in costs:
            done = cost.wanted - cost.missing
            there = f"; {done} of them exist already" if done else ""
            paid = "" if cost.most_price is None else f", {money(cost.most_price)} at the prices given"
            self._line(
                f"{cost.name}: {plural(cost.problems, 'problem')} x {plural(cost.samples, 'sample')}, {cost.wanted} in "
                f"this call{there}; at most {cost.most_tokens:,} tokens to generate{paid}"
            )

    def note(self, text: str) -> None:
        self._line(f"note: {visible(text)}")

    def estimate(self, name: str, seconds: float, mean_tokens: float) -> None:
        self._line(
            f"{name}: about {duration(seconds)} for the rest ({mean_tokens:.0f} tokens per response in the pilot)"
        )

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


def show_results(path: Path, console: Console) -> None:
    """The table of scores, and Table 13 where a result is comparable with it."""
    document = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    columns = ("avg@k", "95 % interval", "pass@k", "maj@k", "tokens", "cut")
    table = _table("Scores in per cent; tokens of a response; share truncated", "benchmark", columns)
    notes: list[str] = []
    for name, result in document["benchmarks"].items():
        table.add_row(
            Text(name),
            f"@{result['samples']} {_cent(result['accuracy']['mean'])}",
            _interval(result["accuracy"]),
            _best(result["pass_at"]),
            _best(result["majority_at"]),
            number_text(result["length"]["mean"]),
            _cent(result["truncation"]["mean"]),
        )
        if "reward" in result:
            reward = result["reward"]
            known = f", 95 % interval {reward['low']:.3f} to {reward['high']:.3f}"
            notes.append(
                f"{name}: mean reward {reward['mean']:.3f}{known if reward['low'] < reward['high'] else ''}; "
                "avg@k and pass@k count responses whose score reaches the reward's right_from"
            )
        if result["not_judged"]:
            drawn = result["problems"] * result["samples"]
            notes.append(f"{name}: {unjudged_note(result['not_judged'], drawn, result['truncation']['mean'])}")
        whole = result["accuracy"]["problems"]
        for measure, by_k in (("pass", result["pass_at"]), ("maj", result["majority_at"])):
            k = max(by_k, key=int, default=None)
            if k is not None and (some := by_k[k]["problems"]) < whole:
                notes.append(f"{name}: {measure}@{k} is over the {some} of {whole} problems with {k} judged samples")
        if early := result["scaling"].get("truncated_early"):
            cause = "--max-turns" if "environments" in result["settings"] else "the engine"
            notes.append(f"{name}: {cause} truncated {early} responses before --max-tokens; they count as wrong")
        if name in TABLE13_SETS and result["table13"]["differs"]:
            notes.append(f"{name}: not comparable with Table 13: {'; '.join(result['table13']['differs'])}")
    for name, mean in document["means"].items():
        spread = f"standard error {percent(mean['standard_error'])}"
        differ = f"; they differ in {', '.join(mean['settings_differ'])}" if mean.get("settings_differ") else ""
        notes.append(f"mean of {', '.join(mean['sets'])} ({name}): {percent(mean['mean'])} ({spread}){differ}")
    console.print(table)
    for note in notes:
        say(console, note)
    _show_fresh(document["benchmarks"], console)
    if (table13 := document.get("table13")) is not None:
        columns = ("AIME24", "AIME25", "LiveCodeBench", "average")
        table = _table("Beside Table 13 (avg@32, avg@32, avg@4; per cent)", "model", columns)
        for row in table13["rows"]:
            figures = [row[name] for name in ("aime24", "aime25", "livecodebench", "average")]
            table.add_row(row["model"], *("–" if figure is None else f"{figure:.1f}" for figure in figures))
        console.print(table)
        say(console, table13["note"], style="dim")
    say(console, _used(document["usage"]))
    say(console, f"results: {path}")


def _show_fresh(benchmarks: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print samples with other limits next to the long samples truncated there."""
    columns = ("limit", "tokens", "anew", "95 % interval", "cut", "anew less cut")
    title = "Accuracy in per cent: samples drawn anew at a limit, and the long ones cut there"
    table = _table(title, "benchmark", columns)
    for name, result in benchmarks.items():
        for point in result["scaling"]["fresh"]:
            table.add_row(
                Text(name),
                str(point["limit"]),
                number_text(point["mean_tokens"]["mean"]),
                _cent(point["accuracy"]["mean"]),
                _interval(point["accuracy"]),
                "–" if point["cut"] is None else _cent(point["cut"]["mean"]),
                "–" if point["difference"] is None else _interval(point["difference"], points),
            )
    if table.row_count:
        console.print(table)


def _used(usage: Mapping[str, Any]) -> str:
    """One line on what all calls of the evaluation used."""
    asked = "an unknown number of" if usage["prompt_tokens"] is None else f"{usage['prompt_tokens']:,}"
    text = f"used: {asked} tokens in, {usage['response_tokens']:,} out; {duration(usage['seconds'])}, "
    text += f"{duration(usage['cpu_seconds'])} of CPU time"
    if usage["gpu_seconds"]:
        text += f", {duration(usage['gpu_seconds'])} of GPU time"
    if usage["samples_without_times"]:
        text += f" (times of {usage['samples_without_times']} samples are lost)"
    price = usage["price"]
    if price is not None:
        known = price["total"] is not None
        text += f"; {money(price['total'])} at the prices given" if known else "; the price is unknown"
    return text


def show_comparison(document: Mapping[str, Any], console: Console) -> None:
    """Differences with intervals and p-values; what is not comparable, with its reason."""
    columns = ("problems", "before", "after", "change", "95 % interval", "p", "+/-")
    table = _table("Accuracy in per cent, change in percentage points", "benchmark", columns)
    notes: list[str] = []
    for name, row in document["benchmarks"].items():
        if not row["comparable"]:
            notes.append(f"{name}: not comparable, {row['why']}")
            continue
        notes += [f"{name}: settings differ too ({line})" for line in row["settings_differ"]]
        table.add_row(
            Text(name),
            str(row["problems"]),
            _cent(row["before"]),
            _cent(row["after"]),
            points(row["difference"]["mean"]),
            _interval(row["difference"], points),
            "<0.001" if row["p_corrected"] < 0.001 else f"{row['p_corrected']:.3f}",
            f"{row['better']}/{row['worse']}",
        )
        thrift = row["efficiency"]
        if thrift["before"] is not None and thrift["after"] is not None:
            shares = f"before {percent(thrift['before'])}, after {percent(thrift['after'])}"
            notes.append(f"{name}: at {thrift['mean_tokens']:.0f} tokens a response on average: {shares}")
    if table.row_count:
        console.print(table)
    for note in [*notes, *(f"{name}: in one of the two only" for name in document["only_in_one"])]:
        say(console, visible(note))


def show_benchmarks(console: Console) -> None:
    """The catalogue."""
    rows = [(name, one.title, one.hub, one.licence) for name, one in known_benchmarks().items()]
    console.print(listing(("name", "what", "hub data set", "licence"), rows, console.width, least=80))


def _table(title: str, first: str, columns: Sequence[str]) -> Table:
    """A table that fits 80 columns: long names fold, numbers stay whole."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cent(share: float) -> str:
    return f"{100 * share:.1f}"


def _interval(estimate: Mapping[str, float], form: Callable[[float], str] = _cent) -> str:
    return f"{form(estimate['low'])} to {form(estimate['high'])}"


def _best(by_k: Mapping[str, Mapping[str, float]]) -> str:
    if not by_k:
        return "–"
    k = max(by_k, key=int)
    return f"@{k} {_cent(by_k[k]['mean'])}"
