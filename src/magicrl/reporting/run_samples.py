"""The test responses of training runs as a browser shows them: before and after, or the arms of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magicrl.reporting.arms import Arm
from magicrl.reporting.comparison import comparisons
from magicrl.reporting.run_folder import EvaluatedSample, Evaluation, RecordedRun, SampledResponse
from magicrl.reporting.sample_browser import (
    Answer,
    AnswerRow,
    Browsed,
    Kind,
    SampleBrowser,
    browser,
    kinds_of,
)
from magicrl.reporting.wording import temperature

MOST_ARMS = 3
"""Arms side by side, behind the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsePair:
    """What the start and the trained model wrote on one problem at one temperature."""

    temperature: float
    before: SampledResponse | None
    after: SampledResponse | None


def run_browsers(run: RecordedRun) -> list[SampleBrowser]:
    """A browser a test set: what the start and the trained model wrote."""
    browsers: list[SampleBrowser] = []
    for comparison in comparisons(run):
        old, new = _by_id(comparison.before), _by_id(comparison.after)
        problems = [browsed_pair(old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new])]
        if problems:
            browsers.append(browser(comparison.set_name, ("before", "after"), problems))
    return browsers


def arm_browsers(arms: Sequence[Arm]) -> list[SampleBrowser]:
    """A browser a test set: what the start of the first arm and the first tested run of each arm wrote, at the
    temperature of training."""
    browsers: list[SampleBrowser] = []
    for name in dict.fromkeys(name for arm in arms for run in arm.runs for name in run.sets):
        starts = (run.evaluation("before", name) for run in arms[0].runs)
        tested = [(arm, next(filter(None, (run.evaluation("after", name) for run in arm.runs)), None)) for arm in arms]
        columns = [("start", next(filter(None, starts), None)), *((arm.name, e) for arm, e in tested)]
        there = [(label, evaluation) for label, evaluation in columns if evaluation is not None and evaluation.samples]
        shown = there[: MOST_ARMS + 1]
        problems = _side_by_side([evaluation for _, evaluation in shown])
        if len(shown) > 1 and problems:
            note = "Of each arm the first run that was tested, at the temperature of training."
            if len(there) > len(shown):
                note += f" {len(there) - len(shown)} more arms are in their folders."
            browsers.append(browser(name, [label for label, _ in shown], problems, note=note))
    return browsers


def _side_by_side(evaluations: Sequence[Evaluation]) -> list[Browsed]:
    tables = [_by_id(evaluation) for evaluation in evaluations]
    at = max((t for evaluation in evaluations for t in evaluation.temperatures), default=1.0)
    found: list[Browsed] = []
    for key in dict.fromkeys(key for table in tables for key in table):
        problem = next(table[key] for table in tables if key in table)
        columns = [
            [a for a in map(as_answer, _by_temperature(table.get(key)).get(at, [])) if a is not None]
            for table in tables
        ]
        if any(columns):
            row = AnswerRow(
                label=f"Temperature {temperature(at)}",
                answers=tuple(column[0] if column else None for column in columns),
            )
            found.append(
                Browsed(
                    id=problem.problem_id,
                    prompt=problem.prompt,
                    gold=_gold(problem),
                    marks=tuple(tuple(answer.mark for answer in column[:1]) for column in columns),
                    rows=(row,),
                    kinds=kinds_of([column[:1] for column in columns]),
                )
            )
    return found


def _by_id(evaluation: Evaluation | None) -> dict[str, EvaluatedSample]:
    return {sample.problem_id: sample for sample in (evaluation.samples if evaluation else ())}


def _gold(problem: EvaluatedSample) -> str:
    return problem.gold if isinstance(problem.gold, str) else " or ".join(problem.gold)


def browsed_pair(before: EvaluatedSample | None, after: EvaluatedSample | None) -> Browsed:
    """One test problem; what changed is told at each temperature by itself."""
    problem = after or before
    assert problem is not None, "a problem of one of the two"
    pairs = [
        (pair.temperature, as_answer(pair.before), as_answer(pair.after)) for pair in response_pairs(before, after)
    ]
    kinds = (kinds_of([[old] if old else [], [new] if new else []]) for _, old, new in pairs)
    return Browsed(
        id=problem.problem_id,
        prompt=problem.prompt,
        gold=_gold(problem),
        marks=(
            tuple(old.mark for _, old, _ in pairs if old is not None),
            tuple(new.mark for _, _, new in pairs if new is not None),
        ),
        rows=tuple(AnswerRow(label=f"Temperature {temperature(t)}", answers=(old, new)) for t, old, new in pairs),
        kinds=frozenset[Kind]().union(*kinds),
    )


def as_answer(response: SampledResponse | None) -> Answer | None:
    """A recorded response as the browser shows it."""
    if response is None:
        return None
    return Answer(
        text=response.text,
        outcome=response.outcome,
        status=response.status,
        decided_by=response.decided_by,
        extracted=response.extracted,
        tokens=response.tokens,
        truncated=response.finish_reason == "length",
    )


def response_pairs(before: EvaluatedSample | None, after: EvaluatedSample | None) -> list[ResponsePair]:
    """The responses of both models to one problem side by side: by temperature, in order within it."""
    old = _by_temperature(before)
    new = _by_temperature(after)
    pairs: list[ResponsePair] = []
    for t in sorted({*old, *new}):
        left, right = old.get(t, []), new.get(t, [])
        for i in range(max(len(left), len(right))):
            pairs.append(
                ResponsePair(
                    temperature=t,
                    before=left[i] if i < len(left) else None,
                    after=right[i] if i < len(right) else None,
                )
            )
    return pairs


def _by_temperature(sample: EvaluatedSample | None) -> dict[float, list[SampledResponse]]:
    found: dict[float, list[SampledResponse]] = {}
    for response in sample.responses if sample else ():
        found.setdefault(response.temperature, []).append(response)
    return found
