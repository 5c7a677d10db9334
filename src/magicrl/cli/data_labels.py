"""``magicrl data sheet`` and ``magicrl data calibrate``: what a judging step's votes are worth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from magicrl.config.errors import RecipeError

if TYPE_CHECKING:
    from magicrl.pipeline.stats import Passage


def sheet(step: Path, /, *, count: int = 300, seed: int = 0, output: Path | None = None) -> int:
    """Sample judged problems for a person to label, as one local page and a CSV. It shows no votes.

    Example: magicrl data sheet runs/data/laptop/05-judge --count 200

    Parameters
    ----------
    step
        The folder of a judging step that has run.
    count
        Problems of the sample.
    seed
        Of the sample.
    output
        Where sheet.html, sheet.csv and weights.json go; default: work/labels of the step.
    """
    from magicrl.pipeline.judging.calibration import sample_for_labels
    from magicrl.pipeline.judging.sheet import write_sheet

    texts = _texts(step)
    sample = sample_for_labels(_judgements(step, texts), count=count, seed=seed)
    page = write_sheet(sample, texts, output or step / "work" / "labels")
    Console().print(f"{len(sample)} problems: open {page} in a browser, label, save, then: magicrl data calibrate")
    return 0


def calibrate(step: Path, /, *, labels: Path, weights: Path | None = None, least_recall: float = 0.95) -> int:
    """Set judges against a person's labels: precision and recall by threshold, and the threshold that follows.

    Labels of problems that an earlier step of the same run dropped count too: they say what share of the flawed ones
    each step lets through.

    Example: magicrl data calibrate runs/data/laptop/05-judge --labels labels.csv

    Parameters
    ----------
    step
        The folder of a judging step that has run.
    labels
        Saved from the page, or a CSV with the columns id and label (keep, drop or nothing).
    weights
        weights.json of the sheet; default: work/labels/weights.json of the step, where it is.
    least_recall
        Share of the good problems that the threshold must keep.
    """
    from magicrl.files import write_atomically
    from magicrl.pipeline.judging.calibration import calibrate as against_labels
    from magicrl.pipeline.judging.calibration import read_labels
    from magicrl.pipeline.judging.report import as_text

    said = read_labels(labels)
    beside = weights or step / "work" / "labels" / "weights.json"
    weighing = json.loads(beside.read_text(encoding="utf-8")) if weights is not None or beside.is_file() else None
    result = against_labels(_judgements(step, said), said, weights=weighing, least_recall=least_recall)
    passages = _passages(step, said)
    document = asdict(result) | {"flawed_by_step": [asdict(one) for one in passages]}
    write_atomically(step / "work" / "calibration.json", json.dumps(document, indent=1) + "\n")
    console = Console(highlight=False)
    console.print(as_text(_report(step), result), markup=False, soft_wrap=True)
    for one in passages:
        console.print(
            f"of the problems labelled as flawed {one.reached} reached {one.step}, {one.passed} passed "
            f"({one.passed / one.reached:.0%})",
            markup=False,
            soft_wrap=True,
        )
    return 0


def _passages(step: Path, labels: Mapping[str, bool]) -> list[Passage]:
    """How far the problems labelled as flawed came in the run that the step belongs to; none for a step on its own."""
    from magicrl.pipeline.stats import passages_of

    run = step.resolve().parent
    flawed = [name for name, good in labels.items() if not good]
    found = passages_of(run, flawed) if (run / "sources").is_dir() else []
    return [one for one in found if one.reached]


def _report(step: Path) -> dict[str, Any]:
    path = step / "work" / "judging.json"
    if not path.is_file():
        raise RecipeError(f"{path}: no such file; give the folder of a judging step that has run, as RUN/05-judge")
    return json.loads(path.read_text(encoding="utf-8"))


def _judgements(step: Path, problems: Any) -> Any:
    from magicrl.pipeline.judging.stored import stored_judgements

    return stored_judgements(step / "work", problems, int(_report(step)["threshold"]))


def _texts(step: Path) -> dict[str, str]:
    """Statements by id of all problems that the step kept or dropped."""
    from magicrl.pipeline.parts import read_part

    texts: dict[str, str] = {}
    for path in sorted([*step.glob("kept/*.parquet"), *step.glob("dropped/*.parquet")]):
        rows = read_part(path, ["id", "problem"])
        texts |= dict(zip(rows.column("id").to_pylist(), rows.column("problem").to_pylist(), strict=True))
    return texts
