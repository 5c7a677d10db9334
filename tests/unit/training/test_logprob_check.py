"""The log-prob check on a tiny learner: an engine with the learner's weights passes, a stale one stops the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import problem

from magicrl.config.model_schema import ModelConfig, TinyModelConfig
from magicrl.models.small_models import make_tiny
from magicrl.records import RolloutGroup, frozen_floats, frozen_tokens
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.learner import LocalLearner
from magicrl.training.logprob_check import LEAST_LIMIT, LogprobCheck, StaleEngineError
from magicrl.training.objective import LearnerSettings

PROMPTS = [(problem(f"p{n}"), frozen_tokens(tokens)) for n, tokens in enumerate(([5, 6, 7], [9, 8, 3, 1], [2]))]


def tiny_model() -> Any:
    return make_tiny(TinyModelConfig(max_context=64), [f"w{n}" for n in range(18)], seed=3)[0]


@pytest.fixture
def learner() -> LocalLearner:
    return LocalLearner(tiny_model(), LearnerSettings(model=ModelConfig(dtype="float32")))


@pytest.fixture
def engine() -> InProcessEngine:
    return InProcessEngine(
        tiny_model(),
        EngineSettings(model="", max_rows=8, memory_limit_mb=16),
        end_tokens=frozenset(),
        decode=str,
        valid_vocab=20,
        max_context=64,
    )


def answers(engine: InProcessEngine, check: LogprobCheck) -> list[RolloutGroup]:
    engine.submit(check.requests)
    return sorted(engine.finished(), key=lambda group: group.request.draw)


def moved(learner: LocalLearner, part: str, by: float) -> dict[str, torch.Tensor]:
    """Return the learner's weights, scaled where the name contains ``part``."""
    return {n: w * (1 + by) if part in n else w for n, w in learner.weights().items()}


def checked(learner: LocalLearner, *, float32: bool) -> LogprobCheck:
    return LogprobCheck(learner, PROMPTS, float32=float32, ceiling=0.25)


def test_it_asks_the_same_few_short_samples_every_time(learner: LocalLearner) -> None:
    check = checked(learner, float32=True)
    assert [request.problem.id for request in check.requests] == ["p0", "p1"]
    assert sum(request.group_size * request.sampling.max_tokens for request in check.requests) == 128


@pytest.mark.parametrize("part", ["embed_tokens", "down_proj"])
def test_weights_that_partly_stayed_behind_are_found(learner: LocalLearner, engine: InProcessEngine, part: str) -> None:
    check = checked(learner, float32=True)
    engine.load_weights(learner.weights(), 0)
    check.compare({"replica 0": answers(engine, check)}, 0)
    engine.load_weights(moved(learner, part, 0.02), 0)
    with pytest.raises(StaleEngineError, match=r"replica 1 and the learner differ by .* \(limit 0.001\).*stale"):
        check.compare({"replica 1": answers(engine, check)}, 0)


def test_an_engine_that_took_nothing_is_told_apart(learner: LocalLearner, engine: InProcessEngine) -> None:
    check = checked(learner, float32=True)
    engine.load_weights(learner.weights(), 0)
    old = answers(engine, check)
    check.compare({"engine": old}, 0)
    with torch.no_grad():
        for weight in learner.weights().values():
            weight *= 1.05
    with pytest.raises(StaleEngineError, match="the update did not arrive"):
        check.compare({"engine": old}, 0)


def test_another_model_is_found_at_the_first_comparison(learner: LocalLearner, engine: InProcessEngine) -> None:
    check = checked(learner, float32=True)
    engine.load_weights(moved(learner, "down_proj", 0.5), 0)
    with pytest.raises(StaleEngineError, match="another model folder"):
        check.compare({"engine": answers(engine, check)}, 0)


def test_the_limit_of_another_precision_comes_from_the_first_comparison(
    learner: LocalLearner, engine: InProcessEngine
) -> None:
    check = checked(learner, float32=False)
    assert check.limit is None
    engine.load_weights({n: w.bfloat16().float() for n, w in learner.weights().items()}, 0)
    check.compare({"engine": answers(engine, check)}, 0)
    assert check.limit is not None
    assert LEAST_LIMIT <= check.limit < 0.25
    engine.load_weights(moved(learner, "embed_tokens", 1.0), 0)
    with pytest.raises(StaleEngineError):
        check.compare({"engine": answers(engine, check)}, 0)


def test_an_older_version_cannot_be_compared(learner: LocalLearner) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("the learner is ahead: its log-probs are of other weights")

    check = checked(learner, float32=True)
    learner.logprobs = never  # type: ignore[method-assign]
    groups: Sequence[RolloutGroup] = ()
    check.compare({"engine": groups}, 7)


def shifted(groups: Sequence[RolloutGroup], by: float) -> list[RolloutGroup]:
    """Return the groups with log-probs that are wrong by this much."""
    return [
        replace(
            group,
            completions=tuple(
                replace(c, sampler_logprobs=frozen_floats(c.sampler_logprobs + by)) for c in group.completions
            ),
        )
        for group in groups
    ]


def test_a_gap_above_the_ceiling_is_refused_however_large_the_first_one_was(
    learner: LocalLearner, engine: InProcessEngine
) -> None:
    check = LogprobCheck(learner, PROMPTS, float32=False, ceiling=0.05)
    engine.load_weights(learner.weights(), 0)
    found = answers(engine, check)
    check.compare({"engine": shifted(found, 0.03)}, 0)
    assert check.limit == pytest.approx(0.12, abs=1e-3)
    check.compare({"engine": shifted(found, 0.04)}, 0)
    with pytest.raises(StaleEngineError, match=r"differ by 0\.08 .*\(limit 0\.05\)"):
        check.compare({"engine": shifted(found, 0.08)}, 0)
