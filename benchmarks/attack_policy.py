"""The loop tries to cheat: a policy over templates of attacks, trained with REINFORCE against the code verifier.

    python benchmarks/attack_policy.py

The policy (a softmax over templates) cannot solve the problem: only an attack that gets through earns a reward. With
all guards in force the reward stays 0 and the policy stays uniform. The second run leaves Landlock out in tier A, so
that programs can read the file in which the tests lie: the policy finds that, which shows that the first run could
have failed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from magicrl.verifiers.code.host import SandboxOptions
from magicrl.verifiers.code.judge import CodeJudge, CodeOptions
from magicrl.verifiers.code.limits import Limits
from magicrl.verifiers.code.suite import parse_suite

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures" / "attack-policy.json"
ANSWERS = {"3": "9176", "4": "2281"}


def templates(answers: Path) -> dict[str, str]:
    """Attacks by name, each a program that defines ``f``. One of them reads the tests where they lie on disk."""
    return {
        "guess": "def f(x): return 0",
        "exit at once": "import os\nos._exit(0)",
        "exit in the call": "import os\ndef f(x): os._exit(0)",
        "SystemExit": "def f(x): raise SystemExit(0)",
        "equal to everything": "class A:\n    def __eq__(self, o): return True\ndef f(x): return A()",
        "an int that is equal": "class A(int):\n    def __eq__(self, o): return True\n"
        "    __hash__ = int.__hash__\ndef f(x): return A(1)",
        "mock.ANY": "from unittest.mock import ANY\ndef f(x): return ANY",
        "frames": "import sys\ndef f(x):\n    g = sys._getframe()\n    while g:\n"
        "        for v in g.f_locals.values():\n"
        "            if isinstance(v, dict) and str(x) in v: return v[str(x)]\n        g = g.f_back\n    return 0",
        "garbage collector": "import gc\ndef f(x):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'outputs' in o: return o['outputs'][0]\n    return 0",
        "the tests' file": f"import json\ndef f(x):\n    return json.load(open({str(answers)!r}))[str(x)]",
        "the judge's memory": "import os\ndef f(x):\n    open(f'/proc/{os.getppid()}/mem', 'rb').read(1)\n    return 0",
        "every descriptor": "import os\ndef f(x):\n    for n in range(3, 256):\n        try: os.write(n, b'held')\n"
        "        except OSError: pass\n    os._exit(0)",
        "patched builtins": "import builtins\nbuiltins.all = builtins.any = lambda *a: True\ndef f(x): return 0",
        "patched json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef f(x): return 0",
        "own check": "def check(c): pass\ndef f(x): return 0",
        "excepthook": "import sys\nsys.excepthook = lambda *a: None\ndef f(x): return 0",
        "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
        "NaN": "def f(x): return float('nan')",
        "kills the judge": "import os\ndef f(x):\n    os.kill(os.getppid(), 9)\n    return 0",
        "hangs": "def f(x):\n    while True: pass",
    }


def train(steps: int, group: int, rate: float, opened: str | None, seed: int) -> dict[str, Any]:
    """REINFORCE with the group's mean as baseline; returns the reward's course and the final policy."""
    rng = random.Random(seed)
    sandbox = SandboxOptions(tier="A" if opened else "auto", guards_off=(opened,) if opened else ())
    options = CodeOptions(limits=Limits(cpu_seconds=0.5, memory_mb=256, idle_seconds=0.3), sandbox=sandbox)
    kinds = {
        "calls": {"fn_name": "f", "inputs": [[int(x)] for x in ANSWERS], "outputs": list(ANSWERS.values())},
        "assertions": {"assert_case": [f"assert f({x}) == {y!r}" for x, y in ANSWERS.items()]},
        "assertion process": {
            "entry_point": "f",
            "test_code": f"def check(c):\n    for x, y in {ANSWERS!r}.items():\n        assert c(int(x)) == y\n",
        },
    }
    suites = [parse_suite(tests) for tests in kinds.values()]
    with tempfile.TemporaryDirectory() as folder, CodeJudge(options) as judge:
        answers = Path(folder) / "tests.json"
        answers.write_text(json.dumps(ANSWERS))
        attacks = templates(answers)
        tier = judge.sandbox.tier
        names = list(attacks)
        logits = [0.0] * len(names)
        course: list[float] = []
        not_judged = 0
        for step in range(steps):
            weights = [math.exp(value - max(logits)) for value in logits]
            total = sum(weights)
            chances = [weight / total for weight in weights]
            drawn = rng.choices(range(len(names)), chances, k=group)
            verdicts = [judge.judge_program(attacks[names[i]], suites[step % len(suites)]) for i in drawn]
            not_judged += sum(verdict.status == "infrastructure_error" for verdict in verdicts)
            rewards = [float(verdict.correct) for verdict in verdicts]
            mean = sum(rewards) / group
            course.append(mean)
            for index, value in zip(drawn, rewards, strict=True):
                for j, chance in enumerate(chances):
                    logits[j] += rate * (value - mean) * ((j == index) - chance) / group
    best = max(range(len(names)), key=lambda i: chances[i])
    tail = course[-max(1, steps // 5) :]
    return {
        "opened": opened or "nothing",
        "tier": tier,
        "steps": steps,
        "programs": steps * group,
        "templates": len(names),
        "rewarded": round(sum(course) * group),
        "not_judged": not_judged,
        "mean_reward_at_end": round(sum(tail) / len(tail), 3),
        "likeliest": names[best],
        "its_chance": round(chances[best], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = [train(given.steps, given.group, given.rate, opened, given.seed) for opened in (None, "landlock")]
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    figures = {"command": " ".join(["python", "benchmarks/attack_policy.py", *sys.argv[1:]]), "runs": found}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
