"""What the words of ``magicrl report`` mean: one run's own page, or one page over several folders."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from magicrl.config.errors import RecipeError
from magicrl.reporting.comparison_page import is_evaluation, write_comparison
from magicrl.reporting.curves import Axis
from magicrl.reporting.run_page import write_report

COMPARISON = Path("comparison.html")
"""Where a page over several folders goes, if nothing else is said."""


def run_report(
    folders: Sequence[Path], output: Path | None, axis: Axis | None, group_by: Sequence[str] | None, console: Console
) -> int:
    """Write the page and say where it is.

    Returns:
        0; 1 where a folder could not be read and is left out.

    Raises:
        RecipeError: no folder, or options of a comparison with a single run.
        ValueError: what cannot be read or written.
    """
    if not folders:
        raise RecipeError("magicrl report needs at least one folder of magicrl train or magicrl eval")
    if len(folders) == 1 and not is_evaluation(folders[0]):
        if axis is not None or group_by:
            option = "--x" if axis is not None else "--group-by"
            raise RecipeError(f"{option} belongs to a comparison: name two folders or more")
        console.print(f"report: {write_report(folders[0], output)}", highlight=False, soft_wrap=True)
        return 0
    target = output or (folders[0] / "report.html" if len(folders) == 1 else COMPARISON)
    words = ["magicrl", "report", *map(str, folders), "--output", str(target)]
    words += ["--x", axis] if axis is not None else []
    words += [word for key in group_by or () for word in ("--group-by", key)]
    written = write_comparison(folders, target, axis=axis or "steps", keys=group_by, command=shlex.join(words))
    for item in written.left_out:
        console.print(f"left out: {item.why}", style="yellow", highlight=False, soft_wrap=True, markup=False)
    console.print(f"report: {written.path}", highlight=False, soft_wrap=True)
    return 1 if written.left_out else 0
