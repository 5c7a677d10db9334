r"""The maths verifier (RECIPE section 8): answer part, extraction, comparison, Math-Verify.

    answer part after the reasoning -> last box -> string, rational, word -> Math-Verify on \boxed{gold}

Departures from the released code: the last box is cut out before Math-Verify sees it (several boxes would be
joined), golds and answers are compared as strings before anything is parsed, plain numbers are compared
exactly, and a response whose reasoning never ended has no answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from magicrl.records import Verdict
from magicrl.verifiers.base import JudgeOptions, Progress, make_verdict
from magicrl.verifiers.extraction import answer_part, joint_boxes, last_box
from magicrl.verifiers.maths import engine
from magicrl.verifiers.maths.alarm import CpuAlarm, cpu_limit
from magicrl.verifiers.maths.notation import canonical, close_braces
from magicrl.verifiers.maths.prose import final_answer
from magicrl.verifiers.maths.steps import CHEAP_STEPS
from magicrl.verifiers.maths.structure import engine_may_judge, has_shape, same_list
from magicrl.verifiers.maths.words import choice_letter

MAX_PARSED_CHARS = 5000
"""A longer answer is compared as a string only: no formula that anyone asks for has this length."""
MAX_PROSE_CHARS = 8000
"""Without a box, only the end of the text is searched for an answer."""
ENGINE_SECONDS = 0.8
"""CPU time that Math-Verify may use for one answer, and once for each gold."""
STEPS_SECONDS = 1.0
"""CPU time that the steps before it may use."""
_CACHED_GOLDS = 4096
_MAY_BE_LIST = re.compile(r"[,;]|\\pm|\b(?:and|or)\b")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the response gives: a box's content, or running text when there is no box (lenient)."""

    text: str
    boxed: bool
    source: str = ""


class MathsVerifier:
    """Judges one response against its golds. Runs in a worker process; see `magicrl.verifiers.pool`."""

    def __init__(self, options: JudgeOptions, progress: Progress = lambda phase: None) -> None:
        self._options = options
        self._progress = progress
        self._golds: dict[str, list[Any]] = {}
        self._exhausting: set[str] = set()

    def distrust(self, golds: Sequence[str]) -> None:
        for gold in golds:
            self._exhausting.add(gold)
            self._remember(gold, [])

    def judge(self, golds: Sequence[str], response: str) -> Verdict:
        try:
            return self._judge(golds, response)
        except RecursionError:
            return make_verdict("unparsable", reason="the answer is nested too deeply", decided_by="structure")

    def _judge(self, golds: Sequence[str], response: str) -> Verdict:
        answer = self._extract(golds, response)
        if isinstance(answer, Verdict):
            return answer
        pairs = [(gold, canonical(close_braces(gold))) for gold in golds]
        try:
            with cpu_limit(STEPS_SECONDS):
                verdict = self._by_steps(pairs, canonical(answer.text), answer)
                if answer.source and (verdict is None or verdict.status == "mismatch"):
                    verdict = self._by_joint_boxes(pairs, answer) or verdict
        except CpuAlarm:
            reason = f"the answer used up {STEPS_SECONDS:g} s of CPU time"
            return make_verdict("timeout", reason=reason, decided_by="structure", extracted=answer.text)
        if isinstance(verdict, Verdict):
            return verdict
        return self._by_engine(pairs, answer)

    def _extract(self, golds: Sequence[str], response: str) -> _Answer | Verdict:
        text = answer_part(response, self._options.reasoning)
        if text is None:
            return make_verdict("no_answer", reason="the reasoning never ended", decided_by="extraction")
        box = last_box(text)
        if box is not None:
            answer = _Answer(box.strip(), boxed=True, source=text)
        elif self._options.extract == "lenient":
            choice = all(choice_letter(gold) is not None for gold in golds)
            found = final_answer(text[-MAX_PROSE_CHARS:], choice=choice)
            answer = _Answer(found or text.strip()[-MAX_PROSE_CHARS:], boxed=found is not None)
        else:
            return make_verdict("no_answer", reason="no closed box after the reasoning", decided_by="extraction")
        if not answer.text:
            return make_verdict("no_answer", reason="the answer is empty", decided_by="extraction")
        return answer

    def _by_steps(self, pairs: list[tuple[str, str]], spelled: str, answer: _Answer) -> Verdict | None:
        """Steps 1 to 3: everything that needs no symbolic algebra. None when a gold stays open."""
        candidates = pairs
        for name, step in CHEAP_STEPS if len(spelled) <= MAX_PARSED_CHARS else CHEAP_STEPS[:1]:
            opinions = [step(gold, spelled) for _, gold in candidates]
            if True in opinions:
                return make_verdict("matched", decided_by=name, extracted=answer.text)
            candidates = [pair for pair, opinion in zip(candidates, opinions, strict=True) if opinion is None]
            if not candidates:
                return make_verdict("mismatch", decided_by=name, extracted=answer.text)
        if len(spelled) > MAX_PARSED_CHARS:
            return make_verdict("mismatch", decided_by="string", reason="too long to be read", extracted=answer.text)
        return None

    def _by_joint_boxes(self, pairs: list[tuple[str, str]], answer: _Answer) -> Verdict | None:
        """Several boxes in a row are one list, if the gold is a list of as many answers."""
        if not any(_MAY_BE_LIST.search(gold) for _, gold in pairs):
            return None
        boxes = joint_boxes(answer.source)
        if boxes is None:
            return None
        spelled = canonical(", ".join(boxes))
        if len(spelled) <= MAX_PARSED_CHARS and any(same_list(gold, spelled, len(boxes)) for _, gold in pairs):
            return make_verdict("matched", decided_by="boxes", extracted=", ".join(boxes))
        return None

    def _by_engine(self, pairs: list[tuple[str, str]], answer: _Answer) -> Verdict:
        """Step 4: Math-Verify on what the steps before left open."""
        spelled = canonical(answer.text)
        engine.reset_randomness()
        self._progress("gold")
        parsed = {gold: self._parse_gold(gold) for gold, _ in pairs}
        if not any(parsed[gold] or (gold not in self._exhausting and has_shape(text)) for gold, text in pairs):
            reason = "the gold answer cannot be read"
            return make_verdict("gold_unparsable", reason=reason, decided_by="math_verify", extracted=answer.text)
        self._progress("answer")
        usable = [
            parsed[gold]
            for gold, text in pairs
            if parsed[gold] and (not answer.boxed or engine_may_judge(text, spelled))
        ]
        if not usable:
            if not has_shape(spelled):
                return make_verdict("mismatch", decided_by="structure", extracted=answer.text)
            reason = "neither that they are equal nor that they differ could be shown"
            return make_verdict("undecided", reason=reason, decided_by="structure", extracted=answer.text)
        try:
            with cpu_limit(ENGINE_SECONDS):
                return self._engine_verdict(usable, answer, spelled)
        except CpuAlarm:
            reason = f"the answer used up {ENGINE_SECONDS:g} s of CPU time"
            return make_verdict("timeout", reason=reason, decided_by="math_verify", extracted=answer.text)

    def _engine_verdict(self, golds: list[list[Any]], answer: _Answer, spelled: str) -> Verdict:
        extracted: str | None = answer.text
        if answer.boxed:
            parsed = engine.parse_formula(spelled)
        else:
            parsed, extracted = engine.parse_prose(answer.text)
        if not parsed:
            reason = "Math-Verify reads nothing in the answer"
            return make_verdict("unparsable", reason=reason, decided_by="math_verify", extracted=extracted)
        equal = any(engine.equivalent(gold, parsed) for gold in golds)
        return make_verdict("matched" if equal else "mismatch", decided_by="math_verify", extracted=extracted)

    def _parse_gold(self, gold: str) -> list[Any]:
        if gold not in self._golds:
            try:
                with cpu_limit(ENGINE_SECONDS):
                    parsed = engine.parse_formula(canonical(gold))
                    self._remember(gold, parsed if engine.evaluates(parsed) else [])
            except CpuAlarm:
                self._exhausting.add(gold)
                self._remember(gold, [])
        return self._golds[gold]

    def _remember(self, gold: str, parsed: list[Any]) -> None:
        if len(self._golds) >= _CACHED_GOLDS:
            self._golds.pop(next(iter(self._golds)))
        self._golds[gold] = parsed
