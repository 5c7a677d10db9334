"""How texts become vectors. Importing it needs no torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from magicrl.config.paths import located_folder


class EmbeddingSettings(BaseModel):
    """The embedder of a stage.

    ``hashed`` needs nothing: character and word n-grams, TF-IDF weighted, hashed and projected. It sees shared
    wording, not meaning. ``model`` is a Hugging Face model (folder or hub name) whose last hidden states are averaged.
    ``server`` is an OpenAI-compatible ``/embeddings`` endpoint.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["hashed", "model", "server"] = "hashed"
    model: str = ""
    """Folder or hub name; for a server the name it serves the model by."""
    base_url: str = ""
    """As ``http://localhost:8000/v1``."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the server's key."""
    dimensions: int = Field(default=256, ge=16)
    """Of ``hashed`` vectors; others have their model's."""
    batch: int = Field(default=64, ge=1)
    """Texts a forward pass or request."""
    concurrency: int = Field(default=8, ge=1)
    """Most requests in flight."""
    max_tokens: int = Field(default=512, ge=8)
    """Longest text of a ``model``; what is beyond it is not read."""
    seed: int = Field(default=0, ge=0)
    """Of the hashes and the projection."""

    @field_validator("model", mode="before")
    @classmethod
    def _located(cls, model: Any, info: ValidationInfo) -> Any:
        return located_folder(model, info) if info.data.get("kind") == "model" else model

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "model" and not self.model:
            raise ValueError('kind = "model" needs model: a Hugging Face folder or hub name')
        if self.kind == "server" and not self.base_url:
            raise ValueError('kind = "server" needs base_url, as http://localhost:8000/v1')
        return self
