"""What `model.exact` costs: CPU time with it over CPU time without, in turns (docs/exact.md).

python benchmarks/exact.py                     # a model of SmolLM2's shape, bfloat16, and the quickstart's, float32
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.models.scorer import PolicyScorer
from magicrl.records import Problem, RolloutRequest, SamplingParams, TrainSample, frozen_floats, frozen_tokens
from magicrl.rollout.in_process import InProcessEngine

SHAPES: dict[str, tuple[dict[str, Any], torch.dtype, int, int, int]] = {
    # sizes, precision, prompts, tokens of a prompt, tokens of a response
    "smollm2": (
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        | {"num_attention_heads": 9, "num_key_value_heads": 3},
        torch.bfloat16, 8, 60, 48,
    ),
    "quickstart": (
        {"vocab_size": 20, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
        | {"num_attention_heads": 2, "num_key_value_heads": 2},
        torch.float32, 16, 24, 96,
    ),
}  # fmt: skip
GROUP = 8


def model_of(sizes: dict[str, Any], dtype: torch.dtype) -> Any:
    """Random weights: what they say has no bearing on how long they take."""
    register_attention()
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, max_position_embeddings=1024, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).to(dtype).eval()


def parts(name: str, *, exact: bool) -> dict[str, Callable[[], object]]:
    """What is measured, by name."""
    sizes, dtype, prompts, prompt, response = SHAPES[name]
    vocab, rng = sizes["vocab_size"], np.random.default_rng(0)
    texts = [frozen_tokens(rng.integers(1, vocab, prompt)) for _ in range(prompts)]
    engine = InProcessEngine(
        model_of(sizes, dtype), end_tokens=frozenset(), decode=lambda tokens: "", valid_vocab=vocab, max_context=1024,
        max_rows=64, memory_limit_mb=2048, exact=exact,
    )  # fmt: skip
    scorer = PolicyScorer(model_of(sizes, dtype), micro_batch_tokens=4096, head_chunk_tokens=256, exact=exact)
    samples = [
        TrainSample(
            prompt_tokens=text, tokens=frozen_tokens(rng.integers(1, vocab, response)), advantage=0.0, group_index=g,
            sample_index=i, sampler_logprobs=frozen_floats(np.zeros(response)), policy_version=0,
        )
        for g, text in enumerate(texts) for i in range(GROUP)
    ]  # fmt: skip

    def decode() -> None:
        problem = Problem(id="p", prompt="", golds=("1",), verifier="exact", source="benchmark")
        engine.submit([
            RolloutRequest(
                draw=g, problem=problem, prompt_tokens=text, group_size=GROUP,
                sampling=SamplingParams(temperature=1.0, max_tokens=response, seed=0),
            )
            for g, text in enumerate(texts)
        ])  # fmt: skip
        list(engine.finished())

    def update() -> None:
        for _, batch in scorer.micro_batches(samples):
            scorer.forward(batch, 1.0)[0].sum().backward()
        scorer.model.zero_grad()

    return {"decode": decode, "learner forward": lambda: scorer.score(samples, 1.0), "forward and backward": update}


def main() -> None:
    """Print a line a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=sorted(SHAPES))
    options = parser.parse_args()
    for name in [options.only] if options.only else SHAPES:
        plain, exact = (parts(name, exact=wanted) for wanted in (False, True))
        for part in plain:
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(options.rounds):
                for wanted, found in ((False, plain), (True, exact)):
                    begin = time.process_time()
                    found[part]()
                    times[wanted].append(time.process_time() - begin)
            ordinary, ours = (statistics.median(times[wanted]) for wanted in (False, True))
            load = os.getloadavg()[0]
            print(f"{name:12} {part:22} {ours / ordinary:5.2f}  ({ordinary:.2f} s plain; load {load:.1f})", flush=True)


if __name__ == "__main__":
    main()
