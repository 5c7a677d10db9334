"""What judging came to: agreement, cost, the known flawed problems, and what survived the difficulty filter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from magicrl.pipeline.judging.agreement import cohen_kappa, fleiss_kappa, strength
from magicrl.pipeline.judging.calibration import Calibration
from magicrl.pipeline.judging.problems import Judgement, Vote
from magicrl.pipeline.judging.settings import JudgeSettings, JudgingSettings


@dataclass(slots=True)
class _Tally:
    """Of one judge."""

    votes: int = 0
    valid: int = 0
    unreadable: int = 0
    failed: int = 0
    keeps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    counts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def add(self, votes: list[Vote]) -> None:
        """The votes on one problem."""
        keeps = sum(vote.keep is True for vote in votes)
        valid = sum(vote.status == "valid" for vote in votes)
        self.votes += len(votes)
        self.valid += valid
        self.keeps += keeps
        self.unreadable += sum(vote.status == "unreadable" for vote in votes)
        self.failed += sum(vote.status == "failed" for vote in votes)
        self.prompt_tokens += sum(vote.prompt_tokens for vote in votes)
        self.completion_tokens += sum(vote.completion_tokens for vote in votes)
        self.counts.append((keeps, valid - keeps))


class JudgingReport:
    """Collects judgements, one at a time; memory holds a few numbers a problem."""

    def __init__(self, settings: JudgingSettings) -> None:
        self._settings = settings
        self._tallies = {judge.shown_name: _Tally() for judge in settings.judges}
        self._counts: list[tuple[int, int]] = []
        self._histogram: dict[int, int] = {}
        self._kept = 0
        self._undecided = 0

    def add(self, judgement: Judgement) -> None:
        """Count a judgement."""
        for name, tally in self._tallies.items():
            tally.add([vote for vote in judgement.votes if vote.judge == name])
        self._counts.append((judgement.keeps, judgement.valid - judgement.keeps))
        self._histogram[judgement.keeps] = self._histogram.get(judgement.keeps, 0) + 1
        self._kept += judgement.keep
        self._undecided += not judgement.decided

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "problems": len(self._counts),
            "kept": self._kept,
            "dropped": len(self._counts) - self._kept,
            "undecided": self._undecided,
            "threshold": self._settings.threshold,
            "votes_a_problem": self._settings.votes,
            "fleiss_kappa": fleiss_kappa(self._counts),
            "agreement": strength(fleiss_kappa(self._counts)),
            "keep_votes": {str(keeps): number for keeps, number in sorted(self._histogram.items())},
            "judges": {
                judge.shown_name: self._of(judge, self._tallies[judge.shown_name]) for judge in self._settings.judges
            },
            "between_judges": self._between(),
        }

    def _of(self, judge: JudgeSettings, tally: _Tally) -> dict[str, Any]:
        kappa = fleiss_kappa(tally.counts)
        return {
            "votes": tally.votes,
            "valid": tally.valid,
            "unreadable": tally.unreadable,
            "failed": tally.failed,
            "says_keep": tally.keeps / tally.valid if tally.valid else None,
            "fleiss_kappa": kappa,
            "agreement_with_itself": strength(kappa),
            "prompt_tokens": tally.prompt_tokens,
            "completion_tokens": tally.completion_tokens,
            "dollars": cost(judge, tally.prompt_tokens, tally.completion_tokens),
        }

    def _between(self) -> dict[str, float | None]:
        """Cohen's kappa of the majorities of each pair of judges; ties do not count."""
        names, found = list(self._tallies), dict[str, float | None]()
        for place, first in enumerate(names):
            for second in names[place + 1 :]:
                pairs = zip(self._tallies[first].counts, self._tallies[second].counts, strict=True)
                majorities = [(a[0] > a[1], b[0] > b[1]) for a, b in pairs if a[0] != a[1] and b[0] != b[1]]
                found[f"{first} / {second}"] = cohen_kappa(majorities)
        return found


def cost(judge: JudgeSettings, prompt_tokens: float, completion_tokens: float) -> float:
    """Dollars at the judge's prices."""
    return (
        prompt_tokens * judge.dollars_per_million_input + completion_tokens * judge.dollars_per_million_output
    ) / 1e6


def estimated_cost(settings: JudgingSettings, missing: Mapping[str, int], characters: float) -> dict[str, Any]:
    """What the missing votes cost at most, by judge, before any is asked for.

    Args:
        missing: votes by judge, from ``votes_missing``.
        characters: mean length of a problem; the criteria come on top. A token is taken as 3.5 characters.
    """
    estimate: dict[str, Any] = {}
    for judge in settings.judges:
        votes = missing[judge.shown_name]
        prompt, answer = votes * (characters + 1400) / 3.5, votes * judge.max_tokens
        estimate[judge.shown_name] = {
            "votes": votes,
            "prompt_tokens": round(prompt),
            "most_completion_tokens": answer,
            "most_dollars": cost(judge, prompt, answer),
        }
    return estimate


def flawed_figures(
    judgements: Iterable[Judgement], flawed: Collection[str], survivors: Collection[str] | None = None
) -> dict[str, Any]:
    """What became of problems that are known to be flawed.

    Args:
        judgements: of the judges; a flawed problem among them counts as found when it is not kept.
        flawed: ids of flawed problems, labelled by a person or planted.
        survivors: ids that the difficulty filter kept, if it ran.
    """
    kept = {judgement.problem: judgement.keep for judgement in judgements if judgement.problem in flawed}
    told: dict[str, Any] = {
        "flawed": len(flawed),
        "judged": len(kept),
        "found_by_judges": sum(not keep for keep in kept.values()),
        "missed_by_judges": sorted(name for name, keep in kept.items() if keep),
    }
    if survivors is not None:
        passed = sum(name in survivors for name in flawed)
        told |= {
            "survived_difficulty": passed,
            "share_survived_difficulty": passed / len(flawed) if flawed else None,
        }
    return told


def as_text(report: Mapping[str, Any], calibration: Calibration | None = None) -> str:
    """The report for a terminal or a file; a weak judge is called one."""
    lines = [
        f"{report['problems']} problems, {report['kept']} kept: at least {report['threshold']} of "
        f"{report['votes_a_problem']} votes",
        f"{report['undecided']} had too few readable votes" if report["undecided"] else "",
        f"all votes: Fleiss' kappa {_number(report['fleiss_kappa'])}, {report['agreement']}",
    ]
    for name, judge in report["judges"].items():
        lines.append(
            f"judge {name}: {judge['valid']} of {judge['votes']} votes readable, {_number(judge['says_keep'])} keep,"
            f" kappa {_number(judge['fleiss_kappa'])} with itself ({judge['agreement_with_itself']}),"
            f" {judge['prompt_tokens']} + {judge['completion_tokens']} tokens, {judge['dollars']:.2f} dollars"
        )
    lines += [f"between {names}: kappa {_number(kappa)}" for names, kappa in report["between_judges"].items()]
    if calibration is None:
        lines.append("agreement with people is not known: label a sample to calibrate the judges")
    else:
        lines += _calibration_lines(calibration)
    return "\n".join(line for line in lines if line) + "\n"


def _calibration_lines(calibration: Calibration) -> list[str]:
    lines = [f"{calibration.labelled} labelled by a person, {calibration.flawed} of them as flawed"]
    for name, kappa in calibration.judge_kappa.items():
        accuracy = calibration.judge_accuracy[name]
        lines.append(
            f"judge {name} against the labels: {accuracy:.2f} equal, kappa {_number(kappa)}, {strength(kappa)}"
        )
    lines.append("threshold  kept  precision  recall  flawed kept")
    lines += [
        f"{row.threshold:9d} {row.kept:5.2f} {_number(row.precision):>10} {row.recall:7.2f} "
        f"{_number(row.flawed_kept):>12}"
        for row in calibration.rows
    ]
    if calibration.threshold is None:
        lines.append(
            f"no threshold keeps {calibration.least_recall:.0%} of the good problems: these judges are too weak"
        )
    else:
        lines.append(
            f"threshold that follows: {calibration.threshold} (the highest that keeps {calibration.least_recall:.0%} "
            "of the good)"
        )
    return lines


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
