"""Base class of every table of a recipe, a pipeline or a catalogue."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, cast, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class Section(BaseModel):
    """Table of a recipe. Values cannot change later.

    These are errors: unknown keys, numbers that are not finite, and true or false for a number, which pydantic reads as
    1 or 0.
    """

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

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_for_a_number(cls, table: Any) -> Any:
        # pydantic forbids a validator of each field where a field chooses one of several tables
        wrong = PydanticCustomError("number", "true or false is no value of this setting")
        errors: list[InitErrorDetails] = []
        for name, value in cast("dict[str, Any]", table).items() if isinstance(table, dict) else ():
            values = cast("list[Any]", value) if isinstance(value, list | tuple) else [value]
            field = cls.model_fields.get(name)
            if (
                field is not None
                and any(isinstance(one, bool) for one in values)
                and not _may_be_true(field.annotation)
            ):
                errors.append(InitErrorDetails(type=wrong, loc=(name,), input=value))
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return table


def first_mistake(error: ValidationError) -> tuple[str, Any, str]:
    """Return the setting of the error's first entry ("" for a rule between settings), its value and what is wrong."""
    first = error.errors(include_url=False, include_context=False)[0]
    return ".".join(str(part) for part in first["loc"]), first["input"], first["msg"].removeprefix("Value error, ")


def _may_be_true(annotation: Any) -> bool:
    return annotation is bool or annotation is Any or any(map(_may_be_true, get_args(annotation)))
