"""The maths verifier against labelled pairs from real test suites: errors may fall, not rise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from magicrl.verifiers.base import JudgeOptions
from magicrl.verifiers.maths.judge import MathsVerifier

# Measured with Math-Verify 0.9.0 on the 571 development pairs: 1 false positive, 31 false negatives
# (10 of them outside the deliberately hard part), 11 s of CPU.
MOST_FALSE_POSITIVES = 0
MOST_FALSE_NEGATIVES = 10


def test_errors_on_the_labelled_pairs(shared_data: Path) -> None:
    verifier = MathsVerifier(JudgeOptions(reasoning="auto", extract="lenient"))
    wrong: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    with (shared_data / "math" / "labelled_dev.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            verdict = verifier.judge(_golds(row), "<think>Let me see.</think>\n" + row["response"])
            if verdict.correct != row["label"]:
                wrong[verdict.correct].append((row["gold"], row["response"][-60:]))
    assert len(wrong[True]) <= MOST_FALSE_POSITIVES, wrong[True]
    assert len(wrong[False]) <= MOST_FALSE_NEGATIVES, wrong[False]


def _golds(row: dict[str, Any]) -> list[str]:
    return [row["gold"]] if isinstance(row["gold"], str) else row["gold"]
