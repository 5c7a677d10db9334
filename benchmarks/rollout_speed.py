"""Rollout: magicrl's in-process engine beside `transformers.generate`, in one process, in turns.

    python benchmarks/rollout_speed.py            # minutes; writes docs/figures/bench-rollout.json
    python benchmarks/rollout_speed.py --quick    # seconds, a tiny model: shows that the script runs

Both sides run the same weights, prompts, lengths, precision and temperature. No end token is set on either side, so
that every response has the length that its case gives it. magicrl returns log-probs and entropies of all sampled
tokens; the peer runs without any (its best case).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_models import SMOLLM2, TINY, long_tailed, model_folder, parameters, plain_model, random_prompts, vocabulary
from gemm_bound import GemmBound
from measure import (
    FIGURES,
    Times,
    Turn,
    document,
    plausible,
    ratio,
    rounded,
    summary,
    timed,
    turns,
    write_case,
)
from numpy.typing import NDArray
from rollout_parts import batches_parts, engine_parts
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from magicrl.config.schema import DType
from magicrl.models.decoding import FusedDecoder, fused_decoder
from magicrl.models.kv_cache import probe_cache_shape
from magicrl.models.loading import load_policy
from magicrl.records import Problem, RolloutRequest, SamplingParams, frozen_tokens
from magicrl.rollout.in_process import InProcessEngine
from magicrl.rollout.sampling import sample_tokens

SIDES = ("magicrl", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One workload."""

    name: str  # of the case in the JSON
    model: str  # a name that ``bench_models`` knows
    dtype: DType  # precision of the weights and the cache
    prompts: int  # different prompts
    samples: int  # responses of each. Where lengths differ each response is a request of its own on both sides.
    prompt_tokens: int  # tokens of every prompt
    tokens: int  # response tokens: of every response, or the longest where ``median`` is set
    rows: int  # sequences that may decode at once (ours refills rows, the peer runs batches of as many)
    median: int | None = None  # median response length of the long-tailed case; None for equal lengths

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    def lengths(self) -> NDArray[np.int64]:
        """``[sequences]`` response tokens."""
        if self.median is None:
            return np.full(self.sequences, self.tokens)
        return long_tailed(self.sequences, self.median, self.tokens)


CASES = (
    Case(name="tiny-equal", model=TINY, dtype="float32", prompts=16, samples=8, prompt_tokens=11, tokens=64, rows=128),
    Case(
        name="smollm2-equal", model=SMOLLM2, dtype="bfloat16", prompts=8, samples=8, prompt_tokens=128, tokens=128,
        rows=64,
    ),
    Case(
        name="smollm2-long-tail", model=SMOLLM2, dtype="bfloat16", prompts=48, samples=1, prompt_tokens=32, tokens=160,
        rows=24, median=32,
    ),
)  # fmt: skip
QUICK = (
    Case(name="tiny-equal", model=TINY, dtype="float32", prompts=2, samples=2, prompt_tokens=5, tokens=6, rows=4),
    Case(
        name="tiny-long-tail", model=TINY, dtype="float32", prompts=6, samples=1, prompt_tokens=5, tokens=12,
        rows=3, median=4,
    ),
)  # fmt: skip


class Ours:
    """The engine as the training loop uses it."""

    def __init__(self, case: Case) -> None:
        loaded = load_policy(model_folder(case.model), dtype=case.dtype)
        self.case, self.model = case, loaded.model
        self.vocab = vocabulary(loaded.model)
        self._engine = InProcessEngine(
            loaded.model,
            end_tokens=frozenset(),
            decode=lambda tokens: "",
            valid_vocab=self.vocab,
            max_context=loaded.max_context,
            max_rows=case.rows,
            memory_limit_mb=8192,
        )

    def __call__(self, limit: int | None = None) -> NDArray[np.int64]:
        """Generate; the lengths that came out. ``limit`` cuts every response there."""
        case = self.case
        prompts = random_prompts(case.prompts, case.prompt_tokens, self.vocab)
        lengths = np.minimum(case.lengths(), limit or case.tokens)
        problem = Problem(id="speed", prompt="", golds=("",), verifier="exact", source="benchmark")
        self._engine.submit(
            [
                RolloutRequest(
                    draw=number,
                    problem=problem,
                    prompt_tokens=frozen_tokens(prompt),
                    group_size=case.samples,
                    sampling=SamplingParams(temperature=1.0, max_tokens=int(lengths[number * case.samples]), seed=0),
                )
                for number, prompt in enumerate(prompts)
            ]
        )
        groups = sorted(self._engine.finished(), key=lambda g: g.request.draw)
        return np.array([len(c) for group in groups for c in group.completions])


class _StopAt(StoppingCriteria):
    """Ends row r after ``lengths[r]`` new tokens, as an end token would."""

    def __init__(self, prompt_tokens: int, lengths: NDArray[np.int64]) -> None:
        self._ends = torch.from_numpy(prompt_tokens + lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= self._ends


class Peer:
    """`transformers.generate` with its key/value cache, sdpa attention, sampling over the whole vocabulary."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = plain_model(model_folder(case.model), case.dtype)
        self.vocab = vocabulary(self.model)
        self.model.generation_config = GenerationConfig()  # the folder's own would bring the end tokens back

    def __call__(self, limit: int | None = None) -> NDArray[np.int64]:
        """Generate in batches of ``rows``; the lengths that came out."""
        case = self.case
        prompts = torch.from_numpy(random_prompts(case.prompts, case.prompt_tokens, self.vocab))
        prompts = prompts.repeat_interleave(case.samples, dim=0)
        lengths = np.minimum(case.lengths(), limit or case.tokens)
        torch.manual_seed(0)
        found: list[NDArray[np.int64]] = []
        for start in range(0, case.sequences, case.rows):
            part = slice(start, start + case.rows)
            found.append(self._batch(prompts[part], lengths[part]))
        return np.concatenate(found)

    def _batch(self, prompts: Tensor, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=int(lengths.max()),
            pad_token_id=0,
            use_cache=True,
        )
        stop = StoppingCriteriaList([_StopAt(prompts.shape[1], lengths)] if lengths.min() < lengths.max() else [])
        with torch.inference_mode():
            output: Any = self.model.generate(
                prompts, attention_mask=torch.ones_like(prompts), generation_config=config, stopping_criteria=stop
            )
        assert output.shape[1] - prompts.shape[1] == lengths.max(), "a response ended early"
        return lengths


def run_case(case: Case, order: list[Turn]) -> dict[str, Any]:
    """Both sides in turns, the bound before and after."""
    ours, peer = Ours(case), Peer(case)
    bound = FastestProducts(peer.model, ours.model)
    bounds = [bound_seconds(case, bound)]
    times: dict[str, list[tuple[Turn, Times]]] = {"magicrl": [], "transformers": []}
    for number, turn in enumerate(order):
        sides = [("magicrl", ours), ("transformers", peer)]
        for name, side in sides if number % 2 == 0 else reversed(sides):
            # the warm-up need not be long
            spent, lengths = timed(lambda s=side, t=turn: s(8 if t.warm_up else None), turn.threads)
            assert turn.warm_up or (lengths == case.lengths()).all(), f"{name} gave other lengths than the case's"
            times[name].append((turn, spent))
    bounds.append(bound_seconds(case, bound))
    # rates belong to the faster of the two measurements of each part
    best = {key: (max if key.endswith(("gflops", "per_s")) else min)(b[key] for b in bounds) for key in bounds[0]}
    tokens = int(case.lengths().sum())
    sampling = {"magicrl": our_sampling_seconds, "transformers": peer_sampling_seconds}
    reading = attention_read_seconds(case, ours.model)
    results: dict[str, dict[str, Any]] = {}
    for name, side in (("magicrl", ours), ("transformers", peer)):
        found = summary(times[name], {"tokens": tokens})
        results[name] = {"measured": found, **details(case, side, found, best, sampling[name], tokens, reading)}
    results["magicrl"]["parts"] = engine_parts(ours, reading)
    results["transformers"]["parts"] = batches_parts(case.lengths(), case.prompt_tokens, case.samples, case.rows)
    return {
        "case": asdict(case),
        "response_tokens": tokens,
        "longest_response": int(case.lengths().max()),
        "parameters": parameters(peer.model),
        "bound": {key: rounded(value) for key, value in best.items()},
        "attention_read_s": rounded(reading),
        **results,
        "times_faster": ratio(results["transformers"]["measured"], results["magicrl"]["measured"]),
    }


class FastestProducts:
    """The time of a model's matrix products in the faster of two forms: its own linear layers, and those of one input
    joined and packed as magicrl's engine has them. Whoever ran the products alone could not be faster."""

    def __init__(self, plain: Any, packed: Any) -> None:
        self._plain = GemmBound(plain)
        fused = fused_decoder(packed)
        assert isinstance(fused, FusedDecoder)
        *self._body, self._head = fused.products
        self._dtype = plain.dtype

    def forward(self, body_rows: int, head_rows: int, repetitions: int = 3) -> float:
        """As `GemmBound.forward`."""
        plain = self._plain.forward(body_rows, head_rows, repetitions)
        times = [self._run(body_rows, head_rows) for _ in range(repetitions + 1)]
        return min([plain, *times[1:]])

    def flops(self, body_rows: int, head_rows: int) -> float:
        return self._plain.flops(body_rows, head_rows, backward=False)

    @torch.inference_mode()
    def _run(self, body_rows: int, head_rows: int) -> float:
        work = [(p, body_rows) for p in self._body] + [(self._head, head_rows)]
        shapes = {(rows, product.in_width) for product, rows in work}
        inputs = {shape: torch.randn(*shape, dtype=self._dtype) for shape in shapes}
        for product, _ in work:
            product.refresh()
        start = time.process_time()
        for product, rows in work:
            product(inputs[rows, product.in_width])
        return time.process_time() - start


def attention_read_seconds(case: Case, model: Any) -> float:
    """CPU seconds to read, at one thread, the keys and values that decoding needs: a group's prompt once a step, each
    response once a step. What attention costs at least, beside the products."""
    lengths = case.lengths().reshape(case.prompts, case.samples)
    prompts = int((lengths.max(axis=1) - 1).sum()) * case.prompt_tokens
    responses = int((lengths * (lengths - 1) // 2).sum())
    shape = probe_cache_shape(model, torch.device("cpu"))
    memory = torch.ones(1 << 25, dtype=torch.int64)  # 256 MiB: from memory, not from a cache
    seconds = _median_seconds(memory.sum, repetitions=5)
    return (prompts + responses) * shape.bytes_per_token * seconds / (memory.numel() * memory.itemsize)


def bound_seconds(case: Case, bound: FastestProducts) -> dict[str, float]:
    """CPU seconds of the job's matrix products at one thread: each prompt once, every row busy until all is done.

    ``longest_alone_s`` is the longest response with a row to itself from the first step on: however many cores there
    are, a step of training that waits for its last response takes no less.
    """
    decoded = int(case.lengths().sum()) - case.sequences  # the first token of each comes with its prompt
    rows = min(case.rows, case.sequences)
    prompts = case.prompts * case.prompt_tokens
    prefill = bound.forward(prompts, case.prompts)
    step = bound.forward(rows, rows, repetitions=5)
    alone = bound.forward(1, 1, repetitions=5)
    return {
        "prefill_s": prefill,
        "decode_s": step * decoded / rows,
        "total_s": prefill + step * decoded / rows,
        "prefill_gflops": bound.flops(prompts, case.prompts) / prefill / 1e9,
        "decode_gflops": bound.flops(rows, rows) / step / 1e9,
        "decode_tokens_per_s": rows / step,
        "longest_alone_s": alone * int(case.lengths().max()),
    }


def details(
    case: Case,
    side: Callable[[int | None], NDArray[np.int64]],
    found: dict[str, Any],
    bound: dict[str, float],
    sampling: Callable[[Any, int, int], float],
    tokens: int,
    reading: float,
) -> dict[str, Any]:
    """Prefill, decode and sampling of one side at one thread, and its share of the bound."""
    total = found["threads_1"]["cpu_s"]
    prefill = timed(lambda: side(1), 1)[0].cpu  # all prompts and one token each
    rows = min(case.rows, case.sequences)
    call = sampling(getattr(side, "model").dtype, rows, getattr(side, "vocab"))  # noqa: B009
    steps = tokens / rows
    return {
        "prefill_cpu_s": rounded(prefill),
        "decode_tokens_per_cpu_s": rounded((tokens - case.sequences) / max(total - prefill, 1e-9)),
        "sampling_share": rounded(call * steps / total),
        "share_of_gemm_bound": rounded(bound["total_s"] / total),
        "decode_share_of_gemm_bound": rounded(bound["decode_s"] / max(total - prefill, 1e-9)),
        "decode_share_of_gemm_and_reading": rounded((bound["decode_s"] + reading) / max(total - prefill, 1e-9)),
        "times_the_longest_alone": rounded(total / bound["longest_alone_s"]),
    }


def our_sampling_seconds(dtype: torch.dtype, rows: int, vocab: int) -> float:
    """CPU seconds of one call of our sampler, which gives log-probs and entropies too."""
    logits, points = torch.randn(rows, vocab).to(dtype), np.random.default_rng(0).random(rows)
    return _median_seconds(lambda: sample_tokens(logits, np.ones(rows), points, vocab))


def peer_sampling_seconds(dtype: torch.dtype, rows: int, vocab: int) -> float:
    """CPU seconds of what generate does at each step: float32 copy, softmax, multinomial."""
    logits = torch.randn(rows, vocab).to(dtype)
    return _median_seconds(lambda: torch.multinomial(logits.float().softmax(-1), 1))


def _median_seconds(call: Callable[[], Any], repetitions: int = 10) -> float:
    found: list[float] = []
    for _ in range(repetitions + 1):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, seconds")
    parser.add_argument("--case", action="append", help="measure only these cases; others stay in the file")
    parser.add_argument("--repetitions", type=int, default=2, help="measurements a side at one thread")
    parser.add_argument("--one-thread", action="store_true", help="leave out the measurements at all threads")
    parser.add_argument("--output", type=Path, default=FIGURES / "bench-rollout.json")
    arguments = parser.parse_args()
    known = QUICK if arguments.quick else CASES
    head = document(
        {
            "repetitions": arguments.repetitions,
            "peer": "transformers.generate, sdpa, dynamic cache, do_sample, top_k 0, top_p 1",
            "end_tokens": "none set on either side, so that lengths are equal",
            "bound": "the linear layers and head at one thread, plain or joined and packed, whichever is faster; "
            "prompts once a group; no attention",
        }
    )
    for case in (c for c in known if not arguments.case or c.name in arguments.case):
        # two threads only slow a model of 0.1M parameters down
        most = 1 if arguments.one_thread or case.model == TINY else None
        order = turns(arguments.repetitions, most_threads=most)
        result = run_case(case, order)
        shares = {side: result[side]["share_of_gemm_bound"] for side in SIDES}
        print(case.name, result["times_faster"], shares)
        if not plausible(result, SIDES):
            raise SystemExit(f"{case.name}: faster than its own matrix products; the machine was disturbed")
        write_case(arguments.output, head, case.name, result, [c.name for c in known])


if __name__ == "__main__":
    main()
