"""The step's rollout buffer: which prompts are asked for, and when what came back is used.

With ``rollout.max_staleness`` = 0 a step asks for its groups and waits for them. From 1 on as many steps' groups are
asked for in advance, so that the engine has work while the learner updates. Groups are used in the order in which they
were issued, never in the order in which they finish (that would favour short responses). A step uses at least D_R of
them, so one that was issued ``max_staleness`` steps ahead is used within the bound; none is dropped for its age.

Where a request has more responses than there are rows, those expected longest start first: a long response that starts
late is what the whole step waits for (Graham's LPT rule, 1969). No result changes: a sample's random numbers depend on
its draw, index and position alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magicrl.algorithms.advantages import score_group
from magicrl.config.schema import StageConfig, TrainConfig
from magicrl.data.sampler import PromptSampler
from magicrl.evaluation.job import Encode
from magicrl.records import Problem, RolloutGroup, RolloutRequest, SamplingParams, ScoredGroup
from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.requests import pack_completions, unpack_completions
from magicrl.training.metrics import StepClock
from magicrl.verifiers.base import VerifierService


class PastLengths:
    """Mean response length of every problem's last draw in this run, by ``Problem.key``."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def saw(self, problem: str, mean_tokens: float) -> None:
        """Remember how long the responses of this draw are on average."""
        self._means[problem] = mean_tokens

    def longest_first(self, problems: Sequence[str]) -> list[int]:
        """Places in ``problems`` by falling expected length; of equal ones the first comes first.

        A problem that was not drawn before is expected to take the mean of those in ``problems`` that were: it must
        neither wait for all of them nor push the long ones back.
        """
        known = [self._means[name] for name in problems if name in self._means]
        middle = sum(known) / len(known) if known else 0.0
        return sorted(range(len(problems)), key=lambda place: -self._means.get(problems[place], middle))

    def state(self) -> dict[str, float]:
        """JSON values."""
        return dict(self._means)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``."""
        self._means = {name: float(mean) for name, mean in state.items()}


@dataclass(kw_only=True, slots=True)
class Pending:
    """A request that was issued; with its rollouts once they are there, and then with the judge's ticket."""

    request: RolloutRequest
    group: RolloutGroup | None = None
    ticket: Any = None


class RolloutQueue:
    """Issues requests and hands out scored groups in issue order.

    Args:
        config: of the run.
        engine: generates; with `Capabilities.in_flight` unless ``max_staleness`` is 0.
        judge: turns responses into verdicts, while others are generated.
        encode: a problem's prompt tokens.
        sampler: whose problems they are.
        progress: told ``("rollout", groups done, groups of the request)``.

    Raises:
        ValueError: the engine cannot work ahead.
    """

    def __init__(
        self,
        config: TrainConfig,
        engine: RolloutEngine,
        judge: VerifierService,
        encode: Encode,
        sampler: PromptSampler,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.max_staleness = config.rollout.max_staleness
        if self.max_staleness and not engine.capabilities.in_flight:
            raise ValueError(
                f"rollout.max_staleness = {self.max_staleness}: the engine {config.rollout.engine!r} cannot hold work "
                "over an update of its weights; set it to 0"
            )
        self._config = config
        self._engine = engine
        self._judge = judge
        self._encode = encode
        self._sampler = sampler
        self._progress = progress
        self._lengths = PastLengths()
        self._draws = 0
        self._pending: deque[Pending] = deque()
        self._by_draw: dict[int, Pending] = {}
        self._again: deque[Problem] = deque()  # problems of a stage that ended, to be asked first in the next one
        self._stage = -1
        self._steps_in_stage = 0
        self.drained = 0

    @property
    def in_flight(self) -> int:
        """Groups that were issued and not handed out."""
        return len(self._pending)

    @property
    def finished(self) -> int:
        """Groups that are generated and not handed out."""
        return sum(item.group is not None for item in self._pending)

    def begin_step(self, stage_index: int) -> None:
        """Call it once before a step's first ``take``. A new stage drains the queue: T is another."""
        self.drained = 0
        if stage_index != self._stage:
            self._drain()
            self._stage, self._steps_in_stage = stage_index, 0
        self._steps_in_stage += 1

    def _drain(self) -> None:
        """Drop what is in flight; its problems are asked again, first of all, unless a filter has removed them."""
        if not self._pending:
            return
        self._engine.interrupt()
        for item in self._pending:
            if item.ticket is not None:
                self._judge.result(item.ticket)  # a verdict that nobody fetches would stay in the judge
        gone = self._sampler.removed
        self._again.extend(item.request.problem for item in self._pending if item.request.problem.id not in gone)
        self.drained = len(self._pending)
        self._pending.clear()
        self._by_draw.clear()

    def take(self, stage: StageConfig, prompts: int, clock: StepClock) -> list[ScoredGroup]:
        """The next ``prompts`` groups in issue order; verification hides behind generation."""
        self._issue(stage, prompts + self._ahead(stage) - len(self._pending))
        wanted = [self._pending[i] for i in range(prompts)]
        with clock.measure("rollout"):
            self._generate(wanted)
        for _ in wanted:
            del self._by_draw[self._pending.popleft().request.draw]
        with clock.measure("other", "verify"):
            return self._judged(wanted)

    def meanwhile(self, tokens: int, clock: StepClock) -> None:
        """What the engine does while the learner works on ``tokens`` tokens: as many more, before its weights change.

        An engine in the learner's process generates them now. So both go at one pace, whatever the machine, and the
        schedule depends on requests and tokens alone.
        """
        if self.max_staleness and self._engine.capabilities.in_flight:
            with clock.measure("rollout", "ahead"):
                self._file(self._engine.advance(tokens))

    def _ahead(self, stage: StageConfig) -> int:
        """Groups to hold in flight beyond the step's own: none for steps that the stage will not have."""
        steps_left = stage.max_steps - self._steps_in_stage
        return stage.rollout_batch * max(0, min(self.max_staleness, steps_left))

    def _issue(self, stage: StageConfig, prompts: int) -> None:
        if prompts <= 0:
            return
        sampling = SamplingParams(
            temperature=self._config.rollout.temperature, max_tokens=stage.max_tokens, seed=self._config.run.seed
        )
        problems = [self._again.popleft() for _ in range(min(prompts, len(self._again)))]
        problems += self._sampler.next(prompts - len(problems)) if prompts > len(problems) else []
        requests = [self._request(self._draws + i, p, stage.group_size, sampling) for i, p in enumerate(problems)]
        self._draws += prompts
        for request in requests:
            self._await(Pending(request=request))
        self._engine.submit(self._start_order(requests))

    def _start_order(self, requests: Sequence[RolloutRequest]) -> Sequence[RolloutRequest]:
        """``requests`` in the order in which they are to be started; that of issue where all start at once."""
        rollout = self._config.rollout
        if rollout.start_order == "issued" or sum(r.group_size for r in requests) <= rollout.max_rows:
            return requests
        return [requests[place] for place in self._lengths.longest_first([r.problem.key for r in requests])]

    def _request(self, draw: int, problem: Problem, group_size: int, sampling: SamplingParams) -> RolloutRequest:
        return RolloutRequest(
            draw=draw,
            problem=problem,
            prompt_tokens=self._encode(problem),
            group_size=group_size,
            sampling=sampling,
        )

    def _await(self, item: Pending) -> None:
        self._pending.append(item)
        self._by_draw[item.request.draw] = item

    def _generate(self, wanted: Sequence[Pending]) -> None:
        """Until all of ``wanted`` are there; others that end meanwhile are kept."""
        asynchronous = bool(self.max_staleness)
        if asynchronous and self._engine.capabilities.in_flight:
            self._file(self._engine.advance(0))
        missing = sum(item.group is None for item in wanted)
        if asynchronous and not missing:
            return
        for group in self._engine.finished():
            self._file([group])
            missing = sum(item.group is None for item in wanted)
            self._progress("rollout", len(wanted) - missing, len(wanted))
            if asynchronous and not missing:
                return

    def _file(self, groups: Sequence[RolloutGroup]) -> None:
        """Hand new groups to the judge."""
        for group in groups:
            item = self._by_draw[group.request.draw]
            assert item.group is None, f"draw {group.request.draw} came twice"
            item.group = group
            item.ticket = self._judge.submit(group.request.problem, [c.text for c in group.completions])

    def _judged(self, wanted: Sequence[Pending]) -> list[ScoredGroup]:
        """Wait for the verdicts of what was generated."""
        judged = [(item.group, self._judge.result(item.ticket)) for item in wanted]
        groups = [(group, verdicts) for group, verdicts in judged if group is not None]
        for group, _ in groups:  # in issue order, so that what is expected never depends on who finished first
            self._lengths.saw(group.request.problem.key, group.num_tokens / len(group.completions))
        return [score_group(group, verdicts) for group, verdicts in groups]

    def state(self) -> dict[str, Any]:
        """Tensors and JSON values: what is in flight, finished or not, and where the draws stand."""
        finished = [item.group for item in self._pending if item.group is not None]
        state: dict[str, Any] = {
            "draws": self._draws,
            "stage": self._stage,
            "steps_in_stage": self._steps_in_stage,
            "again": [problem.id for problem in self._again],
            "lengths": self._lengths.state(),
            "pending": [_asked(item) for item in self._pending],
        }
        if self._pending:
            state |= pack_completions("finished", [c for group in finished for c in group.completions])
            if self._engine.capabilities.in_flight:
                state |= {f"engine/{name}": value for name, value in self._engine.snapshot().items()}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``, after the sampler is restored and the engine has the weights of that time.

        What was in flight goes on, or is issued again where the engine cannot go on with it: no prompt is skipped.
        """
        self._draws = int(state["draws"])
        self._stage, self._steps_in_stage = int(state.get("stage", -1)), int(state.get("steps_in_stage", 0))
        self._again = deque(self._sampler.named(name) for name in state.get("again", ()))
        self._lengths.restore(state.get("lengths", {}))
        self._pending.clear()
        self._by_draw.clear()
        rows: Sequence[Mapping[str, Any]] = state.get("pending", ())
        if not rows:
            return
        completions = iter(unpack_completions("finished", state))
        for row in rows:
            sampling = SamplingParams(
                temperature=self._config.rollout.temperature,
                max_tokens=int(row["max_tokens"]),
                seed=self._config.run.seed,
            )
            problem = self._sampler.named(row["problem"])
            item = Pending(request=self._request(int(row["draw"]), problem, int(row["group_size"]), sampling))
            self._await(item)
            if row["finished"]:
                parts = tuple(next(completions) for _ in range(item.request.group_size))
                self._file([RolloutGroup(request=item.request, completions=parts)])
        assert self._engine.capabilities.in_flight, "only such an engine had work in flight"
        snapshot = {k.removeprefix("engine/"): v for k, v in state.items() if k.startswith("engine/")}
        self._engine.resume(snapshot, [item.request for item in self._pending if item.group is None])


def _asked(item: Pending) -> dict[str, Any]:
    request = item.request
    return {
        "draw": request.draw,
        "problem": request.problem.id,
        "group_size": request.group_size,
        "max_tokens": request.sampling.max_tokens,
        "finished": item.group is not None,
    }
