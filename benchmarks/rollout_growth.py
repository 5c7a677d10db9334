"""How the cost of a rollout grows: tokens a CPU second and memory against rows, context, group size and model size.

    python benchmarks/rollout_growth.py      # minutes; writes docs/figures/growth-rollout.json and the page
    python benchmarks/rollout_growth.py --quick --output runs/growth.json --page runs/performance.md

SmolLM2-135M-Instruct in bfloat16, one thread, the in-process engine; random weights of Llama's shape for the other
sizes. Every response has the same length; decoding is what a call takes beyond one that samples a single token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_models import SMOLLM2, TINY, model_folder, parameters, random_prompts, vocabulary
from measure import FIGURES, ROOT, PeakMemory, document, rounded, timed
from page_sections import put_section, table
from transformers import AutoModelForCausalLM, LlamaConfig

from magicrl.models.loading import load_policy
from magicrl.models.packing import ATTENTION_NAME
from magicrl.records import Problem, RolloutRequest, SamplingParams, frozen_tokens
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.recorder import write_atomically

SHAPES = {  # width, intermediate width, layers, heads, kv heads; a head of 64 and SmolLM2's vocabulary
    "30M": (256, 768, 16, 4, 2),
    "80M": (448, 1216, 20, 7, 1),
    "135M": (576, 1536, 30, 9, 3),
    "360M": (960, 2560, 32, 15, 5),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measurement."""

    question: str  # what varies
    prompts: int  # different prompts
    samples: int  # responses of each
    prompt_tokens: int  # tokens of each prompt
    tokens: int  # tokens of each response
    shape: str | None = None  # of ``SHAPES``, or None for SmolLM2 itself


def points(quick: bool) -> Iterator[Point]:
    """Rows, context, group size, model size."""
    tokens = 4 if quick else 17
    for rows in (1, 2) if quick else (1, 2, 4, 8, 16, 32, 64):
        yield Point(question="rows", prompts=1, samples=rows, prompt_tokens=64, tokens=tokens)
    for length in (8, 16) if quick else (128, 256, 512, 1024, 2048):
        yield Point(question="context", prompts=4, samples=1, prompt_tokens=length, tokens=tokens)
    for samples in (1, 2) if quick else (1, 2, 4, 8, 16):
        rows = 2 if quick else 16
        yield Point(question="group", prompts=rows // samples, samples=samples, prompt_tokens=rows * 16, tokens=tokens)
    for shape in () if quick else SHAPES:
        yield Point(question="model", prompts=2, samples=8, prompt_tokens=64, tokens=tokens, shape=shape)


def model_of(point: Point, quick: bool) -> Any:
    """The model of a point in bfloat16 with magicrl's attention."""
    if point.shape is None:
        return load_policy(model_folder(TINY if quick else SMOLLM2), dtype="bfloat16").model
    width, inner, layers, heads, kv_heads = SHAPES[point.shape]
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)


def measured(point: Point, model: Any) -> dict[str, Any]:
    """CPU seconds of prefill and decoding at one thread, and the memory above the process before."""
    vocab = vocabulary(model)
    engine = InProcessEngine(
        model,
        end_tokens=frozenset(),
        decode=lambda tokens: "",
        valid_vocab=vocab,
        max_context=model.config.max_position_embeddings,
        max_rows=point.prompts * point.samples,
        memory_limit_mb=8192,
    )
    problem = Problem(id="growth", prompt="", golds=("",), verifier="exact", source="benchmark")
    prompts = random_prompts(point.prompts, point.prompt_tokens, vocab)

    def generate(tokens: int) -> None:
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, seed=0)
        engine.submit(
            [
                RolloutRequest(
                    draw=number,
                    problem=problem,
                    prompt_tokens=frozen_tokens(prompt),
                    group_size=point.samples,
                    sampling=sampling,
                )
                for number, prompt in enumerate(prompts)
            ]
        )
        list(engine.finished())

    timed(lambda: generate(2), 1)  # packs the weights
    engine.interrupt()  # and drops the cache
    peak = PeakMemory()
    peak.start()
    before = peak.read()
    whole, _ = timed(lambda: generate(point.tokens), 1)
    memory = peak.read() - before
    prefill, _ = timed(lambda: generate(1), 1)
    rows = point.prompts * point.samples
    return {
        **asdict(point),
        "parameters": parameters(model),
        "prefill_tokens_per_cpu_s": rounded(point.prompts * point.prompt_tokens / prefill.cpu),
        "decode_tokens_per_cpu_s": rounded(rows * (point.tokens - 1) / max(whole.cpu - prefill.cpu, 1e-9)),
        "whole_tokens_per_cpu_s": rounded(rows * point.tokens / whole.cpu),
        "memory_mib": rounded(memory / 2**20),
    }


AXES = {
    "rows": ("rows decoded at once", "samples"),
    "context": ("tokens of context, 4 rows", "prompt_tokens"),
    "group": ("samples a prompt of 256 tokens, 16 rows", "samples"),
    "model": ("parameters, 16 rows", "parameters"),
}


def section(document: dict[str, Any]) -> str:
    """The page's part: how it was measured, and a table a question."""
    run = document["run"]
    lines = [
        "## Rollout",
        "",
        f"`{run['command']}`, {run['machine']['started'][:10]}: the in-process engine, bfloat16, one thread, "
        "SmolLM2-135M-Instruct and random weights of other sizes. Memory is above the weights.",
    ]
    for question, (axis, key) in AXES.items():
        rates = ("decode_tokens_per_cpu_s", "whole_tokens_per_cpu_s", "memory_mib")
        rows = [
            (row[key], *(f"{row[rate]:.4g}" for rate in rates))
            for row in document["points"]
            if row["question"] == question
        ]
        if rows:
            lines += ["", *table(f"{axis} | tokens decoded a CPU second | with prefill | MiB", rows)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, seconds: shows that the script runs")
    parser.add_argument("--draw", action="store_true", help="measure nothing: the page from the JSON")
    parser.add_argument("--output", type=Path, default=FIGURES / "growth-rollout.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    arguments = parser.parse_args()
    if not arguments.draw:
        head = document({"threads": 1, "dtype": "bfloat16"})
        quick: bool = arguments.quick
        rows = [measured(point, model_of(point, quick)) for point in points(quick)]
        write_atomically(arguments.output, json.dumps({"run": head, "points": rows}, indent=1, allow_nan=False) + "\n")
    put_section(arguments.page, "rollout", section(json.loads(arguments.output.read_text())))


if __name__ == "__main__":
    main()
