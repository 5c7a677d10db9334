"""Write ``docs/reference/recipe.md`` from the recipe schema: ``python -m tools.recipe_page``."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from magicrl.commands.options import field_docstrings
from magicrl.config.paths import FilePath, FolderOrName, RecipeName, Reference
from magicrl.config.schema import TrainConfig
from magicrl.config.section import Section
from magicrl.config.sft_schema import SftConfig
from magicrl.registry import BUILTINS

PATHS = {FilePath: "path", FolderOrName: "folder or name", RecipeName: "recipe", Reference: "name or reference"}
ALIKE = ("[[data.validation]]", "[data.test.NAME]")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "recipe.md"
INTRODUCTION = """# Every setting of a recipe

A recipe is a TOML file. `magicrl recipes quickstart` prints a short example, and `--set stages.0.max_tokens=8192` on
the command line changes one setting. The symbols (D_R, M, T, tau, ...) are those of the report.

- An unknown key is an error that names the nearest known key. No setting changes another one.
- A relative path starts at the recipe's folder, on the command line at the working directory. `~` is your home folder.
- The run folder's `config.toml` holds all settings as they were used.

`python -m tools.recipe_page` writes this page from the schema, and a test compares the two.
"""


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for title, root in (("Training: `magicrl train`", TrainConfig), ("Supervised start: `magicrl sft`", SftConfig)):
        parts.append(f"## {title}\n")
        for heading, section in tables(root, ""):
            lead = " ".join((inspect.getdoc(section) or "").replace("``", "`").split())
            settings = table(section) if heading not in ALIKE else "Its settings are those of `[[data.train]]`."
            lead = textwrap.fill(lead, 118, break_long_words=False, break_on_hyphens=False)
            parts.append(f"### `{heading}`\n\n{lead}\n\n{settings}\n")
    return "\n".join(parts)


def tables(section: type[Section], name: str) -> Iterator[tuple[str, type[Section]]]:
    """Yield the tables of a recipe in the schema's order: TOML heading and section."""
    for key, field in section.model_fields.items():
        inner, many = section_of(field.annotation)
        if inner is None:
            continue
        path = f"{name}.{key}".lstrip(".")
        if many == "table":
            path += ".NAME"
        yield (f"[[{path}]]" if many == "list" else f"[{path}]"), inner
        if inner.__name__ != "SourceConfig" or key == "train":  # the sources are all alike
            yield from tables(inner, path)


def section_of(annotation: Any) -> tuple[type[Section] | None, Literal["one", "list", "table"]]:
    """Return the section that a field holds, and whether it holds one, a list or a table of them."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, "one"
    inner = [section_of(argument)[0] for argument in get_args(annotation)]
    found = next((item for item in inner if item is not None), None)
    kind = {tuple: "list", dict: "table"}.get(get_origin(annotation), "one")
    return found, kind  # type: ignore[return-value]


def table(section: type[Section]) -> str:
    """Return one row per setting that is not a table itself."""
    said = docstrings(section)
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for key, field in section.model_fields.items():
        if section_of(field.annotation)[0] is None:
            cells = (f"`{key}`", kind_of(field), default_of(field), said.get(key, ""))
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else "Its settings are the tables below."


def docstrings(section: type[Section]) -> dict[str, str]:
    """Return the docstring of each setting, of the class itself or of one that it extends."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__[: section.__mro__.index(BaseModel)]):
        for name, text in field_docstrings(base).items():
            # the loss of supervised fine-tuning is none of a training run
            names = ", ".join(f"`{one}`" for one in BUILTINS.get(name, ()) if one != "nll")
            found[name] = text.replace("``", "`").replace("{names in registry.py}", names)
    return found


def kind_of(field: FieldInfo) -> str:
    """Return the type of a setting in TOML's words, and its bounds."""
    if any(isinstance(item, AfterValidator) for item in field.metadata):
        return "name"
    bounds = [text for item in field.metadata for text in bound(item)]
    return ", ".join([type_name(field.annotation), *bounds])


def type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return PATHS.get(annotation, "name")
    if origin is Literal:
        return ", ".join(f"`{argument!r}`".replace("'", '"') for argument in arguments)
    if origin in (Union, UnionType):
        names = [type_name(argument) for argument in arguments if argument is not NoneType]
        return " or ".join(dict.fromkeys(names))
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"table of {type_name(arguments[1])}"
    return {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any value"}[annotation]


def bound(item: Any) -> Iterator[str]:
    for kind, sign in ((annotated_types.Ge, "≥"), (annotated_types.Gt, ">"), (annotated_types.Le, "≤")):
        if isinstance(item, kind):
            yield f"{sign} {getattr(item, kind.__name__.lower())}"
    if isinstance(item, annotated_types.Lt):
        yield f"< {item.lt}"


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}):
        return "none"
    shown = list(value) if isinstance(value, tuple) else value
    return "`" + str(shown).replace("'", '"').replace("True", "true").replace("False", "false") + "`"


if __name__ == "__main__":
    PAGE.write_text(page())
