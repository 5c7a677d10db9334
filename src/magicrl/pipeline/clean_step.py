"""The cleaning step: checks maths problems by rules and by their answers, and code problems by their tests.

A maths problem that passes the rules is checked with the verifier that training uses. The boxed
reference answer must be judged correct, otherwise no response could be. The verifier must be able to read it, otherwise
only its exact spelling would be correct. The first solution, judged like a response, must be correct.

A code problem needs usable tests and a reference solution that passes them in the sandbox. If solutions that pass give
different outputs, it also needs a checker.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa

from magicrl.pipeline.entry import Entry, entries_of
from magicrl.pipeline.frame import Context, Decide, Decision, Drop, PipelineStep
from magicrl.pipeline.maths_rules import maths_fault
from magicrl.pipeline.parts import StepFolder
from magicrl.pipeline.pipeline_schema import CleanStep, CodeCleaning, MathsCleaning
from magicrl.records import Outcome, Problem, Verdict
from magicrl_verifiers.batch import disagreements
from magicrl_verifiers.code.judge import CodeJudge, CodeOptions, CodePool, CodeVerdict
from magicrl_verifiers.code.sandbox import Limits
from magicrl_verifiers.code.suite import SuiteError, parse_suite
from magicrl_verifiers.extraction import AFTER_HASHES, CLOSE_TAG, OPEN_TAG, last_box
from magicrl_verifiers.maths.literals import plain_number
from magicrl_verifiers.maths.notation import canonical_notation, close_braces
from magicrl_verifiers.records import JudgeOptions
from magicrl_verifiers.service import VerifierPool
from magicrl_verifiers.workers import Closing, Ticket

_PROBE = r"\boxed{\int_0^1 \zeta(7) y \, dy + \Gamma(\frac{1}{7})}"
"""Answer that matches no reference. Its verdict shows whether the verifier can read the reference."""
_SHORT = 200  # longest answer, in characters, that is compared without the verifier


class MathsCleaner:
    """Decides which maths problems to keep. The pool's options must be ``auto`` and ``lenient``."""

    def __init__(self, rules: MathsCleaning, pool: VerifierPool) -> None:
        self._rules = rules
        self._pool = pool

    def decide(self, entries: Sequence[Entry]) -> list[Decision]:
        """Return a decision per entry, in order. The entries are judged in parallel."""
        # all are submitted before the first result is awaited, so that the workers are busy
        waiting: list[tuple[Drop | None, dict[str, str], Ticket | None]] = []
        for entry in entries:
            fault = maths_fault(entry, self._rules)
            questions = self._questions(entry) if fault is None else {}
            ticket = self._pool.submit(_asked(entry), [*questions.values()]) if questions else None
            waiting.append((fault, questions, ticket))
        decided: list[Decision] = []
        for entry, (fault, questions, ticket) in zip(entries, waiting, strict=True):
            verdicts = self._pool.result(ticket) if ticket is not None else ()
            decided.append(fault or self._by_verdicts(entry, dict(zip(questions, verdicts, strict=True))))
        return decided

    def _questions(self, entry: Entry) -> dict[str, str]:
        """Return the responses that the verifier must judge against the reference answers, by name."""
        questions: dict[str, str] = {}
        # most reference answers are plain numbers that the solution boxes in the same spelling: there the verifier's
        # first step, equality of canonical strings, is taken in this process, with the same result
        references = [_canonical(reference) for reference in entry.references if len(reference) <= _SHORT]
        plain = len(references) == len(entry.references) and all(
            _is_digits(g) or plain_number(g) is not None for g in references
        )
        if not plain:
            questions["itself"] = rf"\boxed{{{entry.references[0]}}}"
            if self._rules.unreadable_references == "drop":
                questions["probe"] = _PROBE
        if self._rules.agreement and entry.solutions:
            stated = stated_answer(entry.solutions[0])
            # the verifier looks through the whole solution as through a response
            if stated is None:
                questions["solution"] = entry.solutions[0]
            elif len(stated) > _SHORT or _canonical(stated) not in references:
                questions["solution"] = rf"\boxed{{{stated}}}"
        return questions

    def _by_verdicts(self, entry: Entry, verdicts: Mapping[str, Verdict]) -> Decision:
        reference = f"reference answer {entry.references[0]!r}" if entry.references else ""
        itself = verdicts.get("itself")
        if itself is not None and not itself.correct:
            return Drop("reference answer cannot be earned", f"{reference} in a box: {itself.status}. {itself.reason}")
        probe = verdicts.get("probe")
        if probe is not None and probe.status == "reference_unparsable":
            return Drop("reference answer unreadable", f"{reference}: only its own spelling would be right")
        solution = verdicts.get("solution")
        if solution is not None and not solution.correct:
            found = "nothing" if solution.extracted is None else repr(solution.extracted[-200:])
            stated = stated_answer(entry.solutions[0]) is not None
            reason = "solution disagrees" if stated else "solution does not state the answer"
            return Drop(reason, f"{reference}, the solution gives {found} ({solution.status})")
        if not self._rules.agreement:
            return None
        if entry.solutions:
            return replace(entry, notes={**entry.notes, "answer_agrees": True})
        return Drop("no solution to agree with") if self._rules.without_solution == "drop" else None


def _asked(entry: Entry) -> Problem:
    """Return the problem without the texts that its verifier does not need."""
    return replace(entry.as_problem(), prompt="", context=())


def _is_digits(text: str) -> bool:
    """Return whether a text is a number without sign or leading zero, which is its own canonical form."""
    return text.isdecimal() and text.isascii() and (text[0] != "0" or text == "0")


def _canonical(text: str) -> str:
    return text if _is_digits(text) else canonical_notation(close_braces(text))


def stated_answer(solution: str) -> str | None:
    r"""Return the answer that a solution marks: its last box, or the text after ``####`` at its end; else None.

    Example:
        >>> stated_answer(r"So it is \boxed{7}."), stated_answer("2 and 5 is 7.\n#### 7"), stated_answer("So it is 7.")
        ('7', '7', None)
    """
    if OPEN_TAG in solution or CLOSE_TAG in solution:
        return None  # the verifier knows where reasoning ends
    box = last_box(solution)
    if box is not None:
        return box.strip() or None
    # only the end is searched: GSM8K marks the answer in the last line
    found = AFTER_HASHES.search(solution[-1000:])
    # an answer begins behind spaces and tabs, and with no other white space
    return found[1] if found and found[1][:1].strip() else None


class CodeCleaner(Closing):
    """Decides which code problems to keep. The first problem that needs a sandbox starts ``workers`` of them."""

    def __init__(self, rules: CodeCleaning, *, workers: int) -> None:
        self._rules = rules
        self._options = CodeOptions(limits=Limits(cpu_seconds=rules.time_limit, memory_mb=rules.memory_limit_mb))
        self._pool = CodePool(self._options, workers=workers)
        self._judge: CodeJudge | None = None

    def close(self) -> None:
        """End the sandboxes."""
        self._pool.close()
        if self._judge is not None:
            self._judge.close()

    def decide(self, entries: Sequence[Entry]) -> list[Decision]:
        """Return a decision per entry, in order."""
        firsts = [self._with_usable_tests(entry) for entry in entries]
        tickets = [
            self._pool.submit(_asked(one), one.solutions[: self._rules.max_solutions], bare=True)
            if isinstance(one, Entry) and self._rules.reference and one.solutions
            else None
            for one in firsts
        ]
        return [
            self._by_verdicts(one, self._pool.result(ticket)) if isinstance(one, Entry) and ticket is not None else one
            for one, ticket in zip(firsts, tickets, strict=True)
        ]

    def _with_usable_tests(self, entry: Entry) -> Entry | Drop:
        """Return the entry without its unusable tests, or why it is dropped."""
        try:
            tests: Any = json.loads(entry.references[0])
        except (ValueError, RecursionError) as error:
            return Drop("broken tests", f"no JSON: {error}")
        if not isinstance(tests, dict):
            return Drop("broken tests", f"must be an object, got {type(tests).__name__}")
        usable, gone = usable_tests(tests)
        try:
            suite = parse_suite(usable)
        except (SuiteError, RecursionError) as error:
            reason = "broken tests" if usable.get("inputs", True) else "empty or incomplete tests"
            return Drop(reason, f"{error} ({gone} unusable taken out)")
        if len(suite.cases) < self._rules.min_tests:
            return Drop("too few tests", f"{len(suite.cases)} usable tests, at least {self._rules.min_tests}")
        if self._rules.reference and not entry.solutions and self._rules.without_solution == "drop":
            return Drop("no reference solution")
        if not gone:
            return entry
        notes = {**entry.notes, "tests_taken_out": gone}
        return replace(entry, references=(json.dumps(usable, ensure_ascii=False),), notes=notes)

    def _by_verdicts(self, entry: Entry, verdicts: Sequence[CodeVerdict]) -> Decision:
        tried = entry.solutions[: len(verdicts)]
        passing = [text for text, verdict in zip(tried, verdicts, strict=True) if verdict.correct]
        if not passing:
            first = verdicts[0]
            judged = any(verdict.outcome is not Outcome.NOT_JUDGED for verdict in verdicts)
            reason = "reference fails its tests" if judged else "reference could not be judged"
            return Drop(reason, f"{first.status}: passed {first.passed} of {first.total}. {first.reason}")
        several = self._rules.disagreement != "ignore" and len(tried) > 1
        unsure = self._disagreements(entry, tried) if several else []
        if unsure and self._rules.disagreement == "drop":
            return Drop("correct solutions disagree", f"on tests {unsure[:20]}")
        # solutions that pass come first: the later steps take the first one
        others = [text for text in entry.solutions if text not in passing]
        notes = {**entry.notes, "reference_passes": True, **({"needs_checker": unsure} if unsure else {})}
        return replace(entry, solutions=(*passing, *others), notes=notes)

    def _disagreements(self, entry: Entry, solutions: Sequence[str]) -> list[int]:
        """Return the tests on which solutions that pass give different outputs."""
        suite = parse_suite(entry.references[0])
        # a checker is there to accept several outputs: that they differ says nothing
        if suite.checker is not None:
            return []
        if self._judge is None:
            self._judge = CodeJudge(self._options)
        return disagreements(self._judge, suite, solutions)


def usable_tests(tests: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the tests without those that check nothing, and how many were removed.

    A test checks nothing if it has no input, or no expected output and there is no checker; of two lists of unequal
    length only the common beginning can be paired. Assertions are left as they are.

    Example:
        >>> usable_tests({"inputs": ["1", "2", "3"], "outputs": ["1", ""]})
        ({'inputs': ['1'], 'outputs': ['1']}, 2)
    """
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or (outputs is not None and not isinstance(outputs, list)):
        return dict(tests), 0
    if outputs is None:
        kept = [given for given in inputs if given is not None]
        return {**tests, "inputs": kept}, len(inputs) - len(kept)
    # what a function returns, or a checker looks at, may well be nothing
    silent = bool(tests.get("fn_name") or tests.get("checker"))
    pairs = [
        (given, wanted)
        for given, wanted in zip(inputs, outputs, strict=False)
        if given is not None and (silent or (wanted.strip() if isinstance(wanted, str) else wanted not in (None, [])))
    ]
    gone = max(len(inputs), len(outputs)) - len(pairs)
    if not gone:
        return dict(tests), 0
    return {**tests, "inputs": [given for given, _ in pairs], "outputs": [wanted for _, wanted in pairs]}, gone


class Clean(PipelineStep[CleanStep]):
    """Decides row by row, in several processes with separate verifiers."""

    use = "clean"
    version = 3
    whole = False
    parallel = True

    def identity(self, context: Context) -> Any:
        return self._settings.model_dump(mode="json", exclude={"name", "use"})

    @contextmanager
    def open(self, folder: StepFolder, context: Context) -> Generator[Decide]:
        with ExitStack() as stack:
            options = JudgeOptions(reasoning="auto", extract="lenient")
            limit = self._settings.maths.time_limit
            pool = stack.enter_context(VerifierPool(options=options, time_limit=limit, workers=context.workers))
            maths = MathsCleaner(self._settings.maths, pool)
            code = stack.enter_context(CodeCleaner(self._settings.code, workers=context.workers))

            def decide(table: pa.Table) -> list[Decision]:
                entries = entries_of(table)
                # each kind is judged as a whole; the results go back into the order of the rows
                programs = iter(code.decide([entry for entry in entries if entry.ability == "code"]))
                others = iter(maths.decide([entry for entry in entries if entry.ability != "code"]))
                return [next(programs if entry.ability == "code" else others) for entry in entries]

            yield decide
