"""``magicrl eval --run``: the checkpoints of a run, evaluated in a process of their own, also while the run goes on.

Nothing is written into the run's folder and nothing is shared with the run but its files, so that it can be stopped,
repeated or done on another machine, and changes nothing of the run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from magicrl.cli.eval_options import EvalOptions
from magicrl.evaluation.folder import RESULTS

LOOK_EVERY = 5.0
"""Seconds between looks for a new checkpoint."""


def evaluate_checkpoints(
    options: EvalOptions,
    run: Path,
    output: Path,
    evaluate: Callable[[EvalOptions, Path], int],
    console: Console,
    *,
    look_every: float = LOOK_EVERY,
) -> int:
    """Evaluate every checkpoint into ``output/step-N``, oldest first, then compare all with the first.

    With ``--follow`` goes on with new ones until the run is no longer running. A checkpoint that the run removes
    before its turn is left out.

    Args:
        evaluate: evaluates ``asked.model`` of the options into a folder and returns the exit status.

    Returns:
        The exit status: that of the first evaluation that was interrupted or failed, else 0.

    Raises:
        ValueError: ``run`` is no run folder, or has no checkpoint.
    """
    from magicrl.training.checkpoint_model import checkpoint_folders, run_status

    while True:
        going = options.asked.follow and run_status(run) == "running"  # asked first: the last checkpoint comes before
        waiting = [c for c in checkpoint_folders(run) if not (output / c.name / RESULTS).exists()]
        for checkpoint in waiting[:1]:
            status = _one(options, run, checkpoint, output, evaluate, console)
            if status:
                return status
        if not waiting:
            if not going:
                break
            time.sleep(look_every)
    return _compare(run, output, console)


def _one(
    options: EvalOptions,
    run: Path,
    checkpoint: Path,
    output: Path,
    evaluate: Callable[[EvalOptions, Path], int],
    console: Console,
) -> int:
    from magicrl.training.checkpoint_model import export_checkpoint

    model = output / "models" / checkpoint.name
    try:
        export_checkpoint(run, checkpoint, model)
    except (OSError, ValueError):
        if checkpoint.exists():
            raise
        return 0  # the run has removed it meanwhile
    console.print(f"{checkpoint.name} of {run}", highlight=False)
    status = evaluate(replace(options, asked=replace(options.asked, model=str(model))), output / checkpoint.name)
    if not status:
        shutil.rmtree(model)
    return status


def _compare(run: Path, output: Path, console: Console) -> int:
    from magicrl.evaluation.comparison import compare_all, write_comparison

    done = sorted(path.parent for path in output.glob(f"step-*/{RESULTS}"))
    if not done:
        raise ValueError(
            f"{run} has no checkpoint to evaluate; checkpoint.every of its recipe says how often it writes"
        )
    if len(done) > 1:
        console.print(f"comparison: {write_comparison(compare_all(done), output)}", highlight=False, soft_wrap=True)
    return 0
