"""Command ``python -m studies``: list, run and report suites of ablations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from magicrl.commands.main import main

app = App(name="python -m studies", help="Suites of ablations at your scale: list, run, report, starts.")

Scale = Literal["tiny", "small", "paper", "quick"]
SuiteName = Annotated[
    Literal["report", "starts", "recipe", "target", "noise", "smollm2", "clip"],
    Parameter(
        help="report: the report's ablations; starts: off-policy training over independent checkpoints; recipe: the "
        "recipe's other choices; target: entropy targets; noise: stale data or small batches; smollm2: off-policy "
        "training of a pretrained model; clip: the shape of the clip."
    ),
]


@app.command(name="list")
def list_ablations(*names: str, suite: SuiteName = "report", scale: Scale = "tiny", results: Path | None = None) -> int:
    """List the ablations with their variants, finished runs and the time for the rest.

    Example: python -m studies list --scale tiny

    Parameters
    ----------
    names
        Ids, as 6 or 10; default: all.
    scale
        tiny runs on a laptop, small on one GPU or overnight, paper on a cluster.
    results
        Results file; default: the suite's file of this scale in studies/results.
    """
    from studies.definition import chosen, shipped_ablations
    from studies.runs import outlook, plan_runs, suite_results

    known = suite_results(suite, scale, results)
    table = Table("id", "ablation", "variants", "checkpoints x seeds", "runs done", "CPU minutes left", box=None)
    for ablation in chosen(names or ("all",), shipped_ablations(suite)):
        definition = ablation.scales.get(scale)
        if definition is None:
            table.add_row(ablation.id, ablation.title, f"none at scale {scale}")
            continue
        look = outlook(plan_runs([ablation], scale), known)
        left = "" if not look.missing else "unknown" if look.cpu_minutes is None else f"{look.cpu_minutes:.0f}"
        arms = ", ".join(arm.name for arm in definition.arms)
        table.add_row(
            ablation.id, ablation.title, arms, f"{definition.starts} x {definition.seeds}", str(look.done), left
        )
    Console().print(table)
    return 0


@app.command
def run(
    *names: str,
    suite: SuiteName = "report",
    scale: Scale = "tiny",
    starts: Annotated[tuple[int, ...] | None, Parameter(consume_multiple=True)] = None,
    seeds: Annotated[tuple[int, ...] | None, Parameter(consume_multiple=True)] = None,
    workers: int | None = None,
    minutes: float | None = None,
    results: Path | None = None,
    work: Path = Path("runs/study"),
    keep: bool = False,
    quick: bool = False,
) -> int:
    """Run the variants that have no result yet; each result is kept when its run ends.

    The same command continues a study that was stopped.

    Example: python -m studies run 6 9 --scale tiny --minutes 30

    Example: python -m studies run --quick --results runs/quick.jsonl --work runs/quick

    Parameters
    ----------
    names
        Ids, as 6 or 10, or all.
    scale
        tiny runs on a laptop, small on one GPU or overnight, paper on a cluster.
    starts
        Numbers of initial checkpoints; default: those of the ablation. Others do not count in its verdicts.
    seeds
        Seeds of prompts and sampling for each checkpoint; default: those of the ablation.
    workers
        Parallel runs, one thread each; default: the cores available to this process.
    minutes
        Begin no run that is not expected to end within this time.
    results
        Results file to extend; default: the suite's file of this scale in studies/results. A name other than *.parquet
        is JSON Lines.
    work
        Folder of initial checkpoints and run folders while they are needed.
    keep
        Keep the run folders, for `magicrl report`.
    quick
        Test of the machinery in about a minute, at the scale `quick`. Its verdicts mean nothing.
    """
    from studies.definition import SUITES, chosen, shipped_ablations
    from studies.results import read_results
    from studies.runs import outlook, plan_runs, run_study, shared_results

    if quick:
        scale, names = "quick", names or ("all",)
    if not names:
        raise ValueError("which ablations? Give ids, or all (python -m studies list shows them)")
    console = Console(highlight=False)
    planned = plan_runs(chosen(names, shipped_ablations(suite)), scale, starts, seeds)
    processes = workers or len(os.sched_getaffinity(0))
    shared, file = shared_results(suite, scale), results or SUITES[suite].results(scale)
    look = outlook(planned, {**shared, **read_results(file)})
    length = "unknown duration"
    if look.cpu_minutes is not None:
        length = (
            f"about {look.cpu_minutes:.0f} CPU minutes, {look.cpu_minutes / processes:.0f} with {processes} at once"
        )
    console.print(f"{len(planned)} runs, {look.done} done, {len(look.missing)} to do: {length}")
    missing = run_study(
        [run for run in planned if run.key not in shared],
        file,
        work,
        workers=processes,
        budget_minutes=minutes,
        keep_folders=keep,
        tell=lambda text: console.print(text, markup=False),
    )
    if missing:
        console.print(f"{missing} runs are still missing; the same command continues")
    return 1 if missing else 0


@app.command
def report(
    *names: str,
    suite: SuiteName = "report",
    scale: Scale = "tiny",
    results: Path | None = None,
    output: Path | None = None,
) -> int:
    """Write a suite's pages: an index, one page per ablation and, for the report's suite, questions and costs.

    Example: python -m studies report --scale tiny

    Parameters
    ----------
    names
        Ids; default: all. p-values are corrected over the claims of the given ablations.
    scale
        Scale of the results.
    results
        Results file; default: the suite's file of this scale in studies/results.
    output
        Folder of the pages; default: the suite's.
    """
    from studies.definition import SUITES, chosen, shipped_ablations
    from studies.pages import write_pages
    from studies.runs import suite_results

    known = suite_results(suite, scale, results)
    if not known:
        file = results or SUITES[suite].results(scale)
        raise ValueError(f"{file}: no results; run `python -m studies run all --suite {suite} --scale {scale}` first")
    ablations = chosen(names or ("all",), shipped_ablations(suite))
    index = write_pages(ablations, scale, known, output or SUITES[suite].pages, suite)
    Console().print(f"pages: {index}", highlight=False)
    return 0


@app.command
def starts(*bases: str, count: int = 8, first: int = 0, work: Path = Path("runs/study")) -> int:
    """Make and screen initial checkpoints until enough are accepted; each is recorded, rejected ones too.

    Example: python -m studies starts chains.toml stories.toml --count 8

    Parameters
    ----------
    bases
        Base recipes of the suite `starts`; default: all of them.
    count
        Number of accepted checkpoints for each recipe.
    first
        Number of the first candidate; 100 and up are for tuning.
    work
        Folder of checkpoints, where runs find them.
    """
    from studies.definition import SUITES, shipped_ablations
    from studies.results import STARTS_FILE, pack
    from studies.runs import read_screened
    from studies.screening import screen, starts_page

    used = (a.scales["tiny"].base for a in shipped_ablations("starts"))
    console, short = Console(highlight=False), 0
    for base in bases or tuple(dict.fromkeys(used)):
        accepted = screen(base, count, first, work, STARTS_FILE, lambda text: console.print(text, markup=False))
        console.print(f"{base}: {accepted} of {count} accepted")
        short += accepted < count
    pack(STARTS_FILE)
    (SUITES["starts"].pages / "starts.md").write_text(starts_page(read_screened(STARTS_FILE)))
    return 1 if short else 0


if __name__ == "__main__":  # worker processes import this module too
    main(app)
