"""Memory of one accelerator by term, and whether it fits.

The learner shards parameters, gradients and moments over all its accelerators; activations are those of one
micro-batch, divided over a sequence-parallel group. The engine holds its weights, and its cache takes what is left.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from magicrl.planning.costs import BF16, FLOAT32
from magicrl.planning.hardware import Hardware
from magicrl.planning.shapes import ModelShape

WORKING_WIDTHS = 10
"""Values of width d a token that a layer keeps for its backward pass, beside three of the feed-forward's width."""
LOGIT_COPIES = 3
"""Float32 tensors of logits' size that exist at once in the chunked head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSetup:
    """How the learner lays out its state.

    Attributes:
        gpus: accelerators that shard parameters, gradients and moments.
        sequence_parallel: accelerators that share a sequence.
        micro_batch_tokens: tokens of a forward/backward; a longer sample goes alone.
        longest: tokens of the longest sample, prompt and T.
        checkpointing: only the layers' inputs are kept.
        head_chunk_tokens: rows of logits that exist at once.
        offload_moments: AdamW's moments live in the host's memory.
        reference: a frozen reference model is kept, sharded, in bf16.
        adapters: parameters of LoRA adapters, which alone are trained; 0: everything is.
    """

    gpus: int
    sequence_parallel: int
    micro_batch_tokens: int
    longest: int
    checkpointing: bool
    head_chunk_tokens: int
    offload_moments: bool = False
    reference: bool = False
    adapters: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerMemory:
    """Bytes on one accelerator while it learns.

    Attributes:
        master: float32 weights (shard).
        gradients: float32 (shard).
        moments: AdamW's two, float32 (shard); 0 when offloaded.
        reference: bf16 (shard).
        frozen: weights that LoRA leaves as they are, bf16 (shard).
        gathered: two layers and the embeddings in bf16, whole.
        activations: of one micro-batch.
        head: logits of one chunk.
        runtime: contexts and buffers.
    """

    master: float
    gradients: float
    moments: float
    reference: float
    frozen: float
    gathered: float
    activations: float
    head: float
    runtime: float

    @property
    def resident(self) -> float:
        """Bytes that stay while the engine generates: master weights, moments, reference, frozen weights, runtime."""
        return self.master + self.moments + self.reference + self.frozen + self.runtime

    @property
    def total(self) -> float:
        """The peak, all terms together."""
        return sum(self.terms().values())

    def terms(self) -> dict[str, float]:
        """Term to bytes."""
        return asdict(self)


def activation_bytes(shape: ModelShape, tokens: float, *, checkpointing: bool) -> float:
    """Activations of one micro-batch in bf16: every layer's, or their inputs and one layer's."""
    layer = tokens * (WORKING_WIDTHS * shape.hidden + 3 * shape.intermediate) * BF16
    if not checkpointing:
        return shape.layers * layer
    return shape.layers * tokens * shape.hidden * BF16 + layer


def learner_memory(shape: ModelShape, setup: LearnerSetup, runtime: float) -> LearnerMemory:
    """Bytes on one accelerator by term. One accelerator holds everything and a bf16 copy of the trained weights."""
    tokens = max(setup.micro_batch_tokens, setup.longest) / setup.sequence_parallel
    trained = setup.adapters or shape.parameters
    shard = trained / setup.gpus
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    gathered = trained if setup.gpus == 1 else min(shape.parameters, 2 * shape.layer_parameters + embeddings)
    rows = min(setup.head_chunk_tokens, tokens)
    return LearnerMemory(
        master=FLOAT32 * shard,
        gradients=FLOAT32 * shard,
        moments=0.0 if setup.offload_moments else 2 * FLOAT32 * shard,
        reference=BF16 * shape.parameters / setup.gpus if setup.reference else 0.0,
        frozen=BF16 * shape.parameters / setup.gpus if setup.adapters else 0.0,
        gathered=BF16 * gathered,
        activations=activation_bytes(shape, tokens, checkpointing=setup.checkpointing),
        head=LOGIT_COPIES * FLOAT32 * rows * shape.vocabulary,
        runtime=runtime,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes on one accelerator while it generates.

    Attributes:
        weights: bf16, divided by the tensor-parallel degree.
        learner: what the learner leaves resident there (0 where the engine has its own accelerators).
        runtime: contexts and buffers, where the learner's are not counted already.
        cache: what is left for keys and values; negative where nothing is.
    """

    weights: float
    learner: float
    runtime: float
    cache: float

    def terms(self) -> dict[str, float]:
        """Term to bytes."""
        return asdict(self)


def engine_memory(shape: ModelShape, hardware: Hardware, tensor_parallel: int, learner: float) -> EngineMemory:
    """The engine's memory beside ``learner`` resident bytes; the cache is what the budget leaves."""
    weights = BF16 * shape.parameters / tensor_parallel
    own = 0.0 if learner else hardware.runtime
    return EngineMemory(weights=weights, learner=learner, runtime=own, cache=hardware.budget - weights - learner - own)
