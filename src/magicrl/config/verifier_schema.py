"""The recipe's ``[verifier]``: how answers are judged, and the served model that may judge them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from magicrl.config.errors import RecipeError
from magicrl.config.paths import FilePath
from magicrl.config.section import Section
from magicrl_verifiers.judge_settings import NO_JUDGE, JudgeSettings

if TYPE_CHECKING:
    from magicrl_verifiers.service import VerifierPool


class JudgeConfig(JudgeSettings, Section):
    """The model that the reward ``judge`` asks, behind an OpenAI-compatible server
    (docs/reference/maths-verifier.md)."""

    cache: FilePath | None = None
    """Folder of the scores given so far; default: ``magicrl/judge`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""


class VerifierConfig(Section):
    """How answers are judged."""

    reasoning: Literal["auto", "required", "none"] = "auto"
    """What an unfinished ``<think>`` means (docs/reference/maths-verifier.md)."""
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

    def needed_judge(self) -> JudgeConfig:
        """Return the settings of the reward ``judge``. Raises RecipeError where there are none."""
        if self.judge is None:
            raise RecipeError(NO_JUDGE, key="verifier.judge")
        return self.judge

    def pool(self) -> VerifierPool:
        """Return a pool of verifiers with these settings."""
        # here, so that reading a recipe loads neither the pool nor an HTTP client
        from magicrl_verifiers.records import JudgeOptions
        from magicrl_verifiers.service import VerifierPool

        return VerifierPool(
            options=JudgeOptions(reasoning=self.reasoning, extract=self.extract),
            time_limit=self.time_limit,
            workers=self.workers,
            memory_limit_mb=self.memory_limit_mb,
            judge=self.judge,
        )
