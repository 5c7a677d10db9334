"""How the learner's cost grows with length, batch, group size and model size: a section of docs/performance.md.

    python benchmarks/learner_growth.py            # minutes of CPU: docs/figures/growth-learner.json, page
    python benchmarks/learner_growth.py --draw     # the page from the JSON that is there
    python benchmarks/learner_growth.py --quick    # seconds: shows that the script runs

Models are Llamas with random weights: what a token costs does not depend on what it says. One update is warm-up, the
next is measured: CPU time at one thread, and the most bytes of tensors that the update adds to weights, gradients and
moments.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import FIGURES, ROOT, document, rounded, timed
from page_sections import put_section, table
from tensor_memory import peak_of
from transformers import LlamaConfig, LlamaForCausalLM

from magicrl.config.schema import AlgorithmConfig, ModelConfig
from magicrl.records import TrainBatch, TrainSample, frozen_floats, frozen_tokens
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls
from magicrl.training.recorder import write_atomically

JSON = FIGURES / "growth-learner.json"
VOCAB = 8192
PROMPT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One setting: groups of ``samples`` responses of ``tokens`` tokens, a model of ``width`` and ``layers``."""

    width: int = 256
    layers: int = 4
    groups: int = 2
    samples: int = 4
    tokens: int = 128
    checkpoint: bool = False


BASE = Point()
SWEEPS: dict[str, tuple[str, list[Point]]] = {
    "length": ("response tokens", [replace(BASE, groups=1, samples=2, tokens=n) for n in (64, 256, 1024, 2048)]),
    "length-checkpointed": (
        "response tokens",
        [replace(BASE, groups=1, samples=2, tokens=n, checkpoint=True) for n in (64, 256, 1024, 2048)],
    ),
    "batch": ("responses an update", [replace(BASE, groups=n) for n in (1, 2, 4, 8)]),
    "group": ("responses a group", [replace(BASE, groups=1, samples=n, tokens=64) for n in (1, 2, 4, 8, 16)]),
    "model": (
        "parameters, millions",
        [replace(BASE, width=w, layers=n, groups=1) for w, n in ((128, 2), (256, 4), (384, 8), (576, 12))],
    ),
}
QUICK = {"batch": ("responses an update", [replace(BASE, width=32, layers=1, tokens=8, groups=n) for n in (1, 2)])}
TITLES = {"length": "Length", "batch": "Batch", "group": "Group size", "model": "Model size"}


def x_of(sweep: str, row: dict[str, Any]) -> float:
    """Where a measurement stands on its sweep's axis."""
    if sweep == "model":
        return row["parameters"] / 1e6
    return {"length": row["tokens"], "batch": row["groups"] * row["samples"], "group": row["samples"]}[sweep]


def learner_of(point: Point) -> LocalLearner:
    """A random Llama of the point's size; heads of 64, a third as many for keys, as SmolLM2 has."""
    heads = max(1, point.width // 64)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=point.width,
        intermediate_size=point.width * 8 // 3,
        num_hidden_layers=point.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3 if heads % 3 == 0 else 1,
        tie_word_embeddings=True,
        max_position_embeddings=1 << 16,
    )
    torch.manual_seed(0)
    settings = ModelConfig(dtype="bfloat16", head_chunk_tokens=256, gradient_checkpointing=point.checkpoint)
    return LocalLearner(
        LlamaForCausalLM(config), LearnerSettings(algorithm=AlgorithmConfig(loss="dapo"), model=settings)
    )


def batch_of(point: Point) -> TrainBatch:
    """Random tokens; half of each group's responses are right."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, VOCAB, (point.groups, PROMPT))
    return TrainBatch.of(
        [
            TrainSample(
                prompt_tokens=frozen_tokens(prompts[group]),
                tokens=frozen_tokens(rng.integers(2, VOCAB, point.tokens)),
                advantage=0.5 - number % 2,
                group_index=group,
                sample_index=number,
                sampler_logprobs=frozen_floats(np.zeros(point.tokens)),
                policy_version=0,
            )
            for group in range(point.groups)
            for number in range(point.samples)
        ]
    )


def measured(point: Point) -> dict[str, Any]:
    """Rate and memory of one update."""
    learner, batch = learner_of(point), batch_of(point)
    controls = Controls(learning_rate=1e-6)
    torch.set_num_threads(1)
    memory = peak_of(lambda: learner.update(batch, controls), "cpu")  # the warm-up: moments are made in it
    memory = min(memory, peak_of(lambda: learner.update(batch, controls), "cpu"))
    times, _ = timed(lambda: learner.update(batch, controls), 1)
    tokens = point.groups * point.samples * point.tokens
    parameters = sum(weight.numel() for weight in learner.weights().values())
    return {
        **asdict(point),
        "parameters": parameters,
        "response_tokens_per_cpu_s": rounded(tokens / times.cpu),
        "mib_above_state": rounded(memory / 2**20),
    }


def section(document: dict[str, Any]) -> str:
    """The page's part: how it was measured, and a table a sweep."""
    run = document["run"]
    lines = [
        "## Learner",
        "",
        f"`{run['command']}`, {run['machine']['started'][:10]}, {run['machine']['cpu']}, one thread, load "
        f"{run['load_average_at_start'][0]} at the start. Llamas with random weights in bfloat16, prompts of {PROMPT} "
        "tokens; where a sweep does not change them: 4 layers of width 256. Memory is what an update adds to weights, "
        "gradients and moments.",
    ]
    for sweep, title in TITLES.items():
        found = [row for name, rows in document["sweeps"].items() if name.partition("-")[0] == sweep for row in rows]
        if found:
            shown = [
                (
                    f"{x_of(sweep, row):.4g}",
                    "checkpointed" if row["checkpoint"] else "",
                    f"{row['response_tokens_per_cpu_s']:.0f}",
                    f"{row['mib_above_state']:.0f}",
                )
                for row in found
            ]
            axis = (SWEEPS | QUICK)[sweep][0]
            lines += ["", f"### {title}", "", *table(f"{axis} | | tokens a CPU second | MiB", shown)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one tiny sweep, seconds")
    parser.add_argument("--draw", action="store_true", help="measure nothing: the page from the JSON")
    parser.add_argument("--output", type=Path, default=JSON)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    arguments = parser.parse_args()
    if not arguments.draw:
        head = document({"dtype": "bfloat16", "vocabulary": VOCAB, "prompt_tokens": PROMPT})
        sweeps = QUICK if arguments.quick else SWEEPS
        rows = {name: [measured(point) for point in points] for name, (_, points) in sweeps.items()}
        write_atomically(arguments.output, json.dumps({"run": head, "sweeps": rows}, indent=1) + "\n")
    put_section(arguments.page, "learner", section(json.loads(arguments.output.read_text())))


if __name__ == "__main__":
    main()
