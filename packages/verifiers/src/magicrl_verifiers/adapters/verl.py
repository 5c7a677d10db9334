"""Reward function for verl.

In verl's configuration::

    reward.custom_reward_function.path=pkg://magicrl_verifiers.adapters.verl
    reward.custom_reward_function.name=compute_score
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from magicrl_verifiers.batch import verify_code, verify_maths
from magicrl_verifiers.records import Extract, Outcome, Reasoning

_LIKE_TESTS = re.compile(r"""\s*(?:\{\s*["']\w+["']\s*:|\[\s*["'](?:.*["']\s*,\s*["'])?\s*assert )""", re.DOTALL)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | Sequence[str] | Mapping[str, Any],
    extra_info: Mapping[str, Any] | None = None,
    *,
    verifier: str | None = None,
    reasoning: Reasoning = "auto",
    extract: Extract = "box",
    time_limit: float = 10.0,
    **_: Any,
) -> dict[str, float]:
    """Return ``score``, ``acc`` and ``judged`` of one response, as verl's reward managers read them.

    verl has no reward for a response that could not be judged: its ``score`` is 0 and ``judged`` is 0.

    Args:
        data_source: verl's name of the data set; not read.
        solution_str: the response.
        ground_truth: the reference answer, or the tests of a program: a dictionary, a list of assertions, or its text
            in JSON or Python.
        extra_info: further fields of the row; not read.
        verifier: ``maths`` or ``code``; default: ``code`` where ``ground_truth`` holds tests, else ``maths``. Set it,
            and the arguments below, by ``reward.custom_reward_function.reward_kwargs``.
        reasoning: what an unfinished ``<think>`` means (`JudgeOptions`).
        extract: ``box``: only a boxed answer counts; ``lenient``: an answer without a box counts, too.
        time_limit: CPU seconds of one response (for code of one test).

    Raises:
        ValueError: an unknown verifier, code without tests, or tests that cannot be read.
    """
    if verifier not in (None, "maths", "code"):
        raise ValueError(f"verifier must be maths or code, got {verifier!r}")
    tests = None if verifier == "maths" else _tests(ground_truth)
    if tests is not None:
        verdict = verify_code(tests, solution_str, response=True, reasoning=reasoning, time_limit=time_limit)
    elif verifier == "code":
        raise ValueError(f"ground_truth holds no tests of a program, got {ground_truth!r:.60}")
    else:
        assert not isinstance(ground_truth, Mapping)
        options: dict[str, Any] = {"reasoning": reasoning, "extract": extract, "time_limit": time_limit}
        verdict = verify_maths(ground_truth, solution_str, **options)
    judged = verdict.outcome is not Outcome.NOT_JUDGED
    return {"score": verdict.reward, "acc": float(verdict.correct), "judged": float(judged)}


def _tests(ground_truth: Any) -> Mapping[str, Any] | None:
    """Return the tests of a program; None where it is an answer.

    Raises:
        ValueError: it begins like tests and is none.
    """
    found = ground_truth
    if isinstance(found, str) and _LIKE_TESTS.match(found):
        for read in (json.loads, ast.literal_eval):  # parquet files have Python's repr, too
            with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                found = read(ground_truth)
                break
        else:
            raise ValueError(f"ground_truth begins like tests, and is neither JSON nor Python: {found!r:.60}")
    if isinstance(found, str) and found.lstrip().startswith("assert "):
        found = [found]
    if isinstance(found, list | tuple):
        asserts = [str(one).lstrip().startswith("assert ") for one in found]
        if any(asserts):  # else one program, whose imports come first
            return {"assert_case": list(found)} if all(asserts) else {"test_code": "\n".join(map(str, found))}
    return found if isinstance(found, Mapping) else None
