"""``magicrl preflight``: minutes on one's own model, reward and data, before a run is paid for.

The figures are made into JSON values once (``api/preflight.py``); text, ``--json`` and the page show these.
"""

from __future__ import annotations

import json as json_text
import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from magicrl.cli.options import Overrides
from magicrl.reporting.wording import visible

UNSOUND = 3
"""Exit status where something would keep the run from learning; that of ``magicrl train`` after such a run."""


def preflight(
    recipe: Path,
    /,
    *,
    set_: Overrides = None,
    minutes: float = 5.0,
    samples: int = 256,
    json: bool = False,
    page: Path | None = None,
) -> int:
    """Look at a run before it is paid for: can it learn, is the reward sound, does the template fit, is the rate sane.

    It samples from the start model, asks the reward, and makes two training steps on a copy in memory; no run folder is
    made. Exit status: 0 sound; 3 something would keep it from learning (it says what, and the setting that mends it);
    1 the run would be refused; 2 the command line or the recipe is wrong.

    Example: magicrl preflight quickstart --set optimizer.learning_rate=3e-2

    Parameters
    ----------
    recipe
        The training recipe (TOML).
    set_
        Override a setting, as in magicrl train (repeatable).
    minutes
        That it may take, about; a supervised start that is not there yet is made besides, and kept for the run.
    samples
        Most responses of the first measurement.
    json
        Print the figures and findings as a JSON object.
    page
        Also write a page to this file: one HTML file that needs no server.
    """
    from magicrl.api.preflight import looked_at  # numpy and jinja2: not for --help

    told = Console(stderr=True, highlight=False)
    found = looked_at(
        recipe,
        set_ or [],
        minutes=minutes,
        samples=samples,
        tell=lambda what: told.print(what, style="dim"),
    )
    if json:
        sys.stdout.write(json_text.dumps(found, indent=1) + "\n")
    else:
        from magicrl.reporting.preflight_page import figures_of, verdict_of

        console = Console(highlight=False, soft_wrap=True)
        table = Table(show_header=False, box=None, pad_edge=False)
        for label, value in figures_of(found):
            table.add_row(label, visible(value))
        console.print(table, markup=False, soft_wrap=True)
        for finding in found["findings"]:
            console.print(f"{finding['severity']}: {finding['name'].replace('_', ' ')}", style="bold", markup=False)
            console.print(f"  {visible(finding['message'])}\n  {visible(finding['remedy'])}", markup=False)
        console.print(verdict_of(found), markup=False)
    if page is not None:
        from magicrl.reporting.preflight_page import write_preflight_page

        written = write_preflight_page(found, page, "magicrl " + shlex.join(sys.argv[1:]))
        told.print(f"page: {written}", markup=False, soft_wrap=True)
    return 0 if found["sound"] else UNSOUND
