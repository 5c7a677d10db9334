"""Reward function for verl.

In verl's configuration::

    reward.custom_reward_function.path=pkg://magicrl_verifiers.adapters.verl
    reward.custom_reward_function.name=compute_score
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from magicrl_verifiers.batch import verify_code, verify_maths
from magicrl_verifiers.code.suite import is_assertion, tests_object
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
    if verifier == "code" or (verifier is None and _are_tests(ground_truth)):
        try:
            tests = tests_object(ground_truth)
        except ValueError as error:
            raise ValueError(f"ground_truth holds no tests of a program, got {ground_truth!r:.60}: {error}") from error
        verdict = verify_code(tests, solution_str, response=True, reasoning=reasoning, time_limit=time_limit)
        if verdict.decided_by == "suite":
            raise ValueError(f"ground_truth {ground_truth!r:.60}: {verdict.reason}")
    else:
        assert not isinstance(ground_truth, Mapping)
        options: dict[str, Any] = {"reasoning": reasoning, "extract": extract, "time_limit": time_limit}
        verdict = verify_maths(ground_truth, solution_str, **options)
    judged = verdict.outcome is not Outcome.NOT_JUDGED
    return {"score": verdict.reward, "acc": float(verdict.correct), "judged": float(judged)}


def _are_tests(ground_truth: Any) -> bool:
    """Return whether the tests of a program are given, and not an answer."""
    if isinstance(ground_truth, str):
        return is_assertion(ground_truth) or _LIKE_TESTS.match(ground_truth) is not None
    several = isinstance(ground_truth, Iterable) and any(map(is_assertion, ground_truth))
    return isinstance(ground_truth, Mapping) or several
