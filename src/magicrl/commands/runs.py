"""``magicrl runs``: list the runs below a folder, filtered and sorted, or compare two of them."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from magicrl.commands.options import Several, check_read

if TYPE_CHECKING:
    from magicrl.reporting.run_list import ListedRun

SHOWN = 3
"""Maximum number of changed settings of a run in the table. The others are counted."""
_WIDE = {"started": 110, "train": 100, "last": 100, "recipe": 84, "steps": 70, "test": 0, "best": 0}
"""Columns, and the smallest terminal width that shows them."""
_STYLES = {"finished": "green", "running": "cyan", "stopped": "yellow", "failed": "red", "killed?": "red"}


def runs(
    folder: Path = Path("runs"),
    /,
    *,
    where: Several = None,
    sort: str | None = None,
    reverse: bool = False,
    compare: Annotated[tuple[str, str] | None, Parameter(negative=())] = None,
    json: bool = False,
) -> int:
    """List runs: recipe, status, steps, best and last validation, test score, start time and changed settings.

    Exit status: 0; 1 a run folder cannot be read (it is named, the others are shown).

    Example: magicrl runs

    Example: magicrl runs studies --where status=finished --where 'best>=0.5' --sort best --reverse

    Example: magicrl runs --compare seed-0 seed-1

    Parameters
    ----------
    folder
        Folder to search, including all folders below it.
    where
        Only runs that meet NAME=VALUE, or != < <= > >= ~ (holds the text); NAME is a column (run, recipe, status,
        steps, best, last, train, test, verdict, started, seconds), a setting (entropy.target) or a metric
        (repeatable).
    sort
        A column, a setting or a metric; default: the newest first.
    reverse
        The largest first; without --sort the oldest first.
    compare
        Two runs, by name or folder: their results and the settings that differ.
    json
        A JSON list instead of text.
    """
    from magicrl.reporting import run_list

    if compare is not None:
        check_read("--compare", {"where": where, "sort": sort, "reverse": reverse})
    console = Console(emoji=False, highlight=False)
    found, left_out = run_list.list_runs(folder)
    listed = run_list.where(found, where or [])
    if sort is not None:
        listed = run_list.ordered(listed, sort, reverse=reverse)
    elif reverse:
        listed.reverse()
    if compare is not None:
        listed = [run_list.find_run(found, name) for name in compare]
    if json:
        console.print(json_text.dumps([run.as_json() for run in listed], indent=2), markup=False, soft_wrap=True)
    elif compare is not None:
        console.print(_side_by_side(listed))
    elif listed:
        console.print(_table(listed, console.width))
    else:
        console.print(f"no run in {folder}" + (f" meets {', '.join(where)}" if where else ""), markup=False)
    for _, why in left_out:
        Console(emoji=False, stderr=True).print(f"left out: {why}", style="yellow", markup=False, soft_wrap=True)
    return 1 if left_out else 0


def _table(listed: Sequence[ListedRun], width: int) -> Table:
    """Return a table with as many columns as fit into the terminal. The changed settings are last and are wrapped."""
    from magicrl.reporting.variants import value_text
    from magicrl.reporting.wording import visible

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown = [name for name in reversed(_WIDE) if width >= _WIDE[name]]
    order = [name for name in ("recipe", "steps", "best", "last", "train", "test", "started") if name in shown]
    table.add_column("run", overflow="fold", min_width=8)
    table.add_column("status", no_wrap=True)
    for name in order:
        table.add_column(
            name, no_wrap=name != "recipe", overflow="fold", justify="left" if name == "recipe" else "right"
        )
    table.add_column("changed", overflow="fold", min_width=12)
    for run in listed:
        cells = [Text(visible(_cell(run, name))) for name in order]
        status = Text(visible(run.columns["status"]), _STYLES.get(run.columns["status"], ""))
        changed = [f"{key}={value_text(value)}" for key, value in run.changed.items()]
        rest = f" (+{len(changed) - SHOWN})" if len(changed) > SHOWN else ""
        table.add_row(Text(visible(run.label)), status, *cells, Text(", ".join(changed[:SHOWN]) + rest))
    return table


def _cell(run: ListedRun, name: str) -> str:
    from magicrl.reporting.wording import moment
    from magicrl_verifiers.progress import duration

    value = run.columns[name]
    if name in ("best", "last", "train", "test"):
        return run.recorded.measure.value(value)
    if name == "steps":
        most = sum(int(stage["max_steps"]) for stage in run.recorded.config.get("stages", []))
        return f"{value}/{most}" if most and run.columns["status"] != "finished" else str(value)  # stages may end early
    if name == "started":
        return moment(str(value or "")).removesuffix(" UTC") or "–"
    return duration(value) if name == "seconds" else "–" if value is None else str(value)


def _side_by_side(pair: Sequence[ListedRun]) -> Table:
    """Return the results of two runs and the settings that differ, those that define variants first."""
    from magicrl.reporting.run_list import COLUMNS
    from magicrl.reporting.variants import contents, decides, setting_rows
    from magicrl.reporting.wording import visible

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", *(run.label for run in pair)):
        table.add_column(Text(visible(title)), overflow="fold")
    for name in COLUMNS[1:]:
        cells = [_cell(run, name) for run in pair]
        table.add_row(Text(name, "dim"), *(Text(visible(cell)) for cell in cells))
    digests = contents([run.recorded for run in pair])
    rows: list[dict[str, Any]] = setting_rows(
        [[run.settings | d] for run, d in zip(pair, digests, strict=True)], decides
    )
    for row in rows:
        table.add_row(
            Text(row["key"], "" if row["decides"] else "dim"), *(Text(visible(cell)) for cell in row["cells"])
        )
    return table
