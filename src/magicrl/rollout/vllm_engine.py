"""vLLM's offline engine on this machine, CPU or GPU: tokens in, tokens out, one seed per sample (vLLM 0.32).

The engine runs inside this process (as in Ray's actors), because vLLM's separate engine process would outlive a killed
parent and keep its memory. vLLM changes a process's random state and ``torch.set_num_threads`` when it starts; both are
restored. Each sample of a group is a separate request: vLLM would derive the seeds of ``n`` samples of one request from
a single seed, and could not continue only some of them. The prefix cache shares the group's prompt, in full blocks.
Requests that must not wait for those in flight (of an evaluation, and of the check after a weight copy) come first in
vLLM's queue.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from packaging.version import Version

from magicrl.models.loading import device_name, peak_mb
from magicrl.records import (
    Completion,
    FinishReason,
    Problem,
    RolloutRequest,
    SamplingParams,
    VersionSpans,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.engine_settings import EngineSettings, TrainingUse
from magicrl.rollout.protocol import Capabilities
from magicrl.rollout.requests import (
    GroupProgress,
    OpenGroups,
    SchedulingEngine,
    check_request,
    joined_spans,
    sample_seed,
)
from magicrl.rollout.vllm_adapters import AdaptersRefused, VllmAdapters
from magicrl.rollout.vllm_options import engine_options, vllm_missing
from magicrl.rollout.vllm_weights import Placed, VllmWeights, transport
from magicrl.rollout.weight_buckets import WeightBucket, WeightInfo

_log = logging.getLogger(__name__)
WRITTEN_FOR = "0.32.0"  # the vLLM that the tests run; pyproject.toml pins it

# Pattern in vLLM's error and the remedy. The first match counts.
_KNOWN = {
    r"head.?(size|dim)": "vLLM's attention on this device has no kernel for the size of this model's attention heads; "
    "use the in-process engine",
    r"less than requested memory for kv": "the machine has not that much memory free: lower cache_mb, or end other "
    "processes",
    r"greater than or equal to max_num_seqs": "lower max_rows",
    r"smaller than max_model_len": "lower max_context, or raise engine_args.max_num_batched_tokens",
    r"kv.?cache|cache blocks|available memory|free memory|gpu_memory_utilization": "the key/value cache does not fit: "
    "raise cache_mb (gpu_share on a GPU) if there is memory, else lower max_context or max_rows",
    r"out of memory|cannot allocate|can't allocate|not enough memory": "memory is exhausted: lower cache_mb (gpu_share "
    "on a GPU), max_rows or max_context, or use a smaller model",
    r"max_model_len|max_position_embeddings": "max_context is more than the model was made for; lower it",
    r"failed to be inspected": "vLLM could not import its code of this model, mostly for want of a package (of "
    "models that also see: torchvision, of the installed torch's build); VLLM_LOGGING_LEVEL=INFO tells which; "
    "or use the in-process engine",
    r"not supported|unsupported|no module or parameter|architectures": "this version of vLLM does not have this "
    "model's architecture; use the in-process engine",
    r"compil|inductor|triton|ninja": "compiled graphs failed; set eager = true",
}


def check_version(found: str) -> None:
    """Reject a vLLM whose internal names may differ. Another patch version only causes a warning.

    Raises:
        ValueError: Its minor version is not that of ``WRITTEN_FOR``.
    """
    version, wanted = Version(found), Version(WRITTEN_FOR)
    text = f"vLLM {found} is installed, magicrl is written for and tested with {WRITTEN_FOR}"
    if version.release[:2] != wanted.release[:2]:
        raise ValueError(f"{text}: pip install 'magicrl[vllm-gpu]' on a GPU, 'magicrl[vllm]' on a CPU")
    if version.base_version != wanted.base_version:
        _log.warning("%s", text)


def engine_trouble(what: str, error: Exception) -> ValueError:
    """Return vLLM's ``error`` as one sentence: its first informative line and the remedy."""
    text = f"its model has no {error}" if isinstance(error, KeyError) else str(error).strip()
    remedy = next((advice for pattern, advice in _KNOWN.items() if re.search(pattern, text, re.I)), None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = next(
        (re.sub(r"^Value error, | \[type=.*", "", line) for line in lines if "validation error" not in line),
        type(error).__name__,
    )[:300].rstrip(".")
    return ValueError(f"{what}: {line}; {remedy or 'its log tells more with VLLM_LOGGING_LEVEL=INFO'}")


def start_vllm(folder: str, options: dict[str, Any], *, direct_weights: Placed | None = None) -> Any:
    """Return a running ``LLMEngine`` with `engine_options`, usable in this thread only.

    Raises:
        ValueError: vLLM is not installed or cannot serve this model here (the message says what to change).
        AdaptersRefused: It cannot apply adapters to this model.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no usage reports unless the user wants them
    with _preserved_process_state():
        try:
            import vllm  # pyright: ignore[reportMissingImports]
            from vllm import EngineArgs, LLMEngine  # pyright: ignore[reportMissingImports]
            from vllm.config import WeightTransferConfig  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise vllm_missing(error) from error
        check_version(str(vllm.__version__))
        try:
            if direct_weights is not None:
                options = options | {"weight_transfer_config": WeightTransferConfig(backend=transport(direct_weights))}
            return OneThread(LLMEngine.from_engine_args(EngineArgs(**options)))
        except (ValueError, RuntimeError, OSError, AssertionError, TypeError, KeyError) as error:
            trouble = engine_trouble(f"vLLM cannot serve {folder}", error)
            clean_up()
            if "enable_lora" in options and "lora" in str(error).lower():
                raise AdaptersRefused(" ".join(str(error).split())[:300]) from error
            raise trouble from error


class OneThread:
    """``LLMEngine`` that only the thread that created it may use.

    CUDA's current stream belongs to a thread, and vLLM waits only for the copies of one stream. Another thread would
    read tokens before they arrive, or write weights during a forward pass. On a CPU nothing of this would show.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._owner = engine, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() != self._owner:
            raise RuntimeError(f"LLMEngine.{name} is used by another thread than the one that made the engine")
        return getattr(self._engine, name)


def worker_device(model: torch.nn.Module) -> tuple[str, float]:
    """Return the device of a worker's model and the peak memory of its process there. For ``LLMEngine.apply_model``."""
    device = next(model.parameters()).device
    return device_name(device), peak_mb(device)


def clean_up() -> None:
    """Leave vLLM's process groups and free memory."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

    cleanup_dist_env_and_memory()
    gc.collect()


@contextmanager
def _preserved_process_state() -> Generator[None]:
    """Start vLLM inside this process, then restore random states, thread settings and environment."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before, threads, set_threads = os.environ.get(name), torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    # In this process: a separate one would outlive a killed parent and takes longer to start.
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
        # vLLM's CPU worker replaces the function itself.
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)


_Pending: TypeAlias = tuple[GroupProgress, int]
"""Sample that vLLM generates or continues: its group, and its index in the group."""
_COLDEST, _HOTTEST = 0.01, 2.0  # vLLM silently raises lower temperatures to 0.01 and refuses higher ones
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_DISCARD = 2  # level of sleep that keeps nothing in CPU memory, because the next weights come from the learner


class VllmEngine(SchedulingEngine):
    """vLLM in this process, driven step by step.

    Log-probs are those of the sampled distribution (at tau, over the tokens without padding). Entropies are unknown.
    Tokens depend on weights, prompt, temperature and (seed, draw, sample) through vLLM's own generator, so at tau > 0
    they differ from the in-process engine's. In float32 they do not depend on the rest of the batch, except for
    near-ties. A response that continues after an interruption uses other random numbers than without the interruption.

    Attributes:
        settings: Settings of the engine.
        devices: Devices of the workers; see ``training.protocols.OnDevices``.
    """

    capabilities = Capabilities(filters=True, in_flight=True, sleep=True)

    def __init__(
        self,
        folder: str,
        settings: EngineSettings,
        *,
        end_tokens: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        valid_vocab: int,
        policy_version: int = 0,
        adapters: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Start vLLM and sample one token.

        Args:
            folder: Model in Hugging Face format. Its recommended sampling settings are not used.
            settings: Precision and sizes; for training also the check after every ``load_weights``, whether ``sleep``
                releases GPU memory, and where the ranks are whose weights `take` (separate devices) or `receive`
                (colocated) loads.
            end_tokens: A response ends with any of these tokens and with no other. The end token is kept.
            decode: Function from response tokens to text, without special tokens.
            valid_vocab: Tokens from here on are padding and never sampled.
            policy_version: Version of the weights in the folder.
            adapters: ``load_weights`` takes only adapters of these shapes, by PEFT's names, for
                ``settings.training.lora``.

        Raises:
            ValueError: vLLM is not installed or cannot serve this model here (the message says what to change).
            AdaptersRefused: It can serve the model, but not with the adapters.
        """
        self.settings = settings
        self._end_tokens = sorted(end_tokens)
        self._decode = decode
        self._valid_vocab = valid_vocab
        self._groups = OpenGroups()
        self._pending: dict[str, _Pending] = {}
        self._arrivals = 0
        self._tokens_ended = 0
        self._busy = 0.0
        training = settings.training or TrainingUse()
        lora = None if adapters is None else training.lora
        self._check = training.check
        self._sleeps = training.sleeps
        self._loads = 0  # number of times that weights were replaced
        options = engine_options(
            folder,
            settings,
            valid_vocab=valid_vocab,
            on_gpu=torch.cuda.is_available(),
            lora=lora,
        )
        self._engine: Any = start_vllm(folder, options, direct_weights=training.direct_weights)
        self.weights = VllmWeights(self._engine, Path(folder))
        self._adapters: VllmAdapters | None = None
        if adapters is not None:
            assert lora is not None, "adapters have a configuration"
            self.capabilities = replace(self.capabilities, adapters=True)
            try:
                self._adapters = VllmAdapters(self._engine, lora, adapters)
            except AdaptersRefused:
                self.close()
                raise
        self.devices = tuple(name for name, _ in self._engine.apply_model(worker_device))
        self._set_version(policy_version)
        self._max_context = int(self._engine.model_config.max_model_len)
        self._check_sampling()

    def peak_mb(self) -> float:
        """Return the peak memory of the fullest worker's process in MiB."""
        return max(peak for _, peak in self._engine.apply_model(worker_device))

    @property
    def version(self) -> str:
        """Version of vLLM."""
        import vllm  # pyright: ignore[reportMissingImports]

        return str(vllm.__version__)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queue requests; see `RolloutEngine.submit`. Temperatures that vLLM does not support are also refused."""
        for request in requests:
            check_request(request, self._max_context, valid_vocab=self._valid_vocab)
            name, tau = f"problem {request.problem.id!r}", request.sampling.temperature
            if tau and not _COLDEST <= tau <= _HOTTEST:
                raise ValueError(f"{name}: vLLM samples at temperature 0 or {_COLDEST} to {_HOTTEST}, got {tau}")
        for group in self._groups.take_in(requests):
            for index in group.to_start:
                self._add((group, index))

    def busy_seconds(self) -> float:
        return self._busy

    @contextmanager
    def newest_weights(self) -> Generator[None]:
        """Return only requests submitted in this context, and prefer them. Earlier requests use the remaining rows."""
        with self._groups.set_aside():
            try:
                yield
            finally:
                self._drop(self._groups.first)  # an aborted evaluation leaves no requests behind

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Replace the weights or adapters, then compare log-probs with the learner's if the engine has a check.

        Requests in flight keep their tokens and continue with the new weights; their completions have version spans.
        Requests that start later share no KV cache with earlier ones.
        """
        to = self._adapters or self.weights
        self._replace(lambda: to.load(weights), version)

    def take(self, infos: Sequence[WeightInfo], version: int) -> None:
        """Do as `load_weights`, with the weights ``infos`` that the joined learner rank sends at the same time."""
        self._replace(lambda: self.weights.take(infos), version)

    def receive(self, bucket: WeightBucket) -> None:
        """Copy a bucket of a learner rank. From the first bucket to `complete` the engine must not sample."""
        assert not self._pending, "what is in flight would go on with part of the weights"
        self._wake_weights()
        self.weights.receive(bucket)

    def complete(self, version: int) -> None:
        """Do as `load_weights`, with the received weights."""
        self._replace(self.weights.complete, version)

    def _wake_weights(self) -> bool:
        """Wake the memory of the weights, but not of the KV cache. Return whether the engine was asleep."""
        if asleep := bool(self._engine.is_sleeping()):
            torch.cuda.empty_cache()  # memory freed by a learner in this process; does nothing without a GPU
            self._engine.wake_up(["weights"])
        return asleep

    def _replace(self, load: Callable[[], None], version: int) -> None:
        self._finish_started_step()
        try:
            asleep = self._wake_weights()
            load()
            if asleep:  # last, because next to old and new weights there may be too little memory for the cache
                self._engine.wake_up(["kv_cache"])
        except (RuntimeError, TypeError, AssertionError) as error:
            raise engine_trouble(f"vLLM cannot take the weights of version {version}", error) from error
        self._set_version(version)
        self._loads += 1
        if self.settings.vllm.keep_caches:
            # Submit requests without a token again, so that all of them, prompts included, use the new weights.
            states = self._engine.output_processor.request_states.values()
            names = [state.external_req_id for state in states if not state.detokenizer.num_output_tokens()]
            if names:
                self._engine.abort_request(names)
            for pending in [self._pending.pop(name) for name in names]:
                self._add(pending)
        else:
            # The cache of finished prompts, and of running requests, which are computed again.
            self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._check is not None:
            self._check.compare({"vLLM": self.answers(self._check.requests)}, version)

    def _finish_started_step(self) -> None:
        """Collect the step that vLLM has started ahead of time, whose tokens belong to the old weights."""
        core = self._engine.engine_core.engine_core
        if not core.batch_queue:  # None if vLLM starts no step ahead, as on a CPU
            return
        core.pause_scheduler("keep", clear_cache=False)
        while core.batch_queue:
            self._advance()
        core.resume_scheduler()

    def sleep(self) -> None:
        """Release weights and KV cache (vLLM's level 2; its CPU build keeps both) until the next ``load_weights``."""
        if not self._sleeps or (self._engine.is_sleeping() and not self.weights.begun):
            return
        if self._pending:
            raise RuntimeError(f"vLLM cannot sleep while {len(self._pending)} samples are in flight")
        self.weights.abandon()
        self._engine.sleep(_DISCARD)

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        unfinished = self._unfinished(keep=keep)
        self._drop(0)
        return unfinished

    def close(self) -> None:
        """Stop vLLM and free its memory, and end its worker processes if there are several GPUs."""
        if self._engine is None:
            return
        self.interrupt()
        self._engine.engine_core.shutdown()
        self._engine = None
        clean_up()

    def _running(self) -> Iterator[tuple[GroupProgress, int, Completion]]:
        for state in self._engine.output_processor.request_states.values():
            group, index = pending = self._pending[state.external_req_id]
            tokens = [int(token) for token in state.detokenizer.output_token_ids]
            if not tokens:
                continue
            starts = [start for _, start in state.weight_version_starts]
            lengths = np.diff([*starts, len(tokens)]).tolist() if starts else []
            spans = tuple((int(v), n) for (v, _), n in zip(state.weight_version_starts, lengths, strict=True) if n)
            places = state.logprobs_processor.logprobs
            yield group, index, self._completion(pending, tokens, places, spans, FinishReason.ABORTED, 0.0)

    def _drop(self, first: int) -> None:
        """Drop every group from issue order ``first`` on."""
        names = [name for name, (group, _) in self._pending.items() if group.order >= first]
        if names:
            self._engine.abort_request(names)
        for name in names:
            del self._pending[name]
        self._groups.drop(first)

    def sampled_tokens(self) -> int:
        """Return the number of sampled tokens, without those of dropped samples."""
        states = self._engine.output_processor.request_states.values()
        return self._tokens_ended + sum(state.detokenizer.num_output_tokens() for state in states)

    def _set_version(self, version: int) -> None:
        self._version = version
        self._engine.set_weight_version(str(version))

    def _check_sampling(self) -> None:
        """Sample one token, to find a missing kernel now and not after hours of other work."""
        problem = Problem(id="trial", prompt="", references=(), verifier="", source="")
        sampling, prompt = SamplingParams(temperature=0.0, max_tokens=1), frozen_tokens([0])
        trial = RolloutRequest(draw=0, problem=problem, prompt_tokens=prompt, group_size=1, sampling=sampling)
        try:
            self.submit([trial])
            list(self.finished())
        except BaseException:
            self._groups.drop()
            self._pending.clear()
            self.close()
            raise

    def _add(self, pending: _Pending) -> None:
        from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]

        group, index = pending
        name = f"{group.order}:{index}"
        # The response so far, from an interrupted generation, is the end of the prompt.
        given = group.partial[index].tokens.tolist() if index in group.partial else []
        self._pending[name] = pending
        self._arrivals += 1
        self._engine.add_request(
            name,
            tokens_input(
                group.request.prompt_tokens.tolist() + given,
                # Only requests of the same salt share a KV cache. The version is no salt, because a run that goes back
                # to an earlier state uses the same versions again.
                cache_salt=str(self._loads) if self.settings.vllm.keep_caches else None,
            ),
            self._sampling_params(group.request, index, len(given)),
            arrival_time=float(self._arrivals),  # vLLM orders its queue by it, which must not depend on the clock
            lora_request=None if self._adapters is None else self._adapters.request(),
            # The smaller number comes first.
            priority=-1 if self._groups.first else 0,
        )

    def _sampling_params(self, request: RolloutRequest, index: int, known: int) -> Any:
        """Return vLLM's ``SamplingParams``: the plain distribution at tau, ended only by our end tokens."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        return SamplingParams(
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k,
            # These are always off, as top-p and top-k are in training: its log-probs are those of the plain softmax at
            # tau.
            min_p=0.0,
            repetition_penalty=1.0,
            # vLLM counts the given tokens as prompt, T counts them as response.
            max_tokens=request.sampling.max_tokens - known,
            seed=sample_seed(request.sampling.seed, request.draw, index, known=request.offset + known),
            ignore_eos=True,  # only our end tokens end a response
            stop_token_ids=self._end_tokens,
            logprobs=0,  # only of the sampled token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _advance(self) -> None:
        """Sample one token for every running request, and record ended ones in issue order."""
        begin = time.perf_counter()
        try:
            outputs = self._engine.step()
        except (RuntimeError, ValueError) as error:
            raise engine_trouble("vLLM stopped while generating", error) from error
        # An aborted request may still return an output.
        ended = [(*self._pending.pop(o.request_id), o) for o in outputs if o.finished and o.request_id in self._pending]
        for group, index, output in sorted(ended, key=lambda item: (item[0].order, item[1])):
            self._groups.file(group, index, self._whole((group, index), output))
        self._busy += time.perf_counter() - begin

    def _whole(self, pending: _Pending, output: Any) -> Completion:
        (answer,) = output.outputs
        if answer.finish_reason not in _REASONS:
            raise ValueError(
                f"vLLM gave up problem {pending[0].request.problem.id!r} ({answer.finish_reason}); see its log with "
                "VLLM_LOGGING_LEVEL=INFO"
            )
        tokens, times = [int(token) for token in answer.token_ids], output.metrics
        spans = tuple((int(s.version), s.end - s.start) for s in answer.weight_versions or ())
        self._tokens_ended += len(tokens)
        # Without the wait in vLLM's queue.
        seconds = max(0.0, times.last_token_ts - times.scheduled_ts) if times is not None else 0.0
        return self._completion(pending, tokens, answer.logprobs, spans, _REASONS[answer.finish_reason], seconds)

    def _completion(
        self,
        pending: _Pending,
        tokens: list[int],
        places: Any,
        spans: VersionSpans,
        reason: FinishReason,
        seconds: float,
    ) -> Completion:
        """Return the completion of a sample, including the tokens that vLLM was given."""
        # Log-probs of the weights that sampled each token.
        logprobs = [float(place[token].logprob) for place, token in zip(places, tokens, strict=True)]
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"the model's logits are not finite (policy version {self._version}); its weights are broken"
            )
        spans = spans or ((self._version, len(tokens)),)
        group, index = pending
        before = group.partial.get(index)
        if before is not None:
            tokens = before.tokens.tolist() + tokens
            logprobs = before.sampler_logprobs.tolist() + logprobs
            spans = joined_spans(before.version_spans or ((before.policy_version, len(before)),), spans)
            seconds += before.seconds
        return Completion(
            tokens=frozen_tokens(tokens),
            text=self._decode(tokens),
            sampler_logprobs=frozen_floats(logprobs),
            sampler_entropies=None,
            finish_reason=reason,
            # A response is as old as its oldest token.
            policy_version=min(version for version, _ in spans),
            version_spans=spans if len(spans) > 1 else (),
            seconds=seconds,
        )
