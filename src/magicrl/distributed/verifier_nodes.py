"""Judging on every node's CPUs: a verifier pool in an actor on each, every item as isolated as on one machine.

A response goes to the node with the fewest waiting for each of its workers. A node's actor that dies is replaced, and
what it had not judged is judged elsewhere; that is not the item's doing (it runs in a worker below the actor), so it
may happen several times. An item that neither kills nor finishes its worker is given up where its node has judged
nothing for ``timeouts.judge`` seconds: it is tried once on another node; then it is not judged and leaves its group.
A long queue is no such silence.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from magicrl.config.cluster_schema import ClusterTimeouts
from magicrl.config.verifier_schema import VerifierConfig
from magicrl.distributed.runtime import ClusterError, Node, cause_of, nodes, waited_for
from magicrl.records import Problem, Verdict
from magicrl.training.protocols import WorkSpan
from magicrl_verifiers.records import make_verdict
from magicrl_verifiers.table import verifier_spec

_LATE = 2  # an item that was late so often is not judged
# likewise: a node that dies takes its actor's successors with it for as long as Ray believes the node alive
_LOST = 6
_PAUSE = 0.05  # seconds: shorter ones between two judgements are not told in the timeline


class Judged(NamedTuple):
    """A verdict, and when its node worked on it: seconds of its clock, which `magicrl cluster doctor` compares."""

    verdict: Verdict
    began: float
    ended: float


class JudgeActor:
    """A node's verifier pool. Its calls wait in threads of their own, so that a slow item delays no other."""

    def __init__(self, config: VerifierConfig) -> None:
        self._pool = config.pool()

    def judge(self, problem: Problem, response: str) -> Judged:
        """The verdict of one response."""
        began = time.time()
        (verdict,) = self._pool.judge(problem, [response])
        return Judged(verdict, began, time.time())

    def warm_up(self, verifiers: tuple[str, ...]) -> None:
        """Start the workers. Raises ``RuntimeError`` where one does not start."""
        self._pool.warm_up(verifiers)


@dataclass(kw_only=True, eq=False)
class _Place:
    """A node's actor and what it has to judge."""

    number: int  # names it; a successor has the same
    node: Node  # where it lives
    actor: Any  # Ray's handle
    calls: list[Any] = field(default_factory=list[Any])  # under way, of all tickets
    judged: int = 0  # since the last `observations`
    busy: float = 0.0  # seconds in which it judged anything, since the last `observations`
    # when it judged: not yet taken into ``busy`` and ``spans``, overlapping and in no order; and since the last `spans`
    worked: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    spans: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    settled: int = 0  # calls that were taken in, ever
    seen: int = 0  # how many it had finished when it was last asked whether it moves

    def moved(self) -> bool:
        """Whether it finished anything since this was last asked."""
        finished = self.settled
        if self.calls:
            finished += len(ray.wait(self.calls, num_returns=len(self.calls), timeout=0)[0])
        before, self.seen = self.seen, finished
        return finished > before

    def took(self, judged: Judged) -> None:
        """A call was taken in."""
        self.judged += 1
        self.settled += 1
        self.worked.append((judged.began, judged.ended))

    def add_up(self) -> None:
        """Take what was worked into ``busy`` and ``spans``."""
        found = merged(self.worked, _PAUSE)
        self.busy += sum(ended - began for began, ended in found)
        self.spans += found
        self.worked.clear()


@dataclass(kw_only=True)
class _Item:
    """A response under way."""

    response: str
    place: _Place
    call: Any
    late: int = 0
    lost: int = 0
    verdict: Verdict | None = None


@dataclass(kw_only=True)
class NodeTicket:
    """One submission: its problem and responses, in their order."""

    problem: Problem
    items: list[_Item] = field(default_factory=list[_Item])


class VerifierNodes:
    """A `magicrl_verifiers.records.VerifierService` over all nodes; ``workers_per_node`` instead of the config's."""

    def __init__(
        self,
        config: VerifierConfig,
        *,
        workers_per_node: int | None = None,
        timeouts: ClusterTimeouts | None = None,
        threads: int = 64,  # responses that a node's actor works on at once; more wait in Ray's queue
    ) -> None:
        self._threads = threads
        self._config = config.model_copy(update={"workers": workers_per_node or config.workers})
        self._timeouts = timeouts or ClusterTimeouts()
        self._spec = cache(verifier_spec)  # finding one looks through modules and files
        self._warm: tuple[str, ...] = ()
        self._places = [_Place(number=n, node=node, actor=self._actor(node)) for n, node in enumerate(nodes())]
        self.lost: list[str] = []  # names of the nodes whose actor was lost, once a loss

    def submit(self, problem: Problem, responses: Sequence[str]) -> NodeTicket:
        """Hand the responses to nodes and return at once.

        Raises:
            ValueError: the problem has no reference answer.
        """
        self._spec(problem.verifier).check_references(problem)
        return NodeTicket(problem=problem, items=[self._ask(problem, response) for response in responses])

    def result(self, ticket: NodeTicket) -> tuple[Verdict, ...]:
        """The verdicts of a ticket in the order of its responses; waits for them."""
        while waiting := [item for item in ticket.items if item.verdict is None]:
            calls = [item.call for item in waiting]
            done, _ = ray.wait(calls, num_returns=1, timeout=self._timeouts.judge)
            silent: list[_Place] = []
            if not done:
                places = list({id(item.place): item.place for item in waiting}.values())
                silent = [place for place in places if not place.moved()]
            for item in waiting:
                if item.call in done:
                    self._settle(ticket.problem, item)
                elif item.place in silent:
                    item.late += 1
                    self._give_up(ticket.problem, item, f"no verdict within {self._timeouts.judge:g} s")
        return tuple(item.verdict for item in ticket.items if item.verdict is not None)

    def ready(self, ticket: NodeTicket) -> bool:
        """Whether every verdict is there (or its actor is lost, which `result` sees to)."""
        calls = [item.call for item in ticket.items if item.verdict is None]
        return not calls or len(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) == len(calls)

    def warm_up(self, verifiers: Iterable[str] = ("maths",)) -> None:
        """Start the workers of these verifiers on every node.

        Raises:
            RuntimeError: a node's workers do not start (names the node).
        """
        self._warm = tuple(verifiers)
        calls = [(place, place.actor.warm_up.remote(self._warm)) for place in self._places]
        for place, call in calls:
            what = f"the verifiers of node {place.node.name} to start"
            try:
                waited_for(call, self._timeouts.start, what)
            except (RayActorError, RuntimeError, ValueError) as error:
                raise RuntimeError(f"{what}: {cause_of(error)}") from error

    def observations(self) -> dict[str, float]:
        """Metrics since the last call: per node what it judged, how long it had work, and what waits."""
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
        """Nothing: each node's pool counts for itself."""
        return {}

    def spans(self) -> list[WorkSpan]:
        """When each node judged, since the last call; of what `result` has taken in."""
        here = time.perf_counter() - time.time()
        told: list[WorkSpan] = []
        for place in self._places:
            place.add_up()
            told += [WorkSpan(f"verifier {place.number}", "verify", a + here, b + here) for a, b in place.spans]
            place.spans.clear()
        return told

    def close(self) -> None:
        """End every node's actor, and with it its workers. Safe to call twice."""
        for place in self._places:
            ray.kill(place.actor)
        self._places.clear()

    def _actor(self, node: Node) -> Any:
        actor: Any = ray.remote(JudgeActor)
        # none of Ray's CPUs: it waits most of the time, and more actors than CPUs would hang
        options = {"num_cpus": 0, "max_concurrency": self._threads, "max_restarts": 0}
        strategy = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
        return actor.options(**options, scheduling_strategy=strategy).remote(self._config)

    def _ask(self, problem: Problem, response: str, *, avoid: _Place | None = None) -> _Item:
        if not self._places:
            raise ClusterError("no node is left to judge; see `ray status`")
        others = [place for place in self._places if place is not avoid] or self._places
        place = min(others, key=lambda place: len(place.calls))
        call = place.actor.judge.remote(problem, response)
        place.calls.append(call)
        return _Item(response=response, place=place, call=call)

    def _settle(self, problem: Problem, item: _Item) -> None:
        try:
            what = f"a verdict of node {item.place.node.name}"
            judged: Judged = waited_for(item.call, self._timeouts.judge, what)
            item.verdict = judged.verdict
            item.place.calls.remove(item.call)
            item.place.took(judged)
        except (RayActorError, ClusterError) as error:
            self._lose(item.place)
            item.lost += 1
            self._give_up(problem, item, str(error).strip().splitlines()[0])

    def _give_up(self, problem: Problem, item: _Item, reason: str) -> None:
        """Try an item once more elsewhere, until it was late or its actor lost too often."""
        item.place.calls.remove(item.call)
        if item.late == _LATE or item.lost == _LOST:
            item.verdict = make_verdict("worker_lost", reason=f"node {item.place.node.name}: {reason}")
            return
        again = self._ask(problem, item.response, avoid=item.place)
        item.place, item.call = again.place, again.call

    def _lose(self, place: _Place) -> None:
        """Replace a dead actor where its node still lives."""
        if place not in self._places:
            return
        self.lost.append(place.node.name)
        self._places.remove(place)
        if any(node.id == place.node.id for node in nodes()):
            successor = replace(place, actor=self._actor(place.node), calls=[])
            if self._warm:
                successor.actor.warm_up.remote(self._warm)
            self._places.append(successor)


def merged(intervals: Iterable[tuple[float, float]], pause: float) -> list[tuple[float, float]]:
    """The intervals (begin, end) as disjoint ones in order; pauses of at most ``pause`` between two count as work."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin - found[-1][1] <= pause:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found
