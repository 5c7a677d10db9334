"""The parts of a run whose workers are elsewhere: what each step's record tells of them, and what was lost."""

from __future__ import annotations

from magicrl.training.protocols import Mending, Observed, Timed, WorkSpan


class Workers:
    """
    Args:
        parts: engine, judge, learner; asked are those that have something to tell.
    """

    def __init__(self, *parts: object) -> None:
        self._parts = parts
        self._told = [0] * len(parts)  # of each one's losses

    def begin_step(self) -> None:
        """Forget what they did since the last step, for tests and validation: a step's figures are the step's."""
        self.observations()
        self.spans()

    def observations(self) -> dict[str, float]:
        """Metrics by key since the last call."""
        return {key: value for p in self._parts if isinstance(p, Observed) for key, value in p.observations().items()}

    def spans(self) -> list[WorkSpan]:
        """When each worker worked, since the last call."""
        return [span for part in self._parts if isinstance(part, Timed) for span in part.spans()]

    def losses(self) -> list[str]:
        """What was lost and replaced since the last call, each named with the reason."""
        found: list[str] = []
        for place, part in enumerate(self._parts):
            if isinstance(part, Mending):
                found += part.lost[self._told[place] :]
                self._told[place] = len(part.lost)
        return found
