"""Reward functions for TRL: ``GRPOTrainer(reward_funcs=reward_function("maths", reference="answer"), ...)``."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Sequence
from typing import Any

from magicrl_verifiers.batch import usable_cores
from magicrl_verifiers.records import Extract, JudgeOptions, Outcome, Problem, Reasoning
from magicrl_verifiers.service import VerifierPool


def reward_function(
    verifier: str = "maths",
    *,
    reference: str = "answer",
    reasoning: Reasoning = "auto",
    extract: Extract = "box",
    time_limit: float = 10.0,
    workers: int | None = None,
) -> Callable[..., list[float | None]]:
    """Return a reward function for TRL's GRPO, RLOO and online trainers.

    A completion earns 1 if it is correct and 0 if it is wrong. One that could not be judged (an unreadable reference,
    a lost worker) gets None, which TRL leaves out. All completions of a batch are judged in parallel.

    Args:
        verifier: ``maths``, ``code``, ``exact`` or a reward as ``file.py:function``.
        reference: column of the data set with the reference answer: a string, a list of them, or for ``code`` the
            tests as JSON text or a dictionary.
        reasoning: what an unfinished ``<think>`` means (`JudgeOptions`).
        extract: ``box``: only a boxed answer counts; ``lenient``: an answer without a box counts, too.
        time_limit: CPU seconds of one response (for ``code`` of one test).
        workers: worker processes; default: the cores this process may use.

    Raises:
        ValueError: unknown verifier; when called, a data set without the column.
    """
    options = JudgeOptions(reasoning=reasoning, extract=extract)
    pool = VerifierPool(options=options, time_limit=time_limit, workers=workers or usable_cores())
    pool.warm_up([verifier])
    atexit.register(pool.close)

    def verified(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if reference not in columns:
            raise ValueError(
                f"the data set has no column {reference!r} with the reference answers; name it: reference="
            )
        given: Sequence[Any] = columns[reference]
        tickets = [
            # of a conversation the last message
            pool.submit(
                _problem(verifier, one),
                [completion if isinstance(completion, str) else str(completion[-1]["content"])],
            )
            for one, completion in zip(given, completions, strict=True)
        ]
        verdicts = [pool.result(ticket)[0] for ticket in tickets]
        return [None if verdict.outcome is Outcome.NOT_JUDGED else verdict.reward for verdict in verdicts]

    verified.__name__ = f"{verifier.rpartition(':')[2]}_reward"  # TRL names the metric by it
    return verified


def _problem(verifier: str, given: Any) -> Problem:
    many = isinstance(given, Sequence) and not isinstance(given, str)
    references = [one if isinstance(one, str) else json.dumps(one) for one in (given if many else [given])]
    return Problem(id="trl", prompt="", references=tuple(references), verifier=verifier, source="trl")
