"""Make, screen and record the initial checkpoints of the studies.

The rule is applied before any RL, to problems of the validation split, and is the same for every task: accuracy at the
best temperature is in a band (the steps are learned, the task is not solved), and pass@16 is well above it (there is
something to find). A rejected checkpoint is recorded with its reason, and the next number is tried.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count as numbers_from
from itertools import islice
from pathlib import Path
from typing import Any

from magicrl.config.loader import load_train_recipe
from magicrl.data.families import make_family
from studies.definition import base_recipe
from studies.results import SCHEMA_VERSION, append_result, rounded
from studies.runs import PlannedStart, Tell, make_start, phases_of, read_screened, supervised_recipe

BAND = (0.10, 0.45)
"""Least and largest accuracy at the best of greedy and temperature 1."""
ROOM = 0.10
"""Smallest distance of pass@16 from that accuracy."""
PROBLEMS, SAMPLES, SEED = 100, 16, 5
MOST = 3  # factor of candidates over requested checkpoints, then the recipe is given up


def reason_of(accuracy: float, found: float) -> str | None:
    """Return why a checkpoint with this accuracy and this pass@16 is rejected, or None if it is accepted.

    Example:
        >>> reason_of(0.05, 0.5)
        'accuracy 0.050 below 0.1'
    """
    if accuracy < BAND[0]:
        return f"accuracy {accuracy:.3f} below {BAND[0]:g}"
    if accuracy > BAND[1]:
        return f"accuracy {accuracy:.3f} above {BAND[1]:g}"
    if found < accuracy + ROOM:
        return f"pass@{SAMPLES} {found:.3f} within {ROOM:g} of the accuracy {accuracy:.3f}"
    return None


def screen(base: str, count: int, first: int, work: Path, file: Path, tell: Tell = lambda text: None) -> int:
    """Make and screen checkpoints ``first`` and up until ``count`` are accepted; return how many are.

    Checkpoints that ``file`` already has, made by the same recipe, are not screened again. An accepted one that is
    missing in ``work`` is made. The model before the last SFT phase, which plants the habits, is measured too.

    Raises:
        ValueError: the base recipe starts from a published model.
    """
    recipe = supervised_recipe(base, ())
    accepted = 0
    for number in islice(numbers_from(first), MOST * count):
        start = phases_of(recipe, number, shared=False)
        known: Mapping[str, Any] | None = read_screened(file).get(recipe.run.name, {}).get(number)
        row = known
        if row is None or row["key"] != start.key:
            row = _screened(recipe.run.name, base, number, start, work)
        elif row["accepted"]:  # the record is committed, the model is not
            make_start(start, work)
        if row.get("before") is None and start.after is not None:
            row = {
                **row,
                "before": _measured(base, make_start(start.after, work), work / "screening" / start.after.key),
            }
        if row is not known:
            append_result(file, row)
        accepted += bool(row["accepted"])
        tell(f"{base} start {number}: {row['reason'] or 'accepted'} ({row['cpu_seconds']:.0f} CPU s)")
        if accepted == count:
            break
    return accepted


def _screened(recipe: str, base: str, number: int, start: PlannedStart, work: Path) -> dict[str, Any]:
    """Return the row of a checkpoint: identity, measurements, and whether it is accepted."""
    clock = time.process_time()
    measured = _measured(base, make_start(start, work), work / "screening" / start.key)
    reason = reason_of(max(measured["greedy"], measured["at_1"]), measured[f"pass@{SAMPLES}"])
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe": recipe,
        "base": base,
        "start": number,
        "key": start.key,
        **measured,
        "accepted": reason is None,
        "reason": reason,
        "cpu_seconds": rounded(time.process_time() - clock),
    }


def _measured(base: str, folder: Path, output: Path) -> dict[str, float]:
    """Return greedy accuracy, accuracy and pass@k at temperature 1 on validation problems."""
    from magicrl.commands.eval import evaluate

    path = base_recipe(base)
    config = load_train_recipe(path, [], path.parent)
    source = config.data.train[0]
    assert source.family is not None, "the study's recipes have generated problems"
    family = make_family(source.family, source.options)
    stream = family.stream(seed=SEED, split="validation", levels=source.levels)
    problems = {problem.prompt: problem for problem in islice(stream, 20 * PROBLEMS)}
    asked = {"screening": list(islice(problems.values(), PROBLEMS))}
    found: dict[str, float] = {}
    for name, temperature, samples in (("greedy", 0.0, 1), ("at_1", 1.0, SAMPLES)):
        result = evaluate(
            folder,
            asked,
            output=output / name,
            samples=samples,
            temperature=temperature,
            max_tokens=config.stages[-1].max_tokens,
            extract=config.verifier.extract,
            dtype=config.model.dtype,
            threads=1,
            workers=1,
            max_rows=config.rollout.max_rows,
            memory_limit_mb=config.rollout.memory_limit_mb,
            pass_at=[samples],
            progress=False,
        ).recorded.benchmarks["screening"]
        found[name] = rounded(result.accuracy.mean)
        if samples > 1:
            found[f"pass@{samples}"] = rounded(result.pass_at[samples].mean)
    return found


def starts_page(rows: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """Return the page of all screened checkpoints, with measurements and reasons of rejection."""
    accepted = sum(bool(row["accepted"]) for by_number in rows.values() for row in by_number.values())
    screened = sum(map(len, rows.values()))
    lines: Sequence[str] = [
        "# Initial checkpoints\n",
        f"{accepted} of {screened} screened SFT checkpoints were accepted, before any RL. The rule, on {PROBLEMS} "
        f"validation problems:\naccuracy at the better of greedy and temperature 1 between {BAND[0]:g} and {BAND[1]:g} "
        f"and pass@{SAMPLES} at least {ROOM:g} above it.\nCPU seconds include SFT and screening, in one thread.\n",
        "Before the habits: accuracy, greedy and at temperature 1, of the same model before its last SFT phase. RL\n"
        "first regains what this phase has cost. All checkpoints of the suite `report` come from\n"
        "the model before the habits of sums-start 0.\n",
        f"| recipe | checkpoint | before the habits | greedy | at 1 | pass@{SAMPLES} | accepted | CPU s |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {recipe} | {number} | {_before(row)} | {row['greedy']:.3f} | {row['at_1']:.3f} | "
            f"{row[f'pass@{SAMPLES}']:.3f} | {row['reason'] or 'yes'} | {row['cpu_seconds']:.0f} |"
            for recipe, by_number in sorted(rows.items())
            for number, row in sorted(by_number.items())
        ),
    ]
    return "\n".join(lines) + "\n"


def _before(row: Mapping[str, Any]) -> str:
    before = row.get("before")
    return "not measured" if before is None else f"{before['greedy']:.3f}, {before['at_1']:.3f}"
