"""Which problems are worth sampling: the offline and the online filter (recipe, section 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from magicrl.records import ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCount:
    """Correct responses among those that were judged (a truncated response is judged, and wrong)."""

    correct: int
    counted: int

    def __post_init__(self) -> None:
        assert 0 <= self.correct <= self.counted, f"{self.correct} correct of {self.counted}"

    @staticmethod
    def of(group: ScoredGroup) -> PassCount:
        return PassCount(correct=int(group.correct.sum()), counted=int(group.counted.sum()))

    @property
    def all_correct(self) -> bool:
        return 0 < self.counted == self.correct

    @property
    def all_wrong(self) -> bool:
        return self.counted > 0 and self.correct == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterResult:
    """What a filter left and what it took.

    Attributes:
        kept: problems that stay, by their key, in the order given.
        removed: problems that go, likewise.
        all_correct: how many of those because every counted response was correct.
        all_wrong: how many because every counted response was wrong.
        not_judged: how many because no response could be judged.
        table: (correct, counted) -> number of problems, kept and removed alike.
    """

    kept: tuple[str, ...]
    removed: tuple[str, ...]
    all_correct: int
    all_wrong: int
    not_judged: int
    table: Mapping[tuple[int, int], int]


def offline_filter(counts: Mapping[str, PassCount]) -> FilterResult:
    """Drop the problems on which the start model was right never (0/N) or always (N/N).

    N is the number of judged responses. A problem with none is dropped too: nothing shows that it can be judged.

    Raises:
        ValueError: nothing is left.
    """
    wrong = [p for p, c in counts.items() if c.all_wrong]
    correct = [p for p, c in counts.items() if c.all_correct]
    unjudged = [p for p, c in counts.items() if c.counted == 0]
    return _result(counts, correct=correct, wrong=wrong, unjudged=unjudged, what="offline difficulty filter")


def online_filter(last_visits: Mapping[str, PassCount], problems: Iterable[str]) -> FilterResult:
    """At a stage's start drop the prompts that the actor had wholly solved at their last visit.

    A prompt is solved when every counted response of its last visit in the stage before was correct
    (the report says "correctness was 1"; this is that at the sample level). Prompts that were not visited
    stay.

    Args:
        last_visits: ``VisitRecord.last_visits()`` of the stage that ended.
        problems: keys of the present training set; a key that stands twice is one problem.

    Raises:
        ValueError: nothing is left.
    """
    nothing = PassCount(correct=0, counted=0)
    counts = {problem: last_visits.get(problem, nothing) for problem in problems}
    correct = [p for p, c in counts.items() if c.all_correct]
    return _result(counts, correct=correct, wrong=[], unjudged=[], what="online filter")


def _result(
    counts: Mapping[str, PassCount], *, correct: list[str], wrong: list[str], unjudged: list[str], what: str
) -> FilterResult:
    gone = {*correct, *wrong, *unjudged}
    kept = tuple(p for p in counts if p not in gone)
    if not kept:
        raise ValueError(
            f"the {what} leaves none of {len(counts)} problems: {len(correct)} always correct, "
            f"{len(wrong)} never correct, {len(unjudged)} not judged"
        )
    return FilterResult(
        kept=kept,
        removed=tuple(p for p in counts if p in gone),
        all_correct=len(correct),
        all_wrong=len(wrong),
        not_judged=len(unjudged),
        table=dict(sorted(Counter((c.correct, c.counted) for c in counts.values()).items())),
    )


class VisitRecord:
    """Remembers, for the online filter, how each prompt fared at its last visit of the present stage.

    A visit is one draw. Of two draws of a prompt the one with the larger draw number is the later visit,
    whichever finished first.
    """

    def __init__(self) -> None:
        self._visits: dict[str, tuple[int, PassCount]] = {}

    def observe(self, group: ScoredGroup) -> None:
        """Note one scored group, kept or rejected. A visit without a judged response says nothing."""
        count = PassCount.of(group)
        request = group.group.request
        key = request.problem.key
        before = self._visits.get(key)
        if count.counted and (before is None or before[0] <= request.draw):
            self._visits[key] = (request.draw, count)

    def last_visits(self) -> dict[str, PassCount]:
        return {problem: count for problem, (_, count) in self._visits.items()}

    def clear(self) -> None:
        """A new stage begins."""
        self._visits.clear()

    def state(self) -> dict[str, list[int]]:
        """JSON: problem key -> [draw, correct, counted]."""
        return {problem: [draw, c.correct, c.counted] for problem, (draw, c) in self._visits.items()}

    def restore(self, state: Mapping[str, list[int]]) -> None:
        self._visits = {
            problem: (draw, PassCount(correct=correct, counted=counted))
            for problem, (draw, correct, counted) in state.items()
        }


def accuracy_over_all(accuracy: float, kept: int, *, removed_correct: int, removed_wrong: int = 0) -> float:
    """Training accuracy as it would be had no filter removed anything.

    Removed prompts count as what they were removed for (solved: 1, never solved: 0), so that a filter
    that takes the solved prompts away does not look like a fall of accuracy.

    Args:
        accuracy: mean before rejection over the prompts that are still drawn.
        kept: number of those prompts.
        removed_correct: prompts removed as always correct, by either filter.
        removed_wrong: prompts removed as never correct.
    """
    total = kept + removed_correct + removed_wrong
    if total == 0:
        raise ValueError("no problems: accuracy is undefined")
    return (kept * accuracy + removed_correct) / total
