"""One self-contained HTML page from a run folder: no server, no network, no third-party script."""

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

from magicrl.files import write_atomically
from magicrl.reporting import wording
from magicrl.reporting.charts import FigureView, file_css, page_css
from magicrl.reporting.samples import clipped
from magicrl_verifiers.progress import duration

SCRIPTS = ("values.js", "crosshair.js", "save.js", "browse.js")
"""Parts of the page's one script, in order."""

MOST_CHARACTERS = 20_000
"""Of one response on the page; the evaluation's file has it whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One section of a page."""

    key: str  # its anchor
    title: str
    template: str  # of templates/blocks, shows ``data``
    data: Mapping[str, Any]
    hover: Mapping[str, Any] = field(default_factory=dict[str, Any])  # chart -> values for the crosshair


def block(key: str, title: str, data: Mapping[str, Any] | None, template: str = "") -> Block | None:
    """The section that the template (default: of the same name) shows; None without data."""
    if data is None:
        return None
    return Block(key=key, title=title, template=f"{template or key}.html.j2", data=data)


def figures_block(key: str, title: str, panels: Sequence[Sequence[FigureView]], note: str = "") -> Block:
    """A section of figures; those of one panel share a card."""
    hover = crosshairs(view for panel in panels for view in panel)
    data = {"panels": panels, "axes": (), "note": note}
    return Block(key=key, title=title, template="figures.html.j2", data=data, hover=hover)


def crosshairs(views: Iterable[FigureView]) -> dict[str, Any]:
    """Chart -> values for the crosshair."""
    return {view.name: view.hover for view in views if view.hover is not None}


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
    loader = PackageLoader("magicrl.reporting")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    words = ("percent", "points", "number", "temperature", "visible")
    environment.filters.update({name: getattr(wording, name) for name in words})
    environment.filters.update(shortened=shortened, clipped=clipped, duration=duration)
    script = "".join(_asset(name) for name in SCRIPTS)
    hover = {"#style": file_css()} | {key: value for block in blocks for key, value in block.hover.items()}
    return environment.get_template("page.html.j2").render(
        title=title,
        kind=kind,
        facts=facts,
        blocks=blocks,
        command=command,
        version=importlib.metadata.version("magicrl"),
        style=Markup(page_css() + _asset("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        hover=htmlsafe_json_dumps(hover, separators=(",", ":")),  # cannot close the script element
    )


def shortened(text: str) -> str:
    """``text`` up to a length that a page can show, with a note on what is left out."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:MOST_CHARACTERS]}\n[… {len(text) - MOST_CHARACTERS} more characters in the evaluation's file]"


def _asset(name: str) -> str:
    return files("magicrl.reporting").joinpath("templates", name).read_text(encoding="utf-8")
