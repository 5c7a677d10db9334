"""Fit the planner's four unknowns on five published figures and predict the others.

    python -m benchmarks.planning.plan_published

Writes ``plan-published.json``; with ``--write`` also the table ``[published]`` of
``src/magicrl/planning/calibration.toml``. Seconds of one core.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from math import log, sqrt
from typing import Any

import tomli_w
from published import PROMPT, UNKNOWNS, curve, fit, predict, rows

from benchmarks.shared import FIGURES, ROOT, document, parser_of, rounded, write_figure
from magicrl.planning.costs import Efficiency
from magicrl.planning.workload import KEPT, MEAN_AT_32K, SHARED, SIGMA

CALIBRATION = ROOT / "src" / "magicrl" / "planning" / "calibration.toml"


def error(predicted: float, published: float) -> float:
    return round(predicted / published - 1, 4)


def row_by_row(efficiency: Efficiency) -> list[dict[str, Any]]:
    """Return every row of Tables 8 and 9 with the plain curve through Table 9's ends."""
    ends = [(row.setting.gpus, row.seconds) for row in rows() if row.name.startswith("T9") and row.fitted]
    a, b = curve(ends)
    found: list[dict[str, Any]] = []
    for row in rows():
        value = predict(row, efficiency)
        line: dict[str, Any] = {
            "row": row.name,
            "fitted": row.fitted,
            "published_seconds": rounded(row.seconds),
            "predicted_seconds": rounded(value),
            "error": error(value, row.seconds),
        }
        if row.part == "rollout":
            line["curve_seconds"] = rounded(a + b / row.setting.gpus)
            line["curve_error"] = error(a + b / row.setting.gpus, row.seconds)
        found.append(line)
    return found


def unfitted_error(efficiency: Efficiency) -> float:
    """Return the root mean square of log(predicted / published) over the parts that were not fitted."""
    logs = [log(predict(r, efficiency) / r.seconds) for r in rows() if not r.fitted and r.part != "step"]
    return sqrt(sum(x * x for x in logs) / len(logs))


def write_published(changes: Mapping[str, Any]) -> None:
    """Rewrite the table ``published`` of the shipped calibration; its head and other tables are kept."""
    text = CALIBRATION.read_text()
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    tables = tomllib.loads(text)
    tables["published"] |= changes
    CALIBRATION.write_text(head + tomli_w.dumps(tables))


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "plan-published.json")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    began = time.process_time()
    fitted = fit(rows())
    uncertainty = unfitted_error(fitted)
    if options.write:
        told = {
            "hardware": "gpu",
            "hidden": 3584,
            "source": f"Tables 8 and 9 of the report, five figures; {uncertainty:.0%} error of the others",
        }
        write_published(told | {key: rounded(value) for key, value in asdict(fitted).items()})
    result = {
        "run": document({"hardware": "pure computation, one CPU core"}),
        "unknowns": {name: rounded(getattr(fitted, name)) for name in UNKNOWNS},
        "fixed": {key: getattr(fitted, key) for key in ("weights", "matmul", "network")},
        "assumed": {"mean_at_32k": MEAN_AT_32K, "sigma": SIGMA, "shared": SHARED, "prompt": PROMPT, "kept": KEPT},
        "rms_error_of_unfitted_parts": rounded(uncertainty),
        "rows": row_by_row(fitted),
        "cpu_seconds": rounded(time.process_time() - began),
    }
    write_figure(options.output, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
