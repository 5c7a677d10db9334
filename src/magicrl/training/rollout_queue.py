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
from magicrl.rollout.judging import Submitted, submit_completions, verdicts_of
from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.requests import pack_completions, unpack_completions
from magicrl.training.metrics import StepClock
from magicrl_verifiers.records import VerifierService


def longest_first(problems: Sequence[str], means: Mapping[str, float]) -> list[int]:
    """Places in ``problems`` by falling expected length; of equal ones the first comes first.

    Args:
        problems: keys, in the order of their draws.
        means: mean response length of the last draw of those that were drawn before.
    """
    # A new one is expected to take the mean of the known: it must neither wait for all of them nor push the long ones
    # back.
    known = [means[name] for name in problems if name in means]
    middle = sum(known) / len(known) if known else 0.0
    return sorted(range(len(problems)), key=lambda place: -means.get(problems[place], middle))


@dataclass(kw_only=True, slots=True)
class Pending:
    """A request that was issued; with its rollouts once they are there, and then with the judge's ticket."""

    request: RolloutRequest
    group: RolloutGroup | None = None
    ticket: Submitted | None = None


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
        # made once: every request asks for its stage's temperature
        self._rollout_in = [config.in_stage(index).rollout for index in range(len(config.stages))]
        self._engine = engine
        self._judge = judge
        self._encode = encode
        self._sampler = sampler
        self._progress = progress
        self._lengths: dict[str, float] = {}  # mean of every problem's last draw, by key
        self._draws = 0
        self._pending: dict[int, Pending] = {}  # by draw, which is the order of issue
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
        return sum(item.group is not None for item in self._pending.values())

    def begin_step(self, stage_index: int) -> None:
        """Call it once before a step's first ``take``. A new stage drains the queue: T or tau is another."""
        self.drained = 0
        if stage_index != self._stage:
            self._drain()
            self._stage, self._steps_in_stage = stage_index, 0
        self._steps_in_stage += 1

    def _drain(self) -> None:
        """Drop what is in flight; its problems are asked again, first of all, unless a filter has removed them."""
        if not self._pending:
            return
        # T or tau is another from here on, so nothing that is under way could be used
        self._engine.interrupt()
        for item in self._pending.values():
            if item.ticket is not None:
                verdicts_of(self._judge, item.ticket)  # a verdict that nobody fetches would stay in the judge
        gone, problems = self._sampler.removed, [item.request.problem for item in self._pending.values()]
        self._again.extend(problem for problem in problems if problem.id not in gone)
        self.drained = len(self._pending)
        self._pending.clear()

    def take(self, stage: StageConfig, prompts: int, clock: StepClock) -> list[ScoredGroup]:
        """The next ``prompts`` groups in issue order; verification hides behind generation."""
        # what is missing to this request and to the groups that are to be out beyond it
        self._issue(stage, prompts + self._ahead(stage) - len(self._pending))
        # a dict keeps the order in which draws were put in: that of issue
        wanted = list(self._pending.values())[:prompts]
        with clock.measure("rollout"):
            self._generate(wanted)
        for item in wanted:
            del self._pending[item.request.draw]
        with clock.measure("other", "verify"):
            return [self._judged(item) for item in wanted]

    def meanwhile(self, tokens: int, clock: StepClock) -> None:
        """What the engine does while the learner works on ``tokens`` tokens: as many more, before its weights change.

        An engine in the learner's process generates them now. So both go at one pace, whatever the machine, and the
        schedule depends on requests and tokens alone.
        """
        if self.max_staleness:
            with clock.measure("rollout", "ahead"):
                self._file(self._engine.advance(tokens))

    def _ahead(self, stage: StageConfig) -> int:
        """Groups to hold in flight beyond the step's own: none for steps that the stage will not have."""
        steps_left = stage.max_steps - self._steps_in_stage
        return stage.rollout_batch * max(0, min(self.max_staleness, steps_left))

    def _issue(self, stage: StageConfig, prompts: int) -> None:
        if prompts <= 0:
            return
        # what a drained stage left comes first, so that no prompt is skipped
        problems = [self._again.popleft() for _ in range(min(prompts, len(self._again)))]
        problems += self._sampler.next(prompts - len(problems)) if prompts > len(problems) else []
        requests = [
            self._asked(self._draws + i, problem, stage.group_size, stage.max_tokens)
            for i, problem in enumerate(problems)
        ]
        # never reused, not for a prompt that is asked again either: the draw seeds its samples
        self._draws += prompts
        self._engine.submit(self._start_order(requests))

    def _asked(self, draw: int, problem: Problem, group_size: int, max_tokens: int) -> RolloutRequest:
        """A new request, which is pending from here on."""
        rollout, run = self._rollout_in[self._stage], self._config.run
        request = RolloutRequest(
            draw=draw,
            problem=problem,
            prompt_tokens=self._encode(problem),
            group_size=group_size,
            sampling=SamplingParams(temperature=rollout.temperature, max_tokens=max_tokens, seed=run.seed),
        )
        self._pending[draw] = Pending(request=request)
        return request

    def _start_order(self, requests: Sequence[RolloutRequest]) -> Sequence[RolloutRequest]:
        """``requests`` in the order in which they are to be started; that of issue where all start at once."""
        rollout = self._config.rollout
        # with a row for every response nothing waits for a row, and the order of starting is of no account
        if rollout.start_order == "issued" or sum(r.group_size for r in requests) <= rollout.max_rows:
            return requests
        return [requests[place] for place in longest_first([r.problem.key for r in requests], self._lengths)]

    def _generate(self, wanted: Sequence[Pending]) -> None:
        """Until all of ``wanted`` are there; others that end meanwhile are kept."""

        def missing() -> int:
            return sum(item.group is None for item in wanted)

        if self.max_staleness:
            self._file(self._engine.advance(0))  # what is done already, without generating more
            if not missing():
                return
        for group in self._engine.finished():
            self._file([group])
            self._progress("rollout", len(wanted) - missing(), len(wanted))
            if self.max_staleness and not missing():
                return  # the rest is of later steps

    def _file(self, groups: Sequence[RolloutGroup]) -> None:
        """Hand new groups to the judge."""
        for group in groups:
            item = self._pending[group.request.draw]
            assert item.group is None, f"draw {group.request.draw} came twice"
            item.group = group
            item.ticket = submit_completions(self._judge, group.request.problem, group.completions)

    def _judged(self, item: Pending) -> ScoredGroup:
        """Wait for the verdicts of what was generated."""
        group = item.group
        assert item.ticket is not None, "a group is handed to the judge as it comes"
        assert group is not None, "an engine gives every group that it was asked for"
        # in issue order, so that what is expected never depends on who finished first
        self._lengths[group.request.problem.key] = group.num_tokens / len(group.completions)
        return score_group(group, verdicts_of(self._judge, item.ticket))

    def state(self) -> dict[str, Any]:
        """Tensors and JSON values: what is in flight, finished or not, and where the draws stand."""
        state: dict[str, Any] = {
            "draws": self._draws,
            "stage": self._stage,
            "steps_in_stage": self._steps_in_stage,
            "again": [problem.id for problem in self._again],
            "lengths": dict(self._lengths),
            "pending": [
                {
                    "draw": draw,
                    "problem": item.request.problem.id,
                    "group_size": item.request.group_size,
                    "max_tokens": item.request.sampling.max_tokens,
                    "finished": item.group is not None,
                }
                for draw, item in self._pending.items()
            ],
        }
        # with nothing in flight there is nothing that an engine would have to keep
        if self._pending:
            finished = [item.group for item in self._pending.values() if item.group is not None]
            state |= pack_completions("finished", [c for group in finished for c in group.completions])
            state |= {f"engine/{name}": value for name, value in self._engine.snapshot().items()}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``, once the engine has the weights of that time.

        What was in flight goes on, or is issued again where the engine cannot go on with it: no prompt is skipped.
        """
        self._draws = int(state["draws"])
        self._stage, self._steps_in_stage = int(state["stage"]), int(state["steps_in_stage"])
        self._again = deque(self._sampler.named(name) for name in state["again"])
        self._lengths = {name: float(mean) for name, mean in state["lengths"].items()}
        self._pending.clear()
        if not state["pending"]:
            return
        completions = iter(unpack_completions("finished", state))
        for row in state["pending"]:
            problem = self._sampler.named(row["problem"])
            request = self._asked(int(row["draw"]), problem, int(row["group_size"]), int(row["max_tokens"]))
            if row["finished"]:
                parts = tuple(next(completions) for _ in range(request.group_size))
                # tokens are kept, verdicts are not: it is judged again
                self._file([RolloutGroup(request=request, completions=parts)])
        snapshot = {k.removeprefix("engine/"): v for k, v in state.items() if k.startswith("engine/")}
        self._engine.resume(snapshot, [item.request for item in self._pending.values() if item.group is None])
