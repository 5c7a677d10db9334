r"""The maths verifier (RECIPE section 8): answer part, extraction, comparison, Math-Verify.

    answer part after the reasoning -> last box -> string, rational, word -> Math-Verify on \boxed{gold}

Departures from the released code: the last box is cut out before Math-Verify sees it (several boxes would be
joined), golds and answers are compared as strings before anything is parsed, plain numbers are compared
exactly, and a response whose reasoning never ended has no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from magicrl.records import Verdict
from magicrl.verifiers.base import JudgeOptions, Progress, make_verdict
from magicrl.verifiers.extraction import answer_part, last_box
from magicrl.verifiers.maths import engine
from magicrl.verifiers.maths.notation import canonical
from magicrl.verifiers.maths.steps import CHEAP_STEPS

MAX_PARSED_CHARS = 5000
"""A longer answer is compared as a string only: no formula that anyone asks for has this length."""
MAX_PROSE_CHARS = 8000
"""Without a box, only the end of the text is searched for an answer."""
_CACHED_GOLDS = 4096


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the response gives: a box's content, or running text when there is no box (lenient)."""

    text: str
    boxed: bool


class MathsVerifier:
    """Judges one response against its golds. Runs in a worker process; see `magicrl.verifiers.pool`."""

    def __init__(self, options: JudgeOptions, progress: Progress = lambda phase: None) -> None:
        self._options = options
        self._progress = progress
        self._golds: dict[str, list[Any]] = {}

    def distrust(self, golds: Sequence[str]) -> None:
        for gold in golds:
            self._remember(gold, [])

    def judge(self, golds: Sequence[str], response: str) -> Verdict:
        answer = self._extract(response)
        if isinstance(answer, Verdict):
            return answer
        spelled = canonical(answer.text)
        candidates = [(gold, canonical(gold)) for gold in golds]
        for name, step in CHEAP_STEPS:
            opinions = [step(gold, spelled) for _, gold in candidates]
            if True in opinions:
                return make_verdict("matched", decided_by=name, extracted=answer.text)
            candidates = [pair for pair, opinion in zip(candidates, opinions, strict=True) if opinion is None]
            if not candidates:
                return make_verdict("mismatch", decided_by=name, extracted=answer.text)
        return self._by_engine([gold for gold, _ in candidates], answer, spelled)

    def _extract(self, response: str) -> _Answer | Verdict:
        text = answer_part(response, self._options.reasoning)
        if text is None:
            return make_verdict("no_answer", reason="the reasoning never ended", decided_by="extraction")
        box = last_box(text)
        if box is not None:
            answer = _Answer(box.strip(), boxed=True)
        elif self._options.extract == "lenient":
            answer = _Answer(text.strip()[-MAX_PROSE_CHARS:], boxed=False)
        else:
            return make_verdict("no_answer", reason="no closed box after the reasoning", decided_by="extraction")
        if not answer.text:
            return make_verdict("no_answer", reason="the answer is empty", decided_by="extraction")
        return answer

    def _by_engine(self, golds: list[str], answer: _Answer, spelled: str) -> Verdict:
        """Step 4: Math-Verify on what the cheap steps left open."""
        engine.reset_randomness()
        self._progress("gold")
        readable = [parsed for gold in golds if (parsed := self._parse_gold(gold))]
        if not readable:
            reason = "Math-Verify reads nothing in the gold answer"
            return make_verdict("gold_unparsable", reason=reason, decided_by="math_verify", extracted=answer.text)
        self._progress("answer")
        extracted: str | None = answer.text
        if not answer.boxed:
            parsed, extracted = engine.parse_prose(answer.text)
        elif len(spelled) <= MAX_PARSED_CHARS:
            parsed = engine.parse_formula(spelled)
        else:
            parsed = []
        if not parsed:
            reason = "Math-Verify reads nothing in the answer"
            return make_verdict("unparsable", reason=reason, decided_by="math_verify", extracted=extracted)
        equal = any(engine.equivalent(gold, parsed) for gold in readable)
        return make_verdict("matched" if equal else "mismatch", decided_by="math_verify", extracted=extracted)

    def _parse_gold(self, gold: str) -> list[Any]:
        if gold not in self._golds:
            parsed = engine.parse_formula(canonical(gold))
            self._remember(gold, parsed if engine.evaluates(parsed) else [])
        return self._golds[gold]

    def _remember(self, gold: str, parsed: list[Any]) -> None:
        if len(self._golds) >= _CACHED_GOLDS:
            self._golds.pop(next(iter(self._golds)))
        self._golds[gold] = parsed
