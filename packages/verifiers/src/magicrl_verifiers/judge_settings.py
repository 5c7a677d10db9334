"""Settings of the reward ``judge``. They are in a module without an HTTP client, so that reading a recipe needs
none."""

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
    """Base URL of the server, for example ``http://localhost:8000/v1``."""
    model: str
    """Name of the model on the server."""
    endpoint: Literal["chat", "classify", "pooling"] = "chat"
    """``chat``: a language model that replies to ``prompt``. ``classify`` and ``pooling``: a reward model served by
    vLLM, which reads the conversation and returns the score."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the API key. The key itself must not be in a recipe."""
    prompt: str | None = None
    """Prompt of the judge. It must contain ``{response}``, which is inserted between marks that the response cannot
    know, and may contain ``{problem}`` and ``{reference}``. Default: a rubric for correct and wrong."""
    read: Literal["score", "boxed", "yes_no", "json"] = "score"
    r"""Where the score is in the reply: in a last line ``Score: 0.5``, in ``\boxed{}`` in the last line, as a last line
    of yes or no, or in the field ``score`` of its only JSON object."""
    lowest: float = 0.0
    """Lowest score of the judge, which becomes reward 0 (with ``endpoint = "chat"``). The score of a reward model is
    used as it is."""
    highest: float = 1.0
    """Highest score of the judge, which becomes reward 1. A score outside of ``lowest`` to ``highest`` is
    unreadable."""
    right_from: float = 1.0
    """Minimum reward of a correct response, for accuracy, pass@k and the filters."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the judge."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum number of tokens of the judge's reply."""
    unreadable_attempts: int = Field(default=2, ge=1)
    """Maximum number of requests for one response if the reply is unreadable. With temperature 0 there is one."""
    concurrency: int = Field(default=16, ge=1)
    """Maximum number of simultaneous requests."""
    attempts: int = Field(default=6, ge=1)
    """Maximum number of attempts if the server fails (429, 5xx, no answer), with growing waits."""
    attempt_seconds: float = Field(default=120.0, gt=0)
    """Timeout of one attempt in seconds."""
    token_budget: int | None = Field(default=None, ge=1)
    """Maximum number of input and output tokens that one process may spend. Afterwards no request is sent, and
    responses are not judged."""
    cache: str | None = None
    """Folder in which scores are cached. Default: ``magicrl/judge`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Additional fields of every request, as the server defines them."""

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
