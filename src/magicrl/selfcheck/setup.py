"""What the checks share: the form of a result, a folder with a tiny starting model, and runs of a tiny recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from magicrl.config.loader import load_sft_recipe, load_train_recipe
from magicrl.config.paths import find_recipe
from magicrl.data.families import unique_problems
from magicrl.data.running_sum import make_running_sum
from magicrl.records import (
    Completion,
    FinishReason,
    Problem,
    RolloutGroup,
    RolloutRequest,
    SamplingParams,
    frozen_floats,
    frozen_tokens,
)
from magicrl.training.recorder import NullObserver
from magicrl.training.session import run_training
from magicrl.training.sft import run_sft
from magicrl_verifiers.code.sandbox import SandboxError
from magicrl_verifiers.workers import WorkerRefusal

Status = Literal["passed", "failed", "not run", "peer"]

RECIPE = """
[run]
name = "selfcheck"
seed = 7
threads = 1

[start]
model = "MODEL"

[model]
dtype = "float32"
micro_batch_tokens = 300
head_chunk_tokens = 16

[[data.train]]
path = "PROBLEMS"
verifier = "exact"

[data.test]

[rollout]
temperature = 0.9
max_rows = 32
memory_limit_mb = 64

[entropy]
preset = "small"
target = 1.4

[optimizer]
learning_rate = 5e-3
warmup_steps = 0

[[stages]]
max_tokens = 24
rollout_batch = 8
group_size = 8
max_steps = 5
transition = { rule = "fixed" }

[evaluation]
every = 0

[verifier]
extract = "lenient"

[checkpoint]
every = 1
"""
"""A run of seconds, which each check changes by overrides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Result of a check.

    Attributes:
        status: ``peer`` for a figure of another library, which is neither passed nor failed.
        figure: The result in words, with its numbers.
        against: What it was compared with.
        details: The numbers behind it, as JSON values.
    """

    status: Status
    figure: str
    against: str
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


class CannotRun(RuntimeError):
    """A check cannot run on this machine. The text says what it lacks."""


@contextmanager
def needs_sandbox() -> Generator[None]:
    """Raise `CannotRun` where programs or isolated rewards cannot be confined on this machine."""
    try:
        yield
    except (SandboxError, WorkerRefusal) as error:
        raise CannotRun(f"the sandbox of programs does not start: {error}; see magicrl doctor") from error


def judged(holds: bool) -> Status:
    """Return the status of a check whose promise holds or not."""
    return "passed" if holds else "failed"


class Setup:
    """Folder, seed and size of the checks, and the starting model that they share.

    Args:
        folder: Empty folder for models and runs.
        seed: Seed of cases and of the moments of kills.
        quick: Whether fewer cases are enough.
        livecodebench: Clone of LiveCodeBench's repository, if there is one.
    """

    def __init__(self, folder: Path, *, seed: int, quick: bool, livecodebench: Path | None = None) -> None:
        self.folder = folder
        self.seed = seed
        self.quick = quick
        self.livecodebench = livecodebench
        torch.set_num_threads(1)  # such small tensors gain nothing from a second thread

    @cached_property
    def start(self) -> Path:
        """Starting model of the recipe ``tiny``: weak, but it ends its responses and is sometimes correct."""
        return run_sft(load_sft_recipe(find_recipe(Path("tiny-sft"))), self.folder / "start")

    @cached_property
    def problems(self) -> Path:
        """JSON Lines of 40 problems of the starting model's task; ``test.jsonl`` next to it holds 20 others."""
        made = unique_problems(make_running_sum(), seed=self.seed + 1, split="train", count=60, levels=[2])
        rows = [json.dumps({"problem": one.prompt, "answer": one.references[0]}) + "\n" for one in made]
        path = self.folder / "problems.jsonl"
        path.write_text("".join(rows[:40]), encoding="utf-8")
        path.with_name("test.jsonl").write_text("".join(rows[40:]), encoding="utf-8")
        return path

    @cached_property
    def recipe(self) -> Path:
        """File of `RECIPE` with model and problems filled in."""
        path = self.folder / "recipe.toml"
        text = RECIPE.replace("MODEL", str(self.start)).replace("PROBLEMS", str(self.problems))
        path.write_text(text, encoding="utf-8")
        return path

    def train(self, name: str, *overrides: str) -> Path:
        """Run the recipe with these overrides (``KEY=VALUE``) to its end and return the run folder."""
        config = load_train_recipe(self.recipe, overrides)
        return run_training(config, self.folder / name, NullObserver(), resume=False)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of each training step of a run folder."""
    return [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def rollout_group(
    problem: Problem,
    prompt: Sequence[int] | NDArray[Any],
    responses: Sequence[Sequence[int] | NDArray[Any]],
    truncated: Sequence[bool],
    *,
    max_tokens: int,
    draw: int = 0,
    temperature: float = 1.0,
) -> RolloutGroup:
    """Return a group of responses as an engine returns it, with sampler log-probs of 0."""
    completions = tuple(
        Completion(
            tokens=frozen_tokens(tokens),
            text="",
            sampler_logprobs=frozen_floats(np.zeros(len(tokens))),
            sampler_entropies=None,
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            policy_version=0,
        )
        for tokens, cut in zip(responses, truncated, strict=True)
    )
    request = RolloutRequest(
        draw=draw,
        problem=problem,
        prompt_tokens=frozen_tokens(prompt),
        group_size=len(responses),
        sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens),
    )
    return RolloutGroup(request=request, completions=completions)


def relative_error(found: Iterable[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the L2 norm of the difference of two lists of tensors, divided by that of ``expected``."""
    pairs = list(zip(found, expected, strict=True))
    squares = sum(float((one.detach().double() - other.detach().double()).square().sum()) for one, other in pairs)
    size = sum(float(other.detach().double().square().sum()) for other in expected)
    return math.sqrt(squares / size) if size else math.sqrt(squares)


def worst(errors: Iterable[float]) -> float:
    """Return the largest error, or NaN if one is NaN. 0 for none."""
    return float(torch.tensor([0.0, *errors], dtype=torch.float64).max())
