"""A killed run continues bit for bit: SIGKILL at random moments of small runs, in several configurations.

One run of each configuration is not disturbed. The others are killed and resumed until they end. Weights, optimizer
state, data order, recorded responses and metrics must then be equal. ``benchmarks/resume/kills.py`` compares in the
same way, and also kills at chosen places, such as in the middle of a file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from magicrl.config.loader import load_train_recipe
from magicrl.selfcheck.setup import Proof, Setup, judged, metrics
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training

CLOCKED = ("time/", "idle/", "speed/", "memory/", "tokens/per_second", "verify/seconds")
"""Beginnings of the names of metrics that the clock decides."""
ENVIRONMENT = '''
from magicrl.environments.base import Step


class TwoTurns:
    """Two turns; the reward is 1 if the second one ends with a small digit."""

    def reset(self, problem):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        if self.turns == 1:
            return Step(observation="1")
        return Step(done=True, reward=float(text.split()[-1:] < ["5"]))
'''
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "plain": ("stages.0.max_steps=6",),
    "LoRA": ("stages.0.max_steps=6", "model.lora={rank = 4, alpha = 8}"),
    "asynchronous": ("stages.0.max_steps=6", "rollout.max_staleness=1", "algorithm.correction=tis"),
    "environment": ("stages.0.max_steps=6", "environment={max_turns = 2, max_observation_tokens = 4}"),
    "stage change pending": (
        "stages=[{max_tokens = 8, rollout_batch = 8, group_size = 4, max_steps = 5, transition = {rule = 'converged', "
        "horizon = 4, delta = 0.2, window = 4}}, {max_tokens = 24, rollout_batch = 8, mini_batch = 4, group_size = 4, "
        "max_steps = 3, transition = {rule = 'fixed'}}]",
        "data.online_filter=true",
    ),
    "float16": ("stages.0.max_steps=6", "model.dtype=float16"),
}
"""Settings of each configuration."""
KILLS = 10
"""Kills of each configuration."""
EARLY = 0.2
"""Share of kills that may come before the process has saved a checkpoint of its own."""


FORKS = multiprocessing.get_context("forkserver")
"""A server that has imported everything forks each life: fast, and without the threads of this process."""
FORKS.set_forkserver_preload([__name__])


def check_resume(setup: Setup) -> Proof:
    """Return whether every killed run ended as the undisturbed one."""
    file = setup.folder / "two_turns.py"
    file.write_text(ENVIRONMENT, encoding="utf-8")
    rng = random.Random(setup.seed)
    found: dict[str, Any] = {}
    names = ["plain", "asynchronous"] if setup.quick else list(CONFIGURATIONS)
    lora = importlib.util.find_spec("peft") is not None
    for name in names:
        if name == "LoRA" and not lora:
            continue
        settings = CONFIGURATIONS[name]
        if name == "environment":
            settings = (*settings, f"data.train.0.environment={file}:TwoTurns")
        folder = setup.folder / f"resume {name}"
        folder.mkdir()
        found[name] = kills_of(setup.recipe, settings, folder, kills=2 if setup.quick else KILLS, rng=rng)
    total = sum(one["kills"] for one in found.values())
    runs = sum(one["runs"] for one in found.values())
    off = [f"{name}: {', '.join(one['different'])}" for name, one in found.items() if one["different"]]
    failed = f"; different: {'; '.join(off)}" if off else ""
    failed += "" if lora else "; LoRA was left out: pip install 'magicrl[lora]'"
    pending, saved = (sum(one[name] for one in found.values()) for name in ("pending stage change", "checkpoint"))
    return Proof(
        status=judged(not off and saved > 0),
        figure=f"{total} kills of {runs} runs in {len(found)} configurations ({', '.join(found)}; {saved} kills with a "
        f"checkpoint to resume from, {pending} with a pending convergence test); {len(off)} configurations with a "
        f"difference{failed}",
        against="an undisturbed run: hash of the weights, optimizer state, data order, responses, metrics",
        details=found,
    )


def kills_of(recipe: Path, settings: Sequence[str], folder: Path, *, kills: int, rng: random.Random) -> dict[str, Any]:
    """Kill runs of this configuration ``kills`` times and return counts and what differed at their ends.

    Raises:
        RuntimeError: A run failed by itself. The text holds the end of its log.
    """
    first = FORKS.Process(target=int)  # starts the server, whose imports are no part of a run's time
    first.start()
    first.join()
    whole = folder / "whole"
    began = time.monotonic()
    live_until(recipe, settings, whole, None)
    seconds = time.monotonic() - began
    rows = metrics(whole)
    step = sum(row["time/step"] for row in rows) / len(rows)
    expected = run_contents(whole)
    found: dict[str, Any] = {"kills": 0, "runs": 0, "checkpoint": 0, "pending stage change": 0, "different": []}
    found["seconds"] = seconds
    found["weights"] = hashlib.sha256(expected["weights"]).hexdigest()
    while found["kills"] < kills:
        output = folder / f"killed-{found['runs']}"
        found["runs"] += 1
        ended = False
        while not ended:
            last = found["kills"] == kills
            early = rng.random() < EARLY
            moment = rng.uniform(0.15, 0.75) * seconds if early else rng.uniform(0, 1.5) * step
            ended = live_until(recipe, settings, output, None if last else moment, early=early)
            if ended and not last:
                seconds, step = 0.8 * seconds, 0.8 * step  # faster by now than while the whole run was timed
            elif not ended:
                found["kills"] += 1
                found["checkpoint"] += newest_checkpoint(output) is not None
                found["pending stage change"] += to_restore(output)["a pending convergence test"]
        found["different"] += [name for name in run_differences(expected, output) if name not in found["different"]]
    return found


def live_until(
    recipe: Path, settings: Sequence[str], output: Path, seconds: float | None, *, early: bool = True
) -> bool:
    """Start or resume the run in a process of its own, and kill it after ``seconds``. Return whether it ended before.

    Args:
        recipe: File of the recipe.
        settings: Its overrides.
        output: Run folder.
        seconds: None for no kill.
        early: Whether the seconds count from the start, and not from the first checkpoint that the process saves.

    Raises:
        RuntimeError: It failed by itself.
    """
    before = newest_checkpoint(output)
    life = FORKS.Process(target=_run, args=(recipe, tuple(settings), output))
    life.start()
    while not early and life.is_alive() and newest_checkpoint(output) == before:
        time.sleep(0.01)
    life.join(seconds)
    if life.exitcode is None:
        life.kill()
        life.join()
        return False
    if life.exitcode != 0:
        raise RuntimeError(f"a run of the check failed: {output.with_suffix('.log').read_text()[-2000:]}")
    return True


def _run(recipe: Path, settings: Sequence[str], output: Path) -> None:
    os.setsid()
    log = os.open(output.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        run_training(load_train_recipe(recipe, settings), output, NullObserver(), resume=True)
    except BaseException:
        traceback.print_exc()
        raise


def run_contents(output: Path) -> dict[str, Any]:
    """Return everything of a run that must not depend on kills, by name."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["values"] = {k: v for k, v in row["values"].items() if not k.startswith(CLOCKED)}
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    last = sorted((output / "checkpoints").glob("step-*"))[-1]
    state = json.loads((last / "state.json").read_text())
    rollouts = [
        pq.read_table(path).drop_columns(["seconds"]).to_pylist()
        for path in sorted((output / "rollouts").glob("*.parquet"))
    ]
    timeline = [json.loads(line) for line in (output / "timeline.jsonl").read_text().splitlines()]
    return {
        "metrics": rows,
        "weights": (output / "model" / "model.safetensors").read_bytes(),
        "state": (last.name, state["state"]),
        "moments": state["tensors_sha256"],
        "checkpoints": sorted(path.name for path in (output / "checkpoints").iterdir()),
        "tests": [path.read_text() for path in sorted((output / "evaluations").glob("*"))],
        "filter": (output / "difficulty.json").read_text() if (output / "difficulty.json").exists() else None,
        "rollouts": rollouts,
        "events": [(e["kind"], e["step"], e["message"]) for e in events if e["kind"] not in ("resume", "warning")],
        "timeline": [(row["step"], row["kind"], row["what"]) for row in timeline],
        "half-written": [str(p.relative_to(output)) for p in output.rglob("*writing*")],
    }


def run_differences(expected: dict[str, Any], output: Path) -> list[str]:
    """Return the names of what differs from `run_contents` of the undisturbed run."""
    found = run_contents(output)
    return [name for name, value in expected.items() if found[name] != value]


def newest_checkpoint(output: Path) -> Path | None:
    return max((output / "checkpoints").glob("step-*"), default=None)


def to_restore(output: Path) -> dict[str, bool]:
    """Return what the newest checkpoint restores, apart from weights and the data position."""
    newest = newest_checkpoint(output)
    state = {} if newest is None else json.loads((newest / "state.json").read_text())["state"]
    test = state.get("schedule", {}).get("test") or {}
    return {
        "c above 0": state.get("controller", {}).get("c", 0.0) > 0,
        "problems removed": bool(state.get("sampler", {}).get("removed")),
        "visits noted": bool(state.get("visits")),
        "a pending convergence test": bool(test.get("steps")) and not test["converged"],
        "work in flight": bool(state.get("trainer", {}).get("pending")),
    }
