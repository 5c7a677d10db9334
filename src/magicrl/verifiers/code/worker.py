"""The process that judges programs: ``python -m magicrl.verifiers.code.worker``.

It holds the tests, drives the zygotes and compares; nothing of a program runs in it. It reads requests on its
standard input, answers on a private copy of its standard output and leaves when its input ends.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import psutil

from magicrl.verifiers.base import JudgeOptions
from magicrl.verifiers.code.host import SandboxError, SandboxOptions
from magicrl.verifiers.code.judge import CodeJudge, CodeOptions, CodeVerdict, code_verdict
from magicrl.verifiers.code.limits import Limits
from magicrl.verifiers.code.suite import Suite, SuiteError, parse_suite
from magicrl.verifiers.wire import Decoder, read_blocking, write_blocking

_GROWTH_MB = 1024
"""Resident memory beyond that of the start at which a worker asks to be replaced."""


def options_from(settings: dict[str, Any]) -> CodeOptions:
    """The options that the pool's settings describe."""
    return CodeOptions(
        limits=Limits(cpu_seconds=settings["time_limit"], memory_mb=settings["memory_limit_mb"]),
        total_seconds=settings["total_seconds"],
        stop_at_failure=settings["stop_at_failure"],
        sandbox=SandboxOptions(
            tier=settings["tier"], preload=tuple(settings["preload"]), guards_off=tuple(settings["guards_off"])
        ),
        judge=JudgeOptions(reasoning=settings["reasoning"]),
    )


def main() -> None:
    """Serve until the input ends or this worker should be replaced."""
    replies = os.dup(1)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    requests = Decoder(limit=None)
    hello = read_blocking(0, requests)
    if hello is None:
        return
    judge = CodeJudge(options_from(hello))
    try:
        write_blocking(replies, {"ready": True, "tier": judge.sandbox.tier, "reasons": judge.sandbox.reasons})
    except SandboxError as error:
        write_blocking(replies, {"ready": False, "reason": str(error)})
        return
    memory = psutil.Process()
    most = memory.memory_info().rss + _GROWTH_MB * 2**20
    suite: Suite | None = None
    trouble = ""
    with judge:
        while (request := read_blocking(0, requests)) is not None:
            if "tests" in request:
                suite, trouble = _read_suite(request["tests"])
            verdict = _judge(judge, suite, trouble, request)
            retire = memory.memory_info().rss > most
            write_blocking(
                replies, {"item": request["item"], **_fields(verdict), "retire": retire, "unusable": suite is None}
            )
            if retire:
                return


def _read_suite(tests: str) -> tuple[Suite | None, str]:
    try:
        return parse_suite(tests), ""
    except SuiteError as error:
        return None, str(error)


def _judge(judge: CodeJudge, suite: Suite | None, trouble: str, request: dict[str, Any]) -> CodeVerdict:
    if suite is None:
        return code_verdict("infrastructure_error", trouble)
    try:
        if request["program"]:
            return judge.judge_program(request["text"], suite)
        return judge.judge_response(request["text"], suite)
    except SandboxError as error:
        return code_verdict("infrastructure_error", str(error), total=len(suite.cases))
    except MemoryError:
        return code_verdict("output_limit", "its output is too large to be compared", total=len(suite.cases))
    except Exception as error:  # noqa: BLE001 - a hostile output must not end the worker; the caller retries elsewhere
        return code_verdict("infrastructure_error", f"the judge raised {error!r}", total=len(suite.cases))


def _fields(verdict: CodeVerdict) -> dict[str, Any]:
    return {
        "status": verdict.status,
        "reason": verdict.reason,
        "passed": verdict.passed,
        "total": verdict.total,
    }


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
