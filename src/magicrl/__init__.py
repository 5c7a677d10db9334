"""Reinforcement-learning post-training of long chain-of-thought language models: the MAGIC recipe.

``import magicrl`` loads nothing else: each name below is imported at its first use (docs/guides/python.md).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import TYPE_CHECKING, Any

if "OMP_WAIT_POLICY" not in os.environ:
    # torch's threads (GNU OpenMP) wait for each other by spinning, which another program on one core makes many times
    # longer: then they should sleep early. Read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from magicrl.commands.eval import Evaluation, evaluate
    from magicrl.commands.explain import explain
    from magicrl.commands.init import init
    from magicrl.commands.plan import plan
    from magicrl.commands.preflight import preflight
    from magicrl.commands.run_folder import Run, load_run
    from magicrl.commands.train import train
    from magicrl.commands.training import Step, Training, start
    from magicrl.commands.verify import verify
    from magicrl.records import Problem, Verdict
    from magicrl_verifiers.rewards import reward

_HOMES = {
    "Evaluation": "magicrl.commands.eval",
    "Problem": "magicrl.records",
    "Run": "magicrl.commands.run_folder",
    "Step": "magicrl.commands.training",
    "Training": "magicrl.commands.training",
    "Verdict": "magicrl.records",
    "evaluate": "magicrl.commands.eval",
    "explain": "magicrl.commands.explain",
    "init": "magicrl.commands.init",
    "load_run": "magicrl.commands.run_folder",
    "plan": "magicrl.commands.plan",
    "preflight": "magicrl.commands.preflight",
    "reward": "magicrl_verifiers.rewards",
    "start": "magicrl.commands.training",
    "train": "magicrl.commands.train",
    "verify": "magicrl.commands.verify",
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
    "init",
    "load_run",
    "plan",
    "preflight",
    "reward",
    "start",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("magicrl")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
