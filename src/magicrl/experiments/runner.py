"""Run what is planned and not yet there: in processes side by side, within a budget, each result kept as it ends."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicrl.config.schema import SftModelConfig, StartConfig, TrainConfig
from magicrl.experiments.measures import Result
from magicrl.experiments.planning import PlannedRun, PlannedStart
from magicrl.experiments.results import append_result, read_results, result_of

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What is left to do.

    Attributes:
        missing: runs without a result, in the order in which they will be done.
        done: number of runs that have one.
        cpu_minutes: what the missing ones are expected to take; None where nobody knows of one of them.
    """

    missing: tuple[PlannedRun, ...]
    done: int
    cpu_minutes: float | None


def outlook(planned: Sequence[PlannedRun], results: Mapping[str, Result]) -> Outlook:
    """Which of the planned runs have no result yet, and how long they will take."""
    missing = tuple(run for run in planned if run.key not in results)
    minutes = [expected_minutes(run, results.values()) for run in missing]
    known = [m for m in minutes if m is not None]
    total = sum(known) if len(known) == len(minutes) else None
    return Outlook(missing=missing, done=len(planned) - len(missing), cpu_minutes=total)


def expected_minutes(run: PlannedRun, results: Iterable[Result]) -> float | None:
    """CPU minutes of a run: as its arm took with other seeds, else as its ablation says; None if neither does."""
    arms = {tuple(arm) for arm in run.arms}
    known = [
        row["cpu_seconds"] / 60
        for row in results
        if row["scale"] == run.scale and any(tuple(arm) in arms for arm in row["arms"])
    ]
    return sum(known) / len(known) if known else run.minutes


def run_study(
    planned: Sequence[PlannedRun],
    results_file: Path,
    work: Path,
    *,
    workers: int,
    budget_minutes: float | None = None,
    keep_folders: bool = False,
    tell: Tell = lambda text: None,
) -> int:
    """Do the planned runs that have no result yet; returns how many are still missing.

    A run that is stopped (Ctrl-C, a kill) goes on from its last checkpoint when the study is run again.

    Args:
        planned: from ``plan_runs``: a run comes after the one that it goes on from.
        results_file: JSON Lines, a line a run; added to.
        work: where starts and run folders are.
        workers: processes at once, one thread each.
        budget_minutes: no run is begun that is not expected to end within so many wall-clock minutes from now (one of
            unknown length may begin at any time before).
        keep_folders: keep the run folders of results that are written; else only models that others go on from.
        tell: told what happens.
    """
    results = dict(read_results(results_file))
    missing = _with_predecessors(outlook(planned, results).missing, planned, work)
    deadline = None if budget_minutes is None else time.monotonic() + 60 * budget_minutes
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(max_workers=workers, mp_context=context, initializer=end_with_parent) as pool:
        waiting, running = list(missing), dict[Future[dict[str, Any]], PlannedRun]()
        try:
            while waiting or running:
                while len(running) < workers:
                    left = float("inf") if deadline is None else (deadline - time.monotonic()) / 60
                    if (run := _next(waiting, running.values(), results, work, left)) is None:
                        break
                    waiting.remove(run)
                    running[pool.submit(do_run, run, work)] = run
                    tell(f"{_label(run)}: begun")
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    run = running.pop(future)
                    row = future.result()
                    if run.key not in results:
                        append_result(results_file, row)
                        results[run.key] = row
                    tell(f"{_label(run)}: {_summary(row)}")
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    if not keep_folders:
        _tidy(planned, results, work)
    return len(waiting)


def end_with_parent() -> None:
    """End this worker as soon as its parent is gone.

    A pool's worker outlives a parent that was killed: it would finish its run beside the study that goes on, in the
    same folder, and then wait for ever. What it had done is in its checkpoint.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a process of a pool"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _with_predecessors(missing: Sequence[PlannedRun], planned: Sequence[PlannedRun], work: Path) -> list[PlannedRun]:
    """The missing runs, with those before them that have a result but whose model is no longer there."""
    wanted = {run.key for run in missing}
    for run in reversed(planned):
        if run.key in wanted and run.after is not None and not (folder_of(run.after, work) / "model").is_dir():
            wanted.add(run.after)
    return [run for run in planned if run.key in wanted]


def _next(
    waiting: Sequence[PlannedRun],
    running: Iterable[PlannedRun],
    results: Mapping[str, Result],
    work: Path,
    minutes_left: float,
) -> PlannedRun | None:
    """The first run that can begin: it fits the budget, and what it starts from is there or its own to make."""
    in_work = {key for run in running for key in _unmade(run, work)}
    for run in waiting:
        ready = run.after is None or (folder_of(run.after, work) / "model").is_dir()
        made_by_another = not in_work.isdisjoint(_unmade(run, work))
        if ready and not made_by_another and (expected_minutes(run, results.values()) or 0.0) <= minutes_left:
            return run
    return None


def _unmade(run: PlannedRun, work: Path) -> set[str]:
    """Keys of the phases of the run's supervised start that are not there yet."""
    chain = [] if run.start is None else run.start.chain()
    return {start.key for start in chain if not (start_folder(start, work) / "config.json").is_file()}


def make_start(start: PlannedStart, work: Path) -> Path:
    """The folder of a supervised start, made when it is absent, with the phases before it."""
    from magicrl.training.sft import run_sft  # torch: only in the processes that train

    recipe = start.recipe
    if start.after is not None:
        before = make_start(start.after, work)
        recipe = recipe.model_copy(update={"model": SftModelConfig(folder=str(before))})
    return run_sft(recipe, start_folder(start, work)).folder


def do_run(run: PlannedRun, work: Path) -> dict[str, Any]:
    """Train one run and return its result; called in a process of its own.

    A run that cannot go on (a loss that is not finite, nothing left to learn from) is a result as well: what an arm
    blew up at is what some ablations ask.
    """
    from magicrl.training.recorder import NullObserver
    from magicrl.training.session import train
    from magicrl.training.step import TrainingStopped

    folder = folder_of(run.key, work)
    config = started(run, work)
    clock, stopped = time.process_time(), None
    try:
        train(config, folder, NullObserver(), resume=folder.exists())
    except (FloatingPointError, TrainingStopped) as error:
        stopped = f"{type(error).__name__}: {error}"
    return result_of(run, folder, cpu_seconds=time.process_time() - clock, stopped=stopped)


def started(run: PlannedRun, work: Path) -> TrainConfig:
    """The run's recipe with the folders of its start model and of its reference, made when they are absent."""
    config, origin = run.config, None if run.start is None else str(make_start(run.start, work).resolve())
    model = origin if run.after is None else str((folder_of(run.after, work) / "model").resolve())
    changes: dict[str, Any] = {} if model is None else {"start": StartConfig(model=model)}
    if config.reference.mode != "none" and config.reference.model is None and origin is not None:
        changes["reference"] = config.reference.model_copy(update={"model": origin})
    return config.model_copy(update=changes)


def folder_of(key: str, work: Path) -> Path:
    """Where the run of this key is."""
    return work / key


def start_folder(start: PlannedStart, work: Path) -> Path:
    """Where a supervised start is."""
    return work / "starts" / start.key


def _tidy(planned: Sequence[PlannedRun], results: Mapping[str, Result], work: Path) -> None:
    """Remove the folders of runs that have a result and that no missing run goes on from."""
    needed = {run.after for run in planned if run.key not in results}
    for run in planned:
        if run.key in results and run.key not in needed:
            shutil.rmtree(folder_of(run.key, work), ignore_errors=True)


def _label(run: PlannedRun) -> str:
    return ", ".join(f"{ablation} {arm}" for ablation, arm in run.arms) + f", seed {run.seed}"


def _summary(row: Mapping[str, Any]) -> str:
    after = row["tests"]["after"].get("1.0")
    end = "no test" if after is None else f"accuracy {after:.3f}"
    stopped = f", stopped ({row['stopped']})" if row["stopped"] else ""
    return f"{end} after {row['steps']} steps, {row['cpu_seconds']:.0f} CPU s{stopped}"
