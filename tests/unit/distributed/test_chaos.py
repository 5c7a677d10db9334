"""A run that loses an engine, a rank, a verifier, a node and its head, in turn: every prompt is accounted for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.slow


def test_every_prompt_is_accounted_for_whatever_dies(tmp_path: Path) -> None:
    figures = tmp_path / "chaos.json"
    script = ROOT / "tests" / "helpers" / "cluster_chaos.py"
    options = ["--model", "tiny", "--models", str(tmp_path), "--work", str(tmp_path / "work"), "--output", str(figures)]
    done = subprocess.run([sys.executable, str(script), *options], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(figures.read_text())
    assert [kill["killed"].split(" (")[0] for kill in found["kills"]] == [
        "a rollout replica",
        "a learner rank",
        "a verifier pool",
        "a node",
        "the run's process and all of Ray",
    ]
    replica, rank, judge, node, _ = found["kills"]
    assert replica["losses"]["cluster/replicas/lost"] == 1
    assert rank["losses"]["cluster/learner/lost"] == 1
    assert judge["losses"]["cluster/verifiers/lost"] == 1
    assert sum(node["losses"].values()) > sum(judge["losses"].values())
    assert any("replica" in text for _, text in found["told"])
    accounted = found["accounted"]
    assert accounted["whole"]
    assert accounted["verdicts"].get("not_judged", 0) == 0
    equal, samples = accounted["first_step_samples_equal_to_one_machine"]
    assert equal >= samples - 2, "tokens of two replicas are those of one engine but for near-ties"
