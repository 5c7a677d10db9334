"""Settings of the reward ``judge``; apart from what asks the server, so that a recipe is read without it."""

from __future__ import annotations

from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

NO_JUDGE = (
    "the reward 'judge' asks a served model: state its base_url and model in a table [verifier.judge] "
    "(docs/reference/maths-verifier.md)"
)


class JudgeSettings(BaseModel):
    """The model that the reward ``judge`` asks, behind an OpenAI-compatible server
    (docs/reference/maths-verifier.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str
    """Address of the server, as ``http://localhost:8000/v1``."""
    model: str
    """The name the server knows the model by."""
    endpoint: Literal["chat", "classify", "pooling"] = "chat"
    """``chat``: a language model that replies to ``prompt``; ``classify``, ``pooling``: a reward model in vLLM, which
    reads the conversation and gives the number itself."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; the key itself must not be in a recipe."""
    prompt: str | None = None
    """Text with ``{response}``, and ``{problem}`` and ``{reference}`` where they are wanted; default: a rubric for
    right and wrong. ``{response}`` becomes the response between marks that it cannot know."""
    read: Literal["score", "boxed", "yes_no", "json"] = "score"
    """Where the reply says its score: a last line ``Score: 0.5``, ``\\boxed{}`` in the last line, a last line of yes or
    no, or the field ``score`` of its one JSON object."""
    lowest: float = 0.0
    """With ``chat`` the least score that the judge may give; the reward is 0 there. A reward model's is as it comes."""
    highest: float = 1.0
    """The greatest score; the reward is 1 there, and a score outside of both is unreadable."""
    right_from: float = 1.0
    """Least reward of a right answer, for accuracy, pass@k and the filters."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the judge's reply."""
    max_tokens: int = Field(default=1024, ge=1)
    """Of the judge's reply."""
    unreadable_attempts: int = Field(default=2, ge=1)
    """Requests where the reply cannot be read; with temperature 0 one."""
    concurrency: int = Field(default=16, ge=1)
    """Most requests under way."""
    attempts: int = Field(default=6, ge=1)
    """Tries of a request that the server fails (429, 5xx, no answer), with growing waits."""
    attempt_seconds: float = Field(default=120.0, gt=0)
    """Longest one try."""
    token_budget: int | None = Field(default=None, ge=1)
    """Tokens in and out that one process may spend; then no request is sent, and responses are not judged."""
    cache: str | None = None
    """Folder of the scores given so far; default: ``magicrl/judge`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of every request, as the server's own."""

    @model_validator(mode="after")
    def _prompt_and_range(self) -> Self:
        if self.prompt is not None and "{response}" not in self.prompt:
            raise ValueError("verifier.judge.prompt must hold {response}, where the response is to stand")
        if self.prompt is not None and self.endpoint != "chat":
            raise ValueError(
                f'verifier.judge.prompt is for endpoint = "chat"; "{self.endpoint}" reads the conversation'
            )
        if "@" in urlsplit(self.base_url).netloc:
            raise ValueError("verifier.judge.base_url holds a password, and recipes are kept: name its key_variable")
        if not self.lowest < self.highest:
            raise ValueError(f"verifier.judge.lowest = {self.lowest} must lie below highest = {self.highest}")
        return self
