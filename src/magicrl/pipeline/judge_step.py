"""The judging step: LLM judges vote on every problem, and problems with too few votes are dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from magicrl.files import write_atomically
from magicrl.pipeline.entry import Document, Entry
from magicrl.pipeline.frame import Context, Decide, Decision, Drop, PipelineStep, by_entry
from magicrl.pipeline.judge_report import as_text, estimated_cost, flawed_figures, report_of
from magicrl.pipeline.judge_votes import TEXTS, Judgement, judge_problems, votes_missing
from magicrl.pipeline.parts import Part, StepFolder, read_part
from magicrl.pipeline.pipeline_schema import JudgeStep

FLAWED = tuple(Document(id=f"flawed/{name}", text=text) for name, text in TEXTS.flawed.items())
"""Flawed problems of the kinds that the report found after its difficulty filter."""

_FREE = {
    *("concurrency", "requests_per_minute", "attempts", "attempt_seconds", "key_variable", "base_url"),
    *("dollars_per_million_input", "dollars_per_million_output"),
}
"""Settings of a judge that do not affect its votes."""


class Judge(PipelineStep[JudgeStep]):
    """Collects all votes first, each stored so that it is requested only once, then drops rows by id."""

    use = "judge"

    def identity(self, context: Context) -> Any:
        known = self._settings.settings.model_dump(mode="json", exclude={"judges": {"__all__": _FREE}})
        return known | {"flawed": self._settings.flawed}

    def prepare(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        settings = self._settings.settings
        total = sum(read_part(part.path, ["id"]).num_rows for part in parts)
        # shown before the first request, because votes cost money
        missing = votes_missing(_problems(parts), settings, folder=folder.work)
        length = sum(len(problem.text) for problem in _problems(parts)) / max(1, total)
        for name, cost in estimated_cost(settings, missing, length).items():
            context.watcher.note(
                f"judge {name}: {cost['votes']} votes to ask for, {cost['prompt_tokens']} tokens in, at most "
                f"{cost['most_completion_tokens']} out, at most {cost['most_dollars']:.2f} dollars"
            )
        lines: list[str] = []

        def judged() -> Iterator[Judgement]:
            for judgement in judge_problems(_problems(parts), settings, folder=folder.work):
                # counts, and the reasons of the first vote against the problem
                line: dict[str, Any] = {
                    name: getattr(judgement, name) for name in ("problem", "keep", "keeps", "valid")
                }
                line["reasons"] = next((vote.reasons for vote in judgement.votes if vote.keep is False), "")[:500]
                lines.append(json.dumps(line) + "\n")
                context.watcher.progress(self.use, len(lines), total, "problems")
                yield judgement

        told = report_of(judged(), settings)
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

    def decide(self, folder: StepFolder) -> Decide:
        with (folder.work / "judgements.jsonl").open(encoding="utf-8") as file:
            judgements: dict[str, dict[str, Any]] = {row["problem"]: row for row in map(json.loads, file)}

        def one(entry: Entry) -> Decision:
            row = judgements[entry.id]
            if not row["keep"]:
                return Drop(
                    "judged flawed", f"{row['keeps']} of {row['valid']} readable votes for it. {row['reasons']}"
                )
            return replace(entry, notes={**entry.notes, "judge": [row["keeps"], row["valid"]]})

        return by_entry(one)

    def finish(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        context.watcher.note((folder.work / "judging.txt").read_text(encoding="utf-8").rstrip())


def _problems(parts: Sequence[Part]) -> Iterator[Document]:
    for part in parts:
        for row in read_part(part.path, ["id", "problem"]).to_pylist():
            yield Document(id=row["id"], text=row["problem"])
