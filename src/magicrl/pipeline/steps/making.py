"""Steps by their settings. A further step is a row of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from magicrl.pipeline.settings import (
    AnyStep,
    CleanStep,
    DecontaminateStep,
    DedupStep,
    DifficultyStep,
    JudgeStep,
    MixStep,
    PipelineConfig,
)
from magicrl.pipeline.steps.base import Step


def make_step(settings: AnyStep, config: PipelineConfig) -> Step:
    """The step of these settings. Heavy rooms are imported here, with the step that needs them."""
    return _STEPS[type(settings)](settings, config)


def _clean(settings: Any, config: PipelineConfig) -> Step:
    from magicrl.pipeline.steps.clean import Clean

    return Clean(settings)


def _dedup(settings: Any, config: PipelineConfig) -> Step:
    from magicrl.pipeline.steps.dedup import Dedup

    return Dedup(settings)


def _decontaminate(settings: Any, config: PipelineConfig) -> Step:
    from magicrl.pipeline.steps.decontaminate import Decontaminate

    return Decontaminate(settings)


def _difficulty(settings: Any, config: PipelineConfig) -> Step:
    from magicrl.pipeline.steps.difficulty import Difficulty

    return Difficulty(settings)


def _judge(settings: Any, config: PipelineConfig) -> Step:
    from magicrl.pipeline.steps.judge import Judge

    return Judge(settings)


def _mix(settings: Any, config: PipelineConfig) -> Step:
    from magicrl.pipeline.steps.mix import Mix

    return Mix(settings, config)


_STEPS: dict[type[Any], Callable[[Any, PipelineConfig], Step]] = {
    CleanStep: _clean,
    DedupStep: _dedup,
    DecontaminateStep: _decontaminate,
    DifficultyStep: _difficulty,
    JudgeStep: _judge,
    MixStep: _mix,
}
