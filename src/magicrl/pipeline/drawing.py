"""Pictures of a data set: bars, and a waterfall of what was dropped. Self-contained SVG, readable in print."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from markupsafe import escape

WIDTH = 860
_FONT = 'font-family="system-ui, sans-serif"'
_INK, _KEPT, _GONE, _FAINT, _LINE = "#1f2933", "#3b6ea5", "#c2693d", "#b8c4d0", "#d5dbe1"


def _svg(title: str, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" '
        f'role="img" {_FONT} font-size="13" fill="{_INK}"><title>{escape(title)}</title>'
        f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>'
        f'<text x="16" y="24" font-size="16" font-weight="600">{escape(title)}</text>{"".join(body)}</svg>\n'
    )


def bars(title: str, labels: Sequence[str], values: Sequence[int], *, faint: Collection[int], note: str) -> str:
    """Upright bars with their values; those whose place is in ``faint`` are pale."""
    top, bottom, left = 52.0, 250.0, 40.0
    step = (WIDTH - 2 * left) / max(1, len(values))
    most = max([1, *values])
    body: list[str] = []
    for place, (label, value) in enumerate(zip(labels, values, strict=True)):
        height = (bottom - top) * value / most
        x, middle = left + place * step + step * 0.1, left + place * step + step / 2
        colour = _FAINT if place in faint else _KEPT
        body.append(
            f'<rect x="{x:.1f}" y="{bottom - height:.1f}" width="{0.8 * step:.1f}" height="{height:.1f}" '
            f'fill="{colour}"/>'
        )
        body.append(f'<text x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(label)}</text>')
        body.append(f'<text x="{middle:.1f}" y="{bottom - height - 5:.1f}" text-anchor="middle">{value}</text>')
    body.append(f'<line x1="{left}" x2="{WIDTH - left}" y1="{bottom}" y2="{bottom}" stroke="{_LINE}"/>')
    body.append(f'<text x="16" y="{bottom + 44}">{escape(note)}</text>')
    return _svg(title, bottom + 60, body)


@dataclass(frozen=True, slots=True)
class Fall:
    """A level of a waterfall: what stood before it, what is left, and why the rest went."""

    label: str
    before: int
    after: int
    reasons: Sequence[tuple[str, int]]


def waterfall(title: str, falls: Sequence[Fall]) -> str:
    """What is left after each step, from top to bottom, and beside it how many went for which reason."""
    left, width = 150.0, 400.0
    most = max([1, *(fall.before for fall in falls)])
    y = 48.0
    body: list[str] = []
    for fall in falls:
        reasons = list(fall.reasons)
        shown = reasons[:6]
        if len(reasons) > 6:
            shown.append((f"{len(reasons) - 6} other reasons", sum(count for _, count in reasons[6:])))
        height = max(30.0, 17.0 * len(shown) + 8)
        kept, gone = width * fall.after / most, width * (fall.before - fall.after) / most
        body.append(f'<text x="{left - 10}" y="{y + 19:.1f}" text-anchor="end">{escape(fall.label)}</text>')
        body.append(f'<rect x="{left}" y="{y:.1f}" width="{kept:.1f}" height="26" fill="{_KEPT}"/>')
        body.append(f'<rect x="{left + kept:.1f}" y="{y:.1f}" width="{gone:.1f}" height="26" fill="{_GONE}"/>')
        inside = kept > 70
        x, colour = (left + kept - 6, "white") if inside else (left + kept + gone + 6, _INK)
        anchor = "end" if inside else "start"
        body.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="{anchor}" fill="{colour}">{fall.after:,}</text>')
        for place, (reason, count) in enumerate(shown):
            body.append(
                f'<text x="{left + width + 14}" y="{y + 14 + 17 * place:.1f}" font-size="12" fill="{_GONE}">'
                f"{count:,} {escape(reason)}</text>"
            )
        y += height + 10
    body.append(
        f'<rect x="{left}" y="{y:.1f}" width="12" height="12" fill="{_KEPT}"/>'
        f'<text x="{left + 18}" y="{y + 11:.1f}">kept</text>'
    )
    body.append(
        f'<rect x="{left + 70}" y="{y:.1f}" width="12" height="12" fill="{_GONE}"/>'
        f'<text x="{left + 88}" y="{y + 11:.1f}">dropped</text>'
    )
    return _svg(title, y + 30, body)
