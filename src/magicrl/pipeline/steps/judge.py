"""The judging step: votes of judges on every problem; too few for it, and it goes."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa

from magicrl.files import write_atomically
from magicrl.pipeline.cleaning.maths_rules import note_of
from magicrl.pipeline.entry import Entry, entries_of
from magicrl.pipeline.judging.flawed import FLAWED
from magicrl.pipeline.judging.problems import JudgedProblem, Judgement
from magicrl.pipeline.parts import Part, StepFolder, read_part
from magicrl.pipeline.settings import JudgeStep
from magicrl.pipeline.steps.base import Context, Decide, Decision, Drop
from magicrl.pipeline.steps.serving import served

_FREE = ("concurrency", "requests_per_minute", "attempts", "attempt_seconds", "key_variable", "base_url")
"""Settings of a judge that decide no vote."""


class Judge:
    """Asks first; votes are kept one by one, so that nothing is asked for twice. Then rows are dropped by id."""

    use = "judge"
    version = 1
    whole = True
    parallel = False

    def __init__(self, settings: JudgeStep) -> None:
        self._settings = settings

    def identity(self, context: Context) -> Any:
        known = self._settings.settings.model_dump(mode="json")
        for judge in known["judges"]:
            for name in _FREE:
                judge.pop(name)
            for name in [name for name in judge if name.startswith("dollars")]:
                judge.pop(name)
        return known | {"flawed": self._settings.flawed}

    def prepare(self, parts: Sequence[Part], folder: StepFolder, key: str, context: Context) -> None:
        marker = folder.work / "judgements.key"
        if marker.exists() and marker.read_text() == key:
            return
        from magicrl.pipeline.judging.judge import judge_problems, votes_missing
        from magicrl.pipeline.judging.report import JudgingReport, as_text, estimated_cost, flawed_figures

        settings = self._settings.settings
        total = sum(read_part(part.path, ["id"]).num_rows for part in parts)
        missing = votes_missing(_problems(parts), settings, folder=folder.work)
        length = sum(len(problem.text) for problem in _problems(parts)) / max(1, total)
        for name, cost in estimated_cost(settings, missing, length).items():
            context.watcher.note(
                f"judge {name}: {cost['votes']} votes to ask for, {cost['prompt_tokens']} tokens in, at most "
                f"{cost['most_completion_tokens']} out, at most {cost['most_dollars']:.2f} dollars"
            )
        report = JudgingReport(settings)
        lines: list[str] = []
        with ExitStack() as stack:
            if any(missing.values()) or self._settings.flawed:
                stack.enter_context(served(self._settings, context, folder.work / "server.log"))
            for done, judgement in enumerate(judge_problems(_problems(parts), settings, folder=folder.work), start=1):
                report.add(judgement)
                lines.append(json.dumps(_line(judgement)) + "\n")
                context.watcher.progress(self.use, done, total, "problems")
            told = report.as_dict()
            if self._settings.flawed:
                known = judge_problems(FLAWED, settings, folder=folder.work)
                told["flawed"] = flawed_figures(known, [problem.id for problem in FLAWED])
        text = as_text(told)
        if "flawed" in told:
            flawed = told["flawed"]
            text += f"of {flawed['judged']} problems known to be flawed the judges drop {flawed['found_by_judges']}\n"
        write_atomically(folder.work / "judging.json", json.dumps(told, indent=1))
        write_atomically(folder.work / "judging.txt", text)
        write_atomically(folder.work / "judgements.jsonl", "".join(lines))
        write_atomically(marker, key)

    @contextmanager
    def open(self, folder: StepFolder, context: Context) -> Generator[Decide]:
        with (folder.work / "judgements.jsonl").open(encoding="utf-8") as file:
            judgements: dict[str, dict[str, Any]] = {row["problem"]: row for row in map(json.loads, file)}

        def one(entry: Entry) -> Decision:
            row = judgements[entry.id]
            if not row["keep"]:
                return Drop(
                    "judged flawed", f"{row['keeps']} of {row['valid']} readable votes for it. {row['reasons']}"
                )
            return replace(entry, notes=note_of(entry, judge=[row["keeps"], row["valid"]]))

        def decide(table: pa.Table) -> list[Decision]:
            return [one(entry) for entry in entries_of(table)]

        yield decide

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        context.watcher.note((folder.work / "judging.txt").read_text(encoding="utf-8").rstrip())


def _problems(parts: Sequence[Part]) -> Iterator[JudgedProblem]:
    for part in parts:
        for row in read_part(part.path, ["id", "problem"]).to_pylist():
            yield JudgedProblem(id=row["id"], text=row["problem"])


def _line(judgement: Judgement) -> dict[str, Any]:
    """What is kept of a judgement beside its votes: the counts, and why the first judge against it was."""
    against = next((vote.reasons for vote in judgement.votes if vote.keep is False), "")
    return {
        "problem": judgement.problem,
        "keep": judgement.keep,
        "keeps": judgement.keeps,
        "valid": judgement.valid,
        "reasons": against[:500],
    }
