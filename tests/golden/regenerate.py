"""The golden trajectory: five updates of a tiny model, with committed losses and gradient norms.

A change that is meant to keep the arithmetic (a refactor, a faster kernel) must reproduce them. After a change
that is meant to alter it, write them again, and say why in the commit:

    python tests/golden/regenerate.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from magicrl.config.model_schema import ModelConfig, OptimizerConfig
from magicrl.records import TrainBatch, TrainSample, frozen_floats, frozen_tokens
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

GOLDEN = Path(__file__).with_name("trajectory.json")
KEYS = ("loss", "grad_norm", "entropy", "kl", "clip_ratio")
VOCAB = 40


def model() -> LlamaForCausalLM:
    """Return a float32 model with weights from numpy: torch's generators may differ between machines."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    made = LlamaForCausalLM(config)
    rng = np.random.Generator(np.random.PCG64(0))
    with torch.no_grad():
        for parameter in made.parameters():
            values = rng.normal(0.0, 0.15, tuple(parameter.shape)).astype(np.float32)
            parameter.copy_(torch.from_numpy(values + (1.0 if parameter.ndim == 1 else 0.0)))
    return made


def batch(step: int) -> TrainBatch:
    """Return four groups of four responses, with a fixed reference, and old log-probs near the likely ones."""
    rng = np.random.Generator(np.random.PCG64(100 + step))
    samples: list[TrainSample] = []
    for group in range(4):
        prompt = frozen_tokens(rng.integers(0, VOCAB, 4 + group))
        for member in range(4):
            length = int(rng.integers(3, 30))
            samples.append(
                TrainSample(
                    prompt_tokens=prompt,
                    tokens=frozen_tokens(rng.integers(0, VOCAB, length)),
                    advantage=float(rng.normal()),
                    group_index=group,
                    sample_index=member,
                    sampler_logprobs=frozen_floats(rng.normal(-3.7, 0.3, length)),
                    policy_version=step,
                    old_logprobs=frozen_floats(rng.normal(-3.7, 0.3, length)) if step % 2 else None,
                    ref_logprobs=frozen_floats(rng.normal(-3.7, 0.3, length)),
                )
            )
    return TrainBatch.of(samples)


def trajectory() -> list[dict[str, float]]:
    """Return the metrics of five updates, on-policy and off-policy in turn, in float32 on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    learner = LocalLearner(
        model(),
        LearnerSettings(
            model=ModelConfig(dtype="float32", micro_batch_tokens=150, head_chunk_tokens=32),
            optimizer=OptimizerConfig(max_grad_norm=0.3),
        ),
    )
    controls = Controls(alpha=0.02, temperature=0.9, learning_rate=1e-3, kl_coefficient=0.05)
    rows = [dict(learner.update(batch(step), controls)) for step in range(5)]
    torch.set_num_threads(threads)
    return [{key: row[key] for key in KEYS} for row in rows]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(trajectory(), indent=1) + "\n", encoding="utf-8")
