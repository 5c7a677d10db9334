"""Reward that reads a number from a sentence: the baseline of the showcase's SVAMP runs, which learn to write one only.

magicrl eval --model smollm2 --benchmark svamp=SVAMP.json --temperature 0 --max-tokens 64
    --reward studies/written_number.py:first_or_last
"""

from __future__ import annotations

import re

from magicrl.records import Problem


def first_or_last(problem: Problem, response: str) -> float:
    """Return 1 if the first or the last number of the response is the reference answer, else 0.

    Example:
        >>> first_or_last(Problem(id="", prompt="", references=("1200",), verifier="exact", source=""), "It is $1,200.")
        1.0
    """
    numbers = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", response)]
    return float(bool(numbers) and float(problem.references[0]) in (numbers[0], numbers[-1]))
