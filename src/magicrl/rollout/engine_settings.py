"""What an engine is made from: the same settings for every engine, and the recipe's section of vLLM as it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from magicrl.config.model_schema import DType, HeadDType, LoraConfig
from magicrl.config.schema import VllmConfig
from magicrl.models.prompts import PromptEncoder
from magicrl.rollout.protocol import WeightCheck
from magicrl.rollout.vllm_weights import Placed


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingUse:
    """What only an engine in training needs: it will be given a learner's weights."""

    check: WeightCheck | None = None  # run by engines beside the learner's process after each weight copy
    shares_gpu: bool = False  # the learner is on the same GPU
    sleeps: bool = False  # the learner works on the same GPU while the engine sleeps
    direct_weights: Placed | None = None  # where ranks are that send weights straight to the engine's workers
    experts: bool = False  # completions are to tell the experts that tokens went to
    lora: LoraConfig | None = None  # the learner trains these adapters, and an engine may take them alone


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What an engine is made from."""

    model: str  # a model folder or hub name; for a server the model's name there
    dtype: DType = "float32"  # precision of the weights
    head_dtype: HeadDType | None = None  # of the output head's logits; None: ``dtype``
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where they are
    max_context: int | None = None  # most prompt + response tokens, of vLLM; None: the model's
    max_rows: int = 32  # most sequences that decode at once
    memory_limit_mb: int = 4096  # most MiB of the key/value cache
    gpus: int = 1  # over how many GPUs of this machine vLLM spreads the model (tensor parallel)
    threads: int | None = None  # of torch; None: the cores this process may use. A training run has set them before
    vllm: VllmConfig = field(default_factory=VllmConfig)  # what only vLLM has
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of ``--engine-option``, by name
    exact: bool = False  # ``model.exact``: the in-process engine's alone
    encoder: PromptEncoder | None = None  # text to tokens and back; None: made from the model
    training: TrainingUse | None = None  # None: it samples with the model's own weights, as version 0

    def use_threads(self) -> int:
        """Set torch's threads as asked for; how many they are."""
        if self.training is None:
            torch.set_num_threads(self.threads or len(os.sched_getaffinity(0)))
        return torch.get_num_threads()
