"""What a decode step of the in-process engine costs by its batch and by T: python benchmarks/plan_decode.py RUN_FOLDER

The run's own model answers the run's own prompts, batches of several sizes under several T, all in turns in one
process; CPU seconds, so that other work on the machine counts little. Two numbers are fitted on the sizes named by
``--fit`` at the run's first T, seconds a step and seconds a row, and tried on everything else. Writes
``docs/figures/plan-decode.json``, which ``plan_cpu.py`` reads. Half a minute of one core for the quickstart's model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plan_published import ROOT, error, rounded
from scipy.optimize import nnls

from magicrl.config.loader import load_train_recipe
from magicrl.models.loading import load_policy
from magicrl.models.prompts import PromptEncoder
from magicrl.records import Problem, RolloutRequest, SamplingParams
from magicrl.rollout.engines import in_process_engine
from magicrl.training.preflight import load_data

WARM_UP = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One generation: ``groups`` of the recipe's group size under T; decode steps, tokens, CPU seconds."""

    groups: int
    limit: int
    steps: int
    tokens: int
    seconds: float


class Bench:
    """An engine for each T over one model."""

    def __init__(self, folder: Path, limits: Sequence[int]) -> None:
        self.config = load_train_recipe(folder / "config.toml")
        torch.set_num_threads(1)
        policy = load_policy(
            folder / "model", dtype=self.config.rollout.dtype or self.config.model.dtype, device=torch.device("cpu")
        )
        self.encoder = PromptEncoder(policy.tokenizer, self.config.data.max_prompt_tokens)
        self.problems: Sequence[Problem] = load_data(self.config, self.encoder).train
        self.size = self.config.stages[0].group_size
        rollout = self.config.rollout
        self.engines = {
            limit: in_process_engine(
                policy,
                self.encoder.decode,
                max_rows=rollout.max_rows,
                memory_limit_mb=rollout.memory_limit_mb,
                device=torch.device("cpu"),
            )
            for limit in limits
        }
        for engine in self.engines.values():
            engine.load_weights(policy.model.state_dict(), 0)

    def play(self, groups: int, limit: int, turn: int) -> Played:
        sampling = SamplingParams(temperature=1.0, max_tokens=limit, seed=0)
        first = turn * groups
        requests = [
            RolloutRequest(
                draw=first + i,
                problem=(problem := self.problems[(first + i) % len(self.problems)]),
                prompt_tokens=self.encoder.encode(problem),
                group_size=self.size,
                sampling=sampling,
            )
            for i in range(groups)
        ]
        begin = time.process_time()
        self.engines[limit].submit(requests)
        done = list(self.engines[limit].finished())
        seconds = time.process_time() - begin
        lengths = [len(completion) for group in done for completion in group.completions]
        return Played(groups=groups, limit=limit, steps=max(lengths), tokens=sum(lengths), seconds=seconds)


def fitted(played: Sequence[Played]) -> tuple[float, float]:
    """Seconds a step and seconds a row, neither negative; each generation weighs the same."""
    weights = np.array([1 / p.seconds for p in played])
    table = np.array([[p.steps, p.tokens] for p in played], dtype=float) * weights[:, None]
    step, row = nnls(table, np.ones(len(played)))[0]
    return float(step), float(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--fit", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures" / "plan-decode.json")
    options = parser.parse_args()
    limits = [stage.max_tokens for stage in load_train_recipe(options.run / "config.toml").stages]
    bench = Bench(options.run, limits)
    played = [
        bench.play(groups, limit, turn)
        for turn in range(options.turns + WARM_UP)
        for limit in limits
        for groups in options.groups
    ][WARM_UP * len(limits) * len(options.groups) :]
    step, row = fitted([p for p in played if p.limit == limits[0] and p.groups in options.fit])
    cells: list[dict[str, Any]] = []
    for limit in limits:
        for groups in options.groups:
            here = [p for p in played if (p.groups, p.limit) == (groups, limit)]
            measured = float(np.median([p.seconds / p.steps for p in here]))
            predicted = float(np.median([step + row * p.tokens / p.steps for p in here]))
            cells.append(
                {
                    "max_tokens": limit,
                    "rows_at_first": groups * bench.size,
                    "measured_ms_a_step": rounded(1e3 * measured),
                    "predicted_ms_a_step": rounded(1e3 * predicted),
                    "error": error(predicted, measured),
                    "fitted": groups in options.fit and limit == limits[0],
                }
            )
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "hardware": "one thread of a shared EPYC; medians of CPU seconds, in turns",
        "run": bench.config.run.name,
        "turns": options.turns,
        "seconds_a_step": rounded(step),
        "seconds_a_row": rounded(row),
        "cells": cells,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
