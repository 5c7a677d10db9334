"""Reading a pipeline file, with errors that name file, line, key and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from magicrl.config.loader import load_config
from magicrl.pipeline.settings import PipelineConfig


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """The pipeline at ``path`` with ``--set`` overrides applied.

    Raises:
        RecipeError: unreadable file, bad TOML, unknown key (says the nearest right one), wrong type or value.
    """
    return load_config(path, overrides, PipelineConfig)
