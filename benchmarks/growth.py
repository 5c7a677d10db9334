"""How cost grows with length, batch, group size and model size: sections of docs/performance.md; a long response.

    python benchmarks/growth.py rollout          # minutes of CPU: docs/figures/growth-rollout.json, page
    python benchmarks/growth.py learner          # the same for an update: docs/figures/growth-learner.json, page
    python benchmarks/growth.py long-response    # one update on 16,384 tokens: docs/figures/bench-long-response.json
    python benchmarks/growth.py learner --draw   # the page from the JSON that is there
    python benchmarks/growth.py rollout --quick --output runs/growth.json --page runs/performance.md    # seconds

Rollout: SmolLM2-135M-Instruct, and Llamas with random weights for the other sizes, in the in-process engine; every
response has the same length; decoding is what a call takes beyond one that samples a single token. Learner: Llamas with
random weights, since what a token costs does not depend on what it says; one update is warm-up, the next is measured:
CPU time at one thread, and the most bytes of tensors that it adds to weights, gradients and moments. The long response
is learned by SmolLM2 with ``checkpoint_above_tokens``, and must fit into 8 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_models import (
    SMOLLM2,
    TINY,
    generate,
    model_folder,
    parameters,
    random_prompts,
    sample_of,
    speed_engine,
    story_tokens,
    vocabulary,
)
from common import FIGURES, PERFORMANCE, document, parser_of, put_section, rounded, table, write_case, write_figure
from measure import PeakMemory, timed
from tensor_memory import peak_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.schema import ModelConfig
from magicrl.models.loading import load_policy
from magicrl.models.packing import ATTENTION_NAME
from magicrl.records import TrainBatch
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

CONTROLS = Controls(learning_rate=1e-6)
DAPO = AlgorithmConfig(loss="dapo")
LIMIT_GIB = 8


def llama(vocab: int, width: int, inner: int, layers: int, kv_heads: int, context: int) -> LlamaConfig:
    """A Llama with heads of 64 and a tied embedding."""
    torch.manual_seed(0)
    return LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64), num_key_value_heads=kv_heads, max_position_embeddings=context,
        tie_word_embeddings=True,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- rollout

SHAPES = {"30M": (256, 768, 16, 2), "80M": (448, 1216, 20, 1), "135M": (576, 1536, 30, 3), "360M": (960, 2560, 32, 5)}
"""Width, intermediate width, layers, key and value heads; SmolLM2's vocabulary."""
AXES = {
    "rows": ("rows decoded at once", "samples"),
    "context": ("tokens of context, 4 rows", "prompt_tokens"),
    "group": ("samples a prompt of 256 tokens, 16 rows", "samples"),
    "model": ("parameters, 16 rows", "parameters"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPoint:
    """One measurement."""

    question: str  # what varies
    prompts: int  # different prompts
    samples: int  # responses of each
    prompt_tokens: int  # tokens of each prompt
    tokens: int  # tokens of each response
    shape: str | None = None  # of ``SHAPES``, or None for SmolLM2 itself


def rollout_points(quick: bool) -> Iterator[RolloutPoint]:
    """Rows, context, group size, model size."""
    tokens, most = (4, 2) if quick else (17, 16)
    for rows in (1, 2) if quick else (1, 2, 4, 8, 16, 32, 64):
        yield RolloutPoint(question="rows", prompts=1, samples=rows, prompt_tokens=64, tokens=tokens)
    for length in (8, 16) if quick else (128, 256, 512, 1024, 2048):
        yield RolloutPoint(question="context", prompts=4, samples=1, prompt_tokens=length, tokens=tokens)
    for n in (1, 2) if quick else (1, 2, 4, 8, 16):
        yield RolloutPoint(question="group", prompts=most // n, samples=n, prompt_tokens=16 * most, tokens=tokens)
    for shape in () if quick else SHAPES:
        yield RolloutPoint(question="model", prompts=2, samples=8, prompt_tokens=64, tokens=tokens, shape=shape)


def rollout_at(point: RolloutPoint, quick: bool) -> dict[str, Any]:
    """CPU seconds of prefill and decoding at one thread, and the memory above the process before."""
    if point.shape is None:
        model: Any = load_policy(model_folder(TINY if quick else SMOLLM2), dtype="bfloat16").model
    else:
        config = llama(49152, *SHAPES[point.shape], context=8192)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)
    rows = point.prompts * point.samples
    engine = speed_engine(model, rows, model.config.max_position_embeddings)
    prompts = random_prompts(point.prompts, point.prompt_tokens, vocabulary(model))
    timed(lambda: generate(engine, prompts, point.samples, 2), 1)  # packs the weights
    engine.interrupt()  # and drops the cache
    peak = PeakMemory()
    peak.start()
    before = peak.read()
    whole, _ = timed(lambda: generate(engine, prompts, point.samples, point.tokens), 1)
    memory = peak.read() - before
    prefill, _ = timed(lambda: generate(engine, prompts, point.samples, 1), 1)
    return {
        **asdict(point),
        "parameters": parameters(model),
        "prefill_tokens_per_cpu_s": rounded(point.prompts * point.prompt_tokens / prefill.cpu),
        "decode_tokens_per_cpu_s": rounded(rows * (point.tokens - 1) / max(whole.cpu - prefill.cpu, 1e-9)),
        "whole_tokens_per_cpu_s": rounded(rows * point.tokens / whole.cpu),
        "memory_mib": rounded(memory / 2**20),
    }


def rollout_section(found: dict[str, Any]) -> list[str]:
    """How it was measured, and a table a question."""
    run, lines = found["run"], ["## Rollout", ""]
    lines.append(
        f"`{run['command']}`, {run['machine']['started'][:10]}, {run['machine']['cpu']}: the in-process engine, "
        "bfloat16, one thread, SmolLM2-135M-Instruct and random weights of other sizes. Memory is above the weights."
    )
    rates = ("decode_tokens_per_cpu_s", "whole_tokens_per_cpu_s", "memory_mib")
    for question, (axis, key) in AXES.items():
        points = [point for point in found["points"] if point["question"] == question]
        rows = [(point[key], *(f"{point[rate]:.4g}" for rate in rates)) for point in points]
        if rows:
            lines += ["", *table(f"{axis} | tokens decoded a CPU second | with prefill | MiB", rows)]
    return lines


# ------------------------------------------------------------------------------------------------------- learner

VOCAB, PROMPT = 8192, 64


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerPoint:
    """One setting: groups of ``samples`` responses of ``tokens`` tokens, a model of ``width`` and ``layers``."""

    width: int = 256
    layers: int = 4
    groups: int = 2
    samples: int = 4
    tokens: int = 128
    checkpoint: bool = False


BASE = LearnerPoint()
LENGTHS = [replace(BASE, groups=1, samples=2, tokens=n) for n in (64, 256, 1024, 2048)]
SWEEPS = {
    "length": LENGTHS,
    "length-checkpointed": [replace(point, checkpoint=True) for point in LENGTHS],
    "batch": [replace(BASE, groups=n) for n in (1, 2, 4, 8)],
    "group": [replace(BASE, groups=1, samples=n, tokens=64) for n in (1, 2, 4, 8, 16)],
    "model": [replace(BASE, width=w, layers=n, groups=1) for w, n in ((128, 2), (256, 4), (384, 8), (576, 12))],
}
QUICK_SWEEPS = {"batch": [replace(BASE, width=32, layers=1, tokens=8, groups=n) for n in (1, 2)]}
TITLES = {
    "length": ("Length", "response tokens"),
    "batch": ("Batch", "responses an update"),
    "group": ("Group size", "responses a group"),
    "model": ("Model size", "parameters, millions"),
}


def learner_at(point: LearnerPoint) -> dict[str, Any]:
    """Rate and memory of one update on random tokens; half of each group's responses are right."""
    heads = max(1, point.width // 64)
    kv_heads = heads // 3 if heads % 3 == 0 else 1  # as SmolLM2 has
    config = llama(VOCAB, point.width, point.width * 8 // 3, point.layers, kv_heads, context=1 << 16)
    settings = ModelConfig(dtype="bfloat16", head_chunk_tokens=256, gradient_checkpointing=point.checkpoint)
    learner = LocalLearner(LlamaForCausalLM(config), LearnerSettings(algorithm=DAPO, model=settings))
    prompts = random_prompts(point.groups, PROMPT, VOCAB)
    responses = random_prompts(point.groups * point.samples, point.tokens, VOCAB, seed=1)
    batch = TrainBatch.of(
        [
            sample_of(prompts[number // point.samples], tokens, 0.5 - number % 2, number // point.samples, number)
            for number, tokens in enumerate(responses)
        ]
    )
    torch.set_num_threads(1)
    # the first is the warm-up: moments are made in it
    memory = min(peak_of(lambda: learner.update(batch, CONTROLS), "cpu") for _ in range(2))
    times, _ = timed(lambda: learner.update(batch, CONTROLS), 1)
    return {
        **asdict(point),
        "parameters": sum(weight.numel() for weight in learner.weights().values()),
        "response_tokens_per_cpu_s": rounded(responses.size / times.cpu),
        "mib_above_state": rounded(memory / 2**20),
    }


def learner_section(found: dict[str, Any]) -> list[str]:
    """How it was measured, and a table a sweep."""
    run, lines = found["run"], ["## Learner", ""]
    lines.append(
        f"`{run['command']}`, {run['machine']['started'][:10]}, {run['machine']['cpu']}, one thread, load "
        f"{run['load_average_at_start'][0]} at the start. Llamas with random weights in bfloat16, prompts of {PROMPT} "
        "tokens; where a sweep does not change them: 4 layers of width 256. Memory is what an update adds to weights, "
        "gradients and moments."
    )
    for sweep, (title, axis) in TITLES.items():
        points = [point for name, own in found["sweeps"].items() if name.partition("-")[0] == sweep for point in own]
        rows: list[tuple[str, ...]] = []
        for p in points:
            at = {"length": p["tokens"], "batch": p["groups"] * p["samples"], "group": p["samples"]}
            x = at.get(sweep, p["parameters"] / 1e6)
            rate, mib = p["response_tokens_per_cpu_s"], p["mib_above_state"]
            rows.append((f"{x:.4g}", "checkpointed" if p["checkpoint"] else "", f"{rate:.0f}", f"{mib:.0f}"))
        if rows:
            lines += ["", f"### {title}", "", *table(f"{axis} | | tokens a CPU second | MiB", rows)]
    return lines


# ------------------------------------------------------------------------------------------------- a long response


def long_response(arguments: argparse.Namespace) -> None:
    """Peak memory and times of one update on one response; the first has no moments beforehand, so that what it holds
    at its end is the whole state."""
    quick, threads = arguments.quick, len(os.sched_getaffinity(0))
    name, tokens, above = (TINY, 64, 16) if quick else (SMOLLM2, 16384, 2048)
    head = document({"dtype": "bfloat16", "checkpoint_above_tokens": above, "head_chunk_tokens": 256})
    prompt = min(128, tokens)
    before = psutil.Process().memory_info().rss
    text = story_tokens(name, prompt + tokens, 0)
    batch = TrainBatch.of([sample_of(text[:prompt], text[prompt:], 1.0)])
    policy = load_policy(model_folder(name), dtype="float32").model
    settings = ModelConfig(dtype="bfloat16", head_chunk_tokens=256, checkpoint_above_tokens=above)
    learner = LocalLearner(policy, LearnerSettings(algorithm=DAPO, model=settings))
    peak = PeakMemory()
    peak.start()
    times, values = timed(lambda: learner.update(batch, CONTROLS).values, threads)
    highest = peak.read()
    state = parameters(policy) * 18  # float32 weights, gradients, two moments; the rounded copy
    result = {
        "model": name,
        "parameters": parameters(policy),
        "prompt_tokens": prompt,
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
    print(result)
    case = f"{'tiny' if quick else 'smollm2'}-{tokens}"
    write_case(arguments.output or FIGURES / "bench-long-response.json", head, case, result, [case])
    if result["peak_gib"] > LIMIT_GIB:
        raise SystemExit(f"{result['peak_gib']} GiB: more than the {LIMIT_GIB} GiB promised")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("rollout", "learner", "long-response"))
    parser.add_argument("--quick", action="store_true", help="tiny models, seconds: shows that the script runs")
    parser.add_argument("--draw", action="store_true", help="measure nothing: the page from the JSON")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--page", type=Path, default=PERFORMANCE)
    arguments = parser.parse_args()
    if arguments.what == "long-response":
        long_response(arguments)
        return
    output = arguments.output or FIGURES / f"growth-{arguments.what}.json"
    rollout, quick = arguments.what == "rollout", arguments.quick
    if not arguments.draw and rollout:
        head = document({"threads": 1, "dtype": "bfloat16"})
        points = [rollout_at(point, quick) for point in rollout_points(quick)]
        write_figure(output, {"run": head, "points": points})
    elif not arguments.draw:
        head = document({"dtype": "bfloat16", "vocabulary": VOCAB, "prompt_tokens": PROMPT})
        sweeps = QUICK_SWEEPS if quick else SWEEPS
        rows = {name: [learner_at(point) for point in points] for name, points in sweeps.items()}
        write_figure(output, {"run": head, "sweeps": rows})
    found = json.loads(output.read_text())
    put_section(arguments.page, arguments.what, rollout_section(found) if rollout else learner_section(found))


if __name__ == "__main__":
    main()
