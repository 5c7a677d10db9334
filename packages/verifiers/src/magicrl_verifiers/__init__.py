"""Verifiers of answers, programs and rewards: a problem and a text in, a `Verdict` out. Imports no torch.

``import magicrl_verifiers`` loads nothing else: each name below is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magicrl_verifiers.batch import verify_code, verify_maths
    from magicrl_verifiers.records import JudgeOptions, Problem, Verdict, Verifier, VerifierService
    from magicrl_verifiers.rewards import reward
    from magicrl_verifiers.service import VerifierPool
    from magicrl_verifiers.workers import Ticket

_MODULES = {
    "batch": ("verify_code", "verify_maths"),
    "workers": ("Ticket",),
    "records": ("JudgeOptions", "Problem", "Verdict", "Verifier", "VerifierService"),
    "rewards": ("reward",),
    "service": ("VerifierPool",),
}

__all__ = [
    "JudgeOptions",
    "Problem",
    "Ticket",
    "Verdict",
    "Verifier",
    "VerifierPool",
    "VerifierService",
    "reward",
    "verify_code",
    "verify_maths",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
