"""Recipes by name: those that come with the package, and the file that a given name or path means."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path

from magicrl.config.errors import RecipeError

FOLDER = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """Every recipe of the package by its name: the file's, with its folder's before it in a subfolder.

    Example:
        >>> {"quickstart", "data/laptop", "skywork/or1-7b"} <= shipped_recipes().keys()
        True
    """
    return {str(path.relative_to(FOLDER))[: -len(".toml")]: path for path in sorted(FOLDER.rglob("*.toml"))}


def is_unchanged(recipe: Path, overrides: Sequence[str]) -> bool:
    """Whether this is a shipped recipe with nothing set that its measured figures depend on."""
    keys = [override.partition("=")[0].strip() for override in overrides]
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
