"""The sampling job: N judged responses a problem, through the same engine and verifiers as training.

Everything that asks a model many questions is this job: evaluation, the difficulty of a data set, test-time scaling.
A sample's random numbers depend on (seed, draw, sample, position), so it is the same in one piece, in many, in
shards, or after a kill. The draw is the problem's place in the whole list, not in its shard. The seed of an evaluation
is its own, so that evaluating never disturbs the training run's random numbers.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from magicrl.algorithms.advantages import score_group
from magicrl.evaluation.samples import SampleRow, row_of
from magicrl.evaluation.statistics import Score, score_rows
from magicrl.records import (
    FinishedSample,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    ScoredGroup,
    TokenArray,
)
from magicrl.rollout.judging import Submitted, submit_completions, verdicts_of
from magicrl.rollout.protocol import RolloutEngine
from magicrl_verifiers.records import VerifierService

Encode = Callable[[Problem], TokenArray]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """What is asked of every problem."""

    samples: int  # responses a problem
    temperature: float  # 0 is greedy, and then one sample says all
    max_tokens: int  # the response limit T
    seed: int  # of this job's random numbers, apart from every other's
    shard: tuple[int, int] = (0, 1)  # (i, n): only the problems whose place is i modulo n
    keep_tokens: bool = False  # token ids and entropies in the rows
    draws: Mapping[str, int] | None = None  # by id, where the list may change between calls; None: place in the list

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


def requests_for(
    problems: Sequence[Problem], plan: SamplingPlan, encode: Encode, done: Iterable[SampleRow] = ()
) -> list[RolloutRequest]:
    """A request for what is missing of every problem of the shard; none where nothing is."""
    sampling = SamplingParams(temperature=plan.temperature, max_tokens=plan.max_tokens, seed=plan.seed)
    known = {(row.problem, row.sample) for row in done}
    requests: list[RolloutRequest] = []
    for place, problem in enumerate(problems):
        missing = tuple(index for index in range(plan.samples) if (problem.id, index) not in known)
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


def _spread(requests: Sequence[RolloutRequest], most: int) -> list[RolloutRequest]:
    """At most ``most`` of the requested samples, of as many problems as possible: a pilot of the whole."""
    # first one sample of every problem, then a second of each: `most` may be fewer than the problems
    turns = [(turn, i) for i, request in enumerate(requests) for turn in range(len(request.indices))]
    taken: dict[int, list[int]] = {}
    for turn, i in sorted(turns)[:most]:
        taken.setdefault(i, []).append(requests[i].indices[turn])
    return [replace(requests[i], samples=tuple(chosen)) for i, chosen in sorted(taken.items())]


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

    Judging and writing go on in a thread of their own while others are generated, also where the engine fails or is
    interrupted: every sample that ended is judged and written.

    Args:
        problems: the whole list, ids unique; its order gives the draws.
        plan: what is asked of each.
        engine: has its weights; must not be used by others meanwhile.
        judge: the verifiers.
        encode: a problem's prompt tokens.
        write: appends a row (``SampleFile.append``); where it raises, nothing further is written.
        done: rows that exist already.
        progress: told samples done and samples in all, those that existed included.
        most: generate at most so many, spread over the problems (a pilot); None: all that is missing.

    Raises:
        ValueError: a prompt that does not fit, or ids that stand twice.
    """
    if len({problem.id for problem in problems}) < len(problems):
        raise ValueError("problem ids stand twice; give every problem an id of its own")
    requests = requests_for(problems, plan, encode, done)
    total = plan.wanted(problems)
    finished = total - sum(len(request.indices) for request in requests)
    failed = False
    if progress is not None:
        progress(finished, total)

    def settle(sample: FinishedSample, ticket: Submitted) -> None:
        nonlocal finished, failed
        (verdict,) = verdicts_of(judge, ticket)
        if failed:
            return
        failed = True  # until this row is written
        name, asked = sample.request.problem.id, len(sample.request.prompt_tokens) or None
        keep = plan.keep_tokens
        write(row_of(name, sample.index, sample.completion, verdict, prompt_tokens=asked, keep_tokens=keep))
        finished += 1
        if progress is not None:
            progress(finished, total)
        failed = False

    engine.submit(requests if most is None else _spread(requests, most))
    waiting: deque[Future[None]] = deque()
    # one thread keeps the order; a slow verdict never holds up the engine, a silent engine no verdict
    with ThreadPoolExecutor(1, "magicrl-samples") as writer:
        for sample in engine.finished_samples():
            ticket = submit_completions(judge, sample.request.problem, [sample.completion])
            waiting.append(writer.submit(settle, sample, ticket))
            # an error of the writer shows here and ends the job while samples are still under way
            while waiting and waiting[0].done():
                waiting.popleft().result()
    for future in waiting:
        future.result()


def evaluation_seed(run_seed: int, name: str) -> int:
    """A seed of its own for the evaluation ``name``, independent of the training run's random numbers."""
    # a hash of both: an evaluation does not draw the run's own random numbers
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
) -> list[ScoredGroup]:
    """``samples`` judged responses of every problem, in the problems' order."""
    plan = SamplingPlan(samples=samples, temperature=temperature, max_tokens=max_tokens, seed=seed)
    engine.submit(requests_for(problems, plan, encode))
    pending: list[tuple[RolloutGroup, Submitted]] = []
    for group in engine.finished():
        pending.append((group, submit_completions(judge, group.request.problem, group.completions)))
        if progress:
            progress(len(pending), len(problems))
    # groups come as they finish
    pending.sort(key=lambda item: item[0].request.draw)
    return [score_group(group, verdicts_of(judge, ticket)) for group, ticket in pending]


def score(groups: Sequence[ScoredGroup], pass_at: Sequence[int] = ()) -> Score:
    """The score of judged groups, one a problem.

    Raises:
        ValueError: no group has a judged response, or fewer samples than a k asked for.
    """
    rows: list[list[SampleRow]] = []
    for judged in groups:
        request, completions = judged.group.request, judged.group.completions
        answers = zip(request.indices, completions, judged.verdicts, strict=True)
        rows.append([row_of(request.problem.id, *answer) for answer in answers])
    return score_rows(rows, [judged.group.request.problem.cluster for judged in groups], pass_at=pass_at)
