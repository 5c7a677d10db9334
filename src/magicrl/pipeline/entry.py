"""One problem on its way through the pipeline, and its row in a parquet file.

The file has the released schema's five columns, so that every step's output is a training file by itself, and beside
them what the steps need of a problem: its bare statement, its solutions, where it came from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from magicrl.records import Message, Problem

Ability = Literal["math", "code"]

_MESSAGE = pa.struct([("content", pa.string()), ("role", pa.string())])
RELEASED_FIELDS = [
    pa.field("data_source", pa.string()),
    pa.field("prompt", pa.list_(_MESSAGE)),
    pa.field("ability", pa.string()),
    pa.field("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
]
_EXTRA = pa.struct([("index", pa.int64()), ("model_difficulty", pa.map_(pa.string(), pa.int64()))])
_OWN = {
    "id": pa.string(),
    "source": pa.string(),
    "problem": pa.string(),
    "solutions": pa.list_(pa.string()),
    "level": pa.int64(),
    "where": pa.string(),
    "notes": pa.string(),
}
SCHEMA = pa.schema([*RELEASED_FIELDS, pa.field("extra_info", _EXTRA), *(pa.field(*one) for one in _OWN.items())])
"""Columns of kept rows: the released schema's, then the pipeline's own."""

DROPPED_SCHEMA = pa.schema(
    [*SCHEMA, pa.field("step", pa.string()), pa.field("reason", pa.string()), pa.field("detail", pa.string())]
)
"""Columns of dropped rows: the same, and which step dropped the row and why. Of a row that could not be read only
id, source and where are set, and ``detail`` holds the record's text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A problem in the pipeline."""

    id: str  # unique in the whole pipeline, ``SOURCE/name``
    source: str  # the pipeline's name of the source
    data_source: str  # the released schema's column; the source unless the record has one of its own
    ability: Ability
    problem: str  # the bare statement, which dedup, decontamination and judges read
    prompt: str  # the statement with the text around it that a model is given, the last turn of its conversation
    references: tuple[str, ...]  # accepted answers; for code the tests as JSON, alone
    solutions: tuple[str, ...] = ()  # worked solutions or reference programs, the best first
    index: int = 0  # the record's number within its source
    level: int | None = None  # of difficulty, where the source states one
    where: str = ""  # place of the record in words
    difficulty: Mapping[str, int] = field(default_factory=dict[str, int])  # failures of 16 by model, as released
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what the source or a step says of it
    context: tuple[Message, ...] = ()  # the turns before the prompt, mostly none

    def as_problem(self) -> Problem:
        """What a model is asked, and its verifier."""
        return Problem(
            id=self.id,
            prompt=self.prompt,
            references=self.references,
            verifier="code" if self.ability == "code" else "maths",
            source=self.source,
            level=self.level,
            context=self.context,
        )


def row_of(entry: Entry) -> dict[str, Any]:
    """The entry as a row of ``SCHEMA``."""
    code = entry.ability == "code"
    return {
        "data_source": entry.data_source,
        "prompt": [{"content": turn.content, "role": turn.role} for turn in entry.as_problem().messages],
        "ability": entry.ability,
        "reward_model": {
            "ground_truth": entry.references[0] if code else json.dumps(list(entry.references), ensure_ascii=False),
            "style": "rule",
        },
        "extra_info": {"index": entry.index, "model_difficulty": sorted(entry.difficulty.items())},
        "id": entry.id,
        "source": entry.source,
        "problem": entry.problem,
        "solutions": list(entry.solutions),
        "level": entry.level,
        "where": entry.where,
        "notes": json.dumps(dict(entry.notes), ensure_ascii=False, sort_keys=True) if entry.notes else None,
    }


def entry_of(row: Mapping[str, Any]) -> Entry:
    """The entry of a row of ``SCHEMA``."""
    truth = row["reward_model"]["ground_truth"]
    extra = row["extra_info"]
    return Entry(
        id=row["id"],
        source=row["source"],
        data_source=row["data_source"],
        ability=row["ability"],
        problem=row["problem"],
        prompt=row["prompt"][-1]["content"],
        context=tuple(Message(turn["role"], turn["content"]) for turn in row["prompt"][:-1]),
        references=(truth,) if row["ability"] == "code" else tuple(json.loads(truth)),
        solutions=tuple(row["solutions"] or ()),
        index=extra["index"],
        level=row["level"],
        where=row["where"],
        difficulty=dict(extra["model_difficulty"] or ()),
        notes=json.loads(row["notes"]) if row["notes"] else {},
    )


def is_entry(record: Mapping[str, Any]) -> bool:
    """Whether a record is a row of ``SCHEMA``: another run's output, taken as it is."""
    return all(name in record for name in SCHEMA.names)


def table_of(entries: Sequence[Entry]) -> pa.Table:
    """The entries as a table of ``SCHEMA``."""
    return pa.Table.from_pylist([row_of(entry) for entry in entries], schema=SCHEMA)


def entries_of(table: pa.Table) -> list[Entry]:
    """The entries of a table of ``SCHEMA``."""
    return [entry_of(row) for row in table.select(SCHEMA.names).to_pylist()]


@dataclass(frozen=True, slots=True)
class Document:
    """A problem as dedup and decontamination see it.

    Example:
        >>> Document("gsm8k-0", "Ann has 3 apples. How many are left?", (1.0, 36.0)).id
        'gsm8k-0'
    """

    id: str  # unique among the documents of one call
    text: str  # the problem's statement
    # how well specified the problem is; of two copies the one with the larger tuple is kept, of equal ones the earlier
    quality: tuple[float, ...] = ()
