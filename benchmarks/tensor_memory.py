"""The most bytes of tensors that exist at once during a call: counted on a CPU, asked of the allocator on CUDA."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Count(TorchDispatchMode):
    """Adds up the storages that operators return, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.present = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._known.add(storage._cdata)
                    self.present += storage.nbytes()
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.present)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.present -= size


def peak_of(action: Callable[[], object], device: str) -> int:
    """Bytes above what exists beforehand; ``action``'s result counts."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = action()
        found = torch.cuda.max_memory_allocated() - before
    else:
        with _Count() as count:
            kept = action()
        found = count.peak
    del kept
    return found
