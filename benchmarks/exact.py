"""What `model.exact` costs: CPU time with it over CPU time without, in turns (docs/exact.md).

OMP_NUM_THREADS=1 python benchmarks/exact.py   # a model of SmolLM2's shape, bfloat16, and the quickstart's, float32
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import FIGURES, ROOT, document, parser_of, put_section, rounded, table, write_case
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
LABELS = {"smollm2": "SmolLM2-135M, bfloat16", "quickstart": "quickstart, float32"}
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


def measured(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """CPU seconds of each part without and with it, medians of turns, and the ratio; ``step``: decoding and update."""
    plain, exact = (parts(name, exact=wanted) for wanted in (False, True))
    found: dict[str, dict[str, float]] = {}
    for part in plain:
        turns = [(cpu_seconds(plain[part]), cpu_seconds(exact[part])) for _ in range(rounds)]
        found[part] = _ratio(*(statistics.median(column) for column in zip(*turns, strict=True)))
        print(f"{name:12} {part:22} {found[part]}", flush=True)
    step = (found["decode"], found["forward and backward"])
    return found | {"step": _ratio(sum(part["plain_s"] for part in step), sum(part["exact_s"] for part in step))}


def cpu_seconds(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def _ratio(plain: float, exact: float) -> dict[str, float]:
    return {"plain_s": rounded(plain), "exact_s": rounded(exact), "ratio": rounded(exact / plain)}


def write_page(figures: Path) -> None:
    """The table of costs in docs/exact.md."""
    cases = json.loads(figures.read_text())["cases"]
    names = [part for part in next(iter(cases.values())) if part != "run"]
    rows = [(name, *(f"{case[part]['ratio']:.2f}" for part in names)) for name, case in cases.items()]
    put_section(ROOT / "docs" / "exact.md", "cost", table(" | ".join(["shape", *names]), rows))


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "exact.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=sorted(SHAPES))
    options = parser.parse_args()
    head = document({"rounds": options.rounds, "threads": torch.get_num_threads()})
    for name in [options.only] if options.only else SHAPES:
        write_case(options.output, head, LABELS[name], measured(name, options.rounds), list(LABELS.values()))
    write_page(options.output)


if __name__ == "__main__":
    main()
