"""One self-contained HTML page from a run folder: no server, no network, no third-party script."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from magicrl.files import write_atomically
from magicrl.reporting import wording
from magicrl.reporting.blocks import Block, run_blocks
from magicrl.reporting.canvas import file_css, page_css
from magicrl.reporting.run_folder import RecordedRun, read_run
from magicrl.reporting.sample_browser import clipped
from magicrl.reporting.summary import training_seconds

SCRIPTS = ("values.js", "crosshair.js", "save.js", "browse.js")
"""Parts of the page's one script, in order."""

MOST_CHARACTERS = 20_000
"""Of one response on the page; the evaluation's file has it whole."""


def write_report(run_folder: Path, output: Path | None = None) -> Path:
    """Write the report of ``run_folder`` to ``output`` (default: its ``report.html``) and return that path.

    A run that is not finished has a report too, of what there is.

    Raises:
        RunFolderError: no run folder, or a corrupt file in it.
        ValueError: the page cannot be written.
    """
    run = read_run(run_folder)
    command = f"magicrl report {run_folder}" + (f" --output {output}" if output is not None else "")
    page = render_page(run.name, _facts(run), run_blocks(run), command)
    return write_page(page, output or run_folder / "report.html")


def write_page(page: str, target: Path) -> Path:
    """Write a page whole or not at all.

    Raises:
        ValueError: it cannot be written, or its folder does not exist.
    """
    if not target.parent.is_dir():
        raise ValueError(f"{target}: there is no folder {target.parent}; make it, or choose another --output")
    try:
        write_atomically(target, page.encode("utf-8", "replace"))  # no lone surrogate of hostile text stops a report
    except OSError as error:
        raise ValueError(f"{target}: the report cannot be written: {error}; choose another output") from None
    return target


def render_page(
    title: str,
    facts: Sequence[tuple[str, str]],
    blocks: Sequence[Block],
    command: str = "",
    kind: str = "run report",
) -> str:
    """A page of ``blocks`` under ``title`` with a line of (label, value) ``facts``; ``command`` made it.

    Everything but our own drawings is escaped; besides, the page's content policy allows no script but
    ours (by its hash) and no request at all.
    """
    environment = Environment(
        loader=PackageLoader("magicrl.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        percent=wording.percent,
        points=wording.points,
        number=wording.number,
        duration=wording.duration,
        temperature=wording.temperature,
        visible=wording.visible,
        shortened=shortened,
        clipped=clipped,
    )
    script = "".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    hover: dict[str, Any] = {"#style": file_css()} | {
        key: value for block in blocks for key, value in block.hover.items()
    }
    return environment.get_template("page.html.j2").render(
        title=title,
        kind=kind,
        facts=facts,
        blocks=blocks,
        command=command,
        version=importlib.metadata.version("magicrl"),
        style=Markup(page_css() + _asset("page.css")),
        script=Markup(script),
        script_hash=digest,
        hover=Markup(_script_json(hover)),
    )


def shortened(text: str) -> str:
    """``text`` up to a length that a page can show, with a note on what is left out."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n[… {len(text) - MOST_CHARACTERS} more characters in the evaluation's file]"


def _facts(run: RecordedRun) -> list[tuple[str, str]]:
    environments = run.run.get("environments") or [{}]
    started, ended = (
        str(environments[0].get("started") or run.run.get("started") or ""),
        str(run.run.get("ended") or ""),
    )
    facts = [
        ("status", run.status),
        ("training steps", str(len(run.metrics))),
        ("time in training steps", wording.duration(training_seconds(run))),
        ("seed", str(run.run.get("seed", "–"))),
        ("started", wording.moment(started)),
        ("ended", wording.moment(ended)),
        ("error", str(run.run.get("error") or "")),
        ("machine", str(environments[0].get("machine") or run.run.get("machine") or "")),
    ]
    return [(label, value) for label, value in facts if value]


def _asset(name: str) -> str:
    return files("magicrl.reporting").joinpath("templates", name).read_text(encoding="utf-8")


def _script_json(value: Any) -> str:
    """JSON that cannot close the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
