"""Rollout: magicrl's in-process engine and transformers at its fastest setting, in one process, in turns.

    python -m benchmarks.speed.rollout_speed            # minutes; writes benchmarks/results/bench-rollout.json
    python -m benchmarks.speed.rollout_speed --quick    # seconds, a tiny model: shows that the script runs
    python -m benchmarks.speed.rollout_speed --tune     # the same, and tries every setting of the peer again

Both sides have the same weights, prompts, lengths, precision and temperature. No end token is set, so every response
has the length of its case. magicrl returns log-probs and entropies of all sampled tokens; the peer runs without any,
its best case.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from benchmarks.shared import FIGURES, document, rounded, with_tcmalloc, write_case
from benchmarks.speed.measure import (
    GemmBound,
    Times,
    Turn,
    chosen,
    more_if_brief,
    plausible,
    ratio,
    speed_parser,
    summary,
    timed,
    turns,
)
from benchmarks.speed.models import (
    SMOLLM2,
    TINY,
    long_tailed,
    model_folder,
    parameters,
    plain_model,
    random_prompts,
    speed_engine,
    submit,
    vocabulary,
)
from benchmarks.speed.rollout_parts import engine_parts
from magicrl.config.model_schema import DType
from magicrl.models.decoding import FusedDecoder, fused_decoder
from magicrl.models.kv_cache import probe_cache_shape
from magicrl.models.loading import load_policy
from magicrl.models.products import widens_bfloat16

SIDES = ("magicrl", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One workload."""

    name: str  # of the case in the JSON
    model: str  # a name that ``bench_models`` knows
    dtype: DType  # precision of the weights and the cache; float32 where the CPU is slower in bfloat16
    prompts: int  # different prompts
    samples: int  # responses of each. Where lengths differ, each response is a separate request on both sides.
    prompt_tokens: int  # tokens of every prompt
    tokens: int  # response tokens: of every response, or the longest where ``median`` is set
    rows: int  # sequences that may decode at once (ours refills rows, the peer runs batches of as many)
    median: int | None = None  # median response length of the long-tailed case; None for equal lengths

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    def lengths(self) -> NDArray[np.int64]:
        """Return ``[sequences]`` numbers of response tokens."""
        if self.median is None:
            return np.full(self.sequences, self.tokens)
        return long_tailed(self.sequences, self.median, self.tokens)


CASES = (
    Case(name="tiny-equal", model=TINY, dtype="float32", prompts=16, samples=8, prompt_tokens=11, tokens=64, rows=128),
    Case(name="smollm2-equal", model=SMOLLM2, dtype="bfloat16", prompts=8, samples=8, prompt_tokens=128,
         tokens=128, rows=64),
    Case(name="smollm2-long-tail", model=SMOLLM2, dtype="bfloat16", prompts=48, samples=1, prompt_tokens=32,
         tokens=160, rows=24, median=32),
)  # fmt: skip
QUICK = (
    Case(name="tiny-equal", model=TINY, dtype="float32", prompts=2, samples=2, prompt_tokens=5, tokens=6, rows=4),
    Case(name="tiny-long-tail", model=TINY, dtype="float32", prompts=6, samples=1, prompt_tokens=5, tokens=12,
         rows=3, median=4),
)  # fmt: skip


def runnable(case: Case) -> Case:
    """Return the case in float32 if this CPU is slower in bfloat16, in which no side would be at its best."""
    return replace(case, dtype="float32") if case.dtype == "bfloat16" and widens_bfloat16() else case


class Ours:
    """The engine as the training loop uses it."""

    def __init__(self, case: Case, *, exact: bool = False) -> None:
        loaded = load_policy(model_folder(case.model), dtype=case.dtype)
        self.case, self.model = case, loaded.model
        self._engine = speed_engine(loaded.model, case.rows, loaded.max_context, exact=exact)

    def __call__(self, limit: int | None = None) -> NDArray[np.int64]:
        """Generate and return the lengths. ``limit`` truncates every response."""
        case = self.case
        prompts = random_prompts(case.prompts, case.prompt_tokens, vocabulary(self.model))
        lengths = np.minimum(case.lengths(), limit or case.tokens)
        submit(self._engine, prompts, case.samples, lengths[:: case.samples].tolist())
        groups = sorted(self._engine.finished(), key=lambda g: g.request.draw)
        return np.array([len(c) for group in groups for c in group.completions])


class _StopAt(StoppingCriteria):
    """Stopping criterion that ends row r after ``lengths[r]`` new tokens, as an end token would."""

    def __init__(self, prompt_tokens: int, lengths: NDArray[np.int64]) -> None:
        self._ends = torch.from_numpy(prompt_tokens + lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= self._ends


class Peer:
    """`transformers.generate` in batches of ``rows``, sdpa attention, sampling over the whole vocabulary.

    Args:
        case: The workload.
        settings: Settings of the generation config, for its cache and for ``torch.compile``.
    """

    def __init__(self, case: Case, **settings: Any) -> None:
        self.case, self._settings = case, settings
        self.model = plain_model(model_folder(case.model), case.dtype)
        self.model.generation_config = GenerationConfig()  # the folder's config has end tokens

    def __call__(self, limit: int | None = None) -> NDArray[np.int64]:
        """Generate and return the lengths."""
        case = self.case
        prompts = torch.from_numpy(random_prompts(case.prompts, case.prompt_tokens, vocabulary(self.model)))
        prompts = prompts.repeat_interleave(case.samples, dim=0)
        lengths = np.minimum(case.lengths(), limit or case.tokens)
        torch.manual_seed(0)
        found: list[NDArray[np.int64]] = []
        for start in range(0, case.sequences, case.rows):
            part = slice(start, start + case.rows)
            found.append(self._batch(prompts[part], lengths[part]))
        return np.concatenate(found)

    def _batch(self, prompts: Tensor, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        config = GenerationConfig(**SAMPLED, max_new_tokens=int(lengths.max()), use_cache=True, **self._settings)
        stop = StoppingCriteriaList([_StopAt(prompts.shape[1], lengths)] if lengths.min() < lengths.max() else [])
        with torch.inference_mode():
            output: Any = self.model.generate(
                prompts, attention_mask=torch.ones_like(prompts), generation_config=config, stopping_criteria=stop
            )
        assert output.shape[1] - prompts.shape[1] == lengths.max(), "a response ended early"
        return lengths


class ContinuousPeer(Peer):
    """transformers' continuous batching: the next request replaces a finished row."""

    def __call__(self, limit: int | None = None) -> NDArray[np.int64]:
        case = self.case
        prompts = random_prompts(case.prompts, case.prompt_tokens, vocabulary(self.model))
        lengths = np.minimum(case.lengths(), limit or case.tokens)
        # pages for all rows: by default its cache takes most of the memory, and the time to fill it
        pages = case.rows * -(-(case.prompt_tokens + case.tokens) // PAGE)
        settings = ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages, max_requests_per_batch=case.rows)
        found: dict[str, int] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=GenerationConfig(**SAMPLED), continuous_batching_config=settings, block=True
        ) as manager:
            asked = [
                manager.add_request(prompts[number // case.samples].tolist(), max_new_tokens=int(length))
                for number, length in enumerate(lengths)
            ]
            while len(found) < len(asked):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("its generation thread has ended")
        return np.array([found[name] for name in asked])


PAGE = 32  # tokens of a page of continuous batching
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "pad_token_id": 0}
PEERS: dict[str, Callable[[Case], Peer]] = {
    "generate, dynamic cache": Peer,
    "generate, static cache": lambda case: Peer(case, cache_implementation="static"),
    "generate, static cache, compiled": lambda case: Peer(
        case, cache_implementation="static", compile_config=_everywhere(CompileConfig(mode="default"))
    ),
    "continuous batching": ContinuousPeer,
}


def _everywhere(config: CompileConfig) -> CompileConfig:
    """Let transformers compile on a CPU; by default it compiles on GPUs only."""
    config._compile_all_devices = True
    return config


def case_before(path: Path, case: str, machine: Mapping[str, Any], *packages: str) -> dict[str, Any]:
    """Return the case with these packages on this CPU, from the file or its namesake in a machine's folder, or {}."""
    for file in filter(Path.exists, (path, *path.parent.glob(f"*/{path.name}"))):
        found = json.loads(file.read_text())["cases"].get(case)
        before = found["run"]["machine"] if found else {"versions": {}, "cpu": None}
        same = all(before["versions"].get(name) == machine["versions"][name] for name in ("torch", *packages))
        if same and before["cpu"] == machine["cpu"]:
            return found
    return {}


def tried_settings(case: Case) -> dict[str, Any]:
    """Return the CPU seconds of each of the peer's settings, from a second run in one thread, or its failure."""
    tried: dict[str, Any] = {}
    for name, make in PEERS.items():
        try:
            peer = make(case)
            timed(lambda p=peer, n=name: p(None if "compiled" in n else 8), 1)  # compiles here
            spent, lengths = timed(peer, 1)
            assert (lengths == case.lengths()).all(), f"gave {lengths.sum()} tokens of {case.lengths().sum()}"
            tried[name] = rounded(spent.cpu)
        except Exception as error:  # noqa: BLE001 - a setting that the peer cannot run here is a result of the list
            tried[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return tried


Side = Callable[[int | None], NDArray[np.int64]]  # gets the length limit and returns the lengths


def in_turns(case: Case, sides: Mapping[str, Side], order: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    """Return every side's summary; the first side changes from turn to turn."""
    times: dict[str, list[tuple[Turn, Times]]] = {name: [] for name in sides}
    for number, turn in enumerate(more_if_brief(order, lambda: max(found[-1][1].cpu for found in times.values()))):
        for name in sides if number % 2 == 0 else reversed(sides):
            # the warm-up need not be long
            spent, lengths = timed(lambda s=sides[name], t=turn: s(8 if t.warm_up else None), turn.threads)
            assert turn.warm_up or (lengths == case.lengths()).all(), f"{name} gave other lengths than the case's"
            times[name].append((turn, spent))
    return {name: summary(found, {"tokens": int(case.lengths().sum())}) for name, found in times.items()}


def run_case(case: Case, order: Sequence[Turn], tried: Mapping[str, Any]) -> dict[str, Any]:
    """Measure both sides in turns, the bound before and after, and the peer at its fastest setting in ``tried``."""
    seconds = {name: value for name, value in tried.items() if isinstance(value, float)}
    setting = min(seconds, key=seconds.__getitem__)
    ours, peer = Ours(case), PEERS[setting](case)
    timed(lambda: peer(None if "compiled" in setting else 8), 1)  # compiles here
    bound = FastestProducts(peer.model, ours.model)
    sides: dict[str, Side] = {"magicrl": ours, "transformers": peer}
    bounds = [bound_seconds(case, bound)]
    measured = in_turns(case, sides, order)
    bounds.append(bound_seconds(case, bound))
    # rates belong to the faster of the two measurements of each part
    best = {key: (max if key.endswith(("gflops", "per_s")) else min)(b[key] for b in bounds) for key in bounds[0]}
    reading = attention_read_seconds(case, ours.model)
    return {
        "case": asdict(case),
        "response_tokens": int(case.lengths().sum()),
        "longest_response": int(case.lengths().max()),
        "parameters": parameters(peer.model),
        "bound": {key: rounded(value) for key, value in best.items()},
        "attention_read_s": rounded(reading),
        "peer": {"setting": setting, "cpu_s": dict(tried)},
        **{
            name: {"measured": found, **details(case, sides[name], found, best, reading)}
            for name, found in measured.items()
        },
        "parts": engine_parts(ours, reading),
        "times_faster": ratio(measured["transformers"], measured["magicrl"]),
    }


class FastestProducts:
    """The time of a model's matrix products: its own layers, or joined and packed as in our engine, if faster."""

    def __init__(self, plain: Any, packed: Any) -> None:
        self._plain = GemmBound(plain)
        fused = fused_decoder(packed)
        assert isinstance(fused, FusedDecoder)
        *self._body, self._head = fused.products
        self._dtype = plain.dtype

    def forward(self, body_rows: int, head_rows: int, repetitions: int = 3) -> float:
        """Return the same as `GemmBound.forward`."""
        plain = self._plain.forward(body_rows, head_rows, repetitions)
        times = [self._run(body_rows, head_rows) for _ in range(repetitions + 1)]
        return min([plain, *times[1:]])

    def flops(self, body_rows: int, head_rows: int) -> float:
        return self._plain.flops(body_rows, head_rows, backward=False)

    @torch.inference_mode()
    def _run(self, body_rows: int, head_rows: int) -> float:
        work = [(p, body_rows) for p in self._body] + [(self._head, head_rows)]
        inputs = {(rows, p.in_width): torch.randn(rows, p.in_width, dtype=self._dtype) for p, rows in work}
        for product, _ in work:
            product.refresh()
        start = time.process_time()
        for product, rows in work:
            product(inputs[rows, product.in_width])
        return time.process_time() - start


def attention_read_seconds(case: Case, model: Any) -> float:
    """Return CPU seconds in one thread to read all keys and values: a group's prompt once per step."""
    lengths = case.lengths().reshape(case.prompts, case.samples)
    prompts = int((lengths.max(axis=1) - 1).sum()) * case.prompt_tokens
    responses = int((lengths * (lengths - 1) // 2).sum())
    shape = probe_cache_shape(model, torch.device("cpu"))
    memory = torch.ones(1 << 25, dtype=torch.int64)  # 256 MiB: from memory, not from a cache
    seconds = statistics.median(timed(memory.sum, 1)[0].cpu for _ in range(5))
    return (prompts + responses) * shape.bytes_per_token * seconds / (memory.numel() * memory.itemsize)


def bound_seconds(case: Case, bound: FastestProducts) -> dict[str, float]:
    """Return CPU seconds of the matrix products in one thread: each prompt once, all rows busy to the end."""
    decoded = int(case.lengths().sum()) - case.sequences  # prefill gives the first token of each
    rows = min(case.rows, case.sequences)
    prompts = case.prompts * case.prompt_tokens
    prefill = bound.forward(prompts, case.prompts)
    step = bound.forward(rows, rows, repetitions=5)
    return {
        "prefill_s": prefill,
        "decode_s": step * decoded / rows,
        "total_s": prefill + step * decoded / rows,
        "prefill_gflops": bound.flops(prompts, case.prompts) / prefill / 1e9,
        "decode_gflops": bound.flops(rows, rows) / step / 1e9,
        "decode_tokens_per_s": rows / step,
    }


def details(case: Case, side: Side, found: dict[str, Any], bound: dict[str, float], reading: float) -> dict[str, Any]:
    """Return prefill and decode times of one side in one thread, and its share of the bound."""
    total, tokens = found["threads_1"]["cpu_s"], int(case.lengths().sum())
    prefill = timed(lambda: side(1), 1)[0].cpu  # all prompts and one token each
    decode = max(total - prefill, 1e-9)
    return {
        "prefill_cpu_s": rounded(prefill),
        "decode_tokens_per_cpu_s": rounded((tokens - case.sequences) / decode),
        "share_of_gemm_bound": rounded(bound["total_s"] / total),
        "decode_share_of_gemm_bound": rounded(bound["decode_s"] / decode),
        "decode_share_of_gemm_and_reading": rounded((bound["decode_s"] + reading) / decode),
    }


def main() -> None:
    parser = speed_parser(__doc__, FIGURES / "bench-rollout.json")
    parser.add_argument("--tune", action="store_true", help="try every setting of the peer again")
    arguments = parser.parse_args()
    known = QUICK if arguments.quick else CASES
    head = document(
        {
            "repetitions": arguments.repetitions,
            "peer": "transformers, the fastest of the settings under `peer`, sdpa, do_sample, top_k 0, top_p 1",
            "end_tokens": "none set on either side, so that lengths are equal",
            "bound": "the linear layers and head at one thread, plain or joined and packed, whichever is faster; "
            "prompts once a group; no attention",
        }
    )
    for case in map(runnable, chosen(known, arguments.case)):
        most = 1 if arguments.one_thread or case.model == TINY else None  # two threads slow down 0.1M parameters
        before = {} if arguments.tune else case_before(arguments.output, case.name, head["machine"], "transformers")
        tried = before["peer"]["cpu_s"] if before else tried_settings(case)
        result = run_case(case, turns(arguments.repetitions, most_threads=most), tried)
        print(case.name, result["times_faster"], {side: result[side]["share_of_gemm_bound"] for side in SIDES})
        if not plausible(result, SIDES):
            raise SystemExit(f"{case.name}: faster than its own matrix products; the machine was disturbed")
        write_case(arguments.output, head, case.name, result, [c.name for c in known])


if __name__ == "__main__":
    with_tcmalloc()
    main()
