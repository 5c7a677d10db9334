"""One answer or one program at a time, judged in worker processes that stay for further calls."""

from __future__ import annotations

import atexit
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from magicrl_verifiers.code.judge import CodeOptions, CodePool, CodeVerdict
from magicrl_verifiers.code.sandbox import Limits
from magicrl_verifiers.records import Extract, JudgeOptions, Problem, Reasoning, Verdict
from magicrl_verifiers.service import VerifierPool


@functools.cache
def _maths_pool(reasoning: Reasoning, extract: Extract, time_limit: float) -> VerifierPool:
    pool = VerifierPool(options=JudgeOptions(reasoning=reasoning, extract=extract), time_limit=time_limit)
    atexit.register(pool.close)
    return pool


@functools.cache
def _code_pool(reasoning: Reasoning, time_limit: float, memory_limit_mb: int) -> CodePool:
    limits = Limits(cpu_seconds=time_limit, memory_mb=memory_limit_mb)
    pool = CodePool(CodeOptions(limits=limits, judge=JudgeOptions(reasoning=reasoning)))
    atexit.register(pool.close)
    return pool


def verify_maths(
    reference: str | Sequence[str],
    response: str,
    *,
    reasoning: Reasoning = "auto",
    extract: Extract = "lenient",
    time_limit: float = 10.0,
) -> Verdict:
    r"""Return whether a response gives the reference answer.

    The response is judged in a worker process, which is killed at its limit. Safe to call from several threads. For
    many responses `VerifierPool` or ``magicrl-verify math`` are faster: they keep several workers busy.

    Args:
        reference: the reference answer, or several of which any counts.
        response: what the model wrote, reasoning included.
        reasoning: what an unfinished ``<think>`` means (`JudgeOptions`).
        extract: ``box``: only a ``\boxed{}`` counts; ``lenient``: an answer without a box counts, too.
        time_limit: CPU seconds.

    Raises:
        ValueError: no reference.
        RuntimeError: no worker can be started on this machine.

    Example:
        >>> verify_maths("1/2", r"It is \boxed{0.5}.").correct
        True
    """
    references = (reference,) if isinstance(reference, str) else tuple(reference)
    problem = Problem(id="direct", prompt="", references=references, verifier="maths", source="direct")
    (verdict,) = _maths_pool(reasoning, extract, time_limit).judge(problem, [response])
    return verdict


def verify_code(
    tests: Mapping[str, Any],
    program: str,
    *,
    response: bool = False,
    reasoning: Reasoning = "auto",
    time_limit: float = 10.0,
    memory_limit_mb: int = 4096,
) -> CodeVerdict:
    """Return whether a program passes its tests, run in a sandbox (docs/code-verifier.md).

    Args:
        tests: ``{"inputs", "outputs", "fn_name"?}``, ``{"entry_point", "import_prefix", "test_code"}`` or
            ``{"assert_case"}``.
        program: Python source; with ``response`` a model's text, whose last code block is the program.
        response: whether ``program`` is a model's text.
        reasoning: what an unfinished ``<think>`` in a response means (`JudgeOptions`).
        time_limit: CPU seconds of one test.
        memory_limit_mb: MiB of one test.

    Raises:
        WorkerRefusal: this machine cannot isolate programs; says why.

    Example:
        >>> verify_code({"inputs": ["3"], "outputs": ["6"]}, "print(2 * int(input()))").correct
        True
    """
    problem = Problem(id="direct", prompt="", references=(json.dumps(tests),), verifier="code", source="direct")
    pool = _code_pool(reasoning, time_limit, memory_limit_mb)
    (verdict,) = pool.result(pool.submit(problem, [program], bare=not response))
    assert isinstance(verdict, CodeVerdict)
    return verdict
