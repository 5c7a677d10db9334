"""The rollout pool on three simulated nodes: the tokens of one engine, whatever dies on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from builders import problem, request

from magicrl.config.errors import RecipeError
from magicrl.config.schema import TrainConfig
from magicrl.records import Completion, FinishedSample, RolloutRequest, frozen_tokens
from magicrl.training.logprob_check import LogprobCheck, StaleEngineError

pytestmark = pytest.mark.slow

Tokens = dict[tuple[int, int], Completion]
CLUSTER = {"rollout": {"replicas": 2, "cpus": 1.0}, "timeouts": {"start": 300.0}}


def requests(draws: Iterable[int], *, limit: int = 48, group: int = 6) -> list[RolloutRequest]:
    rng = np.random.default_rng(0)
    prompts = {draw: rng.integers(2, 20, 3 + draw % 5) for draw in range(100)}
    return [request(draw, prompts[draw], size=group, limit=limit, seed=4) for draw in draws]


def by_place(samples: Iterable[FinishedSample]) -> Tokens:
    found: Tokens = {}
    for sample in samples:
        place = (sample.request.draw, sample.index)
        assert place not in found, f"sample {place} came twice"
        found[place] = sample.completion
    return found


def near_ties(one: Tokens, other: Tokens) -> int:
    """Return samples that diverge at a token where float32 rounding may decide. Any other difference fails."""
    assert set(one) == set(other)
    parted = 0
    for place, completion in one.items():
        theirs = other[place]
        shared = min(len(completion), len(theirs))
        unlike = np.flatnonzero(completion.tokens[:shared] != theirs.tokens[:shared])
        until = int(unlike[0]) if len(unlike) else shared
        np.testing.assert_allclose(
            completion.sampler_logprobs[:until], theirs.sampler_logprobs[:until], atol=1e-4, err_msg=str(place)
        )
        parted += bool(len(unlike)) or len(completion) != len(theirs)
    return parted


@pytest.fixture(scope="module")
def recipe(make_recipe: Callable[..., TrainConfig]) -> TrainConfig:
    return make_recipe(CLUSTER)


@pytest.fixture(scope="module")
def policy(recipe: TrainConfig) -> Any:
    from magicrl.models.loading import load_policy

    assert recipe.start.model is not None
    return load_policy(recipe.start.model, dtype="float32", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def weights(policy: Any) -> dict[str, torch.Tensor]:
    """Return weights other than those on disk."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: p.detach() * (1 + 0.1 * torch.rand(p.shape, generator=generator))
        for name, p in policy.model.named_parameters()
    }


def encoder(policy: Any) -> Any:
    from magicrl.models.prompts import PromptEncoder

    return PromptEncoder(policy.tokenizer, 64)


@pytest.fixture(scope="module")
def alone(recipe: TrainConfig, policy: Any, weights: dict[str, torch.Tensor]) -> Tokens:
    """Return the samples of one engine in this process."""
    from magicrl.training.assemble import make_training_engine

    engine = make_training_engine(recipe, recipe.start.model or "", encoder(policy))
    engine.load_weights(weights, 1)
    engine.submit(requests(range(12)))
    return by_place(engine.finished_samples())


class Watching:
    """A weight check that records which replicas answered."""

    def __init__(self) -> None:
        self.requests = requests([90], limit=8, group=2)
        self.seen: list[tuple[int, tuple[str, ...]]] = []

    def compare(self, answers: Any, version: int) -> None:
        assert all(len(groups) == 1 and len(groups[0].completions) == 2 for groups in answers.values())
        self.seen.append((version, tuple(answers)))


@pytest.fixture(scope="module")
def shared(
    three_nodes: Any, recipe: TrainConfig, policy: Any, weights: dict[str, torch.Tensor]
) -> Generator[tuple[Any, Watching]]:
    from magicrl.distributed.cluster_parts import ClusterParts

    watching = Watching()
    engine: Any = ClusterParts(recipe).engine(recipe.start.model or "", encoder(policy), None, watching)
    engine.load_weights(weights, 1)
    yield engine, watching
    engine.close()


@pytest.fixture
def pool(shared: tuple[Any, Watching]) -> tuple[Any, Watching]:
    """Return the same two replicas for all tests, complete and idle."""
    engine, _ = shared
    engine.interrupt()
    wait_for_successors(engine)
    return shared


def wait_for_successors(engine: Any) -> None:
    """Wait until the successor of a dead replica has started, while the others work."""
    while None in engine.replicas:
        engine.submit(requests([5], limit=4))
        assert len(by_place(engine.finished_samples())) == 6


def test_two_replicas_sample_what_one_engine_samples(pool: tuple[Any, Watching], alone: Tokens) -> None:
    engine, watching = pool
    assert len({facts.pid for facts in engine.replicas}) == 2
    version, names = watching.seen[0]
    assert (version, len(names)) == (1, 2)
    engine.submit(requests(range(12)))
    groups = {group.request.draw: group for group in engine.finished()}
    assert sorted(groups) == list(range(12))
    samples = {(draw, i): c for draw, group in groups.items() for i, c in enumerate(group.completions)}
    assert near_ties(alone, samples) <= 2
    assert {c.policy_version for c in samples.values()} == {1}
    observed = engine.observations()
    shares = [observed[f"cluster/replica_{i}/tokens"] for i in range(2)]
    assert min(shares) > 0
    assert sum(shares) == sum(map(len, samples.values()))


def test_an_interrupt_returns_what_was_unfinished_and_leaves_nothing(pool: tuple[Any, Watching], alone: Tokens) -> None:
    engine, _ = pool
    engine.submit(requests(range(12), limit=100))
    next(engine.finished_samples())
    unfinished = [request.draw for request in engine.interrupt()]
    assert unfinished == sorted(unfinished)
    assert len(unfinished) >= 11
    engine.submit(requests([3]))
    samples = by_place(engine.finished_samples())
    assert near_ties({place: c for place, c in alone.items() if place[0] == 3}, samples) == 0


def test_what_no_engine_could_serve_is_refused_before_it_is_sent(pool: tuple[Any, Watching]) -> None:
    engine, _ = pool
    with pytest.raises(ValueError, match="exceeds the context of 256"):
        engine.submit(requests([1], limit=300))
    assert list(engine.finished()) == []


def test_a_killed_replica_costs_no_sample(pool: tuple[Any, Watching], alone: Tokens) -> None:
    engine, watching = pool
    lost = len(engine.lost)
    engine.submit(requests(range(12)))
    samples = engine.finished_samples()
    first = next(samples)
    os.kill(engine.replicas[0].pid, signal.SIGKILL)
    found = by_place([first, *samples])
    assert near_ties(alone, found) <= 2
    assert len(engine.lost) == lost + 1
    assert "rollout replica 0" in engine.lost[-1]
    wait_for_successors(engine)
    assert watching.seen[-1][1][0].startswith("rollout replica 0")
    engine.submit(requests(range(12)))
    assert near_ties(alone, by_place(engine.finished_samples())) <= 2


def test_a_node_that_dies_costs_no_sample_and_no_verdict(
    three_nodes: Any, pool: tuple[Any, Watching], recipe: TrainConfig, alone: Tokens
) -> None:
    from magicrl.distributed.cluster_parts import ClusterParts

    engine, _ = pool
    judge = ClusterParts(recipe).judge()
    judge.warm_up(["exact", "maths"])
    asked = problem(reference="7", verifier="maths")
    doomed, lost = engine.replicas[1].node, len(engine.lost)
    node = next(node for node in three_nodes.list_all_nodes() if node.node_id == doomed)
    engine.submit(requests(range(12)))
    samples = engine.finished_samples()
    first = next(samples)
    tickets = [judge.submit(asked, [rf"\boxed{{{n}}}" for n in range(10)]) for _ in range(3)]
    three_nodes.remove_node(node)
    three_nodes.add_node(num_cpus=2, object_store_memory=80 << 20)  # for the following tests
    assert near_ties(alone, by_place([first, *samples])) <= 2
    assert len(engine.lost) > lost
    for ticket in tickets:
        assert [verdict.correct for verdict in judge.result(ticket)] == [n == 7 for n in range(10)]
    judge.close()


def test_a_replica_with_stale_weights_is_named(
    three_nodes: Any, recipe: TrainConfig, policy: Any, weights: dict[str, torch.Tensor]
) -> None:
    from magicrl.distributed.cluster_parts import ClusterParts
    from magicrl.training.assemble import make_learner

    parts = ClusterParts(recipe.model_copy(update={"cluster": one_replica(recipe)}))
    learner = make_learner(recipe, policy)
    check = LogprobCheck(learner, [(problem(), frozen_tokens([5, 6, 7]))], float32=True, ceiling=0.25)
    engine = parts.engine(recipe.start.model or "", encoder(policy), learner, check)
    try:
        engine.load_weights(learner.weights(), 0)
        head = {"model.norm.weight": learner.weights()["model.norm.weight"] * 1.05}
        with pytest.raises(StaleEngineError, match=r"rollout replica 0 .* and the learner differ"):
            engine.load_weights({**learner.weights(), **head}, 0)
    finally:
        engine.close()


def one_replica(recipe: TrainConfig) -> Any:
    assert recipe.cluster is not None
    rollout = recipe.cluster.rollout.model_copy(update={"replicas": 1})
    return recipe.cluster.model_copy(update={"rollout": rollout})


def test_more_replicas_than_the_nodes_hold_are_refused(
    three_nodes: Any, make_recipe: Callable[..., TrainConfig]
) -> None:
    from magicrl.distributed.cluster_parts import ClusterParts

    with pytest.raises(RecipeError, match=r"9 rollout replicas of 1.5 CPUs each do not fit, only 2 would"):
        ClusterParts(make_recipe({"rollout": {"replicas": 9, "cpus": 1.5}}))


def test_the_doctor_looks_at_every_node(three_nodes: Any) -> None:
    from magicrl.distributed.doctor import examine_cluster, start_probe
    from magicrl.distributed.runtime import nodes

    found = nodes()
    findings = examine_cluster(found, megabytes=8, probe=start_probe)
    assert not [finding for finding in findings if finding.status == "trouble"]
    for about in ("versions", "GPUs", "memory", "object store", "clock"):
        assert sum(finding.what.startswith(about) for finding in findings) == len(found) == 3
    assert sum("got on" in finding.what for finding in findings) == 3
    assert sum(finding.text.endswith("reached") for finding in findings) == 3
    cramped = examine_cluster(found[:1], megabytes=64, probe=start_probe)
    assert any(f.status == "trouble" and "--object-store-memory=134217728" in f.remedy for f in cramped)


HELD = """
import threading
from magicrl.rollout.engines import make_in_process

def make(settings):
    engine, owner = make_in_process(settings), threading.get_ident()

    def held(name, method):
        def call(*given):
            if threading.get_ident() != owner:
                raise RuntimeError(f"{name} comes from another thread than the one that made the engine")
            return method(*given)
        return call

    for name in ("submit", "turn", "load_weights", "answers", "interrupt", "peak_mb"):
        setattr(engine, name, held(name, getattr(engine, name)))
    return engine
"""


def test_one_thread_makes_a_replica_s_engine_and_drives_it(
    three_nodes: Any,
    make_recipe: Callable[..., TrainConfig],
    policy: Any,
    weights: dict[str, torch.Tensor],
    tmp_path: Any,
) -> None:
    from magicrl.distributed.cluster_parts import ClusterParts

    (tmp_path / "held.py").write_text(HELD)
    recipe = make_recipe({"rollout": {"replicas": 1}}, rollout={"engine": f"{tmp_path}/held.py:make"})
    pool: Any = ClusterParts(recipe).engine(recipe.start.model or "", encoder(policy), None, Watching())  # type: ignore[arg-type]
    try:
        pool.load_weights(weights, 1)
        pool.submit(requests(range(3)))
        next(pool.finished_samples())
        pool.load_weights(weights, 2)
        assert len(list(pool.finished_samples())) == 3 * 6 - 1
        pool.interrupt()
        assert pool.lost == []
    finally:
        pool.close()
