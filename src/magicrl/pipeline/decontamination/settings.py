"""Settings of decontamination. Importing it needs no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from magicrl.pipeline.decontamination.hits import HitKind
from magicrl.pipeline.similarity.settings import EmbeddingSettings


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
    kinds: tuple[HitKind, ...] = ("verbatim", "reformatted", "contained", "reworded", "renumbered", "neighbour")
    """Kinds that are reported."""
    drop: tuple[HitKind, ...] = ("verbatim", "reformatted", "contained", "reworded", "renumbered")
    """Kinds for which the training text is dropped; the others are reported only."""
