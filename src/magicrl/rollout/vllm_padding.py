"""Logits processor that keeps vLLM from sampling the padding rows of the output head (vLLM 0.32).

vLLM's two model runners take logits processors with different interfaces: V1 (its CPU build) and V2 (its default on a
GPU). One class implements both, with a single write per step over the whole batch. vLLM's workers import this module by
name. A logit bias per padding row in every request would not work, because the V2 runner allows at most 1,024.
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
        self._valid_vocab = int(vllm_config.additional_config["valid_vocab"])

    def apply(self, logits: torch.Tensor, *context: Any) -> torch.Tensor:  # pyright: ignore
        """Mask ``logits`` ``[rows, rows of the head]`` in place. V2 also passes the layout of the step."""
        logits[:, self._valid_vocab :] = -torch.inf
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Do nothing, because there is no state per request."""
