"""Recipe table ``[verifier]``: how responses are verified, and the served model of the reward ``judge``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from magicrl.config.errors import RecipeError
from magicrl.config.paths import FilePath
from magicrl.config.section import Section
from magicrl_verifiers.judge_settings import NO_JUDGE, JudgeSettings

if TYPE_CHECKING:
    from magicrl_verifiers.service import VerifierPool


JUDGE_ACCESS = ("base_url", "key_variable", "concurrency", "attempts", "attempt_seconds", "token_budget", "cache")
"""Settings of a judge that change no score."""


class JudgeConfig(JudgeSettings, Section):
    """Model of the reward ``judge``: an LLM judge or a reward model behind an OpenAI-compatible server
    (docs/reference/maths-verifier.md)."""

    cache: FilePath | None = None
    """Folder in which scores are cached. Default: ``magicrl/judge`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""


class VerifierConfig(Section):
    """How responses are verified, and the limits of the verifier processes."""

    reasoning: Literal["auto", "required", "none"] = "auto"
    """How ``<think>`` tags are read. ``auto``: unclosed reasoning has no answer; without tags the whole text counts.
    ``required``: no ``</think>``, no answer. ``none``: tags are ignored (docs/reference/maths-verifier.md)."""
    extract: Literal["lenient", "box"] = "box"
    r"""Where the answer is. ``box``: only in ``\boxed{}``. ``lenient``: without a box, also in the statement that ends
    the text."""
    time_limit: float = Field(default=10.0, gt=0)
    """CPU seconds per maths answer, or per program and test."""
    workers: int = Field(default=1, ge=1)
    """Number of verifier processes."""
    memory_limit_mb: int = Field(default=4096, ge=256)
    """Memory limit of each process in MiB. An answer that needs more is wrong."""
    stop_after_unjudged_steps: int = Field(default=3, ge=1)
    """Number of consecutive training steps in which no response could be judged (for example because a server is down)
    after which the run stops. It can be resumed."""
    judge: JudgeConfig | None = None

    def deciding(self) -> VerifierConfig:
        """Return the settings that can change a score, without how a judge is reached."""
        judge = None if self.judge is None else self.judge.model_copy(update=dict.fromkeys(JUDGE_ACCESS))
        patience = VerifierConfig.model_fields["stop_after_unjudged_steps"].default
        return self.model_copy(update={"judge": judge, "stop_after_unjudged_steps": patience})

    def needed_judge(self) -> JudgeConfig:
        """Return the settings of the reward ``judge``.

        Raises:
            RecipeError: The recipe has none.
        """
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
