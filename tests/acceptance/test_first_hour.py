"""From the built wheel and an empty folder: `init` writes a recipe for one's own model and problems, `train` runs a few
steps of it, its verdict and interval are read, `eval` and plain transformers use the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from toy_start import toy_sft
from transformers import AutoModelForCausalLM, AutoTokenizer

from magicrl.data.families import make_family

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHORT = (
    "stages.0.rollout_batch=4",
    "stages.0.max_steps=4",
    "data.holdout=8",
    "evaluation.samples=2",
    "evaluation.pass_at=[]",
    "optimizer.warmup_steps=0",
)
NOTHING_LEARNED = 3


@dataclass(frozen=True)
class User:
    """An empty folder with a model beside it, and the installed command."""

    folder: Path
    command: Path

    def ended(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command, run to its end."""
        return subprocess.run(
            [str(self.command), *arguments],
            cwd=self.folder,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def run(self, *arguments: str, status: int = 0) -> str:
        """What the command says; it must end with ``status``."""
        done = self.ended(*arguments)
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``magicrl`` of the built wheel in an environment of its own, which takes its requirements from this one."""
    root = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(root), str(ROOT)], check=True)
    venv.create(root / "venv", with_pip=False)
    python = root / "venv" / "bin" / "python"
    (wheel,) = root.glob("magicrl-*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    (own,) = (root / "venv" / "lib").glob("python*/site-packages")
    places = [place for place in sys.path if place.endswith("site-packages")]
    (own / "requirements_of_the_tests.pth").write_text("".join(f"{place}\n" for place in places))
    where = subprocess.run(
        [python, "-c", "import magicrl; print(magicrl.__file__)"], check=True, capture_output=True, text=True, cwd=root
    )
    assert str(own) in where.stdout, "the wheel's package is what runs"
    return root / "venv" / "bin" / "magicrl"


@pytest.fixture
def user(tmp_path: Path, command: Path) -> User:
    return User(tmp_path, command)


def write_problems(folder: Path) -> Path:
    stream = make_family("running_sum", {}).stream(seed=3, split="train", levels=None)
    rows = [{"question": p.prompt, "gold": p.golds[0]} for p in islice(stream, 120)]
    return write_lines(folder / "mine.jsonl", rows)


def write_lines(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sets(overrides: tuple[str, ...]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def learning(run: Path) -> dict[str, Any]:
    """The verdict in ``run.json``."""
    return json.loads((run / "run.json").read_text())["learning"]


def changed(before: Path, after: Path) -> bool:
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    return any(not torch.equal(old[name].to(new[name].dtype), new[name]) for name in new)


def test_from_a_wheel_to_a_model_of_ones_own(user: User) -> None:
    write_problems(user.folder)
    (user.folder / "sft.toml").write_text(toy_sft())
    user.run("sft", "sft.toml", "--output", "start")
    told = user.run("init", "--model", "start", "--data", "mine.jsonl", "--output", "run.toml", "--minutes", "1")
    assert "magicrl train run.toml" in told

    done = user.ended("train", "run.toml", "--output", "run", *sets(SHORT))
    verdict = learning(user.folder / "run")
    assert done.returncode == (0 if verdict["outcome"] in ("learned", "undecided") else NOTHING_LEARNED), done.stderr
    assert verdict["facts"]["updates"] >= 1
    assert changed(user.folder / "start", user.folder / "run" / "model")
    change = verdict["facts"]["rise"]["change"]
    assert change["low"] <= change["mean"] <= change["high"]

    asked = ("--benchmark", "mine.jsonl", "--samples", "1", "--max-tokens", "32", "--template", "{prompt}")
    user.run("eval", "--model", "run/model", *asked, "--output", "results")
    assert (user.folder / "results" / "results.json").is_file()
    plain = AutoModelForCausalLM.from_pretrained(user.folder / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(user.folder / "run" / "model")
    prompt = tokenizer("L 8 6 0 0 0 0 0 0 0 :", return_tensors="pt")
    assert plain.generate(input_ids=prompt["input_ids"], max_new_tokens=8).shape[1] > prompt["input_ids"].shape[1]
