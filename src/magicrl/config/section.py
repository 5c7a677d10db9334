"""Base class of every table of a recipe, a pipeline or a catalogue."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """Table of a recipe. Unknown keys and numbers that are not finite are errors, and values cannot change later."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    former_names: ClassVar[Mapping[str, str]] = {}
    """Names that settings had before version 0.2, with their current names. They are accepted until version 0.3."""

    @model_validator(mode="before")
    @classmethod
    def _accept_former_names(cls, table: Any) -> Any:
        if not isinstance(table, dict) or cls.former_names.keys().isdisjoint(cast("dict[str, Any]", table)):
            return table
        renamed: dict[str, Any] = {}
        for name, value in cast("dict[str, Any]", table).items():
            renamed[cls.former_names.get(name, name)] = value
            if name in cls.former_names:
                text = f"{name} is now {cls.former_names[name]}; version 0.3 will not know the old name"
                warnings.warn(text, FutureWarning, stacklevel=2)
        return renamed
