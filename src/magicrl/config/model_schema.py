"""Recipe tables ``[model]`` and ``[optimizer]``, and the tiny models of the shipped recipes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from magicrl.config.paths import FilePath
from magicrl.config.section import Section

DType = Literal["float32", "bfloat16", "float16"]
HeadDType = Literal["float32"]


class LoraConfig(Section):
    """Low-rank adapters (LoRA, with PEFT). Only the adapters are trained; the weights of the starting model stay
    frozen."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """Scaling of the adapters: their output is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get an adapter, by the last part of their name."""
    start: FilePath | None = None
    """Folder with adapters of the starting model (PEFT format) from which training continues. Default: new adapters
    that do not change the model."""


class ModelConfig(Section):
    """Precision and memory use of the trained model. The optimizer's weights are always float32."""

    dtype: DType = "bfloat16"
    """Precision of the forward and backward passes of the learner and the reference model. With float16 the loss is
    scaled (docs/guides/models.md#precision)."""
    head_dtype: HeadDType | None = None
    """Precision of the logits in the learner, the reference model and the engine. Default: ``dtype``."""
    entropy_clamp: float = Field(default=0.0, ge=0, lt=1)
    """Share of the vocabulary, the least likely tokens, that the learner's entropy and the entropy bonus exclude
    (AEnt). 0 includes every token."""
    gradient_checkpointing: bool = False
    """Recompute the activations of the layers (except attention) in the backward pass. This saves memory and takes up
    to a third more time."""
    checkpoint_above_tokens: int | None = Field(default=None, ge=1)
    """Use gradient checkpointing only for micro-batches with more tokens than this, so that long responses fit and
    short ones stay fast."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Maximum number of prompt and response tokens in one forward and backward pass. A longer sample is a
    separate micro-batch."""
    share_prompts: bool = True
    """Compute a prompt once for all its responses in a micro-batch, if this saves at least a tenth of the tokens."""
    head_chunk_tokens: int = Field(default=1024, ge=1)
    """Number of tokens whose logits the fused output head computes at a time. Smaller values need less memory."""
    router_replay: bool = False
    """For a mixture of experts: the learner sends each token to the experts that the engine chose when it sampled the
    token (docs/guides/models.md)."""
    exact: bool = False
    """Make the log-probs and entropies of the in-process engine and of the learner bitwise equal. Works on CPUs
    (docs/guides/runs.md#exact-mode)."""
    compile: bool = False
    """Compile the decoder layers of the learner and the reference model
    (docs/guides/cluster.md#compiled-layers). Plans and memory checks do not consider the effect."""
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _compiled_where_it_can_be(self) -> Self:
        for name in ("exact", "router_replay"):
            if self.compile and getattr(self, name):
                raise ValueError(f"compile with {name}: those layers cannot be compiled; leave one of them out")
        return self


class AdamWConfig(Section):
    """Settings of AdamW, except for the learning rate."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the running mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the running mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Constant added to the denominator of the update for numerical stability."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay. Each update subtracts learning rate x weight decay x weight."""
    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Maximum L2 norm of the gradient. A larger gradient is scaled down to it; ``inf`` scales none."""


class OptimizerConfig(AdamWConfig):
    """Optimizer that updates the policy: AdamW, or Muon for the matrices of the decoder layers."""

    kind: Literal["adamw", "muon"] = "adamw"
    """``adamw``, or ``muon``: torch's Muon (orthogonalised momentum) for the matrices of the decoder layers or the
    adapters, and AdamW for embeddings, head, norms and biases. Both use ``learning_rate``; Muon's is scaled so that its
    updates are as large as AdamW's. Not with ``[cluster]``."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of updates (SGD steps) of linear warm-up. The learning rate is constant afterwards."""


class TinyModelConfig(Section):
    """New tiny decoder (Llama architecture) with random weights. Its vocabulary comes from the task family."""

    hidden_size: int = Field(default=64, ge=8)
    """Hidden size."""
    layers: int = Field(default=2, ge=1)
    """Number of decoder layers."""
    heads: int = Field(default=2, ge=1)
    """Number of attention heads. Must divide ``hidden_size``."""
    intermediate_size: int = Field(default=176, ge=8)
    """Hidden size of the feed-forward layers."""
    max_context: int = Field(default=256, ge=8)
    """Maximum number of tokens of a prompt and its response together."""
