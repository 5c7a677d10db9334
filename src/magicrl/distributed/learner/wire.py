"""Tensors between processes: as numpy arrays, which Ray hands over without a copy and pipes write as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """CPU tensors by name.

    Attributes:
        arrays: their data; bfloat16, which numpy does not know, as int16.
        narrow: names of those that are bfloat16.
    """

    arrays: Mapping[str, NDArray[Any]]
    narrow: frozenset[str]

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> PackedTensors:
        """Pack CPU tensors; the arrays share their memory."""
        narrow = frozenset(name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16)
        return PackedTensors(
            arrays={
                name: (tensor.view(torch.int16) if name in narrow else tensor).detach().contiguous().numpy()
                for name, tensor in tensors.items()
            },
            narrow=narrow,
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors again; they own memory that may be written to."""
        found: dict[str, Tensor] = {}
        for name, array in self.arrays.items():
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
            found[name] = tensor.view(torch.bfloat16) if name in self.narrow else tensor
        return found
