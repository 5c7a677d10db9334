"""Settings from which every rollout engine is made, with the recipe's vLLM table as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from magicrl.config.model_schema import DType, HeadDType, LoraConfig
from magicrl.config.rollout_schema import VllmConfig
from magicrl.models.prompts import PromptEncoder
from magicrl.rollout.protocol import WeightCheck
from magicrl.rollout.vllm_weights import Placed


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingUse:
    """Settings of an engine in training, which gets a learner's weights."""

    check: WeightCheck | None = None  # for engines in other processes: run after each weight copy
    shares_gpu: bool = False  # the learner is on the same GPU
    sleeps: bool = False  # the learner works on the same GPU while the engine sleeps
    direct_weights: Placed | None = None  # placement of ranks that send weights directly to the engine's workers
    experts: bool = False  # completions must contain the experts that processed each token
    lora: LoraConfig | None = None  # the learner trains these adapters, and an engine may take only them


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Settings from which an engine is made."""

    model: str  # model folder or hub name; for a server the model's name there
    dtype: DType = "float32"  # precision of the weights
    head_dtype: HeadDType | None = None  # precision of the logits; None means ``dtype``
    device: Literal["auto", "cpu", "cuda"] = "auto"  # device of the weights
    max_context: int | None = None  # vLLM: maximum prompt + response tokens; None means the model's maximum
    max_rows: int = 32  # maximum number of sequences that decode at the same time
    memory_limit_mb: int = 4096  # maximum size of the KV cache in MiB
    gpus: int = 1  # vLLM: number of GPUs of this machine for the model (tensor parallel)
    threads: int | None = None  # torch threads; None means the usable cores. A training run sets them earlier
    vllm: VllmConfig = field(default_factory=VllmConfig)  # settings that only vLLM has
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # values of ``--engine-option`` by name
    exact: bool = False  # ``model.exact``, only for the in-process engine
    encoder: PromptEncoder | None = None  # text to tokens and back; None makes one from the model
    training: TrainingUse | None = None  # None means sampling with the model's own weights, as version 0

    def use_threads(self) -> int:
        """Set the number of torch threads and return it."""
        if self.training is None:
            torch.set_num_threads(self.threads or len(os.sched_getaffinity(0)))
        return torch.get_num_threads()
