"""The report's difficulty table for any model: 0/N, N/N and kept, as text, JSON and a picture."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from magicrl.files import write_atomically
from magicrl.pipeline.drawing import bars
from magicrl.pipeline.settings import EarlyStop
from magicrl.pipeline.steps.sequential import chance_of_the_same, failures_of_sixteen

ABILITIES = {"math": "maths", "code": "code"}


def difficulty_table(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By ability: problems, never (0/N), always (N/N) and sometimes solved, and what could not be measured.

    Args:
        document: ``counts.json`` of the difficulty step: ``counts`` holds (ability, correct, judged, N) by problem.
    """
    overlong = set(document["overlong"])
    table: list[dict[str, Any]] = []
    for ability, word in ABILITIES.items():
        rows = [(name, row) for name, row in document["counts"].items() if row[0] == ability]
        measured = [row for name, row in rows if row[2] > 0 and name not in overlong]
        if not rows:
            continue
        never = sum(correct == 0 for _, correct, _, _ in measured)
        always = sum(correct == counted for _, correct, counted, _ in measured)
        table.append(
            {
                "ability": word,
                "problems": len(measured),
                "never": never,
                "always": always,
                "kept": len(measured) - never - always,
                "unmeasured": len(rows) - len(measured),
            }
        )
    return table


def write_difficulty_report(document: Mapping[str, Any], folder: Path) -> str:
    """Write ``difficulty.json``, ``difficulty.txt`` and ``difficulty.svg``; returns the text."""
    table = difficulty_table(document)
    told: dict[str, Any] = {
        "model": document["model"],
        "temperature": document["temperature"],
        "max_tokens": document["max_tokens"],
        "samples": document["samples"],
        "table": table,
        "early_stop": document["early_stop"],
    }
    lines = [f"difficulty under {document['model']} (tau {document['temperature']:g}, T {document['max_tokens']})"]
    lines.append(f"{'':8}{'problems':>10}{'0/N':>10}{'N/N':>10}{'kept':>10}{'unmeasured':>12}")
    for row in table:
        shares = [f"{100 * row[name] / max(1, row['problems']):.1f} %" for name in ("never", "always", "kept")]
        cells = "".join(f"{share:>10}" for share in shares)
        lines.append(f"{row['ability']:8}{row['problems']:>10}{cells}{row['unmeasured']:>12}")
    samples = document["samples"]
    lines.append(f"{samples['made']} of {samples['wanted']} samples made")
    if document["early_stop"] is not None:
        wrong = expected_errors(document["counts"].values(), EarlyStop.model_validate(document["early_stop"]))
        told["expected_errors"] = round(wrong, 2)
        share = samples["saved"] / max(1, samples["wanted"])
        lines.append(
            f"early stopping saved {samples['saved']} samples ({100 * share:.1f} %); of the problems closed early as "
            f"never or always solved, {wrong:.1f} are expected to be neither"
        )
    text = "\n".join(lines)
    write_atomically(folder / "difficulty.json", json.dumps(told, indent=1))
    write_atomically(folder / "difficulty.txt", text + "\n")
    write_atomically(folder / "difficulty.svg", _picture(document))
    return text


def expected_errors(counts: Sequence[Any] | Any, rule: EarlyStop) -> float:
    """How many of the problems closed early as never or always solved are expected to be neither."""
    closed = [(n, total) for _, correct, n, total in counts if 0 < n < total and correct in (0, n)]
    return sum(1 - chance_of_the_same(n, total, rule.prior) for n, total in closed)


def _picture(document: Mapping[str, Any]) -> str:
    """Problems by failures of 16."""
    found = Counter(
        failures_of_sixteen(correct, counted) for _, correct, counted, _ in document["counts"].values() if counted
    )
    labels = [str(failures) for failures in range(17)]
    return bars(
        f"Problems by failures of 16, {document['model']}",
        labels,
        [found[failures] for failures in range(17)],
        faint={0, 16},
        note="0: always solved, 16: never solved; both are dropped",
    )
