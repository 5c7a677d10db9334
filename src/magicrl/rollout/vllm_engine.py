"""vLLM's offline engine on this machine, CPU or GPU, behind the seam: tokens in, tokens out, a seed a sample.

It runs inside this process (as Ray's actors use it): vLLM's separate engine process outlives a killed parent and
keeps its memory. What vLLM changes of a process on its way, the random state and ``torch.set_num_threads``, is put
back. A group is asked for as one request a sample, since ``n`` samples of one request take their seeds from its single
one in vLLM's own way, and some of a group's samples could not be asked for alone; the prefix cache gives the group's
prompt, in whole blocks, to all of them.
"""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

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
from magicrl.rollout.external import Filed, OpenGroups, check_request, group_of, sample_seed
from magicrl.rollout.rows import GroupProgress
from magicrl.rollout.vllm_errors import engine_trouble, vllm_missing
from magicrl.rollout.vllm_weights import VllmWeights
from magicrl.rollout.weight_check import WeightCheck

_CPU_BLOCK = 32  # tokens of a cache block, the smallest that vLLM's CPU attention has: its default of 128 shares less
_CPU_CACHE_MB = 4096
_COLDEST, _HOTTEST = 0.01, 2.0  # vLLM silently raises lower temperatures to 0.01 and refuses higher ones
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_NEVER = -1e9  # logit bias of rows that stand for no token
_DISCARD = 2  # level of sleep: the next weights come from the learner, nothing need be kept in the host's memory


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmSettings:
    """How vLLM serves a model.

    Attributes:
        dtype: precision of weights and activations; ``auto`` is the folder's own.
        max_context: most prompt + response tokens; None: the model's.
        max_rows: most sequences that decode at once.
        cache_mb: size of the key/value cache in MiB; None: 4096 on a CPU, what ``gpu_share`` leaves on a GPU.
        gpu_share: share of the GPU's memory for everything.
        gpus: over how many GPUs of this machine the model is spread (tensor parallel).
        eager: without compiled graphs: starts sooner, samples slower on a GPU. None: on a CPU only.
        sleeps: ``sleep`` gives the GPU's memory back; for a GPU that the learner works on, too.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_context: int | None = None
    max_rows: int = 256
    cache_mb: int | None = None
    gpu_share: float = 0.9
    gpus: int = 1
    eager: bool | None = None
    sleeps: bool = False


class VllmEngine:
    """A `magicrl.rollout.protocol.SleepingEngine` on vLLM.

    Log-probs are those of the distribution that was sampled from (at tau, over the real tokens); entropies are not
    known. Tokens depend on weights, prompt, temperature and (seed, draw, sample), through a generator of vLLM's own:
    other tokens than the in-process engine's at tau > 0. In float32 they hold whatever else is in the batch, but for
    near-ties.
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

        Raises:
            ValueError: vLLM is not installed or cannot serve this model here (the message says what to change).
        """
        self._end_tokens = sorted(end_tokens)
        self._decode = decode
        self._valid_vocab = valid_vocab
        self._groups = OpenGroups()
        self._running: dict[str, tuple[GroupProgress, int]] = {}
        self._ended: deque[Filed] = deque()  # not yet yielded
        self._check = check
        self._sleeps = settings.sleeps
        self._engine: Any = _start(folder, settings)
        self._weights = VllmWeights(self._engine, Path(folder))
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
            for index in group.request.indices:
                self._add(group, index)

    def finished(self) -> Iterator[RolloutGroup]:
        """Generate until nothing is queued, yielding each group as its last member ends."""
        for filed in self._run():
            if filed.last:
                yield group_of(filed.group)

    def finished_samples(self) -> Iterator[FinishedSample]:
        """Generate until nothing is queued, yielding each completion as it ends."""
        for filed in self._run():
            yield filed.sample

    def load_weights(self, weights: Mapping[str, Any], version: int) -> None:
        """Replace the weights, then compare log-probs with the learner's if the engine has a check.

        Requests in flight keep their tokens and go on under the new weights; their completions have spans.

        Raises:
            ValueError: the weights do not fit the model, or vLLM cannot take them.
            RuntimeError: vLLM samples with other weights (from the check).
        """
        asleep = self._engine.is_sleeping()
        try:
            if asleep:  # the cache's memory last: beside old and new weights there may be no room for it
                self._engine.wake_up(["weights"])
            self._weights.load(weights)
            if asleep:
                self._engine.wake_up(["kv_cache"])
        except (RuntimeError, TypeError, AssertionError) as error:
            raise engine_trouble(f"vLLM cannot take the weights of version {version}", error) from error
        self._set_version(version)
        if self._check is not None:
            self._check.compare({"vLLM": self.answers(self._check.requests)}, version)

    def sleep(self) -> None:
        """Give weights and cache back (vLLM's level 2; its CPU build keeps both) until the next ``load_weights``.

        Without ``settings.sleeps`` nothing is given back: the engine has its GPU for itself.

        Raises:
            RuntimeError: requests are in flight, whose keys and values would be lost.
        """
        if not self._sleeps or self._engine.is_sleeping():
            return
        if self._running:
            raise RuntimeError(f"vLLM cannot sleep while {len(self._running)} samples are in flight")
        self._engine.sleep(_DISCARD)

    def answers(self, requests: Sequence[RolloutRequest]) -> list[RolloutGroup]:
        """The groups of these requests, in their order; what else is in flight goes on and is yielded later."""
        first = self._groups.issued
        self.submit(requests)
        mine = [self._groups.open[order] for order in range(first, self._groups.issued)]
        while not all(group.complete for group in mine):
            self._step()
        self._ended = deque(filed for filed in self._ended if filed.group.order < first)
        return [group_of(group) for group in mine]

    def interrupt(self) -> list[RolloutRequest]:
        """Stop generating, drop partial work and return the unfinished requests in issue order."""
        if self._running:
            self._engine.abort_request(list(self._running))
            self._running.clear()
        unseen = {filed.group.order: filed.group.request for filed in self._ended}
        self._ended.clear()
        unseen |= {group.order: group.request for group in self._groups.open.values()}
        self._groups.drop()
        return [unseen[order] for order in sorted(unseen)]

    def close(self) -> None:
        """Stop vLLM and free its memory (and its worker processes where there are several GPUs)."""
        if self._engine is None:
            return
        self.interrupt()
        self._engine.engine_core.shutdown()
        self._engine = None
        _clean_up()

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

    def _add(self, group: GroupProgress, index: int) -> None:
        from vllm import SamplingParams as VllmSampling  # pyright: ignore[reportMissingImports]
        from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        request = group.request
        sampling = request.sampling
        params = VllmSampling(
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            max_tokens=sampling.max_tokens,
            seed=sample_seed(sampling.seed, request.draw, index),
            ignore_eos=True,  # our end tokens alone end a response
            stop_token_ids=self._end_tokens,
            logprobs=0,  # the sampled token's
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            logit_bias=self._padding,
        )
        key = f"{group.order}:{index}"
        self._running[key] = (group, index)
        self._engine.add_request(key, tokens_input(request.prompt_tokens.tolist()), params)

    def _run(self) -> Iterator[Filed]:
        while self._ended or self._groups.open:
            while self._ended:
                yield self._ended.popleft()
            if self._groups.open:
                self._step()

    def _step(self) -> None:
        """One token for every running request; what ends is filed in issue order."""
        try:
            outputs = self._engine.step()
        except (RuntimeError, ValueError) as error:
            raise engine_trouble("vLLM stopped while generating", error) from error
        ended: list[tuple[GroupProgress, int, Any]] = []
        for output in outputs:
            # what was aborted may still report
            if output.finished and output.request_id in self._running:
                ended.append((*self._running.pop(output.request_id), output))
        for group, index, output in sorted(ended, key=lambda item: (item[0].order, item[1])):
            self._ended.append(self._groups.file(group, index, self._completion(group, output)))

    def _completion(self, group: GroupProgress, output: Any) -> Completion:
        (answer,) = output.outputs
        tokens = [int(token) for token in answer.token_ids]
        if answer.finish_reason not in _REASONS:
            raise ValueError(
                f"vLLM gave up problem {group.request.problem.id!r} ({answer.finish_reason}); see its log with "
                "VLLM_LOGGING_LEVEL=INFO"
            )
        logprobs = [place[token].logprob for place, token in zip(answer.logprobs, tokens, strict=True)]
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"the model's logits are not finite (policy version {self._version}); its weights are broken"
            )
        times = output.metrics
        spans: VersionSpans = tuple((int(s.version), s.end - s.start) for s in answer.weight_versions or ())
        return Completion(
            tokens=frozen_tokens(tokens),
            text=self._decode(tokens),
            sampler_logprobs=frozen_floats(logprobs),
            sampler_entropies=None,
            finish_reason=_REASONS[answer.finish_reason],
            policy_version=spans[0][0] if spans else self._version,
            version_spans=spans if len(spans) > 1 else (),
            seconds=max(0.0, times.last_token_ts - times.scheduled_ts) if times is not None else 0.0,
        )


def _start(folder: str, settings: VllmSettings) -> Any:
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
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if on_gpu:
        options["enable_sleep_mode"] = settings.sleeps
    else:
        options["block_size"] = _CPU_BLOCK
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing is reported to anybody unless the user says so
    with _undisturbed():
        try:
            from vllm import EngineArgs, LLMEngine  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise vllm_missing(error) from error
        try:
            return LLMEngine.from_engine_args(EngineArgs(**options))
        except (ValueError, RuntimeError, OSError, AssertionError, TypeError) as error:
            trouble = engine_trouble(f"vLLM cannot serve {folder}", error)
            _clean_up()
            raise trouble from error


def _clean_up() -> None:
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
