"""The recipe's ``[verifier]``: how answers are judged, and the served model that may judge them."""

from __future__ import annotations

from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from magicrl.config.paths import FilePath
from magicrl.config.section import Section


class JudgeConfig(Section):
    """The model that the reward ``judge`` asks, behind an OpenAI-compatible server (docs/verifiers.md)."""

    base_url: str
    """Of the server, as ``http://localhost:8000/v1``."""
    model: str
    """The name the server knows the model by."""
    endpoint: Literal["chat", "classify", "pooling"] = "chat"
    """``chat``: a language model that replies to ``prompt``; ``classify``, ``pooling``: a reward model in vLLM, which
    reads the conversation and gives the number itself."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; the key itself stands in no recipe."""
    prompt: str | None = None
    """Text with ``{response}``, and ``{problem}`` and ``{gold}`` where they are wanted; default: a rubric for right and
    wrong. ``{response}`` becomes the response between marks that it cannot know."""
    read: Literal["score", "boxed", "yes_no", "json"] = "score"
    """Where the reply says its score: a last line ``Score: 0.5``, ``\\boxed{}`` in the last line, a last line of yes or
    no, or the field ``score`` of its one JSON object."""
    lowest: float = 0.0
    """With ``chat`` the least score that the judge may give; the reward is 0 there. A reward model's is as it comes."""
    highest: float = 1.0
    """The greatest score; the reward is 1 there, and what lies outside of both is unreadable."""
    right_from: float = 1.0
    """Least reward of a right answer, for accuracy, pass@k and the filters."""
    temperature: float = Field(default=0.0, ge=0)
    """Of the judge's reply."""
    max_tokens: int = Field(default=1024, ge=1)
    """Of the judge's reply."""
    unreadable_attempts: int = Field(default=2, ge=1)
    """Times it is asked where its reply cannot be read; with temperature 0 once."""
    concurrency: int = Field(default=16, ge=1)
    """Most requests under way."""
    attempts: int = Field(default=6, ge=1)
    """Tries of a request that the server fails (429, 5xx, no answer), with growing waits."""
    attempt_seconds: float = Field(default=120.0, gt=0)
    """Longest one try."""
    token_budget: int | None = Field(default=None, ge=1)
    """Tokens in and out that one process may spend; then nothing is asked, and responses are not judged."""
    cache: FilePath | None = None
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


class VerifierConfig(Section):
    """How answers are judged."""

    reasoning: Literal["auto", "required", "none"] = "auto"
    """What an unfinished ``<think>`` means (docs/verifiers.md)."""
    extract: Literal["lenient", "box"] = "box"
    """``box``: only a ``\\boxed{}`` is an answer; ``lenient``: also what the text ends with."""
    time_limit: float = Field(default=10.0, gt=0)
    """CPU seconds of one maths answer, or of a program in one test."""
    workers: int = Field(default=1, ge=1)
    """Processes that judge."""
    memory_limit_mb: int = Field(default=4096, ge=256)
    """Of each worker; what needs more is judged wrong."""
    stop_after_unjudged_steps: int = Field(default=3, ge=1)
    """Steps in a row of which no response could be judged (a server is down) before the run stops, to be resumed."""
    judge: JudgeConfig | None = None

    def deciding(self) -> VerifierConfig:
        """Without what only says how a judge is reached: nothing of it decides a score."""
        free = ("base_url", "key_variable", "concurrency", "attempts", "attempt_seconds", "token_budget", "cache")
        judge = None if self.judge is None else self.judge.model_copy(update=dict.fromkeys(free))
        patience = VerifierConfig.model_fields["stop_after_unjudged_steps"].default
        return self.model_copy(update={"judge": judge, "stop_after_unjudged_steps": patience})
