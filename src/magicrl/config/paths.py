"""Where recipes are found, and from where their paths count: a recipe's from its folder, a command line's from the cwd.

The settings that hold paths have one of the types at the end. While the loader validates a recipe they become
absolute; a configuration made in Python is left as it is. Written to a folder they count from there, as in any recipe,
so that a project can be moved or copied whole.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, FieldSerializationInfo, PlainSerializer, ValidationInfo

from magicrl.config.errors import RecipeError
from magicrl.config.overrides import Overrides, Recipe, override_of
from magicrl.registry import check

FOLDER = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Every recipe of the package by its name: the file's, with its folder's before it in a subfolder.

    Example:
        >>> {"quickstart", "data/laptop", "skywork/or1-7b"} <= shipped_recipes().keys()
        True
    """
    return {str(path.relative_to(FOLDER))[: -len(".toml")]: path for path in sorted(FOLDER.rglob("*.toml"))}


def stated_memory(recipe: Path) -> str:
    """What the head of a shipped recipe says that it needs, e.g. ``0.7 GiB, measured``; empty where it says nothing."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# Memory: ") for line in lines if line.startswith("# Memory: ")), "")


def is_unchanged(recipe: Recipe, overrides: Overrides) -> bool:
    """Whether this is a shipped recipe with nothing set that its measured figures depend on."""
    if isinstance(recipe, Mapping):
        return False
    keys = [override_of(override).key for override in overrides]
    return find_recipe(recipe).resolve().is_relative_to(FOLDER.resolve()) and all(
        key in ("run.seed", "run.name", "run.output") or key.startswith("logging.") for key in keys
    )


def shipped_recipe(name: str) -> Path | None:
    """The shipped recipe of this name, None where there is none.

    A name's last part is enough where one recipe alone has it (``laptop`` for ``data/laptop``); ``.toml`` may follow.
    """
    known, name = shipped_recipes(), name.removesuffix(".toml")
    fitting = [known[name]] if name in known else [path for full, path in known.items() if full.endswith(f"/{name}")]
    return fitting[0] if len(fitting) == 1 else None


def recipe_of_model(model: str) -> str | None:
    """The shipped supervised recipe whose model has this name, None where there is none."""
    for name, path in shipped_recipes().items():
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        if "phases" in tree and tree["run"]["name"] == model:
            return name
    return None


def find_recipe(given: Path) -> Path:
    """The file that ``given`` means: an existing file, else the shipped recipe of that name.

    Raises:
        RecipeError: neither; names the nearest recipe and lists the shipped ones.
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
    """A file beside it whose name is nearly the same, else the shipped recipes and the nearest of them."""
    beside = [path.name for path in given.parent.glob("*.toml")] if given.parent.is_dir() else []
    near = difflib.get_close_matches(given.name, beside, n=1)
    if near:
        return f"did you mean {given.parent / near[0]}?"
    names = shipped_recipes()
    ends = (name.rpartition("/")[2] for name in names)
    near = difflib.get_close_matches(given.name.removesuffix(".toml"), [*names, *ends], n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"Shipped (magicrl recipes): {', '.join(names)}"


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


def _absolute(value: Any, info: ValidationInfo, file: str | None = None) -> str | None:
    """The path that ``value``, or the ``file`` in it, means; None for no text, or where nobody said where it starts."""
    if not isinstance(value, str) or not value:
        return None
    # no context: the configuration was made in Python, and its paths are what its maker means
    folder = (info.context or {}).get("typed" if isinstance(value, Typed) else "folder")
    return None if folder is None else os.path.abspath(folder / Path(file or value).expanduser())


def located(value: Any, info: ValidationInfo) -> Any:
    """A path, or a list of them, as absolute ones. Texts that are none (empty, a URL) stay, and so does what is no
    text."""
    if isinstance(value, list | tuple):
        return [located(item, info) for item in cast("list[Any]", value)]
    path = _absolute(value, info)
    return value if path is None or "://" in value else path


def located_folder(value: Any, info: ValidationInfo) -> Any:
    """A folder that is there, or that is written as a path, as an absolute one; anything else is a name and stays."""
    path = _absolute(value, info)
    if path is None or os.path.isdir(path) or value.startswith((".", "/", "~")):
        return path or value
    # a model that was made here comes before the hub's of that name
    made = made_model(value)
    return value if made is None else os.path.abspath(made)


def made_model(name: str) -> Path | None:
    """The model of this name that ``magicrl sft``, or a run's supervised start, made here; None without one."""
    made = MODELS / name
    return made if "/" not in name and (made / "config.json").is_file() else None


def located_recipe(value: Any, info: ValidationInfo) -> Any:
    """A recipe's file as an absolute path. A shipped recipe's name stays, in its own folder too."""
    path = _absolute(value, info)
    if path is None:
        return value
    # a user's own file comes before the shipped recipe of its name, as in `find_recipe`
    own = os.path.isfile(path) and FOLDER not in Path(path).resolve().parents
    return value if not own and shipped_recipe(value) else path


def located_reference(value: Any, info: ValidationInfo) -> Any:
    """``file.py:name`` with its file as an absolute path; any other reference of `magicrl.registry` stays."""
    file, _, attribute = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    path = _absolute(value, info, file) if file.endswith(".py") else None
    return value if path is None else f"{path}:{attribute}"


def _written(value: str | None, info: FieldSerializationInfo) -> str | None:
    # what is not absolute was never located: a name, or a path of a configuration made in Python
    folder = (info.context or {}).get("folder")
    return value if folder is None or value is None or not os.path.isabs(value) else os.path.relpath(value, folder)


def _written_folder(value: str | None, info: FieldSerializationInfo) -> str | None:
    """With a dot in front, so that it is not read as a name where the folder is gone."""
    text = _written(value, info)
    return text if text == value or text is None or text.startswith(".") else f".{os.sep}{text}"


FilePath = Annotated[str, BeforeValidator(located), PlainSerializer(_written)]
"""A file, or a folder to be written."""
FilePaths = Annotated[str | tuple[str, ...], BeforeValidator(located)]
"""One or several, with ``*`` for any name."""
FolderOrName = Annotated[str, BeforeValidator(located_folder), PlainSerializer(_written_folder)]
"""A folder, or a name: a made model's becomes its folder, the hub's stays."""
Reference = Annotated[str, BeforeValidator(located_reference), PlainSerializer(_written)]
"""What `magicrl.registry` resolves: a name, ``module:name`` or ``file.py:name``."""
RecipeName = Annotated[str, BeforeValidator(located_recipe), PlainSerializer(_written)]
"""A recipe's file, or the name of a shipped one."""


def door(kind: str) -> AfterValidator:
    """A reference of this kind; what it names is there, and nothing of it has been run."""
    return AfterValidator(partial(check, kind))
