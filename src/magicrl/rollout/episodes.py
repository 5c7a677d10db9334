"""Episodes on any engine: the model's turns and an environment's observations as one response.

Each turn is a separate request to the inner engine, whose prompt ends in all earlier turns and observations. Tokens are
concatenated as they were sampled; nothing is tokenised again. The environments of turns that end together answer at the
same time, and the engine waits for all of them, so that the next requests depend on requests and tokens, never on time.

The functions at the end build and split such a response: turn, observation, turn.
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
from magicrl.records import (
    Completion,
    Episode,
    FinishedSample,
    FinishReason,
    RolloutRequest,
    TokenArray,
    Verdict,
    VersionSpans,
    frozen_floats,
    frozen_tokens,
    joined_experts,
)
from magicrl.rollout.protocol import RolloutEngine, WeightSource
from magicrl.rollout.requests import (
    EndedSample,
    GroupProgress,
    OpenGroups,
    SchedulingEngine,
    joined_spans,
    pack_begun,
    with_begun,
)
from magicrl_verifiers.records import make_verdict


@dataclass(kw_only=True, eq=False, slots=True)
class Sample:
    """A response in progress."""

    group: GroupProgress
    index: int
    asked: RolloutRequest | None = None  # request to the inner engine for the current turn
    play: Play | None = None  # None: the problem has no environment
    so_far: Completion | None = None  # turns and observations; ends in an observation
    turn: Completion | None = None  # beginning of the current turn, from an interrupted generation
    began: float | None = None  # clock at the start of the first turn


class EpisodeEngine(SchedulingEngine):
    """An engine that plays episodes; requests without an environment pass through.

    Args:
        engine: generates the turns. This engine closes it.
        encoder: turns text into tokens and back.
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
        # by identity: requests to the inner engine, the issue order of their group, and their unfinished samples
        self._asked: dict[int, tuple[RolloutRequest, int, set[int]]] = {}
        self._present: Mapping[tuple[int, int, int], Completion] = {}  # unfinished turns at the last `interrupt`

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
        """See `RolloutEngine.submit`. Also refuses an episode that could exceed the context."""
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

    def sync_weights(self, learner: WeightSource) -> None:
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
                self._drop(self._groups.first)  # whatever an interrupted evaluation left

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        """See `RolloutEngine.interrupt`. Episodes that continue later are played again from their turns."""
        stopped = self._engine.interrupt(keep=keep)
        self._present = {(r.draw, r.offset, index): turn for r in stopped for index, turn in r.begun}
        unfinished = self._unfinished(keep=keep)
        self._drop(0)
        return unfinished

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the running workers of environments."""
        return self._pool.worker_pids

    def close(self) -> None:
        self._engine.close()
        self._pool.close()

    def snapshot(self) -> Mapping[str, Any]:
        """Return episodes up to their last observation, and the inner engine's snapshot of their current turns."""
        self._take(self._engine.advance_samples(0))
        self._present = {}
        episodes, inner = pack_begun(self._unfinished(keep=True)), self._engine.snapshot()
        return {
            "asked": [[request.draw, request.offset, *request.indices] for request, *_ in self._asked.values()],
            **{f"episodes/{name}": value for name, value in episodes.items()},
            **{f"engine/{name}": value for name, value in inner.items()},
        }

    def resume(self, snapshot: Mapping[str, Any], requests: Sequence[RolloutRequest]) -> None:
        """Continue from a ``snapshot``: the inner engine resumes its turns, environments replay theirs."""
        episodes, inner = (
            {name.removeprefix(head): value for name, value in snapshot.items() if name.startswith(head)}
            for head in ("episodes/", "engine/")
        )
        groups = {group.request.draw: group for group in self._groups.take_in(with_begun(episodes, requests))}
        samples = [sample for group in groups.values() for sample in self._begin(group)]
        turns: list[RolloutRequest] = []
        for draw, offset, *indices in snapshot.get("asked", ()):
            group = groups[draw]
            # the request for a first turn names all its samples, some of which have ended or are in a later turn
            turns.append(self._next(self._samples[group.order, indices[0]]) if offset else self._first(group, indices))
        turns += [turn for group in groups.values() for turn in self._openings(group)]
        self._engine.resume(inner, turns)
        self._replay(samples)

    def _advance(self) -> None:
        self._take(self._engine.turn())

    def _ahead(self, tokens: int) -> list[EndedSample]:
        target = self.sampled_tokens() + tokens
        while True:
            before = self.sampled_tokens()
            # one token per row at a time, so that the next turn of an episode starts as soon as possible
            ended = self._engine.advance_samples(1 if before < target else 0)
            self._take(ended)
            sampled = self.sampled_tokens()
            if sampled >= target or not (ended or sampled > before):
                return self._groups.ended()

    def _running(self) -> Iterator[tuple[GroupProgress, int, Completion]]:
        for sample in self._samples.values():
            assert sample.asked is not None, "a sample in progress has a request"
            turn = self._present.get((sample.asked.draw, sample.asked.offset, sample.index))
            if sample.play is not None:
                begun = turn is not None and turn.finish_reason is FinishReason.ABORTED
                turn = with_turn(sample.so_far, turn) if turn is not None and begun else sample.so_far
            if turn is not None:
                yield sample.group, sample.index, replace(turn, text=self._encoder.decode(turn.tokens))

    # requests for turns

    def _check(self, request: RolloutRequest) -> None:
        """Raise ``ValueError``, naming the problem, for an episode that could not be played to its end."""
        if request.problem.environment is None:
            return
        name = f"problem {request.problem.id!r}"
        if not self.capabilities.turns or not len(request.prompt_tokens):
            raise ValueError(
                f"{name}: its environment {request.problem.environment!r} needs an engine that takes and gives token "
                "ids: in_process, vllm, or a vLLM server in mode completions with the model's tokenizer named"
            )
        self._encoder.observation(
            request.problem, "", self._config.max_observation_tokens
        )  # refuses a template without observations
        most = len(request.prompt_tokens) + request.sampling.max_tokens + self._config.most_observed
        if most > self.max_context:
            raise ValueError(
                f"{name}: prompt, max_tokens and {self._config.max_turns - 1} observations of "
                f"{self._config.max_observation_tokens} tokens need {most} tokens, more than the engine's context of "
                f"{self.max_context}; lower max_tokens (T), environment.max_turns or environment.max_observation_tokens"
            )

    def _begin(self, group: GroupProgress) -> list[Sample]:
        """Return the samples of a group to be generated, with the beginning of each."""
        problem, begun = group.request.problem, group.partial
        for index in group.to_start:
            sample = self._samples[group.order, index] = Sample(group=group, index=index)
            sample.turn = begun.get(index)
            if problem.environment is not None:
                sample.play = self._pool.begin(problem)
                sample.so_far, sample.turn = parted(begun[index]) if index in begun else (None, None)
        return [self._samples[group.order, index] for index in group.to_start]

    def _openings(self, group: GroupProgress) -> list[RolloutRequest]:
        """Return requests to the inner engine for the samples of a group that have none."""
        waiting = [self._samples[group.order, index] for index in group.to_start]
        waiting = [sample for sample in waiting if sample.asked is None]
        first = [sample.index for sample in waiting if sample.so_far is None]
        turns = [self._first(group, first)] if first else []
        return turns + [self._next(sample) for sample in waiting if sample.so_far is not None]

    def _first(self, group: GroupProgress, indices: Sequence[int]) -> RolloutRequest:
        """Return the request for the first turn of these samples."""
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
        """Return the request for a sample's next turn."""
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

    # ended turns

    def _take(self, ended: Sequence[FinishedSample]) -> None:
        """Pass these turns to their environments and request the next turns."""
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
        """Return the sample of this turn; None for a turn that was generated again although it is known."""
        if id(item.request) not in self._asked:
            return None
        request, order, missing = self._asked[id(item.request)]
        missing.discard(item.index)
        if not missing:
            del self._asked[id(item.request)]
        sample = self._samples.get((order, item.index))
        return sample if sample is not None and sample.asked is request else None

    def _answered(self, sample: Sample, response: Completion, answer: Step | Verdict) -> RolloutRequest | None:
        """Return the request for the next turn after this answer; None if the episode is over."""
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
        except ValueError as error:  # a word that is not in the vocabulary
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
        """File an episode that is over. A truncated episode has no answer to judge."""
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
        """Replay the turns of interrupted episodes. An episode whose environment answers differently is over."""
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


def with_turn(so_far: Completion | None, turn: Completion) -> Completion:
    """Append a turn of the model to a response."""
    if so_far is None:
        return replace(turn, episode=Episode(observed=(), answer=turn.text))
    assert so_far.episode is not None, "what comes before a turn ends in an observation"
    both, oldest = (so_far, turn), min(so_far.policy_version, turn.policy_version)
    known = all(c.sampler_entropies is not None for c in both)
    spans = joined_spans(_spans(so_far), _spans(turn))
    logprobs = np.zeros(0, dtype=np.float32)
    if all(len(c.sampler_logprobs) == len(c) for c in both):  # otherwise those of one part are unknown
        logprobs = np.concatenate([c.sampler_logprobs for c in both])
    return replace(
        turn,
        tokens=frozen_tokens(np.concatenate([c.tokens for c in both])),
        sampler_logprobs=frozen_floats(logprobs),
        sampler_entropies=frozen_floats(np.concatenate([c.sampler_entropies for c in both])) if known else None,  # type: ignore[arg-type]
        policy_version=oldest,
        seconds=so_far.seconds + turn.seconds,
        version_spans=spans if any(version != oldest for version, _ in spans) else (),
        # the prompt of the turn holds all earlier tokens, computed again
        experts=joined_experts(so_far.experts, turn.experts),
        episode=replace(so_far.episode, answer=turn.text),
    )


def with_observation(response: Completion, tokens: TokenArray, *, cut: bool) -> Completion:
    """Append an observation to a response. It counts as of the weights that sampled the turn before it."""
    episode, count = response.episode, len(tokens)
    assert episode is not None, "only an episode has observations"
    zeros = np.zeros(count, dtype=np.float32)
    spans, known = response.version_spans, len(response.sampler_logprobs) == len(response)
    return replace(
        response,
        tokens=frozen_tokens(np.concatenate([response.tokens, tokens])),
        sampler_logprobs=frozen_floats(np.concatenate([response.sampler_logprobs, zeros if known else zeros[:0]])),
        sampler_entropies=None
        if response.sampler_entropies is None
        else frozen_floats(np.concatenate([response.sampler_entropies, zeros])),
        finish_reason=FinishReason.ABORTED,
        version_spans=joined_spans(spans, ((spans[-1][0], count),)) if spans else (),
        episode=replace(
            episode, observed=(*episode.observed, (len(response), count)), answer="", cut=episode.cut + cut
        ),
    )


def parted(begun: Completion) -> tuple[Completion | None, Completion | None]:
    """Split an interrupted response after its last observation, before the unfinished turn."""
    if begun.episode is None or not begun.episode.observed:
        return None, (replace(begun, episode=None) if len(begun) else None)
    end = sum(begun.episode.observed[-1])
    return _cut(begun, 0, end), (replace(_cut(begun, end, len(begun)), episode=None) if end < len(begun) else None)


def turns_of(so_far: Completion) -> list[tuple[TokenArray, TokenArray]]:
    """Return the tokens of each turn and of the observation after it."""
    assert so_far.episode is not None, "only an episode has turns"
    found: list[tuple[TokenArray, TokenArray]] = []
    start = 0
    for first, count in so_far.episode.observed:
        found.append((so_far.tokens[start:first], so_far.tokens[first : first + count]))
        start = first + count
    return found


def _spans(completion: Completion) -> VersionSpans:
    return completion.version_spans or ((completion.policy_version, len(completion)),)


def _cut(completion: Completion, first: int, end: int) -> Completion:
    versions = completion.token_versions[first:end]
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    spans = tuple((int(versions[a]), int(b - a)) for a, b in zip(starts, [*starts[1:], len(versions)], strict=True))
    entropies = completion.sampler_entropies
    return replace(
        completion,
        tokens=frozen_tokens(completion.tokens[first:end]),
        sampler_logprobs=frozen_floats(completion.sampler_logprobs[first:end]),
        sampler_entropies=None if entropies is None else frozen_floats(entropies[first:end]),
        version_spans=spans if completion.version_spans else (),
    )
