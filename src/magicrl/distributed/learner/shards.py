"""The learner's state as files of shards: the keys of the single learner's checkpoint, each rank its own rows.

Written by ``torch.distributed.checkpoint`` as safetensors (no pickle), one file a rank; each says which rows of which
tensor it holds, so that any number of ranks, or one process without any, reads them. All nodes see the folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor


def write(folder: Path, state: Mapping[str, DTensor]) -> tuple[str, str] | None:
    """Write this rank's rows to ``folder``; called by all ranks.

    Returns:
        Name and SHA-256 of this rank's file; None if it holds no rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save(dict(state), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    mine = sorted(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*.safetensors"))
    if not mine:
        return None
    (file,) = mine
    return file.name, _sha256(file)


def verify(folder: Path, files: Mapping[str, str], rank: int, ranks: int) -> None:
    """Compare this rank's part of the files with their checksums.

    Raises:
        ValueError: a file is missing or is not what was written.
    """
    for name in sorted(files)[rank::ranks]:
        file = folder / name
        if not file.is_file() or _sha256(file) != files[name]:
            what = "does not have the checksum it was written with" if file.is_file() else "is missing"
            raise ValueError(f"{file} {what}; resume from the checkpoint before it")


def read(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill ``into`` (shards, or whole tensors in one process) from ``folder``.

    Raises:
        ValueError: the folder does not hold these tensors.
    """
    reader = HuggingFaceStorageReader(str(folder))
    found = {key: tuple(entry.size) for key, entry in reader.read_metadata().state_dict_metadata.items()}  # pyright: ignore[reportAttributeAccessIssue]
    expected = {key: tuple(tensor.shape) for key, tensor in into.items()}
    if found != expected:
        differing = sorted(set(found.items()) ^ set(expected.items()))[:3]
        raise ValueError(
            f"{folder} does not belong to this model: it differs in {[name for name, _ in differing]} "
            f"({len(found)} tensors there, {len(expected)} expected); resume with the recipe that wrote it"
        )
    # each rank plans for itself: one that finds a fault alone would leave the others waiting in a collective
    load(dict(into), storage_reader=reader, no_dist=True)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
