"""The sampling job: N judged responses a problem, streamed to disk, resumable to the single sample, sharded.

Everything that asks a model many questions is this job: evaluation, the difficulty of a data set, test-time scaling.
A sample's random numbers depend on (seed, draw, sample, position), so it is the same in one piece, in many, in
shards, or after a kill. The draw is the problem's place in the whole list, not in its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from magicrl.evaluation.samples import SampleRow, row_of
from magicrl.evaluation.settling import LOOK_EVERY, Settling
from magicrl.records import FinishedSample, Problem, RolloutRequest, SamplingParams, TokenArray, Verdict
from magicrl.rollout.protocol import RolloutEngine
from magicrl.verifiers.base import VerifierService

Encode = Callable[[Problem], TokenArray]


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
    progress: Callable[[int, int], None] | None = None,
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
    known: dict[str, set[int]] = {}
    for row in done:
        known.setdefault(row.problem, set()).add(row.sample)
    requests = requests_for(problems, plan, encode, known)
    total = plan.wanted(problems)
    finished = total - sum(len(request.indices) for request in requests)

    def judged(sample: FinishedSample, verdict: Verdict) -> None:
        nonlocal finished
        request = sample.request
        asked = len(request.prompt_tokens) or None
        row = row_of(
            request.problem.id,
            sample.index,
            sample.completion,
            verdict,
            prompt_tokens=asked,
            keep_tokens=plan.keep_tokens,
        )
        write(row)
        finished += 1
        if progress is not None:
            progress(finished, total)

    if progress is not None:
        progress(finished, total)
    engine.submit(requests if most is None else spread(requests, most))
    with Settling(judge, judged, look_every=LOOK_EVERY) as settling:
        for sample in engine.finished_samples():
            settling.add(sample)
