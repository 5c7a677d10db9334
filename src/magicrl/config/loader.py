"""Reading of recipes: TOML or a dict, overrides, and errors that name file, line, key and remedy."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
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
from magicrl.config.paths import counted_from, find_recipe, is_hub_name, mark_typed, shipped_recipe
from magicrl.config.schema import TrainConfig
from magicrl.config.sft_schema import SftConfig
from magicrl_verifiers.references import LIVE, file_fingerprint
from magicrl_verifiers.secrets import without_secrets
from magicrl_verifiers.several import live_names, reward_names

_log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=BaseModel)
T = TypeVar("T")
Tree = dict[str, Any]

# Short forms of the settings that users change most, with exactly the settings that each one sets.
HELD_OUT_BY_SHORTHAND, GENERATED_BY_SHORTHAND = 100, 1000
GYM = "reasoning_gym/"
"""Start of a generated task's name, which can be given instead of a data set."""
SHORTHANDS = {
    "model": ("start.model",),
    "data": ("data.train", "data.holdout"),
    "reward": ("data.train", "data.validation", "data.test"),
}


def load_train_recipe(recipe: Recipe, overrides: Overrides = (), overrides_from: Path | None = None) -> TrainConfig:
    """Load a training recipe (a file, a shipped name or a dict) with overrides applied.

    Relative paths of a file start at its folder, and those of a dict at the working directory. Those in ``overrides``
    start at ``overrides_from`` (default: the working directory).

    Raises:
        RecipeError: No such recipe, unreadable file, bad TOML, unknown key, wrong type or value.
    """
    return load_config(recipe, overrides, TrainConfig, overrides_from)


def load_sft_recipe(path: Path, overrides: Sequence[str] = ()) -> SftConfig:
    """Load the supervised recipe at ``path`` with overrides applied. Raises as `load_train_recipe`."""
    return load_config(path, overrides, SftConfig)


def load_start_recipe(sft: str) -> SftConfig:
    """Load the supervised recipe that ``start.sft`` of a training recipe names. Raises as `load_train_recipe`."""
    return load_sft_recipe(shipped_recipe(sft) or Path(sft))


def to_toml(config: BaseModel, folder: Path | None = None) -> str:
    """Return the resolved configuration as TOML with every default written out. None is left out, as TOML has no null.

    Paths are relative to ``folder``. Credentials (``https://user:password@host``) are removed, because this text is
    kept and shared.
    """
    tree = config.model_dump(mode="json", exclude_none=True, context={"folder": folder})
    return without_secrets(tomli_w.dumps(tree))


def decisive(config: BaseModel, exclude: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings that differ from their defaults, without the excluded ones, as JSON data.

    Starting models and results are identified by these settings, and must stay valid when magicrl gets new settings,
    whose defaults mean what was done before. Therefore a default must never change its meaning; use a setting of
    another name.
    """
    return config.model_dump(mode="json", exclude_defaults=True, exclude=None if exclude is None else dict(exclude))


def digest(data: object) -> str:
    """Return 16 hex digits that identify JSON data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a flat dict from dotted keys to values. A list of plain values is one value.

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


def custom_files(config: BaseModel) -> dict[str, str]:
    """Return the SHA-256 of each file that a setting refers to (``file.py:name``, ``module:name``), by its key."""
    found: dict[str, str] = {}
    # No default refers to a file.
    for key, value in leaves(config.model_dump(mode="json", exclude_defaults=True)).items():
        if isinstance(value, str) and " + " in value:  # several rewards
            value = reward_names(value)
        for place, text in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(text, str) or not re.search(r"\w:[A-Za-z_]\w*$", text):
                continue
            where = text.rpartition(":")[0]
            if (not where.endswith(".py") or Path(where).is_file()) and (code := file_fingerprint(text)):
                found[key if place is None else f"{key}.{place}"] = code
    return found


def config_hash(config: BaseModel) -> str:
    """Return 16 hex digits that identify a configuration: its settings that are not at their defaults, and custom
    files."""
    files = custom_files(config)
    # The key is that of version 0.1: a hash must not change.
    return digest(decisive(config) | ({"brought": files} if files else {}))


def live_parts(config: BaseModel) -> dict[str, str]:
    """Return the settings that refer to objects passed in Python, by their dotted keys."""
    found = leaves(config.model_dump(mode="json", exclude_defaults=True))
    return {key: value for key, value in found.items() if isinstance(value, str) and live_names(value)}


@contextmanager
def placed_errors(recipe: Recipe, overrides: Overrides = ()) -> Generator[None]:
    """Add the place of the setting, the recipe's line or the ``--set``, to errors raised inside that know their
    setting.

    Some mistakes, such as an unknown task family, show only during the run, and the user needs to know where it is
    named.
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
"""Placeholder for a recipe's file in messages about a dict, which has neither file nor lines."""


def _opened(recipe: Recipe) -> tuple[Path, str, Tree]:
    """Return a recipe's file, its text (empty for a dict) and its settings."""
    if isinstance(recipe, Mapping):
        return _NO_FILE, "", plain(recipe)
    path = find_recipe(recipe)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return path, text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(_explain_toml(path, text, str(error))) from None


def load_config(
    recipe: Recipe, overrides: Overrides, schema: type[Config], overrides_from: Path | None = None
) -> Config:
    """Load a recipe of this schema, which may be that of a data pipeline. The rest is as for `load_train_recipe`."""
    path, text, tree = _opened(recipe)
    for sign, kind, command in _KINDS:
        # a file for another command says so, in place of a list of keys that it should not have
        if sign in tree and sign not in schema.model_fields:
            start = tree.get("start")
            own = cast(Tree, start).get("sft") if sign == "stages" and isinstance(start, dict) else None
            also = f"; its supervised start is {own}" if own else ""
            raise RecipeError(f"{path}: is {kind}, which `{command}` takes{also}")
    given = [override_of(override) for override in overrides]
    # Before the validation, so that an override is checked like the settings of the file.
    for override in sorted(given, key=lambda one: [bool(place.fullmatch(one.key)) for place in _FIRST], reverse=True):
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
"""A table that only one kind of file has, a description of the kind, and the command for it."""


def _explain_toml(path: Path, text: str, error: str) -> str:
    """Return tomllib's message with the place first and the line itself."""
    found = re.fullmatch(r"(?s)(.*) \(at line (\d+), column (\d+)\)", error)
    hint = "" if found else "; is the file cut off?"
    if error.startswith("Cannot overwrite a value"):
        hint = "; this key or table appears twice (a list of tables needs [[double brackets]] each time)"
    elif error.startswith("Invalid value"):
        hint = "; every key needs a value, and text needs quotes"
    if found is None:  # at the end of the document
        return f"{path}, line {max(1, len(text.splitlines()))}: not valid TOML: {error}{hint}"
    number = int(found.group(2))
    line = text.splitlines()[number - 1].strip()
    return f"{path}, line {number}: not valid TOML: {found.group(1)} at column {found.group(3)} of {line!r}{hint}"


def _is_optional_table(schema: type[BaseModel], dotted: str) -> bool:
    """Return whether the setting is a table that a recipe may leave out. ``--set KEY=none`` then removes it."""
    parts: list[int | str] = [int(part) if part.isdigit() else part for part in dotted.split(".")]
    fields = [table.model_fields.get(str(parts[-1])) for table in _tables(schema, parts[:-1])]
    annotations = [field.annotation for field in fields if field is not None]
    return any(type(None) in get_args(one) and _tables_in(one) for one in annotations)


_FIRST = [re.compile(each) for each in ("model|data", r"data\.(train|validation|test)(\.[^.]+)?", "reward")]
"""Overrides that are applied before others, in this order: a table of sources, then what every source gets."""


def _apply_override(tree: Tree, override: Override) -> None:
    key, value = override.key, mark_typed(override.value)
    short = not isinstance(value, dict)  # else ``model`` and ``data`` are the recipe's tables
    if key == "model" and short:
        # The whole table: [start] has either model or sft, and the recipe may have the other one.
        tree["start"] = {"model": value}
    elif key == "data" and short:
        # The recipe's test and validation sets belong to its own data.
        kept = {k: v for k, v in tree.get("data", {}).items() if k not in ("train", "validation", "test", "holdout")}
        if str(value).startswith(GYM):
            test = {"family": value, "count": HELD_OUT_BY_SHORTHAND, "split": "test"}
            own = {"train": [{"family": value, "count": GENERATED_BY_SHORTHAND}], "test": {"held_out": test}}
        else:
            place = "source" if str(value).startswith(LIVE) else "hub" if is_hub_name(str(value)) else "path"
            own = {"train": [{place: value}], "holdout": HELD_OUT_BY_SHORTHAND}
        tree["data"] = {**kept, **own}
    elif key == "reward":
        for source in _sources(tree):
            source["verifier"] = value
    else:
        old: Any = tree.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        lost = [name for name in cast(Tree, old) if name not in cast(Tree, value)] if both else []
        if lost:
            _log.warning(
                "%s: this table replaces the recipe's, which also sets %s; to keep them, give settings by their dotted "
                "keys, as in %s.%s", override.words, ", ".join(lost), key, next(iter(cast(Tree, value)), lost[0]),
            )  # fmt: skip
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
    """Name a run after the model and data given by overrides, unless ``run.name`` is given."""
    given = {override.key: override.value for override in overrides if not isinstance(override.value, Mapping)}
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
    """Return a short name: ``runs/mine/model`` as ``mine``, ``owner/Name-1B`` as ``Name-1B``, ``a b.jsonl`` as
    ``a-b``."""
    path = Path(re.sub(rf"^{LIVE}(\w+)@\w+$", r"\1", str(value)))
    name = path.parent.name if path.name == "model" and path.parent.name else path.name
    return re.sub(r"[^\w.-]+", "-", re.sub(r"\.(jsonl?|csv|parquet|toml)$", "", name)) or "own"


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
            # A missing table is created, a missing entry of a list is not.
            cast(Tree, node).setdefault(part, {})
        table = cast(Any, node)
        if depth == len(parts):
            table[key] = value
        else:
            node = table[key]


def _explain(
    path: Path, text: str, tree: Tree, schema: type[BaseModel], error: ValidationError, overrides: Sequence[Override]
) -> str:
    # All mistakes at once, not one per attempt.
    found = error.errors()
    # A list whose entries are wrong is reported once more as too short: the entries' own errors say it.
    inner = [details["loc"] for details in found]
    reported = [
        details
        for details in found
        if details["type"] != "too_short"
        or not any(loc[: len(details["loc"])] == details["loc"] != loc for loc in inner)
    ]
    rewards = {override.words for override in overrides if override.key == "reward"}
    lines: dict[str, str] = {}
    for details in reported:
        # The location as the file has it: pydantic also names the table that a value chose (``steps.0.dedup.name``).
        location: list[str] = []
        node: Any = tree
        last = len(details["loc"]) - 1
        for depth, part in enumerate(details["loc"]):
            try:
                node = node[part]
            except (LookupError, TypeError):
                if depth != last or details["type"] != "missing":
                    continue
            location.append(str(part))
        place, words = _place(path, text, location, overrides), _explain_one(schema, ".".join(location), details)
        # A wrong reward is wrong in every set, but is reported once.
        lines.setdefault(place if place in rewards else f"{place}: {words}", f"{place}: {words}")
    return "\n".join(lines.values())


def _explain_one(schema: type[BaseModel], dotted: str, details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    tables = _tables(schema, details["loc"])
    if kind == "extra_forbidden":
        known = sorted({name for table in _tables(schema, details["loc"][:-1]) for name in table.model_fields})
        return f"unknown key {dotted}; {_nearest(dotted.rpartition('.')[2], known, 'known keys')}"
    if kind == "missing":
        fields = tables[0].model_fields if tables else {}
        keys = [name for name, field in fields.items() if field.is_required()] or list(fields)
        return f"{dotted} is missing; add " + (f"its table (keys: {', '.join(keys)})" if keys else "it")
    if kind.startswith("union_tag"):
        key, tag = str(context.get("discriminator", "")).strip("'"), str(context.get("tag", ""))
        fields = [table.model_fields[key] for table in tables if key in table.model_fields]
        known = sorted({str(name) for field in fields for name in get_args(field.annotation)})
        said = f"unknown {key} {tag!r}" if tag else f"{key} is missing"
        return f"{dotted}: {said}; {_nearest(tag, known, 'known')}"
    # pydantic puts these words before those of our validators
    message = details["msg"].removeprefix("Value error, ")
    if kind == "tuple_type":
        message = f"must be a list, {f'each entry under [[{dotted}]]' if tables else 'values in brackets'}"
    elif kind in ("model_type", "dict_type"):
        message = f"must be a table, [{dotted}]"
        if kind == "model_type" and not tables:  # a setting of an entry, in the table of all entries
            message = f"belongs to an entry with a name, [{dotted.rpartition('.')[0]}.NAME]"
        elif _is_optional_table(schema, dotted):
            message += f"; --set {dotted}=none switches it off"
    elif kind == "too_short":
        message = f"needs at least {context.get('min_length', 1)} entry, each under [[{dotted}]]"
    value = details["input"]
    shown = f" (got {value!r})" if isinstance(value, str | int | float | bool) else ""
    # many rules between settings begin with the setting
    begins = "" if dotted and message.startswith(f"{dotted}.") else f"{dotted or '(the recipe)'}: "
    return f"{begins}{message}{shown}"


def _nearest(name: str, known: Sequence[str], title: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"{title}: {', '.join(known)}"


def _tables(schema: type[BaseModel], location: Sequence[int | str]) -> list[type[BaseModel]]:
    """Return the tables of the schema that are possible at a location, as pydantic names it."""
    tables = [schema]
    for part in location:
        if isinstance(part, int):  # an entry of a list
            continue
        annotations = [table.model_fields[part].annotation for table in tables if part in table.model_fields]
        if annotations:
            tables = [table for annotation in annotations for table in _tables_in(annotation)]
        else:  # a key that the user chooses, or the value that selects one of several tables
            chosen = [t for t in tables if any(part in get_args(f.annotation) for f in t.model_fields.values())]
            tables = chosen or tables
    return tables


def _tables_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for argument in get_args(annotation) for table in _tables_in(argument)]


def _place(path: Path, text: str, location: Sequence[str], overrides: Sequence[Override]) -> str:
    """Return where a setting was given: the last override that touched it, else the line of the recipe."""
    dotted = ".".join(location)
    # The last override of a key wins.
    for override in reversed(overrides):
        for name in SHORTHANDS.get(override.key, (override.key,)):
            # A reward is one setting of each source, not the whole source.
            touched = override.key != "reward" or location[-1] == "verifier"
            if touched and (f"{dotted}.".startswith(f"{name}.") or f"{name}.".startswith(f"{dotted}.")):
                return override.words
    # of the key, else of the nearest table that has a header
    names = [part for part in location if not part.isdigit()]
    index = next((int(part) for part in location if part.isdigit()), 0)
    lines = (_find_key(text, names[:depth], index) for depth in range(len(names), 0, -1))
    return next((f"{path}, line {line}" for line in lines if line), str(path))


def _find_key(text: str, names: Sequence[str], index: int) -> int:
    """Return the line of a key, in the ``index``-th entry if its table is a list; 0 if there is none."""
    *tables, key = names
    header, dotted = ".".join(tables), ".".join(names)
    current, seen = "", -1
    for number, line in enumerate(text.splitlines(), 1):
        table = re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line)
        name = re.match(r"\s*\"?([A-Za-z0-9_.-]+)\"?\s*=", line)
        if table:
            listed, current = table[1] == "[[", table[2]
            # The entry of the list: the key's own table, or the table that contains it.
            seen += listed and current in (header, dotted)
            if current == dotted and (not listed or seen == index):
                return number
        elif name and (current, name[1]) == (header, key) and seen in (-1, index):
            return number
    return 0


def shipped_table(file: str, kind: type[T]) -> T:
    """Return a table that the package ships, for example ``data/schemas.toml``. It is read once."""
    return cast("T", _shipped_table(file, kind))


@cache
def _shipped_table(file: str, kind: Any) -> Any:
    text = resources.files("magicrl").joinpath(file).read_text(encoding="utf-8")
    return TypeAdapter(kind).validate_python(tomllib.loads(text))
