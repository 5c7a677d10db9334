"""The data card of a mixture: what is in it, what every step dropped and why, and under which licences it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from magicrl.config.errors import without_secrets
from magicrl.evaluation.provenance import now
from magicrl.files import write_atomically
from magicrl.pipeline.drawing import Fall, waterfall
from magicrl.pipeline.frame import count_rows
from magicrl.pipeline.parts import StepFolder
from magicrl.pipeline.settings import PipelineConfig
from magicrl.pipeline.stats import StepCounts, counts_of

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:920px;margin:2em auto;padding:0 1em;color:#1f2933}"
    "table{border-collapse:collapse;width:100%;margin:1em 0}td,th{border-bottom:1px solid #d5dbe1;padding:.3em .6em;"
    "text-align:left;vertical-align:top}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}"
    "svg{max-width:100%;height:auto}pre{overflow-x:auto;background:#f5f7f9;padding:1em}"
)


def write_card(config: PipelineConfig, output: Path, mix: StepFolder, files: Mapping[str, int]) -> None:
    """Write ``card.json``, ``card.md``, ``card.html`` and ``waterfall.svg`` beside the training file.

    Args:
        config: of the pipeline.
        output: the run folder; every step but ``mix`` has its ``step.json``.
        mix: the mix step's rows, counted here because it is not finished yet.
        files: training files and their rows.
    """
    counts = [one for one in counts_of(output) if one.step != mix.path.name]
    counts.append(StepCounts(step=mix.path.name, sources=count_rows(mix)))
    folder = output / "mixture"
    licences = {source.label: source.stated_licence() for source in config.sources}
    origin = {source.label: _origin(source) for source in config.sources}
    document: dict[str, Any] = {
        "schema_version": 1,
        "name": config.name,
        "made": now(),
        "files": dict(files),
        "sources": {name: {"licence": licences[name], "from": origin[name]} for name in licences},
        "steps": [{"step": one.step, "in": one.entered, "kept": one.kept, "sources": one.sources} for one in counts],
    }
    picture = waterfall(f"{config.name}: what every step left", [_fall(one) for one in counts])
    write_atomically(folder / "card.json", json.dumps(document, indent=1))
    write_atomically(folder / "waterfall.svg", picture)
    write_atomically(folder / "card.md", _markdown(config, document, counts))
    settings = (output / "pipeline.toml").read_text(encoding="utf-8")
    write_atomically(folder / "card.html", _page(config, document, counts, picture, settings))


def _origin(source: Any) -> str:
    row = source.row
    place = ", ".join(Path(path).name for path in source.paths) or source.hub or (row.hub if row is not None else "")
    title = row.title if row is not None else source.label
    return without_secrets(f"{title} ({place}{', ' + source.revision if source.revision else ''})")


def _fall(counts: StepCounts) -> Fall:
    return Fall(counts.step, counts.entered, counts.kept, list(counts.reasons.items()))


def _source_rows(document: Mapping[str, Any], counts: Sequence[StepCounts]) -> list[list[str]]:
    """By source: what was read, what each step left, and the licence."""
    names = sorted({name for one in counts for name in one.sources})
    rows: list[list[str]] = []
    for name in names:
        known = document["sources"].get(name, {"licence": "see its run", "from": name})
        read = str(counts[0].sources.get(name, {}).get("in", 0))
        left = [str(one.sources.get(name, {}).get("kept", 0)) for one in counts]
        rows.append([name, known["from"], known["licence"], read, *left])
    total = [str(counts[0].entered), *(str(one.kept) for one in counts)]
    return [*rows, ["all", "", "", *total]]


def _reason_rows(counts: Sequence[StepCounts]) -> list[list[str]]:
    rows: list[list[str]] = []
    for one in counts:
        for reason, count in one.reasons.items():
            sources = {name: s["dropped"][reason] for name, s in one.sources.items() if reason in s["dropped"]}
            of = ", ".join(f"{name} {number}" for name, number in sorted(sources.items(), key=lambda item: -item[1]))
            rows.append([one.step, reason, str(count), of])
    return rows


def _tables(document: Mapping[str, Any], counts: Sequence[StepCounts]) -> list[tuple[str, list[str], list[list[str]]]]:
    steps = ["source", "from", "licence", "read", *(one.step for one in counts)]
    files = [[name, str(rows)] for name, rows in document["files"].items()]
    return [
        ("Files", ["file", "rows"], files),
        ("Sources, and the rows that each step left", steps, _source_rows(document, counts)),
        ("What was dropped, and why", ["step", "reason", "rows", "of"], _reason_rows(counts)),
    ]


def _markdown(config: PipelineConfig, document: Mapping[str, Any], counts: Sequence[StepCounts]) -> str:
    licences = sorted({one["licence"] for one in document["sources"].values()})
    lines = [f"# {config.name}", "", f"Made by `magicrl data build` on {document['made']}.", ""]
    lines += [
        "Every row says in `ids.jsonl` which problem it is; `magicrl data stats FOLDER --problem ID` says what",
        "",
    ]
    lines[-2] += " became of any problem that was read."
    lines += [f"Licences of the sources: {'; '.join(licences)}.", "", "![what every step left](waterfall.svg)", ""]
    for title, head, rows in _tables(document, counts):
        lines += [f"## {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def _page(
    config: PipelineConfig, document: Mapping[str, Any], counts: Sequence[StepCounts], picture: str, settings: str
) -> str:
    body = [f"<h1>{escape(config.name)}</h1>", f"<p>Made by magicrl data build on {escape(document['made'])}.</p>"]
    body.append(Markup(picture))  # our own drawing: texts in it are escaped
    for title, head, rows in _tables(document, counts):
        body.append(f"<h2>{escape(title)}</h2><table><tr>{_cells(head, 'th')}</tr>")
        body += [f"<tr>{_cells(row, 'td')}</tr>" for row in rows]
        body.append("</table>")
    body.append(f"<h2>Settings</h2><pre>{escape(settings)}</pre>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(config.name)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _cells(row: Sequence[str], kind: str) -> str:
    return "".join(f"<{kind}{' class=n' if cell.isdecimal() else ''}>{escape(cell)}</{kind}>" for cell in row)
