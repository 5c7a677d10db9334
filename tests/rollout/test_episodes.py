"""Episodes on the in-process engine: the tokens of every turn, what is learned from, and what fails."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import problem
from numpy.typing import NDArray

from magicrl.config.schema import EnvironmentConfig
from magicrl.records import FinishReason, Problem, RolloutGroup, frozen_tokens
from magicrl.rollout.episodes import EpisodeEngine
from magicrl.rollout.in_process import InProcessEngine

ENDS = frozenset({0, 1, 2, 3, 4, 5, 6, 7})
"""A fifth of the vocabulary: turns are short."""

GAME = """
    from magicrl.environments.base import Step

    class Sums:
        '''Answers with what its turns add up to; over after the third, or once the sum is divisible by 11.'''

        right_from = 0.5

        def reset(self, problem):
            self.turns, self.sum = 0, len(problem.id)

        def step(self, text):
            self.turns += 1
            self.sum += sum(map(int, text.split()))
            if self.turns == 3 or self.sum % 11 == 0:
                return Step(done=True, reward=self.sum % 2 / 2, metrics={"sum": float(self.sum)})
            return Step(observation=f"{self.sum % 30} {self.turns}")
"""


class Encoder:
    """Text is numbers, which are tokens; an observation is preceded by token 39."""

    def observation(self, problem: Problem, text: str, max_tokens: int | None = None) -> NDArray[np.int32]:
        return frozen_tokens([39, *map(int, text.split())][:max_tokens])

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, np.asarray(tokens).tolist()))


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("environments") / "games.py"
    path.write_text(textwrap.dedent(GAME))
    return f"{path}:Sums"


@pytest.fixture
def make_episodes(make_reference: Any, make_engine: Any) -> Generator[Callable[..., EpisodeEngine]]:
    made: list[EpisodeEngine] = []
    reference = make_reference("llama", torch.float32)

    def make(limits: dict[str, Any] | None = None, **options: Any) -> EpisodeEngine:
        inner: InProcessEngine = make_engine(reference, end_tokens=ENDS, **options)
        inner._version = 0
        config = EnvironmentConfig(**{"max_turns": 4, "max_observation_tokens": 4} | (limits or {}))
        engine = EpisodeEngine(inner, Encoder(), config)  # type: ignore[arg-type]
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def asked(make_requests: Any, game: str, **options: Any) -> list[Any]:
    return [
        replace(request, problem=problem(f"p{request.draw}", environment=game))
        for request in make_requests(**{"limit": 24} | options)
    ]


def run(engine: Any, requests: Sequence[Any]) -> list[RolloutGroup]:
    engine.submit(requests)
    return sorted(engine.finished(), key=lambda group: group.request.draw)


def tokens_of(groups: Sequence[RolloutGroup]) -> list[list[list[int]]]:
    return [[c.tokens.tolist() for c in group.completions] for group in groups]


def test_every_turn_is_what_a_request_for_it_gives(make_episodes: Any, make_requests: Any, game: str) -> None:
    """Turn by turn by hand, on an engine without episodes, with its own sum of the numbers."""
    engine = make_episodes()
    groups = run(engine, asked(make_requests, game))
    plain, several = make_episodes()._engine, 0
    for group in groups:
        request = group.request
        for index, completion in enumerate(group.completions):
            episode = completion.episode
            assert episode is not None
            total, so_far = len(request.problem.id), list[int]()
            for turn in range(3):
                sampled = sum(1 for place in range(len(so_far)) if (completion.sampled)[place])
                again = replace(
                    request,
                    problem=problem("plain"),
                    prompt_tokens=frozen_tokens([*request.prompt_tokens, *so_far]),
                    sampling=replace(request.sampling, max_tokens=24 - sampled),
                    samples=(index,),
                    offset=len(so_far),
                )
                ((made,),) = (g.completions for g in run(plain, [again]))
                start = len(so_far)
                so_far += made.tokens.tolist()
                assert completion.tokens[start : len(so_far)].tolist() == made.tokens.tolist()
                np.testing.assert_allclose(
                    completion.sampler_logprobs[start : len(so_far)], made.sampler_logprobs, atol=2e-5
                )
                if made.finish_reason is FinishReason.LENGTH:
                    assert completion.truncated
                    break
                total += sum(made.tokens.tolist())
                if turn == 2 or total % 11 == 0:
                    assert completion.finish_reason is FinishReason.STOP
                    assert episode.verdict is not None
                    assert episode.verdict.score == total % 2 / 2
                    assert episode.verdict.correct == bool(total % 2)
                    assert episode.metrics == {"sum": total}
                    break
                if sampled + len(made) == 24:
                    assert completion.truncated, "T is used up, and the environment is not done"
                    break
                observation = [39, total % 30, turn + 1]
                assert (len(so_far), 3) == episode.observed[turn]
                so_far += observation
                several += 1
            assert completion.tokens.tolist() == so_far
            observed = ~completion.sampled if completion.sampled is not None else np.zeros(0)
            assert not completion.sampler_logprobs[observed].any()
            assert completion.num_sampled <= 24
    assert several > 10, "most responses have several turns"
