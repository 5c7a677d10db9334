"""What engines with a scheduler of their own (a server, vLLM) share: seeds, checks, open groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from magicrl.records import Completion, FinishedSample, RolloutGroup, RolloutRequest
from magicrl.rollout.randomness import philox4x32
from magicrl.rollout.rows import GroupProgress

_NO_POSITION = 0xFFFFFFFF  # no token has this position nor those just below: a seed's words are nobody's uniforms


def sample_seed(seed: int, draw: int, sample: int, *, known: int = 0, bits: int = 63) -> int:
    """The seed of one sample's own generator, a function of (seed, draw, sample, known) alone.

    Args:
        seed: the run seed, up to 64 bits; ``draw`` likewise.
        draw: the request's draw.
        sample: index within the request.
        known: tokens of the response that are given, not sampled: were the generator to start anew with the same seed,
            the token after them would hang on the same random number as the first one.
        bits: at most this many, counted from the lowest: 63 for vLLM, 31 for servers, some of which keep an int32.

    Example:
        >>> sample_seed(0, 0, 0, bits=31) == sample_seed(0, 0, 0, bits=31) != sample_seed(0, 0, 1, bits=31)
        True
        >>> sample_seed(0, 0, 0, known=5) != sample_seed(0, 0, 0)
        True
    """
    word = np.uint64
    low, high, *_ = philox4x32(
        (np.array(_NO_POSITION - known, word), np.array(sample, word), _low(draw), _high(draw)),
        (_low(seed), _high(seed)),
    )
    return (int(low) | int(high) << 32) & ((1 << bits) - 1)


def _low(value: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(value & 0xFFFFFFFF, np.uint64)


def _high(value: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(value >> 32, np.uint64)


def check_request(request: RolloutRequest, max_context: int, *, valid_vocab: int | None = None) -> None:
    """Raise ``ValueError``, naming the problem, for a request that no engine could serve.

    Args:
        request: what is asked.
        max_context: most prompt + response tokens.
        valid_vocab: tokens from here on do not exist; None where the vocabulary is not known.
    """
    prompt, limit = len(request.prompt_tokens), request.sampling.max_tokens
    name = f"problem {request.problem.id!r}"
    if prompt + limit > max_context:
        raise ValueError(
            f"{name}: prompt of {prompt} tokens + max_tokens {limit} exceeds the context of {max_context} "
            "tokens; lower max_tokens (T) or drop the problem"
        )
    if request.group_size < 1 or request.draw < 0 or request.sampling.seed < 0:
        raise ValueError(
            f"{name}: group_size must be positive, draw and seed not negative; got "
            f"{request.group_size}, {request.draw}, {request.sampling.seed}"
        )
    wanted = request.indices
    if not wanted or list(wanted) != sorted(set(wanted)) or wanted[0] < 0 or wanted[-1] >= request.group_size:
        raise ValueError(f"{name}: samples must be ascending indices below {request.group_size}, got {wanted}")
    if valid_vocab is not None and prompt:
        low, high = int(request.prompt_tokens.min()), int(request.prompt_tokens.max())
        if low < 0 or high >= valid_vocab:
            raise ValueError(f"{name}: prompt tokens {low}..{high} leave the vocabulary of {valid_vocab}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Filed:
    """A finished sample and its group; ``last``: the group was complete with it."""

    group: GroupProgress
    sample: FinishedSample
    last: bool


@dataclass(kw_only=True, slots=True)
class OpenGroups:
    """Every group with unfinished samples, in issue order.

    Attributes:
        open: groups by issue order.
        issued: groups taken in so far.
    """

    open: dict[int, GroupProgress] = field(default_factory=dict[int, GroupProgress])
    issued: int = 0

    def take_in(self, requests: Sequence[RolloutRequest]) -> list[GroupProgress]:
        """Open a group for each request."""
        groups: list[GroupProgress] = []
        for request in requests:
            group = GroupProgress(order=self.issued, request=request)
            self.open[group.order] = group
            self.issued += 1
            groups.append(group)
        return groups

    def file(self, group: GroupProgress, index: int, completion: Completion) -> Filed:
        """File a finished sample; a group that is complete is closed."""
        assert index not in group.done, "a sample ends once"
        group.done[index] = completion
        return self.close(group, index, completion)

    def close(self, group: GroupProgress, index: int, completion: Completion) -> Filed:
        """Close a group if it is complete with this sample of it."""
        if group.complete:
            del self.open[group.order]
        sample = FinishedSample(request=group.request, index=index, completion=completion)
        return Filed(group=group, sample=sample, last=group.complete)

    def drop(self) -> list[RolloutRequest]:
        """Close every group; the requests that were unfinished, in issue order."""
        requests = [self.open[order].request for order in sorted(self.open)]
        self.open.clear()
        return requests


@dataclass(kw_only=True, slots=True)
class FiledGroups:
    """Open groups, and what has ended of them and was not yielded yet, of an engine that works ahead.

    Attributes:
        groups: those with unfinished samples.
        ready: samples that may be yielded.
        aside: samples that may not be yielded now: of groups before ``first``.
        first: issue order of the first group that may be yielded now.
    """

    groups: OpenGroups = field(default_factory=OpenGroups)
    ready: deque[Filed] = field(default_factory=deque[Filed])
    aside: deque[Filed] = field(default_factory=deque[Filed])
    first: int = 0

    @property
    def open(self) -> dict[int, GroupProgress]:
        """Groups with unfinished samples by issue order."""
        return self.groups.open

    @property
    def awaited(self) -> bool:
        """Whether a group is under way that may be yielded."""
        return any(order >= self.first for order in self.open)

    def take_in(self, requests: Sequence[RolloutRequest]) -> list[GroupProgress]:
        """Open a group for each request; those with samples to make."""
        taken = self.groups.take_in(requests)
        for group in [group for group in taken if group.complete]:  # an interrupt returned it before it was yielded
            index, completion = list(group.done.items())[-1]
            self.ready.append(self.groups.close(group, index, completion))
        return [group for group in taken if not group.complete]

    def file(self, group: GroupProgress, index: int, completion: Completion) -> None:
        """File a finished sample until it is yielded."""
        waiting = self.ready if group.order >= self.first else self.aside
        waiting.append(self.groups.file(group, index, completion))

    def run(self, step: Callable[[], object]) -> Iterator[Filed]:
        """Yield what is ready, and call ``step`` for more, until nothing is awaited."""
        while self.ready or self.awaited:
            while self.ready:
                yield self.ready.popleft()
            if self.awaited:
                step()

    def ended(self) -> list[Filed]:
        """Everything that is ready, which is thereby yielded."""
        ended = list(self.ready)
        self.ready.clear()
        return ended

    @contextmanager
    def set_aside(self) -> Generator[None]:
        """Within it only groups that are taken in within are yielded."""
        before, self.first = self.first, self.groups.issued
        self.aside.extend(self.ready)
        self.ready.clear()
        try:
            yield
        finally:
            self.first = before
            self.ready.extend(self.aside)
            self.aside.clear()

    def unyielded(self) -> dict[int, GroupProgress]:
        """Every group of which a sample was not yielded, by issue order."""
        return {filed.group.order: filed.group for filed in (*self.aside, *self.ready)} | self.open

    def drop(self, first: int = 0) -> None:
        """Forget every group from issue order ``first`` on."""
        for order in [order for order in self.open if order >= first]:
            del self.open[order]
        self.ready = deque(filed for filed in self.ready if filed.group.order < first)
        self.aside = deque(filed for filed in self.aside if filed.group.order < first)


def group_of(group: GroupProgress) -> RolloutGroup:
    """The record of a complete group."""
    return RolloutGroup(request=group.request, completions=tuple(group.done[index] for index in group.request.indices))
