"""Reward functions for TRL: ``GRPOTrainer(reward_funcs=reward_function("maths", reference="answer"), ...)``."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from magicrl_verifiers.batch import number_as_text, usable_cores
from magicrl_verifiers.code.suite import text_of_tests
from magicrl_verifiers.records import Extract, JudgeOptions, Message, Outcome, Problem, Reasoning
from magicrl_verifiers.service import VerifierPool
from magicrl_verifiers.several import reward_names
from magicrl_verifiers.table import verifier_spec
from magicrl_verifiers.workers import Ticket


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
    a lost worker) gets None, which TRL leaves out, and so does one of a row without a reference. All completions of a
    batch are judged in parallel.

    Args:
        verifier: ``maths``, ``code``, ``exact`` or a reward as ``file.py:function``.
        reference: column of the data set with the reference answer: a string, a list of them, or for ``code`` the
            tests as JSON text, a dictionary or a list of assertions. A reward of yours finds all columns in
            ``problem.extra``, and may do without this one.
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

    spec = verifier_spec(verifier)

    def verified(
        completions: Sequence[Any], prompts: Sequence[Any] | None = None, **columns: Any
    ) -> list[float | None]:
        if reference not in columns and spec.needs_reference:
            raise ValueError(
                f"the data set has no column {reference!r} with the reference answers; name it: reference="
            )
        rows = {
            name: values
            for name, values in columns.items()
            if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == len(completions)
        }
        if reference in columns:  # also an array
            rows[reference] = list(columns[reference])
            if len(rows[reference]) != len(completions):
                raise ValueError(f"{reference} holds {len(rows[reference])} answers for {len(completions)} completions")
        tickets: list[Ticket | None] = []
        for place, completion in enumerate(completions):
            row = {name: values[place] for name, values in rows.items()}
            problem = _problem(verifier, "" if prompts is None else prompts[place], row.get(reference), row)
            # None is TRL's mark of a row that is another function's
            judged = problem.references or not spec.needs_reference
            text = completion if isinstance(completion, str) else _text(completion[-1].get("content"))
            tickets.append(pool.submit(problem, [text]) if judged else None)
        verdicts = [None if ticket is None else pool.result(ticket)[0] for ticket in tickets]
        return [None if one is None or one.outcome is Outcome.NOT_JUDGED else one.reward for one in verdicts]

    verified.__name__ = f"{verifier.rpartition(':')[2]}_reward"  # TRL names the metric by it
    return verified


def _messages(given: Any) -> tuple[Message, ...]:
    """Return the messages of a prompt, which TRL gives as text or as a conversation."""
    if isinstance(given, str):
        return (Message("user", given),)
    # a message that calls a tool has no content
    return tuple(Message(message["role"], _text(message.get("content"))) for message in given)


def _text(content: Any) -> str:
    if isinstance(content, list | tuple):  # parts, of which images have no text
        content = "".join(part.get("text") or "" for part in content)
    if not isinstance(content, str | None):
        raise TypeError(f"the content of a message must be text or a list of parts, got {content!r:.60}")
    return content or ""


def _problem(verifier: str, prompt: Any, given: Any, row: Mapping[str, Any]) -> Problem:
    """Return the problem of a row; without references if its reference is missing: None, NaN or empty."""
    if reward_names(verifier)[0] == "code" and isinstance(given, list | Mapping):
        given = text_of_tests(given)
    many = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    texts = [number_as_text(one) for one in many if one is not None and one == one]  # 51.0 as "51", as in files
    references = [one if isinstance(one, str) else json.dumps(one) for one in texts]
    *context, last = _messages(prompt)
    return Problem(
        id="trl",
        prompt=last.content,
        context=tuple(context),
        references=tuple(references),
        verifier=verifier,
        source="trl",
        extra=row,
    )
