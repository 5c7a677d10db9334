"""A custom benchmark: a function that yields problems, or dicts as a data source does.

magicrl eval --model MODEL --benchmark benchmark.py:problems --output runs/eval/roots
"""

from __future__ import annotations

from collections.abc import Iterator

from magicrl.records import Problem


def problems() -> Iterator[Problem]:
    """Yield square roots of perfect squares."""
    for root in range(2, 22):
        yield Problem(
            id=f"root-{root * root}",
            prompt=f"What is the square root of {root * root}? End with the answer in \\boxed{{}}.",
            references=(str(root),),
            verifier="maths",
            source="roots",
            level=len(str(root)),
        )
