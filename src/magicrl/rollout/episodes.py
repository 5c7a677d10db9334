"""Episodes on any engine: the model's turns and an environment's observations as one response.

A turn is a request of its own to the inner engine, whose prompt ends in all that came before. Tokens are put end to end
as they were sampled, and nothing is tokenised again. The environments that turns of one moment are for answer at the
same time and are waited for, so that what is asked next depends on requests and tokens alone, never on time.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from magicrl.config.schema import EnvironmentConfig
from magicrl.environments.base import Step
from magicrl.environments.pool import NOT_REPEATABLE, EnvironmentPool, Play
from magicrl.models.prompts import PromptEncoder
from magicrl.records import Completion, FinishedSample, FinishReason, RolloutRequest, Verdict, frozen_tokens
from magicrl.rollout.protocol import Learner, RolloutEngine
from magicrl.rollout.requests import Filed, GroupProgress, OpenGroups, SchedulingEngine, pack_begun, with_begun
from magicrl.rollout.turns import parted, turns_of, with_observation, with_turn
from magicrl_verifiers.records import make_verdict


@dataclass(kw_only=True, eq=False, slots=True)
class Sample:
    """A response under way."""

    group: GroupProgress  # of what was asked for
    index: int
    asked: RolloutRequest | None = None  # to the inner engine, for its present turn
    play: Play | None = None  # None: its problem has no environment
    so_far: Completion | None = None  # turns and observations; ends in an observation
    turn: Completion | None = None  # what there is of the present turn, from an interrupted generation
    began: float | None = None  # clock at the start of its first turn


class EpisodeEngine(SchedulingEngine):
    """An engine whose responses environments take part in; requests without one pass through.

    Args:
        engine: makes the turns; belongs to this one from here on.
        encoder: text to tokens and back.
        config: limits and workers of the environments.
    """

    def __init__(self, engine: RolloutEngine, encoder: PromptEncoder, config: EnvironmentConfig) -> None:
        self._engine = engine
        self._encoder = encoder
        self._config = config
        self._pool = EnvironmentPool(config)
        self.capabilities = engine.capabilities
        self._groups = OpenGroups()
        self._samples: dict[tuple[int, int], Sample] = {}  # by issue order and index
        # by identity: requests of the inner engine, for which group, and their samples that are to come
        self._asked: dict[int, tuple[RolloutRequest, int, set[int]]] = {}
        self._present: Mapping[tuple[int, int, int], Completion] = {}  # turns as `interrupt` found them

    @property
    def sampler(self) -> RolloutEngine:
        return self._engine.sampler

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def max_context(self) -> int:
        return self._engine.max_context

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """See `RolloutEngine.submit`; refused is also an episode that could outgrow the context."""
        for request in requests:
            self._check(request)
        before, groups = self._groups.issued, self._groups.take_in(requests)
        samples = [sample for group in groups for sample in self._begin(group)]
        try:
            self._engine.submit([turn for group in groups for turn in self._openings(group)])
        except ValueError:
            self._drop(before)
            raise
        self._replay(samples)

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        self._engine.load_weights(weights, version)

    def sync_weights(self, learner: Learner) -> None:
        self._engine.sync_weights(learner)

    def sleep(self) -> None:
        self._engine.sleep()

    def state(self) -> Mapping[str, Any]:
        return self._engine.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._engine.restore(state)

    def busy_seconds(self) -> float:
        return self._engine.busy_seconds()

    def sampled_tokens(self) -> int:
        return self._engine.sampled_tokens()

    @contextmanager
    def newest_weights(self) -> Generator[None]:
        with self._engine.newest_weights(), self._groups.set_aside():
            try:
                yield
            finally:
                self._drop(self._groups.first)  # an evaluation that was broken off leaves nothing behind

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        """See `RolloutEngine.interrupt`; episodes that go on from there are played again from their turns."""
        stopped = self._engine.interrupt(keep=keep)
        self._present = {(r.draw, r.offset, index): turn for r in stopped for index, turn in r.begun}
        unfinished = self._unfinished(keep=keep)
        self._drop(0)
        return unfinished

    def close(self) -> None:
        self._engine.close()
        self._pool.close()

    def snapshot(self) -> Mapping[str, Any]:
        """Episodes up to their last observation, and the inner engine's own snapshot of their present turns."""
        self._take(self._engine.advance_samples(0))
        self._present = {}
        episodes, inner = pack_begun(self._unfinished(keep=True)), self._engine.snapshot()
        return {
            "asked": [[request.draw, request.offset, *request.indices] for request, *_ in self._asked.values()],
            **{f"episodes/{name}": value for name, value in episodes.items()},
            **{f"engine/{name}": value for name, value in inner.items()},
        }

    def resume(self, snapshot: Mapping[str, Any], requests: Sequence[RolloutRequest]) -> None:
        """Inverse of ``snapshot``: the inner engine goes on with the very turns, environments play theirs again."""
        episodes, inner = (
            {name.removeprefix(head): value for name, value in snapshot.items() if name.startswith(head)}
            for head in ("episodes/", "engine/")
        )
        groups = {group.request.draw: group for group in self._groups.take_in(with_begun(episodes, requests))}
        samples = [sample for group in groups.values() for sample in self._begin(group)]
        turns: list[RolloutRequest] = []
        for draw, offset, *indices in snapshot.get("asked", ()):
            group = groups[draw]
            # a first turn as it was asked, for all its samples: some may be over, or further on, by now
            turns.append(self._next(self._samples[group.order, indices[0]]) if offset else self._first(group, indices))
        turns += [turn for group in groups.values() for turn in self._openings(group)]
        self._engine.resume(inner, turns)
        self._replay(samples)

    def _advance(self) -> None:
        self._take(self._engine.turn())

    def _ahead(self, tokens: int) -> list[Filed]:
        target = self.sampled_tokens() + tokens
        while True:
            before = self.sampled_tokens()
            # a token a row at a time, so that an episode's next turn starts as soon as it can
            ended = self._engine.advance_samples(1 if before < target else 0)
            self._take(ended)
            sampled = self.sampled_tokens()
            if sampled >= target or not (ended or sampled > before):
                return self._groups.ended()

    def _running(self) -> Iterator[tuple[GroupProgress, int, Completion]]:
        for sample in self._samples.values():
            assert sample.asked is not None, "a sample under way was asked for"
            turn = self._present.get((sample.asked.draw, sample.asked.offset, sample.index))
            if sample.play is not None:
                begun = turn is not None and turn.finish_reason is FinishReason.ABORTED
                turn = with_turn(sample.so_far, turn) if turn is not None and begun else sample.so_far
            if turn is not None:
                yield sample.group, sample.index, replace(turn, text=self._encoder.decode(turn.tokens))

    # asking for turns

    def _check(self, request: RolloutRequest) -> None:
        """Raise ``ValueError``, naming the problem, for an episode that cannot be played to its end."""
        if request.problem.environment is None:
            return
        name = f"problem {request.problem.id!r}"
        if not self.capabilities.turns or not len(request.prompt_tokens):
            raise ValueError(
                f"{name}: its environment {request.problem.environment!r} needs an engine that takes and gives token "
                "ids; of servers that is vLLM's, in mode completions and with the model's tokenizer named"
            )
        self._encoder.observation(request.problem, "", self._config.max_observation_tokens)  # has the template room?
        most = len(request.prompt_tokens) + request.sampling.max_tokens + self._config.most_observed
        if most > self.max_context:
            raise ValueError(
                f"{name}: prompt, max_tokens and {self._config.max_turns - 1} observations of "
                f"{self._config.max_observation_tokens} tokens need {most} tokens, more than the engine's context of "
                f"{self.max_context}; lower max_tokens (T), environment.max_turns or environment.max_observation_tokens"
            )

    def _begin(self, group: GroupProgress) -> list[Sample]:
        """The samples of a group that are to be made, with what there is of each."""
        problem, begun = group.request.problem, group.partial
        for index in group.to_start:
            sample = self._samples[group.order, index] = Sample(group=group, index=index)
            sample.turn = begun.get(index)
            if problem.environment is not None:
                sample.play = self._pool.begin(problem)
                sample.so_far, sample.turn = parted(begun[index]) if index in begun else (None, None)
        return [self._samples[group.order, index] for index in group.to_start]

    def _openings(self, group: GroupProgress) -> list[RolloutRequest]:
        """What the inner engine is to be asked for the samples of a group that nothing was asked for yet."""
        waiting = [self._samples[group.order, index] for index in group.to_start]
        waiting = [sample for sample in waiting if sample.asked is None]
        first = [sample.index for sample in waiting if sample.so_far is None]
        turns = [self._first(group, first)] if first else []
        return turns + [self._next(sample) for sample in waiting if sample.so_far is not None]

    def _first(self, group: GroupProgress, indices: Sequence[int]) -> RolloutRequest:
        """The request for the first turn of these samples."""
        request = group.request
        own = [self._samples.get((group.order, index)) for index in indices]
        begun = tuple((s.index, s.turn) for s in own if s is not None and s.turn is not None and s.so_far is None)
        if request.problem.environment is not None:
            request = replace(request, room=request.sampling.max_tokens + self._config.most_observed)
        request = replace(request, samples=tuple(indices), begun=begun)
        awaited = [sample for sample in own if sample is not None and sample.so_far is None]
        for sample in awaited:
            sample.asked = request
        self._asked[id(request)] = (request, group.order, {sample.index for sample in awaited})
        return request

    def _next(self, sample: Sample) -> RolloutRequest:
        """The request for a sample's next turn."""
        request, so_far = sample.group.request, sample.so_far
        assert so_far is not None, "a first turn has no turn before it"
        turn = sample.asked = replace(
            request,
            prompt_tokens=frozen_tokens(np.concatenate([request.prompt_tokens, so_far.tokens])),
            sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - so_far.num_sampled),
            samples=(sample.index,),
            offset=len(so_far),
            room=request.sampling.max_tokens + self._config.most_observed - len(so_far),
            begun=() if sample.turn is None else ((sample.index, sample.turn),),
        )
        self._asked[id(turn)] = (turn, sample.group.order, {sample.index})
        return turn

    # what turns come to

    def _take(self, ended: Sequence[FinishedSample]) -> None:
        """Have the environments of these turns answer, and ask for the turns after them."""
        due: list[tuple[Sample, Completion]] = []
        for item in ended:
            sample, turn = self._sample_of(item), item.completion
            if sample is None:
                continue
            if sample.began is None:
                sample.began = time.perf_counter() - turn.seconds - (sample.so_far.seconds if sample.so_far else 0.0)
            if sample.play is None:
                self._file(sample, turn)
            elif turn.finish_reason is FinishReason.STOP:
                due.append((sample, with_turn(sample.so_far, turn)))
            else:
                self._finish(sample, with_turn(sample.so_far, turn))
        answers = self._pool.steps([(s.play, r.episode.answer) for s, r in due if s.play is not None and r.episode])
        further = [self._answered(*pair, answer) for pair, answer in zip(due, answers, strict=True)]
        if asked := [turn for turn in further if turn is not None]:
            self._engine.submit(asked)

    def _sample_of(self, item: FinishedSample) -> Sample | None:
        """Whose turn this is; None of one that is made again though it is known."""
        if id(item.request) not in self._asked:
            return None
        request, order, missing = self._asked[id(item.request)]
        missing.discard(item.index)
        if not missing:
            del self._asked[id(item.request)]
        sample = self._samples.get((order, item.index))
        return sample if sample is not None and sample.asked is request else None

    def _answered(self, sample: Sample, response: Completion, answer: Step | Verdict) -> RolloutRequest | None:
        """The next turn, after what the environment answered to this one; None where it was the last."""
        assert sample.play is not None, "only an episode is answered"
        assert response.episode is not None, "only an episode is answered"
        if isinstance(answer, Verdict):
            return self._finish(sample, response, verdict=answer)
        if answer.done:
            verdict, metrics = sample.play.place.spec.verdict(answer), answer.metrics
            return self._finish(sample, response, verdict=verdict, metrics=metrics)
        sampled, turns = response.num_sampled, len(response.episode.observed) + 1
        if sampled >= sample.group.request.sampling.max_tokens or turns >= self._config.max_turns:
            return self._finish(sample, replace(response, finish_reason=FinishReason.LENGTH))
        problem, most = sample.group.request.problem, self._config.max_observation_tokens
        try:
            tokens = self._encoder.observation(problem, answer.observation, most)
            cut = len(tokens) == most and len(self._encoder.observation(problem, answer.observation)) > most
        except ValueError as error:  # a word that the vocabulary lacks
            return self._finish(sample, response, verdict=self._pool.fail(sample.play, f"observation: {error}"))
        sample.so_far, sample.turn = with_observation(response, tokens, cut=cut), None
        return self._next(sample)

    def _finish(
        self,
        sample: Sample,
        response: Completion,
        *,
        verdict: Verdict | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Yield an episode that is over; one that was cut has no answer to judge."""
        assert sample.play is not None, "only an episode has one"
        assert response.episode is not None, "only an episode has one"
        assert sample.began is not None, "a turn of it has ended"
        if response.finish_reason is not FinishReason.STOP:
            reason = "cut before the environment was done"
            verdict = make_verdict("no_answer", reason=reason, decided_by="environment")
        self._pool.end(sample.play)
        episode = replace(response.episode, verdict=verdict, metrics=metrics or {})
        text = self._encoder.decode(response.tokens) if episode.observed else response.text
        seconds = time.perf_counter() - sample.began
        self._file(sample, replace(response, text=text, seconds=seconds, episode=episode))

    def _file(self, sample: Sample, completion: Completion) -> None:
        del self._samples[sample.group.order, sample.index]
        self._groups.file(sample.group, sample.index, completion)

    def _replay(self, samples: Iterable[Sample]) -> None:
        """Play the turns of interrupted episodes again; those whose environment answers otherwise now are over."""
        rest = [(sample, sample.so_far, turns_of(sample.so_far)) for sample in samples if sample.so_far is not None]
        while rest:
            asked = [(s.play, self._encoder.decode(turns[0][0])) for s, _, turns in rest if s.play is not None]
            answers, further = self._pool.steps(asked), list[Any]()
            for (sample, so_far, turns), answer in zip(rest, answers, strict=True):
                assert sample.play is not None, "only an episode has turns"
                most, again = self._config.max_observation_tokens, None
                if isinstance(answer, Step) and not answer.done:
                    again = self._encoder.observation(sample.group.request.problem, answer.observation, most)
                if again is not None and np.array_equal(again, turns[0][1]):
                    further += [(sample, so_far, turns[1:])] if turns[1:] else []
                    continue
                sample.began = time.perf_counter() - so_far.seconds
                failed = answer if isinstance(answer, Verdict) else self._pool.fail(sample.play, NOT_REPEATABLE)
                self._finish(sample, replace(so_far, finish_reason=FinishReason.STOP), verdict=failed)
            rest = further

    def _drop(self, first: int) -> None:
        """Forget every group from issue order ``first`` on."""
        for key in [key for key in self._samples if key[0] >= first]:
            play = self._samples.pop(key).play
            if play is not None:
                self._pool.end(play)
        self._asked = {name: asked for name, asked in self._asked.items() if asked[1] < first}
        self._groups.drop(first)
