"""``magicrl convert``: a recipe that trains as a configuration of TRL or verl does, and what it does otherwise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from magicrl.config.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from magicrl.config.foreign import Library, Sources


def convert(
    configuration: Path,
    /,
    *,
    output: Path = Path("run.toml"),
    model: str | None = None,
    data: str | None = None,
    steps: int | None = None,
    processes: int = 1,
) -> int:
    """Write the recipe that trains as a configuration of TRL's GRPO or verl's PPO trainer does.

    Behind each setting stands the option it comes from. What is not carried over, and what the recipe does otherwise,
    is told here and in the recipe's head (docs/coming-from.md).

    Example: magicrl convert run_grpo.sh --output run.toml

    Parameters
    ----------
    configuration
        TRL: the YAML of trl grpo --config, or a GRPOConfig as JSON. verl: its YAML, or the script or command that
        starts it with a.b.c=d; nothing is run.
    output
        The recipe to write.
    model
        A model folder or hub name, where the configuration names none, or another.
    data
        Problems with answers: a file, a folder or the hub name of a data set, likewise.
    steps
        Training steps, for a configuration that counts epochs over data that are not here.
    processes
        Processes that the configuration was run with (TRL's batches count by process; verl's do not).
    """
    from magicrl.config.foreign import Options
    from magicrl.config.foreign import convert as converted
    from magicrl.config.foreign_files import read_options

    if output.exists():
        raise RecipeError(f"{output} exists; name another --output, or remove it")
    if (steps or 1) < 1 or processes < 1:
        raise RecipeError("--steps and --processes count from 1")
    given = read_options(configuration)
    sources = None if data is None else (_source(data, output),)
    beside = {"processes": processes, "model": model, "data": sources, "steps": steps}
    options = Options(
        library=_library(configuration, given),
        given=given,
        beside={name: value for name, value in beside.items() if value is not None},
        count=lambda sources: _count(sources, output),
        place=lambda path: _placed(path, output),
    )
    recipe = converted(options, configuration.name)
    _write(recipe.text, output, configuration)
    console = Console(highlight=False)
    _tell(console, "Otherwise than there:", recipe.differs)
    _tell(console, "Not carried over:", recipe.left)
    console.print(f"{output}: look at it, then: magicrl preflight {output}", soft_wrap=True, markup=False)
    return 0


def _write(text: str, output: Path, configuration: Path) -> None:
    """The recipe of a configuration; no file is left of one that cannot be used."""
    from magicrl.config.loader import load_train_recipe

    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    try:
        load_train_recipe(output)
    except RecipeError as error:
        output.unlink()
        raise RecipeError(f"{configuration}: the recipe that follows cannot be used: {error.problem}") from None


def _tell(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(title, *(f"- {line}" for line in lines), sep="\n", markup=False, soft_wrap=True)


def _library(path: Path, given: dict[str, Any]) -> Library:
    from magicrl.config.foreign_trl import TRL
    from magicrl.config.foreign_verl import VERL

    counts = {library.name: sum(name in library.known for name in given) for library in (TRL, VERL)}
    if not any(counts.values()):
        raise RecipeError(f"{path}: no option of {TRL.name} or {VERL.name} is in it")
    return max((TRL, VERL), key=lambda library: counts[library.name])


def _source(data: str, output: Path) -> dict[str, Any]:
    from magicrl.data.sources import Place

    hub = Place.of(data).hub
    return {"path": _placed(data, output)} if hub is None else {"hub": hub}


def _placed(path: str, output: Path) -> str:
    """A path as the recipe has it; what starts elsewhere stays as it is."""
    from magicrl.cli.init import beside

    return path if Path(path).is_absolute() or path.startswith("~") or "://" in path else beside(path, output)


def _count(sources: Sources, output: Path) -> int | None:
    """Problems of local files; None where one is not here."""
    from magicrl.data.sources import recognise

    found = 0
    for source in sources:
        path = Path(os.path.normpath(output.parent / Path(str(source.get("path", ""))).expanduser()))
        if "path" not in source or not path.exists():
            return None
        found += recognise(path).problems
    return found if sources else None
