"""Test scores of runs before and after training: of one run (page and terminal), and of the variants of a comparison.

Two kinds of chance affect a difference between variants: which problems are in the test set, and how training went.
The intervals of ``variant_scores`` are over problems (clustered as in ``evaluation.statistics``), given the trained
models. The effect of the seed shows in the smallest and the largest difference of the variant's single runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from magicrl.config.loader import leaves
from magicrl.config.verifier_schema import JUDGE_ACCESS
from magicrl.evaluation.samples import differences
from magicrl.evaluation.statistics import Interval, mean_of, paired_difference, paired_scores, share
from magicrl.reporting.charts import IntervalRow, intervals_view
from magicrl.reporting.read_folders import RecordedRun, TemperatureScore
from magicrl.reporting.variants import Variant
from magicrl.reporting.wording import number_text, percent, temperature_text, visible
from magicrl.training.diagnosis import ACCURACY, REWARD, Measure, measure_of
from magicrl_verifiers.progress import duration, plural


class ScorePair(NamedTuple):
    """The scores before and after training at one temperature, where they were measured."""

    temperature: float
    before: TemperatureScore | None
    after: TemperatureScore | None
    measure: Measure

    @property
    def scores(self) -> tuple[Interval | None, Interval | None]:
        """The score before and after. Where all episodes were truncated there are no rewards, only an accuracy."""
        sides = (self.before, self.after)
        old, new = (None if side is None else side.score(self.measure) or side.accuracy for side in sides)
        return old, new

    @property
    def rise(self) -> Interval | None:
        """After minus before at this temperature."""
        return None if self.before is None or self.after is None else rise(self.before, self.after, self.measure)


class Comparison:
    """A test set of a run before and after training. Either may be missing while the run is in progress."""

    def __init__(self, run: RecordedRun, set_name: str) -> None:
        self.set_name = set_name
        self.before, self.after = (run.evaluation(name, set_name) for name in ("before", "after"))
        old, new = ({} if side is None else side.temperatures for side in (self.before, self.after))
        self.measure = measure_of(rewards=[score.reward for side in (old, new) for score in side.values()])
        """The measure of the scores: accuracy or mean reward."""
        self.pairs = tuple(ScorePair(t, old.get(t), new.get(t), self.measure) for t in sorted({*old, *new}))
        """One pair per temperature, ascending."""
        tested = self.after or self.before
        self.training_temperature = None if tested is None else run.training_temperature(tested)

    @property
    def initial_best(self) -> tuple[float, Interval] | None:
        """The temperature with the best score before training, and that score.

        It is selected as the highest one, so a rise over it is underestimated if anything.
        """
        found = [(p.temperature, score) for p in self.pairs if (score := p.scores[0]) is not None]
        return max(found, key=lambda item: item[1].mean, default=None)

    def rise_over_best(self) -> tuple[ScorePair, tuple[float, Interval], Interval, Interval] | None:
        """Return the pair at the temperature of training, ``initial_best``, the pair's score after training, and its
        rise over ``initial_best``.
        """
        best, sides = self.initial_best, {pair.temperature: pair for pair in self.pairs}
        at = None if self.training_temperature is None else sides.get(self.training_temperature)
        if best is None or at is None or at.scores[1] is None:
            return None
        change = at._replace(before=sides[best[0]].before).rise
        return None if change is None else (at, best, at.scores[1], change)

    @property
    def passes(self) -> list[tuple[int, float, Interval | None, Interval | None]]:
        """(k, temperature, pass@k before, after) by k. The temperature is the highest that has pass@k, of ``before``
        where both do."""
        sides: list[dict[int, tuple[float, Interval]]] = []
        for evaluation in (self.before, self.after):
            scores = sorted((evaluation.temperatures if evaluation else {}).items())
            sides.append({k: (t, value) for t, score in scores for k, value in score.pass_at.items()})
        found: list[tuple[int, float, Interval | None, Interval | None]] = []
        for k in sorted({*sides[0], *sides[1]}):
            old, new = (side.get(k) for side in sides)
            found.append((k, (old or new or (0.0,))[0], old[1] if old else None, new[1] if new else None))
        return found


def rise(before: TemperatureScore, after: TemperatureScore, measure: Measure = ACCURACY) -> Interval | None:
    """Return ``after - before`` with a 95 % interval, paired by problem.

    None where fewer than two problems were judged in both.
    """
    old, new = (side.by_problem(measure) or side.per_problem for side in (before, after))
    return paired_scores(new, old, after.clusters or None, span=measure.span(old, new))


def comparisons(run: RecordedRun) -> tuple[Comparison, ...]:
    """Return one comparison per test set, in the order of ``run.sets``."""
    return tuple(Comparison(run, name) for name in run.sets)


def run_verdict(run: RecordedRun) -> dict[str, Any] | None:
    """Return the data of the verdict's template; None for a run that has not ended."""
    learning = run.learning
    if learning is None:
        return None
    facts = learning.facts
    inputs = [f"{facts.get('updates', 0)} SGD updates in {facts.get('steps', 0)} training steps"]
    if (changed := facts.get("weights_changed")) is not None:
        inputs.append("the weights changed" if changed else "no weight changed")
    answers = facts.get("answers") or {}
    if answers:
        inputs.append(f"{percent(answers['mixed'])} of the groups had different rewards")
    if facts.get("largest_gradient") == 0:
        inputs.append("the gradient was 0 in every update")
    if facts.get("tokens_share") is not None:
        inputs.append(f"{percent(facts['tokens_share'])} of the sampled tokens were used in an update")
    if answers.get("answered") is not None:
        inputs.append(f"{percent(answers['answered'])} of the responses ended and had a readable answer")
        inputs.append(f"{percent(answers['truncated'])} were truncated at T")
    return {
        "title": learning.title,
        "reason": learning.reason,
        "advice": learning.advice,
        "good": learning.outcome == "learned",
        "failed": learning.failed,
        "inputs": ", ".join(inputs) + ".",
    }


def headline(run: RecordedRun) -> dict[str, Any] | None:
    """Return the data of the headline's template: tiles of the run, and a table and a figure per test set."""
    found = comparisons(run)
    sets: list[dict[str, Any]] = []
    for i, comparison in enumerate(found):
        best, measure = comparison.initial_best, comparison.measure
        sides = [side for pair in comparison.pairs for side in (pair.before, pair.after) if side is not None]
        view = intervals_view(
            "test" if len(found) == 1 else f"test_{i + 1}",
            f"{measure.name.capitalize()} by temperature",
            interval_rows(comparison),
            "Bars are 95 % intervals over problems, not over samples.",
            best=None if best is None else best[1].mean,
            measure=measure,
        )
        sets.append(
            {
                "comparison": comparison,
                "view": view,
                "passes": comparison.passes,
                "tiles": _score_tiles(comparison) + (_run_tiles(run) if i == 0 else []),
                "shares": ACCURACY,
                "answered": any(side.answered_and_stopped is not None for side in sides),
                "graded": measure is REWARD,
            }
        )
    return {"sets": sets} if sets else None


def _tile(value: str, label: str, detail: str) -> dict[str, str]:
    return {"value": value, "label": label, "detail": detail}


def _score_tiles(comparison: Comparison) -> list[dict[str, str]]:
    """Return tiles of the score at the temperature of training, and of the rise over the initial checkpoint's best."""
    found, measure = comparison.rise_over_best(), comparison.measure
    if found is None:
        return []
    at, best, after, change = found
    old = at.scores[0]
    over = f"over the initial checkpoint's best temperature, {temperature_text(best[0])}: {measure.value(best[1].mean)}"
    return [
        _tile(
            f"{measure.value(None if old is None else old.mean)} → {measure.value(after.mean)}",
            f"{measure.name} at temperature {temperature_text(at.temperature)}",
            "before and after training",
        ),
        _tile(
            f"{measure.change(change.mean)}{measure.unit}",
            over,
            f"95 %: {measure.change(change.low)} to {measure.change(change.high)}",
        ),
    ]


def _run_tiles(run: RecordedRun) -> list[dict[str, str]]:
    """Return tiles of entropy and length over the training."""
    tiles: list[dict[str, str]] = []
    entropy, target = run.points("entropy/exact/mean", "entropy/sampled/mean"), run.points("entropy/target")
    if entropy:
        value = f"{number_text(entropy[0][1], 2)} → {number_text(entropy[-1][1], 2)}"
        tiles.append(_tile(value, "entropy, nats per token", f"target {target[-1][1]:g}" if target else "no target"))
    lengths = run.points("length/mean")
    if lengths:
        value = f"{lengths[0][1]:.0f} → {lengths[-1][1]:.0f}"
        tiles.append(_tile(value, "mean response length, tokens", "first and last training step"))
    return tiles


def interval_rows(comparison: Comparison) -> list[IntervalRow]:
    """Return a row per temperature, then, for shares only, a row per pass@k."""
    rows = [IntervalRow(temperature_text(pair.temperature), *pair.scores) for pair in comparison.pairs]
    passes = enumerate(comparison.passes if comparison.measure is ACCURACY else ())
    return rows + [IntervalRow(f"pass@{k}", before, after, apart=i == 0) for i, (k, _, before, after) in passes]


# The summary in the terminal at the end of a run.

TABLE_WIDTH = 80
"""Smallest number of columns of a terminal in which the tables keep all of their numbers."""


def summary(run: RecordedRun, width: int = 100) -> RenderableType:
    """Return a table per test set, the rise in words, the cost, and the paths of the outputs.

    Args:
        run: a finished run.
        width: columns of the terminal. A table that is wider is shown as one line per number.
    """
    parts: list[RenderableType] = []
    for comparison in comparisons(run):
        parts += [_fitting(_score_table(comparison), width), *_rise_lines(comparison)]
        parts.append(_fitting(_cost_table(comparison), width))
    if (learning := run.learning) is not None:
        style = "bold green" if learning.outcome == "learned" else "bold red" if learning.failed else "bold yellow"
        verdict = (visible(learning.title), style)
        parts.append(Text.assemble(("Did it learn? ", "bold"), verdict, f": {visible(learning.reason)}."))
        parts += [Text(f"  remedy: {visible(sentence)}", style="dim") for sentence in learning.advice]
    steps = plural(len(run.metrics), "training step")
    parts.append(Text(f"{steps} in {duration(run.training_seconds)} ({run.status})"))
    for label, name in (("model", "model"), ("report", "report.html"), ("metrics", "metrics.jsonl")):
        path = run.path / name
        if path.exists():
            parts.append(Text(f"{label:8}{path}", overflow="ignore"))
    return Group(*parts)


def _fitting(table: Table, width: int) -> RenderableType:
    """Return the table, or its cells as lines below each row's name where the terminal is narrower than the table."""
    if width >= TABLE_WIDTH:
        return table
    columns = [list(column.cells) for column in table.columns]
    lines: list[RenderableType] = [Text(str(table.title), "bold")] if table.title else []
    for name, *cells in zip(*columns, strict=True):
        lines.append(Text(str(name) if str(name).startswith("pass@") else f"temperature {name}"))
        for column, cell in zip(table.columns[1:], cells, strict=True):
            if str(cell):
                lines.append(
                    Text(f"  {column.header}: ").append_text(cell if isinstance(cell, Text) else Text(str(cell)))
                )
    return Group(*lines)


def _score_table(comparison: Comparison) -> Table:
    """Return the score by temperature with 95 % intervals, the rise, and pass@k."""
    measure = comparison.measure
    shares = measure is ACCURACY
    name = f"{measure.name} in %" if shares else measure.name
    table = Table(
        title=f"Test set: {visible(comparison.set_name)} ({name}, with 95 % intervals)",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.add_column("temperature", no_wrap=True)
    for name in ("before", "after", "rise in points" if shares else "rise"):
        table.add_column(name, justify="right", no_wrap=shares)  # rewards may have more digits
    for pair in comparison.pairs:
        sides = (_interval_words(score, measure) for score in pair.scores)
        style = "green" if pair.rise is not None and pair.rise.low > 0 else ""
        change = Text(_change_words(pair.rise, measure), style=style)
        table.add_row(temperature_text(pair.temperature), *sides, change)
    for k, temperature, *sides in comparison.passes:
        words = (_interval_words(side, ACCURACY) + ("" if shares else " %") for side in sides)
        table.add_row(f"pass@{k}, {temperature:g}", *words, "")
    return table


def _cost_table(comparison: Comparison) -> Table:
    """Return entropy, length and truncation by temperature, before and after."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("temperature", no_wrap=True)
    for name in ("entropy", "mean length", "truncated"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in comparison.pairs:
        old, new = (
            ("–",) * 3
            if side is None
            else (number_text(side.entropy), number_text(side.length_mean), percent(side.truncation))
            for side in (pair.before, pair.after)
        )
        table.add_row(temperature_text(pair.temperature), *(f"{a} → {b}" for a, b in zip(old, new, strict=True)))
    return table


def _rise_lines(comparison: Comparison) -> list[Text]:
    """Return the rise over the initial checkpoint's best temperature in words."""
    found, measure = comparison.rise_over_best(), comparison.measure
    if found is None:
        return []
    at, best, after, change = found
    text = (
        f"At temperature {temperature_text(at.temperature)}: {measure.value(after.mean)}, "
        f"{_change_words(change, measure)}{measure.unit} compared with the initial checkpoint's best temperature "
        f"({temperature_text(best[0])}: {measure.value(best[1].mean)})"
    )
    return [Text(text, style="bold green" if change.low > 0 else "bold")]


def _interval_words(interval: Interval | None, measure: Measure) -> str:
    """Write ``45.7 (43.1–48.3)``, in per cent; with "to" after a negative number, whose sign looks like the dash."""
    if interval is None:
        return "–"
    if interval.low == interval.high:
        return measure.bare(interval.mean)
    to = " to " if interval.low < 0 else "–"
    return f"{measure.bare(interval.mean)} ({measure.bare(interval.low)}{to}{measure.bare(interval.high)})"


def _change_words(change: Interval | None, measure: Measure) -> str:
    """Write ``+45.1 (+41.9 to +48.0)``, in percentage points."""
    if change is None:
        return "–"
    return f"{measure.change(change.mean)} ({measure.change(change.low)} to {measure.change(change.high)})"


# Test scores of variants.

Spread: TypeAlias = tuple[float, float]
"""Smallest and largest value over the runs of a variant."""


_Tested: TypeAlias = Sequence[tuple[RecordedRun, TemperatureScore]]


def variant_scores(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Return the scores of every test set of any run; first at the training temperature of the first tested run, then
    at the others in descending order.

    Each has ``set_name``, ``temperature``, ``measure`` and in ``variants`` for each variant (intervals are over
    problems, None where it was not measured):

    - ``before``, ``after``: means over the variant's runs and problems; ``spread`` of ``after`` over the runs;
    - ``rise``: after minus before, paired by problem, over the runs that have both;
    - ``against``: after training, minus the first variant, paired by problem, with its ``against_spread`` over the
      runs; ``unpaired`` says why there is none, and is empty for the first variant;
    - ``tested`` and ``seeds``: runs with an evaluation after training, and their seeds;
    - ``runs``, ``problems``, and ``samples`` per problem.
    """
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys(name for variant in variants for run in variant.runs for name in run.sets):
        by_run = [
            (run, [e for e in run.evaluations if e.set_name == name]) for variant in variants for run in variant.runs
        ]
        trained = next(run.training_temperature(*own) for run, own in by_run if own)
        tests = [e for _, own in by_run for e in own]
        for at in sorted({t for e in tests for t in e.temperatures}, key=lambda t: (t != trained, -t)):
            before, after = (
                [_tested(variant, which, name, at) for variant in variants] for which in ("before", "after")
            )
            scores = [e.temperatures[at] for e in tests if at in e.temperatures]
            # comparable only in a measure that every evaluation has
            graded = all(score.reward and score.reward_per_problem for score in scores)
            measure = measure_of(rewards=[score.reward for score in scores] if graded else ())
            rows = [
                _score(variant, name, before[i], after[i], after[0] if i else None, measure)
                for i, variant in enumerate(variants)
            ]
            found.append({"set_name": name, "temperature": at, "variants": rows, "measure": measure})
    return found


def _tested(variant: Variant, which: str, set_name: str, temperature: float) -> _Tested:
    pairs = ((run, run.evaluation(which, set_name)) for run in variant.runs)
    return [(run, e.temperatures[temperature]) for run, e in pairs if e is not None and temperature in e.temperatures]


def _score(
    variant: Variant, set_name: str, before: _Tested, after: _Tested, first: _Tested | None, measure: Measure
) -> dict[str, Any]:
    """Return one variant's scores; ``first`` has the first variant's after training, None for that variant itself."""
    against: Interval | None = None
    spread: Spread | None = None
    why = ""
    if first is not None:
        if not after or not first:
            why = "not tested after training" if not after else "the first variant was not tested after training"
        elif not (why := _not_paired([*first, *after], set_name)):
            base = mean_per_problem([score for _, score in first], measure)
            clusters = _clusters([score for _, score in (*first, *after)])
            against = _paired(mean_per_problem([score for _, score in after], measure), base, clusters, measure)
            why = "" if against is not None else "no problem was judged in both"
            changes = (_paired(mean_per_problem([score], measure), base, clusters, measure) for _, score in after)
            spread = _spread([change.mean for change in changes if change is not None])
    both = {run.path for run, _ in before} & {run.path for run, _ in after}
    sides = [[(run, score) for run, score in tested if run.path in both] for tested in (before, after)]
    change = None
    if both and not _not_paired([*sides[0], *sides[1]], set_name):
        old, new = ([score for _, score in tested] for tested in sides)
        means = mean_per_problem(new, measure), mean_per_problem(old, measure)
        change = _paired(*means, _clusters([*old, *new]), measure)
    old, new = ([score for _, score in tested] for tested in (before, after))
    newest = next(iter((*new, *old)), None)
    mean, alone = _mean_score(after, set_name, measure), [score.score(measure) for score in new]
    return {
        "variant": variant.name,
        "before": _mean_score(before, set_name, measure),
        "after": mean,
        "spread": None if mean is None else _spread([score.mean for score in alone if score is not None]),
        "rise": change,
        "against": against,
        "against_spread": spread,
        "unpaired": why,
        "tested": len(after),
        "seeds": [str(run.run.get("seed", "–")) for run, _ in after],
        "runs": len(variant.runs),
        "problems": newest.problems if newest else 0,
        "samples": newest.samples if newest else 0,
    }


_NOT_GRADING = {
    f"verifier.{name}" for name in ("workers", "stop_after_unjudged_steps", *(f"judge.{one}" for one in JUDGE_ACCESS))
}
"""Settings of verifiers that change no verdict."""


def other_grading(first: RecordedRun, run: RecordedRun, set_name: str) -> list[str]:
    """Return how verifier, custom reward and response limit of a test after training differ from those of ``first``.

    What a run did not record is not compared.
    """
    tables: list[dict[str, Any]] = []
    for of in (first, run):
        table = {
            key: value
            for key, value in leaves(of.config).items()
            if key.startswith("verifier.") and key not in _NOT_GRADING
        }
        for session in of.environments[-1:]:
            custom = cast("Mapping[str, str]", session.get("custom") or {})
            place = "data.train" if set_name == "holdout" else f"data.test.{set_name}"
            table |= {f"file of {key}": digest[:8] for key, digest in custom.items() if key.startswith(f"{place}.")}
        evaluation = of.evaluation("after", set_name)
        tables.append(table | {"response limit": evaluation.max_tokens if evaluation else None})
    known = {key for key in tables[0] if tables[0][key] is not None and tables[1].get(key) is not None}
    old, new = ({key: table[key] for key in table if key in known} for table in tables)
    return differences(old, new)


def _spread(values: Sequence[float]) -> Spread | None:
    return (min(values), max(values)) if len(values) > 1 else None


def _not_paired(tested: _Tested, set_name: str) -> str:
    """Return why the problems of these evaluations cannot be paired; empty where they can."""
    if len({len(score.per_problem) for _, score in tested}) > 1:
        return "the test sets have different numbers of problems"
    recorded: list[Any] = [run.run.get("data") for run, _ in tested]
    facts = [data.get(f"test/{set_name}") for data in recorded if isinstance(data, dict)]
    checksums = {fact["sha256"] for fact in facts if isinstance(fact, dict) and "sha256" in fact}
    return "the test sets have different problems (by checksum)" if len(checksums) > 1 else ""


def _clusters(scores: Sequence[TemperatureScore]) -> NDArray[np.int64]:
    """Return each problem's cluster as the first score with clusters has it, else a cluster per problem."""
    found = next((score.clusters for score in scores if score.clusters), None)
    return np.asarray(range(len(scores[0].per_problem)) if found is None else found)


def mean_per_problem(scores: Sequence[TemperatureScore], measure: Measure) -> NDArray[np.float64]:
    """Return each problem's mean score over several runs; NaN where no run judged it."""
    table = np.array([score.by_problem(measure) for score in scores], dtype=np.float64)  # None becomes NaN
    counts = (~np.isnan(table)).sum(axis=0)
    return np.divide(np.nansum(table, axis=0), counts, out=np.full(len(counts), np.nan), where=counts > 0)


def _mean_score(tested: _Tested, set_name: str, measure: Measure) -> Interval | None:
    """Return the mean over runs and problems with an interval over problems; None where the test sets differ."""
    if not tested or _not_paired(tested, set_name):
        return None
    scores = [score for _, score in tested]
    values = mean_per_problem(scores, measure)
    judged = ~np.isnan(values)
    if not judged.any():
        return None
    return (share if measure is ACCURACY else mean_of)(values[judged], _clusters(scores)[judged].tolist())


def _paired(
    after: NDArray[np.float64], before: NDArray[np.float64], clusters: NDArray[np.int64], measure: Measure
) -> Interval | None:
    """Return ``after - before`` over the problems judged in both, with a clustered interval; None without any."""
    both = ~(np.isnan(after) | np.isnan(before))
    if not both.any():
        return None
    span = measure.span(after[both].tolist(), before[both].tolist())
    return paired_difference(after[both], before[both], clusters[both].tolist(), span=span)
