"""Configurations of other libraries as recipes: what a table of options is, and the recipe that follows from one.

The tables are `foreign_trl.py` and `foreign_verl.py`; `foreign_files.py` reads what users have. A setting is written
where the configuration states an option of its row, or where the library's default is not magicrl's.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
import os
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal, NoReturn

from magicrl.config.errors import RecipeError
from magicrl.config.schema import StageConfig, TrainConfig
from magicrl.config.section import Section
from magicrl.registry import names
from magicrl_verifiers.secrets import without_secrets

Settings = dict[str, Any]
"""Dotted keys of a recipe to values; ``stages.X`` is the key X of its one stage, ``data.train`` a list of tables."""
Sources = tuple[Mapping[str, Any], ...]
"""Tables of ``[[data.train]]``."""
BESIDE = {"model": "start.model", "data": "data.train", "steps": "stages.max_steps"}
"""What a recipe needs and a configuration may leave out: options of the command to settings."""


@dataclass(kw_only=True)
class Options:
    """What a configuration states, and the library's defaults behind it.

    Attributes:
        library: whose options they are.
        given: options that are stated, by name.
        beside: what the command line adds: those of ``BESIDE``, and ``processes``.
        count: how many problems such sources hold; None where they are not here.
        place: a path of the configuration, as the recipe's file has it.
        sources: of the problems, as soon as they are known.
        differs: what the recipe will do otherwise, a sentence each.
    """

    library: Library
    given: Mapping[str, Any]
    beside: Mapping[str, Any] = field(default_factory=dict[str, Any])
    count: Callable[[Sources], int | None] = lambda sources: None
    place: Callable[[str], str] = lambda path: path
    sources: Sources = ()
    differs: list[str] = field(default_factory=list[str])

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name, self.library.defaults.get(name))

    def states(self, name: str) -> bool:
        """Whether the configuration states a value of its own."""
        return self.given.get(name) is not None

    def differ(self, text: str) -> None:
        """The recipe is not quite what the configuration says."""
        self.differs.append(text)

    def refuse(self, name: str, why: str) -> NoReturn:
        """No recipe follows from this option. Raises ``RecipeError``."""
        raise RecipeError(f"{name} = {_json(self[name])} {why}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a table: options, the settings that follow from them, and a note for the page."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    make: Callable[[Options], Settings]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """What is known of a library.

    Attributes:
        name: with the version whose options these are.
        defaults: of the options that a row or ``neutral`` reads, where they are not None.
        rows: options to settings.
        always: settings that no option decides, and why.
        neutral: options without a counterpart whose default changes nothing: what is done for every value.
        left: further options (patterns) that are not carried over, by reason.
    """

    name: str
    defaults: Mapping[str, Any]
    rows: tuple[Row, ...]
    always: Mapping[str, tuple[Any, str]]
    neutral: Mapping[str, str]
    left: Mapping[str, tuple[str, ...]]

    def reason(self, name: str) -> str | None:
        """Why an option is not carried over; None where it is unknown."""
        fits = (why for why, patterns in self.left.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns))
        return next(fits, None)

    @property
    def known(self) -> set[str]:
        """The options that are read."""
        return {name for row in self.rows for name in row.theirs} | self.neutral.keys()


def read_library(file: str, makers: Mapping[str, Any]) -> Library:
    """The table in a file beside this one; ``makers`` are the functions that its rows name."""
    tree = tomllib.loads(resources.files("magicrl.config").joinpath(file).read_text(encoding="utf-8"))
    rows = [_carried(theirs, ours, stated=False) for theirs, ours in tree["same"].items()]
    rows += [
        Row(theirs=tuple(row["theirs"]), ours=tuple(row["ours"]), make=makers[row["by"]], note=row.get("note", ""))
        for row in tree["rows"]
    ]
    rows += [_carried(theirs, ours, stated=True) for theirs, ours in tree["stated"].items()]
    return Library(
        name=tree["name"],
        defaults=tree["defaults"],
        rows=tuple(rows),
        always={item["key"]: (item["value"], item["why"]) for item in tree["always"]},
        neutral=tree["neutral"],
        left={item["why"]: tuple(item["options"]) for item in tree["left"]},
    )


def _carried(theirs: str, ours: str, *, stated: bool) -> Row:
    """A value as it is. What decides nothing of what is learned only where it is stated, and is not -1, never."""

    def make(o: Options) -> Settings:
        value = o[theirs]
        return {} if value is None or (stated and (not o.states(theirs) or value == -1)) else {ours: value}

    return Row(theirs=(theirs,), ours=(ours,), make=make)


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """A recipe's text, what it does otherwise, and what was not carried over, a line each."""

    text: str
    differs: Sequence[str]
    left: Sequence[str]


def convert(options: Options, source: str) -> Converted:
    """The recipe that follows from a configuration.

    Args:
        options: as read.
        source: the file's name, for the recipe's head.

    Raises:
        RecipeError: an option has no counterpart without which no recipe means the same, or one that a recipe needs
            is missing.
    """
    library = options.library
    lines: dict[str, tuple[Any, str]] = dict(library.always)
    options.sources = options.beside.get("data", ())
    for row in library.rows:
        try:
            made = row.make(options)
        except (TypeError, ArithmeticError, AttributeError) as error:
            told = ", ".join(f"{name} = {_json(options[name])}" for name in row.theirs)
            raise RecipeError(f"{told}: cannot be read as {library.name} does ({error})") from None
        comment = _origin(row, options)
        options.sources = options.sources or made.get("data.train", ())
        # what nobody stated and magicrl does by itself needs no line
        fresh = {key: value for key, value in made.items() if comment is not None or value != default_of(key)}
        why = comment or f"{library.name.split()[0]}'s default"
        lines |= {key: (value, "likewise" if place else why) for place, (key, value) in enumerate(fresh.items())}
    lines |= {key: (options.beside[name], f"--{name}") for name, key in BESIDE.items() if name in options.beside}
    for key, is_path in (("start.model", os.path.isdir), ("run.output", bool)):
        if key in lines and is_path(lines[key][0]):
            lines[key] = (options.place(lines[key][0]), lines[key][1])
    for name, key in BESIDE.items():
        if key not in lines:
            raise RecipeError(f"{source} names no {key}, and a recipe needs one: say it with --{name}")
    for name, why in library.neutral.items():
        if options[name] not in (library.defaults.get(name), None, {}):
            options.differ(f"{_name(name)} = {_json(options[name])}: {why}")
    left = _left(options)
    head = [f"From {_name(source)} ({library.name}) by magicrl convert. Behind a setting stands what it comes from."]
    for title, items in (("Otherwise than there:", options.differs), ("Not carried over:", left)):
        head += [title, *(f"- {item}" for item in items)] if items else []
    told = [f"# {line}" for item in head for line in textwrap.wrap(item, 116, subsequent_indent="  ")]
    text = without_secrets("\n".join([*told, "", _tables(lines)]))
    return Converted(text=text, differs=options.differs, left=left)


def policy(
    options: Options,
    form: Literal["clip", "sequence", "cispo", "sapo"],
    *,
    reducer: str,
    clip: tuple[float, float] | None,
    normalised: bool,
) -> Settings:
    """The loss row of a surrogate, and the advantage of groups whose rewards are divided by their deviation or not."""
    settings: Settings = {"algorithm.advantage": "group", "algorithm.reducer": reducer}
    names = {"clip": "magic" if normalised else "dr_grpo", "sequence": "gspo"}
    settings["algorithm.loss"] = names.get(form, form)
    if not normalised and form != "clip":
        settings["algorithm.advantage"] = "rloo"
        options.differ(
            f"{form}, advantages without the deviation: magicrl's rloo, which is theirs times M / (M - 1) "
            "for a group of M responses"
        )
    if clip is not None:
        settings |= {"algorithm.clip_low": clip[0], "algorithm.clip_high": clip[1]}
    return settings


def steps_of(options: Options, epochs: float, batch: int) -> int:
    """Training steps of so many passes over the problems, the last incomplete batch of a pass left out."""
    if "steps" in options.beside:
        return options.beside["steps"]
    problems = options.count(options.sources)
    if problems is None:
        raise RecipeError(
            f"the configuration trains for {epochs:g} passes over its data, which is not here to be counted, and a "
            "recipe counts steps: say how many with --steps, or name the data with --data"
        )
    return max(1, math.ceil(epochs * (problems // batch)))


def trackers(options: Options, named: Sequence[str]) -> Settings:
    """Those of the named trackers that magicrl has; the others are told."""
    for name in set(named) - {*names("tracker"), "none", "console"}:
        options.differ(f"{_name(name)}: no tracker of that name; one of your own may be (docs/trackers.md)")
    return {"logging.trackers": [name for name in named if name in names("tracker")]}


def default_of(key: str) -> Any:
    """magicrl's own value of a setting; None where it has none."""
    section: Any = TrainConfig
    *tables, last = key.split(".")
    for table in tables:
        if table == "stages":
            section = StageConfig
            continue
        value = section.model_fields[table].default
        if not isinstance(value, Section):
            return None
        section = type(value)
    value = section.model_fields[last].get_default(call_default_factory=True)
    return list(value) if isinstance(value, tuple) else value


def _origin(row: Row, options: Options) -> str | None:
    """The options that a row's settings come from, as stated; None where none is."""
    told = [
        (name.removeprefix("actor_rollout_ref."), options.given[name]) for name in row.theirs if name in options.given
    ]
    note = f" ({row.note.replace('`', '')})" if row.note and "](" not in row.note else ""
    return "; ".join(f"{name} = {_json(value)}" for name, value in told) + note if told else None


def _left(options: Options) -> list[str]:
    library, by_reason = options.library, dict[str, list[str]]()
    known = library.known
    for name in options.given:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        unknown = f"unknown to {library.name}" + (f", which has {near[0]}" if near else "")
        by_reason.setdefault(library.reason(name) or unknown, []).append(_name(name))
    return [f"{', '.join(sorted(names))}: {why}" for why, names in by_reason.items()]


def _tables(lines: Mapping[str, tuple[Any, str]]) -> str:
    """The settings as TOML in the schema's order, each with its comment."""
    order = list(TrainConfig.model_fields)
    tables: dict[str, list[str]] = {}
    for key, (value, comment) in sorted(
        lines.items(), key=lambda item: (order.index(item[0].split(".")[0]), item[0].count("."))
    ):
        table, _, last = key.rpartition(".")
        if isinstance(value, tuple):  # tables of their own
            for place, row in enumerate(value):
                body = [f"{name} = {_toml(item)}" for name, item in row.items()]
                tables[f"[[{key}]]" + " " * place] = [f"{body[0]}  # {comment}", *body[1:]]
            continue
        heading = "[[stages]]" if table == "stages" else f"[{table}]"
        tables.setdefault(heading, []).append(f"{last} = {_toml(value)}  # {comment}")
    return "\n\n".join("\n".join([heading.rstrip(), *body]) for heading, body in tables.items()) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    return _json(value)


def _json(value: Any) -> str:
    # a JSON text, number, truth value or list of them is TOML's too
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def _name(name: str) -> str:
    """A name from a user's file, which must not end a comment."""
    return name if re.fullmatch(r"[\w./+-]+", name) else _json(name)
