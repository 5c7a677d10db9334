"""Verification on nodes: an item that never ends leaves its group, and a long queue does not count as a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import problem

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from magicrl.config.cluster_schema import ClusterTimeouts
from magicrl.config.verifier_schema import VerifierConfig
from magicrl.distributed import verifier_nodes
from magicrl.distributed.runtime import Node
from magicrl.distributed.verifier_nodes import VerifierNodes
from magicrl.records import Problem
from magicrl_verifiers.records import make_verdict


class Call:
    """A call of a scripted actor, which takes one at a time. ``stuck`` in the response: it never ends."""

    def __init__(self, actor: Any, response: str) -> None:
        self.actor = actor
        actor.hangs = actor.hangs or "stuck" in response
        self.ended = not actor.hangs

    def answer(self) -> Any:
        if not self.ended:
            raise RayActorError
        return make_verdict("matched", decided_by="exact"), 0.0, 0.0


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> VerifierNodes:
    """Return two nodes without processes."""
    alive = [Node(id=n, address=n, cpus=1.0, gpus=0.0, object_store=1e9, head=False) for n in "ab"]

    def made(*_: Any) -> Any:
        actor = SimpleNamespace(hangs=False, killed=False)
        actor.judge = SimpleNamespace(remote=lambda problem, response, digests: Call(actor, response))
        return actor

    def kill(actor: Any) -> None:
        actor.killed = True

    def wait(calls: list[Call], *, num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        done = [call for call in calls if call.ended or call.actor.killed][:num_returns]
        return done, [call for call in calls if call not in done]

    monkeypatch.setattr(verifier_nodes, "nodes", lambda: alive)
    monkeypatch.setattr(verifier_nodes, "waited_for", lambda call, *_: call.answer())
    monkeypatch.setattr(verifier_nodes, "ray", SimpleNamespace(wait=wait, kill=kill))
    monkeypatch.setattr(VerifierNodes, "_actor", made)
    return VerifierNodes(VerifierConfig())


def test_an_actor_that_gives_no_sign_is_replaced(scripted: VerifierNodes) -> None:
    """Let a reward hang in the actors' process: it costs its response, and no other of this step or a later one."""
    hung = scripted.submit(problem(), ["stuck", "1", "1", "1"])
    first = scripted._places[0].actor
    other = scripted.submit(problem(), ["1", "1"])  # one of them waits behind it
    stuck, *others = scripted.result(hung)
    assert all(verdict.correct for verdict in others)
    assert stuck.status == "worker_lost"
    assert "no verdict within" in stuck.reason
    assert first.killed
    assert scripted.lost == ["a/a", "b/b"], "it hangs on the other node, too"
    assert [place.number for place in scripted._places] == [0, 1]
    for ticket in (other, scripted.submit(problem(), ["1"] * 4)):
        assert all(verdict.correct for verdict in scripted.result(ticket))
    assert len(scripted.lost) == 2


@pytest.fixture
def nodes(three_nodes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a builder of nodes whose judges take a second over a text that says so, and hang at "stuck"."""

    class SlowActor(verifier_nodes.JudgeActor):  # local, so that it is sent to the nodes by value
        def judge(self, problem: Problem, response: str, digests: Any) -> Any:
            if "slow" in response:
                time.sleep(1.0)
            while "stuck" in response:
                time.sleep(1.0)
            return super().judge(problem, response, digests)

    monkeypatch.setattr(verifier_nodes, "JudgeActor", SlowActor)
    made: list[VerifierNodes] = []

    def make(seconds: float, threads: int) -> VerifierNodes:
        timeouts = ClusterTimeouts(judge=seconds, start=300.0)
        made.append(VerifierNodes(VerifierConfig(workers=1, extract="lenient"), timeouts=timeouts, threads=threads))
        made[-1].warm_up(["exact"])
        return made[-1]

    yield make
    for service in made:
        service.close()


@pytest.mark.slow
def test_a_stuck_item_leaves_its_group_and_blocks_no_other(nodes: Callable[..., VerifierNodes]) -> None:
    service = nodes(5.0, 8)
    hung = service.submit(problem(), ["stuck", "1", "2"])
    other = service.submit(problem(), ["1", "0"])
    assert [verdict.correct for verdict in service.result(other)] == [True, False]
    stuck, right, wrong = service.result(hung)
    assert (right.correct, wrong.correct) == (True, False)
    assert stuck.status == "worker_lost"
    assert "no verdict within 5 s" in stuck.reason


@pytest.mark.slow
def test_a_queue_longer_than_the_time_out_is_judged_whole(nodes: Callable[..., VerifierNodes]) -> None:
    service = nodes(4.0, 1)  # one at a time on each of three nodes, each takes a second
    texts = [f"slow {n % 2}" for n in range(24)]
    began = time.perf_counter()
    first, last = service.submit(problem(), texts[:12]), service.submit(problem(), texts[12:])
    assert all(verdict.status != "worker_lost" for verdict in service.result(last))  # waits for the first one's, too
    assert all(verdict.status != "worker_lost" for verdict in service.result(first))
    observed, spans = service.observations(), service.spans()
    assert sum(observed[f"cluster/verifier_{n}/judged"] for n in range(3)) == 24
    for number in range(3):
        own = [span for span in spans if span.worker == f"verifier {number}"]
        assert began <= min(span.begin for span in own) < max(span.end for span in own) <= time.perf_counter()
        assert observed[f"cluster/verifier_{number}/busy_seconds"] == pytest.approx(sum(s.end - s.begin for s in own))
        assert observed[f"cluster/verifier_{number}/queue"] == 0
    assert service.spans() == []


@pytest.mark.slow
def test_actors_that_hang_are_replaced(nodes: Callable[..., VerifierNodes]) -> None:
    service = nodes(4.0, 1)  # one at a time, as rewards in the actor's process
    (stuck,) = service.result(service.submit(problem(), ["stuck"]))
    assert stuck.status == "worker_lost"
    assert len(service.lost) == 2
    assert all(verdict.correct for verdict in service.result(service.submit(problem(), ["1"] * 9)))
    assert len(service.lost) == 2


@pytest.mark.slow
def test_an_actor_that_replaces_a_lost_one_needs_the_reward_of_the_start(
    nodes: Callable[..., VerifierNodes], tmp_path: Path
) -> None:
    import ray

    file = tmp_path / "reward.py"
    file.write_text("def score(problem, response):\n    return 1.0\n")
    service, asked = nodes(30.0, 8), problem(verifier=f"{file}:score")
    service.warm_up([asked.verifier])
    assert all(verdict.correct for verdict in service.result(service.submit(asked, ["1"] * 6)))
    file.write_text("def score(problem, response):\n    return 0.0\n")
    for place in service._places:
        ray.kill(place.actor)
    with pytest.raises(ValueError, match=r"reward\.py:score on node .* is another one"):
        service.result(service.submit(asked, ["1"] * 6))
    with pytest.raises(RuntimeError, match=r"the verifiers of node .* is another one"):
        service.warm_up([asked.verifier])
