"""Fit the planner's four unknowns on five published figures and predict the others: python benchmarks/plan_published.py

Writes ``docs/figures/plan-published.json``; with ``--write`` also the table ``[published]`` of
``src/magicrl/planning/calibration.toml``. Seconds of one core.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, replace
from math import log, sqrt
from typing import Any

import tomli_w
from common import ROOT, document, parser_of, rounded, write_figure
from published import (
    PROMPT,
    TABLE7_HOURS,
    UNKNOWNS,
    Resolved,
    Setting,
    curve,
    fit,
    part_seconds,
    predict,
    resolve,
    rows,
    thirty_two,
)
from scipy.optimize import brentq

from magicrl.planning.costs import Efficiency
from magicrl.planning.workload import KEPT, MEAN_AT_32K, SHARED, SIGMA, lengths_of_mean, step_time

CALIBRATION = ROOT / "src" / "magicrl" / "planning" / "calibration.toml"


def error(predicted: float, published: float) -> float:
    return round(predicted / published - 1, 4)


def row_by_row(efficiency: Efficiency) -> list[dict[str, Any]]:
    """Every row of Tables 8 and 9 beside the plain curve through Table 9's ends (which says nothing of Table 8)."""
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


def table_seven(efficiency: Efficiency) -> dict[str, Any]:
    """Shares of a step of the 32B model; the GPU count is not published, so for several."""
    published = {part: hours / TABLE7_HOURS["step"] for part, hours in TABLE7_HOURS.items() if part != "step"}
    found: dict[str, Any] = {"published": {k: round(v, 3) for k, v in published.items()}}
    found["published_step_seconds"] = rounded(TABLE7_HOURS["step"] * 3.6)
    for gpus in (64, 128, 256):
        r = resolve(thirty_two(gpus))
        time = r.time(efficiency)
        shares = {part: round(part_seconds(time, part) / time.seconds(0), 3) for part in published}
        found[f"{gpus} GPUs"] = {**shares, "step_seconds": rounded(time.seconds(0))}
    return found


def areal(efficiency: Efficiency) -> list[dict[str, Any]]:
    """AReaL's synchronous and asynchronous hours, without the released code's time outside the GPUs."""
    found: list[dict[str, Any]] = []
    bare = replace(efficiency, other=0.0)
    for size, gpus, hours, async_hours in (("1.5B", 128, 41.0, 14.8), ("7B", 192, 57.7, 25.4)):
        model = f"DeepSeek-R1-Distill-Qwen-{size}"
        r = resolve(Setting(gpus=gpus, model=model, limit=27648, rollout_batch=512), kept=1.0)
        split = replace(r.layout, rollout_gpus=gpus * 3 // 4, learner_gpus=gpus // 4, colocated=False)
        stale = step_time(r.system(bare), r.work, split).seconds(4)
        for mode, value, published in (
            ("synchronous", r.time(bare).seconds(0), hours),
            ("asynchronous", stale, async_hours),
        ):
            found.append(
                {
                    "run": f"{size} on {gpus} GPUs, {mode}",
                    "predicted_seconds": rounded(value),
                    "published_seconds_at_250_steps": rounded(published * 3600 / 250),
                    "error_at_250_steps": error(value, published * 3600 / 250),
                    "published_seconds_at_1000_steps": rounded(published * 3.6),
                    "error_at_1000_steps": error(value, published * 3.6),
                }
            )
    return found


VERL_STEPS = ((32, 790.0), (64, 365.0), (128, 356.0))
VERL_UPDATE = 114.0  # seconds of the update on 128 GPUs


def verl(efficiency: Efficiency) -> list[dict[str, Any]]:
    """verl's synchronous steps on H20: with R1-Distill's lengths, and with the mean length that its update on 128 GPUs
    implies (the model's lengths are not published), beside the plain curve through the rows at 32 and 128 GPUs.

    From the public script of these runs: tensor parallel 4, sequence parallel 4, 32 prompts an update.
    """
    bare = replace(efficiency, other=0.0)
    a, b = curve([VERL_STEPS[0], VERL_STEPS[-1]])

    def setting(gpus: int) -> Setting:
        return Setting(
            gpus=gpus, model="Qwen2.5-Math-7B", hardware="H20", limit=28672, rollout_batch=512, sgd_steps=16,
            tensor_parallel=4, sequence_parallel=4,
        )  # fmt: skip

    def implied(gpus: int, mean: float) -> Resolved:
        return resolve(setting(gpus), lengths_of_mean(mean, 28672), kept=1.0)

    def gap(mean: float) -> float:
        r = implied(128, mean)
        return r.time(bare).learn - VERL_UPDATE

    mean = float(brentq(gap, 300.0, 12000.0, rtol=1e-4))
    found: list[dict[str, Any]] = []
    for gpus, step in VERL_STEPS:
        line: dict[str, Any] = {
            "gpus": gpus,
            "published_step": step,
            "curve_step": rounded(a + b / gpus),
            "curve_error": error(a + b / gpus, step),
        }
        for name, r in (("blind", resolve(setting(gpus), kept=1.0)), ("implied", implied(gpus, mean))):
            time = r.time(bare)
            line[name] = {
                "mean_length": rounded(r.work.lengths.mean),
                "step": rounded(time.seconds(0)),
                "error": error(time.seconds(0), step),
                "generation": rounded(time.rollout),
                "logprobs": rounded(time.logprobs),
                "update": rounded(time.learn),
            }
        if gpus == 128:
            line["published_parts"] = {"generation": 178.0, "logprobs": 54.0, "update": VERL_UPDATE}
        found.append(line)
    return found


def unfitted_error(efficiency: Efficiency) -> float:
    """Root mean square of log(predicted / published) over the parts of Tables 8 and 9 that no unknown was fitted on."""
    logs = [log(predict(r, efficiency) / r.seconds) for r in rows() if not r.fitted and r.part != "step"]
    return sqrt(sum(x * x for x in logs) / len(logs))


def write_published(changes: Mapping[str, Any]) -> None:
    """Change the table ``published`` of the calibration that magicrl ships; its head and other tables stay."""
    text = CALIBRATION.read_text()
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    tables = tomllib.loads(text)
    tables["published"] |= changes
    CALIBRATION.write_text(head + tomli_w.dumps(tables))


def main() -> None:
    parser = parser_of(__doc__, ROOT / "docs" / "figures" / "plan-published.json")
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
        "table_7": table_seven(fitted),
        "areal": areal(fitted),
        "verl": verl(fitted),
        "cpu_seconds": rounded(time.process_time() - began),
    }
    write_figure(options.output, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
