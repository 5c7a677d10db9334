"""Settings of dedup. Importing it needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from magicrl.pipeline.similarity.settings import EmbeddingSettings

Stage = Literal["exact", "disguised", "near", "embedding"]


class NearSettings(BaseModel):
    """MinHash with locality-sensitive hashing; every candidate pair is then compared exactly."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    similarity: float = Field(default=0.6, gt=0, le=1)
    """Least Jaccard similarity of two texts' shingles."""
    shingle_characters: int = Field(default=5, ge=2)
    """Length of a shingle, in characters of the canonical text."""
    permutations: int = Field(default=128, ge=16)
    """Numbers of a signature."""
    rows: int = Field(default=4, ge=1)
    """Numbers a band: fewer find less similar pairs and cost more comparisons."""
    seed: int = Field(default=0, ge=0)


class EmbeddingStageSettings(BaseModel):
    """Neighbours in an embedding space."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    similarity: float = Field(default=0.7, gt=0, le=1)
    """Least cosine."""
    embedder: EmbeddingSettings = Field(default_factory=EmbeddingSettings)


class DedupSettings(BaseModel):
    """Which stages run, and what each calls a duplicate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stages: tuple[Stage, ...] = ("exact", "disguised", "near", "embedding")
    near: NearSettings = Field(default_factory=NearSettings)
    embedding: EmbeddingStageSettings = Field(default_factory=EmbeddingStageSettings)
    compare_numbers: bool = True
    """Texts that differ in a number, a formula or a word like *even* against *odd* are never near or embedding
    duplicates."""

    @field_validator("stages")
    @classmethod
    def _each_once(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        if len(set(stages)) != len(stages) or not stages:
            raise ValueError(f"stages must name at least one stage, each once, got {list(stages)}")
        return stages
