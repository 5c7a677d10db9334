"""Several rewards per response, each with a weight: ``maths + 0.2 * brief.py:score``.

The reward is the mean of the scores with these weights. The first one decides whether a response is right. A reward
that fails is not judged for its part only: the others still count, and its part is never 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from magicrl_verifiers.records import Outcome, Verdict
from magicrl_verifiers.references import LIVE

_TERM = re.compile(r"(?:(\S+) \* )?(.*)", re.DOTALL)


def _split(reference: str) -> list[tuple[str, str]]:
    """Return (weight as written, name) of each reward; the weight is empty where there is none."""
    matches = (_TERM.fullmatch(term.strip()) for term in reference.split(" + "))
    return [(match[1] or "", match[2].strip()) for match in matches if match is not None]


def reward_terms(reference: str) -> tuple[tuple[str, float], ...]:
    """Return the name and the weight of each reward that ``reference`` names, the deciding one first.

    Example:
        >>> reward_terms("maths + 0.2 * brief.py:score")
        (('maths', 1.0), ('brief.py:score', 0.2))

    Raises:
        ValueError: A weight is negative or no number, a reward is named twice, or the weights sum to 0.
    """
    found: list[tuple[str, float]] = []
    for text, name in _split(reference):
        try:
            weight = float(text or 1)
        except ValueError:
            weight = math.nan
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"reward {reference!r}: '{text} * {name}' must begin with a weight of 0 or more, as 0.5 * NAME; a "
                "penalty is a reward that returns negative scores"
            )
        found.append((name, weight))
    if len({name for name, _ in found}) < len(found):
        raise ValueError(f"reward {reference!r}: a reward is named twice; add its weights")
    if not sum(weight for _, weight in found) > 0:
        raise ValueError(f"reward {reference!r}: the weights sum to 0, so that every response earns the same")
    return tuple(found)


def each_name(reference: str, change: Callable[[str], str]) -> str:
    """Return ``reference`` with the name of each of its rewards changed; weights are unchanged."""
    return " + ".join(f"{weight} * {change(name)}" if weight else change(name) for weight, name in _split(reference))


def reward_names(reference: str) -> list[str]:
    """Return the names of the rewards in ``reference``. The first one decides whether a response is right."""
    return [name for _, name in _split(reference)]


def live_names(reference: str) -> list[str]:
    """Return the names of rewards that are objects of this process."""
    return [name for name in reward_names(reference) if name.startswith(LIVE)]


def short_names(terms: Sequence[tuple[str, float]]) -> list[str]:
    """Return a name for metrics per reward: ``score`` of ``my/brief.py:score``, with its place if another has it."""
    names = [re.sub(r"\W+", "_", name.partition("@")[0].rpartition(":")[2]) for name, _ in terms]
    return [name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names, start=1)]


def joined(reference: str, columns: Sequence[Sequence[Verdict]]) -> list[Verdict]:
    """Return one verdict per response from the verdicts of each reward, ``columns[reward][response]``.

    Outcome and status are those of the first reward. The score is the mean over the rewards that judged the response.
    If the first one did not judge it, or only rewards of weight 0 did, the response is not judged. Names of metrics
    begin with that of their reward.
    """
    terms = reward_terms(reference)
    names = short_names(terms)
    found: list[Verdict] = []
    for verdicts in zip(*columns, strict=True):
        scores = [None if v.outcome is Outcome.NOT_JUDGED else v.reward for v in verdicts]
        pairs = [(weight, score) for (_, weight), score in zip(terms, scores, strict=True) if score is not None]
        total = math.fsum(weight for weight, _ in pairs)
        failed = next((v for v in verdicts if v.outcome is Outcome.NOT_JUDGED), verdicts[0])
        base = verdicts[0] if total > 0 else failed
        found.append(
            replace(
                base,
                score=math.fsum(weight * score for weight, score in pairs) / total if total > 0 else None,
                parts={name: (weight, s) for name, (_, weight), s in zip(names, terms, scores, strict=True)},
                metrics={
                    f"{name}_{metric}": number
                    for name, v in zip(names, verdicts, strict=True)
                    for metric, number in v.metrics.items()
                },
                reason=base.reason or failed.reason,
                seconds=math.fsum(v.seconds for v in verdicts),
            )
        )
    return found
