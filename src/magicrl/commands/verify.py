"""``magicrl verify`` and ``magicrl.verify``: judge answers as training does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, overload

from cyclopts import App

from magicrl.commands.given import in_python
from magicrl.commands.options import Overrides
from magicrl.config.given import Frame, RewardFunction, reward_reference
from magicrl.config.loader import load_train_recipe
from magicrl.records import Verdict
from magicrl_verifiers.batch import usable_cores, verify_file, verify_rows
from magicrl_verifiers.cli import app as package_app
from magicrl_verifiers.cli import counted
from magicrl_verifiers.code.suite import text_of_tests
from magicrl_verifiers.records import Extract, JudgeOptions, Reasoning, renamed_argument

Reference = str | Sequence[str] | Mapping[str, Any]
"""The right answer, a list of accepted ones, or the tests of a program."""
_ITEMS_PER_WORKER = 16


@overload
def verify(
    response: str,
    reference: Reference | None = ...,
    *,
    prompt: str = ...,
    reward: str | RewardFunction = ...,
    reasoning: Reasoning = ...,
    extract: Extract = ...,
    time_limit: float = ...,
    memory_limit_mb: int = ...,
    workers: int | None = ...,
) -> Verdict: ...


@overload
def verify(
    response: Sequence[Mapping[str, Any]] | Frame,
    reference: None = ...,
    *,
    prompt: str = ...,
    reward: str | RewardFunction = ...,
    reasoning: Reasoning = ...,
    extract: Extract = ...,
    time_limit: float = ...,
    memory_limit_mb: int = ...,
    workers: int | None = ...,
) -> list[Verdict]: ...


@renamed_argument("gold", "reference")
@in_python()
def verify(
    response: str | Sequence[Mapping[str, Any]] | Frame,
    reference: Reference | None = None,
    *,
    prompt: str = "",
    reward: str | RewardFunction = "maths",
    reasoning: Reasoning = "auto",
    extract: Extract = "lenient",
    time_limit: float = 10.0,
    memory_limit_mb: int = 4096,
    workers: int | None = None,
) -> Verdict | list[Verdict]:
    r"""Judge one response, or many at once.

    Args:
        response: what a model wrote, reasoning included; or records (dicts or a data frame) with ``response``,
            ``reference`` and, if the reward reads them, ``prompt`` and further fields (the problem's ``extra``).
        reference: reference answer of one response.
        prompt: of one response.
        reward: ``maths``, ``exact``, ``code``, a name as ``file.py:function``, or a function
            ``(problem, response) -> score``, which is called in this process.
        reasoning: how the end of the reasoning is found (docs/reference/maths-verifier.md).
        extract: ``box``: only a box is an answer; ``lenient``: another counts, too.
        time_limit: CPU seconds of one response (of one test, for code).
        memory_limit_mb: MiB of one response.
        workers: processes that judge; default: as many as the answers keep busy. They start and end with the call: many
            answers in one call are judged faster than one by one.

    Raises:
        ValueError: an argument or a record is wrong; nothing was judged.
        RuntimeError: the verifier does not start on this machine.

    Example:
        >>> verify(r"The half, \boxed{0.5}.", "1/2").correct
        True
        >>> verify("a text", reward=lambda problem, response: len(response)).score
        6.0
    """
    one = isinstance(response, str)
    rows = [{"response": response, "reference": reference, "prompt": prompt}] if one else _records(response, reference)
    for row in rows:
        if row.get("reference") is None:
            row.pop("reference", None)
        elif isinstance(row["reference"], Mapping):
            row["reference"] = text_of_tests(row["reference"])
    try:
        verdicts = verify_rows(
            rows,
            verifier=reward_reference(reward),
            options=JudgeOptions(reasoning=reasoning, extract=extract),
            workers=workers or min(usable_cores(), 1 + len(rows) // _ITEMS_PER_WORKER),
            time_limit=time_limit,
            memory_limit_mb=memory_limit_mb,
        )
    except ValueError as error:
        # the fields of one response are arguments
        raise ValueError(re.sub(r"^record 0: (field '(\w+)')?", r"\2", str(error)) if one else str(error)) from error
    return verdicts[0] if one else verdicts


def _records(responses: Any, reference: Any) -> list[dict[str, Any]]:
    if hasattr(responses, "to_dict"):
        responses = responses.to_dict("records")
    if not isinstance(responses, Sequence) or not all(isinstance(row, Mapping) for row in cast(Any, responses)):
        raise ValueError(
            "response must be a text, or records with the fields response and reference (dicts or a data frame), got "
            f"{responses!r:.60} ({type(cast(Any, responses)).__name__})"
        )
    if reference is not None:
        raise ValueError("reference goes with one response; records have it as the field 'reference'")
    return [dict(row) for row in cast("Sequence[Mapping[str, Any]]", responses)]


verify_app = App(name="verify", help="Judge answers: JSON Lines in, JSON Lines out.")
for name in package_app:
    if not name.startswith("-"):
        verify_app.command(package_app[name], name=name)  # with name="*" a wrong name would list none of them


@verify_app.command
def judge(
    recipe: str,
    /,
    *,
    input: Path,
    output: Path,
    set_: Overrides = None,
) -> int:
    """Judge with a served model, as this recipe does: {"prompt", "reference"?, "response"} -> {"score", ...}.

    Example: magicrl verify judge recipe.toml --input answers.jsonl --output scores.jsonl

    Parameters
    ----------
    recipe
        A training recipe's file or name; its [verifier] table counts, with [verifier.judge] in it.
    input
        JSON Lines; reference answer is a text or a list of texts.
    output
        JSON Lines, one verdict a line, same order.
    set_
        Override a setting: --set verifier.judge.model=NAME (repeatable).
    """
    verifier = load_train_recipe(Path(recipe), set_ or []).verifier
    config = verifier.needed_judge()
    options = JudgeOptions(reasoning=verifier.reasoning, extract=verifier.extract)
    work = partial(verify_file, verifier="judge", options=options, judge=config, workers=config.concurrency)
    return counted(work, input, output)
