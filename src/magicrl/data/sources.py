"""Problems from files, folders and hub datasets, recognised by their column names, and the sources of a recipe.

Training, evaluation, the pipeline and ``magicrl init`` use this module. `recognise` reports what a file holds, and
`read_problems` yields its problems. ``schemas.toml`` lists the known column names.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast, get_args

from magicrl.config.data_schema import FieldMapping, SourceConfig
from magicrl.config.errors import RecipeError, under
from magicrl.config.paths import is_hub_name
from magicrl.data.data_files import BadRow, Row, read_place
from magicrl.data.families import Split, check_options, make_family, unique_problems
from magicrl.data.multiple_choice import check_numbers
from magicrl.data.schemas import OFFER, Quarantined, Read, RecordReader, Template, catalogue
from magicrl.records import Problem
from magicrl.registry import resolve
from magicrl_verifiers.gym import NAME as GYM
from magicrl_verifiers.references import LIVE
from magicrl_verifiers.several import reward_names, reward_terms

_ANSWER_ONLY = frozenset({"maths", "exact", "code", "judge"})
"""Verifiers that read nothing of a problem's ``extra``."""


def problems_fingerprint(problems: Iterable[Problem], *, folders: bool = False) -> str:
    """Return a SHA-256 (hex) of the problems in their order.

    ``extra`` counts where an environment or a custom reward may read it. Of the file of a custom part only the name
    counts, so that a copied folder has the same problems; ``folders``: its folder too, as in version 0.2.
    """

    def named(reference: str) -> Any:
        if folders or ".py:" not in reference:
            return reference
        return [[Path(name).name, weight] for name, weight in reward_terms(reference)]

    digest = hashlib.sha256()
    for p in problems:
        fields: list[Any] = [p.id, p.prompt, list(p.references), named(p.verifier), p.source, p.level]
        # only if there is one, so that checksums of problems without a context do not change
        if p.context:
            fields.append([[message.role, message.content] for message in p.context])
        if p.environment is not None:
            fields.append({"environment": named(p.environment)})
        if p.extra and (p.environment is not None or not _ANSWER_ONLY.issuperset(reward_names(p.verifier))):
            fields.append({"extra": sorted(p.extra.items())})
        # an object is known by its type: its text may hold an address, which differs in every process
        line = json.dumps(fields, ensure_ascii=True, skipkeys=True, default=lambda value: type(value).__name__)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


MARK = "label"
"""Key of ``Problem.extra``. Its value is "wrong" for problems with the reference answers of another problem."""


def with_wrong_labels(problems: Sequence[Problem], share: float) -> list[Problem]:
    """Return the problems in their order, about ``share`` of them with the reference answers of another problem.

    The choice depends only on the problems, so a larger share adds wrong labels without changing the others.

    Args:
        problems: Problems of a source.
        share: Share of wrong labels, 0 to 1.

    Raises:
        ValueError: No other problem's reference answers are all wrong for one of the problems.
    """
    if not share:
        return list(problems)
    references = sorted({problem.references for problem in problems})
    if len(references) < 2:
        raise ValueError(
            f"label_noise = {share:g}: all {len(problems)} problems have one answer; nothing is wrong for it"
        )
    found: list[Problem] = []
    for problem in problems:
        if _uniform(problem.key, "chosen") < share:
            # drawn uniformly from the references of the other problems
            place = int(_uniform(problem.key, "given") * (len(references) - 1))
            place += place >= bisect_left(references, problem.references)
            # the next of which none is right: choices share a letter, answers differ in case
            turned = (references[(place + step) % len(references)] for step in range(len(references)))
            right = {text.casefold() for text in problem.references}
            wrong = next((one for one in turned if right.isdisjoint(map(str.casefold, one))), None)
            if wrong is None:
                raise ValueError(f"label_noise = {share:g}: no answer of another problem is wrong for {problem.id!r}")
            problem = replace(problem, references=wrong, extra={**problem.extra, MARK: "wrong"})
        found.append(problem)
    return found


def _uniform(name: str, purpose: str) -> float:
    """Return a number in [0, 1) that depends only on name and purpose."""
    digest = hashlib.blake2b(f"{purpose}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Location of records: a path, a hub dataset, or a custom function.

    Attributes:
        path: A file, a folder of data files with splits, or a folder that ``save_to_disk`` wrote.
        hub: Name of a hub dataset, if there is no path.
        splits: Splits of a folder or hub dataset, in order of preference.
        subset: Subset of a folder or hub dataset.
        revision: Revision of a hub dataset.
        given: Custom function that returns records. It is called for each reading.
        reference: Name of the custom function.
    """

    path: Path | None = None
    hub: str | None = None
    splits: tuple[str, ...] = ("train",)
    subset: str | None = None
    revision: str | None = None
    given: Callable[[], Iterable[Any]] | None = None
    reference: str = ""

    @staticmethod
    def of(text: str | Path) -> Place:
        """Return the place that a text names: an existing path, else a hub name (``owner/name``), else a path.

        Example:
            >>> Place.of("openai/gsm8k").hub
            'openai/gsm8k'
        """
        name = str(text)
        return Place(hub=name) if is_hub_name(name) else Place(path=Path(text).expanduser())

    @staticmethod
    def called(kind: str, reference: str, options: Mapping[str, Any]) -> Place:
        """Return the place of the records of a custom function, called with ``options`` as keyword arguments.

        Raises:
            ValueError: The name is unknown, or the function does not accept the options.
        """
        function = resolve(kind, reference)
        check_options(kind, reference, function, options)
        return Place(given=partial(function, **options), reference=reference)

    @property
    def stem(self) -> str:
        """Short name for ids."""
        where = self.reference.partition("@")[0].removeprefix(LIVE) if self.reference.startswith(LIVE) else ""
        where = where or self.reference.rpartition(":")[0]
        return Path(self.hub or self.path or where or self.reference).stem

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.reference or str(self.path or self.hub)

    def rows(self) -> Iterator[Row | BadRow | Problem]:
        """Yield the records in order, unreadable ones as `BadRow`. A custom function may also return problems.

        Raises:
            RecipeError: The file, folder, split or hub dataset does not exist.
            ValueError: The content as a whole cannot be read.
        """
        if self.given is not None:
            return self._given_rows(self.given)
        return read_place(self.path, self.hub, splits=self.splits, subset=self.subset, revision=self.revision)

    def _given_rows(self, given: Callable[[], Iterable[Any]]) -> Iterator[Row | BadRow | Problem]:
        for index, item in enumerate(given()):
            where = f"{self.reference}, item {index + 1}"
            if isinstance(item, Problem):
                yield item
            elif isinstance(item, Mapping):
                yield Row(index=index, where=where, record=dict(cast("Mapping[str, Any]", item)))
            else:
                reason = f"{where}: expected a record (a dict) or a magicrl.records.Problem, got {item!r:.60}"
                yield BadRow(index=index, where=where, reason=reason, text=repr(item))


def read_problems(place: Place, reader: RecordReader) -> Iterator[tuple[str, Read | ValueError]]:
    """Yield for every record, in order, its place for messages, and the problem or why it is none.

    The message of `Quarantined` does not hold the place, that of another error does.

    Raises:
        RecipeError: See `Place.rows`.
        ValueError: See `Place.rows`.
    """
    for row in place.rows():
        if isinstance(row, Problem):
            yield f"{place.name}, {row.id}", Read(problem=row, schema="problem", columns=((), None), template="bare")
            continue
        try:
            read = ValueError(row.reason) if isinstance(row, BadRow) else reader.read(row)
        except ValueError as error:
            read = error
        yield row.where, read


@dataclass(frozen=True, kw_only=True, slots=True)
class Recognised:
    """Contents of a file, folder or hub dataset.

    Attributes:
        schema: Most frequent schema: a row of ``schemas.toml``, or the columns (``question, answer``).
        fields: Columns of ``prompt`` and ``answer``. No ``answer`` if tests or the last turn hold it.
        problems: Number of usable problems.
        rejected: Place and error of the records that cannot be used, see `read_problems`.
        first: First problem, None without a usable one.
    """

    schema: str | None
    fields: dict[str, str | tuple[str, ...]]
    problems: int
    rejected: tuple[tuple[str, ValueError], ...]
    first: Read | None


def recognise(
    place: str | Path | Place,
    fields: FieldMapping | None = None,
    *,
    offer: str | None = None,
    verifier: str | None = None,
) -> Recognised:
    """Read all records of ``place`` and report schema, columns, and every rejected record with the reason.

    Args:
        place: A file or folder, or a hub name.
        fields: Columns that the user named.
        offer: Setting with which a user names a column, for messages. Example:
            ``--set data.train.0.fields.{field}={column}``.
        verifier: Verifier of problems without tests. A custom reward may not need answers.

    Raises:
        RecipeError: The place does not exist or its kind is unknown.
        ValueError: The content as a whole cannot be read.
    """
    place = place if isinstance(place, Place) else Place.of(place)
    reader = RecordReader(
        stem=place.stem,
        fields=fields or FieldMapping(),
        verifier=verifier or "maths",
        extra=False,
        offer=offer or OFFER,
    )
    schemas: Counter[str] = Counter()
    mappings: dict[str, dict[str, str | tuple[str, ...]]] = {}
    rejected: list[tuple[str, ValueError]] = []
    first: Read | None = None
    for where, read in read_problems(place, reader):
        if isinstance(read, ValueError):
            rejected.append((where, read))
            continue
        first = first or read
        schemas[read.schema] += 1
        prompt, answer = read.columns
        named: dict[str, str | tuple[str, ...]] = {"prompt": prompt[0] if len(prompt) == 1 else prompt}
        mappings.setdefault(read.schema, named if answer is None else {**named, "answer": answer})
    check_numbers(reader.numbers)
    most = schemas.most_common(1)[0][0] if schemas else None
    return Recognised(
        schema=most,
        fields={} if most is None else mappings[most],
        problems=sum(schemas.values()),
        rejected=tuple(rejected),
        first=first,
    )


_OTHER_SPLITS = frozenset({"test", "validation", "valid", "val", "dev", "eval"})
"""Values of a column ``split`` that name no training problems."""
RECORDED_ROLLOUTS = 16
"""Number of rollouts that ``model_difficulty`` counts failures of."""

_log = logging.getLogger(__name__)


LoadedSource: TypeAlias = tuple[list[Problem], list[tuple[str, str]], dict[str, tuple[str, ...]]]
"""Problems of a source in its order, with unique ids; place and reason of well-formed records that are not used
(without an answer or usable tests, or left out by ``difficulty_of``); worked solutions or programs by problem id."""


def load_problems(source: SourceConfig, *, key: str = "data.train.0") -> list[Problem]:
    """Return the problems of a source. A warning counts the records that were set aside.

    Args:
        source: Source of the recipe.
        key: Key of the source in the recipe, for messages.

    Raises:
        RecipeError: The source is wrong: no such file or family, unknown options (names the key).
        ValueError: The content is wrong (names file, line or row, field and remedy).
    """
    problems, set_aside, _ = load_source(source, key=key)
    places: dict[str, list[str]] = {}
    for where, reason in set_aside:
        places.setdefault(reason, []).append(where)
    for reason, found in places.items():
        text = "%s: %d records set aside: %s (the first: %s)"
        _log.warning(text, source.source or source.path or source.hub, len(found), reason, found[0])
    return problems


def load_parts(sources: Sequence[SourceConfig], *, key: str = "data.train") -> list[list[Problem]]:
    """Return each source's problems. A source listed twice weighs twice: repeated ids get ``#2``, ``#3``, ...

    Raises:
        RecipeError: See `load_problems`; the key includes the number of the source.
        ValueError: See `load_problems`.
    """
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


def held_out_keys(problems: Iterable[Problem], count: int) -> set[str]:
    """Return the ``count`` smallest keys. Keys are hashes, so the choice depends neither on order nor on ids."""
    return set(sorted({problem.key for problem in problems})[:count])


def load_source(source: SourceConfig, *, key: str = "data.train.0") -> LoadedSource:
    """Return the problems of a source, the records that were set aside, and worked solutions. See `load_problems`."""
    problems, set_aside, solutions = (
        (_generated(source), [], {}) if source.family is not None else _recorded(source, key)
    )
    if source.label_noise:
        with _at("label_noise"):
            if any(problem.verifier == GYM for problem in problems):
                raise ValueError(
                    f"the verifier {GYM} does not read the reference answers that this changes; set verifier = "
                    '"exact" too'
                )
            problems = list(with_wrong_labels(problems, source.label_noise))
    if source.environment is not None:
        problems = [replace(problem, environment=source.environment) for problem in problems]
    if source.template is not None:
        template = Template(text=source.template)
        problems = [template.around(problem) for problem in problems]
    return problems, set_aside, solutions


def _generated(source: SourceConfig) -> list[Problem]:
    assert source.family is not None, "the caller chose"
    assert source.count is not None, "the schema wants a family's count"
    # check the name first: an unknown option is reported only for a family that exists
    with _at("family"):
        resolve("family", source.family)
    with _at("options"):
        family = make_family(source.family, source.options)
    known_split = source.split in get_args(Split)
    with _at("split" if not known_split else "count" if source.levels is None else "levels"):
        problems = unique_problems(
            family, seed=source.seed, split=source.split, count=source.count, levels=source.levels
        )
    if source.verifier is not None:
        problems = [replace(p, verifier=source.verifier) for p in problems]
    return problems


@contextmanager
def _at(key: str) -> Generator[None]:
    """Turn a ValueError of a family into a RecipeError for a setting of the recipe."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(error.problem, key=error.key or key) from error
    except ValueError as error:
        raise RecipeError(str(error), key=key) from error


def _recorded(source: SourceConfig, key: str) -> LoadedSource:
    """Return the problems of a file, a folder, a hub dataset or a custom function."""
    place = _place(source)
    name = place.name
    if source.levels is not None and source.fields.level is None and source.source is None:
        remedy = "needs fields.level, the column that holds the level"
        raise RecipeError(f"{name}: levels = {list(source.levels)} {remedy}", key="levels")
    problems: dict[str, Problem] = {}
    places: dict[str, str] = {}
    aside: list[tuple[str, str]] = []
    solutions: dict[str, tuple[str, ...]] = {}
    reader = _reader(source, place, key)
    for where, read in read_problems(place, reader):
        # a broken record is an error of the file; one without an answer is only set aside
        if isinstance(read, ValueError):
            if not isinstance(read, Quarantined):
                raise read
            aside.append((where, str(read)))
            continue
        problem = read.problem
        if (reason := _against(problem, source.difficulty_of)) is not None:
            aside.append((where, reason))
            continue
        # a program's prompt says how the program is run; a maths prompt is left as the file has it
        if source.template is None and problem.verifier == "code":
            problem = catalogue().templates[read.template].around(problem)
        if problem.id in places:
            raise ValueError(
                f"{where}: id {problem.id!r} appears already in {places[problem.id]}; ids must be unique: "
                "change one, or leave fields.id out to number the rows"
            )
        places[problem.id] = where
        if source.levels is None or problem.level in source.levels:
            problems[problem.id] = problem
            if read.solutions:
                solutions[problem.id] = read.solutions
        # in the loop, so that a hub set is not read to its end for its first rows
        if source.count is not None and len(problems) == source.count:
            break
    check_numbers(reader.numbers)
    if not problems:
        why = "it holds no records, give it some"
        if places:
            why = f"none of its {len(places)} records has a level among {list(source.levels or ())}"
        elif aside:
            why = f"all {len(aside)} records were set aside: {aside[0][1]}"
        raise ValueError(f"{name}: no problems; {why}")
    marked = Counter(str(problem.extra.get("split")).lower() for problem in problems.values())
    if "train" in marked and not _OTHER_SPLITS.isdisjoint(marked):
        _log.warning(
            "%s: its column 'split' holds %s, and the problems of all are used; write each split into a file of its "
            "own, train.jsonl and test.jsonl of a folder, and give the folder",
            *(name, ", ".join(f"{value} ({number})" for value, number in marked.most_common())),
        )
    return list(problems.values()), aside, solutions


def _against(problem: Problem, model: str | None) -> str | None:
    """Return why ``difficulty_of`` leaves a problem out: no recorded rollouts, or no advantage among them."""
    if model is None:
        return None
    info: Any = problem.extra.get("extra_info")
    table: Any = info.get("model_difficulty") if isinstance(info, Mapping) else None
    failed = table.get(model) if isinstance(table, Mapping) else None
    if not isinstance(failed, int):
        return f"extra_info.model_difficulty says nothing of {model} (difficulty_of)"
    # 0 and 16 failures of 16 give a group without advantage (the report's offline filter)
    if not 0 < failed < RECORDED_ROLLOUTS:
        return f"{model} solved it {'always' if failed <= 0 else 'never'} (difficulty_of)"
    return None


def source_place_of(problem_id: str, source: SourceConfig) -> str | None:
    """Return the place of a problem in ``source`` (``train.jsonl, line 3``) for an error message; None for a family.

    The source is read again, because keeping the place of every problem would cost memory in every run.
    """
    if source.family is not None:
        return None
    # without the #2, #3 of a source that is listed several times
    problem_id = problem_id.partition("#")[0] if source.fields.id is None else problem_id
    place = _place(source)
    for where, read in read_problems(place, _reader(source, place, "data")):
        if isinstance(read, Read) and read.problem.id == problem_id:
            return where
    return None


def _place(source: SourceConfig) -> Place:
    """Return the place of the source's records."""
    if source.source is not None:
        with _at("source"):
            return Place.called("source", source.source, source.options)
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
    if "revision" in source.options and (path is not None or Path(str(source.hub)).is_dir()):
        raise RecipeError(f"{name}: options.revision is for hub data sets; remove it", key="options")
    if source.split != "train" and path is not None and path.is_file():
        raise RecipeError(f"{name}: a file has no splits, got split = {source.split!r}; remove it", key="split")
    chosen = {key: str(value) for key, value in source.options.items()}
    subset, revision = chosen.get("subset"), chosen.get("revision")
    return Place(path=path, hub=source.hub, splits=(source.split,), subset=subset, revision=revision)


def _reader(source: SourceConfig, place: Place, key: str) -> RecordReader:
    offer = f"--set {key}.fields.{{field}}={{column}}"
    return RecordReader(
        stem=place.stem,
        fields=source.fields,
        verifier=source.verifier or "maths",
        offer=offer,
        reference=source.environment is None,
    )
