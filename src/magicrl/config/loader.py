"""Reading recipes: TOML or a dict, overrides, and errors that name file, line, key and remedy."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import tomli_w
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from magicrl.config.errors import RecipeError
from magicrl.config.overrides import Override, Overrides, Recipe, override_of, plain
from magicrl.config.paths import counted_from, find_recipe, shipped_recipe, typed
from magicrl.config.schema import SftConfig, TrainConfig
from magicrl_verifiers.references import LIVE, file_fingerprint
from magicrl_verifiers.secrets import without_secrets

Config = TypeVar("Config", bound=BaseModel)
T = TypeVar("T")
Tree = dict[str, Any]

# What a user's own run changes most. Each short form stands for exactly these settings, and says so in the docs.
HELD_OUT_BY_SHORTHAND, GENERATED_BY_SHORTHAND = 100, 1000
GYM = "reasoning_gym/"
"""How the name of a generated task begins that may stand in the place of a data set."""
SHORTHANDS = {
    "model": ("start.model",),
    "data": ("data.train", "data.holdout"),
    "reward": ("data.train", "data.validation", "data.test"),
}


def load_train_recipe(recipe: Recipe, overrides: Overrides = (), overrides_from: Path | None = None) -> TrainConfig:
    """The training recipe (a file, a shipped name or a tree) with overrides applied.

    Relative paths of a file start at its folder, those of a tree where one stands, those in ``overrides`` at
    ``overrides_from`` (default: where one stands).

    Raises:
        RecipeError: no such recipe, unreadable file, bad TOML, unknown key, wrong type or value.
    """
    return _load(recipe, overrides, TrainConfig, overrides_from)


def load_sft_recipe(path: Path, overrides: Sequence[str] = ()) -> SftConfig:
    """The supervised recipe at ``path`` with overrides applied. Raises as ``load_train_recipe``."""
    return _load(path, overrides, SftConfig)


def load_start_recipe(sft: str) -> SftConfig:
    """The supervised recipe that ``start.sft`` of a training recipe names. Raises as ``load_train_recipe``."""
    return load_sft_recipe(shipped_recipe(sft) or Path(sft))


def load_config(path: Path, overrides: Sequence[str], schema: type[Config]) -> Config:
    """A TOML file of another schema (a data pipeline), with the same errors. Raises as ``load_train_recipe``."""
    return _load(path, overrides, schema)


def to_toml(config: BaseModel, folder: Path | None = None) -> str:
    """The resolved configuration as TOML, every default written out (None is left out: TOML has no null).

    For a file in ``folder`` its paths count from there.

    Credentials in it (``https://user:password@host``) are replaced: this text is kept and shared.
    """
    tree = config.model_dump(mode="json", exclude_none=True, context={"folder": folder})
    return without_secrets(tomli_w.dumps(tree))


def decisive(config: BaseModel, exclude: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings that differ from their defaults, without the excluded ones, as JSON data.

    What is keyed by them (a start model, a result) outlives a magicrl with more settings, whose defaults are what was
    done before. A default must therefore never change its meaning: that takes a setting of another name.
    """
    return config.model_dump(mode="json", exclude_defaults=True, exclude=None if exclude is None else dict(exclude))


def digest(data: object) -> str:
    """16 hex digits that identify JSON data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys to values; a list of values is one value.

    Example:
        >>> leaves({"run": {"seed": 1}, "stages": [{"max_tokens": 8}], "levels": [1, 2]})
        {'run.seed': 1, 'stages.0.max_tokens': 8, 'levels': [1, 2]}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and any(isinstance(item, dict) for item in cast("list[Any]", value)):
            value = {str(index): item for index, item in enumerate(cast("list[Any]", value))}
        found |= leaves(cast(Tree, value), f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def brought_files(config: BaseModel) -> dict[str, str]:
    """SHA-256 of every file that a setting brings something from (``file.py:name``), by the setting's dotted key."""
    found: dict[str, str] = {}
    # no default brings a file
    for key, value in leaves(config.model_dump(mode="json", exclude_defaults=True)).items():
        for place, text in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(text, str) and re.search(r"\.py:\w+$", text) and Path(text.rpartition(":")[0]).is_file():
                found[key if place is None else f"{key}.{place}"] = file_fingerprint(text) or ""
    return found


def config_hash(config: BaseModel) -> str:
    """16 hex digits that identify a configuration by the settings that are not at their defaults, and brought files."""
    brought = brought_files(config)
    return digest(decisive(config) | ({"brought": brought} if brought else {}))


def live_parts(config: BaseModel) -> dict[str, str]:
    """The references to objects that were given in Python, by the settings' dotted keys."""
    found = leaves(config.model_dump(mode="json", exclude_defaults=True))
    return {key: value for key, value in found.items() if isinstance(value, str) and value.startswith(LIVE)}


@contextmanager
def placed_errors(recipe: Recipe, overrides: Overrides = ()) -> Generator[None]:
    """Errors raised inside that know their setting get its place: the recipe's line, or the ``--set``.

    Only the whole run finds out that, say, a task family does not exist; a person wants to know where it is named.
    """
    try:
        yield
    except RecipeError as error:
        if error.key is None:
            raise
        path, text, _ = _opened(recipe)
        place = _place(path, text, error.key.split("."), [override_of(given) for given in overrides])
        raise RecipeError(f"{place}: {error}") from error


_NO_FILE = Path("recipe")
"""Stands for a recipe's file in messages about a tree, which has neither file nor lines."""


def _opened(recipe: Recipe) -> tuple[Path, str, Tree]:
    """A recipe's file, its text (empty for a tree) and its settings."""
    if isinstance(recipe, Mapping):
        return _NO_FILE, "", plain(recipe)
    path = find_recipe(recipe)
    text = _read(path)
    try:
        return path, text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(_explain_toml(path, text, str(error))) from None


def _load(recipe: Recipe, overrides: Overrides, schema: type[Config], overrides_from: Path | None = None) -> Config:
    path, text, tree = _opened(recipe)
    _check_kind(path, tree, schema)
    given = [override_of(override) for override in overrides]
    # into the tree, before it is validated: an override is checked as the file's own settings are
    for override in given:
        off = override.value == "none" and _is_optional_table(schema, override.key)
        _apply_override(tree, override._replace(value=None) if off else override)
    if schema is TrainConfig:  # after all overrides: only then is it known whether the run is named
        _name_after_own(tree, given)
    try:
        return schema.model_validate(tree, context=counted_from(path, overrides_from))
    except ValidationError as error:
        raise RecipeError(_explain(path, text, tree, schema, error, given)) from None


_KINDS = (
    ("stages", "a training recipe", "magicrl train"),
    ("phases", "a supervised recipe", "magicrl sft"),
    ("sources", "a data pipeline", "magicrl data build"),
)
"""A table that only this kind of file has, and the command that takes it."""


def _check_kind(path: Path, tree: Tree, schema: type[BaseModel]) -> None:
    """A file for another command says so, in place of a list of keys that it should not have."""
    for sign, kind, command in _KINDS:
        if sign in tree and sign not in schema.model_fields:
            start = tree.get("start")
            own = cast(Tree, start).get("sft") if sign == "stages" and isinstance(start, dict) else None
            also = f"; its supervised start is {own}" if own else ""
            raise RecipeError(f"{path}: is {kind}, which `{command}` takes{also}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None


def _explain_toml(path: Path, text: str, error: str) -> str:
    """tomllib's words, its place put first, and the line itself."""
    found = re.fullmatch(r"(?s)(.*) \(at line (\d+), column (\d+)\)", error)
    if found is None:  # at the end of the document
        return f"{path}, line {max(1, len(text.splitlines()))}: not valid TOML: {error}; is the file cut off?"
    number = int(found.group(2))
    hint = ""
    if found.group(1) == "Cannot overwrite a value":
        hint = "; this key or table stands twice (a list of tables needs [[double brackets]] each time)"
    elif found.group(1) == "Invalid value":
        hint = "; every key needs a value, and text needs quotes"
    line = text.splitlines()[number - 1].strip()
    return f"{path}, line {number}: not valid TOML: {found.group(1)} at column {found.group(3)} of {line!r}{hint}"


def _is_optional_table(schema: type[BaseModel], dotted: str) -> bool:
    """Return whether the setting is a table that a recipe may leave out. ``--set KEY=none`` then removes it."""
    parts: list[int | str] = [int(part) if part.isdigit() else part for part in dotted.split(".")]
    fields = [table.model_fields.get(str(parts[-1])) for table in _tables(schema, parts[:-1])]
    annotations = [field.annotation for field in fields if field is not None]
    return any(type(None) in get_args(one) and _tables_in(one) for one in annotations)


def _apply_override(tree: Tree, override: Override) -> None:
    key, value = override.key, typed(override.value)
    if key == "model":
        # the whole table: [start] has one of model and sft, and the recipe's own may be the other
        tree["start"] = {"model": value}
    elif key == "data":
        # the recipe's sets to test and validate on are of its own data
        kept = {k: v for k, v in tree.get("data", {}).items() if k not in ("train", "validation", "test", "holdout")}
        if str(value).startswith(GYM):
            test = {"family": value, "count": HELD_OUT_BY_SHORTHAND, "split": "test"}
            own = {"train": [{"family": value, "count": GENERATED_BY_SHORTHAND}], "test": {"held_out": test}}
        else:
            place = "source" if str(value).startswith(LIVE) else "hub" if _is_hub_name(value) else "path"
            own = {"train": [{place: value}], "holdout": HELD_OUT_BY_SHORTHAND}
        tree["data"] = {**kept, **own}
    elif key == "reward":
        for source in _sources(tree):
            source["verifier"] = value
    else:
        _assign(tree, key.split("."), value, override.words)


def _sources(tree: Tree) -> list[Tree]:
    """Every table of a problem source, as far as the tree has the form of a recipe."""
    data: Any = tree.get("data")
    table = cast(Tree, data) if isinstance(data, dict) else {}
    tests: Any = table.get("test")
    found: list[Any] = [*(table.get("train") or ()), *(table.get("validation") or ())]
    found += cast(Tree, tests).values() if isinstance(tests, dict) else ()
    return [source for source in found if isinstance(source, dict)]


def _name_after_own(tree: Tree, overrides: Sequence[Override]) -> None:
    """A run of another model or other data than its recipe's carries their names, unless it is given one."""
    given = {override.key: override.value for override in overrides}
    model = next((given[key] for key in ("model", "start.model", "start.sft") if key in given), None)
    data = next((raw for key, raw in given.items() if re.fullmatch(r"data|data\.train\.\d+\.path", key)), None)
    if "run.name" in given or (model is None and data is None):
        return
    run = tree.setdefault("run", {})
    if isinstance(run, dict):
        table = cast(Tree, run)
        first = str(table.get("name", "run")) if model is None else _stem(model)
        table["name"] = first if data is None else f"{first}-{_stem(data)}"


def _stem(value: Any) -> str:
    """``runs/mine/model`` as ``mine``, ``owner/Name-1B`` as ``Name-1B``, ``a b.jsonl`` as ``a-b``."""
    path = Path(re.sub(rf"^{LIVE}(\w+)@\w+$", r"\1", str(value)))
    name = path.parent.name if path.name == "model" and path.parent.name else path.name
    return re.sub(r"[^\w.-]+", "-", re.sub(r"\.(jsonl?|csv|parquet|toml)$", "", name)) or "own"


def _is_hub_name(value: Any) -> bool:
    """``owner/name``, where no file or folder of that name is there and it names no data file."""
    text = str(value)
    return (
        re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text) is not None
        and not text.lower().endswith((".jsonl", ".json", ".csv", ".parquet"))
        and not Path(text).exists()
    )


def _assign(tree: Tree, parts: list[str], value: Any, words: str) -> None:
    node: Any = tree
    for depth, part in enumerate(parts, 1):
        place = ".".join(parts[: depth - 1])
        key: Any = part
        if isinstance(node, list):
            length = len(cast("list[Any]", node))
            if not part.isdigit() or int(part) >= length:
                raise RecipeError(
                    f"{words}: {place} is a list of {length}; use an index from 0 to {length - 1} in place of {part!r}"
                )
            key = int(part)
        elif not isinstance(node, dict):
            raise RecipeError(f"{words}: {place} is a value, not a table")
        elif depth < len(parts):
            # a table that the recipe leaves out is made; an entry of a list is not
            cast(Tree, node).setdefault(part, {})
        table = cast(Any, node)
        if depth == len(parts):
            table[key] = value
        else:
            node = table[key]


def _explain(
    path: Path, text: str, tree: Tree, schema: type[BaseModel], error: ValidationError, overrides: Sequence[Override]
) -> str:
    # all mistakes at once, not one a try
    found = error.errors()
    # A list whose entries are wrong is reported once more as too short: the entries' own errors say it.
    inner = [details["loc"] for details in found]
    told = [
        details
        for details in found
        if details["type"] != "too_short"
        or not any(loc[: len(details["loc"])] == details["loc"] != loc for loc in inner)
    ]
    rewards = {override.words for override in overrides if override.key == "reward"}
    lines: dict[str, str] = {}
    for details in told:
        location = _in_file(tree, details)
        place, words = _place(path, text, location, overrides), _explain_one(schema, ".".join(location), details)
        # a reward that is wrong is wrong in every set: said once
        lines.setdefault(place if place in rewards else f"{place}: {words}", f"{place}: {words}")
    return "\n".join(lines.values())


def _explain_one(schema: type[BaseModel], dotted: str, details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        known = sorted({name for table in _tables(schema, details["loc"][:-1]) for name in table.model_fields})
        return f"unknown key {dotted}; {_nearest(dotted.rpartition('.')[2], known, 'known keys')}"
    if kind == "missing":
        return f"{dotted} is missing; add it"
    if kind.startswith("union_tag"):
        key, tag = str(context.get("discriminator", "")).strip("'"), str(context.get("tag", ""))
        fields = [table.model_fields[key] for table in _tables(schema, details["loc"]) if key in table.model_fields]
        known = sorted({str(name) for field in fields for name in get_args(field.annotation)})
        said = f"unknown {key} {tag!r}" if tag else f"{key} is missing"
        return f"{dotted}: {said}; {_nearest(tag, known, 'known')}"
    # pydantic puts these words before those of our validators
    message = details["msg"].removeprefix("Value error, ")
    if kind in ("model_type", "dict_type"):
        message = f"must be a table, [{dotted}]"
        if _is_optional_table(schema, dotted):
            message += f"; --set {dotted}=none switches it off"
    elif kind == "too_short":
        message = f"needs at least {context.get('min_length', 1)} entry, each under [[{dotted}]]"
    value = details["input"]
    shown = f" (got {value!r})" if isinstance(value, str | int | float | bool) else ""
    return f"{dotted or '(the recipe)'}: {message}{shown}"


def _nearest(name: str, known: Sequence[str], title: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"{title}: {', '.join(known)}"


def _in_file(tree: Any, details: ErrorDetails) -> list[str]:
    """The place as the file has it: pydantic also names the table that a value chose (``steps.0.dedup.name``)."""
    kept: list[str] = []
    node = tree
    last = len(details["loc"]) - 1
    for depth, part in enumerate(details["loc"]):
        try:
            node = node[part]
        except (LookupError, TypeError):
            if depth != last or details["type"] != "missing":
                continue
        kept.append(str(part))
    return kept


def _tables(schema: type[BaseModel], location: Sequence[int | str]) -> list[type[BaseModel]]:
    """The tables that may stand at a place of the schema, as pydantic names it."""
    tables = [schema]
    for part in location:
        if isinstance(part, int):  # an entry of a list
            continue
        annotations = [table.model_fields[part].annotation for table in tables if part in table.model_fields]
        if annotations:
            tables = [table for annotation in annotations for table in _tables_in(annotation)]
        else:  # a key of the user's, or the value that chooses one of several tables
            chosen = [t for t in tables if any(part in get_args(f.annotation) for f in t.model_fields.values())]
            tables = chosen or tables
    return tables


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for argument in get_args(annotation) for table in _tables_in(argument)]


def _place(path: Path, text: str, location: Sequence[str], overrides: Sequence[Override]) -> str:
    """Where a setting was given: the last override that touched it, else the line of the recipe."""
    dotted = ".".join(location)
    # the last one that touches a key is the one that holds
    for override in reversed(overrides):
        for name in SHORTHANDS.get(override.key, (override.key,)):
            # a reward is one setting of each source, not the source
            touched = override.key != "reward" or location[-1] == "verifier"
            if touched and (f"{dotted}.".startswith(f"{name}.") or f"{name}.".startswith(f"{dotted}.")):
                return override.words
    return f"{path}{_line_of(text, location)}"


def _line_of(text: str, location: Sequence[str]) -> str:
    """``, line N`` of a key in the TOML text, as near as the table headers allow; empty if not found."""
    names = [part for part in location if not part.isdigit()]
    index = next((int(part) for part in location if part.isdigit()), 0)
    lines = (_find_key(text, names[:depth], index) for depth in range(len(names), 0, -1))
    return next((f", line {line}" for line in lines if line), "")


def _find_key(text: str, names: Sequence[str], index: int) -> int:
    """Line of the key of these names, in the ``index``-th entry where its table is a list; 0 where there is none."""
    *tables, key = names
    header, dotted = ".".join(tables), ".".join(names)
    current, seen = "", -1
    for number, line in enumerate(text.splitlines(), 1):
        table = re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line)
        name = re.match(r"\s*\"?([A-Za-z0-9_.-]+)\"?\s*=", line)
        if table:
            listed, current = table[1] == "[[", table[2]
            # the entry of the list: the key's own table, or the table that holds it
            seen += listed and current in (header, dotted)
            if current == dotted and (not listed or seen == index):
                return number
        elif name and (current, name[1]) == (header, key) and seen in (-1, index):
            return number
    return 0


def shipped_table(file: str, kind: type[T]) -> T:
    """A table that comes with the package, e.g. ``data/schemas.toml``, read once."""
    return cast("T", _shipped_table(file, kind))


@cache
def _shipped_table(file: str, kind: Any) -> Any:
    text = resources.files("magicrl").joinpath(file).read_text(encoding="utf-8")
    return TypeAdapter(kind).validate_python(tomllib.loads(text))
