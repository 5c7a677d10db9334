"""One sandbox for all tests of a module. Machines without the kernel's primitives skip these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from magicrl_verifiers.code.judge import CodeJudge, CodeOptions
from magicrl_verifiers.code.sandbox import Limits, SandboxError, SandboxOptions

LIMITS = Limits(cpu_seconds=2.0, memory_mb=512, output_mb=4, idle_seconds=1.0)


def judge_of(
    tier: str,
    *guards_off: str,
    stop_at_failure: bool = True,
    limits: Limits = LIMITS,
    total_seconds: float | None = None,
) -> CodeJudge:
    """Return a judge whose sandbox has started; skip the test if the kernel cannot do it."""
    options = CodeOptions(
        limits=limits,
        total_seconds=total_seconds,
        stop_at_failure=stop_at_failure,
        sandbox=SandboxOptions(tier=tier, guards_off=guards_off),
    )
    judge = CodeJudge(options)
    try:
        assert judge.sandbox.tier in ("A", "B")
    except SandboxError as error:
        pytest.skip(f"kernel lacks the primitive: {error}")
    return judge


@pytest.fixture(scope="module")
def judge() -> Iterator[CodeJudge]:
    with judge_of("auto", stop_at_failure=False) as made:
        yield made


@pytest.fixture(scope="module", params=["A", "B"])
def tiered(request: pytest.FixtureRequest) -> Iterator[CodeJudge]:
    """Parametrize tests with and without namespaces."""
    with judge_of(request.param) as made:
        yield made
