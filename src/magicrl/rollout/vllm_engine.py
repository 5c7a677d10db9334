"""vLLM's offline engine on this machine, CPU or GPU, behind the seam: tokens in, tokens out, a seed a sample.

It runs inside this process (as Ray's actors use it): vLLM's separate engine process outlives a killed parent and
keeps its memory. What vLLM changes of a process on its way, the random state and ``torch.set_num_threads``, is put
back. A group is asked for as one request a sample, since ``n`` samples of one request take their seeds from its single
one in vLLM's own way, and some of a group's samples could not be asked for alone; the prefix cache gives the group's
prompt, in whole blocks, to all of them. Requests that must not wait behind those in flight, of an evaluation and of the
check after a weight copy, come first in vLLM's queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from magicrl.records import (
    Completion,
    FinishedSample,
    FinishReason,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    frozen_tokens,
)
from magicrl.rollout.external import FiledGroups, check_request, group_of
from magicrl.rollout.keeping import pack_begun, with_begun
from magicrl.rollout.vllm_errors import engine_trouble
from magicrl.rollout.vllm_requests import Asked, Sampled
from magicrl.rollout.vllm_start import VllmSettings, clean_up, start_vllm, worker_device
from magicrl.rollout.vllm_transfer import Meeting, Told
from magicrl.rollout.vllm_weights import VllmWeights
from magicrl.rollout.weight_check import WeightCheck

_COLDEST, _HOTTEST = 0.01, 2.0  # vLLM silently raises lower temperatures to 0.01 and refuses higher ones
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_NEVER = -1e9  # logit bias of rows that stand for no token
_DISCARD = 2  # level of sleep: the next weights come from the learner, nothing need be kept in the host's memory


class VllmEngine:
    """A `magicrl.rollout.protocol.SleepingEngine` and `magicrl.rollout.protocol.SteppingEngine` on vLLM.

    Log-probs are those of the distribution that was sampled from (at tau, over the real tokens); entropies are not
    known. Tokens depend on weights, prompt, temperature and (seed, draw, sample), through a generator of vLLM's own:
    other tokens than the in-process engine's at tau > 0. In float32 they hold whatever else is in the batch, but for
    near-ties. What goes on after an interruption takes other random numbers than it would have had.
    """

    def __init__(
        self,
        folder: str,
        settings: VllmSettings,
        *,
        end_tokens: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        valid_vocab: int,
        policy_version: int = 0,
        check: WeightCheck | None = None,
        sleeps: bool = False,
        direct_weights: bool = False,
    ) -> None:
        """
        Args:
            folder: the model in Hugging Face format; its recommended sampling settings are not used.
            settings: precision and sizes.
            end_tokens: a response ends with any of these, and no other; the token is kept.
            decode: response tokens to text, special tokens left out.
            valid_vocab: tokens from here on are padding and never sampled.
            policy_version: what the weights in the folder count as.
            check: what is compared after every ``load_weights``.
            sleeps: ``sleep`` gives the GPU's memory back; for a GPU that the learner works on, too.
            direct_weights: ``join`` and ``take`` work.

        Raises:
            ValueError: vLLM is not installed or cannot serve this model here (the message says what to change).
        """
        self._end_tokens = sorted(end_tokens)
        self._decode = decode
        self._valid_vocab = valid_vocab
        self._groups = FiledGroups()
        self._running: dict[str, Asked] = {}
        self._arrivals = 0
        self._tokens_ended = 0
        self._busy = 0.0
        self._check = check
        self._sleeps = sleeps
        self._engine: Any = start_vllm(folder, settings, sleeps=sleeps, direct_weights=direct_weights)
        self._weights = VllmWeights(self._engine, Path(folder))
        self._devices = tuple(name for name, _ in self._engine.apply_model(worker_device))
        self._set_version(policy_version)
        self._max_context = int(self._engine.model_config.max_model_len)
        rows = int(self._engine.model_config.get_vocab_size())
        self._padding = dict.fromkeys(range(valid_vocab, rows), _NEVER) or None
        self._try_out()

    @property
    def policy_version(self) -> int:
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def devices(self) -> tuple[str, ...]:
        """Of its workers; see ``training.protocols.OnDevices``."""
        return self._devices

    def peak_mb(self) -> float:
        """Most memory so far, MiB, of the fullest worker's: weights, cache, activations; none of other processes."""
        return max(peak for _, peak in self._engine.apply_model(worker_device))

    @property
    def version(self) -> str:
        """vLLM's."""
        import vllm  # pyright: ignore[reportMissingImports]

        return str(vllm.__version__)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests; all or, on an error, none of them.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, prompt + ``max_tokens`` over ``max_context``,
                or a temperature that vLLM does not have.
        """
        for request in requests:
            check_request(request, self._max_context, valid_vocab=self._valid_vocab)
            name, tau = f"problem {request.problem.id!r}", request.sampling.temperature
            if not len(request.prompt_tokens):
                raise ValueError(f"{name} has an empty prompt; a model needs at least one token to continue")
            if tau and not _COLDEST <= tau <= _HOTTEST:
                raise ValueError(f"{name}: vLLM samples at temperature 0 or {_COLDEST} to {_HOTTEST}, got {tau}")
        for group in self._groups.take_in(requests):
            for index in group.to_start:
                self._add(Asked(group=group, index=index, before=group.partial.get(index)))

    def finished(self) -> Iterator[RolloutGroup]:
        """Generate until nothing is queued, yielding each group as its last member ends."""
        for filed in self._groups.run(self._step):
            if filed.last:
                yield group_of(filed.group)

    def finished_samples(self) -> Iterator[FinishedSample]:
        """Generate until nothing is queued, yielding each completion as it ends."""
        for filed in self._groups.run(self._step):
            yield filed.sample

    def turn(self) -> list[FinishedSample]:
        """One token for every sample that has a row; the samples that have ended."""
        if self._groups.awaited:
            self._step()
        return [filed.sample for filed in self._groups.ended()]

    def advance(self, tokens: int) -> list[RolloutGroup]:
        """Generate until ``tokens`` more are sampled or nothing is queued; the groups that have ended."""
        target = self._sampled() + tokens if tokens else 0
        while tokens and self._groups.awaited and self._sampled() < target:
            self._step()
        return [group_of(filed.group) for filed in self._groups.ended() if filed.last]

    def busy_seconds(self) -> float:
        """Seconds spent generating since the engine was made."""
        return self._busy

    @contextmanager
    def set_aside(self) -> Generator[None]:
        """Within it only what is submitted within is yielded, and comes first; the rest takes rows that are free."""
        with self._groups.set_aside():
            try:
                yield
            finally:
                self._drop(self._groups.first)  # an evaluation that was broken off leaves nothing behind

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Replace the weights, then compare log-probs with the learner's if the engine has a check.

        Requests in flight keep their tokens and go on under the new weights; their completions have spans.

        Raises:
            ValueError: the weights do not fit the model, or vLLM cannot take them.
            RuntimeError: vLLM samples with other weights (from the check).
        """
        self._replace(lambda: self._weights.load(weights), version)

    def join(self, meeting: Meeting, place: int) -> None:
        """Meet the learner's rank that sends weights; see `take`. Needs ``direct_weights``."""
        self._weights.join(meeting, place)

    def take(self, told: Sequence[Told], version: int) -> None:
        """As `load_weights` with what that rank sends now, which is ``told``."""
        self._replace(lambda: self._weights.take(told), version)

    def _replace(self, load: Callable[[], None], version: int) -> None:
        asleep = self._engine.is_sleeping()
        try:
            if asleep:  # the cache's memory last: beside old and new weights there may be no room for it
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()  # what a learner in this process has freed
                self._engine.wake_up(["weights"])
            load()
            if asleep:
                self._engine.wake_up(["kv_cache"])
        except (RuntimeError, TypeError, AssertionError) as error:
            raise engine_trouble(f"vLLM cannot take the weights of version {version}", error) from error
        self._set_version(version)
        if self._check is not None:
            self._check.compare({"vLLM": self.answers(self._check.requests)}, version)

    def sleep(self) -> None:
        """Give weights and cache back (vLLM's level 2; its CPU build keeps both) until the next ``load_weights``.

        Without ``sleeps`` nothing is given back: the engine has its GPU for itself.

        Raises:
            RuntimeError: requests are in flight, whose keys and values would be lost.
        """
        if not self._sleeps or self._engine.is_sleeping():
            return
        if self._running:
            raise RuntimeError(f"vLLM cannot sleep while {len(self._running)} samples are in flight")
        self._engine.sleep(_DISCARD)

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        """Stop generating; the unfinished requests in issue order, with ``keep`` what there is of them too."""
        unfinished = self._unfinished(keep=keep)
        self._drop(0)
        return unfinished

    def snapshot(self) -> Mapping[str, Any]:
        """What there is of the responses in flight; keys and values are computed anew after ``resume``."""
        return pack_begun(self._unfinished(keep=True))

    def resume(self, snapshot: Mapping[str, Any], requests: Sequence[RolloutRequest]) -> None:
        """Go on after the last token of each response that the snapshot holds; others start from their beginning."""
        self.submit(with_begun(snapshot, requests))

    def close(self) -> None:
        """Stop vLLM and free its memory (and its worker processes where there are several GPUs)."""
        if self._engine is None:
            return
        self.interrupt()
        self._engine.engine_core.shutdown()
        self._engine = None
        clean_up()

    def answers(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """The groups of these requests, in their order; what else is in flight goes on and is yielded later."""
        with self.set_aside():
            self.submit(requests)
            groups = {id(group.request): group for group in self.finished()}
        return [groups[id(request)] for request in requests]

    def _unfinished(self, *, keep: bool) -> list[RolloutRequest]:
        """Requests that were not yielded, in issue order, with ``keep`` what there is of their responses."""
        groups = self._groups.unyielded()
        if not keep:
            return [groups[order].request for order in sorted(groups)]
        begun = {order: {**group.partial, **group.done} for order, group in groups.items()}
        for state in self._engine.output_processor.request_states.values():
            asked, sampled = self._running[state.external_req_id], Sampled.so_far(state)
            if sampled.tokens:
                begun[asked.group.order][asked.index] = self._completion(asked, sampled, FinishReason.ABORTED, 0.0)
        return [replace(groups[order].request, begun=tuple(sorted(begun[order].items()))) for order in sorted(groups)]

    def _drop(self, first: int) -> None:
        """Forget every group from issue order ``first`` on."""
        names = [name for name, asked in self._running.items() if asked.group.order >= first]
        if names:
            self._engine.abort_request(names)
        for name in names:
            del self._running[name]
        self._groups.drop(first)

    def _sampled(self) -> int:
        """Tokens that were sampled since the engine was made, but for those of dropped samples."""
        states = self._engine.output_processor.request_states.values()
        return self._tokens_ended + sum(state.detokenizer.num_output_tokens() for state in states)

    def _set_version(self, version: int) -> None:
        self._version = version
        self._engine.set_weight_version(str(version))

    def _try_out(self) -> None:
        """Sample one token: what this device has no kernel for is found now, not after hours of other work."""
        problem = Problem(id="trial", prompt="", golds=(), verifier="", source="")
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        trial = RolloutRequest(
            draw=0, problem=problem, prompt_tokens=frozen_tokens([0]), group_size=1, sampling=sampling
        )
        try:
            self.submit([trial])
            for _ in self.finished():
                pass
        except BaseException:
            self._groups.drop()
            self._running.clear()
            self.close()
            raise

    def _add(self, asked: Asked) -> None:
        from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]

        name = f"{asked.group.order}:{asked.index}"
        self._running[name] = asked
        self._arrivals += 1
        self._engine.add_request(
            name,
            tokens_input(asked.prompt),
            asked.settings(self._end_tokens, self._padding),
            arrival_time=float(self._arrivals),  # by which vLLM orders its queue: never the clock
            priority=-1 if self._groups.first else 0,
        )

    def _step(self) -> None:
        """One token for every running request; what ends is filed in issue order."""
        begin = time.perf_counter()
        try:
            outputs = self._engine.step()
        except (RuntimeError, ValueError) as error:
            raise engine_trouble("vLLM stopped while generating", error) from error
        ended: list[tuple[Asked, Any]] = []
        for output in outputs:
            # what was aborted may still report
            if output.finished and output.request_id in self._running:
                ended.append((self._running.pop(output.request_id), output))
        for asked, output in sorted(ended, key=lambda item: (item[0].group.order, item[0].index)):
            self._groups.file(asked.group, asked.index, self._whole(asked, output))
        self._busy += time.perf_counter() - begin

    def _whole(self, asked: Asked, output: Any) -> Completion:
        (answer,) = output.outputs
        if answer.finish_reason not in _REASONS:
            raise ValueError(
                f"vLLM gave up problem {asked.group.request.problem.id!r} ({answer.finish_reason}); see its log with "
                "VLLM_LOGGING_LEVEL=INFO"
            )
        sampled, times = Sampled.of_output(answer), output.metrics
        self._tokens_ended += len(sampled.tokens)
        seconds = max(0.0, times.last_token_ts - times.scheduled_ts) if times is not None else 0.0
        return self._completion(asked, sampled, _REASONS[answer.finish_reason], seconds)

    def _completion(self, asked: Asked, sampled: Sampled, reason: FinishReason, seconds: float) -> Completion:
        return sampled.completion(asked.before, reason, version=self._version, seconds=seconds, decode=self._decode)
