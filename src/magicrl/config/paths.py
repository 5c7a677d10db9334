"""Places of recipes, and start of their relative paths: a recipe's folder, or the working directory on a command line.

The settings that hold paths have one of the types at the end of this module. The loader makes them absolute while it
validates a recipe. A configuration made in Python is left as it is. A configuration written to a folder has paths
relative to it, as in any recipe, so that a project can be moved or copied.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, FieldSerializationInfo, PlainSerializer, ValidationInfo

from magicrl.config.errors import RecipeError
from magicrl.config.overrides import Overrides, Recipe, override_of
from magicrl.registry import check
from magicrl_verifiers.several import each_name

FOLDER = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Return every recipe of the package by name: the file's name, prefixed by its folder's in a subfolder.

    Example:
        >>> {"quickstart", "data/laptop", "skywork/or1-7b"} <= shipped_recipes().keys()
        True
    """
    return {str(path.relative_to(FOLDER))[: -len(".toml")]: path for path in sorted(FOLDER.rglob("*.toml"))}


def stated_memory(recipe: Path) -> str:
    """Return the memory need that the head of a shipped recipe states, for example ``0.7 GiB, measured``; empty if
    none."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# Memory: ") for line in lines if line.startswith("# Memory: ")), "")


def is_unchanged(recipe: Recipe, overrides: Overrides) -> bool:
    """Return whether this is a shipped recipe and the overrides change nothing that its measured figures depend on."""
    if isinstance(recipe, Mapping):
        return False
    keys = [override_of(override).key for override in overrides]
    return find_recipe(recipe).resolve().is_relative_to(FOLDER.resolve()) and all(
        key in ("run.seed", "run.name", "run.output") or key.startswith("logging.") for key in keys
    )


def shipped_recipe(name: str) -> Path | None:
    """Return the shipped recipe of this name, or None.

    The last part of the name is enough if only one recipe has it (``laptop`` for ``data/laptop``). ``.toml`` may
    follow.
    """
    known, name = shipped_recipes(), name.removesuffix(".toml")
    fitting = [known[name]] if name in known else [path for full, path in known.items() if full.endswith(f"/{name}")]
    return fitting[0] if len(fitting) == 1 else None


def recipe_of_model(model: str) -> str | None:
    """Return the shipped supervised recipe whose model has this name, or None."""
    for name, path in shipped_recipes().items():
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        if "phases" in tree and tree["run"]["name"] == model:
            return name
    return None


def find_recipe(given: Path) -> Path:
    """Return the file that ``given`` means: an existing file, else the shipped recipe of that name.

    Raises:
        RecipeError: Neither exists. The message names the nearest recipe and lists the shipped ones.
    """
    if given.is_file():
        return given
    shipped = shipped_recipe(given.as_posix())
    if shipped is not None:
        return shipped
    if given.is_dir():
        raise RecipeError(f"{given}: is a folder, not a recipe; name a recipe file (.toml)")
    raise RecipeError(f"{given}: no such recipe; {_instead(given)}")


def _instead(given: Path) -> str:
    """Suggest a file in the same folder with a similar name, else the shipped recipes and the nearest of them."""
    siblings = [path.name for path in given.parent.glob("*.toml")] if given.parent.is_dir() else []
    near = difflib.get_close_matches(given.name, siblings, n=1)
    if near:
        return f"did you mean {given.parent / near[0]}?"
    names = shipped_recipes()
    ends = (name.rpartition("/")[2] for name in names)
    near = difflib.get_close_matches(given.name.removesuffix(".toml"), [*names, *ends], n=1)
    if near:
        return f"did you mean {near[0]}? Shipped (magicrl recipes): {', '.join(names)}"
    if given.suffix == ".toml":
        return "magicrl init writes a recipe, and magicrl recipes lists the shipped ones"
    return f"shipped (magicrl recipes): {', '.join(names)}"


DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of the data files that magicrl reads."""


def is_hub_name(text: str) -> bool:
    """Return whether a text is ``owner/name``, with neither a path of that name nor the suffix of a data file."""
    path = Path(text).expanduser()
    hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is not None
    return hub and path.suffix.lower() not in DATA_FILES and not path.exists()


MODELS = Path("runs/models")
"""Folder of supervised starts by default, below the working directory."""


class Typed(str):
    """Text that a user typed on the command line."""

    __slots__ = ()


def mark_typed(value: Any) -> Any:
    """Return the value of a ``--set`` with every text in it marked as typed."""
    if isinstance(value, str):
        return Typed(value)
    if isinstance(value, list):
        return [mark_typed(item) for item in cast("list[Any]", value)]
    if isinstance(value, Mapping):
        return {key: mark_typed(item) for key, item in cast("Mapping[str, Any]", value).items()}
    return value


def counted_from(recipe: Path, typed: Path | None = None) -> dict[str, Path]:
    """Return pydantic's context for a recipe at this path. ``typed`` is the start of typed paths (default: the working
    directory)."""
    return {"folder": recipe.parent, "typed": typed or Path.cwd()}


def _absolute(value: Any, info: ValidationInfo, file: str | None = None) -> str | None:
    """Return the absolute path of ``value`` or of the ``file`` in it; None if it is no text or its start is unknown."""
    if not isinstance(value, str) or not value:
        return None
    # Without a context the configuration was made in Python, and its paths are not changed.
    folder = (info.context or {}).get("typed" if isinstance(value, Typed) else "folder")
    return None if folder is None else os.path.abspath(folder / Path(file or value).expanduser())


def located(value: Any, info: ValidationInfo) -> Any:
    """Return a path, or a list of paths, as absolute ones. Other values, empty texts and URLs are returned
    unchanged."""
    if isinstance(value, list | tuple):
        return [located(item, info) for item in cast("list[Any]", value)]
    path = _absolute(value, info)
    return value if path is None or "://" in value else path


def located_folder(value: Any, info: ValidationInfo) -> Any:
    """Return an existing folder, or a text written as a path, as an absolute path. Anything else is a name and
    unchanged."""
    path = _absolute(value, info)
    if path is None or os.path.isdir(path) or value.startswith((".", "/", "~")):
        return path or value
    # A model that was made here has priority over a hub model of that name.
    made = made_model(value)
    return value if made is None else os.path.abspath(made)


def made_model(name: str) -> Path | None:
    """Return the model of this name that ``magicrl sft`` or a run's supervised start made here, or None."""
    made = MODELS / name
    return made if "/" not in name and (made / "config.json").is_file() else None


def located_recipe(value: Any, info: ValidationInfo) -> Any:
    """Return a recipe's file as an absolute path. The name of a shipped recipe is unchanged, also in its own folder."""
    path = _absolute(value, info)
    if path is None:
        return value
    # A user's file has priority over the shipped recipe of its name, as in `find_recipe`.
    own = os.path.isfile(path) and FOLDER not in Path(path).resolve().parents
    return value if not own and shipped_recipe(value) else path


def located_reference(value: Any, info: ValidationInfo) -> Any:
    """Return ``file.py:name`` with an absolute file, also in several rewards. Any other reference is unchanged."""
    return with_files(value, lambda file: _absolute(value, info, file) or file) if isinstance(value, str) else value


def with_files(reference: str, place: Callable[[str], str]) -> str:
    """Return a reference, or several rewards, with ``place(file)`` for each file of a ``file.py:name``."""

    def placed(name: str) -> str:
        file, _, attribute = name.rpartition(":")
        return f"{place(file)}:{attribute}" if file.endswith(".py") else name

    return each_name(reference, placed)


def _written(value: str | None, info: FieldSerializationInfo) -> str | None:
    # A relative path was never located: it is a name, or a path of a configuration made in Python.
    folder = (info.context or {}).get("folder")
    return value if folder is None or value is None or not os.path.isabs(value) else os.path.relpath(value, folder)


def _written_reference(value: str | None, info: FieldSerializationInfo) -> str | None:
    return value and each_name(value, lambda name: str(_written(name, info)))


def _written_folder(value: str | None, info: FieldSerializationInfo) -> str | None:
    """Return the path with a leading dot, so that it is not read as a name if the folder is gone."""
    text = _written(value, info)
    return text if text == value or text is None or text.startswith(".") else f".{os.sep}{text}"


FilePath = Annotated[str, BeforeValidator(located), PlainSerializer(_written)]
"""File, or a folder to be written."""
FilePaths = Annotated[str | tuple[str, ...], BeforeValidator(located)]
"""One or several files, with ``*`` for any name."""
FolderOrName = Annotated[str, BeforeValidator(located_folder), PlainSerializer(_written_folder)]
"""Folder or name. The name of a model that was made here becomes its folder; a hub name stays."""
Reference = Annotated[str, BeforeValidator(located_reference), PlainSerializer(_written_reference)]
"""Reference that `magicrl.registry` resolves: a name, ``module:name`` or ``file.py:name``."""
RecipeName = Annotated[str, BeforeValidator(located_recipe), PlainSerializer(_written)]
"""File of a recipe, or the name of a shipped one."""


def reference_to(kind: str) -> AfterValidator:
    """Return a validator of references of this kind. It checks that the named object exists, without running any of
    it."""
    return AfterValidator(partial(check, kind))
