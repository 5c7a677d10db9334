"""Requests in flight: checks, seeds, groups with unfinished samples, verdicts, completions in checkpoints."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from pydantic import TypeAdapter

from magicrl.records import (
    Completion,
    Episode,
    ExpertArray,
    FinishedSample,
    FinishReason,
    Problem,
    RolloutGroup,
    RolloutRequest,
    Verdict,
    VersionSpans,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.sampling import philox4x32
from magicrl_verifiers.records import VerifierService

EPISODE = TypeAdapter(Episode)
"""JSON form of an episode, in checkpoints and in recordings."""
_NO_POSITION = 0xFFFFFFFF  # no token has this position or one just below it, so seeds share no words with `uniforms`


def sample_seed(seed: int, draw: int, sample: int, *, known: int = 0, bits: int = 63) -> int:
    """Return the seed of one sample's own generator, a function of (seed, draw, sample, known).

    Args:
        seed: the run seed.
        draw: number of the draw within the run.
        sample: index of the sample within its group.
        known: response tokens that are given, not sampled. With the same seed the first token after them would depend
            on the same random number as the first token of the response.
        bits: 63 for vLLM, 31 for servers, some of which keep an int32.

    Example:
        >>> sample_seed(0, 0, 0, bits=31) == sample_seed(0, 0, 0, bits=31) != sample_seed(0, 0, 1, bits=31)
        True
        >>> sample_seed(0, 0, 0, known=5) != sample_seed(0, 0, 0)
        True
    """
    words = (_NO_POSITION - known, sample, draw & 0xFFFFFFFF, draw >> 32, seed & 0xFFFFFFFF, seed >> 32)
    c0, c1, c2, c3, k0, k1 = (np.array(value, np.uint64) for value in words)
    low, high, *_ = philox4x32((c0, c1, c2, c3), (k0, k1))
    return (int(low) | int(high) << 32) & ((1 << bits) - 1)


def check_request(request: RolloutRequest, max_context: int, *, valid_vocab: int | None = None) -> None:
    """Raise ``ValueError``, naming the problem, for a request that no engine could serve.

    With ``valid_vocab`` the engine takes tokens and needs at least one of them.
    """
    prompt, limit = len(request.prompt_tokens), request.sampling.max_tokens
    name = f"problem {request.problem.id!r}"
    if valid_vocab is not None and not prompt:
        raise ValueError(f"{name} has an empty prompt; a model needs at least one token to continue")
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
    if valid_vocab is not None:
        low, high = int(request.prompt_tokens.min()), int(request.prompt_tokens.max())
        if low < 0 or high >= valid_vocab:
            raise ValueError(f"{name}: prompt tokens {low}..{high} leave the vocabulary of {valid_vocab}")


@dataclass(kw_only=True, slots=True)
class GroupProgress:
    """A submitted request and its completions so far."""

    order: int  # issue order, unique within the engine
    request: RolloutRequest
    to_start: list[int] = field(init=False)  # sample indices that need a row, ascending
    started: int = 0  # number of these that have or had a row
    done: dict[int, Completion] = field(default_factory=dict[int, Completion])  # by sample index, in the order they end
    partial: dict[int, Completion] = field(default_factory=dict[int, Completion])  # beginnings of interrupted samples
    began: float = 0.0  # clock at the start of the prompt
    version: int = -1  # policy version at that time
    experts: ExpertArray | None = None  # experts of the prompt's tokens, where they are recorded
    place: int = -1  # cache slot of the prompt; -1 before the group has started

    def __post_init__(self) -> None:
        for index, completion in self.request.begun:
            self.know(index, completion)
        self.to_start = [index for index in self.request.indices if index not in self.done]

    def know(self, index: int, completion: Completion) -> None:
        """Take a sample's completion, or its beginning if it was interrupted."""
        whole = completion.finish_reason is not FinishReason.ABORTED
        # An aborted completion is a beginning: the engine continues it after its last token, with the same random
        # numbers.
        (self.done if whole else self.partial)[index] = completion

    @property
    def waiting(self) -> int:
        """Number of samples that have not started."""
        return len(self.to_start) - self.started

    @property
    def complete(self) -> bool:
        return len(self.done) == len(self.request.indices)

    def completed_by(self, index: int) -> bool:
        """Return whether the group is complete and this sample was its last."""
        return self.complete and next(reversed(self.done)) == index

    def record(self) -> RolloutGroup:
        """Return a complete group as a record."""
        return RolloutGroup(request=self.request, completions=tuple(self.done[index] for index in self.request.indices))


EndedSample: TypeAlias = tuple[GroupProgress, int]
"""A group and the index of one of its finished samples."""


@dataclass(kw_only=True, slots=True)
class OpenGroups:
    """Groups with unfinished samples, and finished samples that were not yielded yet."""

    open: dict[int, GroupProgress] = field(default_factory=dict[int, GroupProgress])  # by issue order
    issued: int = 0  # groups so far
    ready: deque[EndedSample] = field(default_factory=deque[EndedSample])  # samples that may be yielded
    aside: deque[EndedSample] = field(default_factory=deque[EndedSample])  # those of groups before ``first``
    first: int = 0  # issue order of the first group that may be yielded now

    @property
    def awaited(self) -> bool:
        """Whether a group that may be yielded has unfinished samples."""
        return any(order >= self.first for order in self.open)

    def take_in(self, requests: Sequence[RolloutRequest]) -> list[GroupProgress]:
        """Open a group for each request and return the groups that have samples to generate."""
        taken = [GroupProgress(order=self.issued + i, request=request) for i, request in enumerate(requests)]
        self.issued += len(taken)
        for group in taken:
            self.open[group.order] = group
            if group.complete:  # an interrupt returned it before it was yielded
                self.emit(group, next(reversed(group.done)))
        return [group for group in taken if not group.complete]

    def file(self, group: GroupProgress, index: int, completion: Completion) -> None:
        """Keep a finished sample until it is yielded, and close its group if it is complete."""
        assert index not in group.done, "a sample ends once"
        group.done[index] = completion
        self.emit(group, index)

    def emit(self, group: GroupProgress, index: int) -> None:
        """Queue a sample of ``group.done`` to be yielded, with the group if it is complete."""
        if group.complete:
            del self.open[group.order]
        # a sample of an older group that ends during an evaluation is yielded after the evaluation
        (self.ready if group.order >= self.first else self.aside).append((group, index))

    def run(self, step: Callable[[], object]) -> Iterator[EndedSample]:
        """Yield finished samples and call ``step`` for more until no group is awaited."""
        while self.ready or self.awaited:
            while self.ready:
                yield self.ready.popleft()
            if self.awaited:
                step()

    def ended(self) -> list[EndedSample]:
        """Return all finished samples, which count as yielded from then on."""
        ended = list(self.ready)
        self.ready.clear()
        return ended

    @contextmanager
    def set_aside(self) -> Generator[None]:
        """Inside this context, yield only groups that were submitted in it."""
        before, self.first = self.first, self.issued
        # Samples that ended before keep their order in front of those that end inside the context.
        self.aside, self.ready = deque((*self.aside, *self.ready)), deque()
        try:
            yield
        finally:
            self.first = before
            self.ready.extend(self.aside)
            self.aside.clear()

    def unyielded(self) -> list[GroupProgress]:
        """Return every group with a sample that was not yielded, in issue order."""
        # A complete group whose last sample was not yielded is no longer open, but a checkpoint must keep it.
        groups = {group.order: group for group, _ in (*self.aside, *self.ready)} | self.open
        return [group for _, group in sorted(groups.items())]

    def drop(self, first: int = 0) -> None:
        """Forget every group from issue order ``first`` on."""
        self.open = {order: group for order, group in self.open.items() if order < first}
        self.ready, self.aside = (
            deque(sample for sample in samples if sample[0].order < first) for samples in (self.ready, self.aside)
        )


class SchedulingEngine(RolloutEngine):
    """An engine with many samples in flight, in ``_groups``; a subclass implements `_advance`."""

    _groups: OpenGroups

    def finished(self) -> Iterator[RolloutGroup]:
        for group, index in self._groups.run(self._advance):
            if group.completed_by(index):
                yield group.record()

    def finished_samples(self) -> Iterator[FinishedSample]:
        for sample in self._groups.run(self._advance):
            yield _sample(sample)

    def turn(self) -> list[FinishedSample]:
        if self._groups.awaited:
            self._advance()
        return [_sample(sample) for sample in self._groups.ended()]

    def advance(self, tokens: int) -> list[RolloutGroup]:
        return [group.record() for group, index in self._ahead(tokens) if group.completed_by(index)]

    def advance_samples(self, tokens: int) -> list[FinishedSample]:
        return [_sample(sample) for sample in self._ahead(tokens)]

    def snapshot(self) -> Mapping[str, Any]:
        """Return the tokens of the responses in flight. Everything else is computed again on `resume`."""
        return pack_begun(self._unfinished(keep=True))

    def resume(self, snapshot: Mapping[str, Any], requests: Sequence[RolloutRequest]) -> None:
        """Continue each response in the snapshot after its last token; start the others from their beginning."""
        self.submit(with_begun(snapshot, requests))

    def _advance(self) -> None:
        """Work, or wait for workers, until a sample may have ended."""
        raise NotImplementedError

    def _ahead(self, tokens: int) -> list[EndedSample]:
        """Return the samples that have ended by now; ``tokens`` as in `advance`."""
        # by tokens, not by time, so that an asynchronous run stays repeatable
        target = self.sampled_tokens() + tokens if tokens else 0
        while tokens and self._groups.awaited and self.sampled_tokens() < target:
            self._advance()
        return self._groups.ended()

    def _running(self) -> Iterator[tuple[GroupProgress, int, Completion]]:
        """Yield the group, index and tokens so far of each sample in flight."""
        return iter(())

    def _unfinished(self, *, keep: bool) -> list[RolloutRequest]:
        """Return requests that were not yielded, in issue order; with ``keep`` they hold their responses so far."""
        groups = self._groups.unyielded()
        if not keep:
            return [group.request for group in groups]
        begun = {group.order: group.partial | group.done for group in groups}
        for group, index, completion in self._running():
            begun[group.order][index] = completion
        return [replace(group.request, begun=tuple(sorted(begun[group.order].items()))) for group in groups]


def _sample(ended: EndedSample) -> FinishedSample:
    group, index = ended
    return FinishedSample(request=group.request, index=index, completion=group.done[index])


def joined_spans(first: VersionSpans, then: VersionSpans) -> VersionSpans:
    """Concatenate spans and merge two neighbours of one version.

    Example:
        >>> joined_spans(((0, 3),), ((0, 2), (1, 4)))
        ((0, 5), (1, 4))
    """
    if not first or not then or first[-1][0] != then[0][0]:
        return (*first, *then)
    return (*first[:-1], (then[0][0], first[-1][1] + then[0][1]), *then[1:])


def pack_completions(prefix: str, completions: Sequence[Completion]) -> dict[str, Any]:
    """Pack completions for a checkpoint.

    Returns:
        Concatenated arrays under ``prefix/tokens``, ``/logprobs``, ``/entropies`` and ``/experts``; the other fields of
        each completion under ``prefix/rows``.
    """

    def joined(arrays: Sequence[Any], dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype))

    def entropies(c: Completion) -> Any:
        return np.full(len(c), np.nan) if c.sampler_entropies is None else c.sampler_entropies

    rows = [
        {
            "tokens": len(c),
            "text": c.text,
            "entropies": c.sampler_entropies is not None,
            "finish_reason": c.finish_reason.value,
            "policy_version": c.policy_version,
            "seconds": c.seconds,
            "version_spans": [list(span) for span in c.version_spans],
            **({} if c.episode is None else {"episode": asdict(c.episode)}),
            **({} if c.experts is None else {"experts": list(c.experts.shape)}),
        }
        for c in completions
    ]
    # Flat arrays, because responses differ in length. The shapes are in the rows.
    experts = [c.experts.reshape(-1) for c in completions if c.experts is not None]
    return {
        **({f"{prefix}/experts": torch.from_numpy(np.concatenate(experts))} if experts else {}),
        f"{prefix}/tokens": joined([c.tokens for c in completions], np.int32),
        f"{prefix}/logprobs": joined([c.sampler_logprobs for c in completions], np.float32),
        f"{prefix}/entropies": joined([entropies(c) for c in completions], np.float32),
        f"{prefix}/rows": rows,
    }


def unpack_completions(prefix: str, state: Mapping[str, Any]) -> list[Completion]:
    """Return the completions that `pack_completions` packed."""
    rows = state[f"{prefix}/rows"]
    if not rows:
        return []  # np.split would make one empty array of none
    cuts = np.cumsum([row["tokens"] for row in rows])[:-1]
    arrays = [np.split(state[f"{prefix}/{name}"].numpy(), cuts) for name in ("tokens", "logprobs", "entropies")]
    shapes = [row.get("experts") for row in rows]
    ends = np.cumsum([0 if shape is None else math.prod(shape) for shape in shapes])[:-1]
    experts = np.split(state[f"{prefix}/experts"].numpy() if any(shapes) else np.zeros(0, np.uint8), ends)
    return [
        Completion(
            tokens=frozen_tokens(tokens),
            text=row["text"],
            sampler_logprobs=frozen_floats(logprobs),
            sampler_entropies=frozen_floats(entropies) if row["entropies"] else None,
            finish_reason=FinishReason(row["finish_reason"]),
            policy_version=int(row["policy_version"]),
            seconds=float(row["seconds"]),
            version_spans=tuple((int(version), int(count)) for version, count in row["version_spans"]),
            episode=EPISODE.validate_python(row["episode"]) if "episode" in row else None,
            experts=None if shape is None else chosen.reshape(shape),
        )
        for row, shape, chosen, tokens, logprobs, entropies in zip(rows, shapes, experts, *arrays, strict=True)
    ]


def pack_begun(requests: Iterable[RolloutRequest]) -> dict[str, Any]:
    """Pack the responses so far (``begun``) of unfinished requests; empty where there are none."""
    held = [(request, index, completion) for request in requests for index, completion in request.begun]
    if not held:
        return {}
    places = [[request.draw, index, request.offset] for request, index, _ in held]
    return {"places": places, **pack_completions("begun", [completion for *_, completion in held])}


def with_begun(snapshot: Mapping[str, Any], requests: Iterable[RolloutRequest]) -> list[RolloutRequest]:
    """Return ``requests`` with the responses so far that `pack_begun` packed.

    The snapshot of another engine without such responses changes nothing: a run may resume with or without
    ``[cluster]``.
    """
    begun: dict[tuple[int, int, int], Completion] = {}
    if "places" in snapshot:
        for place, completion in zip(snapshot["places"], unpack_completions("begun", snapshot), strict=True):
            draw, index, offset = (*map(int, place), 0)[:3]  # older snapshots have no offset
            begun[draw, offset, index] = completion

    def known(request: RolloutRequest) -> tuple[tuple[int, Completion], ...]:
        # Look up by draw and not by position: a resumed run may submit fewer requests than the snapshot has.
        keys = ((index, (request.draw, request.offset, index)) for index in request.indices)
        return tuple((index, begun[key]) for index, key in keys if key in begun)

    return [replace(request, begun=known(request)) for request in requests]


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
