"""A source in a pipeline file."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from magicrl.config.paths import FilePaths
from magicrl.config.schema import FieldMapping, Section
from magicrl.pipeline.sources.kinds import Kind, known_kinds


class PipelineFields(FieldMapping):
    """Which columns of a file hold what, where that is not seen from their names."""

    solutions: tuple[str, ...] = ()
    """Columns of worked solutions or reference programs."""
    notes: tuple[str, ...] = ()
    """Columns that are carried along."""


class PipelineSource(Section):
    """One source: a known kind, or a file by its columns; from the hub, from files, or from a local folder."""

    name: str | None = None
    """Of its rows and its folder; default: the kind, else the file's stem."""
    kind: str = "auto"
    """A row of ``magicrl data import --list``, for where the set lies and its licence."""
    path: FilePaths | None = None
    """Files (``*`` stands for any), or a folder that ``datasets`` can load; default: the kind's hub data set."""
    hub: str | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    """Of the hub data set. Without one a change there is not noticed by a rerun."""
    fields: PipelineFields = PipelineFields()
    ability: Literal["math", "code"] | None = None
    only: dict[str, tuple[str, ...]] = Field(default_factory=dict[str, tuple[str, ...]])
    """Columns and the values wanted in them, e.g. NuminaMath's subsets: ``only = { source = ["amc_aime"] }``."""
    limit: int | None = Field(default=None, ge=1)
    """Read at most so many records."""
    template: str | None = None
    """Text around each statement; holds ``{prompt}``. Default: that of ``magicrl eval`` for this kind of problem."""
    licence: str | None = None

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        kinds = known_kinds().kinds
        if self.kind != "auto" and self.kind not in kinds:
            near = difflib.get_close_matches(self.kind, kinds, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: auto, {', '.join(kinds)}"
            raise ValueError(f"unknown kind {self.kind!r}; {hint}")
        if self.path is not None and self.hub is not None:
            raise ValueError("a source has a path or a hub name, not both")
        if self.path is None and self.hub is None and self.kind == "auto":
            raise ValueError("a source needs a path, a hub name, or a kind that has one")
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError(f"template must hold {{prompt}}, got {self.template!r}")
        return self

    @property
    def row(self) -> Kind | None:
        """The kind's row, None for ``auto``."""
        return known_kinds().kinds.get(self.kind)

    @property
    def label(self) -> str:
        """The name, made where none is given: letters, digits, dot, dash and underscore."""
        path = self.path[0] if isinstance(self.path, tuple) else self.path
        made = self.kind if self.kind != "auto" else Path(path or self.hub or "").stem
        return re.sub(r"[^\w.-]+", "-", self.name or made).strip(".-") or "source"

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path or ()

    def stated_licence(self) -> str:
        """The licence given, else the kind's, else that none is known."""
        return self.licence or (self.row.licence if self.row is not None else "not stated")
