"""The ``magicrl`` command. Heavy rooms are imported inside the commands, so that ``--help`` is instant."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import tomllib
import traceback
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.console import Console

from magicrl.cli.data import data_app
from magicrl.cli.doctor import cluster_app, doctor
from magicrl.cli.explain import explain
from magicrl.cli.options import EVERY_DEFAULT, EvalOptions, Flag, Overrides
from magicrl.cli.plan import plan
from magicrl.cli.preflight import preflight
from magicrl.cli.push import push
from magicrl.cli.runs import runs
from magicrl.cli.tables import listing
from magicrl.config.errors import RecipeError
from magicrl_verifiers.cli import all_read
from magicrl_verifiers.cli import app as verify_app
from magicrl_verifiers.progress import ProgressLines
from magicrl_verifiers.secrets import without_secrets

app = App(
    name="magicrl",
    help="Reinforcement-learning post-training of reasoning models: the MAGIC recipe.",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # `main` says what to do next
)
app.register_install_completion_command(
    help="Completion with Tab in this shell (bash, zsh, fish): written and switched on."
)
app.command(verify_app, name="verify")
app.command(data_app)
app.command(cluster_app)
app.command(doctor)
app.command(explain)
app.command(plan)
app.command(preflight)
app.command(push)
app.command(runs)


@app.command
def train(
    recipe: Path,
    /,
    *,
    set_: Overrides = None,
    output: Path | None = None,
    resume: bool = False,
    dry_run: bool = False,
) -> int:
    """Train with MAGIC: supervised start if asked for, test, reinforcement learning in stages, test, report.

    Exit status: 0 it learned, or its test cannot tell; 3 it went to its end and learned nothing (the terminal, the
    report and run.json say why); 1 it stopped; 2 the command line or the recipe is wrong.

    Example: magicrl train quickstart --set run.seed=1 --output runs/seed-1

    Parameters
    ----------
    recipe
        The recipe (TOML).
    set_
        Override a setting: --set optimizer.learning_rate=1e-5 (repeatable). --set model=FOLDER, --set data=FILE and
        --set reward=FILE.py:NAME stand for a start model, training problems and a reward of your own.
    output
        The run folder; default: run.output of the recipe, else runs/<run.name>.
    resume
        Continue the run in the output folder from its last checkpoint (starts anew where there is none).
    dry_run
        Build everything with random weights of the same architecture and stand-in data, a step a stage, on this
        machine's CPU; nothing is kept.
    """
    if dry_run:
        from magicrl.cli.train import dry_run as run_dry

        return run_dry(recipe, set_ or [])
    from magicrl.cli.train import run_training

    return run_training(recipe, set_ or [], output, resume=resume)


@app.command
def init(
    *,
    model: str,
    data: str,
    output: Path = Path("run.toml"),
    minutes: float = 30.0,
    prompt: str | None = None,
    answer: str | None = None,
) -> int:
    """Look at your model and your problems for about a minute, and write a recipe that will learn from them.

    Exit status: 0 a recipe was written; 3 these problems cannot teach this model (it says why and what helps);
    1 the model or the data cannot be used; 2 the command line is wrong.

    Example: magicrl init --model ./my-model --data mine.jsonl --output run.toml

    Parameters
    ----------
    model
        A model folder, or a hub name.
    data
        Problems with answers: a file, a folder or the hub name of a data set.
    output
        The recipe to write.
    minutes
        That the run may take on this machine.
    prompt
        The column of the prompts, where it is not seen from its name.
    answer
        The column of the answers, likewise.
    """
    from magicrl.cli.init import run_init

    return run_init(
        model, data, output, minutes=minutes, prompt=prompt, answer=answer, console=Console(highlight=False)
    )


@app.command
def sft(recipe: Path, /, *, set_: Overrides = None, output: Path | None = None) -> int:
    """Make a start model by supervised training on demonstrations of generated tasks.

    Example: magicrl sft quickstart-sft --output runs/models/tiny

    Parameters
    ----------
    recipe
        The supervised recipe (TOML).
    set_
        Override a setting: --set run.seed=1 (repeatable).
    output
        The model folder; default: run.output of the recipe, else runs/models/<run.name>.
    """
    from magicrl.cli.train import run_supervised

    return run_supervised(recipe, set_ or [], output)


@app.command
def eval(options: EvalOptions = EVERY_DEFAULT) -> int:
    """Evaluate a model on benchmarks: avg@k, pass@k, maj@k, length and truncation with intervals, resumable.

    Example: magicrl eval --model runs/quickstart/model --benchmark mine.jsonl --samples 4 --output runs/eval
    """
    from magicrl.cli.eval import run_eval

    return run_eval(options)


@app.command
def recipes(name: str | None = None, /) -> int:
    """List the shipped recipes; with a name, print that one, to be copied and changed.

    Example: magicrl recipes smollm2 > mine.toml

    Parameters
    ----------
    name
        Of a shipped recipe.
    """
    from magicrl.config.paths import find_recipe, shipped_recipes, stated_memory

    if name is not None:
        sys.stdout.write(find_recipe(Path(name)).read_text(encoding="utf-8"))
        return 0
    rows: list[tuple[str, ...]] = []
    for shipped, path in shipped_recipes().items():
        text = path.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
        command = "sft" if "phases" in tree else "train" if "stages" in tree else "data build"
        minutes = tree.get("run", tree).get("expected_minutes")
        time = "" if minutes is None else f"{minutes:g} min"
        if minutes is None and "cluster" in tree:
            time = "magicrl plan"
        # the first sentence of the comment at a recipe's head
        head = [line.lstrip("# ") for line in text.partition("\n\n")[0].splitlines() if line.startswith("#")]
        shows = re.split(r"[.;](?:\s|$)", " ".join(head), maxsplit=1)[0]
        rows.append((f"{command} {shipped}", shows, time, stated_memory(path)))
    console = Console(highlight=False)
    console.print(listing(("command", "shows", "time on 2 CPU cores", "memory"), rows, console.width))
    console.print("each after the word magicrl, e.g. magicrl train quickstart; magicrl recipes NAME prints one")
    return 0


@app.command
def report(
    *folders: Path,
    output: Path | None = None,
    x: Literal["steps", "tokens", "wall", "gpu-hours"] | None = None,
    group_by: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None,
    serve: Flag = False,
    port: int = 0,
) -> int:
    """Write a report: one self-contained HTML page of a run, or one that compares runs and evaluations.

    Example: magicrl report runs/quickstart

    Example: magicrl report runs/quickstart --serve

    Example: magicrl report runs/adaptive-0 runs/adaptive-1 runs/none-0 runs/none-1 --output ablation.html

    Parameters
    ----------
    folders
        One run folder, or several folders of magicrl train and magicrl eval; the first is what others are held against.
    output
        The page; default: report.html in a single folder, comparison.html here for several.
    x
        The x axis that a comparison shows first; the page can change it.
    group_by
        Settings whose values make the arms, e.g. entropy.target; default: all that differ but seed and bookkeeping.
    serve
        Show the page of one run on 127.0.0.1 instead of writing it; it re-reads itself while the run goes on. Ctrl-C
        ends it and leaves the run alone.
    port
        With --serve; 0 takes a free one.
    """
    from magicrl.cli.watch import serve_report
    from magicrl.reporting.comparison_page import is_evaluation, write_comparison
    from magicrl.reporting.run_page import write_report

    console = Console(highlight=False, soft_wrap=True)
    if not folders:
        raise RecipeError("magicrl report needs at least one folder of magicrl train or magicrl eval")
    if serve:
        return serve_report(folders, port, console)
    if len(folders) == 1 and not is_evaluation(folders[0]):
        if x is not None or group_by:
            option = "--x" if x is not None else "--group-by"
            raise RecipeError(f"{option} belongs to a comparison: name two folders or more")
        console.print(f"report: {write_report(folders[0], output)}")
        return 0
    target = output or (folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html"))
    words = ["magicrl", "report", *map(str, folders), "--output", str(target)]
    words += ["--x", x] if x is not None else []
    words += [word for key in group_by or () for word in ("--group-by", key)]
    written = write_comparison(folders, target, axis=x or "steps", keys=group_by, command=shlex.join(words))
    for item in written.left_out:
        console.print(f"left out: {item.why}", style="yellow", markup=False)
    console.print(f"report: {written.path}")
    return 1 if written.left_out else 0


@app.command
def watch(run: Path, /, *, once: bool = False, interval: float = 1.0) -> int:
    """Show a run that another process is writing, until it ends; Ctrl-C leaves the run alone.

    Example: magicrl watch runs/quickstart

    Parameters
    ----------
    run
        The run folder.
    once
        Show the present state and return.
    interval
        Seconds between looks at the folder.
    """
    from magicrl.cli.watch import watch as watch_run

    return watch_run(run, once=once, interval=interval, console=Console())


@verify_app.command
def judge(
    recipe: str,
    /,
    *,
    input: Path,
    output: Path,
    set_: Overrides = None,
) -> int:
    """Judge with a served model, as this recipe does: {"prompt", "reference"?, "response"} -> {"score", ...}.

    Example: magicrl verify judge recipe.toml --input answers.jsonl --output scores.jsonl

    Parameters
    ----------
    recipe
        A training recipe's file or name; its [verifier] table counts, with [verifier.judge] in it.
    input
        JSON Lines; reference answer is a text or a list of texts.
    output
        JSON Lines, one verdict a line, same order.
    set_
        Override a setting: --set verifier.judge.model=NAME (repeatable).
    """
    from magicrl.config.loader import load_train_recipe
    from magicrl_verifiers.batch import verify_file
    from magicrl_verifiers.records import JudgeOptions

    verifier = load_train_recipe(Path(recipe), set_ or []).verifier
    config = verifier.needed_judge()
    options = JudgeOptions(reasoning=verifier.reasoning, extract=verifier.extract)
    console = Console()
    tell = ProgressLines(console).lines("judged")
    asked: dict[str, Any] = {"verifier": "judge", "judge": config, "workers": config.concurrency}
    summary = verify_file(input, output, options=options, tell=tell, **asked)
    mean = "" if summary.score is None else f", mean reward {summary.score:.3g}"
    told = f"{summary.total} judged, {summary.correct} right{mean}, {summary.not_judged} not judged -> {output}"
    console.print(told)
    return all_read(summary)


def main(command: Callable[..., Any] = app) -> None:
    """Entry point: exit 0 done, 1 failed, 2 wrong usage; every error says what to do."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 must not stop a run
    errors = Console(stderr=True, highlight=False)
    try:
        status = command(result_action="return_value")
    except KeyboardInterrupt as error:
        errors.print("interrupted; what was done is kept, --resume continues a run", markup=False)
        sys.exit(128 + getattr(error, "signal_number", signal.SIGINT))
    except (ValueError, FloatingPointError, RuntimeError, OSError) as error:
        # Every expected failure is one of these and explains itself; a traceback would bury the sentence.
        if os.environ.get("MAGICRL_TRACEBACK"):
            errors.print(without_secrets(traceback.format_exc()), markup=False, soft_wrap=True, end="")
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        here = re.escape(str(Path.cwd()))  # paths as one would type them here
        text = re.sub(rf"{here}(?![\w.-])", ".", re.sub(f"{here}{os.sep}", "", without_secrets(text)))
        errors.print(f"magicrl: {text}", markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, RecipeError) else 1)
    sys.exit(status or 0)
