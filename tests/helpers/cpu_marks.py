"""Marks of tests that need magicrl's CPU kernels."""

from __future__ import annotations

import pytest

from magicrl.models import cpu_kernels

# every set of instructions of the kernels that this processor has
sets = [
    names
    for names in cpu_kernels._SETS
    if cpu_kernels.missing() is None and cpu_kernels._processor_flags().issuperset(names)
]
served = pytest.mark.skipif(cpu_kernels.missing() is not None, reason=str(cpu_kernels.missing()))
