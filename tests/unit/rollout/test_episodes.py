"""Episodes on the in-process engine: the tokens of every turn, the trained tokens, and failures."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import completion as response
from builders import problem
from numpy.typing import NDArray

from magicrl.config.schema import EnvironmentConfig
from magicrl.environments.pool import NOT_REPEATABLE, EnvironmentPool
from magicrl.records import FinishReason, Outcome, Problem, RolloutGroup, frozen_tokens
from magicrl.rollout.episodes import EpisodeEngine, with_observation, with_turn
from magicrl.rollout.in_process import InProcessEngine

ENDS = frozenset({0, 1, 2, 3, 4, 5, 6, 7})
"""A fifth of the vocabulary, so that turns are short."""

GAME = """
    from pathlib import Path

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
            moved = Path(__file__).with_name("moved").exists()
            return Step(observation=f"{(self.sum + moved) % 30} {self.turns}")
"""


class Encoder:
    """Encoder of texts of numbers, which are tokens. An observation is preceded by token 39."""

    def observation(self, problem: Problem, text: str, max_tokens: int | None = None) -> NDArray[np.int32]:
        return frozen_tokens([39, *map(int, text.split())][:max_tokens])

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, np.asarray(tokens).tolist()))


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("environments") / "games.py"
    path.write_text(textwrap.dedent(GAME))
    return f"{path}:Sums"


@pytest.fixture(scope="module")
def workers() -> Generator[EnvironmentPool]:
    """Return one pool for all engines here: a worker takes a second to start."""
    with EnvironmentPool(EnvironmentConfig(memory_limit_mb=512)) as pool:
        yield pool


@pytest.fixture
def make_episodes(make_reference: Any, make_engine: Any, workers: EnvironmentPool) -> Callable[..., EpisodeEngine]:
    reference = make_reference("llama", torch.float32)

    def make(limits: dict[str, Any] | None = None, **options: Any) -> EpisodeEngine:
        inner: InProcessEngine = make_engine(reference, end_tokens=ENDS, **options)
        inner._version = 0
        config = EnvironmentConfig(**{"max_turns": 4, "max_observation_tokens": 4} | (limits or {}))
        engine = EpisodeEngine(inner, Encoder(), config)  # type: ignore[arg-type]
        engine._pool = workers
        return engine

    return make


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


@pytest.mark.parametrize("limit", [24, 9])
def test_every_turn_is_what_a_request_for_it_gives(
    make_episodes: Any, make_requests: Any, game: str, limit: int
) -> None:
    """Make turn by turn by hand, on an engine without episodes, with its own sum of the numbers."""
    engine = make_episodes()
    groups = run(engine, asked(make_requests, game, limit=limit))
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
                    sampling=replace(request.sampling, max_tokens=limit - sampled),
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
                if sampled + len(made) == limit:
                    assert completion.truncated, "T is used up, and the environment is not done"
                    break
                observation = [39, total % 30, turn + 1]
                assert (len(so_far), 3) == episode.observed[turn]
                so_far += observation
                several += 1
            assert completion.tokens.tolist() == so_far
            assert completion.text == " ".join(map(str, so_far)), "of all turns"
            observed = ~completion.sampled if completion.sampled is not None else np.zeros(0)
            assert not completion.sampler_logprobs[observed].any()
            assert completion.num_sampled <= limit
    assert several > 10, "most responses have several turns"


def fields_of(groups: Sequence[RolloutGroup]) -> list[Any]:
    return [
        [
            (c.tokens.tolist(), c.sampler_logprobs.tolist(), c.finish_reason, c.text, c.version_spans, c.episode)
            for c in group.completions
        ]
        for group in groups
    ]


@pytest.mark.parametrize("rows", [3, 30])
def test_rows_change_no_token(make_episodes: Any, make_requests: Any, game: str, rows: int) -> None:
    wide, narrow = (run(make_episodes(max_rows=n), asked(make_requests, game)) for n in (8, rows))
    assert tokens_of(wide) == tokens_of(narrow)
    assert [c.episode for g in wide for c in g.completions] == [c.episode for g in narrow for c in g.completions]


def test_room_is_made_once(make_episodes: Any, make_requests: Any, game: str) -> None:
    """Another turn, with a longer prompt, must not wait for a new cache."""
    engine = make_episodes()
    engine.submit(asked(make_requests, game))
    engine._advance()
    cache = engine._engine._work.cache
    list(engine.finished())
    assert engine._engine._work.cache is cache


@pytest.mark.parametrize("rows", [3, 8])
def test_a_resumed_engine_goes_on_bit_for_bit(make_episodes: Any, make_requests: Any, game: str, rows: int) -> None:
    """Interrupt with several turns of one draw in flight, by the snapshot's path. Further turns start after it."""
    whole, stopped, other = (make_episodes(max_rows=rows) for _ in range(3))
    requests = asked(make_requests, game)
    whole.submit(requests)
    early = whole.advance(60)
    stopped.submit(requests)
    assert len(stopped.advance(60)) == len(early)
    turns = {(r.draw, r.offset) for r, *_ in stopped._asked.values()}
    assert len(turns) > len({draw for draw, _ in turns}), "several turns of one draw"
    snapshot = stopped.snapshot()
    left = [r for r in requests if r.draw not in {g.request.draw for g in early}]
    other.resume(snapshot, left)
    again = other.snapshot()
    assert again["asked"] == snapshot["asked"]
    assert fields_of(sorted(other.finished(), key=lambda g: g.request.draw)) == fields_of(
        sorted(whole.finished(), key=lambda g: g.request.draw)
    )


def test_interrupted_episodes_go_on_where_they_were(make_episodes: Any, make_requests: Any, game: str) -> None:
    engine, other = make_episodes(), make_episodes()
    requests = asked(make_requests, game)
    whole = run(engine, requests)
    engine.submit(requests)
    before = engine.advance(100)
    begun = engine.interrupt(keep=True)
    assert any(c.episode is not None and c.episode.observed for r in begun for _, c in r.begun)
    other.submit(begun)
    other.advance(7)
    other.submit(other.interrupt(keep=True))  # and once more, in the middle of the restored responses
    assert tokens_of(sorted([*before, *other.finished()], key=lambda g: g.request.draw)) == tokens_of(whole)
    assert engine.interrupt() == []
    assert run(engine, requests[:1])[0].completions[0].tokens.tolist() == whole[0].completions[0].tokens.tolist()


def test_an_episode_whose_environment_answers_otherwise_now_is_over_and_not_judged(
    make_episodes: Any, make_requests: Any, game: str
) -> None:
    engine, other = make_episodes(), make_episodes()
    engine.submit(asked(make_requests, game))
    engine.advance(100)
    begun = engine.interrupt(keep=True)
    moved = Path(game.rpartition(":")[0]).with_name("moved")
    moved.touch()
    try:
        groups = run(other, begun)
    finally:
        moved.unlink()
    given = {(r.draw, index): c for r in begun for index, c in r.begun if c.finish_reason is FinishReason.ABORTED}
    given = {place: c for place, c in given.items() if c.episode is not None and c.episode.observed}
    assert len(given) > 2
    found = {(g.request.draw, i): c for g in groups for i, c in zip(g.request.indices, g.completions, strict=True)}
    for place, before in given.items():
        verdict = found[place].episode.verdict
        assert (verdict.outcome, verdict.reason) == (Outcome.NOT_JUDGED, NOT_REPEATABLE)
        end = sum(before.episode.observed[-1])
        assert found[place].tokens.tolist() == before.tokens[:end].tolist(), "nothing is sampled behind it"


def test_an_episode_over_an_update_counts_as_of_its_oldest_weights() -> None:
    first = with_observation(with_turn(None, response([5, 6])), frozen_tokens([39, 1]), cut=True)
    both = with_observation(with_turn(first, response([7], policy_version=1)), frozen_tokens([39]), cut=True)
    assert both.policy_version == 0
    assert both.version_spans == ((0, 4), (1, 2))
    assert both.episode is not None
    assert (both.episode.observed, both.episode.cut) == (((2, 2), (5, 1)), 2)


def test_an_evaluation_goes_before_what_is_in_flight(make_episodes: Any, make_requests: Any, game: str) -> None:
    engine = make_episodes()
    requests = asked(make_requests, game)
    whole = run(engine, requests)
    engine.submit(requests[:3])
    before = engine.advance(40)
    asked_between = engine.answers(requests[3:])
    assert tokens_of(asked_between) == tokens_of(whole[3:])
    after = sorted([*before, *engine.finished()], key=lambda g: g.request.draw)
    assert tokens_of(after) == tokens_of(whole[:3])


def test_requests_without_an_environment_pass_through(make_episodes: Any, make_requests: Any, game: str) -> None:
    engine = make_episodes()
    plain, played = make_requests(2, limit=6), asked(make_requests, game)[2:]
    mixed = run(engine, [*plain, *played])
    assert tokens_of(mixed[:2]) == tokens_of(run(engine._engine, plain))
    assert {c.episode for g in mixed[:2] for c in g.completions} == {None}
    assert tokens_of(mixed[2:]) == tokens_of(run(engine, played))


def test_a_longer_observation_is_cut_and_counted(make_episodes: Any, make_requests: Any, game: str) -> None:
    groups = run(make_episodes({"max_observation_tokens": 2}), asked(make_requests, game))
    episodes = [c.episode for g in groups for c in g.completions]
    assert {count for e in episodes for _, count in e.observed} == {2}
    assert sum(e.cut for e in episodes) == sum(len(e.observed) for e in episodes) > 0


def test_turns_end_at_their_limit(make_episodes: Any, make_requests: Any, game: str) -> None:
    groups = run(make_episodes({"max_turns": 2}), asked(make_requests, game))
    late = [c for g in groups for c in g.completions if len(c.episode.observed) == 1 and c.num_sampled < 24]
    cut = [c for c in late if c.truncated]
    assert cut
    assert {c.episode.verdict.status for c in cut} == {"no_answer"}
    assert not any(len(c.episode.observed) > 1 for g in groups for c in g.completions)


def test_an_episode_that_could_outgrow_the_context_is_refused(
    make_episodes: Any, make_requests: Any, game: str
) -> None:
    engine = make_episodes({"max_observation_tokens": 40})
    with pytest.raises(ValueError, match=r"'p0'.*3 observations of 40 tokens need 149 tokens.*context of 128"):
        engine.submit(asked(make_requests, game))
    assert list(engine.finished()) == []
