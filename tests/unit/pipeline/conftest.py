"""Small pipelines on files of a few rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from builders import write_lines

from magicrl.config.paths import counted_from
from magicrl.pipeline.build import run_pipeline
from magicrl.pipeline.entry import Entry, entries_of
from magicrl.pipeline.frame import Watcher
from magicrl.pipeline.parts import read_part
from magicrl.pipeline.pipeline_schema import PipelineConfig

Rows = Iterable[dict[str, Any]]


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[str, Rows], Path]:
    """Write rows as JSON Lines, and return the file."""
    return lambda name, rows: write_lines(tmp_path / name, rows)


class Run:
    """Builder of pipelines in one folder, and reader of their results."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.output = base / "out"

    def __call__(self, tree: dict[str, Any], watcher: Any = None, *, replace: bool = True) -> None:
        """Run a pipeline, also in place of one of other sources unless ``replace`` is False."""
        if replace:
            (self.output / "run.json").unlink(missing_ok=True)
        context = counted_from(self.base / "pipeline.toml")
        config = PipelineConfig.model_validate({"workers": 1, **tree}, context=context)
        run_pipeline(config, output=self.output, watcher=watcher or Watcher())

    def kept(self, step: str) -> list[Entry]:
        """Return kept entries of a step, or of ``sources/NAME``."""
        folder = self.output / step / "kept"
        return [entry for path in sorted(folder.glob("*.parquet")) for entry in entries_of(read_part(path))]

    def dropped(self, step: str) -> list[dict[str, Any]]:
        """Return dropped rows of a step."""
        folder = self.output / step / "dropped"
        return [row for path in sorted(folder.glob("*.parquet")) for row in read_part(path).to_pylist()]

    def reasons(self, step: str) -> dict[str, str]:
        """Return reasons of a step's dropped rows by id."""
        return {row["id"]: row["reason"] for row in self.dropped(step)}

    def files(self) -> dict[str, bytes]:
        """Return every part and training file by its name."""
        return {str(path.relative_to(self.output)): path.read_bytes() for path in self.output.rglob("*.parquet")}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)
