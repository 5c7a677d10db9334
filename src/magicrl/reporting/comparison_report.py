"""One page that compares training runs, evaluations, or both: reads the folders, chooses the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from magicrl.evaluation.samples import RESULTS
from magicrl.reporting.arms import Arm, group_runs
from magicrl.reporting.blocks import Block
from magicrl.reporting.comparing import LeftOut, comparison_blocks, left_out_block
from magicrl.reporting.curves import Axis
from magicrl.reporting.eval_blocks import evaluation_blocks
from magicrl.reporting.eval_folder import RecordedEvaluation, read_evaluation_folder
from magicrl.reporting.report import render_page, write_page
from magicrl.reporting.run_folder import RecordedRun, read_run


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenComparison:
    """The page, and what could not be put on it."""

    path: Path
    left_out: tuple[LeftOut, ...]


def is_evaluation(folder: Path) -> bool:
    """Whether ``magicrl eval`` wrote this folder; a folder with neither mark is taken for a run."""
    return not (folder / "run.json").exists() and ((folder / RESULTS).exists() or any(folder.glob("*/job.json")))


def write_comparison(
    folders: Sequence[Path],
    output: Path,
    *,
    axis: Axis = "steps",
    keys: Sequence[str] | None = None,
    command: str = "",
) -> WrittenComparison:
    """Write a page over run folders, evaluation folders, or both.

    A folder that cannot be read is left out, and the page says so; it is an error only where none is left.

    Args:
        folders: in the order of the page; the others are held against the first run (or evaluation).
        output: the page.
        axis: the x axis that is shown first.
        keys: settings that make the arms; default: all in which runs differ but for seed and bookkeeping.
        command: what made the page, for its foot.

    Raises:
        ValueError: the same folder twice, no folder that can be read, a key that no run has, or the page cannot be
            written.
    """
    doubled = [folder for i, folder in enumerate(folders) if folder.resolve() in {f.resolve() for f in folders[:i]}]
    if doubled:
        raise ValueError(f"{doubled[0]} is named twice; a run counts once in a comparison")
    runs: list[RecordedRun] = []
    evaluations: list[RecordedEvaluation] = []
    left_out: list[LeftOut] = []
    for folder in folders:
        try:
            if is_evaluation(folder):
                evaluations.append(read_evaluation_folder(folder))
            else:
                runs.append(read_run(folder))
        except ValueError as error:
            left_out.append(LeftOut(folder=str(folder), why=str(error)))
    if not runs and not evaluations:
        raise ValueError("none of the folders can be read:\n" + "\n".join(f"  {item.why}" for item in left_out))
    if keys is not None and not runs:
        raise ValueError(f"--group-by {keys[0]}: there is no run among the folders, only evaluations")
    arms = group_runs(runs, keys) if runs else ()
    missing = left_out_block(left_out)
    blocks: list[Block] = [missing] if missing is not None else []
    blocks += comparison_blocks(arms, axis) if arms else ()
    blocks += evaluation_blocks(evaluations) if evaluations else ()
    page = render_page(
        _title(arms, runs, evaluations), _facts(arms, runs, evaluations, left_out), blocks, command, _kind(runs)
    )
    return WrittenComparison(path=write_page(page, output), left_out=tuple(left_out))


def _kind(runs: Sequence[RecordedRun]) -> str:
    return "comparison" if runs else "evaluation"


def _title(arms: Sequence[Arm], runs: Sequence[RecordedRun], evaluations: Sequence[RecordedEvaluation]) -> str:
    if runs:
        names = list(dict.fromkeys(run.name for run in runs))
        return " · ".join(names) if len(names) <= 4 else f"{' · '.join(names[:3])} and {len(names) - 3} more"
    benchmarks = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.benchmarks))
    return ", ".join(benchmarks[:4]) + (" and more" if len(benchmarks) > 4 else "")


def _facts(
    arms: Sequence[Arm],
    runs: Sequence[RecordedRun],
    evaluations: Sequence[RecordedEvaluation],
    left_out: Sequence[LeftOut],
) -> list[tuple[str, str]]:
    facts = [("arms", str(len(arms))), ("runs", str(len(runs)))] if runs else []
    facts += [("training steps", str(sum(len(run.metrics) for run in runs)))] if runs else []
    facts += [("evaluations", str(len(evaluations)))] if evaluations else []
    samples = sum(b.problems * b.samples for evaluation in evaluations for b in evaluation.benchmarks.values())
    facts += [("samples", f"{samples:,}")] if samples else []
    return facts + ([("left out", str(len(left_out)))] if left_out else [])
