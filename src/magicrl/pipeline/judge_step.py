"""The judging step: LLM judges vote on every problem, and problems with too few votes are dropped.

Its report holds the agreement of the judges, the cost of their votes, and the flawed problems that they find.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

from magicrl.files import write_atomically
from magicrl.pipeline.entry import Document, Entry, statement_of
from magicrl.pipeline.frame import Context, Decide, Decision, Drop, PipelineStep, by_entry
from magicrl.pipeline.judge_votes import TEXTS, Judgement, judge_problems, votes_missing
from magicrl.pipeline.parts import Part, StepFolder, read_part
from magicrl.pipeline.pipeline_schema import JudgeStep, JudgingSettings, VotingJudge

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
    version = 3

    def identity(self, context: Context) -> Any:
        known = self._settings.settings.model_dump(mode="json", exclude={"judges": {"__all__": _FREE}})
        return known | {"flawed": self._settings.flawed}

    def prepare(self, parts: Sequence[Part], folder: StepFolder, context: Context) -> None:
        settings = self._settings.settings
        total = sum(read_part(part.path, ["id"]).num_rows for part in parts)
        known = FLAWED if self._settings.flawed else ()
        # shown before the first request, because votes cost money
        missing = votes_missing(chain(problems_of(parts), known), settings, folder=folder.work)
        length = sum(len(problem.text) for problem in chain(problems_of(parts), known)) / (total + len(known))
        for name, cost in estimated_cost(settings, missing, length).items():
            context.watcher.note(
                f"judge {name}: {cost['votes']} votes to ask for, at most {cost['most_prompt_tokens']} tokens in and "
                f"{cost['most_completion_tokens']} out, at most {cost['most_dollars']:.2f} dollars"
            )
        lines: list[str] = []

        def judged() -> Iterator[Judgement]:
            for judgement in judge_problems(problems_of(parts), settings, folder=folder.work):
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
            told["flawed"] = flawed_figures(judge_problems(FLAWED, settings, folder=folder.work))
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
        told = json.loads((folder.work / "judging.json").read_text(encoding="utf-8"))
        failed = sum(judge["failed"] for judge in told["judges"].values())
        if failed:
            context.watcher.note(
                f"{failed} votes failed, because a server refused the problem (reasons in {folder.work}/votes.jsonl); "
                f"to request them again, delete {folder.kept}, {folder.work / 'prepared.key'} and the folders of later "
                "steps, and run the same command again"
            )


def problems_of(parts: Sequence[Part]) -> Iterator[Document]:
    """Yield what the judges read of each row."""
    for part in parts:
        for row in read_part(part.path, ["id", "prompt", "problem"]).to_pylist():
            yield Document(id=row["id"], text=statement_of(row))


def agreement(counts: Iterable[tuple[int, int]]) -> float | None:
    """Return the share of pairs of votes on the same problem that say the same; None where there is no such pair.

    ``counts`` are votes for keeping and for dropping, by problem. Every problem with two votes or more weighs the same.

    Example:
        >>> round(agreement([(3, 0), (0, 3), (2, 1), (1, 2)]) or 0, 4)
        0.6667
    """
    shares = [(yes * (yes - 1) + no * (no - 1)) / ((yes + no) * (yes + no - 1)) for yes, no in counts if yes + no >= 2]
    return sum(shares) / len(shares) if shares else None


def report_of(judgements: Iterable[Judgement], settings: JudgingSettings) -> dict[str, Any]:
    """Return agreement, shares, tokens and cost as JSON values. Memory holds a few numbers per problem."""
    names = [judge.shown_name for judge in settings.judges]
    sums = {name: Counter[str]() for name in names}
    by_judge: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    together: list[tuple[int, int]] = []
    histogram, kept, undecided = Counter[int](), 0, 0
    for judgement in judgements:
        said = Counter((vote.judge, vote.keep) for vote in judgement.votes)
        for name in names:
            by_judge[name].append((said[name, True], said[name, False]))
        for vote in judgement.votes:
            tokens = {"prompt_tokens": vote.prompt_tokens, "completion_tokens": vote.completion_tokens}
            sums[vote.judge].update({"votes": 1, vote.status: 1, **tokens})
        together.append((judgement.keeps, judgement.valid - judgement.keeps))
        histogram[judgement.keeps] += 1
        kept += judgement.keep
        undecided += not judgement.decided
    between: dict[str, float | None] = {}
    for first, second in combinations(names, 2):
        pairs = zip(by_judge[first], by_judge[second], strict=True)
        # the share of problems on which the majorities of two judges agree, without ties
        same = [(a[0] > a[1]) == (b[0] > b[1]) for a, b in pairs if a[0] != a[1] and b[0] != b[1]]
        between[f"{first} / {second}"] = sum(same) / len(same) if same else None
    return {
        "problems": len(together),
        "kept": kept,
        "dropped": len(together) - kept,
        "undecided": undecided,
        "threshold": settings.threshold,
        "votes_a_problem": settings.votes,
        "agreement": agreement(together),
        "keep_votes": {str(keeps): number for keeps, number in sorted(histogram.items())},
        "judges": {
            judge.shown_name: _of_judge(judge, sums[judge.shown_name], by_judge[judge.shown_name])
            for judge in settings.judges
        },
        "between_judges": between,
    }


def _of_judge(judge: VotingJudge, sums: Mapping[str, int], counts: Collection[tuple[int, int]]) -> dict[str, Any]:
    keeps, tokens = sum(yes for yes, _ in counts), (sums["prompt_tokens"], sums["completion_tokens"])
    return {
        **{name: sums[name] for name in ("votes", "valid", "unreadable", "failed")},
        "says_keep": keeps / sums["valid"] if sums["valid"] else None,
        "agreement_with_itself": agreement(counts),
        "prompt_tokens": tokens[0],
        "completion_tokens": tokens[1],
        "dollars": cost(judge, *tokens),
    }


def cost(judge: VotingJudge, prompt_tokens: float, completion_tokens: float) -> float:
    """Return the cost in dollars at the judge's prices."""
    return (
        prompt_tokens * judge.dollars_per_million_input + completion_tokens * judge.dollars_per_million_output
    ) / 1e6


def estimated_cost(settings: JudgingSettings, missing: Mapping[str, int], characters: float) -> dict[str, Any]:
    """Return the highest cost of the ``missing`` votes by judge, for problems of ``characters`` on average.

    All attempts of a vote are paid for.
    """
    estimate: dict[str, Any] = {}
    for judge in settings.judges:
        votes = missing[judge.shown_name]
        requests = votes * judge.unreadable_attempts
        # the shipped instructions and the form have less than 1400 characters, and a token about 3.5
        characters_each = characters + 1400 + len(settings.instructions)
        prompt, answer = requests * characters_each / 3.5, requests * judge.max_tokens
        estimate[judge.shown_name] = {
            "votes": votes,
            "most_prompt_tokens": round(prompt),
            "most_completion_tokens": answer,
            "most_dollars": cost(judge, prompt, answer),
        }
    return estimate


def flawed_figures(judgements: Iterable[Judgement]) -> dict[str, Any]:
    """Return how many problems known to be flawed the judges drop."""
    kept = {judgement.problem: judgement.keep for judgement in judgements}
    return {
        "judged": len(kept),
        "found_by_judges": sum(not keep for keep in kept.values()),
        "missed_by_judges": sorted(name for name, keep in kept.items() if keep),
    }


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report as text."""
    lines = [
        f"{report['problems']} problems, {report['kept']} kept: at least {report['threshold']} of "
        f"{report['votes_a_problem']} votes; {report['undecided']} had too few readable votes",
        f"all votes: {_number(report['agreement'])} of the pairs of votes on a problem agree",
    ]
    for name, judge in report["judges"].items():
        lines.append(
            f"judge {name}: {judge['valid']} of {judge['votes']} votes readable, {_number(judge['says_keep'])} keep,"
            f" {_number(judge['agreement_with_itself'])} agree with each other,"
            f" {judge['prompt_tokens']} + {judge['completion_tokens']} tokens, {judge['dollars']:.2f} dollars"
        )
    lines += [
        f"between {names}: {_number(share)} of majorities agree" for names, share in report["between_judges"].items()
    ]
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
