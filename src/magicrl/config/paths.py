"""From where paths count: in a recipe from the recipe's folder, on a command line from the working directory.

The settings that hold paths have one of the types below. While the loader validates a recipe they become absolute; a
configuration made in Python is left as it is. Written to a folder they count from there, as in any recipe, so that a
project can be moved or copied whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, FieldSerializationInfo, PlainSerializer, ValidationInfo

from magicrl.config.shipped import FOLDER, shipped_recipe

MODELS = Path("runs/models")
"""Where supervised starts are kept by default, below the working directory."""


class Typed(str):
    """A text that a user typed on the command line."""

    __slots__ = ()


def typed(value: Any) -> Any:
    """``value`` of a ``--set``, every text in it marked as typed."""
    if isinstance(value, str):
        return Typed(value)
    if isinstance(value, list):
        return [typed(item) for item in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        return {key: typed(item) for key, item in cast("Mapping[str, Any]", value).items()}
    return value


def counted_from(recipe: Path, typed: Path | None = None) -> dict[str, Path]:
    """The context in which pydantic reads or writes the recipe at this path; ``typed``: default where one stands."""
    return {"folder": recipe.parent, "typed": typed or Path.cwd()}


def located(value: Any, info: ValidationInfo) -> Any:
    """A path as an absolute one. Texts that are none (empty, a URL) stay, and so does what is not a text."""
    folder = _start(value, info)
    if folder is None or not value or "://" in value:
        return value
    return os.path.abspath(folder / Path(value).expanduser())


def located_all(value: Any, info: ValidationInfo) -> Any:
    """A path, or a list of them."""
    if isinstance(value, list | tuple):
        return [located(item, info) for item in cast("list[Any]", value)]
    return located(value, info)


def located_folder(value: Any, info: ValidationInfo) -> Any:
    """A folder that is there, or that is written as a path, as an absolute one; anything else is a name and stays."""
    folder = _start(value, info)
    if folder is None or not value:
        return value
    path = folder / Path(value).expanduser()
    if path.is_dir() or value.startswith((".", "/", "~")):
        return os.path.abspath(path)
    made = made_model(value)
    return value if made is None else os.path.abspath(made)


def made_model(name: str) -> Path | None:
    """The model of this name that ``magicrl sft``, or a run's supervised start, made here; None without one."""
    made = MODELS / name
    return made if "/" not in name and (made / "config.json").is_file() else None


def located_recipe(value: Any, info: ValidationInfo) -> Any:
    """A recipe's file as an absolute path. A shipped recipe's name stays, in its own folder too."""
    folder = _start(value, info)
    if folder is None or not value:
        return value
    path = folder / Path(value).expanduser()
    own = path.is_file() and FOLDER not in path.resolve().parents
    return value if not own and shipped_recipe(value) else os.path.abspath(path)


def located_reference(value: Any, info: ValidationInfo) -> Any:
    """``file.py:name`` with its file as an absolute path; any other reference of `magicrl.registry` stays."""
    file, _, attribute = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    folder = _start(value, info)
    if folder is None or not file.endswith(".py"):
        return value
    return f"{os.path.abspath(folder / Path(file).expanduser())}:{attribute}"


def _start(value: Any, info: ValidationInfo) -> Path | None:
    """Where relative paths of this value start; None where nobody said."""
    if not isinstance(value, str):
        return None
    return (info.context or {}).get("typed" if isinstance(value, Typed) else "folder")


def _written(value: str | None, info: FieldSerializationInfo) -> str | None:
    folder = (info.context or {}).get("folder")
    return value if folder is None or value is None or not os.path.isabs(value) else os.path.relpath(value, folder)


def _written_folder(value: str | None, info: FieldSerializationInfo) -> str | None:
    """With a dot in front, so that it is not read as a name where the folder is gone."""
    text = _written(value, info)
    return text if text == value or text is None or text.startswith(".") else f".{os.sep}{text}"


FilePath = Annotated[str, BeforeValidator(located), PlainSerializer(_written)]
"""A file, or a folder to be written."""
FilePaths = Annotated[str | tuple[str, ...], BeforeValidator(located_all)]
"""One or several, with ``*`` for any name."""
FolderOrName = Annotated[str, BeforeValidator(located_folder), PlainSerializer(_written_folder)]
"""A folder, or a name: a made model's becomes its folder, the hub's stays."""
Reference = Annotated[str, BeforeValidator(located_reference), PlainSerializer(_written)]
"""What `magicrl.registry` resolves: a name, ``module:name`` or ``file.py:name``."""
RecipeName = Annotated[str, BeforeValidator(located_recipe), PlainSerializer(_written)]
"""A recipe's file, or the name of a shipped one."""
