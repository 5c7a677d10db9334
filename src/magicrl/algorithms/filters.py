"""Which problems are worth sampling: the offline and the online filter (recipe, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
        # `correct` is False where a response was cut or not judged
        return PassCount(correct=int(group.correct.sum()), counted=int(group.counted.sum()))

    @property
    def all_correct(self) -> bool:
        # 0 of 0 is not solved: nobody could judge it
        return 0 < self.counted == self.correct

    @property
    def all_wrong(self) -> bool:
        return self.counted > 0 and self.correct == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterResult:
    """Keys of the problems that stay and of those that go, in the order given; and why these go: how many were always
    correct, never correct, not judged at all."""

    kept: tuple[str, ...]
    removed: tuple[str, ...]
    all_correct: int
    all_wrong: int
    not_judged: int


def offline_filter(counts: Mapping[str, PassCount]) -> FilterResult:
    """Drop the problems on which the start model was right never (0/N) or always (N/N).

    N is the number of judged responses. A problem with none is dropped too: nothing shows that it can be judged.

    Raises:
        ValueError: nothing is left.
    """
    return _without(counts, lambda c: c.all_correct or c.correct == 0, "offline difficulty filter")


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
    # 0 of 0 is not all correct, so a prompt without a visit stays
    nothing = PassCount(correct=0, counted=0)
    counts = {problem: last_visits.get(problem, nothing) for problem in problems}
    return _without(counts, lambda c: c.all_correct, "online filter")


def _without(counts: Mapping[str, PassCount], unwanted: Callable[[PassCount], bool], what: str) -> FilterResult:
    # in the order of the problems, so that what stays keeps its order
    gone = {problem: c for problem, c in counts.items() if unwanted(c)}
    result = FilterResult(
        kept=tuple(problem for problem in counts if problem not in gone),
        removed=tuple(gone),
        all_correct=sum(c.all_correct for c in gone.values()),
        all_wrong=sum(c.all_wrong for c in gone.values()),
        not_judged=sum(not c.counted for c in gone.values()),
    )
    if not result.kept:
        raise ValueError(
            f"the {what} leaves none of {len(counts)} problems: {result.all_correct} always correct, "
            f"{result.all_wrong} never correct, {result.not_judged} not judged"
        )
    return result


class VisitRecord:
    """Remembers, for the online filter, how each prompt fared at its last visit of the present stage."""

    def __init__(self) -> None:
        self._visits: dict[str, tuple[int, PassCount]] = {}

    def observe(self, group: ScoredGroup) -> None:
        """Note one scored group, kept or rejected. A visit without a judged response says nothing."""
        count, request = PassCount.of(group), group.group.request
        before = self._visits.get(request.problem.key)
        # of two draws of a prompt the one with the larger number is the later visit, whichever finished first
        if count.counted and (before is None or before[0] <= request.draw):
            self._visits[request.problem.key] = (request.draw, count)

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


def accuracy_over_all(accuracy: float, kept: int, *, removed_correct: int) -> float:
    """Training accuracy as it would be had the online filter removed nothing.

    A removed prompt counts as solved, so that taking the solved ones away does not look like a fall of accuracy.

    Args:
        accuracy: mean before rejection over the prompts that are still drawn.
        kept: number of those prompts.
        removed_correct: prompts removed as always correct.
    """
    total = kept + removed_correct
    if total == 0:
        raise ValueError("no problems: accuracy is undefined")
    return (kept * accuracy + removed_correct) / total
