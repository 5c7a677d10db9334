"""Resolve ablations into runs, and run them: one recipe per variant, checkpoint and seed.

A run's key covers everything that decides its result. Two ablations whose variants resolve to the same recipe share the
run. Initial checkpoints are made phase by phase, so those with equal first phases share them. Without screening, the
first of several phases has the recipe's own seed and is made once for all.

Missing runs are executed in parallel processes within a budget; each result is kept when its run ends.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import multiprocessing
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from magicrl.config.loader import decisive, digest, load_sft_recipe, load_train_recipe
from magicrl.config.schema import StartConfig, TrainConfig
from magicrl.config.sft_schema import SftConfig, SftModelConfig
from magicrl.reporting.read_folders import RecordedRun, read_run
from magicrl.training.recorder import environment_facts
from studies.definition import (
    BASE_STRIDE,
    COSTS,
    CURVES,
    SUITES,
    Ablation,
    Arm,
    Result,
    Scale,
    ScaleDefinition,
    base_recipe,
    parse_measure,
)
from studies.results import (
    SCHEMA_VERSION,
    STARTS_FILE,
    append_result,
    pack,
    read_results,
    read_rows,
    rounded,
)

THREADS = 1  # per run: tensors this small gain nothing from a second thread, and several runs are done in parallel
_UNIMPORTANT: dict[str, Any] = {"run": {"name", "output", "expected_minutes"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStart:
    """One SFT phase that runs share."""

    key: str  # hash of its recipe, seed included, and of the previous phase
    recipe: SftConfig  # resolved, with only this phase; its model is replaced by that of ``after``
    after: PlannedStart | None = None  # previous phase, None for the first

    def chain(self) -> list[PlannedStart]:
        """Return all phases up to this one, the first one first."""
        return [*(self.after.chain() if self.after else ()), self]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of one variant."""

    key: str  # a hash of everything that decides the result
    scale: Scale  # tiny, small, paper or quick
    unit: tuple[int, int]  # number of its supervised start, and its seed (prompts and sampling) from that start
    config: TrainConfig  # resolved recipe; its start is replaced by the folder of ``start`` or of the run ``after``
    # Supervised start; of the first run if this one continues another. None if the recipe names a model. It is also the
    # reference model if the recipe needs one and names none.
    start: PlannedStart | None
    after: str | None  # key of the run whose model this one starts from
    arms: tuple[tuple[str, str], ...]  # names ``(ablation, configuration)`` that share this run
    minutes: float | None = field(default=None, compare=False)  # expected CPU minutes


SEED_STRIDE = 10_000
"""``run.seed`` of seed k from checkpoint s is s + 10,000 k: unique, and seed 0 has the checkpoint's number."""


def plan_runs(
    ablations: Iterable[Ablation],
    scale: Scale,
    starts: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[PlannedRun]:
    """Return the runs of ``ablations``, each once, by seed and checkpoint, after the run that it continues.

    A study that is stopped has complete units of every variant for the time it had.

    Args:
        ablations: Those without this scale are left out.
        scale: Which of their definitions.
        starts: Numbers of checkpoints; default: those of the definition.
        seeds: Default: all seeds of the definition.

    Raises:
        RecipeError: a variant's settings are not a recipe.
        ValueError: fewer checkpoints passed the screening than the definition needs.
    """
    found: dict[str, PlannedRun] = {}
    for ablation in ablations:
        definition = ablation.scales.get(scale)
        if definition is None:
            continue
        for place, base in enumerate((definition.base, *definition.more_bases)):
            own = definition.model_copy(update={"base": base})
            for start in starts_of_definition(own) if starts is None else starts:
                for seed in range(definition.seeds) if seeds is None else seeds:
                    for run in _runs_of_unit(ablation, scale, own, (start, seed)):
                        known = found.get(run.key)
                        unit = (start + BASE_STRIDE * place, seed)
                        arms = run.arms if known is None else (*known.arms, *run.arms)
                        found[run.key] = replace(known or run, unit=unit, arms=arms)
    order = {start: place for place, start in enumerate(starts)} if starts is not None else {}

    def place_of(run: PlannedRun) -> tuple[int, int]:
        start = run.unit[0] % BASE_STRIDE
        return run.unit[1], order.get(start, start)

    return sorted(found.values(), key=place_of)


def starts_of_definition(definition: ScaleDefinition) -> Sequence[int]:
    """Return the checkpoint numbers of a definition: the first accepted ones, or from 0 on without screening."""
    if not definition.screened:
        return range(definition.skip, definition.starts)
    recipe = supervised_recipe(definition.base, definition.start_set)
    rows = read_screened(STARTS_FILE).get(recipe.run.name, {})
    # Compared by key, since the start of a changed recipe was not screened.
    accepted = [
        number
        for number, row in sorted(rows.items())
        if row["accepted"] and row["key"] == phases_of(recipe, number, shared=False).key
    ]
    if len(accepted) < definition.starts:
        raise ValueError(
            f"{recipe.run.name}: {len(accepted)} starts have passed the screening, {definition.starts} are asked for; "
            f"run `python -m studies starts {definition.base}`"
        )
    return accepted[definition.skip : definition.starts]


def _runs_of_unit(
    ablation: Ablation, scale: Scale, definition: ScaleDefinition, unit: tuple[int, int]
) -> list[PlannedRun]:
    runs: dict[str, PlannedRun] = {}
    for arm in definition.arms:
        if arm.derived:
            continue
        after = None if arm.after is None else runs[arm.after].key
        runs[arm.name] = _resolved(ablation, scale, definition, arm, unit, after)
    return list(runs.values())


def _resolved(
    ablation: Ablation, scale: Scale, definition: ScaleDefinition, arm: Arm, unit: tuple[int, int], after: str | None
) -> PlannedRun:
    base = base_recipe(definition.base)
    seed = unit[0] + SEED_STRIDE * unit[1]
    overrides = [*definition.set, *arm.set, f"run.seed={seed}", f"run.threads={THREADS}"]
    config = load_train_recipe(base, overrides, base.parent)
    start = None
    if config.start.sft is not None:
        changes = [*definition.start_set, f"run.threads={THREADS}"]
        recipe = load_sft_recipe(Path(config.start.sft), changes)
        start = phases_of(recipe, unit[0], shared=not definition.screened)
    decides = decisive(config, {**_UNIMPORTANT, "logging": True, "checkpoint": True})
    if config.start.sft is not None:
        decides["start"]["sft"] = Path(config.start.sft).name  # the installation folder decides nothing
    decides["made"] = [None if start is None else start.key, after]
    key, brought = digest(decides), brought_files([*definition.set, *arm.set])
    if brought:
        key = digest([key, [hashlib.sha256(file.read_text().encode()).hexdigest() for file in brought]])
    return PlannedRun(
        key=key,
        scale=scale,
        unit=unit,
        config=config,
        start=start,
        after=after,
        arms=((ablation.id, arm.name),),
        minutes=definition.minutes,
    )


def brought_files(overrides: Sequence[str]) -> list[Path]:
    """Return files of ``studies`` that overrides name as custom parts: their text also decides the result."""
    found = sorted(set(re.findall(r"=(studies\.[\w.]+):", " ".join(overrides))))
    return [Path(spec.origin) for name in found if (spec := importlib.util.find_spec(name)) and spec.origin]


def supervised_recipe(base: str, start_set: Sequence[str]) -> SftConfig:
    """Return the SFT recipe of a base recipe.

    Raises:
        ValueError: the base recipe begins with a published model.
    """
    path = base_recipe(base)
    config = load_train_recipe(path, [], path.parent)
    if config.start.sft is None:
        raise ValueError(f"{base} begins with the model {config.start.model}, of which there is one: nothing to screen")
    return load_sft_recipe(Path(config.start.sft), [*start_set, f"run.threads={THREADS}"])


def phases_of(recipe: SftConfig, number: int, *, shared: bool) -> PlannedStart:
    """Return checkpoint ``number`` as a chain of phases. A shared first phase has the recipe's own seed."""
    start: PlannedStart | None = None
    for phase in recipe.phases:
        own_seed = shared and len(recipe.phases) > 1 and phase is recipe.phases[0]
        run = recipe.run.model_copy(update={"seed": recipe.run.seed if own_seed else number})
        own = recipe.model_copy(update={"run": run, "phases": (phase,)})
        decides = decisive(own, _UNIMPORTANT)
        decides["after"] = None if start is None else start.key
        start = PlannedStart(key=digest(decides), recipe=own, after=start)
    assert start is not None, "the schema asks for a phase"
    return start


def result_of(run: PlannedRun, folder: Path, *, cpu_seconds: float, stopped: str | None) -> dict[str, Any]:
    """Return the result row of a run.

    Args:
        run: As planned.
        folder: Folder of the run.
        cpu_seconds: CPU time of its process.
        stopped: Why it ended early: a loss that is not finite, or nothing left to learn from.
    """
    recorded = read_run(folder)
    return {
        "schema_version": SCHEMA_VERSION,
        "key": run.key,
        "scale": run.scale,
        "start": run.unit[0],
        "seed": run.unit[1],
        "arms": [list(pair) for pair in run.arms],
        "stopped": stopped,
        "steps": len(recorded.metrics),
        "cpu_seconds": rounded(cpu_seconds),
        "curves": curves_of(recorded),
        "tests": {name: _accuracies(recorded, name) for name in ("before", "after")},
        "passes": {name: _passes(recorded, name) for name in ("before", "after")},
        "lengths": {name: found for name in ("before", "after") if (found := lengths_of(recorded, name))},
        "machine": environment_facts(),
    }


def curves_of(run: RecordedRun) -> dict[str, list[float | None]]:
    """Return all curves and running costs of a recorded run, one value per step, without empty curves."""
    found: dict[str, list[float | None]] = {}
    for name, key in CURVES.items():
        values = [_number(row.values.get(key)) for row in run.metrics]
        if any(value is not None for value in values):
            found[name] = [None if value is None else rounded(value) for value in values]
    for name, key in COSTS.items():
        spent = accumulate(_number(row.values.get(key)) or 0.0 for row in run.metrics)
        found[name] = [rounded(value) for value in spent]
    return found


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None


def _accuracies(run: RecordedRun, name: str) -> dict[str, float]:
    """Return accuracy by temperature on the first test set; empty if the run ended before that evaluation."""
    found = [run.evaluation(name, label) for label in run.sets[:1]]
    return {
        str(float(temperature)): rounded(score.accuracy.mean)
        for evaluation in found
        if evaluation is not None
        for temperature, score in evaluation.temperatures.items()
    }


def _passes(run: RecordedRun, name: str) -> dict[str, float]:
    """Return pass@k by k at temperature 1 on the first test set; empty if it was not measured."""
    found = [run.evaluation(name, label) for label in run.sets[:1]]
    scores = [evaluation.temperatures.get(1.0) for evaluation in found if evaluation is not None]
    return {str(k): rounded(score.mean) for one in scores if one is not None for k, score in one.pass_at.items()}


def lengths_of(run: RecordedRun, name: str) -> dict[str, Any]:
    """Return the number of recorded test responses at temperature 1, and the sorted lengths of correct ones."""
    found = [evaluation for label in run.sets[:1] if (evaluation := run.evaluation(name, label)) is not None]
    shown = [r for e in found for sample in e.samples for r in sample.responses.get(1.0, ())]
    right = sorted(r.tokens for r in shown if r.outcome == "correct")
    return {"responses": len(shown), "right": right} if shown else {}


def read_screened(path: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the screened checkpoints by recipe name and number; none if there is no such file."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in read_rows(path):
        found.setdefault(row["recipe"], {})[row["start"]] = row
    return found


def shared_results(suite: str, scale: Scale) -> dict[str, Result]:
    """Return the results of the suite whose runs a suite shares; none if it shares none."""
    other = SUITES[suite].shares
    return {} if other is None else read_results(SUITES[other].results(scale))


def suite_results(suite: str, scale: Scale, file: Path | None = None) -> dict[str, Result]:
    """Return the results of a suite (from ``file`` if given) and of the suite whose runs it shares."""
    return {**shared_results(suite, scale), **read_results(file or SUITES[suite].results(scale))}


def by_arm(
    ablations: Iterable[Ablation], scale: Scale, results: Mapping[str, Result], starts: Sequence[int] | None = None
) -> dict[str, dict[str, dict[tuple[int, int], Result]]]:
    """Return results by ablation, variant and (checkpoint, seed), for the runs of the current definitions."""
    ablations = list(ablations)
    found: dict[str, dict[str, dict[tuple[int, int], Result]]] = {}
    for run in plan_runs(ablations, scale, starts):
        for ablation, arm in run.arms:
            if run.key in results:
                found.setdefault(ablation, {}).setdefault(arm, {})[run.unit] = results[run.key]
    for one in ablations:
        runs = found.get(one.id, {})
        for arm in one.scales[scale].arms if runs else ():
            if arm.better_of:
                runs[arm.name] = better([runs.get(name, {}) for name in arm.better_of])
            elif arm.mean_of:
                runs[arm.name] = averaged([runs.get(name, {}) for name in arm.mean_of])
    return found


def better(variants: Sequence[Mapping[tuple[int, int], Result]]) -> dict[tuple[int, int], Result]:
    """Return the results of one variant per checkpoint: the one that was best on the other half of the checkpoints.

    The halves are every other checkpoint of a base recipe, so no checkpoint is judged by a choice that it took part in.
    "Best" is the largest mean of ``test@best``; the first of equals counts.
    """
    best = parse_measure("test@best")
    units = sorted(set.intersection(*map(set, variants)))
    found: dict[tuple[int, int], Result] = {}
    for base in {start // BASE_STRIDE for start, _ in units}:
        own = [unit for unit in units if unit[0] // BASE_STRIDE == base]
        starts = list(dict.fromkeys(start for start, _ in own))
        halves = [[unit for unit in own if starts.index(unit[0]) % 2 == half] for half in (0, 1)]
        for judged, others in (halves, halves[::-1]):
            means = [sum(best(runs[unit]) for unit in others) for runs in variants]
            chosen = variants[means.index(max(means))]
            found |= {unit: chosen[unit] for unit in judged if others}
    return found


def averaged(variants: Sequence[Mapping[tuple[int, int], Result]]) -> dict[tuple[int, int], Result]:
    """Return for each checkpoint that all variants have the mean of their accuracies at the best temperature.

    These results have no key, no curves and no other accuracy. Their CPU seconds are those of all variants.
    """
    found: dict[tuple[int, int], Result] = {}
    for unit in sorted(set.intersection(*map(set, variants))):
        rows = [runs[unit] for runs in variants]
        tests = {
            name: {"best": sum(parse_measure(f"{measure}@best")(row) for row in rows) / len(rows)}
            for name, measure in (("before", "start"), ("after", "test"))
        }
        found[unit] = {"tests": tests, "curves": {}, "cpu_seconds": sum(row["cpu_seconds"] for row in rows)}
    return found


Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Outlook on a study: missing and finished runs, and the expected time."""

    missing: tuple[PlannedRun, ...]  # runs without a result, in the order in which they will be done
    done: int  # number of runs with a result
    cpu_minutes: float | None  # expected CPU minutes of the missing ones; None if one of them is unknown


def outlook(planned: Sequence[PlannedRun], results: Mapping[str, Result]) -> Outlook:
    """Return which planned runs have no result yet, and how long they will take."""
    missing = tuple(run for run in planned if run.key not in results)
    minutes = [expected_minutes(run, results.values()) for run in missing]
    known = [m for m in minutes if m is not None]
    total = sum(known) if len(known) == len(minutes) else None
    return Outlook(missing=missing, done=len(planned) - len(missing), cpu_minutes=total)


def expected_minutes(run: PlannedRun, results: Iterable[Result]) -> float | None:
    """Return expected CPU minutes of a run: from other seeds of its variant, else from its ablation, else None."""
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
    """Run the planned runs that have no result yet; return how many are still missing.

    A run that is stopped (Ctrl-C, a kill) continues from its last checkpoint when the study runs again.

    Args:
        planned: From ``plan_runs``: a run comes after the one that it continues.
        results_file: Gets a row per run when it ends.
        work: Folder of checkpoints and run folders.
        workers: Parallel processes, one thread each.
        budget_minutes: No run begins that is not expected to end within this wall-clock time; a run of unknown length
            may begin at any time before.
        keep_folders: Keep the run folders of written results; else only models that other runs continue.
        tell: Receives progress messages.
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
    pack(results_file)
    if not keep_folders:
        _tidy(planned, results, work)
    return len(waiting)


def end_with_parent() -> None:
    """End this worker as soon as its parent has ended.

    A pool's worker survives a killed parent. It would finish its run next to the continued study, in the same folder,
    and then wait forever. Its work is in its checkpoint.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a process of a pool"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _with_predecessors(missing: Sequence[PlannedRun], planned: Sequence[PlannedRun], work: Path) -> list[PlannedRun]:
    """Return the missing runs, with finished predecessors whose model no longer exists."""
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
    """Return the first run that can begin: it fits the budget, and its starting model exists or can be made."""
    in_work = {key for run in running for key in _unmade(run, work)}
    for run in waiting:
        ready = run.after is None or (folder_of(run.after, work) / "model").is_dir()
        made_by_another = not in_work.isdisjoint(_unmade(run, work))
        if ready and not made_by_another and (expected_minutes(run, results.values()) or 0.0) <= minutes_left:
            return run
    return None


def _unmade(run: PlannedRun, work: Path) -> set[str]:
    """Return keys of the missing phases of the run's initial checkpoint."""
    chain = [] if run.start is None else run.start.chain()
    return {start.key for start in chain if not (start_folder(start, work) / "config.json").is_file()}


def make_start(start: PlannedStart, work: Path) -> Path:
    """Return the folder of an initial checkpoint, made with its phases if it is missing."""
    from magicrl.training.sft import run_sft  # torch: only in the processes that train

    recipe = start.recipe
    if start.after is not None:
        before = make_start(start.after, work)
        recipe = recipe.model_copy(update={"model": SftModelConfig(folder=str(before))})
    return run_sft(recipe, start_folder(start, work))


def do_run(run: PlannedRun, work: Path) -> dict[str, Any]:
    """Train one run and return its result; called in a separate process.

    A run that cannot continue (a loss that is not finite, nothing left to learn from) is a result as well: some
    ablations measure where a variant fails.
    """
    from magicrl.training.recorder import NullObserver
    from magicrl.training.session import run_training
    from magicrl.training.step import TrainingStopped

    folder = folder_of(run.key, work)
    config = started(run, work)
    clock, stopped = time.process_time(), None
    try:
        run_training(config, folder, NullObserver(), resume=folder.exists())
    except (FloatingPointError, TrainingStopped) as error:
        stopped = f"{type(error).__name__}: {error}"
    return result_of(run, folder, cpu_seconds=time.process_time() - clock, stopped=stopped)


def started(run: PlannedRun, work: Path) -> TrainConfig:
    """Return the run's recipe with the folders of starting model and reference, made if they are missing."""
    config, origin = run.config, None if run.start is None else str(make_start(run.start, work).resolve())
    model = origin if run.after is None else str((folder_of(run.after, work) / "model").resolve())
    changes: dict[str, Any] = {} if model is None else {"start": StartConfig(model=model)}
    if config.reference.mode != "none" and config.reference.model is None and origin is not None:
        changes["reference"] = config.reference.model_copy(update={"model": origin})
    return config.model_copy(update=changes)


def folder_of(key: str, work: Path) -> Path:
    """Return the folder of the run with this key."""
    return work / key


def start_folder(start: PlannedStart, work: Path) -> Path:
    """Return the folder of an initial checkpoint."""
    return work / "starts" / start.key


def _tidy(planned: Sequence[PlannedRun], results: Mapping[str, Result], work: Path) -> None:
    """Remove folders of runs that have a result and that no missing run continues."""
    needed = {run.after for run in planned if run.key not in results}
    for run in planned:
        if run.key in results and run.key not in needed:
            shutil.rmtree(folder_of(run.key, work), ignore_errors=True)


def _label(run: PlannedRun) -> str:
    return ", ".join(f"{ablation} {arm}" for ablation, arm in run.arms) + ", start {}, seed {}".format(*run.unit)


def _summary(row: Mapping[str, Any]) -> str:
    after = row["tests"]["after"].get("1.0")
    end = "no test" if after is None else f"accuracy {after:.3f}"
    stopped = f", stopped ({row['stopped']})" if row["stopped"] else ""
    return f"{end} after {row['steps']} steps, {row['cpu_seconds']:.0f} CPU s{stopped}"
