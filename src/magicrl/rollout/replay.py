"""An engine that feeds recorded rollouts: the learner's part of a run again, without generating."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from magicrl.records import FinishedSample, RolloutGroup, RolloutRequest


class ReplayEngine:
    """A `magicrl.rollout.protocol.RolloutEngine` that answers each request with the recorded group of its draw.

    Completions keep what was recorded (tokens, log-probs, policy version); weights are not used.
    """

    def __init__(self, groups: Iterable[RolloutGroup]) -> None:
        """
        Raises:
            ValueError: a draw stands twice, or there is no group at all.
        """
        self._recorded: dict[int, RolloutGroup] = {}
        for group in groups:
            if self._recorded.setdefault(group.request.draw, group) is not group:
                raise ValueError(f"draw {group.request.draw} was recorded twice")
        if not self._recorded:
            raise ValueError("there are no recorded rollouts to replay")
        self._queue: deque[RolloutRequest] = deque()
        self._version = -1

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        """The longest recorded prompt + limit: what the recording engine has shown to serve."""
        requests = (group.request for group in self._recorded.values())
        return max(len(r.prompt_tokens) + r.sampling.max_tokens for r in requests)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests; all or, on an error, none.

        Raises:
            ValueError: a request that differs from what was recorded for its draw.
        """
        for request in requests:
            self._check(request)
        self._queue.extend(requests)

    def finished(self) -> Iterator[RolloutGroup]:
        """The recorded groups in the order of the requests."""
        while self._queue:
            request = self._queue.popleft()
            yield RolloutGroup(request=request, completions=self._recorded[request.draw].completions)

    def finished_samples(self) -> Iterator[FinishedSample]:
        """The recorded completions in the order of the requests."""
        for group in self.finished():
            for index, completion in zip(group.request.indices, group.completions, strict=True):
                yield FinishedSample(request=group.request, index=index, completion=completion)

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Note the version; the recorded completions keep theirs."""
        del weights
        self._version = version

    def interrupt(self) -> list[RolloutRequest]:
        """Return the unanswered requests in issue order."""
        unanswered = list(self._queue)
        self._queue.clear()
        return unanswered

    def close(self) -> None:
        """Drop the queue."""
        self._queue.clear()

    def _check(self, request: RolloutRequest) -> None:
        draw = request.draw
        if draw not in self._recorded:
            raise ValueError(
                f"draw {draw} (problem {request.problem.id!r}) was not recorded; replay serves the training steps "
                "of the recorded run only: stop where it stopped and leave out validation, test and filter"
            )
        group = self._recorded[draw]
        recorded = group.request
        pairs = {
            "problem": (recorded.problem.id, request.problem.id),
            "prompt": (recorded.prompt_tokens.tolist(), request.prompt_tokens.tolist()),
            "group size": (recorded.group_size, request.group_size),
            "samples": (recorded.indices, request.indices),
            "temperature": (recorded.sampling.temperature, request.sampling.temperature),
        }
        for what, (was, wanted) in pairs.items():
            if was != wanted:
                raise ValueError(
                    f"draw {draw} was recorded with {what} {was}, asked for is {wanted}; replay a run with its own "
                    "data, seed and sampling settings"
                )
        longest = max(len(completion) for completion in group.completions)
        if longest > request.sampling.max_tokens:
            raise ValueError(
                f"draw {draw} was recorded with a response of {longest} tokens, max_tokens is now "
                f"{request.sampling.max_tokens}; replay with the recorded run's stages"
            )
