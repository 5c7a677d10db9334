"""One program against the tests of one problem. The comparison happens here, outside of every sandbox.

Whatever a program exhausts itself is its failure. Only a sandbox or a checker that failed is nobody's:
``infrastructure_error``, after a second try in fresh processes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from magicrl.records import Verdict
from magicrl.verifiers.base import OUTCOME_OF_STATUS, JudgeOptions
from magicrl.verifiers.code import checkers, compare, remote, values
from magicrl.verifiers.code.checkers import Checker, Kind
from magicrl.verifiers.code.extract import program_in
from magicrl.verifiers.code.host import Program, SandboxOptions
from magicrl.verifiers.code.limits import Limits, Observation
from magicrl.verifiers.code.sandbox import Lost, Sandbox, failure
from magicrl.verifiers.code.suite import AssertCase, CallCase, Case, StdinCase, Suite, SuiteError

_ATTEMPTS = 2
_MAX_REASON = 300
_HEAVY = re.compile(r"\b(?:numpy|scipy|pandas)\b")
_CHECKER_SECONDS = 30.0


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
    status: str,
    reason: str = "",
    *,
    passed: int = 0,
    total: int = 0,
    seconds: float = 0.0,
    decided_by: str = "tests",
) -> CodeVerdict:
    """The verdict of this status; its outcome follows from the status alone."""
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
        limits: of each test, where the problem states no limits of its own.
        total_seconds: CPU seconds of all tests of a program together; None: 12 times the limit of one test.
        stop_at_failure: leave out the tests after the first that fails.
        sandbox: how programs are confined.
        judge: where the program stands in a response.
    """

    limits: Limits = field(default_factory=Limits)
    total_seconds: float | None = None
    stop_at_failure: bool = True
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    judge: JudgeOptions = field(default_factory=JudgeOptions)


class _CheckerFailed(Exception):
    """The checker, not the answer, is at fault."""


class CodeJudge:
    """Judges programs one after another in this thread. Closing it ends the sandbox's processes.

    Example:
        >>> from magicrl.verifiers.code.suite import parse_suite
        >>> suite = parse_suite({"inputs": ["2 3"], "outputs": ["5"]})
        >>> with CodeJudge() as judge:
        ...     judge.judge_program("a, b = map(int, input().split()); print(a + b)", suite).status
        'passed'
    """

    def __init__(self, options: CodeOptions | None = None) -> None:
        self._options = options or CodeOptions()
        self._sandbox = Sandbox(self._options.sandbox)

    @property
    def sandbox(self) -> Sandbox:
        return self._sandbox

    def close(self) -> None:
        self._sandbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def judge_response(self, response: str, suite: Suite) -> CodeVerdict:
        """Judge the program in a response (its last fenced block after the reasoning)."""
        program = program_in(response, self._options.judge.reasoning)
        if program is None or not program.strip():
            reason = "no closed code block after the reasoning" if program is None else "the code block is empty"
            return code_verdict("no_code", reason, total=len(suite.cases))
        return self.judge_program(program, suite)

    def judge_program(self, source: str, suite: Suite) -> CodeVerdict:
        """Run the program on every test; never raises for what a program does."""
        start = time.perf_counter()
        try:
            checker = None if suite.checker is None else checkers.load_checker(suite.checker)
        except (SuiteError, OSError) as error:
            return code_verdict("infrastructure_error", str(error), total=len(suite.cases))
        trial = _Trial(self._sandbox, self._options, source, suite, checker)
        try:
            status, reason = trial.run()
        finally:
            trial.close()
        return code_verdict(
            status, reason, passed=trial.passed, total=len(suite.cases), seconds=time.perf_counter() - start
        )

    def outputs(self, source: str, suite: Suite) -> list[bytes | None]:
        """What a program gives on every test, uncompared: its output or its result; None where it fails."""
        trial = _Trial(self._sandbox, self._options, source, suite, None)
        try:
            return [trial.output(case) for case in suite.cases]
        finally:
            trial.close()


class _Trial:
    """One program's way through its tests."""

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
        self._left = 12 * self._limits.cpu_seconds if total is None else total
        functions = not isinstance(suite.cases[0], StdinCase)
        self._program = Program(source, prelude=suite.prelude if functions or suite.prelude else None)
        self._heavy = bool(_HEAVY.search(source) or (suite.prelude and _HEAVY.search(suite.prelude)))
        self._others: list[Program] = []
        self.passed = 0

    def close(self) -> None:
        for program in (self._program, *self._others):
            program.close()

    def run(self) -> tuple[str, str]:
        first: tuple[str, str] | None = None
        for number, case in enumerate(self._suite.cases, start=1):
            if self._left <= 0:
                first = first or ("time_limit", f"test {number}: the time for all tests together was used up")
                break
            found = self._with_retries(case)
            if found is None:
                self.passed += 1
                continue
            first = first or (found[0], f"test {number}: {found[1]}")
            if self._stop or found[0] in ("syntax_error", "infrastructure_error"):
                break
        return first or ("passed", "")

    def _with_retries(self, case: Case) -> tuple[str, str] | None:
        lost = Lost("")
        for _ in range(_ATTEMPTS):
            try:
                return self._judge(case)
            except Lost as error:
                lost = error
                self._sandbox.restart()
                self._program.close()
            except _CheckerFailed as error:
                return "infrastructure_error", f"the checker failed: {error}"
        if lost.killed:
            return "runtime_error", "killed from outside twice"
        return "infrastructure_error", str(lost)

    def _judge(self, case: Case) -> tuple[str, str] | None:
        if isinstance(case, StdinCase):
            return self._stdin(case)
        if isinstance(case, CallCase):
            return self._call(case)
        return self._assertions(case)

    def _present_limits(self) -> Limits:
        return dataclasses.replace(self._limits, cpu_seconds=max(0.05, min(self._limits.cpu_seconds, self._left)))

    def _run(self, role: str, **details: Any) -> tuple[Observation, tuple[str, str] | None]:
        limits = self._present_limits()
        seen = self._sandbox.run(self._program, role, limits, heavy=self._heavy, **details)
        self._left -= seen.cpu_seconds
        return seen, failure(seen, limits)

    def output(self, case: Case) -> bytes | None:
        """The bare output of one test. Raises Lost if the sandbox fails."""
        if isinstance(case, AssertCase):
            return None
        if isinstance(case, StdinCase):
            seen, failed = self._run_stdin(case)
            return seen.output if failed is None else None
        seen, failed = self._run_call(case)
        return seen.result if failed is None else None

    def _run_stdin(self, case: StdinCase) -> tuple[Observation, tuple[str, str] | None]:
        given = case.input.encode("utf-8", "surrogatepass")
        return self._run("program", channels={"stdin": given}, outputs=("stdout",))

    def _run_call(self, case: CallCase) -> tuple[Observation, tuple[str, str] | None]:
        named = {name: values.encode(item) for name, item in case.named.items()}
        arguments = json.dumps({"a": [values.encode(item) for item in case.positional], "k": named}).encode("ascii")
        return self._run("call", channels={"args": arguments}, outputs=("result",), entry=case.entry)

    def _stdin(self, case: StdinCase) -> tuple[str, str] | None:
        seen, failed = self._run_stdin(case)
        if failed is not None:
            return failed
        if self._accepts_text(case, seen.output):
            return None
        return "wrong_answer", _difference(seen.output, case.output)

    def _accepts_text(self, case: StdinCase, output: bytes) -> bool:
        answer = None if case.output is None else case.output.encode("utf-8", "surrogatepass")
        tolerance = self._suite.float_tolerance
        if self._checker is None or self._checker.kind is Kind.BUILTIN:
            assert answer is not None
            name = "tokens" if self._checker is None else self._checker.text
            return checkers.accepts_text(name, output, answer, tolerance)
        if self._checker.kind is Kind.FUNCTION:
            texts = [case.input, output.decode("utf-8", "replace"), case.output]
            return self._by_function([values.encode(text) for text in texts])
        return self._by_program(case.input.encode("utf-8", "surrogatepass"), output, answer)

    def _call(self, case: CallCase) -> tuple[str, str] | None:
        seen, failed = self._run_call(case)
        if failed is not None:
            return failed
        try:
            message = json.loads(seen.result)
            accepted = self._accepts_value(case, message)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, RecursionError):
            return "wrong_answer", "the result is no plain data"
        except MemoryError:
            return "output_limit", "the result is too large"
        return None if accepted else ("wrong_answer", f"{case.entry}: got {_shown(message['result'])}")

    def _accepts_value(self, case: CallCase, message: dict[str, Any]) -> bool:
        result, after = message["result"], message["after"]
        if self._suite.in_place is not None:
            if not isinstance(after, list):
                raise TypeError("the arguments are no plain data")
            result = after[self._suite.in_place]
        elif result is None and case.parsed is None and case.expected is not None and isinstance(after, list):
            result = _changed(after, case)
        found = values.decode(result, remote.as_list)
        tolerance = self._suite.float_tolerance
        if self._checker is not None and self._checker.kind is Kind.BUILTIN:
            return checkers.accepts_value(self._checker.text, found, case.expected, tolerance)
        if self._checker is not None:
            given = values.encode(case.positional or case.named)
            return self._by_function([given, result, values.encode(case.expected)])
        if case.parsed is not None:
            if case.parsed.equal:
                return compare.same_value(found, case.expected, tolerance, strict=True)
            return case.parsed.holds(found)
        if compare.same_value(found, case.expected, tolerance, strict=False):
            return True
        if not self._suite.wrapped or not isinstance(case.expected, list):
            return False
        return compare.same_value(values.decode(result, remote.as_list), case.expected[0], tolerance, strict=False)

    def _assertions(self, case: AssertCase) -> tuple[str, str] | None:
        tests = Program(case.code, prelude=self._suite.prelude)
        self._others.append(tests)
        limits = self._present_limits()
        theirs, ours = self._sandbox.run_pair(
            self._program, tests, limits, heavy=self._heavy, entries=list(case.entries), check=case.check
        )
        self._left -= theirs.cpu_seconds + ours.cpu_seconds
        if ours.exit_code == 0 and ours.result == b"held" and ours.killed is None:
            return None
        failed = failure(theirs, limits)
        if failed is not None:
            return failed
        failed = failure(ours, limits)
        if failed is not None and failed[0] == "syntax_error":
            raise _CheckerFailed(f"the test code does not compile: {failed[1]}")
        wrong = failed is None or failed[1].startswith("AssertionError")
        reason = "" if failed is None else failed[1]
        return ("wrong_answer", reason or "an assertion failed") if wrong else failed

    def _by_function(self, arguments: list[Any]) -> bool:
        """A checker function's word. If it raises, the expected answer shows whose fault that is."""
        assert self._checker is not None
        said, reason = self._ask_function(arguments)
        if said is not None:
            return said
        given, output, answer = arguments
        if answer is not None and output != answer:
            if self._ask_function([given, answer, answer])[0] is True:
                return False  # it can judge: this output is what it could not read
            raise _CheckerFailed(reason)
        if reason.startswith(("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError")):
            raise _CheckerFailed(reason)
        return False

    def _ask_function(self, arguments: list[Any]) -> tuple[bool | None, str]:
        assert self._checker is not None
        channels = {"args": json.dumps(arguments).encode("ascii")}
        seen = self._trusted("judge", Program(self._checker.text), channels=channels, outputs=("result",))
        if seen.exit_code == 0 and seen.result in (b"yes", b"no"):
            return seen.result == b"yes", ""
        failed = failure(seen, self._checker_limits())
        return None, "no verdict" if failed is None else failed[1]

    def _by_program(self, given: bytes, output: bytes, answer: bytes | None) -> bool:
        """A checker program's exit status, by testlib's contract."""
        code, reason = self._ask_program(given, output, answer or b"")
        if code in (0, 1, 2, 7):
            return code == 0
        if code != 3 and answer is not None and self._ask_program(given, answer, answer)[0] == 0:
            return False  # it crashed on this output only
        raise _CheckerFailed(reason or f"exit status {code}")

    def _ask_program(self, given: bytes, output: bytes, answer: bytes) -> tuple[int | None, str]:
        assert self._checker is not None
        channels: dict[str, bytes | int] = {"input": given, "output": output, "answer": answer}
        if self._checker.kind is Kind.COMPILED:
            with open(self._checker.text, "rb") as file:  # its path does not exist inside; its bytes are handed over
                seen = self._trusted("execute", None, channels={**channels, "binary": file.read()})
        else:
            seen = self._trusted("checker", Program(self._checker.text), channels=channels)
        reason = "" if seen.killed is None else f"ended: {seen.killed}"
        return (None if seen.killed else seen.exit_code), reason or seen.errors

    def _checker_limits(self) -> Limits:
        return dataclasses.replace(self._limits, cpu_seconds=max(_CHECKER_SECONDS, self._limits.cpu_seconds))

    def _trusted(self, role: str, program: Program | None, **details: Any) -> Observation:
        if program is not None:
            self._others.append(program)
        return self._sandbox.run_trusted(program, role, self._checker_limits(), **details)


def _changed(after: list[Any], case: CallCase) -> Any:
    """Of a function that returns nothing: the first argument that it changed, else the first."""
    for now, before in zip(after, case.positional, strict=False):
        if now != values.encode(before):
            return now
    return after[0] if after else None


def _difference(output: bytes, expected: str | None) -> str:
    got = output[:80].decode("utf-8", "replace")
    return f"got {got!r}" if expected is None else f"got {got!r}, expected {expected[:80]!r}"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."
