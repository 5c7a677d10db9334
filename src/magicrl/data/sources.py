"""Problems from files, folders and hub data sets whose columns are known by their names, and a recipe's sources.

Training, evaluation, the pipeline and ``magicrl init`` read through here. `recognise` says what a file holds without
using it; `read_problems` gives its problems. Which names are known: ``schemas.toml``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from magicrl.config.errors import RecipeError, under
from magicrl.config.schema import FieldMapping, SourceConfig
from magicrl.data.data_files import KINDS, BadRow, Row, read_place
from magicrl.data.families import Split, check_options, make_family, unique_problems
from magicrl.data.schemas import OFFER, Quarantined, Read, RecordReader, Template, catalogue
from magicrl.records import Problem
from magicrl.registry import resolve
from magicrl_verifiers.gym import NAME as GYM
from magicrl_verifiers.references import LIVE


def fingerprint(problems: Iterable[Problem]) -> str:
    """SHA-256 (hex) over all that the problems are, in their order.

    ``extra`` is left out: it never reaches the model or the verifier.
    """
    digest = hashlib.sha256()
    for p in problems:
        fields: list[Any] = [p.id, p.prompt, list(p.references), p.verifier, p.source, p.level]
        # only where there is one, so that checksums of problems without a context stay what they were
        if p.context:
            fields.append([[message.role, message.content] for message in p.context])
        if p.environment is not None:
            fields.append({"environment": p.environment})
        line = json.dumps(fields, ensure_ascii=True)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


MARK = "label"
"""Key of ``Problem.extra``; its value is "wrong" where the reference answers are another problem's."""


def with_wrong_labels(problems: Sequence[Problem], share: float) -> list[Problem]:
    """The problems in their order, about ``share`` of them with the reference answers of another one.

    Which ones, and whose reference answers they get, depends on ids alone: a larger share adds wrong labels and moves
    none.

    Args:
        problems: of one source.
        share: of wrong labels, 0 to 1.

    Raises:
        ValueError: all problems have the same reference answers, so that no other answer is at hand.
    """
    if not share:
        return list(problems)
    references = sorted({problem.references for problem in problems})
    if len(references) < 2:
        raise ValueError(
            f"label_noise = {share:g}: all {len(problems)} problems have one answer; nothing is wrong for it"
        )
    return [_wrong(problem, references) if _uniform(problem.key, "chosen") < share else problem for problem in problems]


def _wrong(problem: Problem, references: Sequence[tuple[str, ...]]) -> Problem:
    """The problem with references drawn from the others', each distinct answer alike; ``references`` are sorted."""
    own = bisect_left(references, problem.references)
    place = int(_uniform(problem.key, "given") * (len(references) - 1))
    # one of the others, the problem's own left out
    given = references[place if place < own else place + 1]
    return replace(problem, references=given, extra={**problem.extra, MARK: "wrong"})


def _uniform(name: str, purpose: str) -> float:
    """A number in [0, 1) that is the name's own."""
    digest = hashlib.blake2b(f"{purpose}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""``owner/name``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where records lie.

    Attributes:
        path: a file, a folder of data files with splits, or one that ``save_to_disk`` wrote.
        hub: the name of a hub data set, where there is no path.
        given: what a function of the user's gives, called anew each time, and `reference`, its name.
        splits: of a folder or hub data set, in order of preference.
        subset, revision: of a folder or hub data set.
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
        """A path that exists, else a hub name (``owner/name``), else a path.

        Example:
            >>> Place.of("openai/gsm8k").hub
            'openai/gsm8k'
        """
        path = Path(text).expanduser()
        name = str(text)
        hub = HUB_NAME.fullmatch(name) and not path.exists() and path.suffix.lower() not in KINDS
        return Place(hub=name) if hub else Place(path=path)

    @staticmethod
    def called(kind: str, reference: str, options: Mapping[str, Any]) -> Place:
        """What the function that ``reference`` names gives when it is called with these keyword arguments.

        Raises:
            ValueError: an unknown name, or options that the function does not take.
        """
        function = resolve(kind, reference)
        check_options(kind, reference, function, options)
        return Place(given=partial(function, **options), reference=reference)

    @property
    def stem(self) -> str:
        """For ids and names."""
        where = self.reference.partition("@")[0].removeprefix(LIVE) if self.reference.startswith(LIVE) else ""
        where = where or self.reference.rpartition(":")[0]
        return Path(self.hub or self.path or where or self.reference).stem

    @property
    def name(self) -> str:
        """For messages."""
        return self.reference or str(self.path or self.hub)

    def rows(self) -> Iterator[Row | BadRow | Problem]:
        """Its records in order, broken ones as such; a function of the user's may give problems, too.

        Raises:
            RecipeError: no such file, folder, split or hub data set.
            ValueError: the content as a whole cannot be read.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A record that gives no problem.

    Attributes:
        where: its place in words.
        reason: why not, and what to do; no place in it where ``quarantined``.
        quarantined: the record is whole, but cannot be used (no answer, no usable tests).
        error: what was raised.
    """

    where: str
    reason: str
    quarantined: bool
    error: ValueError


def read_problems(place: Place, reader: RecordReader) -> Iterator[Read | Rejected]:
    """What every record of ``place`` gives, in order; nothing is left out silently.

    Raises:
        RecipeError, ValueError: as `Place.rows`.
    """
    for row in place.rows():
        if isinstance(row, Problem):
            where = f"{place.name}, {row.id}"
            yield Read(where=where, problem=row, schema="problem", columns=((), None), template="bare")
            continue
        try:
            if isinstance(row, BadRow):
                raise ValueError(row.reason)
            yield reader.read(row)
        except ValueError as error:
            yield Rejected(where=row.where, reason=str(error), quarantined=isinstance(error, Quarantined), error=error)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recognised:
    """What a file, folder or hub data set holds.

    Attributes:
        schema: of most of its problems: a row of ``schemas.toml``, or the columns (``question, answer``).
        fields: the columns of ``prompt`` and ``answer``; no ``answer`` where tests or the last turn are.
        schemas: how many problems by schema.
        columns: of the first record.
        rows: records in all.
        problems: those that can be used.
        verifiers: how many problems by verifier (``maths``, ``code``).
        conversations: problems with turns before the prompt.
        rejected: the others, each with its place and its reason.
        first: the first problem; None where there is none.
    """

    schema: str | None
    fields: dict[str, str | tuple[str, ...]]
    schemas: dict[str, int]
    columns: tuple[str, ...]
    rows: int
    problems: int
    verifiers: dict[str, int]
    conversations: int
    rejected: tuple[Rejected, ...]
    first: Read | None


def recognise(
    place: str | Path | Place,
    fields: FieldMapping | None = None,
    *,
    offer: str | None = None,
    verifier: str | None = None,
) -> Recognised:
    """Read all of ``place`` and say what it holds: schema, columns, counts, and every record that is rejected and why.

    Args:
        place: a file or folder, or a hub name.
        fields: columns that the user named.
        verifier: of problems without tests; a custom reward may do without answers.
        offer: how a user names a column, for the reasons, e.g. ``--set data.train.0.fields.{field}={column}``.

    Raises:
        RecipeError, ValueError: it cannot be read as a whole (no such file, not UTF-8, unknown kind).
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
    verifiers: Counter[str] = Counter()
    mappings: dict[str, dict[str, str | tuple[str, ...]]] = {}
    rejected: list[Rejected] = []
    conversations = 0
    first: Read | None = None
    for read in read_problems(place, reader):
        if isinstance(read, Rejected):
            rejected.append(read)
            continue
        first = first or read
        schemas[read.schema] += 1
        verifiers[read.problem.verifier] += 1
        conversations += bool(read.problem.context)
        mappings.setdefault(read.schema, _mapping(read))
    most = schemas.most_common(1)[0][0] if schemas else None
    columns = next((tuple(map(str, row.record)) for row in place.rows() if isinstance(row, Row)), ())
    return Recognised(
        schema=most,
        fields={} if most is None else mappings[most],
        schemas=dict(schemas),
        columns=columns,
        rows=sum(schemas.values()) + len(rejected),
        problems=sum(schemas.values()),
        verifiers=dict(verifiers),
        conversations=conversations,
        rejected=tuple(rejected),
        first=first,
    )


def _mapping(read: Read) -> dict[str, str | tuple[str, ...]]:
    prompt, answer = read.columns
    named: dict[str, str | tuple[str, ...]] = {"prompt": prompt[0] if len(prompt) == 1 else prompt}
    return named if answer is None else {**named, "answer": answer}


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
        solutions: worked solutions or programs by the problem's id, where the source has any.
    """

    problems: tuple[Problem, ...]
    set_aside: tuple[SetAside, ...] = ()
    solutions: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])


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
        _log.warning(text, source.source or source.path or source.hub, count, reason, first[reason])
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


def held_out_keys(problems: Iterable[Problem], count: int) -> set[str]:
    """The first ``count`` keys in their order: keys are hashes, so neither the order of a file nor its ids decide."""
    return set(sorted({problem.key for problem in problems})[:count])


def load_source(source: SourceConfig, *, key: str = "data.train.0") -> LoadedSource:
    """As ``load_problems``, with the records that were set aside."""
    loaded = _generated(source) if source.family is not None else _recorded(source, key)
    if source.label_noise:
        with _at("label_noise"):
            if any(problem.verifier == GYM for problem in loaded.problems):
                raise ValueError(
                    f"the verifier {GYM} does not read the reference answers that this changes; set verifier = "
                    '"exact" too'
                )
            loaded = replace(loaded, problems=tuple(with_wrong_labels(loaded.problems, source.label_noise)))
    if source.environment is not None:
        given = tuple(replace(problem, environment=source.environment) for problem in loaded.problems)
        loaded = replace(loaded, problems=given)
    if source.template is None:
        return loaded
    template = Template(text=source.template)
    return replace(loaded, problems=tuple(template.around(problem) for problem in loaded.problems))


def _generated(source: SourceConfig) -> LoadedSource:
    assert source.family is not None, "the caller chose"
    assert source.count is not None, "the schema wants a family's count"
    # the name first: an unknown option is only told for a family that exists
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
    return LoadedSource(problems=tuple(problems))


@contextmanager
def _at(key: str) -> Generator[None]:
    """What a family refuses is always a setting of the recipe."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(error.problem, key=error.key or key) from error
    except ValueError as error:
        raise RecipeError(str(error), key=key) from error


def _recorded(source: SourceConfig, key: str) -> LoadedSource:
    """What the reader gives of a file, a folder or a hub data set."""
    place = _place(source)
    name = place.name
    if source.levels is not None and source.fields.level is None and source.source is None:
        remedy = "needs fields.level, the column that holds the level"
        raise RecipeError(f"{name}: levels = {list(source.levels)} {remedy}", key="levels")
    problems: dict[str, Problem] = {}
    places: dict[str, str] = {}
    aside: list[SetAside] = []
    solutions: dict[str, tuple[str, ...]] = {}
    for read in read_problems(place, _reader(source, place, key)):
        # a broken record is an error of the file; one without an answer is only set aside
        if isinstance(read, Rejected) and not read.quarantined:
            raise read.error
        reason = read.reason if isinstance(read, Rejected) else _against(read.problem, source.difficulty_of)
        if reason is not None:
            aside.append(SetAside(where=read.where, reason=reason))
            continue
        assert not isinstance(read, Rejected), "a rejected record has its reason"
        problem = read.problem
        # a program's prompt says how the program is run; a maths prompt is left as the file has it
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
            if read.solutions:
                solutions[problem.id] = read.solutions
        # in the loop, so that a hub set is not read to its end for its first rows
        if source.count is not None and len(problems) == source.count:
            break
    if not problems:
        raise ValueError(f"{name}: no problems{_why_none(source, len(places), aside)}")
    return LoadedSource(problems=tuple(problems.values()), set_aside=tuple(aside), solutions=solutions)


def _against(problem: Problem, model: str | None) -> str | None:
    """Why ``difficulty_of`` leaves a problem out: its recorded rollouts give no signal, or there are none."""
    if model is None:
        return None
    info: Any = problem.extra.get("extra_info")
    table: Any = info.get("model_difficulty") if isinstance(info, Mapping) else None
    failed = table.get(model) if isinstance(table, Mapping) else None
    if not isinstance(failed, int):
        return f"extra_info.model_difficulty says nothing of {model} (difficulty_of)"
    # 0 and 16 failures of 16 give a group without advantage (RECIPE section 3, the offline filter)
    if not 0 < failed < RECORDED_ROLLOUTS:
        return f"{model} solved it {'always' if failed <= 0 else 'never'} (difficulty_of)"
    return None


def place_of(problem_id: str, source: SourceConfig) -> str | None:
    """Where a problem of ``source`` stands (``train.jsonl, line 3``), for an error about it; None for a family.

    The source is read once more: keeping the place of every problem would cost a good run memory.
    """
    if source.family is not None:
        return None
    # the mixture's #2, #3 of a repeated source
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
