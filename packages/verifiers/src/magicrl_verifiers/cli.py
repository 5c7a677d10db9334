"""The command line: JSON Lines in, JSON Lines out. Heavy modules are imported inside the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter, Token
from rich.console import Console

from magicrl_verifiers.progress import ProgressLines
from magicrl_verifiers.records import JudgeOptions

if TYPE_CHECKING:
    from magicrl_verifiers.batch import BatchSummary


def _whole(_type: Any, tokens: Sequence[Token]) -> int:
    """Return a whole number. cyclopts itself rounds: 2.5 would be 2."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"give a whole number, got {tokens[0].value}") from None


Several = Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False)]
Whole = Annotated[int, Parameter(converter=_whole)]
"""Type of every option that is a whole number."""
app = App(name="magicrl-verify", help="Judge answers: JSON Lines in, JSON Lines out.", version_flags=["--version"])


@app.command
def math(
    *,
    input: Path,
    output: Path,
    reasoning: Literal["auto", "required", "none"] = "auto",
    extract: Literal["lenient", "box"] = "lenient",
    time_limit: float = 2.0,
    workers: Whole | None = None,
) -> int:
    """Judge mathematical answers: lines {"id"?, "reference", "response"} -> {"id", "correct", "status", ...}.

    Example: magicrl verify math --input answers.jsonl --output verdicts.jsonl

    Parameters
    ----------
    input
        JSON Lines; reference answer is a text or a list of accepted texts.
    output
        JSON Lines, one verdict a line, same order.
    reasoning
        auto: reasoning opened and never closed is no answer; required: no `</think>`, no answer; none: ignore tags.
    extract
        lenient also takes an answer without a box.
    time_limit
        Seconds of its worker's CPU time that one item may take before the worker is killed.
    workers
        Worker processes; default: the cores this process may use.
    """
    from magicrl_verifiers.batch import verify_file

    options = JudgeOptions(reasoning=reasoning, extract=extract)
    judge = partial(verify_file, options=options, time_limit=time_limit, workers=workers)
    return counted(judge, input, output)


@app.command(name="reward")
def custom_reward(
    name: str,
    /,
    *,
    input: Path,
    output: Path,
    reasoning: Literal["auto", "required", "none"] = "auto",
    extract: Literal["lenient", "box"] = "box",
    time_limit: float = 10.0,
    memory_limit_mb: Whole = 4096,
    workers: Whole | None = None,
) -> int:
    """Judge with a custom reward, as in training: lines {"prompt"?, "reference"?, "response", ...} -> {"score", ...}.

    Example: magicrl verify reward my_reward.py:score --input answers.jsonl --output scores.jsonl

    Parameters
    ----------
    name
        FILE.py:FUNCTION, MODULE:FUNCTION, the name of an installed package's, or a built-in one (maths, exact, code).
    input
        JSON Lines; reference answer is a text or a list of texts; further fields are the problem's extra.
    output
        JSON Lines, one verdict a line, same order.
    reasoning
        Of built-in ones: auto: reasoning opened and never closed is no answer; required: no `</think>`, no answer;
        none: ignore tags.
    extract
        Of built-in ones: box, as a recipe's verifier.extract; lenient also takes an answer without a box.
    time_limit
        CPU seconds of one isolated call, where the reward sets none.
    memory_limit_mb
        MiB of one isolated call, where the reward sets none.
    workers
        Worker processes of an isolated reward; default: the cores this process may use.
    """
    from magicrl_verifiers.batch import verify_file

    limits: dict[str, Any] = {"workers": workers, "time_limit": time_limit, "memory_limit_mb": memory_limit_mb}
    options = JudgeOptions(reasoning=reasoning, extract=extract)
    return counted(partial(verify_file, verifier=name, options=options, **limits), input, output, counts=_rewarded)


@app.command
def code(
    *,
    input: Path,
    output: Path,
    reasoning: Literal["auto", "required", "none"] = "auto",
    time_limit: float = 10.0,
    memory_limit_mb: Whole = 4096,
    total_limit: float | None = None,
    stop_at_failure: bool = False,
    explain: bool = False,
    preload: Several = None,
    tier: Literal["auto", "A", "B"] = "auto",
    workers: Whole | None = None,
) -> int:
    """Judge programs in a sandbox: lines {"id"?, "response" | "program", "tests"} -> {"id", "correct", "status", ...}.

    Example: magicrl verify code --input programs.jsonl --output verdicts.jsonl

    Parameters
    ----------
    input
        JSON Lines; tests as {"inputs", "outputs", "fn_name"?}, {"entry_point", "import_prefix", "test_code"} or
        {"assert_case"}; optional "checker", "time_limit", "memory_limit_mb", "float_tolerance".
    output
        JSON Lines, one verdict a line, same order.
    reasoning
        auto: reasoning opened and never closed is no answer; required: no `</think>`, no answer; none: ignore tags.
    time_limit
        CPU seconds of one test, unless the problem states its own.
    memory_limit_mb
        MiB of one test, unless the problem states its own.
    total_limit
        CPU seconds of all tests of a program together; default: 12 times the limit of one test.
    stop_at_failure
        Leave out the tests after the first that fails.
    explain
        Add "reason", a sentence, to every line.
    preload
        A further module that programs may import at once, e.g. sortedcontainers (repeatable).
    tier
        auto: private namespaces where the system allows them; B: demand them; A: do without.
    workers
        Worker processes; default: the cores this process may use.
    """
    from magicrl_verifiers.batch import usable_cores, verify_code_file
    from magicrl_verifiers.code.judge import CodeOptions
    from magicrl_verifiers.code.sandbox import Limits, SandboxOptions

    for name in preload or ():
        if find_spec(name.partition(".")[0]) is None:
            raise ValueError(f"--preload {name}: there is no module of that name; install it, or correct the name")
    options = CodeOptions(
        limits=Limits(cpu_seconds=time_limit, memory_mb=memory_limit_mb),
        total_seconds=total_limit,
        stop_at_failure=stop_at_failure,
        sandbox=SandboxOptions(tier=tier, preload=tuple(preload or ())),
        judge=JudgeOptions(reasoning=reasoning),
    )
    judge = partial(verify_code_file, options=options, workers=workers or usable_cores(), explain=explain)
    return counted(judge, input, output)


def _judged(summary: BatchSummary) -> str:
    mean = "" if summary.score is None else f", mean reward {summary.score:.3g}"
    judged = summary.correct + summary.wrong
    return f"{judged} judged, {summary.correct} correct{mean}, {summary.not_judged} not judged"


def _rewarded(summary: BatchSummary) -> str:
    same = "all rewards are equal, so nothing can be learned from these responses: " if summary.alike else ""
    return same + _judged(summary)


def counted(
    work: Callable[..., BatchSummary],
    input: Path,
    output: Path,
    done: str = "judged",
    counts: Callable[[BatchSummary], str] = _judged,
) -> int:
    """Do ``work`` on a file, with progress as lines ``done``, and print its counts; return the exit status 0.

    Raises:
        ValueError: a line could not be read, or no answer was judged.
    """
    console = Console(emoji=False)
    summary = work(input, output, tell=ProgressLines(console).lines(done))
    console.print(f"{counts(summary)} -> {output}")
    if summary.broken:
        count = f"{len(summary.broken)} of {summary.total} lines could not be read"
        raise ValueError(f"{count} (their verdict is broken_line; the others have theirs); {summary.broken[0]}")
    if summary.not_judged == summary.total:
        raise ValueError(f"none of {summary.total} answers was judged; 'reason' in {output} says why")
    return 0


@app.command
def checkers(*, input: Path, output: Path, time_limit: float = 10.0) -> int:
    """Examine checkers of code problems: lines {"id"?, "tests" with "checker", "right": [...], "wrong": [...]}.

    Example: magicrl verify checkers --input checkers.jsonl --output admitted.jsonl

    Parameters
    ----------
    input
        JSON Lines; programs known to be right, which the checker must accept, and wrong ones, which it must reject.
    output
        JSON Lines: {"id", "admitted", "rejected_right", "accepted_wrong"}.
    time_limit
        CPU seconds of one test, unless the problem states its own.
    """
    from magicrl_verifiers.batch import admission_file
    from magicrl_verifiers.code.judge import CodeOptions
    from magicrl_verifiers.code.sandbox import Limits

    work = partial(admission_file, options=CodeOptions(limits=Limits(cpu_seconds=time_limit)))
    return counted(work, input, output, "examined", lambda summary: f"{summary.correct} checkers admitted")


@app.command(name="disagreements")
def find_disagreements(*, input: Path, output: Path, time_limit: float = 10.0) -> int:
    """Find code problems that need a checker: lines {"id"?, "solutions": [...], "tests"} of correct solutions.

    Example: magicrl verify disagreements --input solved.jsonl --output needs_checker.jsonl

    Parameters
    ----------
    input
        JSON Lines; at least two programs a line, all known to be right.
    output
        JSON Lines: {"id", "needs_checker", "tests", "failed"}: tests on which the solutions disagree, and solutions
        that fail.
    time_limit
        CPU seconds of one test, unless the problem states its own.
    """
    from magicrl_verifiers.batch import disagreements_file
    from magicrl_verifiers.code.judge import CodeOptions
    from magicrl_verifiers.code.sandbox import Limits

    work = partial(disagreements_file, options=CodeOptions(limits=Limits(cpu_seconds=time_limit)))
    return counted(work, input, output, "examined", lambda summary: f"{summary.wrong} problems need a checker")


def main() -> None:
    """Entry point: exit 0 done, 1 failed; every error says what to do."""
    try:
        status = app(result_action="return_value")
    except (ValueError, RuntimeError, OSError) as error:
        Console(emoji=False, stderr=True, highlight=False).print(
            f"magicrl-verify: {error}", markup=False, soft_wrap=True
        )
        sys.exit(1)
    sys.exit(status or 0)
