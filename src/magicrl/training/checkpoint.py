"""Checkpoints: the run's whole state, written atomically, without pickle.

A checkpoint is a folder ``step-000040`` with ``tensors.safetensors`` (weights and moments by parameter
name) and ``state.json`` (everything else). It is written under another name, flushed to disk and
renamed, so that a folder of that name is always whole: a run killed while writing leaves the last
good one untouched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

SCHEMA_VERSION = 1
_NAME = re.compile(r"step-(\d{6,})")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the text names the folder and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        step: training steps done.
        tensors: flat names to tensors.
        state: JSON-able state of everything that is not a tensor.
        folder: where it was read from, None when it was not.
    """

    step: int
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]
    folder: Path | None = None


def save_checkpoint(root: Path, checkpoint: Checkpoint, *, keep_last: int, keep: frozenset[int] = frozenset()) -> Path:
    """Write ``root/step-NNNNNN`` atomically, then remove all but the last ``keep_last`` and those in ``keep``.

    Raises:
        OSError: the disk is full or not writable; older checkpoints are untouched.
    """
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".writing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = root / f"step-{checkpoint.step:06d}"
    writing = root / f".writing-{folder.name}"
    writing.mkdir()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    save_file(tensors, writing / "tensors.safetensors")
    document = {"schema_version": SCHEMA_VERSION, "step": checkpoint.step, "state": checkpoint.state}
    (writing / "state.json").write_text(json.dumps(document, indent=1))
    for path in (*writing.iterdir(), writing):
        _flush(path)
    if folder.exists():
        # The same step written again after a resume: the two are identical, so either may stay.
        shutil.rmtree(folder)
    writing.rename(folder)
    _flush(root)
    _prune(root, keep_last, keep)
    return folder


def load_latest(root: Path) -> Checkpoint | None:
    """The newest checkpoint of a run, None if it has none.

    Raises:
        CheckpointError: the newest one is damaged or of another schema.
    """
    folders = _folders(root)
    return load_checkpoint(folders[-1]) if folders else None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read one checkpoint folder. Raises ``CheckpointError`` if it is damaged or of another schema."""
    try:
        document = json.loads((folder / "state.json").read_text())
        found = document["schema_version"]
        if found != SCHEMA_VERSION:
            raise CheckpointError(
                f"{folder} has checkpoint schema {found}, this magicrl reads {SCHEMA_VERSION}; "
                "resume it with the version that wrote it, or start anew with another --output"
            )
        tensors = load_file(folder / "tensors.safetensors")
        return Checkpoint(step=int(document["step"]), tensors=tensors, state=document["state"], folder=folder)
    except (OSError, json.JSONDecodeError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} is damaged ({error}); delete that folder to resume from the checkpoint before it"
        ) from None


def split_state(prefix: str, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of ``state`` under ``prefix/name``, and the rest as JSON."""
    tensors = {f"{prefix}/{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
    return tensors, {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}


def join_state(prefix: str, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of ``split_state``."""
    head = f"{prefix}/"
    return {**{k.removeprefix(head): v for k, v in tensors.items() if k.startswith(head)}, **rest}


def _folders(root: Path) -> list[Path]:
    found = [p for p in root.glob("step-*") if _NAME.fullmatch(p.name)] if root.is_dir() else []
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def _prune(root: Path, keep_last: int, keep: frozenset[int]) -> None:
    for folder in _folders(root)[:-keep_last]:
        if int(folder.name.removeprefix("step-")) not in keep:
            # Renamed first: a kill in the middle of the removal must not leave half a checkpoint under its name.
            doomed = root / f".writing-old-{folder.name}"
            folder.rename(doomed)
            shutil.rmtree(doomed)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
