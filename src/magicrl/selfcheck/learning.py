"""It says when nothing was learned: small set-ups with a known outcome, and the verdict of each in ``run.json``."""

from __future__ import annotations

import json
from typing import Any

from magicrl.selfcheck.setup import Proof, Setup, judged
from magicrl.training.protocols import TrainingStopped

REWARDS = """
def threes(problem, response):
    words = response.split()
    return words.count("3") / max(len(words), 1)

def never(problem, response):
    return 0.0

def always(problem, response):
    return 1.0

def fewer(problem, response):
    return 1.0 - threes(problem, response)

def broken(problem, response):
    raise KeyError("a bug of the reward")
"""
LEARNS = ("optimizer.learning_rate=1e-2", "stages.0.max_tokens=8", "stages.0.max_steps=12")
SETUPS: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "sound": ("threes", "threes", LEARNS, "learned"),
    "reward always 0": ("never", "threes", (), "nothing_to_learn"),
    "reward always 1": ("always", "threes", (), "nothing_to_learn"),
    # A truncated answer has no reward, so the test measures what training may reach.
    "answers truncated at one token": ("exact", "exact", ("stages.0.max_tokens=1",), "nothing_to_learn"),
    "learning rate of 1e-12": ("threes", "threes", ("optimizer.learning_rate=1e-12",), "no_update"),
    # The starting model says few threes, so only a rise of their number can make the test worse.
    "reward of the opposite": ("threes", "fewer", LEARNS, "worse"),
    "reward that raises": ("broken", "threes", (), "stopped"),
}
"""Reward of training, reward of the test, further settings, and the outcome that the run must report."""


def check_learning(setup: Setup) -> Proof:
    """Return whether each set-up ends with the verdict that is known beforehand."""
    names = ("sound", "reward always 1") if setup.quick else tuple(SETUPS)
    (setup.folder / "scores.py").write_text(REWARDS, encoding="utf-8")
    found = {name: outcome_of(setup, name) for name in names}
    off = [
        f"{name}: {found[name]['outcome']}, not {SETUPS[name][-1]}"
        for name in names
        if found[name]["outcome"] != SETUPS[name][-1]
    ]
    failed = f"; {'; '.join(off)}" if off else ""
    return Proof(
        status=judged(not off),
        figure=f"{len(found) - len(off)} of {len(found)} set-ups have the verdict that was known beforehand{failed}",
        against="the outcome by construction: " + ", ".join(f"{name} = {SETUPS[name][-1]}" for name in names),
        details=found,
    )


def outcome_of(setup: Setup, name: str) -> dict[str, Any]:
    """Run a set-up and return outcome and reason of its ``run.json``, or of the error that stopped it."""
    *rewards, settings, _ = SETUPS[name]
    file = setup.folder / "scores.py"
    trained, measured = (reward if reward == "exact" else f"{file}:{reward}" for reward in rewards)
    test = f"{{held_out = {{path = '{setup.problems.with_name('test.jsonl')}', verifier = '{measured}'}}}}"
    folder = f"learning {name}"
    try:
        run = setup.train(
            folder,
            f"data.train.0.verifier={trained}",
            f"data.test={test}",
            "stages.0.max_steps=3",
            "evaluation.samples=4",
            "evaluation.temperatures=[0.9]",
            *settings,
        )
    except TrainingStopped as error:
        return {"outcome": "stopped", "reason": str(error)}
    learning = json.loads((run / "run.json").read_text(encoding="utf-8"))["learning"]
    return {"outcome": learning["outcome"], "reason": learning["reason"]}
