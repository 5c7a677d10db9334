"""Data card of a mixture: contents, licences, the rows that every step dropped with the reasons, and figures.

The figures are self-contained SVG and readable in print.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup, escape

from magicrl.evaluation.provenance import now
from magicrl.files import write_atomically
from magicrl.pipeline.frame import count_rows
from magicrl.pipeline.parts import StepFolder
from magicrl.pipeline.pipeline_schema import PipelineConfig, PipelineSource
from magicrl.pipeline.stats import StepCounts, counts_of
from magicrl_verifiers.secrets import without_secrets

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


def bars(title: str, values: Sequence[int], *, faint: Collection[int], note: str) -> str:
    """Return an SVG of vertical bars with their values. Bars whose index is in ``faint`` are pale."""
    top, bottom, left = 52.0, 250.0, 40.0
    step = (WIDTH - 2 * left) / max(1, len(values))
    body: list[str] = []
    for place, value in enumerate(values):
        # 1: without any value all bars are empty, not an error
        height = (bottom - top) * value / max(1, *values)
        x, middle = left + place * step + step * 0.1, left + place * step + step / 2
        body.append(_rect(x, bottom - height, 0.8 * step, height, _FAINT if place in faint else _KEPT))
        body.append(_text(middle, bottom + 18, place, "middle"))
        body.append(_text(middle, bottom - height - 5, value, "middle"))
    body.append(_rect(left, bottom, WIDTH - 2 * left, 1, _LINE))
    body.append(_text(16, bottom + 44, note))
    return _svg(title, bottom + 60, body)


def waterfall(title: str, steps: Sequence[StepCounts]) -> str:
    """Return an SVG of the rows that remain after each step, with the number of dropped rows by reason."""
    left, width, y = 150.0, 400.0, 48.0
    most = max([1, *(step.entered for step in steps)])
    body: list[str] = []
    for step in steps:
        reasons = list(step.reasons.items())
        shown = reasons[:6]
        if len(reasons) > 6:
            shown.append((f"{len(reasons) - 6} other reasons", sum(count for _, count in reasons[6:])))
        kept, gone = width * step.kept / most, width * (step.entered - step.kept) / most
        body.append(_text(left - 10, y + 19, step.step, "end"))
        body += [_rect(left, y, kept, 26, _KEPT), _rect(left + kept, y, gone, 26, _GONE)]
        if kept > 70:
            body.append(_text(left + kept - 6, y + 18, f"{step.kept:,}", "end", "white"))
        else:
            body.append(_text(left + kept + gone + 6, y + 18, f"{step.kept:,}"))
        for place, (reason, count) in enumerate(shown):
            body.append(_text(left + width + 14, y + 14 + 17 * place, f"{count:,} {reason}", colour=_GONE))
        y += max(30.0, 17.0 * len(shown) + 8) + 10
    for x, word, colour in ((left, "kept", _KEPT), (left + 70, "dropped", _GONE)):
        body += [_rect(x, y, 12, 12, colour), _text(x + 18, y + 11, word)]
    return _svg(title, y + 30, body)


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: object, anchor: str = "start", colour: str = _INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


Table = tuple[str, list[str], list[list[str]]]
"""Title, column names and rows."""


def write_card(config: PipelineConfig, output: Path, mix: StepFolder, files: Mapping[str, int]) -> None:
    """Write ``card.json``, ``card.md``, ``card.html`` and ``waterfall.svg`` next to the training files."""
    # the mix step is not finished yet, so its rows are counted here
    counts = [one for one in counts_of(output) if one.step != mix.path.name]
    counts.append(StepCounts(step=mix.path.name, sources=count_rows(mix)))
    sources = {source.label: {"licence": source.stated_licence(), "from": _origin(source)} for source in config.sources}
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": config.name,
        "made": now(),
        "files": dict(files),
        "sources": sources,
        "steps": [{"step": one.step, "in": one.entered, "kept": one.kept, "sources": one.sources} for one in counts],
    }
    steps = [one.step for one in counts]
    rows: list[list[str]] = []
    for name in sorted({name for one in counts for name in one.sources}):
        known = sources.get(name, {"licence": "see its run", "from": name})
        read = str(counts[0].sources.get(name, {}).get("in", 0))
        left = [str(one.sources.get(name, {}).get("kept", 0)) for one in counts]
        rows.append([name, known["from"], known["licence"], read, *left])
    reasons: list[list[str]] = []
    for one in counts:
        for reason, count in one.reasons.items():
            dropped = Counter({name: source["dropped"].get(reason, 0) for name, source in one.sources.items()})
            of = ", ".join(f"{name} {number}" for name, number in dropped.most_common() if number)
            reasons.append([one.step, reason, str(count), of])
    tables: list[Table] = [
        ("Files", ["file", "rows"], [[name, str(rows)] for name, rows in files.items()]),
        (
            "Sources, and the rows that each step left",
            ["source", "from", "licence", "read", *steps],
            [*rows, ["all", "", "", str(counts[0].entered), *(str(one.kept) for one in counts)]],
        ),
        ("What was dropped, and why", ["step", "reason", "rows", "of"], reasons),
    ]
    picture = waterfall(f"{config.name}: what every step left", counts)
    folder = output / "mixture"
    write_atomically(folder / "card.json", json.dumps(document, indent=1))
    write_atomically(folder / "waterfall.svg", picture)
    write_atomically(folder / "card.md", _markdown(document, tables))
    page = Environment(autoescape=True, trim_blocks=True).from_string(
        resources.files("magicrl.pipeline").joinpath("card.html").read_text(encoding="utf-8")
    )
    settings = without_secrets((output / "pipeline.toml").read_text(encoding="utf-8"))
    drawing = Markup(picture)  # safe: texts in it are already escaped
    html = page.render(name=config.name, made=document["made"], picture=drawing, tables=tables, settings=settings)
    write_atomically(folder / "card.html", html)


def _origin(source: PipelineSource) -> str:
    row = source.row
    brought = Path(source.source or "").name  # ``read.py:cards``
    named = ", ".join(Path(path).name for path in source.paths) or source.hub or brought
    place = named or (row.hub if row is not None else "")
    title = row.title if row is not None else source.label
    return without_secrets(f"{title} ({place}{', ' + source.revision if source.revision else ''})")


def _markdown(document: Mapping[str, Any], tables: Sequence[Table]) -> str:
    licences = sorted({one["licence"] for one in document["sources"].values()})
    lines = [
        f"# {document['name']}\n",
        f"Made by `magicrl data build` on {document['made']}.\n",
        "Every row says in `ids.jsonl` which problem it is; `magicrl data stats FOLDER --problem ID` says what became "
        "of any problem that was read.\n",
        f"Licences of the sources: {'; '.join(licences)}.\n",
        "![what every step left](waterfall.svg)\n",
    ]
    for title, head, rows in tables:
        lines += [f"## {title}\n", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
        lines.append("")
    return "\n".join(lines)
