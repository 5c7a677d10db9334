"""Asks a problem's checker about one output, in a zygote of its own, and tells a bad output from a bad checker."""

from __future__ import annotations

import json
from typing import Any

from magicrl.verifiers.code.checkers import Checker, Kind
from magicrl.verifiers.code.host import Program
from magicrl.verifiers.code.limits import Limits, Observation
from magicrl.verifiers.code.sandbox import Sandbox, failure

_VERDICTS = (0, 1, 2, 4, 7, 8)
"""testlib's exit statuses: right, wrong, bad form, trailing data, points (not full marks), too short; 3: it failed."""


class CheckerFailed(Exception):
    """The checker, not the answer, is at fault."""


class Referee:
    """A checker that is a function or a program. ``limits`` are those of the programs that it judges."""

    def __init__(self, sandbox: Sandbox, checker: Checker, limits: Limits) -> None:
        self._sandbox = sandbox
        self._checker = checker
        self._limits = limits
        self._program = None if checker.kind is Kind.COMPILED else Program(checker.text)

    def close(self) -> None:
        """Free the compiled form of the checker."""
        if self._program is not None:
            self._program.close()

    def by_function(self, arguments: list[Any]) -> bool:
        """A checker function's word. If it raises, the expected answer shows whose fault that is."""
        said, reason = self._ask_function(arguments)
        if said is not None:
            return said
        given, output, answer = arguments
        if answer is not None:
            if output != answer and self._ask_function([given, answer, answer])[0] is True:
                return False  # it can judge: this output is what it could not read
            raise CheckerFailed(f"the checker failed on the expected output too: {reason}")
        if reason.startswith(("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError")):
            raise CheckerFailed(f"the checker failed: {reason}")
        return False

    def _ask_function(self, arguments: list[Any]) -> tuple[bool | None, str]:
        channels = {"args": json.dumps(arguments).encode("ascii")}
        seen = self._run("judge", self._program, channels=channels, outputs=("result",))
        if seen.exit_code == 0 and seen.result in (b"yes", b"no"):
            return seen.result == b"yes", ""
        failed = failure(seen, self._limits)
        return None, "no verdict" if failed is None else failed[1]

    def by_program(self, given: bytes, output: bytes, answer: bytes | None) -> bool:
        """A checker program's exit status, by testlib's contract."""
        code, reason = self._ask_program(given, output, answer or b"")
        if code in _VERDICTS:
            return code == 0
        if code != 3 and answer is not None and self._ask_program(given, answer, answer)[0] == 0:
            return False  # it crashed on this output only
        raise CheckerFailed(f"the checker failed: {reason or f'exit status {code}'}")

    def _ask_program(self, given: bytes, output: bytes, answer: bytes) -> tuple[int | None, str]:
        channels: dict[str, bytes | int] = {"input": given, "output": output, "answer": answer}
        if self._checker.kind is Kind.COMPILED:
            with open(self._checker.text, "rb") as file:  # its path does not exist inside; its bytes are handed over
                seen = self._run("execute", None, channels={**channels, "binary": file.read()})
        else:
            seen = self._run("checker", self._program, channels=channels)
        reason = "" if seen.killed is None else f"ended: {seen.killed}"
        return (None if seen.killed else seen.exit_code), reason or seen.errors

    def _run(self, role: str, program: Program | None, **details: Any) -> Observation:
        return self._sandbox.run_trusted(program, role, self._limits, **details)
