"""Report of the judging step: agreement of judges, cost of votes, and flawed problems that they find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from typing import Any

from magicrl.pipeline.judge_votes import Judgement
from magicrl.pipeline.pipeline_schema import JudgingSettings, VotingJudge


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
    """Return the highest cost of the ``missing`` votes by judge, for problems of ``characters`` on average."""
    estimate: dict[str, Any] = {}
    for judge in settings.judges:
        votes = missing[judge.shown_name]
        # the instructions have 1400 characters, and a token about 3.5
        prompt, answer = votes * (characters + 1400) / 3.5, votes * judge.max_tokens
        estimate[judge.shown_name] = {
            "votes": votes,
            "prompt_tokens": round(prompt),
            "most_completion_tokens": answer,
            "most_dollars": cost(judge, prompt, answer),
        }
    return estimate


def flawed_figures(judgements: Iterable[Judgement], flawed: Collection[str]) -> dict[str, Any]:
    """Return how many problems (ids) known to be flawed the judges drop."""
    kept = {judgement.problem: judgement.keep for judgement in judgements if judgement.problem in flawed}
    return {
        "flawed": len(flawed),
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
