"""Code cleaning: usable tests, a reference solution that passes them in the sandbox, solutions that agree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from magicrl.pipeline.cleaning.maths_rules import note_of
from magicrl.pipeline.entry import Entry
from magicrl.pipeline.settings import CodeCleaning
from magicrl.pipeline.steps.base import Decision, Drop
from magicrl.records import Outcome, Problem
from magicrl.verifiers.code.judge import CodeJudge, CodeOptions, CodeVerdict
from magicrl.verifiers.code.pool import CodePool, disagreements
from magicrl.verifiers.code.sandbox import Limits
from magicrl.verifiers.code.suite import SuiteError, parse_suite
from magicrl.verifiers.pool import Closing, Ticket


class CodeCleaner(Closing):
    """Decides on code problems; starts its sandboxes with the first that needs one.

    Args:
        rules: which rules hold.
        workers: sandboxes at once.
    """

    def __init__(self, rules: CodeCleaning, *, workers: int) -> None:
        self._rules = rules
        self._options = CodeOptions(limits=Limits(cpu_seconds=rules.time_limit, memory_mb=rules.memory_limit_mb))
        self._pool = CodePool(self._options, workers=workers)
        self._judge: CodeJudge | None = None

    def close(self) -> None:
        """End its sandboxes."""
        self._pool.close()
        if self._judge is not None:
            self._judge.close()

    def decide(self, entries: Sequence[Entry]) -> list[Decision]:
        """Decisions in the entries' order."""
        firsts = [self._with_usable_tests(entry) for entry in entries]
        tickets = [
            self._submit(one) if isinstance(one, Entry) and self._rules.reference and one.solutions else None
            for one in firsts
        ]
        return [
            self._finished(before, one, ticket) for before, one, ticket in zip(entries, firsts, tickets, strict=True)
        ]

    def _with_usable_tests(self, entry: Entry) -> Entry | Drop:
        """The entry with its unusable tests taken out."""
        try:
            tests: Any = json.loads(entry.golds[0])
        except (ValueError, RecursionError) as error:
            return Drop("broken tests", f"no JSON: {error}")
        if not isinstance(tests, dict):
            return Drop("broken tests", f"must be an object, got {type(tests).__name__}")
        usable, gone = usable_tests(tests)
        try:
            suite = parse_suite(usable)
        except (SuiteError, RecursionError) as error:
            empty = not usable.get("inputs", True)
            return Drop(
                "empty or incomplete tests" if empty else "broken tests", f"{error} ({gone} unusable taken out)"
            )
        if len(suite.cases) < self._rules.min_tests:
            return Drop("too few tests", f"{len(suite.cases)} usable tests, at least {self._rules.min_tests}")
        if self._rules.reference and not entry.solutions and self._rules.without_solution == "drop":
            return Drop("no reference solution")
        if not gone:
            return entry
        notes = note_of(entry, tests_taken_out=gone)
        return replace(entry, golds=(json.dumps(usable, ensure_ascii=False),), notes=notes)

    def _submit(self, entry: Entry) -> Ticket:
        problem = Problem(id=entry.id, prompt="", golds=entry.golds, verifier="code", source=entry.source)
        return self._pool.submit_programs(problem, list(entry.solutions[: self._rules.max_solutions]))

    def _finished(self, before: Entry, one: Entry | Drop, ticket: Ticket | None) -> Decision:
        if isinstance(one, Drop):
            return one
        if ticket is None:
            return None if one is before else one
        verdicts = self._pool.result(ticket)
        right = [index for index, verdict in enumerate(verdicts) if verdict.correct]
        if not right:
            return _not_passed(verdicts)
        tried = one.solutions[: len(verdicts)]
        passing = [tried[index] for index in right]
        several = self._rules.disagreement != "ignore" and len(tried) > 1
        unsure = self._disagreements(one, tried) if several else []
        if unsure and self._rules.disagreement == "drop":
            return Drop("correct solutions disagree", f"on tests {unsure[:20]}")
        others = [text for text in one.solutions if text not in passing]
        notes = note_of(one, reference_passes=True, **({"needs_checker": unsure} if unsure else {}))
        return replace(one, solutions=(*passing, *others), notes=notes)

    def _disagreements(self, entry: Entry, solutions: Sequence[str]) -> list[int]:
        """Tests on which solutions that are all known to be right give different outputs."""
        suite = parse_suite(entry.golds[0])
        if suite.checker is not None:
            return []
        if self._judge is None:
            self._judge = CodeJudge(self._options)
        return disagreements(self._judge, suite, solutions)


def _not_passed(verdicts: Sequence[CodeVerdict]) -> Drop:
    first = verdicts[0]
    detail = f"{first.status}: passed {first.passed} of {first.total}. {first.reason}"
    if all(verdict.outcome is Outcome.NOT_JUDGED for verdict in verdicts):
        return Drop("reference could not be judged", detail)
    return Drop("reference fails its tests", detail)


def usable_tests(tests: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The tests without those that say nothing, and how many were taken out.

    A test says nothing when it has no input, or no expected output and there is no checker; of two lists of unequal
    length only the common beginning can be paired. Assertions are left alone.

    Example:
        >>> usable_tests({"inputs": ["1", "2", "3"], "outputs": ["1", ""]})
        ({'inputs': ['1'], 'outputs': ['1']}, 2)
    """
    inputs = tests.get("inputs")
    outputs = tests.get("outputs")
    if not isinstance(inputs, list) or (outputs is not None and not isinstance(outputs, list)):
        return dict(tests), 0
    if outputs is None:
        kept = [given for given in inputs if given is not None]
        return {**tests, "inputs": kept}, len(inputs) - len(kept)
    function = bool(tests.get("fn_name"))
    checked = bool(tests.get("checker"))
    pairs = [
        (given, wanted)
        for given, wanted in zip(inputs, outputs, strict=False)
        if given is not None and (checked or function or _says(wanted))
    ]
    gone = max(len(inputs), len(outputs)) - len(pairs)
    if not gone:
        return dict(tests), 0
    return {**tests, "inputs": [given for given, _ in pairs], "outputs": [wanted for _, wanted in pairs]}, gone


def _says(wanted: Any) -> bool:
    """Whether an expected output on standard output says anything."""
    if isinstance(wanted, str):
        return bool(wanted.strip())
    return wanted is not None and wanted != []
