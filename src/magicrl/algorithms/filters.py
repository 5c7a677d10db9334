"""Filters that drop problems not worth sampling: the offline and the online filter (recipe, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from magicrl.records import ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCount:
    """Correct responses among the judged ones. A truncated response is judged, and wrong."""

    correct: int
    counted: int

    def __post_init__(self) -> None:
        assert 0 <= self.correct <= self.counted, f"{self.correct} correct of {self.counted}"

    @staticmethod
    def of(group: ScoredGroup) -> PassCount:
        """Return the counts of one group."""
        # `correct` is False for a response that was truncated or not judged.
        return PassCount(correct=int(group.correct.sum()), counted=int(group.counted.sum()))

    @property
    def all_correct(self) -> bool:
        """Whether all judged responses are correct. 0 of 0 does not count as solved."""
        return 0 < self.counted == self.correct

    @property
    def all_wrong(self) -> bool:
        """Whether there are judged responses and all are wrong."""
        return self.counted > 0 and self.correct == 0


def offline_filter(counts: Mapping[str, PassCount]) -> dict[str, PassCount]:
    """Return the problems that the initial checkpoint solved never (0/N) or always (N/N), which are dropped.

    N is the number of judged responses. A problem without one is dropped too, because it may not be possible to judge
    it.

    Raises:
        ValueError: No problem remains.
    """
    return _removed(counts, lambda c: c.all_correct or c.correct == 0, "offline difficulty filter")


def online_filter(last_visits: Mapping[str, PassCount], problems: Iterable[str]) -> dict[str, PassCount]:
    """Return, at the start of a stage, the prompts that the policy solved completely at their last visit. Drop these.

    A prompt is solved if every counted response of its last visit in the previous stage was correct (the report says
    "correctness was 1", which this states per sample). Prompts without a visit stay.

    Args:
        last_visits: ``VisitRecord.last_visits()`` of the stage that ended.
        problems: Keys of the current training set. A repeated key is one problem.

    Raises:
        ValueError: No problem remains.
    """
    # 0 of 0 is not all correct, so a prompt without a visit stays.
    nothing = PassCount(correct=0, counted=0)
    counts = {problem: last_visits.get(problem, nothing) for problem in problems}
    return _removed(counts, lambda c: c.all_correct, "online filter")


def _removed(counts: Mapping[str, PassCount], unwanted: Callable[[PassCount], bool], what: str) -> dict[str, PassCount]:
    gone = {problem: c for problem, c in counts.items() if unwanted(c)}
    if len(gone) == len(counts):
        correct, wrong, unjudged = reasons(gone.values())
        raise ValueError(
            f"the {what} leaves none of {len(counts)} problems: {correct} always correct, {wrong} never correct, "
            f"{unjudged} not judged"
        )
    return gone


def reasons(removed: Collection[PassCount]) -> tuple[int, int, int]:
    """Return how many of the removed problems were always solved, never solved, and not judged."""
    return (
        sum(c.all_correct for c in removed),
        sum(c.all_wrong for c in removed),
        sum(not c.counted for c in removed),
    )


class VisitRecord:
    """Result of each prompt at its last visit in the current stage, for the online filter."""

    def __init__(self) -> None:
        self._visits: dict[str, tuple[int, PassCount]] = {}

    def observe(self, group: ScoredGroup) -> None:
        """Record one scored group, kept or rejected. A visit without a judged response is ignored."""
        count, request = PassCount.of(group), group.group.request
        before = self._visits.get(request.problem.key)
        # The draw with the larger number is the later visit, whichever finished first.
        if count.counted and (before is None or before[0] <= request.draw):
            self._visits[request.problem.key] = (request.draw, count)

    def last_visits(self) -> dict[str, PassCount]:
        """Return the counts of the last visit by problem key."""
        return {problem: count for problem, (_, count) in self._visits.items()}

    def clear(self) -> None:
        """Forget all visits, at the start of a stage."""
        self._visits.clear()

    def state(self) -> dict[str, list[int]]:
        """Return the visits as JSON: problem key -> [draw, correct, counted]."""
        return {problem: [draw, c.correct, c.counted] for problem, (draw, c) in self._visits.items()}

    def restore(self, state: Mapping[str, list[int]]) -> None:
        """Restore what ``state`` returned."""
        self._visits = {
            problem: (draw, PassCount(correct=correct, counted=counted))
            for problem, (draw, correct, counted) in state.items()
        }


def accuracy_over_all(accuracy: float, kept: int, *, removed_correct: int) -> float:
    """Return the training accuracy as it would be without the online filter.

    A removed prompt counts as solved, so that removing solved prompts does not look like a loss of accuracy.

    Args:
        accuracy: Mean before rejection over the prompts that are still drawn.
        kept: Number of these prompts.
        removed_correct: Number of prompts removed as always correct.
    """
    total = kept + removed_correct
    if total == 0:
        raise ValueError("no problems: accuracy is undefined")
    return (kept * accuracy + removed_correct) / total
