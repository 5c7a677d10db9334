"""Marks of tests that need magicrl's CPU kernels."""

from __future__ import annotations

import pytest

from magicrl.models import cpu_kernels

# every set of instructions of the kernels that this processor has
sets = [
    names
    for names in cpu_kernels._SETS
    if cpu_kernels.missing() is None and cpu_kernels.processor_flags().issuperset(names)
]
# Kernels that do not compile are no reason to skip a test of them.
_why = cpu_kernels.missing() or ""
served = pytest.mark.skipif(_why.startswith(("there is no C++ compiler", "the processor lacks")), reason=_why)
