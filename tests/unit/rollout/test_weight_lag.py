"""Stale weights: which version samples which tokens, before and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.weight_lag import LaggedEngine

Make = Callable[..., Any]


def sampled(engine: Any, request: Any) -> tuple[list[list[int]], set[int]]:
    engine.submit([request])
    (group,) = engine.finished()
    return [c.tokens.tolist() for c in group.completions], {c.policy_version for c in group.completions}


def test_the_weights_of_lag_updates_ago_sample(make_reference: Make, make_engine: Make, make_request: Make) -> None:
    """Versions 0, 1, 2, 3 at lag 2 serve 0, 0, 0, 1. The tokens are those of an engine with these weights."""
    models = [make_reference("llama", seed=n) for n in range(4)]
    request = make_request(0, [1, 2, 3])
    plain = []
    for version, model in enumerate(models):
        engine = make_engine(model)
        engine.load_weights(model.state_dict(), version)
        plain.append(sampled(engine, request))
    assert len({str(tokens) for tokens, _ in plain}) == 4
    lagged = LaggedEngine(make_engine(models[0]), lag=2)
    assert isinstance(lagged, RolloutEngine)
    for version, expected in ((0, 0), (1, 0), (2, 0), (3, 1)):
        weights = {name: p.detach().clone() for name, p in models[version].named_parameters()}
        lagged.load_weights(weights, version)
        for tensor in weights.values():  # the learner keeps writing into its weights
            tensor.zero_()
        assert lagged.policy_version == expected
        assert sampled(lagged, request) == plain[expected]
    with lagged.newest_weights():
        assert lagged.policy_version == 3
        assert sampled(lagged, request) == plain[3]
    assert sampled(lagged, request) == plain[1]


def test_a_restored_engine_serves_what_it_would_have_served(
    make_reference: Make, make_engine: Make, make_request: Make
) -> None:
    """Resume like a session: load the newest weights, then restore. The next update shifts both equally."""
    models = [make_reference("llama-tied", seed=n) for n in range(5)]
    request = make_request(0, [4, 4])
    lagged = LaggedEngine(make_engine(models[0]), lag=1)
    for version in range(4):
        lagged.load_weights(dict(models[version].named_parameters()), version)
    state = dict(lagged.state())
    assert state["versions"] == [2, 3]
    assert all(isinstance(v, torch.Tensor) for k, v in state.items() if k != "versions")
    resumed = LaggedEngine(make_engine(models[0]), lag=1)
    resumed.load_weights(dict(models[3].named_parameters()), 3)
    resumed.restore(state)
    assert sampled(resumed, request) == sampled(lagged, request)
    for engine in (lagged, resumed):
        engine.load_weights(dict(models[4].named_parameters()), 4)
        assert engine.policy_version == 3
    assert sampled(resumed, request) == sampled(lagged, request)


def test_the_same_version_again_is_no_update(make_reference: Make, make_engine: Make) -> None:
    model = make_reference("llama")
    lagged = LaggedEngine(make_engine(model), lag=1)
    for version in (0, 1, 1, 1):
        lagged.load_weights(model.state_dict(), version)
    assert lagged.policy_version == 0
    with pytest.raises(ValueError, match="keeps 2 weights"):
        LaggedEngine(make_engine(model), lag=0).restore(lagged.state())
    with pytest.raises(ValueError, match="got -1"):
        LaggedEngine(lagged, lag=-1)
