"""A hit: a training text and the test problem it repeats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HitKind = Literal["verbatim", "reformatted", "contained", "reworded", "renumbered", "neighbour"]
"""``verbatim``: equal but for case and whitespace; ``reformatted``: equal once LaTeX, Unicode and plain notation are
brought to one form; ``contained``: the test problem stands inside a longer text; ``reworded``: most n-grams or the
embedding agree, and so do the numbers; ``renumbered``: the same with other numbers; ``neighbour``: near in the
embedding space alone, with numbers or formulas that differ in part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """One training text against one test problem.

    Attributes:
        document: id of the training text.
        reference: id of the test problem.
        reference_set: the set it is of.
        kind: how they agree.
        score: in 0..1, of the finding method: share of n-grams or cosine; 1 for equal texts.
        document_text, reference_text: both texts, whole.
    """

    document: str
    reference: str
    reference_set: str
    kind: HitKind
    score: float
    document_text: str
    reference_text: str
