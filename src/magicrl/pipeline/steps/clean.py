"""The cleaning step: maths and code problems by their own rules."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa

from magicrl.pipeline.cleaning.code import CodeCleaner
from magicrl.pipeline.cleaning.maths import MathsCleaner
from magicrl.pipeline.entry import Entry, entries_of
from magicrl.pipeline.parts import Part, StepFolder
from magicrl.pipeline.settings import CleanStep
from magicrl.pipeline.steps.base import Context, Decide, Decision
from magicrl.verifiers.base import JudgeOptions
from magicrl.verifiers.pool import VerifierPool


class Clean:
    """Row by row, in several processes, each with verifiers of its own."""

    use = "clean"
    version = 2
    whole = False
    parallel = True

    def __init__(self, settings: CleanStep) -> None:
        self._settings = settings

    def identity(self, context: Context) -> Any:
        return {
            "maths": self._settings.maths.model_dump(mode="json"),
            "code": self._settings.code.model_dump(mode="json"),
        }

    def prepare(self, parts: Sequence[Part], folder: StepFolder, key: str, context: Context) -> None:
        return None

    @contextmanager
    def open(self, folder: StepFolder, context: Context) -> Generator[Decide]:
        with ExitStack() as stack:
            options = JudgeOptions(reasoning="auto", extract="lenient")
            limit = self._settings.maths.time_limit
            pool = stack.enter_context(VerifierPool(options=options, time_limit=limit, workers=context.workers))
            maths = MathsCleaner(self._settings.maths, pool)
            code = stack.enter_context(CodeCleaner(self._settings.code, workers=context.workers))

            def decide(table: pa.Table) -> list[Decision]:
                entries = entries_of(table)
                return _merged(entries, maths, code)

            yield decide

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        return None


def _merged(entries: Sequence[Entry], maths: MathsCleaner, code: CodeCleaner) -> list[Decision]:
    """Each ability's problems decided together, the decisions back in order."""
    programs = iter(code.decide([entry for entry in entries if entry.ability == "code"]))
    others = iter(maths.decide([entry for entry in entries if entry.ability != "code"]))
    return [next(programs) if entry.ability == "code" else next(others) for entry in entries]
