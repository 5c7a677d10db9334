"""All GPU figures by one command: the head's kernels, the engine, the learner's share of the device's peak.

    python benchmarks/gpu.py                      # one CUDA device; writes docs/figures/bench-gpu.json
    python benchmarks/gpu.py --device cpu --quick # tiny sizes: shows that the script runs

The learner's MFU is that of one update on a response of 16K tokens with the architecture of a 1.5B Qwen2 (random
weights): 6 operations a parameter and token, 12 a layer, width and half the length for causal attention, recomputation
not counted, over the device's rate in a plain matrix product measured in the same run and over its published peak.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import head_speed
import numpy as np
import torch
from measure import FIGURES, document, rounded, write_case
from transformers import AutoModelForCausalLM, Qwen2Config

from magicrl.config.schema import ModelConfig
from magicrl.models.attention import ATTENTION_NAME, register_attention
from magicrl.records import (
    Problem,
    RolloutRequest,
    SamplingParams,
    TrainBatch,
    TrainSample,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.learner import LocalLearner
from magicrl.training.protocols import Controls

PUBLISHED_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Dense bfloat16, of the makers' data sheets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is measured.

    Attributes:
        config: architecture of engine and learner.
        tokens: of the learner's response.
        prompts: of the engine's batch; each has ``samples`` responses of ``generated`` tokens.
        square: side of the plain matrix product.
    """

    config: Qwen2Config
    tokens: int
    prompts: int
    samples: int
    generated: int
    square: int
    head_cases: str


FULL = Sizes(
    config=Qwen2Config(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True, eos_token_id=0,
    ),
    tokens=16384, prompts=16, samples=16, generated=1024, square=8192, head_cases="cuda",
)  # fmt: skip
QUICK = Sizes(
    config=Qwen2Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=0,
    ),
    tokens=48, prompts=2, samples=2, generated=6, square=64, head_cases="quick",
)  # fmt: skip


def _synchronised(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def product_tflops(side: int, device: str) -> float:
    """The rate of a plain bfloat16 product, the best of ten."""
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    out = torch.zeros(side, side, dtype=torch.bfloat16, device=device)
    best = float("inf")
    for _ in range(10):
        start = _synchronised(device)
        torch.mm(a, b, out=out)
        best = min(best, _synchronised(device) - start)
    return 2 * side**3 / best / 1e12


def operations(config: Qwen2Config, parameters: int, tokens: int) -> float:
    """Of one update on one sequence: forward and backward pass, nothing twice."""
    attention = 12 * config.num_hidden_layers * config.hidden_size * tokens**2 / 2
    return 6.0 * parameters * tokens + attention


def learner_case(sizes: Sizes, device: str) -> dict[str, Any]:
    """MFU and peak memory of one update."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(sizes.config, dtype=torch.float32).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    learner = LocalLearner(model, loss="dapo", model_config=ModelConfig(dtype="bfloat16", gradient_checkpointing=True))
    rng = np.random.default_rng(0)
    batch = TrainBatch.of(
        [
            TrainSample(
                prompt_tokens=frozen_tokens(rng.integers(1, sizes.config.vocab_size, 8)),
                tokens=frozen_tokens(rng.integers(1, sizes.config.vocab_size, sizes.tokens)),
                advantage=1.0,
                group_index=0,
                sample_index=0,
                sampler_logprobs=frozen_floats(np.zeros(sizes.tokens)),
                policy_version=0,
            )
        ]
    )
    seconds: list[float] = []
    for _ in range(4):
        start = _synchronised(device)
        learner.update(batch, Controls(learning_rate=1e-6))
        seconds.append(_synchronised(device) - start)
    best = min(seconds[1:])
    done = operations(sizes.config, parameters, sizes.tokens + 8) / best / 1e12
    rate = product_tflops(sizes.square, device)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    peak = next((value for key, value in PUBLISHED_TFLOPS.items() if key in name), None)
    return {
        "device": name,
        "parameters": parameters,
        "response_tokens": sizes.tokens,
        "seconds": rounded(best),
        "tokens_per_s": rounded(sizes.tokens / best),
        "tflops": rounded(done),
        "product_tflops": rounded(rate),
        "share_of_product": rounded(done / rate),
        "mfu": None if peak is None else rounded(done / peak),
        "peak_memory_gib": rounded(torch.cuda.max_memory_allocated() / 2**30) if device == "cuda" else None,
    }


def engine_case(sizes: Sizes, device: str) -> dict[str, Any]:
    """Tokens a second of one batch of groups, all of one length: steps captured as CUDA graphs, and without."""
    register_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(sizes.config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    model = model.to(device).eval()
    tokens = sizes.prompts * sizes.samples * sizes.generated
    found: dict[str, Any] = {"responses": sizes.prompts * sizes.samples, "response_tokens": tokens}
    for name, static in (("fixed_shapes", True), ("plain", False)):
        seconds, captured = _engine_seconds(sizes, device, model, static=static)
        found[name] = {
            "seconds": rounded(seconds),
            "tokens_per_s": rounded(tokens / seconds),
            "graphs_captured": captured,
        }
    return found


def _engine_seconds(sizes: Sizes, device: str, model: Any, *, static: bool) -> tuple[float, int]:
    """Seconds of the second generation (graphs are captured in the first), and how many graphs there are."""
    vocab = sizes.config.vocab_size
    engine = InProcessEngine(
        model, end_tokens=frozenset(), decode=lambda tokens: "", valid_vocab=vocab,
        max_context=sizes.config.max_position_embeddings, max_rows=sizes.prompts * sizes.samples,
        memory_limit_mb=65536 if device == "cuda" else 256, device=device, static_steps=static,
    )  # fmt: skip
    engine.load_weights({name: p.detach() for name, p in model.named_parameters()}, 0)
    problem = Problem(id="speed", prompt="", golds=("",), verifier="exact", source="benchmark")
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=1.0, max_tokens=sizes.generated, seed=0)
    seconds = 0.0
    for _ in range(2):
        prompts = rng.integers(1, vocab, (sizes.prompts, 32))
        engine.submit(
            [
                RolloutRequest(
                    draw=number, problem=problem,
                    prompt_tokens=frozen_tokens(prompt), group_size=sizes.samples, sampling=sampling,
                )
                for number, prompt in enumerate(prompts)
            ]
        )  # fmt: skip
        start = _synchronised(device)
        for _group in engine.finished():
            pass
        seconds = _synchronised(device) - start
    captured = engine.graphs_captured
    engine.close()
    return seconds, captured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--output", type=Path, default=FIGURES / "bench-gpu.json")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --device cpu --quick shows that the script runs")
    sizes = QUICK if arguments.quick else FULL
    head = document({"device": arguments.device})
    heads = head_speed.CASES[sizes.head_cases]
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        f"head-{case.name}": partial(head_speed.run_case, case, arguments.device, 5) for case in heads
    }
    parts["learner"] = lambda: learner_case(sizes, arguments.device)
    parts["engine"] = lambda: engine_case(sizes, arguments.device)
    for name, part in parts.items():
        result = part()
        print(name, result, flush=True)
        write_case(arguments.output, head, name, result, list(parts))


if __name__ == "__main__":
    main()
