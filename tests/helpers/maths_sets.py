"""Test data of the maths verifier: labelled pairs, hostile answers and references under ../shared/data/math."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicrl_verifiers.extraction import last_box

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "math"
SETS = (
    "aime24/simple_aime24.jsonl", "aime25/simple_aime25.jsonl", "amc23/simple_amc23.jsonl",
    "deepmath_5k/math_deepmath_deal.jsonl", "math500/simple_math500.jsonl", "math_test/test.jsonl",
    "math_train/simple_math_train.jsonl", "olympiadbench/simple_olympiadbench.jsonl", "gsm8k/simple_gsm8k_test.jsonl",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A labelled (reference answer, response) pair. ``source`` is the repository that it comes from."""

    number: int
    references: tuple[str, ...]
    response: str
    label: bool
    source: str
    kind: str

    @property
    def hard(self) -> bool:
        """Return the pairs of HardVerify: positives that a rule-based verifier had rejected."""
        return "TinyV" in self.source


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())


def labelled(name: str = "labelled_dev.jsonl") -> list[Pair]:
    """Return the labelled pairs, each with reasoning before the answer, like a reasoning model's response."""
    found: list[Pair] = []
    for number, row in enumerate(_rows(DATA / name)):
        references = (row["gold"],) if isinstance(row["gold"], str) else tuple(row["gold"])
        source = row["source"].split(":")[0].split(" issue")[0]
        response = "<think>Let me see.</think>\n" + row["response"]
        found.append(
            Pair(
                number=number,
                references=references,
                response=response,
                label=row["label"],
                source=source,
                kind=row["kind"],
            )
        )
    return found


def hostile() -> list[Pair]:
    """Return the hostile answers."""
    found: list[Pair] = []
    for number, row in enumerate(_rows(DATA / "hostile_dev.jsonl")):
        text = row["response"] if "response" in row else "".join(part * times for part, times in row["response_parts"])
        found.append(
            Pair(
                number=number,
                references=(row["gold"],),
                response=text,
                label=row["label"],
                source="hostile",
                kind=row["why"],
            )
        )
    return found


def references() -> list[str]:
    """Return distinct reference answers of the problem sets, in the order of the files."""
    found: dict[str, None] = {}
    for name in SETS:
        for row in _rows(DATA / "sets" / name):
            answer = row.get("answer") or row.get("ground_truth") or last_box(str(row.get("solution", "")))
            if answer is not None and str(answer).strip():
                found[str(answer)] = None
    return list(found)
