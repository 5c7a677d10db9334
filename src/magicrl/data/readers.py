"""The one reader of problems: files, folders and hub data sets whose columns are known by their names.

Training, evaluation, the pipeline and ``magicrl init`` read through here. `recognise` says what a file holds without
using it; `read_problems` gives its problems. Which names are known: ``schemas.toml``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from magicrl.config.schema import FieldMapping
from magicrl.data.files import KINDS, BadRow, Row, read_place
from magicrl.data.schemas import OFFER, Quarantined, Read, RecordReader, Unrecognised

__all__ = [
    "BadRow",
    "Place",
    "Quarantined",
    "Read",
    "Recognised",
    "RecordReader",
    "Rejected",
    "Row",
    "Unrecognised",
    "read_problems",
    "recognise",
]

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""``owner/name``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where records lie.

    Attributes:
        path: a file, a folder of data files with splits, or one that ``save_to_disk`` wrote.
        hub: the name of a hub data set, where there is no path.
        splits: of a folder or hub data set, in order of preference.
        subset, revision: of a folder or hub data set.
    """

    path: Path | None = None
    hub: str | None = None
    splits: tuple[str, ...] = ("train",)
    subset: str | None = None
    revision: str | None = None

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

    @property
    def stem(self) -> str:
        """For ids and names."""
        return Path(self.hub or self.path or "").stem

    def rows(self) -> Iterator[Row | BadRow]:
        """Its records in order, broken ones as such.

        Raises:
            RecipeError: no such file, folder, split or hub data set.
            ValueError: the content as a whole cannot be read.
        """
        return read_place(self.path, self.hub, splits=self.splits, subset=self.subset, revision=self.revision)


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


def recognise(place: str | Path | Place, fields: FieldMapping | None = None, *, offer: str | None = None) -> Recognised:
    """Read all of ``place`` and say what it holds: schema, columns, counts, and every record that is rejected and why.

    Args:
        place: a file or folder, or a hub name.
        fields: columns that the user named.
        offer: how a user names a column, for the reasons, e.g. ``--set data.train.0.fields.{field}={column}``.

    Raises:
        RecipeError, ValueError: it cannot be read as a whole (no such file, not UTF-8, unknown kind).
    """
    place = place if isinstance(place, Place) else Place.of(place)
    reader = RecordReader(stem=place.stem, fields=fields or FieldMapping(), extra=False, offer=offer or OFFER)
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
