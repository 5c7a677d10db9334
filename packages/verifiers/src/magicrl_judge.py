# pyright: reportMissingImports=false
"""Judge plugin for Prime Intellect's ``verifiers`` (v1 tasksets, 0.4), which takes top-level modules only.

In a task's configuration: ``judges = [{id = "magicrl_judge", answer_field = "answer"}]``.
"""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers.v1 as vf

from magicrl_verifiers.batch import verify_maths
from magicrl_verifiers.records import Extract, Outcome, Reasoning


class MathsJudgeConfig(vf.JudgeConfig):
    """Settings of `MathsJudge`."""

    id: str = "magicrl_judge"
    name: str = "maths"
    """Key of the reward."""
    answer_field: str = "answer"
    """Field of the task with the reference answer: a string or a list of them."""
    reasoning: Reasoning = "auto"
    """Meaning of an unfinished ``<think>``."""
    extract: Extract = "box"
    """``box``: only a boxed answer counts; ``lenient``: an answer without a box counts, too."""
    time_limit: float = 10.0
    """CPU seconds of one response."""


class MathsJudge(vf.Judge[bool, MathsJudgeConfig]):
    """Compares the last reply with the task's reference answer. It requests no model."""

    async def score(self, task: vf.TaskData, trace: Any) -> float:
        """Return 1 for a correct reply, 0 for a wrong one.

        Raises:
            ValueError: the task has no reference answer, or the reply could not be judged.
        """
        config = self.config
        reference = getattr(task, config.answer_field, None)
        if reference is None:
            raise ValueError(f"the task has no field {config.answer_field!r}; set answer_field")
        options: dict[str, Any] = {
            "reasoning": config.reasoning,
            "extract": config.extract,
            "time_limit": config.time_limit,
        }
        verdict = await asyncio.to_thread(verify_maths, reference, trace.last_reply, **options)
        if verdict.outcome is Outcome.NOT_JUDGED:
            raise ValueError(f"not judged: {verdict.status}: {verdict.reason}")
        return verdict.reward


__all__ = ["MathsJudge"]
