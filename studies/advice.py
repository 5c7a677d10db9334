"""Write the page that answers questions of readers of the report, from ``advice.toml``.

An answer depends on the verdicts: each entry has several texts with conditions, and the first whose conditions are met
is printed. ``{6.end}`` in a text becomes that claim's verdict and numbers, so no text can state a number that differs
from the results.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from studies.claims import Verdict, shown_verdict
from studies.definition import Ablation, Claim

_CONDITION = re.compile(r"(?P<claim>[\w.]+) (?P<verdict>holds|does not hold|undecided|not run)")
_PLACE = re.compile(r"\{(\d+\.\w+)\}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Text(_Part):
    """One possible answer."""

    when: tuple[str, ...] = ()  # conditions ``CLAIM VERDICT``, all of which must be met; none means always
    text: str

    @model_validator(mode="after")
    def _conditions_are_readable(self) -> Self:
        for condition in self.when:
            if not _CONDITION.fullmatch(condition):
                raise ValueError(f"condition {condition!r} is not 'CLAIM holds|does not hold|undecided|not run'")
        return self


class Entry(_Part):
    """A question and its possible answers."""

    about: str
    texts: tuple[Text, ...] = Field(min_length=1)  # the first whose conditions are met is printed; the last has none
    claims: tuple[str, ...] = ()  # ids of the claims whose verdicts are listed below the answer

    @model_validator(mode="after")
    def _last_is_unconditional(self) -> Self:
        if self.texts[-1].when:
            raise ValueError(f"the last text of {self.about!r} must have no condition, because one text must apply")
        return self


class Advice(_Part):
    """All entries in the order of the page."""

    entries: tuple[Entry, ...]


def load_advice(path: Path | None = None) -> Advice:
    """Return the shipped entries, or those of another file.

    Raises:
        ValueError: an entry is not valid; pydantic's error names its place.
    """
    source = path or Path(str(files("studies"))) / "advice.toml"
    return Advice.model_validate(tomllib.loads(source.read_text()))


def check_advice(advice: Advice, ablations: Sequence[Ablation]) -> None:
    """Check that every claim that an entry names exists.

    Raises:
        ValueError: an entry names an unknown claim.
    """
    known = {claim.id for ablation in ablations for claim in ablation.claims}
    for entry in advice.entries:
        named = {*entry.claims}
        for text in entry.texts:
            named |= {condition.split(" ", 1)[0] for condition in text.when} | set(_PLACE.findall(text.text))
        if missing := sorted(named - known):
            raise ValueError(f"advice on {entry.about!r} names the claim {missing[0]!r}, which no ablation has")


def said(entry: Entry, verdicts: Mapping[str, Verdict], claims: Mapping[str, Claim]) -> str:
    """Return the entry's text for these verdicts, with numbers filled in."""
    for text in entry.texts:
        if all(_met(condition, verdicts) for condition in text.when):
            return fill(text.text, verdicts, claims)
    raise AssertionError("the last text has no condition")


def _met(condition: str, verdicts: Mapping[str, Verdict]) -> bool:
    claim, verdict = condition.split(" ", 1)
    return claim in verdicts and verdicts[claim].decision == verdict


def fill(text: str, verdicts: Mapping[str, Verdict], claims: Mapping[str, Claim]) -> str:
    """Replace each ``{CLAIM}`` in ``text`` by the claim's verdict, effect and interval."""

    def replaced(found: re.Match[str]) -> str:
        claim = found[1]
        return shown_verdict(claims[claim], verdicts[claim]) if claim in verdicts else f"{claim}: not part of this page"

    return _PLACE.sub(replaced, text.strip())


def advice_page(ablations: Sequence[Ablation], verdicts: Mapping[str, Verdict], advice: Advice) -> str:
    """Return the page of questions as Markdown."""
    claims = {claim.id: claim for ablation in ablations for claim in ablation.claims}
    parts = ["# Questions of readers of the report\n", "Answers from the runs of this study.\n"]
    for entry in advice.entries:
        parts.append(f"## {entry.about}\n\n{_wrapped(said(entry, verdicts, claims))}\n")
        lines = [
            _wrapped(f"- {claims[c].says} {shown_verdict(claims[c], verdicts[c])}")
            for c in entry.claims
            if c in verdicts
        ]
        if lines:
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _wrapped(text: str) -> str:
    rest = "  " if text.startswith("- ") else ""
    return textwrap.fill(
        " ".join(text.split()), 118, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
