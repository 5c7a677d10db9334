"""Verification on every node's CPUs: an actor with a verifier pool per node, each item isolated as on one machine.

A response goes to the node with the fewest waiting responses. A dead actor is replaced, and its unfinished items are
verified on another node. An item cannot kill the actor (it runs in a worker process below it), so this may happen
several times. If a node finishes nothing for ``timeouts.judge`` seconds, its actor is replaced, too: a reward in that
process may hang, and every later call would wait for it. The items are tried once on another node; after a second
time-out the item is not judged and leaves its group. A long queue is not a time-out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from magicrl.config.cluster_schema import ClusterTimeouts
from magicrl.config.verifier_schema import VerifierConfig
from magicrl.distributed.runtime import ClusterError, Node, cause_of, nodes, waited_for
from magicrl.distributed.same_files import Digests, check_digests, digests_of
from magicrl.distributed.worker_logs import keep_output
from magicrl.records import Problem, Verdict
from magicrl.training.protocols import WorkSpan
from magicrl_verifiers.records import make_verdict
from magicrl_verifiers.several import reward_names
from magicrl_verifiers.table import verifier_spec

_LATE = 2  # time-outs after which an item is not judged
# lost actors after which an item is not judged: until Ray notices a dead node, successors are started on it
_LOST = 6
_PAUSE = 0.05  # seconds: shorter pauses between two verdicts are not shown in the timeline


class JudgeActor:
    """A node's verifier pool. Each call waits in a separate thread, so that a slow item delays no other. Only calls of
    a reward function in this process take turns.
    """

    def __init__(self, config: VerifierConfig, file: str | None = None) -> None:
        if file is not None:
            keep_output(file)  # a reward's failures are logged here
        self._pool = config.pool()
        self._check = cache(check_digests)

    def judge(self, problem: Problem, response: str, digests: Digests) -> tuple[Verdict, float, float]:
        """Return the verdict of one response, and when work on it began and ended in seconds of the node's clock."""
        self._check(digests)  # a successor of a lost actor may read a file that has changed since
        began = time.time()
        (verdict,) = self._pool.judge(problem, [response])
        return verdict, began, time.time()

    def warm_up(self, verifiers: tuple[str, ...], digests: Digests) -> None:
        """Start the workers; raise ``RuntimeError`` if one does not start, ``ValueError`` for other files."""
        self._check(digests)
        self._pool.warm_up(verifiers)


@dataclass(kw_only=True, eq=False)
class _Place:
    """A node's actor and its unfinished calls."""

    number: int  # its name in metrics; a successor has the same
    node: Node  # its node
    actor: Any  # Ray's handle
    calls: list[Any] = field(default_factory=list[Any])  # unfinished calls of all tickets
    judged: int = 0  # since the last `observations`
    busy: float = 0.0  # seconds in which it judged anything, since the last `observations`
    # when it worked: not yet in ``busy`` and ``spans``, overlapping and unordered; and since the last `spans`
    worked: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    spans: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    settled: int = 0  # calls of this actor whose results were read
    seen: int = 0  # finished calls at the last `moved`

    def moved(self) -> bool:
        """Return whether it finished anything since the last call of this method."""
        finished = self.settled
        if self.calls:
            finished += len(ray.wait(self.calls, num_returns=len(self.calls), timeout=0)[0])
        before, self.seen = self.seen, finished
        return finished > before

    def took(self, began: float, ended: float) -> None:
        """Count a result that was read."""
        self.judged += 1
        self.settled += 1
        self.worked.append((began, ended))

    def add_up(self) -> None:
        """Move the recorded work into ``busy`` and ``spans``."""
        found = merged(self.worked, _PAUSE)
        self.busy += sum(ended - began for began, ended in found)
        self.spans += found
        self.worked.clear()


@dataclass(kw_only=True)
class _Item:
    """A response that is being verified."""

    response: str
    place: _Place
    call: Any
    late: int = 0
    lost: int = 0
    verdict: Verdict | None = None


NodeTicket: TypeAlias = tuple[Problem, list[_Item]]
"""A submission: a problem and its responses, in order."""


class VerifierNodes:
    """A `magicrl_verifiers.records.VerifierService` over all nodes; ``workers_per_node`` instead of the config's."""

    def __init__(
        self,
        config: VerifierConfig,
        *,
        workers_per_node: int | None = None,
        timeouts: ClusterTimeouts | None = None,
        threads: int = 64,  # concurrent responses per node; more wait in Ray's queue
        file: Callable[[int], str | None] = lambda _: None,  # file of a node's output; None: Ray's logs
    ) -> None:
        self._threads, self._file = threads, file
        self._config = config.model_copy(update={"workers": workers_per_node or config.workers})
        self._timeouts = timeouts or ClusterTimeouts()
        self._spec = cache(verifier_spec)  # resolving a verifier reads modules and files
        self._digests = cache(_digests)  # once: files may change while the run uses them
        self._warm: tuple[tuple[str, ...], Digests] | None = None
        self._places = [_Place(number=n, node=node, actor=self._actor(n, node)) for n, node in enumerate(nodes())]
        self.lost: list[str] = []  # name of the node, once per lost actor

    def submit(self, problem: Problem, responses: Sequence[str]) -> NodeTicket:
        """Assign the responses to nodes and return at once.

        Raises:
            ValueError: the problem has no reference answer.
        """
        self._spec(problem.verifier).check_references(problem)
        return problem, [self._ask(problem, response) for response in responses]

    def result(self, ticket: NodeTicket) -> tuple[Verdict, ...]:
        """Wait for the verdicts of a ticket; return them in the order of its responses.

        Raises:
            ValueError: a node's file of the reward differs from that of the run.
        """
        problem, items = ticket
        while waiting := [item for item in items if item.verdict is None]:
            calls = [item.call for item in waiting]
            done, _ = ray.wait(calls, num_returns=1, timeout=self._timeouts.judge)
            silent: list[_Place] = []
            if not done:
                places = list({id(item.place): item.place for item in waiting}.values())
                # A node that finished anything is only busy: its items wait in a queue and did not time out.
                silent = [place for place in places if not place.moved()]
            for item in reversed(waiting):  # those behind a reward that hangs are asked again before it
                if item.call in done:
                    try:
                        what = f"a verdict of node {item.place.node.name}"
                        item.verdict, *times = waited_for(item.call, self._timeouts.judge, what)
                        item.place.calls.remove(item.call)
                        item.place.took(*times)
                    except (RayActorError, ClusterError) as error:
                        self._lose(item.place)
                        item.lost += 1
                        self._give_up(problem, item, str(error).strip().splitlines()[0])
                    except ValueError as error:
                        raise ValueError(cause_of(error)) from error
                elif item.place in silent:
                    self._lose(item.place)
                    item.late += 1
                    self._give_up(problem, item, f"no verdict within {self._timeouts.judge:g} s")
        return tuple(item.verdict for item in items if item.verdict is not None)

    def ready(self, ticket: NodeTicket) -> bool:
        """Return whether every verdict has come (or its actor was lost, which `result` handles)."""
        calls = [item.call for item in ticket[1] if item.verdict is None]
        return not calls or len(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) == len(calls)

    def warm_up(self, verifiers: Iterable[str] = ("maths",)) -> None:
        """Start the workers of these verifiers on every node.

        Raises:
            RuntimeError: a node's workers do not start, or its file of a reward is another one (names the node).
        """
        names = tuple(verifiers)
        self._warm = names, tuple(digest for verifier in names for digest in self._digests(verifier))
        calls = [(place, place.actor.warm_up.remote(*self._warm)) for place in self._places]
        for place, call in calls:
            what = f"the verifiers of node {place.node.name} to start"
            try:
                waited_for(call, self._timeouts.start, what)
            except (RayActorError, RuntimeError, ValueError) as error:
                raise RuntimeError(f"{what}: {cause_of(error)}") from error

    def observations(self) -> dict[str, float]:
        """Return metrics since the last call: per node its verdicts, busy seconds and waiting responses."""
        values: dict[str, float] = {"cluster/verifiers/lost": len(self.lost)}
        for place in self._places:
            place.add_up()
            key = f"cluster/verifier_{place.number}"
            values[f"{key}/judged"] = place.judged
            values[f"{key}/busy_seconds"] = place.busy
            values[f"{key}/queue"] = len(place.calls)
            place.judged, place.busy = 0, 0.0
        return values

    def totals(self) -> dict[str, float]:
        """Return nothing: each node's pool has its own counts."""
        return {}

    def spans(self) -> list[WorkSpan]:
        """Return when each node worked since the last call, for results that were read."""
        # Nodes report wall-clock times. The timeline of this process uses ``perf_counter``.
        here = time.perf_counter() - time.time()
        spans: list[WorkSpan] = []
        for place in self._places:
            place.add_up()
            spans += [WorkSpan(f"verifier {place.number}", "verify", a + here, b + here) for a, b in place.spans]
            place.spans.clear()
        return spans

    def close(self) -> None:
        """End every node's actor and its workers. Safe to call twice."""
        for place in self._places:
            ray.kill(place.actor)
        self._places.clear()

    def _actor(self, number: int, node: Node) -> Any:
        actor: Any = ray.remote(JudgeActor)
        # reserves no CPU: it mostly waits, and more actors than CPUs would hang
        options = {"num_cpus": 0, "max_concurrency": self._threads, "max_restarts": 0}
        strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
        return actor.options(**options, scheduling_strategy=strategy).remote(self._config, self._file(number))

    def _ask(self, problem: Problem, response: str, *, avoid: _Place | None = None) -> _Item:
        if not self._places:
            raise ClusterError("no node is left to judge; see `ray status`")
        # With a single node, try that node again rather than give up.
        others = [place for place in self._places if avoid is None or place.number != avoid.number] or self._places
        place = min(others, key=lambda place: len(place.calls))
        call = place.actor.judge.remote(problem, response, self._digests(problem.verifier))
        place.calls.append(call)
        return _Item(response=response, place=place, call=call)

    def _give_up(self, problem: Problem, item: _Item, reason: str) -> None:
        """Try an item on another node, unless it timed out or lost its actor too often."""
        item.place.calls.remove(item.call)
        # After several nodes failed on it, the item is the likely cause. It must not block the step.
        if item.late == _LATE or item.lost == _LOST:
            item.verdict = make_verdict("worker_lost", reason=f"node {item.place.node.name}: {reason}")
            return
        again = self._ask(problem, item.response, avoid=item.place)
        item.place, item.call = again.place, again.call

    def _lose(self, place: _Place) -> None:
        """Replace a dead or silent actor if its node is alive."""
        if place not in self._places:
            return
        self.lost.append(place.node.name)
        self._places.remove(place)
        ray.kill(place.actor)
        # A successor cannot start on a node that is gone. The other nodes take over its items.
        if any(node.id == place.node.id for node in nodes()):
            successor = replace(place, actor=self._actor(place.number, place.node), calls=[], settled=0, seen=0)
            if self._warm:
                successor.actor.warm_up.remote(*self._warm)
            self._places.append(successor)


def _digests(verifier: str) -> Digests:
    return digests_of(reward_names(verifier))


def merged(intervals: Iterable[tuple[float, float]], pause: float) -> list[tuple[float, float]]:
    """Merge intervals (begin, end) into disjoint ones in order; pauses of at most ``pause`` count as work."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin - found[-1][1] <= pause:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
