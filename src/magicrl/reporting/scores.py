"""A run's test scores, before against after: the comparison, the page's headline, the terminal's last words."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from magicrl.evaluation.statistics import paired_scores
from magicrl.reporting.charts import IntervalRow, intervals_view
from magicrl.reporting.read_folders import Evaluation, Interval, RecordedRun, TemperatureScore
from magicrl.reporting.wording import number, percent, temperature, visible
from magicrl.training.diagnosis import ACCURACY, REWARD, Measure, measure_of
from magicrl_verifiers.progress import duration


class ScorePair(NamedTuple):
    """One temperature: the start's score and the trained model's, where they were measured."""

    temperature: float
    before: TemperatureScore | None
    after: TemperatureScore | None
    measure: Measure

    @property
    def scores(self) -> tuple[Interval | None, Interval | None]:
        """The score before and after."""
        old, new = (None if side is None else side.score(self.measure) for side in (self.before, self.after))
        return old, new

    @property
    def rise(self) -> Interval | None:
        """After minus before at this temperature."""
        return None if self.before is None or self.after is None else rise(self.before, self.after, self.measure)


class PassPair(NamedTuple):
    """pass@k of the start and of the trained model; ``temperature`` is the start's where both were measured."""

    k: int
    temperature: float
    before: Interval | None
    after: Interval | None


class Rise(NamedTuple):
    """The trained model at one temperature against the start at another."""

    before_temperature: float
    after_temperature: float
    before: Interval
    after: Interval
    change: Interval

    @property
    def clear(self) -> bool:
        """Whether the interval of the change lies above zero."""
        return self.change.low > 0


class Comparison(NamedTuple):
    """A test set before and after training; either may be missing while a run goes on."""

    set_name: str
    before: Evaluation | None
    after: Evaluation | None

    @property
    def measure(self) -> Measure:
        """What its scores are told in."""
        tests = [side for side in (self.before, self.after) if side is not None]
        return measure_of(rewards=[score.reward for test in tests for score in test.temperatures.values()])

    @property
    def pairs(self) -> tuple[ScorePair, ...]:
        """One a temperature, ascending."""
        old, new = ({} if side is None else side.temperatures for side in (self.before, self.after))
        return tuple(ScorePair(t, old.get(t), new.get(t), self.measure) for t in sorted({*old, *new}))

    @property
    def start_best(self) -> tuple[float, Interval] | None:
        """The temperature at which the start is best, and its score there. It is chosen as the highest, so the rise
        over it is if anything too small."""
        told = [(p.temperature, p.scores[0]) for p in self.pairs]
        return max(((t, score) for t, score in told if score is not None), key=lambda item: item[1].mean, default=None)

    @property
    def training_temperature(self) -> float | None:
        """The highest temperature measured (after training, if it was): the one it sampled at, in every preset."""
        measured = self.after or self.before
        return max(measured.temperatures, default=None) if measured is not None else None

    def rise_over_best(self, after_temperature: float | None) -> Rise | None:
        """The rise at ``after_temperature`` over the start's best temperature."""
        best, sides = self.start_best, {pair.temperature: pair for pair in self.pairs}
        at = None if after_temperature is None else sides.get(after_temperature)
        if best is None or at is None or at.scores[1] is None:
            return None
        change = at._replace(before=sides[best[0]].before).rise
        return None if change is None else Rise(best[0], at.temperature, best[1], at.scores[1], change)

    @property
    def passes(self) -> tuple[PassPair, ...]:
        """One a k, ascending; each side at the highest temperature that has it."""
        sides: list[dict[int, tuple[float, Interval]]] = []
        for evaluation in (self.before, self.after):
            scores = sorted((evaluation.temperatures if evaluation else {}).items())
            sides.append({k: (t, value) for t, score in scores for k, value in score.pass_at.items()})
        found: list[PassPair] = []
        for k in sorted({*sides[0], *sides[1]}):
            old, new = (side.get(k) for side in sides)
            at = (old or new or (0.0,))[0]
            found.append(PassPair(k, at, old[1] if old else None, new[1] if new else None))
        return tuple(found)


def rise(before: TemperatureScore, after: TemperatureScore, measure: Measure = ACCURACY) -> Interval | None:
    """``after - before`` with a 95 % interval, paired by problem; None for fewer than two problems judged in both."""
    old, new = before.by_problem(measure), after.by_problem(measure)
    change = paired_scores(new, old, after.clusters or None, span=measure.span(old, new))
    return None if change is None else Interval(mean=change.mean, low=change.low, high=change.high)


def comparisons(run: RecordedRun) -> tuple[Comparison, ...]:
    """One a test set, in the order of the files."""
    return tuple(Comparison(name, run.evaluation("before", name), run.evaluation("after", name)) for name in run.sets)


def run_verdict(run: RecordedRun) -> dict[str, Any] | None:
    """The data of the verdict's template, as the run's end recorded it; None for a run that has not ended."""
    learning = run.learning
    if learning is None:
        return None
    facts, answers = learning.facts, learning.facts.answers
    inputs = [f"{facts.updates} SGD updates in {facts.steps} training steps"]
    if facts.weights_changed is not None:
        inputs.append("the weights changed" if facts.weights_changed else "no weight changed")
    if answers is not None:
        inputs.append(f"{percent(answers.mixed)} of the groups gave a gradient")
    if facts.tokens_share is not None:
        inputs.append(f"{percent(facts.tokens_share)} of the sampled tokens were learnt from")
    if answers is not None and answers.answered is not None:
        inputs.append(f"{percent(answers.answered)} of the answers ended and could be read")
        inputs.append(f"{percent(answers.truncated)} were cut at T")
    return {
        "title": learning.title,
        "reason": learning.reason,
        "advice": learning.advice,
        "good": learning.outcome == "learned",
        "failed": learning.failed,
        "inputs": ", ".join(inputs) + ".",
    }


def headline(run: RecordedRun) -> dict[str, Any] | None:
    """The data of the headline's template: tiles of the run, and a table and a figure a test set."""
    found = comparisons(run)
    sets: list[dict[str, Any]] = []
    for i, comparison in enumerate(found):
        sides = [side for pair in comparison.pairs for side in (pair.before, pair.after) if side is not None]
        view = intervals_view(
            "test" if len(found) == 1 else f"test_{i + 1}",
            f"{comparison.measure.name.capitalize()} by temperature",
            interval_rows(comparison),
            "Bars are 95 % intervals; the unit of each is the problem, not the sample.",
            best=None if comparison.start_best is None else comparison.start_best[1].mean,
            measure=comparison.measure,
        )
        tiles = _score_tiles(comparison) + (_run_tiles(run) if i == 0 else [])
        told: dict[str, Any] = {
            "shares": ACCURACY,
            "boxed": any(s.boxed is not None for s in sides),
            "graded": comparison.measure is REWARD,
        }
        sets.append({"comparison": comparison, "view": view, "passes": comparison.passes, "tiles": tiles, **told})
    return {"sets": sets} if sets else None


def _tile(value: str, label: str, detail: str) -> dict[str, str]:
    return {"value": value, "label": label, "detail": detail}


def _score_tiles(comparison: Comparison) -> list[dict[str, str]]:
    """The score at the temperature of training, and the rise over the start at its best."""
    rise, measure = comparison.rise_over_best(comparison.training_temperature), comparison.measure
    if rise is None:
        return []
    at = rise.after_temperature
    old = next(p for p in comparison.pairs if p.temperature == at).scores[0]
    best = f"{temperature(rise.before_temperature)}: {measure.value(rise.before.mean)}"
    label, over = f"{measure.name} at temperature {temperature(at)}", f"over the start's best temperature, {best}"
    interval = f"95 %: {measure.change(rise.change.low)} to {measure.change(rise.change.high)}"
    before = measure.value(None if old is None else old.mean)
    return [
        _tile(f"{before} → {measure.value(rise.after.mean)}", label, "before and after training"),
        _tile(f"{measure.change(rise.change.mean)}{measure.unit}", over, interval),
    ]


def _run_tiles(run: RecordedRun) -> list[dict[str, str]]:
    """Entropy and length over the training."""
    tiles: list[dict[str, str]] = []
    entropy, target = run.points("entropy/exact/mean", "entropy/sampled/mean"), run.points("entropy/target")
    if entropy:
        value = f"{number(entropy[0][1], 2)} → {number(entropy[-1][1], 2)}"
        tiles.append(_tile(value, "entropy, nats per token", f"target {target[-1][1]:g}" if target else "no target"))
    lengths = run.points("length/mean")
    if lengths:
        value = f"{lengths[0][1]:.0f} → {lengths[-1][1]:.0f}"
        tiles.append(_tile(value, "mean response length, tokens", "first and last training step"))
    return tiles


def interval_rows(comparison: Comparison) -> list[IntervalRow]:
    """A row a temperature, then a row a pass@k, which is on the scale of shares alone."""
    rows = [IntervalRow(temperature(pair.temperature), *pair.scores) for pair in comparison.pairs]
    passes = enumerate(comparison.passes if comparison.measure is ACCURACY else ())
    return rows + [IntervalRow(f"pass@{p.k}", p.before, p.after, apart=i == 0) for i, p in passes]


# The terminal's last words.


def summary(run: RecordedRun) -> RenderableType:
    """A table a test set, the rise in words, cost, and the paths of what was made."""
    parts: list[RenderableType] = []
    for comparison in comparisons(run):
        parts += [_score_table(comparison), *_rise_lines(comparison), _cost_table(comparison)]
    if (learning := run.learning) is not None:
        style = "bold green" if learning.outcome == "learned" else "bold red" if learning.failed else "bold yellow"
        verdict = (visible(learning.title), style)
        parts.append(Text.assemble(("Did it learn? ", "bold"), verdict, f": {visible(learning.reason)}."))
        parts += [Text(f"  remedy: {visible(sentence)}", style="dim") for sentence in learning.advice]
    parts.append(Text(f"{len(run.metrics)} training steps in {duration(training_seconds(run))} ({run.status})"))
    for label, name in (("model", "model"), ("report", "report.html"), ("metrics", "metrics.jsonl")):
        path = run.path / name
        if path.exists():
            parts.append(Text(f"{label:8}{path}"))
    return Group(*parts)


def training_seconds(run: RecordedRun) -> float | None:
    """Wall clock of the training steps together, over every resumption; None where no step recorded it."""
    steps = run.points("time/step")
    return sum(seconds for _, seconds in steps) if steps else None


def _score_table(comparison: Comparison) -> Table:
    """The score by temperature with 95 % intervals, the rise, and pass@k."""
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
        table.add_row(temperature(pair.temperature), *sides, change)
    for passed in comparison.passes:
        words = (_interval_words(side, ACCURACY) + ("" if shares else " %") for side in (passed.before, passed.after))
        table.add_row(f"pass@{passed.k}, {passed.temperature:g}", *words, "")
    return table


def _cost_table(comparison: Comparison) -> Table:
    """Entropy, length and truncation by temperature, before and after."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("temperature", no_wrap=True)
    for name in ("entropy", "mean length", "truncated"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in comparison.pairs:
        old, new = (_cost_words(side) for side in (pair.before, pair.after))
        both = [f"{a} → {b}" for a, b in zip(old, new, strict=True)]
        table.add_row(temperature(pair.temperature), *both)
    return table


def _cost_words(score: TemperatureScore | None) -> list[str]:
    if score is None:
        return ["–"] * 3
    return [number(score.entropy), number(score.length_mean), percent(score.truncation)]


def _rise_lines(comparison: Comparison) -> list[Text]:
    """The rise over the start's best temperature, in words."""
    rise, measure = comparison.rise_over_best(comparison.training_temperature), comparison.measure
    if rise is None:
        return []
    text = (
        f"At temperature {temperature(rise.after_temperature)}: {measure.value(rise.after.mean)}, "
        f"{_change_words(rise.change, measure)}{measure.unit} against the start's best temperature "
        f"({temperature(rise.before_temperature)}: {measure.value(rise.before.mean)})"
    )
    return [Text(text, style="bold green" if rise.clear else "bold")]


def _interval_words(interval: Interval | None, measure: Measure) -> str:
    """``45.7 (43.1–48.3)``, in per cent."""
    if interval is None:
        return "–"
    return f"{measure.bare(interval.mean)} ({measure.bare(interval.low)}–{measure.bare(interval.high)})"


def _change_words(change: Interval | None, measure: Measure) -> str:
    """``+45.1 (+41.9 to +48.0)``, in percentage points."""
    if change is None:
        return "–"
    return f"{measure.change(change.mean)} ({measure.change(change.low)} to {measure.change(change.high)})"
