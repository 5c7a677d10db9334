"""``python -m studies``: the report's ablations, listed, run and told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from magicrl.cli.main import main

app = App(name="python -m studies", help="The report's ablations at your scale: list, run, report.")

Scale = Literal["tiny", "small", "paper", "quick"]
STUDY = Path("docs/study")


def _results_file(results: Path | None, scale: Scale) -> Path:
    return results or STUDY / f"results-{scale}.jsonl"


@app.command(name="list")
def list_ablations(*names: str, scale: Scale = "tiny", results: Path | None = None) -> int:
    """List the ablations with their arms, what is done and how long the rest takes.

    Example: python -m studies list --scale tiny

    Parameters
    ----------
    names
        Ids, as 6 or 10; default: all.
    scale
        tiny runs on a laptop, small on one GPU or overnight, paper on a cluster.
    results
        Results file; default: docs/study/results-SCALE.jsonl.
    """
    from studies.definition import chosen, shipped_ablations
    from studies.runs import outlook, plan_runs, read_results

    known = read_results(_results_file(results, scale))
    table = Table("id", "ablation", "arms", "seeds", "runs done", "CPU minutes left", box=None)
    for ablation in chosen(names or ("all",), shipped_ablations()):
        definition = ablation.scales.get(scale)
        if definition is None:
            table.add_row(ablation.id, ablation.title, f"none at scale {scale}")
            continue
        look = outlook(plan_runs([ablation], scale), known)
        left = "" if not look.missing else "unknown" if look.cpu_minutes is None else f"{look.cpu_minutes:.0f}"
        arms = ", ".join(arm.name for arm in definition.arms)
        table.add_row(ablation.id, ablation.title, arms, str(definition.seeds), str(look.done), left)
    Console().print(table)
    return 0


@app.command
def run(
    *names: str,
    scale: Scale = "tiny",
    seeds: Annotated[tuple[int, ...] | None, Parameter(consume_multiple=True)] = None,
    workers: int | None = None,
    minutes: float | None = None,
    results: Path | None = None,
    work: Path = Path("runs/study"),
    keep: bool = False,
    quick: bool = False,
) -> int:
    """Run the arms that have no result yet; each result is kept as it ends, and the same command goes on.

    Example: python -m studies run 6 9 --scale tiny --minutes 30

    Example: python -m studies run --quick --results /tmp/quick.jsonl --work /tmp/quick

    Parameters
    ----------
    names
        Ids, as 6 or 10, or all.
    scale
        tiny runs on a laptop, small on one GPU or overnight, paper on a cluster.
    seeds
        Default: 0 up to the number that the ablation asks for. Others do not count in its verdicts.
    workers
        Runs at once, one thread each; default: the cores this process may use.
    minutes
        Begin no run that is not expected to end within so many minutes from now.
    results
        Results file, added to; default: docs/study/results-SCALE.jsonl.
    work
        Where supervised starts and run folders are while they are needed.
    keep
        Keep the run folders, for `magicrl report`.
    quick
        A check of the machinery in about a minute: two ablations with few steps and half-made starts, two seeds; the
        scale `quick`. Its verdicts mean nothing.
    """
    from studies.definition import chosen, shipped_ablations
    from studies.runs import outlook, plan_runs, read_results, run_study

    if quick:
        scale, names = "quick", names or ("all",)
    if not names:
        raise ValueError("which ablations? Give ids, or all (python -m studies list shows them)")
    console = Console(highlight=False)
    planned = plan_runs(chosen(names, shipped_ablations()), scale, seeds)
    processes = workers or len(os.sched_getaffinity(0))
    look = outlook(planned, read_results(_results_file(results, scale)))
    length = "nobody has measured how long they take"
    if look.cpu_minutes is not None:
        length = (
            f"about {look.cpu_minutes:.0f} CPU minutes, {look.cpu_minutes / processes:.0f} with {processes} at once"
        )
    console.print(f"{len(planned)} runs, {look.done} done, {len(look.missing)} to do: {length}")
    missing = run_study(
        planned,
        _results_file(results, scale),
        work,
        workers=processes,
        budget_minutes=minutes,
        keep_folders=keep,
        tell=lambda text: console.print(text, markup=False),
    )
    if missing:
        console.print(f"{missing} runs are still missing; the same command goes on")
    return 1 if missing else 0


@app.command
def report(*names: str, scale: Scale = "tiny", results: Path | None = None, output: Path = STUDY) -> int:
    """Write the pages: an index, one an ablation, settings, questions, equal cost, figures; and claims.jsonl.

    Example: python -m studies report --scale tiny

    Parameters
    ----------
    names
        Ids; default: all. p-values are corrected over the claims of those that are given.
    scale
        Whose results.
    results
        Results file; default: docs/study/results-SCALE.jsonl.
    output
        Folder of the pages.
    """
    from studies.definition import chosen, shipped_ablations
    from studies.pages import write_pages
    from studies.runs import read_results

    file = _results_file(results, scale)
    known = read_results(file)
    if not known:
        raise ValueError(f"{file}: no results; run `python -m studies run all --scale {scale}` first")
    index = write_pages(chosen(names or ("all",), shipped_ablations()), scale, known, output)
    Console().print(f"pages: {index}", highlight=False)
    return 0


if __name__ == "__main__":  # its worker processes import this module too
    main(app)
