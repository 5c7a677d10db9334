"""``magicrl report``: the page of a run, or one that compares runs and evaluations."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from magicrl.commands.options import Flag, check_read
from magicrl.config.errors import RecipeError
from magicrl.reporting.comparison_page import is_evaluation, write_comparison_page
from magicrl.reporting.run_page import HOST, report_server, write_run_page
from magicrl_verifiers.cli import Whole


def report(
    *folders: Path,
    output: Path | None = None,
    x: Literal["steps", "tokens", "wall", "gpu-hours"] | None = None,
    group_by: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None,
    serve: Flag = False,
    port: Whole = 0,
) -> int:
    """Write a report: one self-contained HTML page of a run, or one that compares runs and evaluations.

    Example: magicrl report runs/quickstart

    Example: magicrl report runs/quickstart --serve

    Example: magicrl report runs/adaptive-0 runs/adaptive-1 runs/none-0 runs/none-1 --output ablation.html

    Parameters
    ----------
    folders
        One run folder, or several folders of magicrl train and magicrl eval; the others are compared with the first.
    output
        The page; default: report.html in a single folder, comparison.html here for several.
    x
        The x axis that a comparison shows first; the page can change it.
    group_by
        Settings whose values define the variants, e.g. entropy.target; default: all but seed and bookkeeping.
    serve
        Show the page of one run on 127.0.0.1 instead of writing it; it is reloaded while the run is in progress. Ctrl-C
        ends the server, not the run.
    port
        Port of --serve; 0 for a free one.
    """
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    if not folders:
        raise RecipeError("magicrl report needs at least one folder of magicrl train or magicrl eval")
    if port and not serve:
        raise RecipeError("--port needs --serve")
    if serve:
        check_read("--serve", {"output": output, "x": x, "group_by": group_by})
        if folders[1:]:
            raise RecipeError("--serve shows one run; leave it out to write a page that compares several")
        with report_server(folders[0], port) as server, contextlib.suppress(KeyboardInterrupt):  # its normal end
            console.print(f"http://{HOST}:{server.server_port}/ (Ctrl-C ends it)", markup=False)
            server.serve_forever()
        return 0
    if len(folders) == 1 and (x is not None or group_by):
        option = "--x" if x is not None else "--group-by"
        raise RecipeError(f"{option} belongs to a comparison: name two folders or more")
    if len(folders) == 1 and not is_evaluation(folders[0]):
        console.print(f"report: {write_run_page(folders[0], output)}")
        return 0
    target = output or (folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html"))
    words = ["magicrl", "report", *map(str, folders), "--output", str(target)]
    words += ["--x", x] if x is not None else []
    words += [word for key in group_by or () for word in ("--group-by", key)]
    left_out = write_comparison_page(folders, target, axis=x or "steps", keys=group_by, command=shlex.join(words))
    for _, why in left_out:
        console.print(f"left out: {why}", style="yellow", markup=False)
    console.print(f"report: {target}")
    return 1 if left_out else 0
