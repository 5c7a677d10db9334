"""The process that judges programs: ``python -m magicrl.verifiers.code.worker``.

It holds the tests, drives the zygotes and compares; nothing of a program runs in it.
"""

from __future__ import annotations

import sys
from typing import Any

import psutil

from magicrl.verifiers.base import JudgeOptions
from magicrl.verifiers.code.host import SandboxError, SandboxOptions, SandboxRefusal
from magicrl.verifiers.code.judge import CodeJudge, CodeOptions, CodeVerdict, code_verdict
from magicrl.verifiers.code.limits import Limits
from magicrl.verifiers.code.suite import Suite, SuiteError, parse_suite
from magicrl.verifiers.worker import Refused, Send, serve

_GROWTH_MB = 1024
"""Resident memory beyond that of the start at which a worker asks to be replaced."""


def options_from(settings: dict[str, Any]) -> CodeOptions:
    """The options that the pool's settings describe."""
    return CodeOptions(
        limits=Limits(
            cpu_seconds=settings["time_limit"],
            memory_mb=settings["memory_limit_mb"],
            output_mb=settings["output_limit_mb"],
            idle_seconds=settings["idle_seconds"],
            threads=settings["threads"],
        ),
        total_seconds=settings["total_seconds"],
        stop_at_failure=settings["stop_at_failure"],
        sandbox=SandboxOptions(
            tier=settings["tier"], preload=tuple(settings["preload"]), guards_off=tuple(settings["guards_off"])
        ),
        judge=JudgeOptions(reasoning=settings["reasoning"]),
    )


class _Desk:
    """One judge, and the tests that it was asked about last."""

    def __init__(self, hello: dict[str, Any], send: Send) -> None:
        self._judge = CodeJudge(options_from(hello))
        try:
            self.greeting: dict[str, Any] = {"tier": self._judge.sandbox.tier, "reasons": self._judge.sandbox.reasons}
        except SandboxRefusal as error:
            raise Refused(str(error)) from error
        self._memory = psutil.Process()
        self._most = self._memory.memory_info().rss + _GROWTH_MB * 2**20
        self._suite: Suite | None = None
        self._trouble = ""

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        if "tests" in request:
            self._suite, self._trouble = _read_suite(request["tests"])
        verdict = self._verdict(request)
        return {
            "status": verdict.status,
            "reason": verdict.reason,
            "passed": verdict.passed,
            "total": verdict.total,
            "unusable": self._suite is None,
            "retire": self._memory.memory_info().rss > self._most,
        }

    def close(self) -> None:
        self._judge.close()

    def _verdict(self, request: dict[str, Any]) -> CodeVerdict:
        suite = self._suite
        if suite is None:
            return code_verdict("infrastructure_error", self._trouble)
        total = len(suite.cases)
        try:
            if request["program"]:
                return self._judge.judge_program(request["text"], suite)
            return self._judge.judge_response(request["text"], suite)
        except SandboxError as error:
            return code_verdict("infrastructure_error", str(error), total=total)
        except MemoryError:
            return code_verdict("output_limit", "its output is too large to be compared", total=total)
        except Exception as error:  # noqa: BLE001 - a hostile output must not end the worker; the pool retries elsewhere
            return code_verdict("infrastructure_error", f"the judge raised {error!r}", total=total)


def _read_suite(tests: str) -> tuple[Suite | None, str]:
    try:
        return parse_suite(tests), ""
    except SuiteError as error:
        return None, str(error)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    serve(_Desk)
