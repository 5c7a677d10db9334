"""What every drawing shares: the palette, the signs of a legend, and the frame of an SVG in a page or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from markupsafe import Markup, escape

WIDTH = 460
"""Of every drawing, in SVG units; a page scales it to its card."""

PALETTE = ("#1a3fc9", "#c65a06", "#0a8f63", "#8a1457", "#7a7f96", "#4a3a05")
"""Light colours of the series. Any two stay apart (CIE76 above 20) with each kind of colour blindness, and lines
differ in their dashes besides."""

DARK_PALETTE = ("#5c95ff", "#ff8048", "#8fe8c4", "#ffa6f0", "#8b9299", "#fdf3a2")
"""The same on a dark page."""

DASHES = ("none", "7 3", "2.5 2.5", "10 3 2.5 3", "5 4", "14 4")
"""Of the first, second, ... line of a drawing."""

SHAPES = (
    ".line{fill:none;stroke-width:1.9;stroke-linejoin:round}.faint{stroke-width:1;stroke-opacity:.3;fill:none}"
    ".steps{stroke-dasharray:3 3;stroke-width:1.4}.band{stroke:none;fill-opacity:.16}"
    ".area{stroke-width:.8;fill-opacity:.85}.whisker{stroke-width:3;stroke-linecap:round;stroke-opacity:.55}"
    ".thin{stroke-width:1.4}.grid,.axis,.mark,.target{fill:none}.mark{stroke-dasharray:3 3}"
    ".target{stroke-dasharray:6 4;stroke-width:1.2}"
)
"""Style of the shapes, in a page and in a file of its own."""

_ALONE = (
    "text{font:11px system-ui,sans-serif;fill:#4a5260}.title{font-size:13px;font-weight:600;fill:#171b22}"
    ".rowlabel{fill:#171b22;font-size:12px}"
    ".grid{stroke:#e4e7ec}.axis{stroke:#9aa2ae}.mark{stroke:#5c6470}.target{stroke:#171b22}.area{stroke:#fff}"
)

Sign: TypeAlias = Literal["line", "area", "dot", "diamond", "limit", "target"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One entry of a legend: its words, its sign, the palette's slot and the dash of its line."""

    label: str
    sign: Sign
    color: int = 0
    dash: int = 0


def series_css(colors: Sequence[str] | None = None) -> str:
    """Classes of stroke (s0...), fill (f0...) and dash (d0...); ``colors`` instead of the page's variables."""
    shown = colors or [f"var(--c{i})" for i in range(len(PALETTE))]
    rules = [f".s{i}{{stroke:{c}}}.f{i}{{fill:{c}}}" for i, c in enumerate(shown)]
    return "".join(rules) + "".join(f".d{i}{{stroke-dasharray:{dash}}}" for i, dash in enumerate(DASHES))


def page_css() -> str:
    """The palette as variables of a light, a dark and a printed page, and what the drawings need."""
    light = "".join(f"--c{i}:{c};" for i, c in enumerate(PALETTE))
    dark = "".join(f"--c{i}:{c};" for i, c in enumerate(DARK_PALETTE))
    return (
        f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"{SHAPES}{series_css()}.area{{stroke:var(--card)}}"
    )


def sign(entry: Entry, x: float, y: float) -> str:
    """The sign of a legend entry, 22 wide, with its middle at height ``y``."""
    middle = x + 11
    return {
        "line": f'<path class="line s{entry.color} d{entry.dash}" d="M{x:g} {y:g}h22"/>',
        "area": f'<rect class="area f{entry.color}" x="{x + 5:g}" y="{y - 6:g}" width="12" height="12" rx="2"/>',
        "dot": f'<path class="whisker s{entry.color}" d="M{x + 1:g} {y:g}h20"/>'
        f'<circle class="f{entry.color}" cx="{middle:g}" cy="{y:g}" r="4.5"/>',
        "diamond": diamond(entry.color, middle, y),
        "limit": f'<path class="line s{entry.color} steps" d="M{x:g} {y:g}h22"/>',
        "target": f'<path class="target" d="M{x:g} {y:g}h22"/>',
    }[entry.sign]


def diamond(color: int, x: float, y: float) -> str:
    """The sign of a single measurement."""
    return f'<path class="f{color}" d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"/>'


def swatch(entry: Entry) -> Markup:
    """A legend's sign as an element of its own, for the page."""
    return Markup(f'<svg class="key" viewBox="0 0 22 14" aria-hidden="true">{sign(entry, 0, 7)}</svg>')


def picture(
    *, key: str, title: str, description: str, height: float, body: str, legend: Sequence[Entry], alone: bool
) -> Markup:
    """The ``<svg>`` of a drawing: ``alone`` as a file with its own colours, title and legend, else for the page.

    ``title``, ``description`` and the legend's words are escaped here; ``body`` is markup.
    """
    if not alone:
        return Markup(
            f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" data-chart="{escape(key)}" '
            f'aria-label="{escape(description)}">{body}</svg>'
        )
    return _file(title, description, height, body, legend, f"<style>{file_css()}</style>")


def picture_frame(*, title: str, height: float, legend: Sequence[Entry]) -> Markup:
    """A file's drawing without its body and style, which the script of a page puts in: what ``picture`` adds."""
    return _file(title, title, height, "", legend, "<style></style>")


def file_css() -> str:
    """The style of a drawing as a file: always light."""
    return _ALONE + SHAPES + series_css(PALETTE)


def _file(title: str, description: str, height: float, body: str, legend: Sequence[Entry], style: str) -> Markup:
    longest = max((len(entry.label) for entry in legend), default=0)
    per_row = 1 if longest > 32 else 2 if longest > 18 else 3
    pitch = (WIDTH - 24) / per_row
    whole = height + 24 + 18 * -(-len(legend) // per_row)
    entries = "".join(
        sign(entry, 12 + pitch * (i % per_row), height + 18 * (i // per_row) + 8)
        + f'<text x="{12 + pitch * (i % per_row) + 28:g}" y="{height + 18 * (i // per_row) + 12:g}">'
        + f"{escape(entry.label)}</text>"
        for i, entry in enumerate(legend)
    )
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole:g}" width="{2 * WIDTH}" '
        f'height="{2 * whole:g}"><title>{escape(description)}</title>'
        f"{style}"
        f'<rect width="{WIDTH}" height="{whole:g}" fill="#fff"/>'
        f'<text class="title" x="12" y="17">{escape(title)}</text>'
        f'<g transform="translate(0 18)">{body}{entries}</g></svg>'
    )


def arm_sign(slot: int) -> Entry:
    """The legend's entry of an arm, as its lines are drawn."""
    return Entry(label="", sign="line", color=slot % len(PALETTE), dash=(slot + slot // 6) % 6)
