"""What every rank is told of the learner that it is a part of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from magicrl.training.objective import LearnerSettings

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
class RankSettings:
    """The same on all ranks.

    Attributes:
        folder: the start model, a folder that every rank can read or a hub name.
        learning: what the recipe says about learning.
        valid_vocab: rows of the output head that are words; None means all.
        sequence_parallel: ranks that share one sequence.
        offload: master weights, gradients and moments live in the host's memory.
        device: ``cuda`` gives every rank one GPU.
        shares_gpus: rollout engines use the ranks' GPUs in turn with them.
        threads: torch threads of a rank; None leaves torch's default.
        timeouts: see there.
    """

    folder: str
    learning: LearnerSettings = field(default_factory=LearnerSettings)
    valid_vocab: int | None = None
    sequence_parallel: int = 1
    offload: bool = False
    device: Literal["cpu", "cuda"] = "cpu"
    shares_gpus: bool = False
    threads: int | None = None
    timeouts: LearnerTimeouts = field(default_factory=LearnerTimeouts)
