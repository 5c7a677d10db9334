"""Verdicts on completions, from their environment or from the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from magicrl.records import Completion, Problem, Verdict
from magicrl_verifiers.records import VerifierService

Submitted: TypeAlias = tuple[tuple[Verdict | None, ...], Any]
"""Verdicts that environments gave (None: the verifier judges), and the verifier's ticket for the other completions."""


def submit_completions(judge: VerifierService, problem: Problem, completions: Sequence[Completion]) -> Submitted:
    """Submit completions to the verifier: their text, or the last turn of an episode that its environment left open."""
    own = tuple(None if c.episode is None else c.episode.verdict for c in completions)
    left = [c for c, given in zip(completions, own, strict=True) if given is None]
    texts = [c.text if c.episode is None else c.episode.answer for c in left]
    return own, judge.submit(problem, texts) if texts else None


def verdicts_of(judge: VerifierService, submitted: Submitted) -> tuple[Verdict, ...]:
    """Return one verdict per completion, in order. Waits for the verifier."""
    own, ticket = submitted
    judged = iter(() if ticket is None else judge.result(ticket))
    return tuple(next(judged) if given is None else given for given in own)
