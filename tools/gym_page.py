"""Write ``docs/reference/reasoning-gym.md``: every task of reasoning-gym and whether it works here.

``python -m tools.gym_page`` generates three problems of each task twice, in two processes with other hash seeds, and
judges their reference answers and a wrong one. It takes some minutes and needs the extra ``gym``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from magicrl.data.families import make_family
from magicrl.data.gym_tasks import PREFIX, UNUSABLE, GymTask, usable_tasks
from magicrl.records import Problem
from magicrl_verifiers.gym import NAME, GymVerifier
from magicrl_verifiers.records import JudgeOptions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "reasoning-gym.md"
SECONDS = 60
"""Limit of CPU time per task."""
INTRODUCTION = """# Tasks of reasoning-gym

Written by `python -m tools.gym_page`. {works} of the {tasks} tasks of reasoning-gym {version} (Apache-2.0) can be
trained and evaluated on, in a recipe as `family = "reasoning_gym/TASK"`, in `magicrl init`, `train` and `preflight`
as `--data reasoning_gym/TASK`, in `magicrl eval` as `--benchmark reasoning_gym/TASK`. Install them with `pip install
'magicrl[gym]'` (one of the packages, pycosat, needs a C compiler).

- **Verifier.** The task's own `score_answer` decides: an answer is correct if it scores 1. Lower scores count as
  wrong, since some tasks pay a part for any answer of the right form. The answer is the last `\\boxed{{}}`, else the
  last `<answer>...</answer>`, else (with `verifier.extract = "lenient"`) the end of the response, as many words or
  lines as the reference answer has. Where several answers are accepted, ask for a box in the template.
- **Safety.** No answer is evaluated as Python. Where a task's score needs that (`countdown`), only arithmetic is read.
- **Splits and seeds.** reasoning-gym draws item `i` of seed `s` from `s + i`, so that its neighbouring seeds share
  nearly all items. Here each pair of `seed` and `split` has 1,000,000 seeds of its own, and a hash of the question
  decides its split. Seeds up to {largest} are possible. `magicrl eval` uses seeds below 1,000,000, which no training
  problem has.
- **Levels.** `levels = [0, 2]` are those of the task's curriculum; level n includes the ranges of lower ones. Without
  levels the task has its default settings; `options` change them.

"reference" says whether the problems have a reference answer; the verifier does without.

| task | kind | levels | reference | works |
|---|---|---|---|---|
"""


def measured(task: str) -> dict[str, Any]:
    """Return what three problems of the task show."""
    family = make_family(PREFIX + task)
    assert isinstance(family, GymTask), task
    problems = list(islice(family.stream(seed=1, split="test"), 3))
    judge = GymVerifier(JudgeOptions())
    judged = [[verdict.correct for verdict in _verdicts(judge, problem)] for problem in problems]
    text = json.dumps([[problem.prompt, problem.references, problem.extra] for problem in problems])
    return {
        "kind": importlib.import_module(f"{NAME}.factory").DATASETS[task][0].__module__.split(".")[1],
        "levels": family.levels,
        "reference": bool(problems[0].references),
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "right": all(found[0] for found in judged if len(found) == 2),
        "wrong": not any(found[-1] for found in judged),
    }


def _verdicts(judge: GymVerifier, problem: Problem) -> list[Any]:
    kept = [problem.extra[NAME]]
    right = [judge.judge(kept, f"<answer>{problem.references[0]}</answer>")] if problem.references else []
    return [*right, judge.judge(kept, "<answer>zzz</answer>")]


def _all_measured() -> dict[str, dict[str, Any]]:
    def expired(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGPROF, expired)
    found: dict[str, dict[str, Any]] = {}
    for task in usable_tasks():
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            found[task] = measured(task)
        except Exception as error:  # noqa: BLE001 - the page says what a task's code raised
            found[task] = {"error": f"{type(error).__name__}: {error}"}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return found


def page(first: dict[str, dict[str, Any]], second: dict[str, dict[str, Any]]) -> str:
    """Return the page of two processes' measurements."""
    rows: dict[str, str] = {task: f"| `{task}` | | | | no: {why} |" for task, why in UNUSABLE.items()}
    works = 0
    for task, seen in first.items():
        if "error" in seen:
            rows[task] = f"| `{task}` | | | | no: {seen['error'][:80]} |"
            continue
        doubts = [
            *(["other problems in another process"] if seen["digest"] != second[task].get("digest") else []),
            *([] if seen["right"] else ["its own reference answer is not accepted"]),
            *([] if seen["wrong"] else ["accepts `zzz`"]),
        ]
        works += not doubts
        verdict = f"no: {', '.join(doubts)}" if doubts else "yes"
        reference = "yes" if seen["reference"] else "none"
        rows[task] = f"| `{task}` | {seen['kind']} | {seen['levels'] or 'none'} | {reference} | {verdict} |"
    version = importlib.import_module("importlib.metadata").version("reasoning-gym")
    largest = importlib.import_module("magicrl.data.gym_tasks").LARGEST
    head = INTRODUCTION.format(works=works, tasks=len(rows), version=version, largest=largest)
    return head + "\n".join(rows[task] for task in sorted(rows)) + "\n"


def main() -> None:
    """Measure in two processes and write the page."""
    if "--measure" in sys.argv:
        sys.stdout.write("\n" + json.dumps(_all_measured()) + "\n")
        return
    found: list[dict[str, Any]] = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-m", "tools.gym_page", "--measure"]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    PAGE.write_text(page(*found), encoding="utf-8")


if __name__ == "__main__":
    main()
