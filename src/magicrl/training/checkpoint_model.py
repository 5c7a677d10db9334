"""A checkpoint of a run as a model folder: what evaluates a run from beside it, without touching the run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from torch import Tensor

from magicrl.models.loading import load_policy, save_policy
from magicrl.training.checkpoint import CheckpointError, load_checkpoint

WEIGHTS = "weights/"


def checkpoint_folders(run: Path) -> list[Path]:
    """The whole checkpoints that a run has at this moment, oldest first.

    Raises:
        ValueError: ``run`` is no run folder.
    """
    _read_run(run)
    return sorted((run / "checkpoints").glob("step-*"))


def run_status(run: Path) -> str:
    """``running``, ``finished``, ``stopped`` or ``failed``, as the run last wrote it."""
    return str(_read_run(run).get("status", "unknown"))


def export_checkpoint(run: Path, checkpoint: Path, target: Path) -> Path:
    """Write the weights of a checkpoint as a model folder, in the precision that the run computes in.

    Everything but the weights (configuration, tokenizer, chat template) is the start model's.

    Raises:
        CheckpointError: the checkpoint is damaged, or of a run with LoRA, whose adapters are no model.
        ValueError: the start model cannot be loaded.
    """
    tensors = load_checkpoint(checkpoint).learner_state()
    weights = {name.removeprefix(WEIGHTS): tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}
    config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    policy = load_policy(str(_read_run(run)["start_model"]), dtype=config.get("model", {}).get("dtype", "float32"))
    _put(weights, dict(policy.model.named_parameters()), checkpoint)
    return save_policy(policy.model, policy.tokenizer, target)


def _put(weights: dict[str, Tensor], parameters: dict[str, Any], checkpoint: Path) -> None:
    if weights.keys() != parameters.keys():
        raise CheckpointError(
            f"{checkpoint} does not hold the weights of the start model ({len(weights)} tensors for "
            f"{len(parameters)}): a run with LoRA keeps its adapters alone; evaluate the model that it ends with"
        )
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])


def _read_run(run: Path) -> dict[str, Any]:
    try:
        return json.loads((run / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{run} is no run folder (no run.json); give the --output of magicrl train") from None
    except ValueError as error:
        raise ValueError(f"{run / 'run.json'} is damaged: {error}") from None
