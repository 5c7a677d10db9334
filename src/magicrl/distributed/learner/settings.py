"""What every rank is told of the learner that it is a part of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from magicrl.algorithms.corrections import Correction
from magicrl.config.schema import ModelConfig, OptimizerConfig

LOCAL_RANK = "MAGICRL_LOCAL_RANK"
"""Environment variable: a rank's number among those of its machine, where they share its GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerTimeouts:
    """Seconds after which a wait ends with an error that names what was waited for.

    Attributes:
        start: for the ranks to be placed, connected and to have their share of the start model.
        call: for all ranks to answer one call.
        collective: for the other ranks inside one exchange of tensors.
        grace: after the first rank failed, for the others to show whether they did too.
    """

    start: float = 900.0
    call: float = 3600.0
    collective: float = 600.0
    grace: float = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSettings:
    """The same on all ranks.

    Attributes:
        folder: the start model, a folder that every rank can read or a hub name.
        valid_vocab: rows of the output head that are words; None means all.
        loss: a row of ``algorithms.losses.LOSSES``.
        optimizer: AdamW's settings.
        model: precision, micro-batches, gradient checkpointing, LoRA.
        correction: sampler correction of the policy term.
        correction_cap: its cap.
        kl_coefficient: beta.
        sequence_parallel: ranks that share one sequence.
        offload: master weights, gradients and moments live in the host's memory.
        device: ``cuda`` gives every rank one GPU.
        shares_gpus: rollout engines use the ranks' GPUs in turn with them.
        threads: torch threads of a rank; None leaves torch's default.
        timeouts: see there.
    """

    folder: str
    valid_vocab: int | None = None
    loss: str = "magic"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    correction: Correction = "none"
    correction_cap: float = 2.0
    kl_coefficient: float = 0.0
    sequence_parallel: int = 1
    offload: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    shares_gpus: bool = False
    threads: int | None = None
    timeouts: LearnerTimeouts = field(default_factory=LearnerTimeouts)
