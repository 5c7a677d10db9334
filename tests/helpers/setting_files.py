"""The base recipes of the table of settings (`setting_rows.py`), and the files that they name."""

from __future__ import annotations

import json
from typing import Any

from tomli_w import dumps

# files that recipes name

GUESSES = [str(number) for number in range(4)]
"""Accepted answers of the run's problems: many, so that an untrained model is sometimes right."""


def _problems(kind: str, count: int) -> str:
    rows = [{"problem": f"what is {kind} {n % 6} + {n // 6} ?", "answer": GUESSES} for n in range(count)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def _source_rows(word: str) -> str:
    rows = [
        {
            "problem": f"what is {word} {n} ?",
            "answer": str(n % 4),
            "solution": f"so it is {n % 4}",
            "asked": f"is {word} {n} ?",
            "truth": f"so {4 + n % 2}",
            "name": f"{word}-{n}",
            "grade": 1 + n % 2,
            "same": "same",
            "extra_info": {"model_difficulty": {"m": 8 * (n % 2)}},
        }
        for n in range(6)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


FILES = {
    "train.jsonl": _problems("+", 12),
    "validation.jsonl": _problems("?", 3),
    "test.jsonl": _problems("+ +", 3),
    "source.jsonl": _source_rows("is"),
    "other-source.jsonl": _source_rows("what"),
    "read.py": (
        "def one():\n    return [{'problem': 'what is 1 ?', 'answer': '1', 'solution': 'so 1'}]\n\n\n"
        "def two():\n    return [{'problem': 'what is 2 ?', 'answer': '2', 'solution': 'so 2'}]\n"
    ),
    "engine.py": "def make(settings):\n    raise ValueError('the engine of the table')\n",
    "reward.py": (
        "async def nothing(problem, response):\n    raise RuntimeError('no verdict')\n\n\n"
        "async def never(problem, response):\n    return 0.0\n"
    ),
    "control.py": (
        "class Control:\n"
        "    def coefficient(self, entropy):\n        return entropy / 10\n\n"
        "    def observe(self, entropy): ...\n\n"
        "    def state(self):\n        return {}\n\n"
        "    def restore(self, state): ...\n\n\n"
        "def make(settings):\n    return Control()\n"
    ),
    "tracker.py": (
        "import json\nfrom pathlib import Path\n\n\nclass Recorder:\n"
        "    def open(self, run):\n"
        "        Path('tracked.json').write_text(json.dumps({'project': run.project}))\n\n"
        "    def step(self, step, values): ...\n\n"
        "    def event(self, step, kind, message): ...\n\n"
        "    def results(self, step, values): ...\n\n"
        "    def close(self, status): ...\n"
    ),
    "mixed.jsonl": "".join(
        json.dumps({"problem": text, "answer": "1"}) + "\n"
        for text in ("is 1 ?", "what is 1 ?", "what is 1 + 0 ?", "what is 1 + 0 + 0 ?")
    ),
    "shared.jsonl": "".join(
        json.dumps({"problem": f"what is is is is is is {n} ?", "answer": "1", "solution": "so </think> 1"}) + "\n"
        for n in range(2)
    ),
}
ENVIRONMENT = "guessing"

# the base recipes, which every row changes

TRAIN: dict[str, Any] = {
    "run": {"name": "table", "seed": 3, "threads": 1},
    "start": {"model": "model"},
    "model": {"dtype": "float32"},
    "data": {
        "train": [{"path": "train.jsonl", "verifier": "exact"}],
        "validation": [{"path": "validation.jsonl", "verifier": "exact"}],
        "test": {"held_out": {"path": "test.jsonl", "verifier": "exact"}},
    },
    "rollout": {"max_rows": 32, "memory_limit_mb": 16},
    "optimizer": {"learning_rate": 0.02},
    "stages": [
        {
            "max_tokens": 8,
            "rollout_batch": 4,
            "mini_batch": 2,
            "group_size": 6,
            "max_steps": 2,
            "transition": {"rule": "fixed"},
        }
    ],
    "evaluation": {
        "every": 1,
        "validation_samples": 1,
        "temperatures": [1.0],
        "samples": 2,
        "pass_at": [2],
    },
    "verifier": {"extract": "lenient"},
    "checkpoint": {"every": 1, "keep_last": 9},
}
PHASE: dict[str, Any] = {
    "family": "running_sum",
    "options": {"max_tokens": 24},
    "steps": 2,
    "batch_size": 4,
    "learning_rate": 0.01,
    "decay": "constant",
}
SFT: dict[str, Any] = {
    "run": {"name": "table", "seed": 3, "threads": 1},
    "model": {"tiny": {"hidden_size": 16, "layers": 1, "heads": 2, "intermediate_size": 16, "max_context": 64}},
    "training": {"dtype": "float32"},
    "phases": [PHASE],
}
for _name, _seed in (("start-a.toml", 3), ("start-b.toml", 4)):
    FILES[_name] = dumps({**SFT, "run": {**SFT["run"], "name": _name[:-5], "seed": _seed}})
