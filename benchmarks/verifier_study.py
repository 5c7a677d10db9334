r"""The report's verifier study (its Fig. 27): one set of rollouts, scored by several verifiers.

    python benchmarks/verifier_study.py --output docs/figures/verifier-study.json
    python benchmarks/verifier_study.py --run runs/smollm2 --output study.json
    python benchmarks/verifier_study.py --rollouts responses.jsonl --output study.json

Lines of ``responses.jsonl`` are ``{"id": problem, "gold": str, "response": str}``, any number for each problem. Of a
run folder the recorded rollouts are taken, each draw a problem, with the golds of its training data. Without either
the model responses of ../shared/data/math are taken. Each other verifier gets an environment of its own under
``--environments``, made from PyPI. The output holds, for each verifier, how many problems have so many correct answers
of theirs (the difficulty levels), CPU seconds, and the numbers of the answers that are judged differently.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import venv
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
from maths_sets import DATA, labelled

from magicrl.config.loader import load_train_recipe
from magicrl.data.sources import load_mixture
from magicrl.training.recorder import write_atomically
from magicrl.verifiers.base import JudgeOptions
from magicrl.verifiers.maths.maths_verifier import MathsVerifier

JUDGE = Path(__file__).with_name("verifier_study_judge.py")
RESPONSE_KINDS = ("model-response", "model-response-autolabel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Other:
    """A verifier from PyPI."""

    name: str  # in the output
    judge: str  # which function of `verifier_study_judge.py` drives it
    packages: tuple[str, ...]  # what its environment holds, pinned
    dependencies: bool = True  # whether pip may bring in what they need


OTHERS = (
    Other(name="math-verify 0.6.0", judge="math_verify", packages=("math-verify[antlr4_13_2]==0.6.0",)),
    Other(name="math-verify 0.9.0", judge="math_verify", packages=("math-verify[antlr4_13_2]==0.9.0",)),
    Other(name="hendrycks (lm-eval)", judge="hendrycks", packages=("lm-eval==0.4.13", "requests"), dependencies=False),
)
NOT_TO_BE_HAD = {
    "DeepScaleR's and PRIME's graders": "parts of training repositories, on PyPI in no release",
    "Qwen2.5-Math's grader": "part of an evaluation repository, on PyPI in no release",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One response to one problem; ``label`` where somebody labelled it."""

    problem: str
    gold: str
    response: str
    label: bool | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--rollouts", type=Path)
    chosen.add_argument("--run", type=Path)
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache" / "magicrl" / "verifier-study")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.run is not None:
        answers = recorded(arguments.run)
    else:
        answers = labelled_answers() if arguments.rollouts is None else read(arguments.rollouts)
    scores: dict[str, list[bool]] = {}
    seconds: dict[str, float] = {}
    scores["magicrl"], seconds["magicrl"] = ours(answers)
    failed: dict[str, str] = dict(NOT_TO_BE_HAD)
    for other in OTHERS:
        try:
            scores[other.name], seconds[other.name] = theirs(other, answers, arguments.environments)
        except (OSError, subprocess.CalledProcessError) as error:
            failed[other.name] = str(getattr(error, "stderr", "") or error)[-300:]
    document = {
        "command": "python benchmarks/verifier_study.py" + (f" --run {arguments.run}" if arguments.run else ""),
        "rollouts": str(
            arguments.run or arguments.rollouts or "model responses of ../shared/data/math (development half)"
        ),
        "problems": len({answer.problem for answer in answers}),
        "responses": len(answers),
        "verifiers": {
            name: {
                "correct": sum(said),
                "cpu_seconds": round(seconds[name], 2),
                **against_labels(answers, said),
                "problems_by_correct_answers": levels(answers, said),
            }
            for name, said in scores.items()
        },
        "disagreements_with_magicrl": {
            name: disagreements(scores["magicrl"], said) for name, said in scores.items() if name != "magicrl"
        },
        "not_to_be_had": failed,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.output, json.dumps(document, indent=1) + "\n")


def read(path: Path) -> list[Answer]:
    """The responses of a file.

    Raises:
        ValueError: a line lacks a field (names file and line).
    """
    found: list[Answer] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        row = json.loads(line)
        missing = [name for name in ("id", "gold", "response") if name not in row]
        if missing:
            raise ValueError(f"{path}:{number}: field {missing[0]!r} is missing")
        found.append(Answer(problem=str(row["id"]), gold=row["gold"], response=row["response"]))
    return found


def recorded(run: Path) -> list[Answer]:
    """The rollouts of a run folder, every draw of a problem on its own; golds from the run's own training data."""
    recipe = load_train_recipe(run / "config.toml", [])
    golds = {problem.id: problem.golds[0] for problem in load_mixture(recipe.data.train)}
    found: list[Answer] = []
    for path in sorted((run / "rollouts").glob("*.parquet")):
        for row in parquet.read_table(path, columns=["step", "draw", "problem_id", "text"]).to_pylist():
            name = f"{row['step']}/{row['draw']}"
            found.append(Answer(problem=name, gold=golds[row["problem_id"]], response=row["text"]))
    return found


def labelled_answers() -> list[Answer]:
    """Responses that models gave, with their labels; problems are told apart by their gold and source."""
    rows = [json.loads(line) for line in (DATA / "labelled_dev.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        Answer(
            problem=re.sub(r"(#\d+).*", r"\1", row["source"]),
            gold=pair.golds[0],
            response=row["response"],
            label=pair.label,
        )
        for row, pair in zip(rows, labelled(), strict=True)
        if pair.kind in RESPONSE_KINDS
    ]


def ours(answers: Sequence[Answer]) -> tuple[list[bool], float]:
    """Verdicts of this project's verifier (box only, as in training) and the CPU seconds they took."""
    verifier = MathsVerifier(JudgeOptions(reasoning="none", extract="box"))
    verifier.judge(["1"], r"\boxed{1}")
    start = time.process_time()
    said = [verifier.judge([answer.gold], answer.response).correct for answer in answers]
    return said, time.process_time() - start


def theirs(other: Other, answers: Sequence[Answer], environments: Path) -> tuple[list[bool], float]:
    """Verdicts of another verifier, from a process of its own environment."""
    python = environment(other, environments)
    lines = "".join(json.dumps({"gold": one.gold, "response": one.response}) + "\n" for one in answers)
    done = subprocess.run([python, JUDGE, other.judge], input=lines, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(answers), (other.name, len(rows))
    return [row["correct"] for row in rows], sum(row["seconds"] for row in rows)


def environment(other: Other, environments: Path) -> Path:
    """The Python of the verifier's environment, made when absent."""
    folder = environments / "".join(char if char.isalnum() else "-" for char in other.name)
    python = folder / "bin" / "python"
    mark = folder / ".installed"
    wanted = " ".join(other.packages)
    if not mark.exists() or mark.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        options = [] if other.dependencies else ["--no-deps"]
        subprocess.run(
            [python, "-m", "pip", "install", "-q", *options, *other.packages],
            check=True,
            capture_output=True,
            text=True,
        )
        mark.write_text(wanted)
    return python


def levels(answers: Sequence[Answer], said: Sequence[bool]) -> dict[str, list[int]]:
    """For problems with N answers: how many have 0, 1, .., N correct ones."""
    of: dict[str, list[bool]] = defaultdict(list)
    for answer, correct in zip(answers, said, strict=True):
        of[answer.problem].append(correct)
    table: dict[int, Counter[int]] = defaultdict(Counter)
    for marks in of.values():
        table[len(marks)][sum(marks)] += 1
    return {f"{count} answers": [table[count][right] for right in range(count + 1)] for count in sorted(table)}


def against_labels(answers: Sequence[Answer], said: Sequence[bool]) -> dict[str, Any]:
    """False positives and negatives, where there are labels."""
    known = [(answer.label, one) for answer, one in zip(answers, said, strict=True) if answer.label is not None]
    if not known:
        return {}
    return {
        "false_positives": sum(one and not label for label, one in known),
        "false_negatives": sum(label and not one for label, one in known),
    }


def disagreements(mine: Sequence[bool], other: Sequence[bool]) -> dict[str, list[int]]:
    """Numbers of the answers that one takes and the other does not."""
    pairs = list(enumerate(zip(mine, other, strict=True)))
    return {
        "only_magicrl": [number for number, (one, two) in pairs if one and not two],
        "only_the_other": [number for number, (one, two) in pairs if two and not one],
    }


if __name__ == "__main__":
    sys.exit(main())
