"""``magicrl eval`` and ``magicrl.evaluate``: samples and scores of a model on benchmarks.

``--run`` evaluates the checkpoints of a run in a separate process, also while the run continues. It only reads the
run's files and writes nothing into its folder, so it can be stopped, repeated or done on another machine.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from magicrl.commands.evaluation_display import EvalDisplay, say, show_benchmarks, show_comparison, show_results
from magicrl.commands.given import in_python, model_text
from magicrl.commands.options import Flag, as_command, check_read, taking
from magicrl.commands.run_folder import framed
from magicrl.config.errors import RecipeError
from magicrl.evaluation.benchmarks import benchmark_sources, load_benchmarks
from magicrl.evaluation.options import EvaluationObserver, EvaluationOptions, arguments
from magicrl.evaluation.results import write_results
from magicrl.evaluation.samples import RESULTS, whole_prompt
from magicrl.files import write_atomically
from magicrl.reporting.comparison_page import evaluation_blocks
from magicrl.reporting.inspect_log import write_inspect_logs
from magicrl.reporting.page import render_page
from magicrl.reporting.read_folders import RecordedEvaluation, lost_writer, read_evaluation_folder, scored_samples

if TYPE_CHECKING:
    import pandas as pd

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
LOOK_EVERY = 5.0
"""Seconds between looks for a new checkpoint."""
IDENTITY = "checkpoint.json"
"""File next to the results of ``--run`` that says which checkpoint they are of."""


class Evaluation:
    """Scores and samples of a model; a notebook shows them. ``path`` is the folder.

    Args:
        recorded: the folder's ``results.json``, read.
    """

    def __init__(self, recorded: RecordedEvaluation) -> None:
        self.recorded = recorded
        self.path = recorded.path

    @property
    def scores(self) -> pd.DataFrame:
        """Scores per benchmark: accuracy (and reward) with 95 % intervals, pass@k, maj@k, length, truncation."""
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for name, result in self.recorded.benchmarks.items():
            row: dict[str, Any] = {"benchmark": name, "problems": result.problems, "samples": result.samples}
            for key in ("accuracy", "reward", "length", "truncation"):
                interval = getattr(result, key)
                if interval is not None:
                    row |= {key: interval.mean, f"{key}_low": interval.low, f"{key}_high": interval.high}
            row |= {f"pass@{k}": interval.mean for k, interval in result.pass_at.items()}
            row |= {f"maj@{k}": interval.mean for k, interval in result.majority_at.items()}
            rows.append(row | {"not_judged": result.not_judged})
        return pd.DataFrame(rows).set_index("benchmark")

    def samples(self, benchmark: str | None = None) -> pd.DataFrame:
        """Return one row per judged response: problem, prompt, sample, text, outcome, score, tokens, ...

        Args:
            benchmark: its name; default: the only one.

        Raises:
            ValueError: no such benchmark, or several and none is named.
        """
        import pandas as pd

        known = list(self.recorded.benchmarks)
        if benchmark is None and len(known) == 1:
            benchmark = known[0]
        if benchmark not in known:
            raise ValueError(f"samples of which benchmark? {benchmark!r} is none of {', '.join(known)}")
        problems, rows = scored_samples(self.path / benchmark, self.recorded.benchmarks[benchmark].samples)
        prompts = {problem.id: whole_prompt(problem) for problem in problems}
        flags = ({name: getattr(row, name) for name in ("correct", "truncated", "reward")} for row in rows)
        found = zip(rows, flags, strict=True)
        return pd.DataFrame([{"prompt": prompts.get(row.problem), **asdict(row), **more} for row, more in found])

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {result.accuracy.mean:.3f}" for name, result in self.recorded.benchmarks.items())
        return f"<evaluation of {self.recorded.model} in {self.path}: {scores}>"

    def _repr_html_(self) -> str:
        blocks = [b for b in evaluation_blocks([self.recorded]) if b is not None and b.key != "responses"]
        return framed(render_page(self.recorded.model, [], blocks, kind="evaluation"))


@in_python()
@taking(EvaluationOptions)
def evaluate(given: EvaluationOptions) -> Evaluation:
    """Evaluate a model on benchmarks: avg@k, pass@k, maj@k, length and truncation with intervals, resumable.

    Raises:
        ValueError: an argument is wrong, the model or a benchmark cannot be used, ``output`` holds another job, or
            samples of other shards are missing.
        KeyboardInterrupt: Stopped by the user; every finished sample is kept.
    """
    watcher = given.progress
    shown = EvalDisplay(Console(emoji=False, quiet=not watcher)) if isinstance(watcher, bool) else nullcontext(watcher)
    if _sample(given, shown) is None:
        raise ValueError(
            f"--shard {given.shard} of {given.folder} is done, and samples of other shards are missing: the call that "
            "ends last returns the results"
        )
    return Evaluation(read_evaluation_folder(given.folder))


def _sample(
    given: EvaluationOptions, display: AbstractContextManager[EvaluationObserver], *, again: bool = False
) -> Path | None:
    """Sample and judge what is missing.

    Args:
        given: the arguments of `evaluate`.
        display: shows the progress.
        again: move samples of other settings away, instead of refusing the folder.

    Returns:
        The file of the results; None while shards of other processes are missing.
    """
    from magicrl.commands.training import threads_kept
    from magicrl.evaluation.runner import run_evaluation

    with threads_kept(), display as watcher:
        return run_evaluation(replace(given, model=model_text(given.model)), watcher, again=again)


def _present(
    work: functools.partial[Evaluation],
    *,
    run: Path | None = None,
    follow: bool = False,
    merge: bool = False,
    compare: list[Path] | None = None,
    inspect_logs: Path | None = None,
    list_: bool = False,
) -> int:
    """Print the scores.

    Example: magicrl eval --model runs/quickstart/model --benchmark mine.jsonl --samples 4 --output runs/eval

    Args:
        run: In place of a model: the checkpoints of this run, each into its own folder of the output.
        follow: With --run: continue with new checkpoints until the run ends.
        merge: Only score what is in --output: the shards' samples, or those there are with other k and prices.
        compare: Evaluation folders: the paired differences of each from the first; with --output DIR they and the
            curves are written to DIR/comparison.json.
        inspect_logs: Also write the results of --output to this folder, as logs that `inspect view` opens.
        list_: Show the benchmarks.
    """
    console, given = Console(emoji=False), arguments(**work.keywords)
    output = Path(given.output) if given.output else None
    if list_:
        show_benchmarks(console)
        return 0
    if inspect_logs is not None and (compare is not None or run is not None):
        raise RecipeError("--inspect-logs needs --model; for a checkpoint: magicrl eval --merge --output DIR/step-N")
    named = {_SINGULAR.get(name, name): value for name, value in work.keywords.items()} | {"run": run, "follow": follow}
    if compare is not None:
        check_read("--compare", {**named, "merge": merge}, reads=["output"])
        from magicrl.evaluation.comparison import compare_all, save_comparison

        document = compare_all(compare)
        for comparison in document["comparisons"]:
            show_comparison(comparison, console)
        if document["note"]:
            say(console, document["note"])
        if output is not None:
            say(console, f"comparison: {save_comparison(document, output)}")
        return 0
    if output is None:
        raise RecipeError("magicrl eval needs --output DIR, the folder that samples and results go to")
    if follow and run is None:
        raise RecipeError("--follow needs --run RUN, the run whose checkpoints are evaluated")
    if merge:
        check_read("--merge", named, reads=_MERGED)
        # those named, else every folder of the output that holds a job
        names = sorted(path.parent.name for path in output.glob("*/job.json"))
        if given.benchmarks:
            names = [source.name for source in benchmark_sources(given.benchmarks)]
        if not names:
            raise RecipeError(f"--merge: {output} holds no evaluation")
        show_results(write_results(given, names), console)
        _write_logs(output, inspect_logs, console)
        return 0
    if run is None:
        return _sample_and_show(given, console, logs=inspect_logs)
    if given.model or given.engine == "openai":
        raise RecipeError("--run takes the place of --model, and needs an engine on this machine")
    sample = functools.partial(_sample_and_show, console=console, again=True)
    return evaluate_checkpoints(given, run, output, sample, console, follow=follow)


def _write_logs(output: Path, folder: Path | None, console: Console) -> None:
    if folder is not None:
        for path in write_inspect_logs(read_evaluation_folder(output), folder):
            say(console, f"Inspect log: {path}")


def _sample_and_show(
    given: EvaluationOptions, console: Console, *, again: bool = False, logs: Path | None = None
) -> int:
    if not (given.model and given.benchmarks):
        raise RecipeError("magicrl eval needs --model and at least one --benchmark (--list shows the names)")
    try:
        results = _sample(given, EvalDisplay(console), again=again)
    except KeyboardInterrupt:
        say(console, f"interrupted; every finished sample is in {given.output}: the same command again continues")
        return INTERRUPTED
    if results is not None:  # else samples of other shards are missing
        show_results(results, console)
        _write_logs(results.parent, logs, console)
    return 0


def requested(given: EvaluationOptions, run: Path) -> Callable[[Path], list[str]]:
    """Return a function that says what the arguments change in the results of a checkpoint."""
    from magicrl.evaluation.engines import opens_reasoning
    from magicrl.evaluation.runner import requested_changes
    from magicrl.models.loading import described_model
    from magicrl.models.prompts import PromptEncoder
    from magicrl.training.checkpoint import start_model_of

    # every checkpoint has the tokenizer and the chat template of the starting model
    given = replace(given, model=start_model_of(run))
    if given.reasoning is None:
        policy = described_model(str(given.model))
        if opens_reasoning(policy.tokenizer, PromptEncoder(policy.tokenizer, policy.max_context)):
            given = replace(given, reasoning="required")
    return functools.partial(requested_changes, options=given, benchmarks=load_benchmarks(given))


def _identity(folder: Path) -> dict[str, Any]:
    """Return the recorded identity of the checkpoint that was evaluated into a folder."""
    path = folder / IDENTITY
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _waiting(run: Path, settled: Set[str], console: Console, *, follow: bool) -> Iterator[Path]:
    """Yield again and again the oldest checkpoint of the run that is not settled, until there is none.

    With ``follow`` wait for further ones until the run is no longer running.
    """
    from magicrl.training.checkpoint import checkpoint_folders, run_status

    noted = None
    while True:
        running = follow and run_status(run) == "running"  # read first: the last checkpoint is written before
        waiting = next((one for one in checkpoint_folders(run) if one.name not in settled), None)
        if waiting is not None:
            yield waiting
        elif running:
            # it may run on another machine, or be continued after a kill
            if (writer := lost_writer(run)) is not None and writer != noted:
                noted = writer
                say(
                    console,
                    f"{run}: its process {writer} is not on this machine. If it was killed, continue it with --resume, "
                    "or end this wait with Ctrl-C",
                )
            time.sleep(LOOK_EVERY)
        else:
            return


def evaluate_checkpoints(
    given: EvaluationOptions,
    run: Path,
    output: Path,
    evaluate: Callable[[EvaluationOptions], int],
    console: Console,
    *,
    follow: bool,
) -> int:
    """Evaluate every checkpoint into ``output/step-N``, oldest first, then compare all with the first.

    A checkpoint that was evaluated with the same settings is left as it is. One whose results were made with other
    settings, or are those of another run, is evaluated again. A checkpoint that the run removes before its turn is left
    out. Results of other settings or runs, and those that lack samples of other shards, are not compared.

    Args:
        given: arguments of `magicrl.evaluate`, without a model.
        run: run folder.
        output: folder for the results.
        evaluate: evaluates a model and returns the exit status.
        console: for one line per checkpoint.
        follow: continue with new checkpoints until the run is no longer running.

    Returns:
        The exit status: that of the first evaluation that was interrupted or failed, else 0.

    Raises:
        ValueError: ``run`` is no run folder, or has no checkpoint.
    """
    from magicrl.evaluation.comparison import compare_all, save_comparison
    from magicrl.training.checkpoint import checkpoint_identity, export_checkpoint

    # loads the benchmarks, which may be large: only if there is something to compare with
    request = functools.cache(lambda: requested(given, run))

    def changes(folder: Path) -> list[str]:
        known, now = _identity(folder), checkpoint_identity(run, folder.name)
        # Results of earlier versions name no checkpoint. Where it is gone too, they are all that is left of it.
        compared = known or now["state_sha256"]
        other = compared and any(known.get(key) != value for key, value in now.items() if value is not None)
        return [*(["its results are of another checkpoint, or an unknown one"] if other else []), *request()(folder)]

    settled: set[str] = set()
    for checkpoint in _waiting(run, settled, console, follow=follow):
        folder = output / checkpoint.name
        changed = changes(folder) if (folder / RESULTS).exists() else None
        if changed == []:
            settled.add(checkpoint.name)
            continue
        # shards may run at once, and each removes its copy
        model = output / "models" / given.shard.replace("/", "-of-") / checkpoint.name
        identity = checkpoint_identity(run, checkpoint.name)
        try:
            export_checkpoint(run, checkpoint, model)
        except (OSError, ValueError):
            if checkpoint.exists():
                raise
            continue  # the run has removed it meanwhile
        again = f", evaluated again: {'; '.join(changed)}" if changed else ""
        say(console, f"{checkpoint.name} of {run}{again}")
        if _identity(folder) != identity:
            folder.mkdir(parents=True, exist_ok=True)
            # else they would be this checkpoint's after an interruption
            (folder / IDENTITY).unlink(missing_ok=True)
            (folder / RESULTS).unlink(missing_ok=True)
        status = evaluate(replace(given, model=str(model), output=str(folder)))
        if (folder / RESULTS).exists():
            write_atomically(folder / IDENTITY, json.dumps(identity))
        if status:
            return status
        shutil.rmtree(model)
        settled.add(checkpoint.name)
    done: list[Path] = []
    for folder in sorted(path.parent for path in output.glob(f"step-*/{RESULTS}")):
        if changed := changes(folder):
            say(console, f"{folder.name} is not compared: {'; '.join(changed)}")
        else:
            done.append(folder)
    if not (done or settled):
        raise ValueError(f"{run} has no checkpoint to evaluate; checkpoint.every of its recipe says how often it saves")
    if len(done) > 1:
        say(console, f"comparison: {save_comparison(compare_all(done), output)}")
    return 0


_GROUPS = {
    "model": "What is evaluated",
    "preset": "Sampling",
    "levels": "Problems",
    "judge": "Judging",
    "engine": "Engine",
    "pass_at": "Scores",
    "run": "Runs and existing results",
}
"""First parameter of each group in ``--help``, and the group's title. Parameters of `_present` come last."""
_SINGULAR = {"benchmarks": "benchmark", "fields": "field", "engine_options": "engine_option"}
"""Names in a terminal of options that are repeated there."""
_MERGED = ("output", "benchmark", "pass_at", "majority_at", "fresh_limits", "price_in", "price_out")
"""Options that ``--merge`` reads: it generates nothing."""
_TYPED = {
    "benchmarks": Annotated[list[str], Parameter(name="--benchmark", negative=(), consume_multiple=False)],
    "fields": Annotated[list[str] | None, Parameter(name="--field", negative=(), consume_multiple=False)],
    "engine_options": Annotated[
        list[str] | None, Parameter(name="--engine-option", negative=(), consume_multiple=False)
    ],
    "reward": Annotated[str | None, Parameter(name=("--reward", "--verifier"))],
    "compare": Annotated[list[Path] | None, Parameter(negative=(), consume_multiple=True)],
    "list_": Annotated[Flag, Parameter(name="--list")],
}
command = as_command(
    evaluate,
    _present,
    typed=_TYPED,
    optional=("model", "benchmarks", "output"),
    groups=_GROUPS,
)
