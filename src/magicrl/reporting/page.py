"""One self-contained HTML page: no server, no network, no third-party script."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from magicrl.files import NO_ROOM, write_atomically
from magicrl.reporting import wording
from magicrl.reporting.charts import FigureView, file_css, page_css
from magicrl.reporting.samples import clipped
from magicrl_verifiers.progress import duration

SCRIPTS = ("values.js", "crosshair.js", "save.js", "browse.js")
"""Parts of the page's script, in order."""

MOST_CHARACTERS = 20_000
"""Maximum number of characters of one text on the page. The file of the evaluation has the whole text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageBlock:
    """One section of a page."""

    key: str  # anchor of the section
    title: str
    template: str  # file in templates/blocks that shows ``data``
    data: Mapping[str, Any]
    hover: Mapping[str, Any] = field(default_factory=dict[str, Any])  # chart -> values for the crosshair


def block(key: str, title: str, data: Mapping[str, Any] | None, template: str = "") -> PageBlock | None:
    """Return the section that ``template`` (default: ``key``) shows; None without data."""
    if data is None:
        return None
    return PageBlock(key=key, title=title, template=f"{template or key}.html.j2", data=data)


def figures_block(key: str, title: str, panels: Sequence[Sequence[FigureView]], note: str = "") -> PageBlock:
    """Return a section of figures. Those of one panel share a card."""
    hover = crosshairs(view for panel in panels for view in panel)
    data = {"panels": panels, "axes": (), "note": note}
    return PageBlock(key=key, title=title, template="figures.html.j2", data=data, hover=hover)


def crosshairs(views: Iterable[FigureView]) -> dict[str, Any]:
    """Return by chart the data for the crosshair."""
    return {view.name: view.hover for view in views if view.hover is not None}


def write_page(page: str, target: Path) -> Path:
    """Write a page atomically and return its path.

    Raises:
        ValueError: the page cannot be written, or its folder does not exist.
        OSError: the disk is full.
    """
    if not target.parent.is_dir():
        raise ValueError(f"{target}: there is no folder {target.parent}; create it, or choose another --output")
    try:
        # lone surrogates in hostile text must not stop a report
        write_atomically(target, page.encode("utf-8", "replace"))
    except OSError as error:
        if error.errno in NO_ROOM:
            raise  # failed work, not a wrong command line
        raise ValueError(f"{target}: the report cannot be written: {error}; choose another output") from None
    return target


def render_page(
    title: str,
    facts: Sequence[tuple[str, str]],
    blocks: Sequence[PageBlock | None],
    command: str = "",
    kind: str = "run report",
) -> str:
    """Return a page. Everything but the drawings is escaped.

    The page's content security policy allows no other script (by hash) and no request.

    Args:
        title: title of the page.
        facts: (label, value) of the page's head; empty values are left out.
        blocks: sections in order; None is left out.
        command: command that made the page, for its foot.
        kind: kind of page, above the title.
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
        number=wording.number_text,
        temperature=wording.temperature_text,
        visible=wording.visible,
        shortened=shortened,
        clipped=clipped,
        duration=duration,
    )
    shown = [block for block in blocks if block is not None]
    script = "".join(_asset(name) for name in SCRIPTS)
    hover = {"#style": file_css()} | {key: value for block in shown for key, value in block.hover.items()}
    return environment.get_template("page.html.j2").render(
        title=title,
        kind=kind,
        facts=[(label, value) for label, value in facts if value],
        blocks=shown,
        command=command,
        version=importlib.metadata.version("magicrl"),
        style=Markup(page_css() + _asset("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        hover=htmlsafe_json_dumps(hover, separators=(",", ":")),  # cannot close the script element
    )


def shortened(text: str) -> str:
    """Return the first ``MOST_CHARACTERS`` of ``text``, with a note on what is left out."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n[… {len(text) - MOST_CHARACTERS} more characters in the evaluation's file]"


def _asset(name: str) -> str:
    return files("magicrl.reporting").joinpath("templates", name).read_text(encoding="utf-8")
