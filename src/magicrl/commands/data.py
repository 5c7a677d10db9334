"""``magicrl data``: run the data pipeline or one of its steps, and print what each step did."""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from magicrl.commands.options import Flag, Overrides, Several
from magicrl.commands.tables import listing
from magicrl.config.errors import RecipeError
from magicrl.files import write_atomically
from magicrl.reporting.wording import visible
from magicrl_verifiers.progress import ProgressLines

if TYPE_CHECKING:
    from magicrl.pipeline.frame import Watcher
    from magicrl.pipeline.pipeline_schema import PipelineConfig
    from magicrl.pipeline.stats import StepCounts


data_app = App(name="data", help="Build a training mixture from raw sources: import, clean, dedup, decontaminate, ...")

Inputs = Annotated[
    list[str],
    Parameter(
        name="--input",
        negative=(),
        consume_multiple=False,
        help="A file, or the folder of another run or step (repeatable).",
    ),
]
Output = Annotated[Path, Parameter(help="The run folder; the same command again continues where it stopped.")]
Sets = Annotated[Overrides, Parameter(help="A setting of the step, KEY=VALUE (repeatable).")]
Settings = Annotated[Path | None, Parameter(help="Run all such steps of this pipeline, in order; default: one step.")]
StepName = Literal["clean", "dedup", "decontaminate", "difficulty", "judge", "mix"]


@data_app.command
def build(pipeline: Path, /, *, set_: Overrides = None, output: Path | None = None, until: str | None = None) -> int:
    """Run a pipeline: every source, then every step. The same command again does only what changed or is missing.

    Example: magicrl data build laptop --output runs/data/laptop

    Parameters
    ----------
    pipeline
        The pipeline (TOML).
    set_
        Override a setting: --set steps.0.maths.figures=false (repeatable).
    output
        The run folder; default: the pipeline's output, else runs/data/NAME.
    until
        Stop after this step (its name, or its number from 1).
    """
    from magicrl.pipeline.pipeline_schema import load_pipeline

    config = load_pipeline(pipeline, set_ or [])
    if until is not None:
        names = [step.name or step.use for step in config.steps]
        if until.isdecimal() and 1 <= int(until) <= len(names):
            count = int(until)
        elif until in names:
            count = names.index(until) + 1
        else:
            raise RecipeError(f"--until {until}: no such step; known: {', '.join(names)}")
        config = config.model_copy(update={"steps": config.steps[:count]})
    where = output or Path(config.output or Path("runs/data") / config.name)
    return _run(config, pipeline, where, set_ or [])


@data_app.command(name="import")
def import_(
    *,
    output: Path | None = None,
    input: Several = None,
    kind: str = "auto",
    set_: Overrides = None,
    list_: Annotated[Flag, Parameter(name="--list")] = False,
) -> int:
    """Read one source into rows of the released schema; what cannot be read is set aside with its reason.

    Example: magicrl data import --kind gsm8k --input train.jsonl --output runs/data/gsm8k

    Parameters
    ----------
    output
        The run folder.
    input
        A file, or a pattern of files (repeatable); default: the kind's hub data set.
    kind
        What it is; --list shows the known ones; auto: by its columns.
    set_
        A setting of the source: --set limit=1000, --set fields.prompt=text (repeatable).
    list_
        Show the known kinds.
    """
    if list_:
        from magicrl.pipeline.pipeline_schema import known_kinds

        console = Console(emoji=False)
        kinds = known_kinds().items()
        rows = [(name, kind.title, kind.hub or "", kind.licence, kind.checked) for name, kind in kinds]
        console.print(listing(("kind", "set", "hub data set", "licence", "checked with"), rows, console.width))
        return 0
    if output is None:
        raise RecipeError("magicrl data import needs --output DIR")
    source: dict[str, Any] = {"kind": kind} | ({"path": [os.path.abspath(path) for path in input]} if input else {})
    return _run_alone({"sources": [source]}, [f"sources.0.{text}" for text in set_ or []], output)


def _alone(use: StepName, pipeline: Path | None, input: Sequence[str], output: Path, overrides: Sequence[str]) -> int:
    """One step, or all such steps of a pipeline, on the rows of files or of another run's step."""
    from magicrl.pipeline.pipeline_schema import load_pipeline

    steps: list[dict[str, Any]] = [{"use": use}]
    if pipeline is not None:
        found = [one for one in load_pipeline(pipeline).steps if one.use == use]
        if not found:
            raise RecipeError(f"{pipeline} has no step {use!r}")
        steps = [one.model_dump(mode="json", exclude_none=True, exclude_unset=True) | steps[0] for one in found]
    stems = [Path(text).stem for text in input]
    names = [stem if stems.count(stem) == 1 else f"{stem}-{number}" for number, stem in enumerate(stems)]
    sources = [{"path": _rows_in(Path(text)), "name": name} for text, name in zip(input, names, strict=True)]
    placed = [f"steps.{number}.{text}" for number in range(len(steps)) for text in overrides]
    return _run_alone({"sources": sources, "steps": steps}, placed, output)


@data_app.command
def clean(*, input: Inputs, output: Output, pipeline: Settings = None, set_: Sets = None) -> int:
    """Drop proofs, figures, unverifiable reference answers, solutions that disagree, broken tests, solutions that fail.

    Example: magicrl data clean --input runs/data/gsm8k --output runs/data/gsm8k-clean
    """
    return _alone("clean", pipeline, input, output, set_ or [])


@data_app.command
def dedup(*, input: Inputs, output: Output, pipeline: Settings = None, set_: Sets = None) -> int:
    """Drop duplicates: exact, renamed or wrapped in chat text, near, by embedding; the best-specified copy stays.

    Example: magicrl data dedup --input a.parquet --input b.parquet --output runs/data/once
    """
    return _alone("dedup", pipeline, input, output, set_ or [])


@data_app.command
def decontaminate(
    *,
    input: Inputs,
    output: Output,
    against: Several = None,
    pipeline: Settings = None,
    set_: Sets = None,
) -> int:
    """Drop problems of test sets, whatever their wording; every hit is reported with both texts.

    Example: magicrl data decontaminate --input a.parquet --against aime24=aime24.parquet --output runs/data/clean

    Parameters
    ----------
    against
        NAME=FILE of a test set (repeatable).
    """
    sets = [text.partition("=") for text in against or []]
    if any(not name or not path for name, _, path in sets):
        raise RecipeError("--against: give NAME=FILE")
    extra = [f"against.{name}.path={json.dumps(str(Path(path).resolve()))}" for name, _, path in sets]
    return _alone("decontaminate", pipeline, input, output, [*extra, *(set_ or [])])


@data_app.command
def difficulty(*, input: Inputs, output: Output, pipeline: Settings = None, set_: Sets = None) -> int:
    """Sample every problem N times with a model; drop those that it never or always solves.

    Example: magicrl data difficulty --input a.parquet --output runs/data/d --set sampler.model=runs/quickstart/model
    """
    return _alone("difficulty", pipeline, input, output, set_ or [])


@data_app.command
def judge(*, input: Inputs, output: Output, pipeline: Path, set_: Sets = None) -> int:
    """Ask judges whether problems are clear, complete, well formatted and free of distractions.

    Example: magicrl data judge --input a.parquet --pipeline skywork-or1 --output runs/data/judged

    Parameters
    ----------
    pipeline
        The pipeline whose judge step names the judges.
    """
    return _alone("judge", pipeline, input, output, set_ or [])


@data_app.command
def mix(*, input: Inputs, output: Output, pipeline: Settings = None, set_: Sets = None) -> int:
    """Draw a mixture by weights, caps and difficulty bands; write it in the released schema, with a data card.

    Example: magicrl data mix --input runs/data/once --output runs/data/mixed --set size=1000
    """
    return _alone("mix", pipeline, input, output, set_ or [])


@data_app.command
def stats(
    folder: Path, /, *, problem: str | None = None, json_: Annotated[Flag, Parameter(name="--json")] = False
) -> int:
    """Show what every step of a run kept and dropped, by source and reason; or the way of one problem.

    Example: magicrl data stats runs/data/laptop --problem gsm8k/gsm8k-12

    Parameters
    ----------
    folder
        The run folder.
    problem
        The id of a problem: which step dropped it, and why.
    json_
        The counts as JSON.
    """
    from magicrl.pipeline.stats import counts_of, way_of

    console = Console(emoji=False)
    if problem is not None:
        way = way_of(folder, problem)
        first = way[0][2]
        lines = [f"{first['id']}  ({first['where']})", first.get("problem")]
        for step, kept, row in way:
            said = "kept" if kept else f"dropped: {row.get('reason') or ''}"
            lines += [f"{step}: {said}", row.get("detail") and f"  {row['detail']}"]
        for line in filter(None, lines):
            console.print(visible(line), markup=False, soft_wrap=True)
        return 0
    counts = counts_of(folder)
    if json_:
        console.print_json(json.dumps([{"step": c.step, "sources": c.sources, "seconds": c.seconds} for c in counts]))
        return 0
    _show_counts(counts, console)
    return 0


def _rows_in(path: Path) -> list[str]:
    """The rows of a file, of a step, or of another run: its last step's, else its sources'.

    Raises:
        RecipeError: The step or run has not finished.
    """
    from magicrl.pipeline.stats import recorded_run, source_folders, step_folders

    path = path.resolve()
    if (path / "kept").is_dir():
        folders = [path / "kept"]
        missing = [] if any((path / name).is_file() for name in ("step.json", "source.json")) else [path.name]
    elif (path / "sources").is_dir():
        run, steps = recorded_run(path), step_folders(path)
        folders = [one.kept for one in steps[-1:] or source_folders(path)]
        sources = [f"sources/{name}" for name in run.get("sources", [])]
        missing = [name for name in sources if not (path / name / "source.json").is_file()]
        missing += run.get("steps", [])[len(steps) :]
    else:
        return [str(path)]
    if missing:
        raise RecipeError(
            f"--input {path}: {missing[0]} has not finished; run its command to the end, or name the folder of a "
            "finished step, or files (kept/*.parquet)"
        )
    return [f"{glob.escape(str(folder))}/*.parquet" for folder in folders]


def _run_alone(tree: dict[str, Any], overrides: Sequence[str], output: Path) -> int:
    """A pipeline made of options: written as TOML into the run folder's place, so that errors show what was meant."""
    import tomli_w

    from magicrl.pipeline.pipeline_schema import load_pipeline

    output.mkdir(parents=True, exist_ok=True)
    written = output / "asked.toml"
    write_atomically(written, tomli_w.dumps({"name": output.name, **tree}))
    return _run(load_pipeline(written, overrides), written, output, overrides)


def _run(config: PipelineConfig, path: Path, output: Path, overrides: Sequence[str]) -> int:
    from magicrl.config.loader import placed_errors
    from magicrl.pipeline.build import run_pipeline
    from magicrl.pipeline.stats import counts_of

    console = Console(emoji=False)
    if config.expected_minutes is not None:
        console.print(f"about {config.expected_minutes:g} minutes on two CPU cores, less if a part is done already")
    with placed_errors(path, overrides):
        run_pipeline(config, output=output, watcher=_watcher(console))
    _show_counts(counts_of(output), console)
    if any(step.use == "mix" for step in config.steps):
        mixture = output.resolve() / "mixture"
        console.print(f"mixture: {mixture}, data card: {mixture / 'card.html'}", soft_wrap=True)
    else:
        console.print(f"rows: {output.resolve()}", soft_wrap=True)
    return 0


def _watcher(console: Console) -> Watcher:
    """A line a step, and lines with the time left while it runs."""
    from magicrl.pipeline.frame import Watcher

    told = ProgressLines(console)

    class Lines(Watcher):
        def step(self, name: str, parts: int, missing: int) -> None:
            console.print(f"{name}: {missing} of {parts} parts to do" if missing else f"{name}: unchanged")

        def progress(self, name: str, done: int, total: int, unit: str) -> None:
            told(name, done, total, unit)

        def note(self, text: str) -> None:
            console.print(f"  {visible(text)}", markup=False, soft_wrap=True)

    return Lines()


def _show_counts(counts: Sequence[StepCounts], console: Console) -> None:
    table = Table(title="rows by step")
    for name in ("step", "source", "in", "kept", "dropped"):
        table.add_column(name, justify="right" if name in ("in", "kept") else "left", overflow="fold")
    for step in counts:
        for source, one in sorted(step.sources.items()):
            dropped = ", ".join(f"{count} {reason}" for reason, count in Counter(one["dropped"]).most_common())
            table.add_row(step.step, visible(source), str(one["in"]), str(one["kept"]), dropped)
        if len(step.sources) > 1:
            table.add_row(step.step, "all", str(step.entered), str(step.kept), f"{step.entered - step.kept} in all")
        table.add_section()
    console.print(table)
