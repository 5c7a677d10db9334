"""The sampling job: N judged responses per problem, with the engines and verifiers of training.

Evaluation, difficulty estimation and test-time scaling all run this job. A sample's random numbers are a function of
(seed, draw, sample, position), so it is the same in one call, in several, in shards, or after a kill. The draw is the
problem's place in the whole list, not in its shard. Each evaluation has a separate seed, so that it never changes the
random numbers of the training run.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from magicrl.algorithms.advantages import score_group
from magicrl.evaluation.samples import SampleRow, sample_row
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
from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.requests import Submitted, submit_completions, verdicts_of
from magicrl_verifiers.records import VerifierService

Encode = Callable[[Problem], TokenArray]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingPlan:
    """Samples of a job."""

    samples: int  # responses per problem
    sampling: SamplingParams
    shard: tuple[int, int] = (0, 1)  # (i, n): only the problems whose place is i modulo n
    keep_tokens: bool = False  # keep token ids and entropies in the rows
    draws: Mapping[str, int] | None = None  # draws by id, for lists that may change; None: the place in the list

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}")

    def owns(self, place: int) -> bool:
        """Return whether the problem at ``place`` of the whole list belongs to this shard."""
        return place % self.shard[1] == self.shard[0]

    def wanted(self, problems: Sequence[Problem]) -> int:
        """Return the number of samples of this shard."""
        return self.samples * sum(self.owns(place) for place in range(len(problems)))


def requests_for(
    problems: Sequence[Problem], plan: SamplingPlan, encode: Encode, done: Iterable[SampleRow] = ()
) -> list[RolloutRequest]:
    """Return a request for each problem of the shard with missing samples."""
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
                    sampling=plan.sampling,
                    samples=None if len(missing) == plan.samples else missing,
                )
            )
    return requests


def _spread(requests: Sequence[RolloutRequest], most: int) -> list[RolloutRequest]:
    """Select at most ``most`` of the requested samples, from as many problems as possible, for a pilot."""
    # one sample of every problem, then a second of each, since `most` may be less than the number of problems
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
    """Generate and judge all missing samples, and pass each row to ``write`` when it is judged.

    A separate thread judges and writes while other samples are generated. It also does so if the engine fails or is
    interrupted: every finished sample is judged and written.

    Args:
        problems: the whole list, with unique ids; its order gives the draws.
        plan: samples of the job.
        engine: has its weights; must not be used by others during the job.
        judge: the verifiers.
        encode: returns a problem's prompt tokens.
        write: appends a row (``SampleFile.append``); if it raises, no further row is written.
        done: existing rows.
        progress: receives the number of finished samples and of all samples, including existing ones.
        most: generate at most so many samples, spread over the problems (a pilot); None: all missing ones.

    Raises:
        ValueError: a prompt does not fit, or an id appears twice.
    """
    if len({problem.id for problem in problems}) < len(problems):
        raise ValueError("a problem id appears twice; give every problem a unique id")
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
        write(sample_row(name, sample.index, sample.completion, verdict, prompt_tokens=asked, keep_tokens=keep))
        finished += 1
        if progress is not None:
            progress(finished, total)
        failed = False

    engine.submit(requests if most is None else _spread(requests, most))
    waiting: deque[Future[None]] = deque()
    # one thread keeps the order; slow verdicts do not delay the engine, nor a slow engine verdicts
    with ThreadPoolExecutor(1, "magicrl-samples") as writer:
        for sample in engine.finished_samples():
            ticket = submit_completions(judge, sample.request.problem, [sample.completion])
            waiting.append(writer.submit(settle, sample, ticket))
            # raises an error of the writer, which ends the job while samples are still in flight
            while waiting and waiting[0].done():
                waiting.popleft().result()
    for future in waiting:
        future.result()


def evaluation_seed(run_seed: int, name: str) -> int:
    """Return a seed for the evaluation ``name``, independent of the random numbers of the training run."""
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
    """Return ``samples`` judged responses per problem, in the order of the problems."""
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
    engine.submit(requests_for(problems, SamplingPlan(samples=samples, sampling=sampling), encode))
    pending: list[tuple[RolloutGroup, Submitted]] = []
    for group in engine.finished():
        pending.append((group, submit_completions(judge, group.request.problem, group.completions)))
        if progress:
            progress(len(pending), len(problems))
    # groups come in the order in which they finish
    pending.sort(key=lambda item: item[0].request.draw)
    return [score_group(group, verdicts_of(judge, ticket)) for group, ticket in pending]


def score(groups: Sequence[ScoredGroup], pass_at: Sequence[int] = ()) -> Score:
    """Return the score of judged groups, one per problem.

    A k above the judged responses of every group is left out: a few without a verdict must not end a run.

    Raises:
        ValueError: no group has a judged response.
    """
    rows: list[list[SampleRow]] = []
    for judged in groups:
        request, completions = judged.group.request, judged.group.completions
        answers = zip(request.indices, completions, judged.verdicts, strict=True)
        rows.append([sample_row(request.problem.id, *answer) for answer in answers])
    most = max((sum(row.counted for row in of_one) for of_one in rows), default=0)
    clusters = [judged.group.request.problem.cluster for judged in groups]
    return score_rows(rows, clusters, pass_at=[k for k in pass_at if k <= most])
