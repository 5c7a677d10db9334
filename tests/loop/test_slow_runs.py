"""Minutes, not seconds: the shipped quickstart from the command line, and a run killed at random."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "magicrl", *arguments]


def evaluation(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / "evaluations" / f"{name}-held_out.json").read_text())["temperatures"]


def test_the_quickstart_does_what_it_promises(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart"
    done = subprocess.run(
        command("train", str(ROOT / "recipes" / "quickstart.toml"), "--output", str(run)),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "minutes" in done.stdout.splitlines()[0]
    before, after = evaluation(run, "before"), evaluation(run, "after")
    assert before["0.0"]["accuracy"]["mean"] <= 0.6
    assert before["1.0"]["pass_at"]["64"]["mean"] >= 0.95
    best = max(score["accuracy"]["mean"] for score in before.values())
    assert after["1.0"]["accuracy"]["mean"] >= before["1.0"]["accuracy"]["mean"] + 0.25
    assert after["1.0"]["accuracy"]["mean"] >= best + 0.10
    page = (run / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "src=" not in page


def test_a_run_killed_again_and_again_ends_with_the_same_weights(toy_recipe: Path, tmp_path: Path) -> None:
    settings = ["--set", "checkpoint.every=1", "--set", "stages.0.max_steps=8", "--set", "stages.1.max_steps=8"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(
        command("train", str(toy_recipe), *settings, "--output", str(whole)), check=True, capture_output=True
    )
    rng = random.Random(0)
    for _ in range(6):
        process = subprocess.Popen(
            command("train", str(toy_recipe), *settings, "--output", str(killed), "--resume"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        time.sleep(6 + 4 * rng.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = subprocess.run(
        command("train", str(toy_recipe), *settings, "--output", str(killed), "--resume"),
        check=False,
        capture_output=True,
        text=True,
    )
    assert last.returncode == 0, last.stdout + last.stderr
    expected, found = (load_file(run / "model" / "model.safetensors") for run in (whole, killed))
    assert all(torch.equal(expected[name], found[name]) for name in expected)

    def losses(run: Path) -> list[Any]:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["values"]["train/accuracy/mean"], row["values"].get("learner/loss")) for row in rows]

    assert losses(whole) == losses(killed)
