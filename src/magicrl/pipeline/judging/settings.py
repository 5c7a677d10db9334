"""Settings of judging. Importing it needs no torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class JudgeSettings(BaseModel):
    """One judge: a model behind an OpenAI-compatible server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    """In reports and in the cache; default: the model's name."""
    base_url: str
    """As ``http://localhost:8000/v1``."""
    model: str
    """The name the server knows it by."""
    votes: int = Field(default=16, ge=1)
    """Times it is asked about each problem."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the key."""
    temperature: float = Field(default=1.0, ge=0)
    max_tokens: int = Field(default=1024, ge=16)
    """Most tokens of an answer."""
    structured: Literal["auto", "json_schema", "json_object", "none"] = "auto"
    """How the answer's form is asked for; ``auto`` tries a JSON schema first and takes what the server takes."""
    reasons_characters: int | None = Field(default=None, ge=20)
    """Longest reasons that the JSON schema allows: a small model that rambles never comes to its verdict without. Not
    every server's schemas know lengths."""
    concurrency: int = Field(default=16, ge=1)
    """Most requests in flight."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Highest rate of requests; default: no limit of our own."""
    attempts: int = Field(default=6, ge=1)
    """Tries of a request that the server fails (429, 5xx, no answer)."""
    attempt_seconds: float = Field(default=600.0, gt=0)
    """Longest one attempt."""
    unreadable_attempts: int = Field(default=3, ge=1)
    """Times a vote is asked for whose answer cannot be read."""
    dollars_per_million_input: float = Field(default=0.0, ge=0)
    dollars_per_million_output: float = Field(default=0.0, ge=0)
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of every request, as the server's own."""

    @model_validator(mode="after")
    def _votes_differ(self) -> Self:
        if self.temperature == 0 and self.votes > 1:
            raise ValueError(
                f"temperature = 0 gives one vote every time, and votes = {self.votes} are asked for; use votes = 1, "
                "or a temperature above 0"
            )
        return self

    @property
    def shown_name(self) -> str:
        """The name in reports."""
        return self.name or self.model


class JudgingSettings(BaseModel):
    """Who votes, and how many votes keep a problem."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    judges: tuple[JudgeSettings, ...] = Field(min_length=1)
    keep_votes: int | None = Field(default=None, ge=1)
    """Least number of valid votes for keeping; default: 9 of 32, and the same share (rounded up) of another number."""
    seed: int = Field(default=0, ge=0)
    undecided: Literal["keep", "drop"] = "keep"
    """What becomes of a problem of whose votes fewer than half could be read: nobody judged it."""
    instructions: str = ""
    """Of one's own, in place of the four criteria's wording."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [judge.shown_name for judge in self.judges]
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled is not None:
            raise ValueError(f"two judges are called {doubled!r}; give each a name of its own")
        if self.threshold > self.votes:
            raise ValueError(f"keep_votes is {self.threshold}, and there are only {self.votes} votes a problem")
        return self

    @property
    def votes(self) -> int:
        """Votes a problem, of all judges."""
        return sum(judge.votes for judge in self.judges)

    @property
    def threshold(self) -> int:
        """Least number of valid votes for keeping."""
        return self.keep_votes if self.keep_votes is not None else -(-9 * self.votes // 32)
