"""The sampling job: N verified responses a problem, through the same engine and verifiers as training.

Randomness is a function of (seed, draw, sample, position), and the seed of an evaluation is its own, so
that evaluating never disturbs the training run's random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from magicrl.evaluation.samples import row_of
from magicrl.evaluation.scoring import Score, score_rows
from magicrl.records import Outcome, Problem, RolloutGroup, RolloutRequest, SamplingParams, TokenArray, Verdict
from magicrl.rollout.protocol import RolloutEngine
from magicrl.verifiers.base import VerifierService

Encode = Callable[[Problem], TokenArray]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedGroup:
    """A group and one verdict a completion."""

    group: RolloutGroup
    verdicts: tuple[Verdict, ...]

    @property
    def correct(self) -> NDArray[np.bool_]:
        """``[G]``: right and not cut at the limit (a truncated response gave no answer in time)."""
        pairs = zip(self.group.completions, self.verdicts, strict=True)
        return np.array([v.correct and not c.truncated for c, v in pairs], dtype=np.bool_)

    @property
    def counted(self) -> NDArray[np.bool_]:
        """``[G]``: False where the verifier could not judge."""
        return np.array([v.outcome is not Outcome.NOT_JUDGED for v in self.verdicts], dtype=np.bool_)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingGroup:
    """A finished group whose verdicts may still be under way."""

    group: RolloutGroup
    ticket: Any


def generate(
    engine: RolloutEngine, judge: VerifierService, requests: Sequence[RolloutRequest], progress: Progress | None = None
) -> list[PendingGroup]:
    """Sample every request, handing each group to the judge as it finishes; groups come back in draw order."""
    engine.submit(requests)
    pending: list[PendingGroup] = []
    for group in engine.finished():
        ticket = judge.submit(group.request.problem, [c.text for c in group.completions])
        pending.append(PendingGroup(group=group, ticket=ticket))
        if progress:
            progress(len(pending), len(requests))
    return sorted(pending, key=lambda item: item.group.request.draw)


def verdicts_of(judge: VerifierService, pending: Sequence[PendingGroup]) -> list[JudgedGroup]:
    """Wait for the verdicts that are still under way."""
    return [JudgedGroup(group=item.group, verdicts=judge.result(item.ticket)) for item in pending]


def evaluation_seed(run_seed: int, name: str) -> int:
    """A seed of its own for the evaluation ``name``, independent of the training run's random numbers."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{name}".encode()).digest()[:6], "big")


def sample_problems(
    engine: RolloutEngine,
    judge: VerifierService,
    problems: Sequence[Problem],
    encode: Encode,
    *,
    samples: int,
    temperature: float,
    max_tokens: int,
    seed: int,
    progress: Progress | None = None,
) -> list[JudgedGroup]:
    """``samples`` judged responses of every problem, in the problems' order."""
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    requests = [
        RolloutRequest(draw=i, problem=p, prompt_tokens=encode(p), group_size=samples, sampling=sampling)
        for i, p in enumerate(problems)
    ]
    return verdicts_of(judge, generate(engine, judge, requests, progress))


def score(groups: Sequence[JudgedGroup], pass_at: Sequence[int] = ()) -> Score:
    """The score of judged groups, one a problem.

    Raises:
        ValueError: no group has a judged response, or fewer samples than a k asked for.
    """
    problems = [
        [
            row_of(group.group.request.problem.id, index, completion, verdict)
            for index, completion, verdict in zip(
                group.group.request.indices, group.group.completions, group.verdicts, strict=True
            )
        ]
        for group in groups
    ]
    return score_rows(problems, [group.group.request.problem.cluster for group in groups], pass_at=pass_at)
