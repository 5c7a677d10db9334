r"""Maths cleaning: rules on the text, then the answer judged against itself and against the given solution.

Three judgements, by the same verifier that training uses (RECIPE section 7):

* the gold in a box must be right (otherwise no response could ever earn it);
* the verifier must be able to read it (otherwise only its very spelling would be right);
* the first given solution, judged as if a model had written it, must be right.

Most golds are plain numbers that the solution boxes in the same spelling: then the verifier's first step, equality of
canonical strings, is taken here and no worker process is asked. The result is the same.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from magicrl.pipeline.cleaning.maths_rules import maths_fault, note_of
from magicrl.pipeline.entry import Entry
from magicrl.pipeline.settings import MathsCleaning
from magicrl.pipeline.steps.base import Decision, Drop
from magicrl.records import Problem, Verdict
from magicrl.verifiers.extraction import CLOSE_TAG, OPEN_TAG, last_box
from magicrl.verifiers.maths.literals import plain_number
from magicrl.verifiers.maths.notation import canonical, close_braces
from magicrl.verifiers.pool import Ticket, VerifierPool

_PROBE = r"\boxed{\int_0^1 \zeta(7) y \, dy + \Gamma(\frac{1}{7})}"
"""An answer that is nobody's: what the verifier says of a gold beside it is whether it can read the gold."""
_AFTER_HASHES = re.compile(r"(?:^|\n)####[ \t]*(\S[^\n]*?)\s*\Z")
_SHORT = 200
_IN_FLIGHT = 64


class MathsCleaner:
    """Decides on maths problems. Not safe to use from several threads.

    Args:
        rules: which rules hold.
        pool: judges; its options must be ``auto`` and ``lenient``.
    """

    def __init__(self, rules: MathsCleaning, pool: VerifierPool) -> None:
        self._rules = rules
        self._pool = pool

    def decide(self, entries: Sequence[Entry]) -> list[Decision]:
        """Decisions in the entries' order; many are judged at a time."""
        decided: list[Decision] = []
        waiting: deque[tuple[int, Entry, Ticket, list[str]]] = deque()

        def settle() -> None:
            index, entry, ticket, asked = waiting.popleft()
            verdicts = dict(zip(asked, self._pool.result(ticket), strict=True))
            decided[index] = self._by_verdicts(entry, verdicts)

        for index, entry in enumerate(entries):
            fault = maths_fault(entry, self._rules)
            questions = {} if fault is not None else self._questions(entry)
            if not questions:
                decided.append(fault or self._without_questions(entry))
                continue
            decided.append(None)
            problem = Problem(id=entry.id, prompt="", golds=entry.golds, verifier="maths", source=entry.source)
            waiting.append((index, entry, self._pool.submit(problem, list(questions.values())), list(questions)))
            if len(waiting) >= _IN_FLIGHT:
                settle()
        while waiting:
            settle()
        return decided

    def _questions(self, entry: Entry) -> dict[str, str]:
        """What must be asked of the verifier, by name: responses to judge against the golds."""
        questions: dict[str, str] = {}
        golds = [_canonical(gold) for gold in entry.golds if len(gold) <= _SHORT]
        plain = len(golds) == len(entry.golds) and all(_is_digits(g) or plain_number(g) is not None for g in golds)
        if not plain:
            questions["itself"] = rf"\boxed{{{entry.golds[0]}}}"
            if self._rules.unreadable_golds == "drop":
                questions["probe"] = _PROBE
        if self._rules.agreement and entry.solutions:
            solution = entry.solutions[0]
            stated = stated_answer(solution)
            same = stated is not None and len(stated) <= _SHORT and _canonical(stated) in golds
            if not same:
                questions["solution"] = solution if stated is None else rf"\boxed{{{stated}}}"
        return questions

    def _without_questions(self, entry: Entry) -> Decision:
        if entry.solutions:
            return replace(entry, notes=note_of(entry, answer_agrees=True)) if self._rules.agreement else None
        if self._rules.agreement and self._rules.without_solution == "drop":
            return Drop("no solution to agree with")
        return None

    def _by_verdicts(self, entry: Entry, verdicts: dict[str, Verdict]) -> Decision:
        itself = verdicts.get("itself")
        if itself is not None and not itself.correct:
            return Drop("gold cannot be earned", f"gold {entry.golds[0]!r} in a box: {itself.status}. {itself.reason}")
        probe = verdicts.get("probe")
        if probe is not None and probe.status == "gold_unparsable":
            return Drop("gold unreadable", f"gold {entry.golds[0]!r}: only its own spelling would be right")
        solution = verdicts.get("solution")
        if solution is not None and not solution.correct:
            found = "nothing" if solution.extracted is None else repr(solution.extracted[-200:])
            stated = stated_answer(entry.solutions[0]) is not None
            reason = "solution disagrees" if stated else "solution does not state the answer"
            return Drop(reason, f"gold {entry.golds[0]!r}, the solution gives {found} ({solution.status})")
        return self._without_questions(entry)


def _is_digits(text: str) -> bool:
    """Whether a text is a number without sign or leading zero: the most frequent gold, and its own canonical form."""
    return text.isdecimal() and text.isascii() and (text[0] != "0" or text == "0")


def _canonical(text: str) -> str:
    return text if _is_digits(text) else canonical(close_braces(text))


def stated_answer(solution: str) -> str | None:
    r"""The answer that a solution marks as such: its last box, or what follows ``####`` at its end; else None.

    Example:
        >>> stated_answer(r"So it is \boxed{7}."), stated_answer("2 and 5 is 7.\n#### 7"), stated_answer("So it is 7.")
        ('7', '7', None)
    """
    if OPEN_TAG in solution or CLOSE_TAG in solution:
        return None  # the verifier knows where reasoning ends
    box = last_box(solution)
    if box is not None:
        return box.strip() or None
    found = _AFTER_HASHES.search(solution[-1000:])
    return found.group(1) if found else None
