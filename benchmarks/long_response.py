"""One update on a response of 16,384 tokens with SmolLM2 in bfloat16 on a CPU: how much memory it takes.

    python benchmarks/long_response.py             # SmolLM2, minutes; writes docs/figures/bench-long-response.json
    python benchmarks/long_response.py --quick     # a tiny model: shows that the script runs

The learner is the training loop's, with ``checkpoint_above_tokens`` so that only each layer's input and attention are
kept. The first update has no moments beforehand, so what it holds at its end is the whole state.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_models import SMOLLM2, TINY, model_folder, parameters, story_tokens
from measure import FIGURES, PeakMemory, document, rounded, timed, write_case

from magicrl.config.schema import AlgorithmConfig, ModelConfig
from magicrl.models.loading import load_policy
from magicrl.records import TrainBatch, TrainSample, frozen_floats, frozen_tokens
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

PROMPT_TOKENS = 128
CHECKPOINT_ABOVE = 2048
LIMIT_GIB = 8


def sample(model: str, prompt: int, response: int) -> TrainSample:
    """One response of worked-out stories, as long as asked."""
    tokens = story_tokens(model, prompt + response, 0)
    return TrainSample(
        prompt_tokens=frozen_tokens(tokens[:prompt]),
        tokens=frozen_tokens(tokens[prompt:]),
        advantage=1.0,
        group_index=0,
        sample_index=0,
        sampler_logprobs=frozen_floats([0.0] * response),
        policy_version=0,
    )


def measure_update(model: str, tokens: int, above: int, threads: int) -> dict[str, Any]:
    """Peak memory and times of one update on one response."""
    before = psutil.Process().memory_info().rss
    batch = TrainBatch.of([sample(model, min(PROMPT_TOKENS, tokens), tokens)])
    policy = load_policy(model_folder(model), dtype="float32").model
    count = parameters(policy)
    settings = ModelConfig(dtype="bfloat16", head_chunk_tokens=256, checkpoint_above_tokens=above)
    learner = LocalLearner(policy, LearnerSettings(algorithm=AlgorithmConfig(loss="dapo"), model=settings))
    peak = PeakMemory()
    peak.start()
    times, values = timed(lambda: learner.update(batch, Controls(learning_rate=1e-6)).values, threads)
    highest = peak.read()
    state = count * 18  # float32 weights, gradients, two moments; the rounded copy
    return {
        "model": model,
        "parameters": count,
        "prompt_tokens": min(PROMPT_TOKENS, tokens),
        "response_tokens": tokens,
        "threads": threads,
        "peak_gib": rounded(highest / 2**30),
        "before_model_gib": rounded(before / 2**30),
        "state_gib": rounded(state / 2**30),
        "above_state_gib": rounded((highest - before - state) / 2**30),
        "cpu_s": rounded(times.cpu),
        "wall_s": rounded(times.wall),
        "gradient_norm": rounded(values["grad_norm"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, seconds")
    parser.add_argument("--tokens", type=int, help="response tokens (16384; quick: 64)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=FIGURES / "bench-long-response.json")
    arguments = parser.parse_args()
    tokens = arguments.tokens or (64 if arguments.quick else 16384)
    head = document({"dtype": "bfloat16", "checkpoint_above_tokens": CHECKPOINT_ABOVE, "head_chunk_tokens": 256})
    torch.manual_seed(0)
    model, above = (TINY, 16) if arguments.quick else (SMOLLM2, CHECKPOINT_ABOVE)
    result = measure_update(model, tokens, above, arguments.threads)
    print(result)
    name = f"{'tiny' if arguments.quick else 'smollm2'}-{tokens}"
    write_case(arguments.output, head, name, result, [name])
    if result["peak_gib"] > LIMIT_GIB:
        raise SystemExit(f"{result['peak_gib']} GiB: more than the {LIMIT_GIB} GiB promised")


if __name__ == "__main__":
    main()
