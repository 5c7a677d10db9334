"""What keeps vLLM from sampling the output head's padding rows, which stand for no token (vLLM 0.32).

Both of vLLM's model runners take logits processors, each of an interface of its own: V1 (its CPU build) and V2 (its
default on a GPU). One class is both: a single write over the whole batch a step. vLLM's workers import this module by
name; a bias a padding row, part of every request, stops at the V2 runner's 1,024.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
    LogitsProcessor as ForRunnerV1,
)
from vllm.v1.worker.gpu.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
    LogitsProcessor as ForRunnerV2,
)


class NoPadding(ForRunnerV1, ForRunnerV2):
    """Sets the logits from ``additional_config["valid_vocab"]`` on to minus infinity."""

    def __init__(self, vllm_config: Any, *of_runner: Any) -> None:
        del of_runner
        self._valid_vocab = int(vllm_config.additional_config["valid_vocab"])

    def apply(self, logits: torch.Tensor, *context: Any) -> torch.Tensor:
        """In place; ``logits`` ``[rows, head's rows]``, of V2 with the step's layout."""
        del context
        logits[:, self._valid_vocab :] = -torch.inf
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Nothing here belongs to a request."""
