"""Sources of a recipe as problems: generated families, and what `readers` reads."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from magicrl.config.errors import RecipeError, under
from magicrl.config.schema import SourceConfig
from magicrl.data.families import Split, make_family, unique_problems
from magicrl.data.fingerprint import fingerprint
from magicrl.data.label_noise import with_wrong_labels
from magicrl.data.readers import Place, RecordReader, Rejected, read_problems
from magicrl.data.schemas import Template, catalogue
from magicrl.records import Problem

__all__ = [
    "LoadedSource",
    "SetAside",
    "fingerprint",
    "load_mixture",
    "load_problems",
    "load_source",
    "place_of",
]

RECORDED_ROLLOUTS = 16
"""``model_difficulty`` counts failures of so many."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """A record that was not used, where it stands and why."""

    where: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedSource:
    """What a source gave.

    Attributes:
        problems: in the source's order, ids unique.
        set_aside: well-formed records that are not used (without an answer or usable tests, left out by
            ``difficulty_of``).
    """

    problems: tuple[Problem, ...]
    set_aside: tuple[SetAside, ...] = ()


def load_problems(source: SourceConfig, *, key: str = "data.train.0") -> list[Problem]:
    """The problems of one source; records that were set aside are counted in a warning.

    Args:
        source: family, path or hub, from the recipe.
        key: of the source in the recipe, for what an error offers to write.

    Raises:
        RecipeError: the source itself is wrong: no such file or family, unknown options (with its key).
        ValueError: its content is; naming the file, line or row, field and remedy.
    """
    loaded = load_source(source, key=key)
    first: dict[str, str] = {}
    for item in loaded.set_aside:
        first.setdefault(item.reason, item.where)
    for reason, count in Counter(item.reason for item in loaded.set_aside).items():
        text = "%s: %d records set aside: %s (the first: %s)"
        _log.warning(text, source.path or source.hub, count, reason, first[reason])
    return list(loaded.problems)


def load_mixture(sources: Sequence[SourceConfig], *, key: str = "data.train") -> list[Problem]:
    """All sources one after the other. A source listed twice weighs twice: a repeated id gets ``#2``, ``#3``, ...

    Raises:
        RecipeError, ValueError: as ``load_problems``, the key with the source's number before it.
    """
    return [problem for part in load_parts(sources, key=key) for problem in part]


def load_parts(sources: Sequence[SourceConfig], *, key: str = "data.train") -> list[list[Problem]]:
    """As ``load_mixture``, the problems of each source by themselves."""
    seen: Counter[str] = Counter()
    parts: list[list[Problem]] = []
    for number, source in enumerate(sources):
        with under(str(number)):
            problems = load_problems(source, key=f"{key}.{number}")
        part: list[Problem] = []
        for problem in problems:
            seen[problem.id] += 1
            times = seen[problem.id]
            part.append(problem if times == 1 else replace(problem, id=f"{problem.id}#{times}"))
        parts.append(part)
    return parts


def load_source(source: SourceConfig, *, key: str = "data.train.0") -> LoadedSource:
    """As ``load_problems``, with the records that were set aside."""
    loaded = _generated(source) if source.family is not None else _recorded(source, key)
    if source.label_noise:
        with _at("label_noise"):
            loaded = replace(loaded, problems=tuple(with_wrong_labels(loaded.problems, source.label_noise)))
    if source.template is None:
        return loaded
    template = Template(text=source.template)
    return replace(loaded, problems=tuple(template.around(problem) for problem in loaded.problems))


def _generated(source: SourceConfig) -> LoadedSource:
    assert source.family is not None, "the caller chose"
    assert source.count is not None, "the schema wants a family's count"
    with _at("family"):
        make_family(source.family)
    with _at("options"):
        family = make_family(source.family, source.options)
    known_split = source.split in get_args(Split)
    with _at("split" if not known_split else "count" if source.levels is None else "levels"):
        problems = unique_problems(
            family, seed=source.seed, split=source.split, count=source.count, levels=source.levels
        )
    if source.verifier is not None:
        problems = [replace(p, verifier=source.verifier) for p in problems]
    return LoadedSource(problems=tuple(problems))


@contextmanager
def _at(key: str) -> Generator[None]:
    """What a family refuses is always a setting of the recipe."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(str(error), key=key) from error


def _recorded(source: SourceConfig, key: str) -> LoadedSource:
    """What the reader gives of a file, a folder or a hub data set."""
    place = _place(source)
    name = str(place.path or place.hub)
    if source.levels is not None and source.fields.level is None:
        remedy = "needs fields.level, the column that holds the level"
        raise RecipeError(f"{name}: levels = {list(source.levels)} {remedy}", key="levels")
    problems: dict[str, Problem] = {}
    places: dict[str, str] = {}
    aside: list[SetAside] = []
    for read in read_problems(place, _reader(source, place, key)):
        if isinstance(read, Rejected) and not read.quarantined:
            raise read.error
        reason = read.reason if isinstance(read, Rejected) else _against(read.problem, source.difficulty_of)
        if reason is not None:
            aside.append(SetAside(where=read.where, reason=reason))
            continue
        assert not isinstance(read, Rejected), "a rejected record has its reason"
        problem = read.problem
        if source.template is None and problem.verifier == "code":
            problem = catalogue().templates[read.template].around(problem)
        if problem.id in places:
            raise ValueError(
                f"{read.where}: id {problem.id!r} stood already in {places[problem.id]}; ids must be unique: "
                "change one, or leave fields.id out to number the rows"
            )
        places[problem.id] = read.where
        if source.levels is None or problem.level in source.levels:
            problems[problem.id] = problem
        if source.count is not None and len(problems) == source.count:
            break
    if not problems:
        raise ValueError(f"{name}: no problems{_why_none(source, len(places), aside)}")
    return LoadedSource(problems=tuple(problems.values()), set_aside=tuple(aside))


def _against(problem: Problem, model: str | None) -> str | None:
    """Why ``difficulty_of`` leaves a problem out: its recorded rollouts give no signal, or there are none."""
    if model is None:
        return None
    info: Any = problem.extra.get("extra_info")
    table: Any = info.get("model_difficulty") if isinstance(info, Mapping) else None
    failed = table.get(model) if isinstance(table, Mapping) else None
    if not isinstance(failed, int):
        return f"extra_info.model_difficulty says nothing of {model} (difficulty_of)"
    if not 0 < failed < RECORDED_ROLLOUTS:
        return f"{model} solved it {'always' if failed <= 0 else 'never'} (difficulty_of)"
    return None


def place_of(problem_id: str, source: SourceConfig) -> str | None:
    """Where a problem of ``source`` stands (``train.jsonl, line 3``), for an error about it; None for a family.

    The source is read once more: keeping the place of every problem would cost a good run memory.
    """
    if source.family is not None:
        return None
    problem_id = problem_id.partition("#")[0] if source.fields.id is None else problem_id
    place = _place(source)
    for read in read_problems(place, _reader(source, place, "data")):
        if not isinstance(read, Rejected) and read.problem.id == problem_id:
            return read.where
    return None


def _why_none(source: SourceConfig, read: int, aside: Sequence[SetAside]) -> str:
    if read:
        return f"; none of its {read} records has a level among {list(source.levels or ())}"
    if aside:
        return f"; all {len(aside)} records were set aside: {aside[0].reason}"
    return "; it holds no records, give it some"


def _place(source: SourceConfig) -> Place:
    """Where the source's records lie."""
    path = None if source.path is None else Path(source.path).expanduser()
    name = source.path or source.hub
    if source.options and path is not None and path.is_file():
        raise RecipeError(
            f"{name}: options are for families, folders and hub data sets, got {sorted(source.options)}; remove them",
            key="options",
        )
    unknown = sorted(set(source.options) - {"subset", "revision"})
    if unknown:
        raise RecipeError(f"{name}: unknown option {unknown[0]!r}; known: subset, revision", key="options")
    chosen = {key: str(value) for key, value in source.options.items()}
    return Place(path=path, hub=source.hub, splits=(source.split,), **chosen)


def _reader(source: SourceConfig, place: Place, key: str) -> RecordReader:
    offer = f"--set {key}.fields.{{field}}={{column}}"
    return RecordReader(stem=place.stem, fields=source.fields, verifier=source.verifier or "maths", offer=offer)
