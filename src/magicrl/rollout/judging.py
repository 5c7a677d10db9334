"""Completions on their way to verdicts: an environment's own, or the verifier's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from magicrl.records import Completion, Problem, Verdict
from magicrl_verifiers.records import VerifierService


@dataclass(frozen=True, slots=True)
class Submitted:
    """Completions on their way to verdicts: those that environments gave, and the judge's ticket of the others."""

    own: tuple[Verdict | None, ...]
    ticket: Any


def submit_completions(judge: VerifierService, problem: Problem, completions: Sequence[Completion]) -> Submitted:
    """Have completions judged by their text, episodes by their last turn where their environments did not judge."""
    own = tuple(None if c.episode is None else c.episode.verdict for c in completions)
    left = [c for c, given in zip(completions, own, strict=True) if given is None]
    texts = [c.text if c.episode is None else c.episode.answer for c in left]
    return Submitted(own, judge.submit(problem, texts) if texts else None)


def verdicts_of(judge: VerifierService, submitted: Submitted) -> tuple[Verdict, ...]:
    """A verdict a completion, in their order; waits for those that the judge has to give."""
    judged = iter(() if submitted.ticket is None else judge.result(submitted.ticket))
    return tuple(next(judged) if given is None else given for given in submitted.own)
