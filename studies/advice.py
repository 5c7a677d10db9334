"""Two pages for readers: which settings to use, and answers to questions about the report.

Both come from ``advice.toml``. Their text depends on the verdicts: each entry has several texts with conditions, and
the first whose conditions the study meets is printed. ``{6.end}`` in a text becomes that claim's verdict and numbers,
so that a text cannot state a number that the results do not contain.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from studies.claims import Verdict, shown_verdict
from studies.definition import Ablation, Claim

_CONDITION = re.compile(r"(?P<claim>[\w.]+) (?P<verdict>holds|does not hold|undecided|not run)")
_PLACE = re.compile(r"\{(\d+\.\w+)\}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Text(_Part):
    """One possible answer."""

    when: tuple[str, ...] = ()  # conditions ``CLAIM VERDICT`` that must all be met; none: always
    text: str  # printed then

    @model_validator(mode="after")
    def _conditions_are_readable(self) -> Self:
        for condition in self.when:
            if not _CONDITION.fullmatch(condition):
                raise ValueError(f"condition {condition!r} is not 'CLAIM holds|does not hold|undecided|not run'")
        return self


class Entry(_Part):
    """A setting or a question."""

    about: str  # the setting's name, or the question
    page: Literal["settings", "questions"]  # page on which it is printed
    texts: tuple[Text, ...] = Field(min_length=1)  # the first whose conditions are met is printed; the last has none
    claims: tuple[str, ...] = ()  # claims whose verdicts are listed below it

    @model_validator(mode="after")
    def _last_is_unconditional(self) -> Self:
        if self.texts[-1].when:
            raise ValueError(f"the last text of {self.about!r} must have no condition, so that something is said")
        return self


class Advice(_Part):
    """All entries, in the order in which they are printed."""

    entries: tuple[Entry, ...]


def load_advice(path: Path | None = None) -> Advice:
    """Return the shipped entries, or those of another file.

    Raises:
        ValueError: an entry that cannot be read (pydantic's error names its place).
    """
    source = path or Path(str(files("studies"))) / "advice.toml"
    return Advice.model_validate(tomllib.loads(source.read_text()))


def check_advice(advice: Advice, ablations: Sequence[Ablation]) -> None:
    """Check that every claim named by an entry exists.

    Raises:
        ValueError: one does not.
    """
    known = {claim.id for ablation in ablations for claim in ablation.claims}
    for entry in advice.entries:
        named = {*entry.claims}
        for text in entry.texts:
            named |= {condition.split(" ", 1)[0] for condition in text.when} | set(_PLACE.findall(text.text))
        if missing := sorted(named - known):
            raise ValueError(f"advice on {entry.about!r} names the claim {missing[0]!r}, which no ablation has")


def said(entry: Entry, verdicts: Mapping[str, Verdict], claims: Mapping[str, Claim]) -> str:
    """Return the entry's text under these verdicts, with numbers filled in."""
    for text in entry.texts:
        if all(_met(condition, verdicts) for condition in text.when):
            return fill(text.text, verdicts, claims)
    raise AssertionError("the last text has no condition")


def _met(condition: str, verdicts: Mapping[str, Verdict]) -> bool:
    claim, verdict = condition.split(" ", 1)
    return claim in verdicts and verdicts[claim].decision == verdict


def fill(text: str, verdicts: Mapping[str, Verdict], claims: Mapping[str, Claim]) -> str:
    """Return ``text`` with ``{CLAIM}`` replaced by its verdict, effect and interval."""

    def replaced(found: re.Match[str]) -> str:
        claim = found[1]
        return shown_verdict(claims[claim], verdicts[claim]) if claim in verdicts else f"{claim}: not part of this page"

    return _PLACE.sub(replaced, text.strip())


def advice_page(
    page: Literal["settings", "questions"],
    ablations: Sequence[Ablation],
    verdicts: Mapping[str, Verdict],
    advice: Advice,
) -> str:
    """Return the Markdown of one of the two pages."""
    claims = {claim.id: claim for ablation in ablations for claim in ablation.claims}
    head = {
        "settings": "# Which settings should I use?\n\nWhat this study saw at its own scale, beside what the report "
        "saw at its. A tiny reasoner is no 7B model: where the two disagree, both are said.\n",
        "questions": "# What careful readers of the report ask\n\nAnswers from runs of this study; "
        "every number comes from the results file.\n",
    }[page]
    parts = [head]
    for entry in advice.entries:
        if entry.page != page:
            continue
        parts.append(f"## {entry.about}\n\n{said(entry, verdicts, claims)}\n")
        shown = [claim for claim in entry.claims if claim in verdicts]
        if shown:
            lines = [f"- {claims[c].says} {shown_verdict(claims[c], verdicts[c])}" for c in shown]
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
