"""Arguments of vLLM's engine from `EngineSettings`: of every vLLM engine, in a run, a replica or an evaluation.

All of them are made by `magicrl.rollout.engines.make_vllm`. A user's ``engine_args`` reach vLLM as they are, so an
argument that magicrl does not set needs no code here.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch

from magicrl.config.model_schema import LoraConfig
from magicrl.config.rollout_schema import VllmConfig
from magicrl.rollout.engine_settings import EngineSettings, TrainingUse
from magicrl.rollout.vllm_adapters import adapter_options
from magicrl_verifiers.references import did_you_mean


def vllm_missing(error: ImportError) -> ValueError:
    """Return the error for a missing or broken installation of vLLM."""
    if (error.name or "").split(".")[0] == "vllm":
        return ValueError(
            "the vllm engine needs vLLM, which is not installed; CPU: pip install 'magicrl[vllm]' (beside torch's CPU "
            "build), GPU: pip install 'magicrl[vllm-gpu]'"
        )
    return ValueError(
        f"vLLM is installed but cannot be imported ({error}); it must fit the installed torch: reinstall it, "
        "on a CPU with pip install 'magicrl[vllm]', on a GPU with pip install 'magicrl[vllm-gpu]'"
    )


_CPU_BLOCK = 32  # tokens of a cache block; smaller than vLLM's CPU default of 128, so that more of a prompt is shared
_OWN_GPU, _SHARED_GPU = 0.9, 0.6  # share of a GPU's memory; on a shared one the learner's weights and moments stay


def executor(gpus: int) -> Literal["uni", "mp"]:
    """Return vLLM's executor for ``gpus`` GPUs: a worker in this process, or worker processes that this process starts.

    Inside a Ray placement group vLLM would choose workers that request GPUs from Ray. A replica's GPUs are already
    assigned, so these workers would wait forever. An engine never spans nodes, so Ray's executor is never needed.
    """
    return "uni" if gpus == 1 else "mp"


def engine_options(
    folder: str, settings: EngineSettings, *, valid_vocab: int, on_gpu: bool, lora: LoraConfig | None = None
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's ``EngineArgs``; parameters as in `VllmEngine`.

    With ``lora`` the engine can serve these adapters.

    Raises:
        ValueError: ``rollout.vllm.engine_args`` names an argument that magicrl sets.
    """
    vllm, training = settings.vllm, settings.training or TrainingUse()
    cache_mb = vllm.cache_mb or (None if on_gpu else settings.memory_limit_mb)
    gpu_share = vllm.gpu_share or (_SHARED_GPU if training.shares_gpu else _OWN_GPU)
    file = Path(folder) / "config.json"
    described: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    described = described.get("text_config", described)
    tuning = "attn_temperature_tuning"
    own = {
        "model": folder,
        "dtype": settings.dtype,
        "hf_overrides": {} if settings.head_dtype is None else {"head_dtype": settings.head_dtype},
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.max_rows,
        "tensor_parallel_size": settings.gpus,
        "distributed_executor_backend": executor(settings.gpus),
        "kv_cache_memory_bytes": None if cache_mb is None else cache_mb << 20,
        # On a CPU this share of the memory must be free in addition to the cache.
        "gpu_memory_utilization": gpu_share if on_gpu else 0.01,
        "enforce_eager": vllm.eager if vllm.eager is not None else not on_gpu,
        "enable_prefix_caching": True,
        # vLLM's default are log-probs before the temperature, not those of the sampled distribution.
        "logprobs_mode": "processed_logprobs",
        # Given as a name, because several workers are other processes.
        "logits_processors": ["magicrl.rollout.vllm_padding:NoPadding"],
        "additional_config": {"valid_vocab": valid_vocab},
        # Otherwise the folder's recommended top-p, top-k and penalties would change the distribution.
        "generation_config": "vllm",
        # vLLM would derive this from ``max_context``: Llama 4's layers without positions scale their queries only in
        # contexts of over 32,768 tokens, so a shorter limit would make it another model than the learner's.
        "override_generation_config": {tuning: bool(described[tuning])} if tuning in described else {},
        # Evaluations and weight checks come before the requests in flight.
        "scheduling_policy": "priority",
        # Tokens in, tokens out. vLLM then ignores `bad_words`, whose texts it cannot encode.
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "use_tqdm_on_load": False,
        # Each request has its own seed.
        "seed": 0,
        **({"enable_sleep_mode": training.sleeps} if on_gpu else {"block_size": _CPU_BLOCK}),
        # Latent attention (DeepSeek) passes queries per head. The C++ rotary kernel of vLLM 0.32's CPU build takes them
        # for one head, and does not rotate keys that are a slice of another tensor. torch computes both correctly.
        **(
            {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
            if described.get("kv_lora_rank") and not on_gpu
            else {}
        ),
        **({} if lora is None else adapter_options(lora)),
    }
    # None is vLLM's default of each, which `engine_args` may replace.
    own = {name: value for name, value in own.items() if value is not None}
    if twice := sorted(own.keys() & vllm.engine_args.keys()):
        raise ValueError(f"rollout.vllm.engine_args.{twice[0]}: magicrl sets this argument of vLLM itself; remove it")
    return own | vllm.engine_args


def check_engine_args(vllm: VllmConfig) -> None:
    """Check ``rollout.vllm.engine_args`` before anything is computed.

    Raises:
        ValueError: vLLM is not installed or does not have an argument, or magicrl sets it itself.
    """
    if not vllm.engine_args:
        return
    on_gpu = torch.cuda.is_available()
    engine_options("", EngineSettings(model="", vllm=vllm), valid_vocab=1, on_gpu=on_gpu)
    try:
        from vllm import EngineArgs  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise vllm_missing(error) from error
    known = [field.name for field in fields(EngineArgs)]
    for name in vllm.engine_args:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"rollout.vllm.engine_args.{name}: vLLM's EngineArgs has no such argument{hint}")
