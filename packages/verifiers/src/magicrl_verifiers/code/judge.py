"""Judges one program by the tests of one problem. The comparison happens here, outside of every sandbox.

A program that exhausts a limit has failed. A sandbox, test code or checker that fails is not the program's fault:
``infrastructure_error``, after a second try in fresh processes. A wrong program must not be able to cause that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter

from magicrl_verifiers.code import checkers, remote, values
from magicrl_verifiers.code.checkers import Checker
from magicrl_verifiers.code.sandbox import (
    Job,
    Limits,
    Observation,
    Program,
    Sandbox,
    SandboxLost,
    SandboxOptions,
    SandboxRefusal,
    check_lost,
    failure,
    waiting_limits,
)
from magicrl_verifiers.code.suite import AssertCase, CallCase, Case, StdinCase, Suite, SuiteError, parse_suite
from magicrl_verifiers.code.values import present_cpu
from magicrl_verifiers.extraction import answer_part
from magicrl_verifiers.isolated import lower_soft
from magicrl_verifiers.records import (
    OUTCOME_OF_STATUS,
    JudgeOptions,
    Problem,
    Reasoning,
    Verdict,
    check_seconds,
    require_references,
)
from magicrl_verifiers.workers import (
    Closing,
    Exhausted,
    Item,
    Refused,
    RequestHandler,
    Send,
    Ticket,
    WorkerPlan,
    WorkerPool,
    WorkerProtocol,
)

_FENCE = re.compile(r"^[ \t]{0,8}(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n]*$", re.MULTILINE)
_PYTHON = {"python", "python3", "py", "py3", "python2"}


def program_in(response: str, reasoning: Reasoning, entry: str = "") -> str | None:
    """Return the text of the last closed fenced block after the reasoning; one that is marked as Python goes first.

    A block that stays open is no block: the response was cut. Blocks of output or of shell commands that follow the
    program do not hide it, since they are not marked as Python. Neither do examples of its use, if there is a block
    that defines ``entry``, the function that the tests call. None if there is no block or the reasoning never ended.

    Example:
        >>> program_in("```python\\nprint(1)\\n```\\nIt prints\\n```\\n1\\n```", "auto")
        'print(1)\\n'
    """
    text = answer_part(response, reasoning)
    if text is None:
        return None
    best: str | None = None
    rank = (False, False)  # whether the best block defines the function, and is marked as Python
    defines = re.compile(rf"^[ \t]*(?:async )?(?:def|class) +{re.escape(entry)}\b|^{re.escape(entry)} *=", re.MULTILINE)
    opened: re.Match[str] | None = None
    counted = quotes = 0  # triple quotes of the block, up to `counted`
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened, counted, quotes = fence, fence.end(), 0
            continue
        quotes += sum(text.count(mark, counted, fence.start()) for mark in ('"""', "'''"))
        counted = fence.end()
        if quotes % 2 and fence.start(1) - fence.start() > opened.start(1) - opened.start() + 3:
            continue  # in a docstring, and as in CommonMark too deep to end the block
        # as in CommonMark: the closing fence is of the same sign, no shorter, and says nothing
        if fence[1][0] == opened[1][0] and len(fence[1]) >= len(opened[1]) and not fence[2]:
            code = text[opened.end() + 1 : fence.start()]
            columns = opened.start(1) - opened.start()
            # The fence may be indented, e.g. in a list: each line loses as much, as in CommonMark. But only where the
            # first line is indented, which no program is: some models indent only the fence.
            if not columns or not code.strip("\r\n")[:1].isspace():
                block = code
            else:
                block = re.sub(rf"^[ \t]{{0,{columns}}}", "", code, flags=re.MULTILINE)
            found = (bool(entry and defines.search(block)), opened[2].lower() in _PYTHON)
            best, rank = (block, found) if best is None or found >= rank else (best, rank)
            opened = None
        elif fence[2].lower() in _PYTHON:
            opened, quotes = fence, 0  # a block that was never closed, and a new one
    return best


_VERDICTS = (0, 1, 2, 4, 7, 8)
"""testlib's exit statuses: right, wrong, bad form, trailing data, points (not full marks), too short; 3: it failed."""


class CheckerFailed(Exception):
    """The checker, not the answer, is at fault."""


class Referee:
    """A checker that is a function or a program. ``limits`` are those of the programs that it judges."""

    def __init__(self, sandbox: Sandbox, checker: Checker, limits: Limits) -> None:
        self._sandbox, self._checker, self._limits = sandbox, checker, limits
        self.program = None if checker.kind == "compiled" else Program(checker.text)
        self.seconds = 0.0
        self._broken = False
        """Whether the last run ended by a mistake of the checker's own code, such as an undefined name."""

    def by_function(self, arguments: list[Any]) -> bool:
        """Return the verdict of a checker function. If it raises, the expected answer decides whose fault that is."""
        said, reason = self._ask_function(arguments)
        if said is not None:
            return said
        given, output, answer = arguments
        # a verdict on the expected answer, whichever it is, shows that the checker works and could not read this output
        if answer is not None and output != answer and self._ask_function([given, answer, answer])[0] is not None:
            return False
        self._blame(answer, reason)
        return False

    def _blame(self, answer: Any, reason: str) -> None:
        """Raise `CheckerFailed` where the output cannot have caused a checker's failure."""
        if answer is not None:
            raise CheckerFailed(f"the checker failed on the expected output too: {reason}")
        # there is no expected answer to try: a wrong output must not be able to excuse itself
        if self._broken:
            raise CheckerFailed(f"the checker failed: {reason}")

    def _ask_function(self, arguments: list[Any]) -> tuple[bool | None, str]:
        seen = self._run("judge", {"args": json.dumps(arguments).encode("ascii")}, outputs=("result",))
        if seen.exit_code == 0 and seen.result in (b"yes", b"no"):
            return seen.result == b"yes", ""
        failed = failure(seen, self._limits)
        return None, "no verdict" if failed is None else failed[1]

    def by_program(self, given: bytes, output: bytes, answer: bytes | None) -> bool:
        """Return whether a checker program accepts the output, by testlib's contract for exit statuses."""
        code, reason = self._ask_program(given, output, answer or b"")
        if code in _VERDICTS:
            return code == 0
        reason = reason or f"exit status {code}"
        if code in (3, 126, 127):  # testlib's word that the checker itself failed, or it could not be started
            raise CheckerFailed(f"the checker failed: {reason}")
        if answer is not None and self._ask_program(given, answer, answer)[0] in _VERDICTS:
            return False  # it crashed on this output only
        self._blame(answer, reason)
        return False

    def _ask_program(self, given: bytes, output: bytes, answer: bytes) -> tuple[int | None, str]:
        channels = {"input": given, "output": output, "answer": answer}
        if self.program is None:
            channels["binary"] = Path(self._checker.text).read_bytes()  # its path does not exist inside
        seen = self._run("checker" if self.program else "execute", channels)
        return (seen.exit_code, seen.errors) if seen.killed is None else (None, f"ended: {seen.killed}")

    def _run(self, role: str, channels: Mapping[str, bytes], outputs: Sequence[str] = ()) -> Observation:
        job = Job(role=role, program=self.program, limits=self._limits, channels=channels, outputs=outputs)
        (seen,) = self._sandbox.run(job, trusted=True)
        self.seconds += seen.cpu_seconds
        check_lost(seen, self._limits)
        self._broken = seen.exit_code == values.EXIT_CHECKER_BROKEN
        return seen


_ATTEMPTS = 2
_MAX_REASON = 300
_MOST_AHEAD = 32
_MAX_CHECKED = 16 << 20
_LARGE = 1 << 20
"""Bytes of output that cannot fill the memory of the judge."""
_HEAVY = re.compile(r"\b(?:numpy|scipy|pandas)\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeVerdict(Verdict):
    """A verdict with its counts.

    Attributes:
        passed: tests passed.
        total: tests of the problem. Tests after a failure may not have run (see ``stop_at_failure``).
    """

    passed: int = 0
    total: int = 0


def code_verdict(
    status: str, reason: str = "", *, passed: int = 0, total: int = 0, seconds: float = 0.0, decided_by: str = "tests"
) -> CodeVerdict:
    """Return the verdict of this status. The outcome depends only on the status."""
    return CodeVerdict(
        outcome=OUTCOME_OF_STATUS[status],
        status=status,
        reason=reason[:_MAX_REASON],
        decided_by="extraction" if status == "no_code" else decided_by,
        seconds=seconds,
        passed=passed,
        total=total,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeOptions:
    """How programs are judged.

    Attributes:
        limits: limits of each test where the problem states none.
        total_seconds: CPU seconds of all tests of a program together; None: 12 times the limit of one test.
        stop_at_failure: leave out the tests after the first that fails.
        sandbox: how programs are confined.
        judge: how the program is found in a response.
    """

    limits: Limits = field(default_factory=Limits)
    total_seconds: float | None = None
    stop_at_failure: bool = True
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    judge: JudgeOptions = field(default_factory=JudgeOptions)

    def __post_init__(self) -> None:
        if self.total_seconds is not None:
            check_seconds("total_limit", self.total_seconds)


class CodeJudge(Closing):
    """Judges programs one after another in this thread. Closing it ends the sandbox's processes.

    Example:
        >>> from magicrl_verifiers.code.suite import parse_suite
        >>> suite = parse_suite({"inputs": ["2 3"], "outputs": ["5"]})
        >>> with CodeJudge() as judge:
        ...     judge.judge_program("a, b = map(int, input().split()); print(a + b)", suite).status
        'passed'
    """

    def __init__(self, options: CodeOptions | None = None) -> None:
        self._options = options or CodeOptions()
        self.sandbox = Sandbox(self._options.sandbox)

    def close(self) -> None:
        self.sandbox.close()

    def judge_response(self, response: str, suite: Suite) -> CodeVerdict:
        """Judge the program in a response (its last fenced block after the reasoning)."""
        tested = next((case.entry for case in suite.cases if not isinstance(case, StdinCase)), None) or ""
        program = program_in(response, self._options.judge.reasoning, tested.rpartition(".")[2])
        if program is None or not program.strip():
            reason = "no closed code block after the reasoning" if program is None else "the code block is empty"
            return code_verdict("no_code", reason, total=len(suite.cases))
        return self.judge_program(program, suite)

    def judge_program(self, source: str, suite: Suite) -> CodeVerdict:
        """Run the program on every test; never raises for what a program does."""
        try:
            checker = None if suite.checker is None else checkers.load_checker(suite.checker)
        except (SuiteError, OSError) as error:
            return code_verdict("infrastructure_error", str(error), total=len(suite.cases))
        with contextlib.closing(_Trial(self.sandbox, self._options, source, suite, checker)) as trial:
            status, reason = trial.run()
        return code_verdict(status, reason, passed=trial.passed, total=len(suite.cases), seconds=trial.seconds())

    def outputs(self, source: str, suite: Suite) -> list[bytes | None]:
        """Return the output or the result of a program on every test without a comparison; None where it fails."""
        with contextlib.closing(_Trial(self.sandbox, self._options, source, suite, None)) as trial:
            return [trial.output(case) for case in suite.cases]


class _Trial:
    """Runs one program on the tests of a problem."""

    def __init__(
        self, sandbox: Sandbox, options: CodeOptions, source: str, suite: Suite, checker: Checker | None
    ) -> None:
        self._sandbox = sandbox
        self._suite = suite
        self._checker = checker
        self._stop = options.stop_at_failure
        self._limits = dataclasses.replace(
            options.limits,
            cpu_seconds=suite.time_limit or options.limits.cpu_seconds,
            memory_mb=suite.memory_limit_mb or options.limits.memory_mb,
        )
        total = options.total_seconds
        self._total = 12 * self._limits.cpu_seconds if total is None else total
        self._left = self._total
        self._waited = 0.0
        self._program = Program(source, prelude=suite.prelude)
        self._heavy = bool(_HEAVY.search(source) or (suite.prelude and _HEAVY.search(suite.prelude)))
        builtin = checker is None or checker.kind == "builtin"
        self._referee = None if checker is None or builtin else Referee(sandbox, checker, self._limits)
        self._ahead = 1
        """Tests that are run before the first of them is judged: one until one has passed, then ever more."""
        self.passed = 0

    def close(self) -> None:
        self._program.close()
        if self._referee is not None and self._referee.program is not None:
            self._referee.program.close()

    def seconds(self) -> float:
        """Return the CPU seconds of the program, of test code and of the checker."""
        return self._total - self._left + (self._referee.seconds if self._referee else 0.0)

    def run(self) -> tuple[str, str]:
        """Return the status of the first failure and its reason, or ``passed``."""
        cases = self._suite.cases
        first: tuple[str, str] | None = None
        at = 0
        while at < len(cases):
            if self._left <= self._waited:
                first = first or ("time_limit", f"test {at + 1}: the time for all tests together was used up")
                break
            # one request is for one role: calls, whole programs and test code go to different children
            _, alike = next(itertools.groupby(cases[at : at + self._ahead], key=type))
            for found in self._with_retries(list(alike)):
                at += 1
                if found is None:
                    self.passed += 1
                    continue
                first = first or (found[0], f"test {at}: {found[1]}")
                # every further test would end the same way
                if self._stop or found[0] in ("syntax_error", "infrastructure_error"):
                    return first
        return first or ("passed", "")

    def _with_retries(self, cases: Sequence[Case]) -> list[tuple[str, str] | None]:
        """Judge the first of these tests, at least one; None for a test that passes."""
        found: list[tuple[str, str] | None] = []
        lost = SandboxLost("")
        for _ in range(_ATTEMPTS):
            try:
                for one in self._judge(cases):
                    found.append(one)
                # a batch makes compiled form and descriptors once, but is wasted on a program that fails at its start
                self._ahead = min(4 * self._ahead, _MOST_AHEAD)
                return found
            except (SandboxLost, MemoryError) as error:
                lost = error if isinstance(error, SandboxLost) else SandboxLost("the judge ran out of memory")
                # fresh processes, and only the next test, so that a second loss is caused by this test
                self._sandbox.close()
                self._program.close()
                self._ahead, cases = 1, cases[:1]
                if found:
                    return found
            except CheckerFailed as error:
                return [*found, ("infrastructure_error", str(error))]
        # a program that kills itself looks the same, and must not escape its verdict
        if lost.killed:
            return [("runtime_error", "killed from outside twice")]
        return [("infrastructure_error", str(lost))]

    def _judge(self, cases: Sequence[Case]) -> Iterator[tuple[str, str] | None]:
        if isinstance(cases[0], AssertCase):
            yield self._assertions(cases[0])
            return  # the others come later
        # fewer observations than tests: the runs stop at the first failure or when the time is up
        for case, (seen, failed) in zip(cases, self._observe(cases), strict=False):
            assert not isinstance(case, AssertCase)
            yield failed or self._compared(case, seen)

    def _compared(self, case: StdinCase | CallCase, seen: Observation) -> tuple[str, str] | None:
        try:
            return self._stdin(case, seen) if isinstance(case, StdinCase) else self._call(case, seen)
        except MemoryError:
            wanted = case.output or "" if isinstance(case, StdinCase) else json.dumps(values.encode(case.expected))
            # the program is not to blame if it writes little, or about as much as was expected
            if len(seen.output or seen.result) <= max(_LARGE, 2 * len(wanted)):
                raise
            return "output_limit", "its output is too large to be compared"

    def _present_limits(self) -> Limits:
        return dataclasses.replace(self._limits, cpu_seconds=present_cpu(self._limits.cpu_seconds, self._left))

    def _observe(self, cases: Sequence[Case]) -> Iterator[tuple[Observation, tuple[str, str] | None]]:
        """Yield the observation and the failure of each of these tests; fewer if one fails or time is up."""
        role, output = ("program", "stdout") if isinstance(cases[0], StdinCase) else ("call", "result")
        job = Job(
            role=role,
            program=self._program,
            limits=self._limits,
            each=[_input(case) for case in cases],
            outputs=(output,),
            left=self._left,
            stop=self._stop,
        )
        for seen in self._sandbox.run(job, heavy=self._heavy):
            limits = self._present_limits()
            check_lost(seen, limits)
            self._count(seen, limits)
            yield seen, failure(seen, limits)

    def _count(self, seen: Observation, limits: Limits) -> None:
        """Take a run off the time of all tests: its CPU time, or the clock's where it only waited."""
        self._left -= seen.cpu_seconds
        self._waited += limits.cpu_seconds + limits.idle_seconds if seen.killed == "idle" else 0.0

    def output(self, case: Case) -> bytes | None:
        """Return the bare output of one test. Raises SandboxLost if the sandbox fails."""
        if isinstance(case, AssertCase):
            return None
        ((seen, failed),) = self._observe([case])
        if failed is not None:
            return None
        return seen.output if isinstance(case, StdinCase) else seen.result

    def _stdin(self, case: StdinCase, seen: Observation) -> tuple[str, str] | None:
        # a checker is Python and reads it all: a flood of output would use up its time, and look like its fault
        if self._checker is not None and len(seen.output) > max(_MAX_CHECKED, 4 * len(case.output or "")):
            return "output_limit", f"{len(seen.output)} bytes of output are more than a checker is asked to read"
        if self._accepts_text(case, seen.output):
            return None
        got = f"got {seen.output[:80].decode('utf-8', 'replace')!r}"
        return "wrong_answer", got if case.output is None else f"{got}, expected {case.output[:80]!r}"

    def _accepts_text(self, case: StdinCase, output: bytes) -> bool:
        answer = None if case.output is None else case.output.encode("utf-8", "surrogatepass")
        if self._referee is None or self._checker is None:
            assert answer is not None
            name = "tokens" if self._checker is None else self._checker.text
            return checkers.accepts_text(name, output, answer, self._suite.float_tolerance)
        if self._checker.kind == "function":
            return self._referee.by_function([case.input, output.decode("utf-8", "replace"), case.output])
        return self._referee.by_program(case.input.encode("utf-8", "surrogatepass"), output, answer)

    def _call(self, case: CallCase, seen: Observation) -> tuple[str, str] | None:
        try:
            message = json.loads(seen.result)
            accepted = self._accepts_value(case, message)
        except (SandboxLost, CheckerFailed, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - a program may write any form, also one that `values.encode` never makes
            return "wrong_answer", "the result is no plain data"
        return None if accepted else ("wrong_answer", f"{case.entry}: got {json.dumps(message['result']):.100}")

    def _accepts_value(self, case: CallCase, message: dict[str, Any]) -> bool:
        result, after = message["result"], message["after"]
        if self._suite.in_place is not None:
            if not isinstance(after, list):
                raise TypeError("the arguments are no plain data")
            result = after[self._suite.in_place]
        # a function that returns nothing had to change an argument in place
        elif result is None and not case.strict and case.expected is not None and isinstance(after, list):
            result = _changed(after, case)
        found = values.decode(result, remote.as_list)
        tolerance = self._suite.float_tolerance
        if self._referee is not None:
            given = values.encode(case.positional or case.named)
            return self._referee.by_function([given, result, values.encode(case.expected)])
        if self._checker is not None:
            return checkers.accepts_value(self._checker.text, found, case.expected, tolerance)
        if checkers.same_result(found, case.expected, tolerance, strict=case.strict):
            return True
        # the APPS convention: every expected result is wrapped in a list
        if case.strict or not self._suite.wrapped or not isinstance(case.expected, list):
            return False
        return checkers.same_result(values.decode(result, remote.as_list), case.expected[0], tolerance, strict=False)

    def _assertions(self, case: AssertCase) -> tuple[str, str] | None:
        """Run test code in a separate process. Its report counts, since nothing of the program runs there."""
        limits, heavy = self._present_limits(), self._heavy or bool(_HEAVY.search(case.code))
        details = {"entry": case.entry, "wanted": case.wanted, "check": case.check}
        with contextlib.closing(Program(case.code, prelude=self._suite.prelude)) as tests:
            theirs, ours = self._sandbox.run_pair(self._program, tests, limits, details, heavy=heavy)
        self._count(theirs, waiting_limits(limits))
        self._count(ours, waiting_limits(limits))
        called, _, said = ours.result.rpartition(b"\n")
        found: dict[str, Any] = json.loads(said) if ours.exit_code == 0 and ours.killed is None and said else {}
        outcome, reason = found.get("said"), found.get("reason", "")
        if outcome == "broken":
            raise CheckerFailed(f"the test code is at fault: {reason}")
        if outcome == "wrong":
            return "wrong_answer", reason
        # what ended the program says more than the tests' word that it is gone
        failed = failure(theirs, limits)
        if failed is not None and (outcome != "held" or failed[0] == "syntax_error"):
            return failed
        if outcome == "program":
            return "runtime_error", reason
        if outcome is None:
            failed = failure(ours, limits) or ("runtime_error", "the test code did not end as it should")
            # the program was not used yet, so it cannot have ended the tests
            if not called:
                raise CheckerFailed(f"the test code failed before it called the program: {failed[1]}")
            return failed
        return None


def _input(case: Case) -> Mapping[str, bytes]:
    """Return the input channels of a test."""
    assert not isinstance(case, AssertCase)
    if isinstance(case, StdinCase):
        return {"stdin": case.input.encode("utf-8", "surrogatepass")}
    named = {name: values.encode(item) for name, item in case.named.items()}
    positional = [values.encode(item) for item in case.positional]
    return {"args": json.dumps({"entry": case.entry, "a": positional, "k": named}).encode("ascii")}


def _changed(after: list[Any], case: CallCase) -> Any:
    """Return the first argument that a function without a result changed, else the first argument."""
    for now, before in zip(after, (*case.positional, *case.named.values()), strict=False):
        if now != values.encode(before):
            return now
    return after[0] if after else None


# --- Worker processes -------------------------------------------------------------------------------------------------
#
# A worker holds the tests, drives the fork servers and compares; nothing of a program runs in it. Its own limits are
# wide, because the programs have theirs in the sandbox: they only end a judge that a program's output keeps busy.

_JUDGE_CPU_SECONDS = 60.0
_STALL_FACTOR = 12.0
_STALL_SECONDS = 120.0
_TIME_LIMIT = re.compile(r'(?<!\\)"time_limit": ?(\d+\.?\d*)')


class CodeProtocol(WorkerProtocol):
    """Judging of code in worker processes. A problem's tests are the JSON text in ``references[0]``."""

    verdicts = TypeAdapter(CodeVerdict)

    def __init__(self, options: CodeOptions) -> None:
        seconds = options.limits.cpu_seconds
        self._total = options.total_seconds
        self.plan = WorkerPlan(
            handler="magicrl_verifiers.code.judge:CodeHandler",
            hello=dataclasses.asdict(options),
            # of the worker itself, which only compares: programs have their time in the sandbox
            cpu_limit=_JUDGE_CPU_SECONDS,
            stall_limit=_STALL_SECONDS + _STALL_FACTOR * (options.total_seconds or 12 * seconds),
        )

    def request(self, item: Item, *, repeat: bool) -> dict[str, Any]:
        request: dict[str, Any] = {"text": item.text, "program": item.bare}
        return request if repeat else {**request, "tests": item.problem.references[0]}

    def stall_limit(self, item: Item) -> float:
        if self._total is not None:
            return 0.0  # the plan's
        # without parsing megabytes of tests for it, and with a search that is faster than that of the pattern
        tests = item.problem.references[0]
        stated = _TIME_LIMIT.search(tests) if '"time_limit"' in tests else None
        return _STALL_SECONDS + _STALL_FACTOR * 12 * float(stated[1]) if stated else 0.0

    def exhausted(self, item: Item, outcome: Exhausted, seconds: float) -> CodeVerdict:
        # the program had its time in the sandbox: it was its output that kept the judge busy
        if outcome.kind == "timeout":
            reason = f"its output could not be compared within {_JUDGE_CPU_SECONDS:g} s of CPU time"
            return code_verdict("time_limit", reason, seconds=seconds)
        return self.lost("the judge crashed", seconds)

    def lost(self, reason: str, seconds: float = 0.0) -> CodeVerdict:
        return code_verdict("infrastructure_error", reason, seconds=seconds, decided_by="pool")

    def final(self, item: Item, verdict: Verdict) -> bool:
        return verdict.decided_by == "suite"  # a second try cannot make the tests usable


class CodePool(WorkerPool):
    """Judges responses (or bare programs) to code problems in worker processes. Safe to use from several threads.

    A problem's tests are the JSON text in ``references[0]`` (`suite` has the forms).

    Args:
        options: limits, isolation and how the program is found in a response.
        workers: worker processes, each with its own sandbox.

    Example:
        >>> problem = Problem(id="p", prompt="", references=('{"inputs": ["2 3"], "outputs": ["5"]}',), verifier="code",
        ...                   source="doc")
        >>> with CodePool() as pool:
        ...     ticket = pool.submit(problem, ["```python\\nprint(sum(map(int, input().split())))\\n```"])
        ...     [verdict.status for verdict in pool.result(ticket)]
        ['passed']
    """

    def __init__(self, options: CodeOptions | None = None, *, workers: int = 1) -> None:
        super().__init__(CodeProtocol(options or CodeOptions()), workers)

    def submit(self, problem: Problem, responses: Sequence[str], *, bare: bool = False) -> Ticket:
        """Queue responses, or with ``bare`` programs from which nothing has to be extracted, and return at once.

        Raises:
            ValueError: the problem has no tests.
            RuntimeError: the pool is closed.
        """
        require_references(problem)
        return super().submit(problem, responses, bare=bare)

    def result(self, ticket: Ticket) -> tuple[CodeVerdict, ...]:
        """Return the verdicts of ``ticket`` in the order of its texts. Waits until all are there.

        Raises:
            RuntimeError: the pool was closed before they were judged.
            WorkerRefusal: this machine cannot isolate programs; says why.
        """
        verdicts = ticket.wait()
        found = tuple(verdict for verdict in verdicts if isinstance(verdict, CodeVerdict))
        assert len(found) == len(verdicts)
        return found

    def warm_up(self) -> str:
        """Start every worker now and wait for them; returns the tier of isolation in use.

        Raises:
            WorkerRefusal: this machine cannot isolate programs; says why.
            WorkerStartError: a worker could not be started.
        """
        return str(self.warm()[0]["tier"])


_GROWTH_MB = 1024
"""Resident memory beyond that of the start at which a worker asks to be replaced."""
_LEAST_MB = 512
"""Least memory for tests and outputs, however little a program may have."""


class CodeHandler(RequestHandler):
    """One judge and the tests of the last request."""

    def __init__(self, hello: dict[str, Any], send: Send) -> None:
        options = TypeAdapter(CodeOptions).validate_python(hello)
        self._judge = CodeJudge(options)
        try:
            self.greeting = {"tier": self._judge.sandbox.tier}
        except SandboxRefusal as error:
            raise Refused(str(error)) from error
        self._memory = psutil.Process()
        self._most = self._memory.memory_info().rss + _GROWTH_MB * 2**20
        # a result in a few bytes may stand for gigabytes here; only the soft limit, since programs inherit the hard one
        room = self._memory.memory_info().vms + (
            (max(options.limits.memory_mb, 4 * options.limits.output_mb, _LEAST_MB) + _GROWTH_MB) << 20
        )
        lower_soft(resource.RLIMIT_AS, room)
        self._suite: Suite | None = None
        self._trouble = ""

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        # left out when the problem is the same as in the last request: tests may be megabytes
        if "tests" in request:
            self._suite, self._trouble = None, ""
            try:
                self._suite = parse_suite(request["tests"])
            except (SuiteError, MemoryError) as error:
                self._trouble = str(error) or "its tests are too large for this machine"
        verdict = dataclasses.asdict(self._verdict(request))
        return {"verdict": verdict, "retire": self._memory.memory_info().rss > self._most}

    def close(self) -> None:
        self._judge.close()

    def _verdict(self, request: dict[str, Any]) -> CodeVerdict:
        suite = self._suite
        if suite is None:
            return code_verdict("infrastructure_error", self._trouble, decided_by="suite")
        total = len(suite.cases)
        try:
            # A program in a code block is taken for its content: no Python begins with backticks.
            if request["program"] and not request["text"].lstrip().startswith("```"):
                return self._judge.judge_program(request["text"], suite)
            return self._judge.judge_response(request["text"], suite)
        except Exception as error:  # noqa: BLE001 - a hostile output must not end the worker; the pool retries elsewhere
            return code_verdict("infrastructure_error", f"the judge raised {error!r}", total=total)
