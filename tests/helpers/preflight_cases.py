"""Twelve planted faults and nine sound set-ups for ``magicrl preflight``: each fault is named, no sound one is accused.

``python tests/helpers/preflight_cases.py FOLDER`` makes the starting models of quickstart and tiny in FOLDER/models if
they are missing (about a minute), checks each case (seconds), prints a table, and exits with 1 if a case fails.
``--json FILE`` writes the findings.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import magicrl
from magicrl.config.data_schema import SourceConfig
from magicrl.config.loader import load_sft_recipe
from magicrl.config.paths import find_recipe
from magicrl.data.sources import load_problems
from magicrl.training.sft import run_sft

MINUTES, SAMPLES = 2.0, 256
FAULTS = (
    "template",
    "shifted_references",
    "limit",
    "constant_reward",
    "too_easy",
    "too_hard",
    "learning_rate",
    "end_token",
    "temperature",
    "label_noise",
    "entropy_bonus",
    "kl_coefficient",
)
"""Names of the planted faults. A finding of a sound set-up has none of them."""
REWARD = """
def always(problem, response):
    return 1.0


def graded(problem, response):
    words = response.split()
    last = words[-1][-1] if words else ""
    return 1.0 if last in problem.references else 0.2 if last.isdigit() else 0.0
"""
GUESSING = """
[run]
name = "short-guessing"
threads = 1

[model.tiny]
hidden_size = 48
layers = 2
heads = 4
intermediate_size = 96
max_context = 96

[training]
dtype = "float32"

[[phases]]
family = "guess_number"
options = { largest = 40, levels = 4, halving = 0.3 }
steps = 120
batch_size = 64
learning_rate = 5e-3
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A recipe with settings, and the planted fault (None: sound)."""

    name: str
    fault: str | None = None
    recipe: str = "quickstart"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def made(recipe: Path, folder: Path) -> Path:
    """Return the supervised start of a recipe, and make it if it is missing."""
    return run_sft(load_sft_recipe(recipe), folder)


def cases(folder: Path) -> list[Case]:
    """Return all cases. Their files are in ``folder``."""
    models = folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    for name in ("quickstart", "tiny"):
        made(find_recipe(Path(f"{name}-sft")), models / f"{name}-start")
    (folder / "guessing-sft.toml").write_text(GUESSING)
    guessing = made(folder / "guessing-sft.toml", models / "short-guessing")
    (folder / "reward.py").write_text(REWARD)
    start = models / "quickstart-start"
    source, room = {"path": str(_sums(folder / "sums.jsonl"))}, {"stages.0.max_tokens": 128}
    return [
        Case(name="chat template of nobody", fault="template", settings=_start(_with_chat(start, models / "chat"))),
        Case(
            name="reference answers shifted by a row",
            fault="shifted_references",
            settings={"data.train": [{"path": str(_sums(folder / "shifted.jsonl", shift=1))}], **room},
        ),
        Case(name="T too small", fault="limit", settings={"stages.0.max_tokens": 6}),
        Case(
            name="reward always 1",
            fault="constant_reward",
            settings={"data.train": [source | {"verifier": f"{folder / 'reward.py'}:always"}]},
        ),
        Case(
            name="all too easy",
            fault="too_easy",
            settings={"data.train.0.levels": [2], "stages.0.max_tokens": 200, "rollout.temperature": 0.2},
        ),
        Case(
            name="all too hard",
            fault="too_hard",
            settings={"data.train": [{"path": str(_sums(folder / "whole.jsonl", whole=True))}], **room},
        ),
        Case(name="learning rate times 100", fault="learning_rate", settings={"optimizer.learning_rate": 3e-2}),
        Case(
            name="end token missing",
            fault="end_token",
            settings=_start(_without_end(start, models / "endless")) | {"stages.0.max_tokens": 48},
        ),
        Case(name="temperature 6", fault="temperature", settings={"rollout.temperature": 6.0}),
        Case(
            name="95 % of the reference answers wrong",
            fault="label_noise",
            settings={"data.train": [{"path": str(_sums(folder / "noisy.jsonl", noise=0.95))}], **room},
        ),
        Case(
            name="fixed entropy coefficient of 5",
            fault="entropy_bonus",
            settings={"entropy": {"controller": "fixed", "alpha": 5.0, "estimator": "exact"}},
        ),
        Case(
            name="reference coefficient of 100",
            fault="kl_coefficient",
            settings={"reference.mode": "loss", "reference.coefficient": 100.0},
        ),
        Case(name="quickstart as shipped"),
        Case(
            name="20 % of the reference answers wrong",
            settings={"data.train": [{"path": str(_sums(folder / "some-noise.jsonl", noise=0.2))}], **room},
        ),
        Case(name="tiny as shipped", recipe="tiny"),
        Case(name="larger T and M", settings={**room, "stages.0.group_size": 16}),
        Case(
            name="four updates a step, clipped",
            settings={"algorithm.loss": "dapo", "stages.0.mini_batch": 16, "algorithm.reuse": 2},
        ),
        Case(
            name="data of a file, exact verifier",
            settings={"data.train": [source | {"verifier": "exact", "template": "{prompt}"}]},
        ),
        Case(
            name="a graded reward",
            settings={"data.train": [source | {"verifier": f"{folder / 'reward.py'}:graded"}]},
        ),
        Case(
            name="RLOO with a reference in bfloat16",
            settings={"algorithm.advantage": "rloo", "reference.mode": "monitor", "model.dtype": "bfloat16"},
        ),
        Case(name="an environment", recipe="guessing", settings=_start(guessing)),
    ]


def _start(folder: Path) -> dict[str, Any]:
    return {"start": {"model": str(folder)}}


def _sums(path: Path, *, shift: int = 0, whole: bool = False, noise: float = 0.0) -> Path:
    """Write short sums to a file, each prompt once.

    Args:
        path: The file.
        shift: Number of rows by which the answers are shifted down.
        whole: Request whole sums, which a model that has learned only the last digit never answers.
        noise: Share of the answers that are replaced by another digit.
    """
    found = load_problems(SourceConfig(family="running_sum", seed=1, count=1500, levels=(2, 3, 4)))
    problems = list({problem.prompt: problem for problem in found}.values())
    references = [problem.references[0] for problem in problems]
    if whole:
        references = [str(10 + sum(int(digit) for digit in problem.prompt.split()[1:-1])) for problem in problems]
    references = [*references[-shift:], *references[:-shift]] if shift else references
    draw = random.Random(0)
    references = [str((int(g) + draw.randint(1, 9)) % 10) if draw.random() < noise else g for g in references]
    rows = [{"problem": p.prompt, "answer": reference} for p, reference in zip(problems, references, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _with_chat(start: Path, folder: Path) -> Path:
    """Return the model with a chat template that it was never trained with."""
    shutil.copytree(start, folder, dirs_exist_ok=True)
    text = "{% for message in messages %}hm : {{ message['content'] }} L {% endfor %}"
    (folder / "chat_template.jinja").write_text(text + "{% if add_generation_prompt %}:{% endif %}")
    return folder


def _without_end(start: Path, folder: Path) -> Path:
    """Return the model with a wrong end token."""
    shutil.copytree(start, folder, dirs_exist_ok=True)
    for name, value in (("config.json", 0), ("generation_config.json", 0), ("tokenizer_config.json", "<pad>")):
        document = json.loads((folder / name).read_text())
        document["eos_token" if name.startswith("tokenizer") else "eos_token_id"] = value
        (folder / name).write_text(json.dumps(document))
    return folder


def looked_at(case: Case, folder: Path) -> dict[str, Any]:
    """Return the findings of preflight on a case."""
    settings = {"run.output": str(folder / "run"), "run.threads": 1, **case.settings}
    return magicrl.preflight(case.recipe, settings=settings, minutes=MINUTES, samples=SAMPLES)


def failing(case: Case, found: Mapping[str, Any]) -> str:
    """Return the reason for which a case fails, or an empty text."""
    named = {item["name"]: item["severity"] for item in found["findings"]}
    accused = sorted(named.keys() & {*FAULTS} - {case.fault})
    if case.fault is not None and named.get(case.fault) != "stop":
        return f"{case.fault} is not named; {sorted(named)} are"
    if case.fault is not None:
        return f"{accused} are named besides" if accused else ""
    return f"{accused} are named" if accused else "" if found["sound"] else f"not sound: {sorted(named)}"


def main(arguments: list[str], tell: Callable[[str], object] = print) -> int:
    """Check every case, and return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="cases whose name holds this")
    given = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for case in cases(given.folder):
        if given.only and given.only not in case.name:
            continue
        began = time.process_time()
        found = looked_at(case, given.folder)
        wrong = failing(case, found)
        seconds = time.process_time() - began
        names = [f"{item['name']} ({item['severity']})" for item in found["findings"]]
        tell(f"{'FAILED ' + wrong if wrong else 'as it should be':40.80} {case.name:36} {seconds:5.1f} s  {names}")
        rows.append({"case": case.name, "planted": case.fault, "failed": wrong, "cpu_seconds": seconds, "found": found})
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
