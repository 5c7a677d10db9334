"""``magicrl explain``: which steps of a run are worth looking at, and one of them made again and taken apart.

The figures are made into JSON values once (``api/explain.py``); text, ``--json`` and the page show these.
"""

from __future__ import annotations

import json as json_text
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from magicrl.cli.options import Several

NOT_EQUAL = 3
"""Exit status where the step did not come out as it was recorded."""
SHOWN = 10
"""Groups in the terminal."""


def explain(
    run: Path,
    /,
    *,
    step: int | None = None,
    what_if: Several = None,
    json: bool = False,
    page: Path | None = None,
) -> int:
    """Find the steps of a run that are worth looking at; with --step make one again, bit for bit, and take it apart.

    The run's files are read and never written. Exit status: 0; 3 the step did not come out as it was recorded; 1 the
    run cannot be made again here (it says why); 2 the command line is wrong.

    Example: magicrl explain runs/quickstart

    Example: magicrl explain runs/quickstart --step 40 --what-if algorithm.loss=cispo --page step-40.html

    Parameters
    ----------
    run
        A run folder.
    step
        The step to be made again, from the newest kept checkpoint before it or from the start.
    what_if
        The same responses under other settings of algorithm, entropy, optimizer, reference.coefficient or reward:
        KEY=VALUE, several apart by spaces (repeatable).
    json
        Print everything as a JSON object.
    page
        Also write a page to this file: one HTML file that needs no server.
    """
    from magicrl.api.explain import explained, found_steps
    from magicrl.config.errors import RecipeError

    console, told = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False)
    if step is None:
        if what_if or page:
            raise RecipeError("--what-if and --page belong to a step; name one with --step")
        steps = found_steps(run)
        if json:
            sys.stdout.write(json_text.dumps(steps, indent=1) + "\n")
        else:
            _show_steps(steps, console)
        return 0
    found = explained(run, step, what_if or [], lambda what: told.print(what, style="dim", markup=False))
    if json:
        sys.stdout.write(json_text.dumps(found) + "\n")
    else:
        _show(found, console)
    if page is not None:
        from magicrl.reporting.explain_page import write_explain_page

        written = write_explain_page(found, page, "magicrl " + shlex.join(sys.argv[1:]))
        told.print(f"page: {written}", markup=False, soft_wrap=True)
    return 0 if found["equal"] else NOT_EQUAL


def _show_steps(found: dict[str, Any], console: Console) -> None:
    from magicrl.reporting.wording import checkpoint_name
    from magicrl_verifiers.progress import duration

    if not found["notable"]:
        console.print(f"none of the {found['steps']} steps stands out; any is made again with --step", markup=False)
    for one in found["notable"]:
        console.print(f"step {one['step']}: {one['sign']}", style="bold", markup=False)
        count = one["step"] - one["from_checkpoint"]
        steps = "1 step" if count == 1 else f"{count} steps, {duration(one['seconds'])} of training"
        console.print(
            f"  {one['why']}\n  made again from {checkpoint_name(one['from_checkpoint'])}: {steps}", markup=False
        )
    if found["notable"]:
        words = shlex.join(["magicrl", "explain", found["run"], "--step", str(found["notable"][0]["step"])])
        console.print(words, markup=False, style="dim")


def _show(found: dict[str, Any], console: Console) -> None:
    from magicrl.reporting.explain_page import figures_of, group_rows, verdict_of, what_if_rows
    from magicrl.reporting.wording import visible

    console.print(verdict_of(found), style="bold", markup=False)
    for text in found["warnings"]:
        console.print(visible(text), style="yellow", markup=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    for label, value in figures_of(found):
        table.add_row(label, visible(value))
    console.print(table, markup=False)
    head, rows = group_rows(found)
    table = Table(*(Column(name, overflow="fold") for name in head), box=None, pad_edge=False)
    for row in rows[:SHOWN]:
        table.add_row(*(visible(cell) for cell in row))
    if rows:
        console.print(table, markup=False)
    if rows[SHOWN:]:
        console.print(f"and {len(rows) - SHOWN} groups more (--page, --json)", style="dim")
    head, rows = what_if_rows(found)
    for row in rows:
        told = ", ".join(f"{name} {cell}" for name, cell in zip(head[1:], row[1:], strict=True) if cell)
        console.print(f"{visible(row[0])}: {told}", markup=False)
