"""The sampling job: N judged responses a problem, through the same engine and verifiers as training.

Everything that asks a model many questions is this job: evaluation, the difficulty of a data set, test-time scaling.
A sample's random numbers depend on (seed, draw, sample, position), so it is the same in one piece, in many, in
shards, or after a kill. The draw is the problem's place in the whole list, not in its shard. The seed of an evaluation
is its own, so that evaluating never disturbs the training run's random numbers.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from magicrl.evaluation.samples import SampleRow, row_of
from magicrl.evaluation.statistics import Score, score_rows
from magicrl.records import (
    FinishedSample,
    Outcome,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    TokenArray,
    Verdict,
)
from magicrl.rollout.protocol import RolloutEngine
from magicrl.verifiers.base import VerifierService

LOOK_EVERY = 1.0
"""Seconds between two looks for verdicts while the engine is silent."""


class Settling:
    """Takes samples as they end and hands each on with its verdict.

    Leaving the block waits for the verdicts of all that were added, also where the engine failed or was interrupted.

    Args:
        judge: the verifiers.
        judged: gets each sample and its verdict, from one thread at a time.
        look_every: seconds of the timer.
    """

    def __init__(
        self,
        judge: VerifierService,
        judged: Callable[[FinishedSample, Verdict], None],
        *,
        look_every: float,
    ) -> None:
        self._judge = judge
        self._judged = judged
        self._every = look_every
        self._waiting: deque[tuple[FinishedSample, Any]] = deque()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._timer = threading.Thread(target=self._look, name="magicrl-settling", daemon=True)

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def add(self, sample: FinishedSample) -> None:
        """Have a sample judged, and hand on those that are.

        Raises:
            BaseException: what ``judged`` raised, here or in the timer.
        """
        with self._lock:
            self._raise_failure()
            self._waiting.append((sample, self._judge.submit(sample.request.problem, [sample.completion.text])))
            self._settle()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._timer.join()
        while self._waiting:
            self._hand_on()
        if error is None:
            self._raise_failure()

    def _look(self) -> None:
        while not self._over.wait(self._every):
            with self._lock:
                try:
                    self._settle()
                except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                    self._failure = error
                    return

    def _settle(self) -> None:
        while self._waiting and self._judge.ready(self._waiting[0][1]):
            self._hand_on()

    def _hand_on(self) -> None:
        sample, ticket = self._waiting.popleft()
        (verdict,) = self._judge.result(ticket)
        self._judged(sample, verdict)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


Encode = Callable[[Problem], TokenArray]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """What is asked of every problem.

    Attributes:
        samples: N responses a problem.
        temperature: tau; 0 is greedy, and then one sample says all.
        max_tokens: the response limit T.
        seed: of this job's random numbers, apart from every other's.
        shard: ``(i, n)``: only the problems whose place is i modulo n.
        keep_tokens: keep token ids and entropies in the rows.
        draws: the draw of each problem by id, where the list may change between calls; None: its place in the list.
    """

    samples: int
    temperature: float
    max_tokens: int
    seed: int
    shard: tuple[int, int] = (0, 1)
    keep_tokens: bool = False
    draws: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        index, count = self.shard
        if not 0 <= index < count:
            raise ValueError(f"shard {index} of {count} does not exist; shards are numbered from 0")
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")

    def owns(self, place: int) -> bool:
        """Whether the problem at ``place`` of the whole list is this shard's."""
        return place % self.shard[1] == self.shard[0]

    def wanted(self, problems: Sequence[Problem]) -> int:
        """Samples of this shard in all."""
        return self.samples * sum(self.owns(place) for place in range(len(problems)))


def samples_by_problem(rows: Iterable[SampleRow]) -> dict[str, set[int]]:
    """Which samples of each problem exist."""
    known: dict[str, set[int]] = {}
    for row in rows:
        known.setdefault(row.problem, set()).add(row.sample)
    return known


def requests_for(
    problems: Sequence[Problem], plan: SamplingPlan, encode: Encode, done: Mapping[str, set[int]]
) -> list[RolloutRequest]:
    """A request for what is missing of every problem of the shard; none where nothing is."""
    sampling = SamplingParams(temperature=plan.temperature, max_tokens=plan.max_tokens, seed=plan.seed)
    requests: list[RolloutRequest] = []
    for place, problem in enumerate(problems):
        missing = tuple(index for index in range(plan.samples) if index not in done.get(problem.id, ()))
        if plan.owns(place) and missing:
            requests.append(
                RolloutRequest(
                    draw=place if plan.draws is None else plan.draws[problem.id],
                    problem=problem,
                    prompt_tokens=encode(problem),
                    group_size=plan.samples,
                    sampling=sampling,
                    samples=None if len(missing) == plan.samples else missing,
                )
            )
    return requests


def spread(requests: Sequence[RolloutRequest], most: int) -> list[RolloutRequest]:
    """At most ``most`` of the requested samples, of as many problems as possible: a pilot of the whole."""
    taken: list[list[int]] = [[] for _ in requests]
    left = most
    for turn in range(max((len(request.indices) for request in requests), default=0)):
        for chosen, request in zip(taken, requests, strict=True):
            if left and turn < len(request.indices):
                chosen.append(request.indices[turn])
                left -= 1
    pairs = zip(requests, taken, strict=True)
    return [replace(request, samples=tuple(chosen)) for request, chosen in pairs if chosen]


def run_job(
    problems: Sequence[Problem],
    plan: SamplingPlan,
    engine: RolloutEngine,
    judge: VerifierService,
    encode: Encode,
    *,
    write: Callable[[SampleRow], None],
    done: Iterable[SampleRow] = (),
    progress: Progress | None = None,
    most: int | None = None,
) -> None:
    """Generate and judge every sample that is missing; ``write`` gets each row as soon as it is judged.

    Judging goes on while others are generated: a row is written once it and those that ended before it are judged,
    also where the engine is silent for long (``write`` and ``progress`` are then called from another thread, never
    from two at once).

    Args:
        problems: the whole list, ids unique; its order gives the draws.
        plan: what is asked of each.
        engine: has its weights; must not be used by others meanwhile.
        judge: the verifiers.
        encode: a problem's prompt tokens.
        write: appends a row (``SampleFile.append``).
        done: rows that exist already.
        progress: told samples done and samples in all, those that existed included.
        most: generate at most so many, spread over the problems (a pilot); None: all that is missing.

    Raises:
        ValueError: a prompt that does not fit, or ids that stand twice.
    """
    if len({problem.id for problem in problems}) < len(problems):
        raise ValueError("problem ids stand twice; give every problem an id of its own")
    requests = requests_for(problems, plan, encode, samples_by_problem(done))
    total = plan.wanted(problems)
    finished = total - sum(len(request.indices) for request in requests)

    def judged(sample: FinishedSample, verdict: Verdict) -> None:
        nonlocal finished
        name, asked = sample.request.problem.id, len(sample.request.prompt_tokens) or None
        keep = plan.keep_tokens
        write(row_of(name, sample.index, sample.completion, verdict, prompt_tokens=asked, keep_tokens=keep))
        finished += 1
        if progress is not None:
            progress(finished, total)

    if progress is not None:
        progress(finished, total)
    engine.submit(requests if most is None else spread(requests, most))
    with Settling(judge, judged, look_every=LOOK_EVERY) as settling:
        for sample in engine.finished_samples():
            settling.add(sample)


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
