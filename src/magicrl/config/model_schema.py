"""The ``[start]`` and ``[model]`` sections of a recipe: which model is trained, and in what precision and memory."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from magicrl.config.paths import FolderOrName, RecipeName
from magicrl.config.section import Section

DType = Literal["float32", "bfloat16"]


class StartConfig(Section):
    """The model that training starts from: exactly one of the two."""

    model: FolderOrName | None = None
    """A Hugging Face model folder (or hub name)."""
    sft: RecipeName | None = None
    """A supervised recipe, its file or a shipped one's name; its model is made when it is absent."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.model is None) == (self.sft is None):
            raise ValueError("[start] needs exactly one of: model, sft")
        return self


class LoraConfig(Section):
    """Low-rank adapters (PEFT) instead of full weights."""

    rank: int = Field(default=16, ge=1)
    """Of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """Their scale is alpha / rank."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get one, by the last part of their name."""


class ModelConfig(Section):
    """Precision and memory of the trained model. Master weights are always float32."""

    dtype: DType = "bfloat16"
    """Compute precision of learner and reference."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass, attention not: less memory, up to a third more
    time."""
    checkpoint_above_tokens: int | None = Field(default=None, ge=1)
    """The same for micro-batches of more tokens than this only: long responses fit, short ones stay fast."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens (prompt and response) in one forward/backward; one longer sample goes alone."""
    share_prompts: bool = True
    """Compute a prompt once for all its responses in a micro-batch, where that saves a tenth of the tokens or more."""
    head_chunk_tokens: int = Field(default=1024, ge=1)
    """Rows of logits that exist at once in the fused head."""
    lora: LoraConfig | None = None
