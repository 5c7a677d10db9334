"""Scores of judged samples: avg@k, pass@k, maj@k, length, truncation, each with a clustered interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from magicrl.evaluation.samples import SampleRow
from magicrl.evaluation.statistics import Estimate, Mean, majority_at_k, mean_of, pass_at_k, share


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What one evaluation at one temperature found.

    Attributes:
        accuracy: avg@k, the mean over problems of the share of right samples.
        per_problem: share right, one a problem, in the problems' order (NaN where none was judged).
        pass_at: pass@k by k, over the problems that have k judged samples.
        majority_at: maj@k by k, likewise.
        length: mean response tokens.
        truncation: share of responses cut at the limit.
        entropy: mean nats per token, None where the engine cannot tell.
        boxed_and_stopped: share of responses that ended by themselves and gave an answer to judge.
        samples: most judged samples of a problem.
        not_judged: samples that could not be judged, and count nowhere.
        clusters: one number a problem, equal for problems of one prompt or template: the unit of the intervals.
    """

    accuracy: Estimate
    per_problem: tuple[float, ...]
    pass_at: dict[int, Estimate]
    majority_at: dict[int, Estimate] = field(default_factory=dict[int, Estimate])
    length: Mean
    truncation: Estimate
    entropy: float | None
    boxed_and_stopped: float
    samples: int
    not_judged: int
    clusters: tuple[int, ...]


def score_rows(
    problems: Sequence[Sequence[SampleRow]],
    clusters: Sequence[Hashable],
    *,
    pass_at: Sequence[int] = (),
    majority_at: Sequence[int] = (),
) -> Score:
    """The score of every problem's rows (``by_problem`` makes the argument).

    Args:
        problems: judged samples of each problem.
        clusters: ``Problem.cluster`` of each.
        pass_at, majority_at: every k.

    Raises:
        ValueError: no sample was judged, or fewer samples than a k asked for.
    """
    judged = [[row for row in rows if row.counted] for rows in problems]
    every = [row for rows in problems for row in rows]
    if not any(judged):
        raise ValueError("no sample was judged: there is nothing to score")
    correct = [sum(row.correct for row in rows) for rows in judged]
    counted = [len(rows) for rows in judged]
    pairs = list(zip(correct, counted, strict=True))
    shares = [c / n if n else float("nan") for c, n in pairs]
    told = [(row.entropy, row.tokens) for row in every if row.entropy is not None]
    numbers = numbered(clusters)
    sampled = [(rows, number) for rows, number in zip(problems, numbers, strict=True) if rows]

    def enough(k: int) -> list[int]:
        return [number for number, n in zip(numbers, counted, strict=True) if n >= k]

    return Score(
        accuracy=share([s for s in shares if s == s], enough(1)),
        per_problem=tuple(shares),
        pass_at={k: share([pass_at_k(c, n, k) for c, n in pairs if n >= k], enough(k)) for k in pass_at},
        majority_at={
            k: share([majority_at_k(*votes(rows), k) for rows in judged if len(rows) >= k], enough(k))
            for k in majority_at
        },
        length=mean_of([float(np.mean([row.tokens for row in rows])) for rows, _ in sampled], [c for _, c in sampled]),
        truncation=share(
            [float(np.mean([row.truncated for row in rows])) for rows, _ in sampled], [c for _, c in sampled]
        ),
        entropy=float(np.average([e for e, _ in told], weights=[t for _, t in told])) if told else None,
        boxed_and_stopped=float(np.mean([row.extracted is not None and row.finish_reason == "stop" for row in every])),
        samples=max(counted),
        not_judged=len(every) - sum(counted),
        clusters=numbers,
    )


def numbered(clusters: Sequence[Hashable]) -> tuple[int, ...]:
    """Clusters by number, in the order in which they come.

    Example:
        >>> numbered(["b", "a", "b"])
        (0, 1, 0)
    """
    known: dict[Hashable, int] = {}
    return tuple(known.setdefault(name, len(known)) for name in clusters)


def votes(rows: Sequence[SampleRow]) -> tuple[int, list[int], int]:
    """The votes of one problem's samples: for the right answer, for each wrong one, and for none.

    Right answers are one answer however they are written (the verifier said so); wrong ones are told apart by their
    text without spaces and case. A response that gave no answer, or was cut, votes for nothing.
    """
    right = sum(row.correct for row in rows)
    silent = sum(not row.correct and (row.extracted is None or row.truncated) for row in rows)
    wrong = Counter(
        "".join((row.extracted or "").split()).casefold()
        for row in rows
        if not row.correct and row.extracted is not None and not row.truncated
    )
    return right, sorted(wrong.values(), reverse=True), silent
