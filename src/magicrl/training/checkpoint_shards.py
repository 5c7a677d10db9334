"""A learner's tensors as the ranks of a distributed learner write them: safetensors files of rows.

Each file says in its header which rows of which tensor it holds (the form of ``torch.distributed.checkpoint``), so
that a learner of one process, or an evaluation, reads them without any ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

FOLDER = "learner"
"""Of the shards, in a checkpoint's folder."""
_HEADER = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


def joined(folder: Path, files: Mapping[str, str]) -> dict[str, Tensor]:
    """Whole tensors by name from the shards in ``folder``.

    Args:
        folder: where they lie.
        files: their names (and checksums, which are not looked at here).

    Raises:
        OSError: a file is missing or holds no description of its rows.
    """
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name in sorted(files):
        with safe_open(folder / name, framework="pt") as opened:
            described = (opened.metadata() or {}).get(_HEADER)
            if described is None:
                raise OSError(f"{name} does not say which rows it holds")
            offsets: dict[str, Any] = json.loads(described)
            for key in opened.keys():  # noqa: SIM118 - the file is no mapping
                starts = offsets[key][_OFFSETS]
                parts.setdefault(key, []).append((int(starts[0]) if starts else 0, opened.get_tensor(key)))
    return {key: _stacked(found) for key, found in parts.items()}


def _stacked(parts: list[tuple[int, Tensor]]) -> Tensor:
    ordered = [tensor for _, tensor in sorted(parts, key=lambda part: part[0])]
    return ordered[0] if len(ordered) == 1 else torch.cat(ordered)
