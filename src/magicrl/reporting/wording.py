"""The text form of numbers, dates and foreign text on pages, in figures and in the terminal."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.text import Text

from magicrl_verifiers.progress import plural

# second control block, direction marks and overrides, lone surrogates
_UNSEEN = ((0x80, 0x9F), (0x200E, 0x200F), (0x202A, 0x202E), (0x2066, 0x2069), (0xD800, 0xDFFF))
_SHOWN = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **{code: f"⟨U+{code:04X}⟩" for first, last in _UNSEEN for code in range(first, last + 1)},
}


def percent(share: float | None, digits: int = 1) -> str:
    """Write ``0.4567`` as ``45.7 %``, and None (not measured) as a dash. A tiny share keeps a digit: ``0.04 %``."""
    if share is None:
        return "–"
    text = f"{100 * share:.{digits}f}"
    tiny = share > 1e-6 and not float(text)  # less is the rounding error of a difference
    return f"{100 * share:.1g} %" if tiny else f"{text} %"


def points(difference: float) -> str:
    """Write ``0.123``, a difference of two shares, in percentage points: ``+12.3``."""
    text = f"{100 * difference:+.1f}".replace("-", "−")
    return "0.0" if text in ("+0.0", "−0.0") else text


def number_text(value: float | None, digits: int = 3) -> str:
    """Write a number with about ``digits`` significant figures, without an exponent where possible."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        return f"{value:.{max(0, digits - 1)}e}"
    if size >= 10**digits:
        return f"{value:.0f}"
    text = f"{value:.{max(0, digits - 1 - math.floor(math.log10(size)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def measured(value: float, unit: str) -> str:
    """Write a value of a figure as its table and its crosshair show it: ``percent``, ``seconds`` or ``number``."""
    if unit == "percent":
        return percent(value)
    return f"{number_text(value)} s" if unit == "seconds" else number_text(value)


def temperature_text(value: float) -> str:
    """Write ``0.0`` as ``0 (greedy)``, and other temperatures as in a recipe."""
    return "0 (greedy)" if value == 0 else f"{value:g}"


def checkpoint_name(step: int) -> str:
    """Return a name for the weights after ``step`` steps; 0 is the initial checkpoint."""
    return f"the checkpoint of step {step}" if step else "the initial checkpoint"


def moment(iso: str) -> str:
    """Write ``2026-11-20T09:30:11+00:00`` as ``2026-11-20 09:30 UTC``, and other text unchanged."""
    try:
        return f"{datetime.fromisoformat(iso).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return iso


def print_prose(console: Console, text: Text | str, **style: Any) -> None:
    """Print a sentence: in a terminal broken between words, elsewhere (a file, a pipe) as one line.

    A path or a command that is longer than a line stays whole, so that it can be copied.
    """
    for line in (Text(text) if isinstance(text, str) else text).split("\n", allow_blank=True):
        pieces = line.divide(_breaks(line.plain, console.width)) if console.is_terminal else [line]
        for piece in pieces:
            piece.rstrip()
            # Rich would break inside a long word, or cut the line
            console.print(piece, no_wrap=True, overflow="ignore", crop=False, highlight=False, **style)


def _breaks(text: str, width: int) -> list[int]:
    """Return the positions where a line of at most ``width`` characters begins, except the first."""
    found: list[int] = []
    begin = 0
    for word in re.finditer(r"\S+", text):
        if word.end() - begin > width and word.start() > begin:
            begin = word.start()
            found.append(begin)
    return found


def visible(text: str) -> str:
    """Replace characters of foreign text that have an effect instead of a shape.

    Control characters (terminal escapes, NUL) become their pictures, direction overrides and lone surrogates their
    code points in angle brackets. Line ends and tabs stay. The template escapes HTML.
    """
    return text.replace("\r\n", "\n").translate(_SHOWN)


def unjudged_note(unjudged: int, drawn: int, truncated: float) -> str:
    """Return a note on the samples of an evaluation without a verdict. ``truncated`` is a share of those drawn."""
    note = f"{unjudged} of {plural(drawn, 'sample')} could not be judged and count nowhere"
    # A truncated response is wrong without a judgement.
    nothing = unjudged + round(truncated * drawn) >= drawn
    return f"{note}; the others were truncated, so that no complete answer was judged" if nothing else note
