"""What counts as a test problem found again: kinds of hits, a hit, and the settings. Importing it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from magicrl.pipeline.similarity.settings import EmbeddingSettings

HitKind = Literal["verbatim", "reformatted", "contained", "renamed", "reworded", "renumbered", "neighbour"]
"""``verbatim``: equal but for case, whitespace and typography (one ``prompt_key``); ``reformatted``: equal once
LaTeX, Unicode and plain notation are brought to one form; ``contained``: the test problem stands inside a longer text,
whatever its variables are called; ``renamed``: equal but for the names of variables and people and tokens of a chat
template; ``reworded``: most
n-grams or the embedding agree, and so do the numbers; ``renumbered``: the same with other numbers; ``neighbour``: near
in the embedding space alone, with numbers or formulas that differ in part."""


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


class DecontaminationSettings(BaseModel):
    """What counts as a test problem found again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ngram_words: int = Field(default=8, ge=2)
    """Length of an n-gram, in words of the canonical text; a shorter text is one n-gram."""
    overlap: float = Field(default=0.5, gt=0, le=1)
    """Least share of a test problem's n-grams, rare ones weighing more, that a text holds."""
    use_embedding: bool = True
    """Whether embedding neighbours are looked for too."""
    embedding_similarity: float = Field(default=0.75, gt=0, le=1)
    """Least cosine."""
    embedder: EmbeddingSettings = Field(default_factory=EmbeddingSettings)
    least_words: int = Field(default=7, ge=1)
    """Words that a test problem must have besides numbers and symbols for ``renumbered``, ``neighbour`` and
    ``contained``: *Compute 3 + 5* with other numbers is no repetition."""
    kinds: tuple[HitKind, ...] = (
        *("verbatim", "reformatted", "contained", "renamed", "reworded", "renumbered", "neighbour"),
    )
    """Kinds that are reported."""
    drop: tuple[HitKind, ...] = ("verbatim", "reformatted", "contained", "renamed", "reworded", "renumbered")
    """Kinds for which the training text is dropped; the others are reported only."""
