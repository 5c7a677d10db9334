"""Marks of tests that need magicrl's CPU kernels."""

from __future__ import annotations

import pytest
import torch

from magicrl.models import cpu_kernels

# every set of instructions of the kernels that this processor has
sets = [
    names
    for names in cpu_kernels._SETS
    if cpu_kernels.missing() is None and cpu_kernels._processor_flags().issuperset(names)
]
served = pytest.mark.skipif(cpu_kernels.missing() is not None, reason=str(cpu_kernels.missing()))
multiplied = pytest.mark.skipif(
    not cpu_kernels.can_multiply(torch.zeros(32, 32, dtype=torch.bfloat16)), reason="torch multiplies on this processor"
)
