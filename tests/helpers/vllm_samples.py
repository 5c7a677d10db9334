"""Scenarios of vLLM in separate processes: their requests and records, and the learner's log-probs of the samples.

`run_scenario` starts such a process. Its source imports the other names from here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from magicrl.config.model_schema import TinyModelConfig
from magicrl.data.families import make_family
from magicrl.models.loading import save_policy
from magicrl.models.small_models import make_tiny
from magicrl.records import Problem, RolloutRequest, SamplingParams, TrainSample, frozen_tokens

TEMPERATURE = 0.9


def save_tiny(folder: Path) -> None:
    """Save a random model of running sums."""
    save_policy(*make_tiny(TinyModelConfig(), make_family("running_sum", {}).vocabulary, seed=5), folder)


def run_scenario(source: str, folder: Path, *words: str) -> None:
    """Run ``source`` as a separate script, with the folder and ``words``."""
    script = folder / "scenario.py"
    script.write_text(source)
    own = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [own, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, str(script), str(folder), *words], check=True, env=environment)


def sample_request(draw: int, prompt: Sequence[int], group: int, limit: int) -> RolloutRequest:
    return RolloutRequest(
        draw=draw,
        prompt_tokens=frozen_tokens(prompt),
        group_size=group,
        problem=Problem(id=f"p{draw}", prompt="", references=("1",), verifier="exact", source="test"),
        sampling=SamplingParams(temperature=TEMPERATURE, max_tokens=limit, seed=3),
    )


def row(draw: int, index: int, c: Any) -> dict[str, Any]:
    """Return a completion, finished or not, as JSON."""
    return {
        "draw": draw,
        "index": index,
        "tokens": c.tokens.tolist(),
        "logprobs": c.sampler_logprobs.tolist(),
        "reason": c.finish_reason.value,
        "oldest": c.policy_version,
        "spans": c.version_spans,
        "versions": c.token_versions.tolist(),
        "text": c.text,
    }


def rows(groups: Iterable[Any]) -> list[dict[str, Any]]:
    return [row(g.request.draw, i, c) for g in groups for i, c in zip(g.request.indices, g.completions, strict=True)]


def scored(
    found: list[dict[str, Any]],
    learner: Any,
    generations: Sequence[dict[str, torch.Tensor]],
    prompt: Callable[[int], Sequence[int]],
) -> list[dict[str, Any]]:
    """Return the rows, each with its tokens' log-probs under every version of the weights, as ``learned``."""
    for weights in generations:
        with torch.no_grad():
            for name, weight in learner.weights().items():
                weight.copy_(weights[name])
        samples = [
            TrainSample(
                prompt_tokens=frozen_tokens(prompt(r["draw"])),
                tokens=frozen_tokens(r["tokens"]),
                advantage=0.0,
                group_index=0,
                sample_index=r["index"],
                sampler_logprobs=np.zeros(len(r["tokens"]), dtype=np.float32),
                policy_version=0,
            )
            for r in found
        ]
        for one, logprobs in zip(found, learner.logprobs(samples, TEMPERATURE)[0], strict=True):
            one.setdefault("learned", []).append(logprobs.tolist())
    return found
