"""The step's rollout buffer: which prompts are requested, and when their groups are used.

With ``rollout.max_staleness`` = 0 a step requests its groups and waits for them. With larger values the groups of that
many further steps are requested in advance, so that the engine has work while the learner updates. Groups are used in
the order of their requests, never in the order of completion, which would favour short responses. A step uses at least
D_R groups, so a group requested ``max_staleness`` steps ahead is used within the bound. No group is dropped for its
age.

Where a request has more responses than there are rows, those with the longest expected length start first: the whole
step waits for a long response that starts late (Graham's LPT rule, 1969). The order changes no result: a sample's
random numbers depend only on its draw, index and position.
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
from magicrl.records import Problem, RolloutGroup, RolloutRequest, ScoredGroup
from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.requests import Submitted, pack_completions, submit_completions, unpack_completions, verdicts_of
from magicrl.training.meters import StepClock
from magicrl_verifiers.records import VerifierService


def longest_first(problems: Sequence[str], means: Mapping[str, float]) -> list[int]:
    """Return the indices of ``problems`` by decreasing expected length. Equal ones keep their order.

    Args:
        problems: Keys of the problems, in the order of their draws.
        means: Mean response length of the last draw, for problems that were drawn before.
    """
    # A new problem is expected to have the mean of the known ones: it should not start after all of them, and not delay
    # the long ones.
    known = [means[name] for name in problems if name in means]
    middle = sum(known) / len(known) if known else 0.0
    return sorted(range(len(problems)), key=lambda place: -means.get(problems[place], middle))


@dataclass(kw_only=True, slots=True)
class Pending:
    """A request in flight, later with its rollouts and then with the ticket of their verification."""

    request: RolloutRequest
    group: RolloutGroup | None = None
    ticket: Submitted | None = None


class RolloutQueue:
    """Requests in flight. Returns scored groups in the order of their requests.

    Args:
        config: Recipe of the run.
        engine: Rollout engine, with `Capabilities.in_flight` unless ``max_staleness`` is 0.
        judge: Verifies responses while others are generated.
        encode: Returns a problem's prompt tokens.
        sampler: Sampler of problems.
        progress: Called with ``("rollout", groups done, groups of the request)``.

    Raises:
        ValueError: The engine cannot work ahead.
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
        self._sampling = [  # of each stage
            config.in_stage(index).rollout.sampling(stage.max_tokens, config.run.seed)
            for index, stage in enumerate(config.stages)
        ]
        self._engine = engine
        self._judge = judge
        self._encode = encode
        self._sampler = sampler
        self._progress = progress
        self._lengths: dict[str, float] = {}  # mean length of each problem's last draw, by key
        self._draws = 0
        self._pending: dict[int, Pending] = {}  # by draw, in the order of the requests
        self._again: deque[Problem] = deque()  # problems of a stage that ended, first in the next one
        self._stage = -1
        self._steps_in_stage = 0
        self.drained = 0

    @property
    def in_flight(self) -> int:
        """Number of groups that were requested and not yet used."""
        return len(self._pending)

    @property
    def finished(self) -> int:
        """Number of groups that are generated and not yet used."""
        return sum(item.group is not None for item in self._pending.values())

    def begin_step(self, stage_index: int) -> None:
        """Start a step, before its first ``take``. A new stage drains the queue, since T or tau changes."""
        self.drained = 0
        if stage_index != self._stage:
            if self._pending:
                # No response in progress can be used.
                self._engine.interrupt()
            for item in self._pending.values():
                if item.ticket is not None:
                    verdicts_of(self._judge, item.ticket)  # An unread verdict would stay in the verifier service.
                # Its problem comes first again, unless a filter has removed it.
                if item.request.problem.id not in self._sampler.removed:
                    self._again.append(item.request.problem)
            self.drained = len(self._pending)
            self._pending.clear()
            self._stage, self._steps_in_stage = stage_index, 0
        self._steps_in_stage += 1

    def take(self, stage: StageConfig, prompts: int, clock: StepClock) -> list[ScoredGroup]:
        """Return the next ``prompts`` groups in the order of their requests. Verification overlaps with generation."""
        # Groups in flight beyond the step's own; none after the stage's last step.
        steps_ahead = max(0, min(self.max_staleness, stage.max_steps - self._steps_in_stage))
        self._issue(stage, prompts + stage.rollout_batch * steps_ahead - len(self._pending))
        # A dict keeps the order of insertion, which is that of the requests.
        wanted = list(self._pending.values())[:prompts]
        with clock.measure("rollout"):
            self._generate(wanted)
        for item in wanted:
            del self._pending[item.request.draw]
        scored: list[ScoredGroup] = []
        with clock.measure("other", "verify"):
            for item in wanted:
                assert item.group is not None, "an engine returns every group that was requested"
                assert item.ticket is not None, "a group is submitted for verification when it is complete"
                # In the order of the requests, so that expected lengths do not depend on the order of completion.
                self._lengths[item.request.problem.key] = item.group.num_tokens / len(item.group.completions)
                scored.append(score_group(item.group, verdicts_of(self._judge, item.ticket)))
        return scored

    def meanwhile(self, tokens: int, clock: StepClock) -> None:
        """Let an engine in this process generate ``tokens`` tokens, as many as the learner processes in its updates.

        The engine then keeps the learner's pace on any machine, and the schedule depends only on requests and tokens.
        """
        if self.max_staleness:
            with clock.measure("rollout", "ahead"):
                self._file(self._engine.advance(tokens))

    def _issue(self, stage: StageConfig, prompts: int) -> None:
        if prompts <= 0:
            return
        # Problems of a drained stage come first, so that no prompt is skipped.
        problems = [self._again.popleft() for _ in range(min(prompts, len(self._again)))]
        problems += self._sampler.next(prompts - len(problems)) if prompts > len(problems) else []
        requests = [self._request(self._draws + i, problem, stage.group_size) for i, problem in enumerate(problems)]
        # A draw seeds its samples, so its number is never used again, not even for the same prompt.
        self._draws += prompts
        # If every response has a row, all start at once and the order does not matter.
        rollout = self._config.rollout
        if rollout.start_order != "issued" and sum(r.group_size for r in requests) > rollout.max_rows:
            requests = [requests[place] for place in longest_first([r.problem.key for r in requests], self._lengths)]
        self._engine.submit(requests)

    def _request(self, draw: int, problem: Problem, group_size: int) -> RolloutRequest:
        """Return a new request and add it to the pending ones."""
        request = RolloutRequest(
            draw=draw,
            problem=problem,
            prompt_tokens=self._encode(problem),
            group_size=group_size,
            sampling=self._sampling[self._stage],
        )
        self._pending[draw] = Pending(request=request)
        return request

    def _generate(self, wanted: Sequence[Pending]) -> None:
        """Generate until all of ``wanted`` are complete. Other groups that complete meanwhile are kept."""

        def missing() -> int:
            return sum(item.group is None for item in wanted)

        if self.max_staleness:
            # Collect finished groups without generating more.
            self._file(self._engine.advance(0))
            if not missing():
                return
        for group in self._engine.finished():
            self._file([group])
            self._progress("rollout", len(wanted) - missing(), len(wanted))
            if self.max_staleness and not missing():
                return  # the other groups belong to later steps

    def _file(self, groups: Sequence[RolloutGroup]) -> None:
        """Store new groups and submit them for verification."""
        for group in groups:
            item = self._pending[group.request.draw]
            assert item.group is None, f"draw {group.request.draw} came twice"
            item.group = group
            item.ticket = submit_completions(self._judge, group.request.problem, group.completions)

    def state(self) -> dict[str, Any]:
        """Return tensors and JSON values: the groups in flight, finished or not, and the number of draws."""
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
                    "finished": item.group is not None,
                }
                for draw, item in self._pending.items()
            ],
        }
        # With no request in flight the engine has nothing to keep.
        if self._pending:
            finished = [item.group for item in self._pending.values() if item.group is not None]
            state |= pack_completions("finished", [c for group in finished for c in group.completions])
            state |= {f"engine/{name}": value for name, value in self._engine.snapshot().items()}
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned, once the engine has the weights of that step.

        Requests in flight continue, or start again where the engine cannot continue them. No prompt is skipped.
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
            request = self._request(int(row["draw"]), problem, int(row["group_size"]))
            if row["finished"]:
                parts = tuple(next(completions) for _ in range(request.group_size))
                # The state holds tokens, not verdicts, so the group is verified again.
                self._file([RolloutGroup(request=request, completions=parts)])
        snapshot = {k.removeprefix("engine/"): v for k, v in state.items() if k.startswith("engine/")}
        self._engine.resume(snapshot, [item.request for item in self._pending.values() if item.group is None])
