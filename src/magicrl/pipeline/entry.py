"""A problem in the pipeline, and its row in a parquet file.

A row has the five columns of the released schema, so that the output of every step is a training file, and the columns
that the steps need: the bare statement, the solutions and the origin.
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
"""Columns of kept rows: those of the released schema, then those of the pipeline."""

DROPPED_SCHEMA = pa.schema(
    [*SCHEMA, pa.field("step", pa.string()), pa.field("reason", pa.string()), pa.field("detail", pa.string())]
)
"""Columns of dropped rows: those of kept rows, the step and the reason. For a record that could not be read only id,
source and where are set, and ``detail`` holds its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A problem in the pipeline."""

    id: str  # unique in the pipeline, ``SOURCE/name``
    source: str  # name of the source in the pipeline
    data_source: str  # column of the released schema; the source, unless the record has this column
    ability: Ability
    problem: str  # bare statement, for dedup, decontamination and judges
    prompt: str  # last turn for the model: the statement in its template
    references: tuple[str, ...]  # accepted answers; for code one JSON text of the tests
    solutions: tuple[str, ...] = ()  # worked solutions or reference programs, best first
    index: int = 0  # number of the record in its source
    level: int | None = None  # difficulty level of the source
    where: str = ""  # place of the record, for messages
    difficulty: Mapping[str, int] = field(default_factory=dict[str, int])  # failures of 16 by model, as released
    notes: Mapping[str, Any] = field(default_factory=dict[str, Any])  # notes of the source and of steps
    context: tuple[Message, ...] = ()  # turns before the prompt, usually none

    def as_problem(self) -> Problem:
        """Return the problem as training and evaluation use it."""
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
    """Return the entry as a row of ``SCHEMA``."""
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
        "notes": json.dumps(dict(entry.notes), ensure_ascii=False, sort_keys=True, default=str)
        if entry.notes
        else None,
    }


def entry_of(row: Mapping[str, Any]) -> Entry:
    """Return the entry of a row of ``SCHEMA``."""
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


def statement_of(row: Mapping[str, Any]) -> str:
    """Return what a row of ``SCHEMA`` asks: earlier turns of its conversation, without a system message, and the
    statement. Only columns ``prompt`` and ``problem`` are read.
    """
    earlier = [turn["content"] for turn in row["prompt"][:-1] if turn["role"] != "system"]
    return "\n\n".join([*earlier, row["problem"]])


def is_entry(record: Mapping[str, Any]) -> bool:
    """Return whether a record is a row of ``SCHEMA``, the output of another run."""
    return all(name in record for name in SCHEMA.names)


def table_of(entries: Sequence[Entry]) -> pa.Table:
    """Return the entries as a table of ``SCHEMA``."""
    return pa.Table.from_pylist([row_of(entry) for entry in entries], schema=SCHEMA)


def entries_of(table: pa.Table) -> list[Entry]:
    """Return the entries of a table of ``SCHEMA``."""
    return [entry_of(row) for row in table.select(SCHEMA.names).to_pylist()]


@dataclass(frozen=True, slots=True)
class Document:
    """A problem as dedup and decontamination compare it.

    Example:
        >>> Document("gsm8k-0", "Ann has 3 apples. How many are left?", (1.0, 36.0)).id
        'gsm8k-0'
    """

    id: str  # unique among the documents of a call
    text: str  # statement
    # how well specified the problem is: the copy with the larger tuple is kept, the earlier one of equals
    quality: tuple[float, ...] = ()
