"""Reinforcement-learning post-training of long chain-of-thought language models: the MAGIC recipe.

``import magicrl`` loads nothing else: each name below is imported at its first use (docs/python.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magicrl.api.evaluating import Evaluation, evaluate
    from magicrl.api.explain import explain
    from magicrl.api.judging import verify
    from magicrl.api.planning import plan
    from magicrl.api.preflight import preflight
    from magicrl.api.runs import Run, load_run
    from magicrl.api.training import Step, Training, start, train
    from magicrl.records import Problem, Verdict
    from magicrl_verifiers.rewards import reward

_HOMES = {
    "Evaluation": "magicrl.api.evaluating",
    "Problem": "magicrl.records",
    "Run": "magicrl.api.runs",
    "Step": "magicrl.api.training",
    "Training": "magicrl.api.training",
    "Verdict": "magicrl.records",
    "evaluate": "magicrl.api.evaluating",
    "explain": "magicrl.api.explain",
    "load_run": "magicrl.api.runs",
    "plan": "magicrl.api.planning",
    "preflight": "magicrl.api.preflight",
    "reward": "magicrl_verifiers.rewards",
    "start": "magicrl.api.training",
    "train": "magicrl.api.training",
    "verify": "magicrl.api.judging",
}

__all__ = [
    "Evaluation",
    "Problem",
    "Run",
    "Step",
    "Training",
    "Verdict",
    "evaluate",
    "explain",
    "load_run",
    "plan",
    "preflight",
    "reward",
    "start",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
