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
import json
import logging
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from packaging.version import Version

from magicrl.config.schema import VllmConfig
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
from magicrl.rollout.vllm_adapters import AdapterPlan, AdaptersRefused, VllmAdapters
from magicrl.rollout.vllm_weights import Placed, VllmWeights, transport
from magicrl.rollout.weight_buckets import WeightBucket, WeightInfo
from magicrl_verifiers.references import did_you_mean

_log = logging.getLogger(__name__)
WRITTEN_FOR = "0.32.0"  # the vLLM that the tests run; pyproject.toml pins it

# what vLLM's error says -> what to do; the first that fits counts
_KNOWN = {
    r"head.?(size|dim)": "vLLM's attention on this device has no kernel for the size of this model's attention heads; "
    "use the in-process engine",
    r"less than requested memory for kv": "the machine has not that much memory free: lower cache_mb, or end other "
    "processes",
    r"greater than or equal to max_num_seqs": "lower max_rows",
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


def vllm_missing(error: ImportError) -> ValueError:
    """The error of an installation without vLLM, or with a broken one."""
    if (error.name or "").split(".")[0] == "vllm":
        return ValueError(
            "the vllm engine needs vLLM, which is not installed; CPU: pip install 'magicrl[vllm]' (beside torch's CPU "
            "build), GPU: pip install 'magicrl[vllm-gpu]'"
        )
    return ValueError(
        f"vLLM is installed but cannot be imported ({error}); it must fit the installed torch: reinstall it, "
        "on a CPU with pip install 'magicrl[vllm]', on a GPU with pip install 'magicrl[vllm-gpu]'"
    )


def check_version(found: str) -> None:
    """Refuse a vLLM whose inner names may be others; one that differs in its last number is only named.

    Raises:
        ValueError: it is of another minor version than ``WRITTEN_FOR``.
    """
    version, wanted = Version(found), Version(WRITTEN_FOR)
    told = f"vLLM {found} is installed, magicrl is written for and tested with {WRITTEN_FOR}"
    if version.release[:2] != wanted.release[:2]:
        raise ValueError(f"{told}: pip install 'magicrl[vllm-gpu]' on a GPU, 'magicrl[vllm]' on a CPU")
    if version.base_version != wanted.base_version:
        _log.warning("%s", told)


def engine_trouble(what: str, error: Exception) -> ValueError:
    """``error`` of vLLM in one sentence, its first telling line and the remedy."""
    text = f"its model has no {error}" if isinstance(error, KeyError) else str(error).strip()
    remedy = next((advice for pattern, advice in _KNOWN.items() if re.search(pattern, text, re.I)), None)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = next(
        (re.sub(r"^Value error, | \[type=.*", "", line) for line in lines if "validation error" not in line),
        type(error).__name__,
    )[:300].rstrip(".")
    return ValueError(f"{what}: {told}; {remedy or 'its log tells more with VLLM_LOGGING_LEVEL=INFO'}")


_CPU_BLOCK = 32  # tokens of a cache block, the smallest that vLLM's CPU attention has: its default of 128 shares less
_OWN_GPU, _SHARED_GPU = 0.9, 0.6  # of its memory for vLLM; in a shared one the learner's weights and moments stay


def executor(gpus: int) -> Literal["uni", "mp"]:
    """vLLM's executor of an engine on ``gpus`` GPUs: its worker in this process, or workers that this process starts.

    vLLM's own choice inside a placement group of Ray is workers that ask Ray for GPUs, and a replica's are given out
    already: they wait for ever. An engine stays inside a node, so that Ray's executor is never needed.
    """
    return "uni" if gpus == 1 else "mp"


def engine_options(
    folder: str, settings: EngineSettings, *, valid_vocab: int, on_gpu: bool, adapters: AdapterPlan | None
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's ``EngineArgs``; parameters as in `VllmEngine`.

    Raises:
        ValueError: ``rollout.vllm.engine_args`` names an argument that magicrl sets.
    """
    vllm, training = settings.vllm, settings.training or TrainingUse()
    cache_mb = vllm.cache_mb or (None if on_gpu else settings.memory_limit_mb)
    gpu_share = vllm.gpu_share or (_SHARED_GPU if training.shares_gpu else _OWN_GPU)
    described = _description(folder)
    own = {
        "model": folder,
        "dtype": settings.dtype,
        "hf_overrides": {} if settings.head_dtype is None else {"head_dtype": settings.head_dtype},
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.max_rows,
        "tensor_parallel_size": settings.gpus,
        "distributed_executor_backend": executor(settings.gpus),
        "kv_cache_memory_bytes": None if cache_mb is None else cache_mb << 20,
        # on a CPU, a share of the memory that must be free whatever the cache takes
        "gpu_memory_utilization": gpu_share if on_gpu else 0.01,
        "enforce_eager": vllm.eager if vllm.eager is not None else not on_gpu,
        "enable_prefix_caching": True,
        # vLLM's default are those before the temperature: not of the distribution that was sampled from
        "logprobs_mode": "processed_logprobs",
        # by name: several workers are other processes
        "logits_processors": ["magicrl.rollout.vllm_padding:NoPadding"],
        "additional_config": {"valid_vocab": valid_vocab},
        # else the folder's recommended top-p, top-k and penalties would change the distribution
        "generation_config": "vllm",
        "override_generation_config": _fixed_by_context(described),
        # for evaluations and weight checks, which go before what is in flight
        "scheduling_policy": "priority",
        # tokens in, tokens out
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        # requests bring their own seeds
        "seed": 0,
        **({"enable_sleep_mode": training.sleeps} if on_gpu else {"block_size": _CPU_BLOCK}),
        **({} if on_gpu else _latent_on_cpu(described)),
        **({} if adapters is None else adapters.options()),
    }
    if twice := sorted(own.keys() & vllm.engine_args.keys()):
        raise ValueError(f"rollout.vllm.engine_args.{twice[0]}: magicrl sets this argument of vLLM itself; remove it")
    return own | vllm.engine_args


def check_engine_args(vllm: VllmConfig) -> None:
    """Check ``rollout.vllm.engine_args`` before anything is computed.

    Raises:
        ValueError: an argument that vLLM does not have, or that magicrl sets itself.
    """
    if not vllm.engine_args:
        return
    on_gpu = torch.cuda.is_available()
    engine_options("", EngineSettings(model="", vllm=vllm), valid_vocab=1, on_gpu=on_gpu, adapters=None)
    from vllm import EngineArgs  # pyright: ignore[reportMissingImports]

    known = [field.name for field in fields(EngineArgs)]
    for name in vllm.engine_args:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"rollout.vllm.engine_args.{name}: vLLM's EngineArgs has no such argument{hint}")


def _description(folder: str) -> dict[str, Any]:
    """The language model's part of the folder's configuration; empty where it has none."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return config.get("text_config", config)


def _fixed_by_context(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM else decides by ``max_context``, as the model's configuration has it.

    Llama 4's layers without positions scale their queries in contexts of over 32,768 tokens only, so that a shorter
    limit would make it another model than the learner's.
    """
    name = "attn_temperature_tuning"
    return {name: bool(config[name])} if name in config else {}


def _latent_on_cpu(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions by torch where attention is latent (DeepSeek).

    It passes queries by head. The C++ kernel of vLLM 0.32's CPU build takes these for one head, and rotates keys that
    are a slice of another tensor not at all.
    """
    return {"compilation_config": {"custom_ops": ["-rotary_embedding"]}} if config.get("kv_lora_rank") else {}


def start_vllm(folder: str, options: dict[str, Any], *, direct_weights: Placed | None = None) -> Any:
    """A running ``LLMEngine`` with `engine_options`, for this thread alone.

    Raises:
        ValueError: vLLM is not installed or cannot serve this model here (the message says what to change).
        AdaptersRefused: it has no adapters for this model.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # nothing is reported to anybody unless the user says so
    with _undisturbed():
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
    """An ``LLMEngine`` that only the thread that made it may use.

    CUDA's current stream belongs to a thread, and vLLM waits for the copies of one stream: another thread would read
    tokens before they have come, or write weights during a forward pass, and a CPU would show nothing of it.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self._owner = engine, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() != self._owner:
            raise RuntimeError(f"LLMEngine.{name} is used by another thread than the one that made the engine")
        return getattr(self._engine, name)


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
    # the engine in this process: its own process outlives a killed parent and takes longer to start
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
        # vLLM's CPU worker replaces the function itself
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
    def given(self) -> list[int]:
        """Tokens of the response that vLLM gets as the prompt's end."""
        return [] if self.before is None else self.before.tokens.tolist()

    def settings(self, end_tokens: Sequence[int]) -> Any:
        """vLLM's ``SamplingParams``: the plain distribution at tau, ended by ``end_tokens`` alone."""
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        sampling, known = self.group.request.sampling, len(self.given)
        return SamplingParams(
            temperature=sampling.temperature,
            # switched off one by one: log-probs must be those of the plain softmax at tau
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            # vLLM counts tokens that are given as prompt; T counts them as response
            max_tokens=sampling.max_tokens - known,
            seed=sample_seed(
                sampling.seed, self.group.request.draw, self.index, known=self.group.request.offset + known
            ),
            ignore_eos=True,  # our end tokens alone end a response
            stop_token_ids=list(end_tokens),
            logprobs=0,  # the sampled token's
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
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


def _of_tokens(places: Any, tokens: Sequence[int]) -> list[float]:
    return [float(place[token].logprob) for place, token in zip(places, tokens, strict=True)]


_COLDEST, _HOTTEST = 0.01, 2.0  # vLLM silently raises lower temperatures to 0.01 and refuses higher ones
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
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
        settings: EngineSettings,
        *,
        end_tokens: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        valid_vocab: int,
        policy_version: int = 0,
        adapters: AdapterPlan | None = None,
    ) -> None:
        """
        Args:
            folder: the model in Hugging Face format; its recommended sampling settings are not used.
            settings: precision, sizes, and what training needs: the check after every ``load_weights``, whether
                ``sleep`` gives the GPU's memory back, and where the ranks are whose weights `take` (apart) or `receive`
                (colocated) takes.
            end_tokens: a response ends with any of these, and no other; the token is kept.
            decode: response tokens to text, special tokens left out.
            valid_vocab: tokens from here on are padding and never sampled.
            policy_version: what the weights in the folder count as.
            adapters: ``load_weights`` takes these adapters alone.

        Raises:
            ValueError: vLLM is not installed or cannot serve this model here (the message says what to change).
            AdaptersRefused: it can, but without the adapters.
        """
        self.settings = settings
        self._end_tokens = sorted(end_tokens)
        self._decode = decode
        self._valid_vocab = valid_vocab
        self._groups = OpenGroups()
        self._asked: dict[str, Asked] = {}
        self._arrivals = 0
        self._tokens_ended = 0
        self._busy = 0.0
        training = settings.training or TrainingUse()
        self._check = training.check
        self._sleeps = training.sleeps
        self._loads = 0  # weights taken so far
        options = engine_options(
            folder,
            settings,
            valid_vocab=valid_vocab,
            on_gpu=torch.cuda.is_available(),
            adapters=adapters,
        )
        self._engine: Any = start_vllm(folder, options, direct_weights=training.direct_weights)
        self.weights = VllmWeights(self._engine, Path(folder))
        self._adapters: VllmAdapters | None = None
        if adapters is not None:
            self.capabilities = replace(self.capabilities, adapters=True)
            try:
                self._adapters = VllmAdapters(self._engine, adapters, folder)
            except AdaptersRefused:
                self.close()
                raise
        self._devices = tuple(name for name, _ in self._engine.apply_model(worker_device))
        self._set_version(policy_version)
        self._max_context = int(self._engine.model_config.max_model_len)
        self._try_out()

    @property
    def devices(self) -> tuple[str, ...]:
        """Of its workers; see ``training.protocols.OnDevices``."""
        return self._devices

    def peak_mb(self) -> float:
        """Most memory so far, MiB, of the fullest worker's process."""
        return max(peak for _, peak in self._engine.apply_model(worker_device))

    @property
    def version(self) -> str:
        """vLLM's."""
        import vllm  # pyright: ignore[reportMissingImports]

        return str(vllm.__version__)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """See `RolloutEngine.submit`; refused is also a temperature that vLLM does not have."""
        for request in requests:
            check_request(request, self._max_context, valid_vocab=self._valid_vocab)
            name, tau = f"problem {request.problem.id!r}", request.sampling.temperature
            if tau and not _COLDEST <= tau <= _HOTTEST:
                raise ValueError(f"{name}: vLLM samples at temperature 0 or {_COLDEST} to {_HOTTEST}, got {tau}")
        for group in self._groups.take_in(requests):
            for index in group.to_start:
                self._add(Asked(group=group, index=index, before=group.partial.get(index)))

    def busy_seconds(self) -> float:
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
        """Replace the weights or adapters, then compare log-probs with the learner's if the engine has a check.

        Requests in flight keep their tokens and go on under the new weights; their completions have spans. Whatever
        begins later shares no keys and values with what began before.
        """
        to = self._adapters or self.weights
        self._replace(lambda: to.load(weights), version)

    def take(self, told: Sequence[WeightInfo], version: int) -> None:
        """As `load_weights` with what the learner's rank that ``weights`` has joined sends now, which is ``told``."""
        self._replace(lambda: self.weights.take(told), version)

    def receive(self, bucket: WeightBucket) -> None:
        """Take a copy of a learner rank's bucket; nothing is sampled from the first one until `complete`."""
        assert not self._asked, "what is in flight would go on with part of the weights"
        self._wake_weights()
        self.weights.receive(bucket)

    def complete(self, version: int) -> None:
        """As `load_weights`, with what was received."""
        self._replace(self.weights.complete, version)

    def _wake_weights(self) -> bool:
        """Whether it sleeps; then the memory of its weights is there again, and its cache's not yet."""
        if asleep := bool(self._engine.is_sleeping()):
            torch.cuda.empty_cache()  # what a learner in this process has freed; does nothing without a GPU
            self._engine.wake_up(["weights"])
        return asleep

    def _replace(self, load: Callable[[], None], version: int) -> None:
        self._end_turn()
        try:
            asleep = self._wake_weights()
            load()
            if asleep:  # last: beside old and new weights there may be no room for it
                self._engine.wake_up(["kv_cache"])
        except (RuntimeError, TypeError, AssertionError) as error:
            raise engine_trouble(f"vLLM cannot take the weights of version {version}", error) from error
        self._set_version(version)
        self._loads += 1
        if self.settings.vllm.keep_caches:
            self._begin_anew()
        else:
            # of finished prompts, and of what runs, which is computed again
            self._engine.reset_prefix_cache(reset_running_requests=True)
        if self._check is not None:
            self._check.compare({"vLLM": self.answers(self._check.requests)}, version)

    def _end_turn(self) -> None:
        """Take in the turn that vLLM has begun ahead of its answers: those tokens are the old weights'."""
        core = self._engine.engine_core.engine_core
        if not core.batch_queue:  # None where it begins none ahead, as on a CPU
            return
        core.pause_scheduler("keep", clear_cache=False)
        while core.batch_queue:
            self._advance()
        core.resume_scheduler()

    def _begin_anew(self) -> None:
        """Ask again for what has no token yet: all of it is to be the new weights', its prompt's keys among them."""
        states = self._engine.output_processor.request_states.values()
        names = [state.external_req_id for state in states if not state.detokenizer.num_output_tokens()]
        if names:
            self._engine.abort_request(names)
        for asked in [self._asked.pop(name) for name in names]:
            self._add(asked)

    def sleep(self) -> None:
        """Give weights and cache back (vLLM's level 2; its CPU build keeps both) until the next ``load_weights``."""
        if not self._sleeps or (self._engine.is_sleeping() and not self.weights.begun):
            return
        if self._asked:
            raise RuntimeError(f"vLLM cannot sleep while {len(self._asked)} samples are in flight")
        self.weights.abandon()
        self._engine.sleep(_DISCARD)

    def interrupt(self, *, keep: bool = False) -> list[RolloutRequest]:
        unfinished = self._unfinished(keep=keep)
        self._drop(0)
        return unfinished

    def close(self) -> None:
        """Stop vLLM and free its memory (and its worker processes where there are several GPUs)."""
        if self._engine is None:
            return
        self.interrupt()
        self._engine.engine_core.shutdown()
        self._engine = None
        clean_up()

    def _running(self) -> Iterator[tuple[GroupProgress, int, Completion]]:
        for state in self._engine.output_processor.request_states.values():
            asked, sampled = self._asked[state.external_req_id], Sampled.so_far(state)
            if sampled.tokens:
                yield asked.group, asked.index, self._completion(asked, sampled, FinishReason.ABORTED, 0.0)

    def _drop(self, first: int) -> None:
        """Forget every group from issue order ``first`` on."""
        names = [name for name, asked in self._asked.items() if asked.group.order >= first]
        if names:
            self._engine.abort_request(names)
        for name in names:
            del self._asked[name]
        self._groups.drop(first)

    def sampled_tokens(self) -> int:
        """Without those of dropped samples."""
        states = self._engine.output_processor.request_states.values()
        return self._tokens_ended + sum(state.detokenizer.num_output_tokens() for state in states)

    def _set_version(self, version: int) -> None:
        self._version = version
        self._engine.set_weight_version(str(version))

    def _try_out(self) -> None:
        """Sample one token: what this device has no kernel for is found now, not after hours of other work."""
        problem = Problem(id="trial", prompt="", references=(), verifier="", source="")
        sampling, prompt = SamplingParams(temperature=0.0, max_tokens=1), frozen_tokens([0])
        trial = RolloutRequest(draw=0, problem=problem, prompt_tokens=prompt, group_size=1, sampling=sampling)
        try:
            self.submit([trial])
            list(self.finished())
        except BaseException:
            self._groups.drop()
            self._asked.clear()
            self.close()
            raise

    def _add(self, asked: Asked) -> None:
        from vllm.inputs import tokens_input  # pyright: ignore[reportMissingImports]

        name = f"{asked.group.order}:{asked.index}"
        self._asked[name] = asked
        self._arrivals += 1
        self._engine.add_request(
            name,
            tokens_input(
                asked.group.request.prompt_tokens.tolist() + asked.given,
                # keys and values are shared with requests of the same salt alone; by version would not do: a run that
                # goes back has the same numbers again
                cache_salt=str(self._loads) if self.settings.vllm.keep_caches else None,
            ),
            asked.settings(self._end_tokens),
            arrival_time=float(self._arrivals),  # by which vLLM orders its queue: never the clock
            lora_request=None if self._adapters is None else self._adapters.request(),
            # the smaller number comes first
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
            if output.finished and output.request_id in self._asked:
                ended.append((self._asked.pop(output.request_id), output))
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
        # from its first turn on: the wait in vLLM's queue is not counted
        seconds = max(0.0, times.last_token_ts - times.scheduled_ts) if times is not None else 0.0
        return self._completion(asked, sampled, _REASONS[answer.finish_reason], seconds)

    def _completion(self, asked: Asked, sampled: Sampled, reason: FinishReason, seconds: float) -> Completion:
        """The response after its beginning, if vLLM was given one."""
        if not np.isfinite(sampled.logprobs).all():
            raise FloatingPointError(
                f"the model's logits are not finite (policy version {self._version}); its weights are broken"
            )
        tokens, logprobs, spans = sampled.tokens, sampled.logprobs, sampled.spans
        spans = spans or ((self._version, len(tokens)),)
        before = asked.before
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
            # a response counts as old as its oldest token
            policy_version=min(version for version, _ in spans),
            version_spans=spans if len(spans) > 1 else (),
            seconds=seconds,
        )
