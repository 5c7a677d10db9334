"""vLLM's offline engine on this machine, CPU or GPU: tokens in, tokens out, a seed a sample (vLLM 0.32).

It runs inside this process (as Ray's actors use it): vLLM's separate engine process outlives a killed parent and
keeps its memory. What vLLM changes of a process on its way, the random state and ``torch.set_num_threads``, is put
back. A group is asked for as one request a sample, since ``n`` samples of one request take their seeds from its single
one in vLLM's own way, and some of a group's samples could not be asked for alone; the prefix cache gives the group's
prompt, in whole blocks, to all of them. Requests that must not wait behind those in flight, of an evaluation and of the
check after a weight copy, come first in vLLM's queue.
"""

from __future__ import annotations

import gc
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from magicrl.models.loading import device_name, peak_mb
from magicrl.records import (
    Completion,
    FinishedSample,
    FinishReason,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    VersionSpans,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.protocol import Capabilities, WeightCheck
from magicrl.rollout.requests import (
    GroupProgress,
    OpenGroups,
    SchedulingEngine,
    check_request,
    group_of,
    pack_begun,
    sample_seed,
    with_begun,
)
from magicrl.rollout.vllm_weights import Rendezvous, VllmWeights, WeightInfo, worker_backend

_KNOWN: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"head.?(size|dim)", re.I),
        "vLLM's attention on this device has no kernel for the size of this model's attention heads; use the "
        "in-process engine",
    ),
    (
        re.compile(r"less than requested memory for kv", re.I),
        "the machine has not that much memory free: lower cache_mb, or end other processes",
    ),
    (re.compile(r"greater than or equal to max_num_seqs", re.I), "lower max_rows"),
    (
        re.compile(r"kv.?cache|cache blocks|available memory|free memory|gpu_memory_utilization", re.I),
        "the key/value cache does not fit: raise cache_mb (gpu_share on a GPU) if there is memory, else lower "
        "max_context or max_rows",
    ),
    (
        re.compile(r"out of memory|cannot allocate|can't allocate|not enough memory", re.I),
        "memory is exhausted: lower cache_mb (gpu_share on a GPU), max_rows or max_context, or use a smaller model",
    ),
    (
        re.compile(r"max_model_len|max_position_embeddings", re.I),
        "max_context is more than the model was made for; lower it",
    ),
    (
        re.compile(r"not supported|unsupported|no module or parameter|architectures", re.I),
        "this version of vLLM does not have this model's architecture; use the in-process engine",
    ),
    (re.compile(r"compil|inductor|triton|ninja", re.I), "compiled graphs failed; set eager = true"),
)


def vllm_missing(error: ImportError) -> ValueError:
    """The error of an installation without vLLM, or with a broken one."""
    if (error.name or "").split(".")[0] == "vllm":
        return ValueError(
            "the vllm engine needs vLLM, which is not installed; CPU: pip install 'magicrl[vllm]' (beside torch's CPU "
            "build), GPU: pip install vllm (the build for your CUDA)"
        )
    return ValueError(
        f"vLLM is installed but cannot be imported ({error}); it must fit the installed torch: reinstall it, "
        "on a CPU with pip install 'magicrl[vllm]'"
    )


def engine_trouble(what: str, error: Exception) -> ValueError:
    """``error`` of vLLM in one sentence, its first telling line and the remedy."""
    text = str(error).strip()
    remedy = next((advice for pattern, advice in _KNOWN if pattern.search(text)), None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = next(
        (re.sub(r"^Value error, | \[type=.*", "", line) for line in lines if "validation error" not in line),
        type(error).__name__,
    )[:300].rstrip(".")
    return ValueError(f"{what}: {told}; {remedy or 'its log tells more with VLLM_LOGGING_LEVEL=INFO'}")


_CPU_BLOCK = 32  # tokens of a cache block, the smallest that vLLM's CPU attention has: its default of 128 shares less
_CPU_CACHE_MB = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSettings:
    """How vLLM serves a model.

    Attributes:
        dtype: precision of weights and activations; ``auto`` is the folder's own.
        cache_mb: size of the key/value cache in MiB; None: 4096 on a CPU, what ``gpu_share`` leaves on a GPU.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_context: int | None = None  # most prompt + response tokens; None: the model's
    max_rows: int = 256  # most sequences that decode at once
    cache_mb: int | None = None
    gpu_share: float = 0.9  # share of the GPU's memory for everything
    gpus: int = 1  # over how many GPUs of this machine the model is spread (tensor parallel)
    eager: bool | None = None  # without compiled graphs: starts sooner, samples slower on a GPU. None: on a CPU only


def start_vllm(folder: str, settings: VllmSettings, *, sleeps: bool = False, direct_weights: bool = False) -> Any:
    """A running ``LLMEngine``.

    Args:
        folder: the model.
        settings: how it is served.
        sleeps: its memory can be given back and taken again.
        direct_weights: its workers can take weights from a learner's ranks (`vllm_transfer`).

    Raises:
        ValueError: vLLM is not installed or cannot serve this model here (the message says what to change).
    """
    on_gpu = torch.cuda.is_available()
    cache_mb = settings.cache_mb if settings.cache_mb is not None else None if on_gpu else _CPU_CACHE_MB
    options: dict[str, Any] = {
        "model": folder,
        "dtype": settings.dtype,
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.max_rows,
        "tensor_parallel_size": settings.gpus,
        "kv_cache_memory_bytes": None if cache_mb is None else cache_mb << 20,
        # on a CPU, a share of the memory that must be free whatever the cache takes
        "gpu_memory_utilization": settings.gpu_share if on_gpu else 0.01,
        "enforce_eager": settings.eager if settings.eager is not None else not on_gpu,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "scheduling_policy": "priority",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if on_gpu:
        options["enable_sleep_mode"] = sleeps
    else:
        options["block_size"] = _CPU_BLOCK
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing is reported to anybody unless the user says so
    with _undisturbed():
        try:
            from vllm import EngineArgs, LLMEngine  # pyright: ignore[reportMissingImports]
            from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise vllm_missing(error) from error
        try:
            if direct_weights:
                options["weight_transfer_config"] = WeightTransferConfig(backend=worker_backend())
            return LLMEngine.from_engine_args(EngineArgs(**options))
        except (ValueError, RuntimeError, OSError, AssertionError, TypeError) as error:
            trouble = engine_trouble(f"vLLM cannot serve {folder}", error)
            clean_up()
            raise trouble from error


def worker_device(model: torch.nn.Module) -> tuple[str, float]:
    """For ``LLMEngine.apply_model``: what a worker's model lies on, and the most memory so far of its process there."""
    device = next(model.parameters()).device
    return device_name(device), peak_mb(device)


def clean_up() -> None:
    """Leave vLLM's process groups and give memory back."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

    cleanup_dist_env_and_memory()
    gc.collect()


@contextmanager
def _undisturbed() -> Generator[None]:
    """Start vLLM inside this process and leave its random state, thread setting and environment as they were."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before, threads, set_threads = os.environ.get(name), torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    os.environ[name] = "0"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A sample that vLLM is to generate, or to go on with."""

    group: GroupProgress  # whose it is
    index: int  # its sample index
    before: Completion | None  # what there is already, from an interrupted generation

    @property
    def known(self) -> int:
        """Tokens that are given."""
        return 0 if self.before is None else len(self.before)

    @property
    def prompt(self) -> list[int]:
        """What vLLM gets as the prompt: what is given of the response is the prompt's end."""
        prompt: list[int] = self.group.request.prompt_tokens.tolist()
        return prompt if self.before is None else prompt + self.before.tokens.tolist()

    def settings(self, end_tokens: Sequence[int], padding: dict[int, float] | None) -> Any:
        """vLLM's ``SamplingParams``: the plain distribution at tau, ended by ``end_tokens`` alone."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        sampling = self.group.request.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            max_tokens=sampling.max_tokens - self.known,
            seed=sample_seed(sampling.seed, self.group.request.draw, self.index, known=self.known),
            ignore_eos=True,  # our end tokens alone end a response
            stop_token_ids=list(end_tokens),
            logprobs=0,  # the sampled token's
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            logit_bias=padding,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """Tokens that vLLM has sampled for a request."""

    tokens: list[int]  # ``[T]``
    logprobs: list[float]  # ``[T]`` of the weights that sampled each
    spans: VersionSpans  # which version sampled how many, in their order; empty where vLLM does not tell

    @classmethod
    def of_output(cls, answer: Any) -> Sampled:
        """What vLLM gives for a request that has ended."""
        tokens = [int(token) for token in answer.token_ids]
        spans = tuple((int(s.version), s.end - s.start) for s in answer.weight_versions or ())
        return cls(tokens=tokens, logprobs=_of_tokens(answer.logprobs, tokens), spans=spans)

    @classmethod
    def so_far(cls, state: Any) -> Sampled:
        """What vLLM's output processor holds of a request under way."""
        tokens = [int(token) for token in state.detokenizer.output_token_ids]
        starts = [start for _, start in state.weight_version_starts]
        lengths = np.diff([*starts, len(tokens)]).tolist() if starts else []
        spans = tuple((int(v), n) for (v, _), n in zip(state.weight_version_starts, lengths, strict=True) if n)
        return cls(tokens=tokens, logprobs=_of_tokens(state.logprobs_processor.logprobs, tokens), spans=spans)

    def completion(
        self,
        before: Completion | None,
        reason: FinishReason,
        *,
        version: int,
        seconds: float,
        decode: Callable[[Sequence[int]], str],
    ) -> Completion:
        """The response, after what there was ``before``.

        Args:
            before: its beginning, if vLLM was given one.
            reason: why it ended.
            version: of the weights, where vLLM does not tell.
            seconds: spent on these tokens.
            decode: tokens to text.

        Raises:
            FloatingPointError: a log-prob is not finite.
        """
        if not np.isfinite(self.logprobs).all():
            raise FloatingPointError(
                f"the model's logits are not finite (policy version {version}); its weights are broken"
            )
        spans = self.spans or ((version, len(self.tokens)),)
        tokens, logprobs = self.tokens, self.logprobs
        if before is not None:
            tokens = before.tokens.tolist() + tokens
            logprobs = before.sampler_logprobs.tolist() + logprobs
            spans = _joined(before.version_spans or ((before.policy_version, len(before)),), spans)
            seconds += before.seconds
        return Completion(
            tokens=frozen_tokens(tokens),
            text=decode(tokens),
            sampler_logprobs=frozen_floats(logprobs),
            sampler_entropies=None,
            finish_reason=reason,
            policy_version=min(version for version, _ in spans),
            version_spans=spans if len(spans) > 1 else (),
            seconds=seconds,
        )


def _of_tokens(places: Any, tokens: Sequence[int]) -> list[float]:
    return [float(place[token].logprob) for place, token in zip(places, tokens, strict=True)]


def _joined(first: VersionSpans, then: VersionSpans) -> VersionSpans:
    """Spans one after the other; two of one version that meet are one."""
    if first[-1][0] != then[0][0]:
        return (*first, *then)
    return (*first[:-1], (then[0][0], first[-1][1] + then[0][1]), *then[1:])


_COLDEST, _HOTTEST = 0.01, 2.0  # vLLM silently raises lower temperatures to 0.01 and refuses higher ones
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_NEVER = -1e9  # logit bias of rows that stand for no token
_DISCARD = 2  # level of sleep: the next weights come from the learner, nothing need be kept in the host's memory


class VllmEngine(SchedulingEngine):
    """vLLM in this process, turn by turn.

    Log-probs are those of the distribution that was sampled from (at tau, over the real tokens); entropies are not
    known. Tokens depend on weights, prompt, temperature and (seed, draw, sample), through a generator of vLLM's own:
    other tokens than the in-process engine's at tau > 0. In float32 they hold whatever else is in the batch, but for
    near-ties. What goes on after an interruption takes other random numbers than it would have had.

    Attributes:
        settings: as given.
    """

    capabilities = Capabilities(in_flight=True, sleep=True)

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
        self.settings = settings
        self._end_tokens = sorted(end_tokens)
        self._decode = decode
        self._valid_vocab = valid_vocab
        self._groups = OpenGroups()
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

    def turn(self) -> list[FinishedSample]:
        """One token for every sample that has a row; the samples that have ended."""
        if self._groups.awaited:
            self._advance()
        return [filed.sample for filed in self._groups.ended()]

    def advance(self, tokens: int) -> list[RolloutGroup]:
        """Generate until ``tokens`` more are sampled or nothing is queued; the groups that have ended."""
        target = self._sampled() + tokens if tokens else 0
        while tokens and self._groups.awaited and self._sampled() < target:
            self._advance()
        return [group_of(filed.group) for filed in self._groups.ended() if filed.last]

    def busy_seconds(self) -> float:
        """Seconds spent generating since the engine was made."""
        return self._busy

    @contextmanager
    def newest_weights(self) -> Generator[None]:
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

    def join(self, rendezvous: Rendezvous, place: int) -> None:
        """Meet the learner's rank that sends weights; see `take`. Needs ``direct_weights``."""
        self._weights.join(rendezvous, place)

    def take(self, told: Sequence[WeightInfo], version: int) -> None:
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

    def _advance(self) -> None:
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
