"""The responses of evaluations side by side: a column an evaluation, a browser a benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from magicrl.evaluation.samples import SampleRow
from magicrl.reporting.eval_folder import RecordedEvaluation, asked_problems, by_benchmark, sample_rows
from magicrl.reporting.sample_browser import Answer, AnswerRow, Browsed, SampleBrowser, browser, kinds_of

MOST_COLUMNS = 4
"""Evaluations side by side; the responses of further ones are in their folders."""


def evaluation_browsers(evaluations: Sequence[RecordedEvaluation], names: Sequence[str]) -> list[SampleBrowser]:
    """A browser a benchmark of which the folders hold problems and samples.

    Evaluations of other problems than the first's have no common rows: a problem is matched by its id.
    """
    found: list[SampleBrowser] = []
    for benchmark, results in by_benchmark(evaluations).items():
        shown = results[:MOST_COLUMNS]
        folders = [evaluations[i].path / benchmark for i, _ in shown]
        asked = {problem.id: problem for folder in reversed(folders) for problem in asked_problems(folder)}
        columns = [
            _by_problem(sample_rows(folder, result.samples)) for folder, (_, result) in zip(folders, shown, strict=True)
        ]
        ids = [
            name
            for name in dict.fromkeys([*asked, *(n for c in columns for n in c)])
            if any(name in c for c in columns)
        ]
        problems = [
            browsed(
                name,
                asked[name].prompt if name in asked else "",
                " or ".join(asked[name].golds) if name in asked else "",
                [column.get(name, []) for column in columns],
            )
            for name in ids
        ]
        if problems:
            several = max(result.samples for _, result in shown) > 1
            note = "A model counts as right on a problem where at least half of its samples are." if several else ""
            if len(results) > MOST_COLUMNS:
                note += f" The first {MOST_COLUMNS} of {len(results)} evaluations are shown."
            found.append(browser(benchmark, [names[i] for i, _ in shown], problems, note=note))
    return found


def _by_problem(rows: Iterable[SampleRow]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {}
    for row in rows:
        found.setdefault(row.problem, []).append(
            Answer(
                text=row.text,
                outcome=row.outcome,
                status=row.status,
                decided_by=row.decided_by,
                reason=row.reason,
                extracted=row.extracted,
                tokens=row.tokens,
                truncated=row.truncated,
                entropy=row.entropy,
            )
        )
    return found


def browsed(name: str, prompt: str, gold: str, columns: Sequence[Sequence[Answer]]) -> Browsed:
    """One problem: of each column's samples the first right and the first other one."""
    rows: list[AnswerRow] = []
    for label, wanted in (("first right sample", True), ("first sample that is not right", False)):
        answers = tuple(next((a for a in column if a.right is wanted), None) for column in columns)
        if any(answers):
            rows.append(AnswerRow(label=label, answers=answers))
    return Browsed(
        id=name,
        prompt=prompt,
        gold=gold,
        marks=tuple(tuple(a.mark for a in column) for column in columns),
        rows=tuple(rows),
        kinds=kinds_of(columns),
    )
