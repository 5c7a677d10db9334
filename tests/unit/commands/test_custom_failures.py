"""Terminal output when custom code fails: the part, the place and the error, and exit status 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OWN = """
import sys

from magicrl.algorithms.losses import LossRow


def table(name):
    return {}[name]


def surrogate(s):
    return table("weights")


ROW = LossRow(surrogate=surrogate)


def leaves(a):
    sys.exit(0)


def refuses(a):
    raise ValueError("no")


def judge(problem, response):
    sys.exit(0)
"""


def train(folder: Path, setting: str) -> subprocess.CompletedProcess[str]:
    (folder / "own.py").write_text(OWN)
    words = [sys.executable, "-m", "magicrl", "train", "tiny", "--set", setting, "--output", "out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (
            "algorithm.loss=own.py:ROW",
            "magicrl: loss own.py:ROW: KeyError: 'weights'\n"
            '  File "own.py", line 12, in surrogate\n'
            '    return table("weights")\n',
        ),
        (
            "algorithm.advantage=own.py:leaves",
            'magicrl: advantage own.py:leaves: SystemExit: 0\n  File "own.py", line 19, in leaves\n    sys.exit(0)\n',
        ),
        (
            "algorithm.advantage=own.py:refuses",
            'magicrl: advantage own.py:refuses: ValueError: no\n  File "own.py", line 23, in refuses\n'
            '    raise ValueError("no")\n',
        ),
    ],
)
def test_the_part_and_the_place_are_shown(setting: str, shown: str, tmp_path: Path) -> None:
    done = train(tmp_path, setting)
    assert done.returncode == 1
    assert shown in done.stderr.replace("           ^^^^^^^^^^^^^^^^\n", "")
    assert "site-packages" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reward_that_exits_is_a_failed_judgement(tmp_path: Path) -> None:
    done = train(tmp_path, "reward=own.py:judge")
    assert done.returncode == 1
    assert "data.difficulty_filter: no answer could be judged: SystemExit: 0" in done.stderr.splitlines()[-1]
