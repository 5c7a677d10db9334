"""The fused head against published formulations: time relative to its matrix products, and memory.

    python -m benchmarks.speed.head_speed                  # CPU, bfloat16, minutes; writes bench-head.json
    python -m benchmarks.speed.head_speed --device cuda    # V = 152k, 32K tokens, d = 1536 and 3584
    python -m benchmarks.speed.head_speed --quick          # seconds: shows that the script runs

Every side computes log-probs, entropies and gradients of both from the same tensors, in turns. The bound is the time of
the head's four products into existing memory: logits that are not kept are computed twice. A side that keeps them needs
three. Memory is what a side allocates above its inputs and the two gradients: counted per tensor on a CPU, read from
the allocator on CUDA.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shared import FIGURES, document, parser_of, rounded, with_tcmalloc, write_case
from benchmarks.speed.head_peers import PEERS
from benchmarks.speed.measure import Clock, peak_of
from magicrl.models.head import HeadOptions, logprobs_and_entropies

Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Sizes of one comparison."""

    name: str  # in the JSON
    tokens: int  # response tokens at once
    vocab: int  # rows of the output head
    width: int  # d
    dtype: str = "bfloat16"  # of hidden states and weight
    chunk_tokens: int = 1024  # rows of logits at once, of every side that has chunks
    naive: bool = True  # whether the whole logits of the naive head fit here


CASES = {
    "cpu": (
        Case(name="smollm2-head", tokens=1024, vocab=49152, width=576, chunk_tokens=256),
        Case(name="wide-vocabulary", tokens=512, vocab=151936, width=896, chunk_tokens=128),
        # 32K tokens, d = 3584 and chunks of 1024, all divided by 32: shares of memory are the same
        Case(name="memory-of-32k-tokens", tokens=1024, vocab=151936, width=112, chunk_tokens=32),
    ),
    "cuda": (
        Case(name="d-3584", tokens=32768, vocab=151936, width=3584, naive=False),
        Case(name="d-1536", tokens=32768, vocab=151936, width=1536, naive=False),
        Case(name="d-1536-short", tokens=8192, vocab=151936, width=1536),
    ),
    "quick": (Case(name="quick", tokens=96, vocab=3000, width=32, chunk_tokens=32),),
}


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the library's head on the device's backend."""
    return logprobs_and_entropies(hidden, weight, targets, HeadOptions(chunk_tokens=chunk_tokens))


def tensors(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, targets and a weight whose logits spread like those of a trained model."""
    generator = torch.Generator(device=device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    hidden = torch.randn(case.tokens, case.width, generator=generator, device=device).to(dtype)
    weight = (torch.randn(case.vocab, case.width, generator=generator, device=device) * 2 / case.width**0.5).to(dtype)
    targets = torch.randint(0, case.vocab, (case.tokens,), generator=generator, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def both_passes(head: Head, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a sum of log-probs and entropies."""
    logprobs, entropies = head(hidden, weight, targets)
    found = torch.autograd.grad((logprobs + 0.01 * entropies).sum(), (hidden, weight))
    return found[0], found[1]


def products(case: Case, hidden: Tensor, weight: Tensor) -> float:
    """Return seconds of the four products: logits twice, the gradients of hidden states and of the weight."""
    rows = min(case.tokens, 4 * case.chunk_tokens)
    part, words = hidden.detach()[:rows], weight.detach()
    logits = torch.zeros(rows, case.vocab, dtype=part.dtype, device=part.device)
    into = [torch.zeros_like(part), torch.zeros_like(words)]
    clock = _clock(part.device.type)
    for _ in range(2):
        torch.mm(part, words.T, out=logits)
    torch.mm(logits, words, out=into[0])
    torch.mm(logits.T, part, out=into[1])
    return clock() * case.tokens / rows


def _clock(device: str) -> Callable[[], float]:
    """Return CPU seconds since now on a CPU, or seconds of the device's work on CUDA."""
    if device == "cpu":
        clock = Clock()
        return lambda: clock.read().cpu
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()

    def read() -> float:
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000

    return read


def run_case(case: Case, device: str, repetitions: int) -> dict[str, Any]:
    """Return times, memory and agreement of every side, and the bound."""
    given = tensors(case, device)
    sides = {"magicrl": ours, **{name: peer for name, peer in PEERS.items() if case.naive or name != "naive"}}
    heads: dict[str, Head] = {name: partial(side, chunk_tokens=case.chunk_tokens) for name, side in sides.items()}
    if device == "cpu":
        torch.set_num_threads(1)
    memory = {name: peak_of(partial(both_passes, head, *given), device) for name, head in heads.items()}
    expected = both_passes(heads["verl"], *given)
    times: dict[str, list[float]] = {name: [] for name in heads}
    bound: list[float] = []
    for _ in range(repetitions):
        bound.append(products(case, given[0], given[1]))
        for name, head in heads.items():
            clock = _clock(device)
            both_passes(head, *given)
            times[name].append(clock())
    least = min(bound)
    gradients = sum(t.numel() * t.element_size() for t in given[:2])
    naive_bytes = memory.get("naive", _naive_bytes(case, gradients)) - gradients
    return {
        "tokens": case.tokens, "vocab": case.vocab, "width": case.width, "dtype": case.dtype, "device": device,
        "four_products_s": rounded(least),
        "sides": {
            name: {
                "seconds": rounded(statistics.median(times[name])),
                "times_of_four_products": rounded(statistics.median(times[name]) / least),
                "mib_above_gradients": rounded((memory[name] - gradients) / 2**20),
                "share_of_naive_memory": rounded((memory[name] - gradients) / naive_bytes),
            }
            for name in heads
        },
        "relative_difference_of_gradients": {
            kind: rounded(float((a - b).float().norm() / b.float().norm()))
            for kind, a, b in zip(("hidden", "weight"), both_passes(heads["magicrl"], *given), expected, strict=True)
        },
    }  # fmt: skip


def _naive_bytes(case: Case, gradients: int) -> int:
    """Return the bytes of a naive head that does not fit, counted as ``peak_of`` does where it fits."""
    return case.tokens * case.vocab * (2 + 4 * 4) + gradients


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    default = "bench-head.json" if arguments.device == "cpu" else "bench-head-gpu.json"
    cases = CASES["quick" if arguments.quick else arguments.device]
    head = document({"peers": "written by us after Liger's and verl's published formulations", "threads": 1})
    for case in cases:
        result = run_case(case, arguments.device, arguments.repetitions)
        print(case.name, {name: side["times_of_four_products"] for name, side in result["sides"].items()})
        write_case(arguments.output or FIGURES / default, head, case.name, result, [c.name for c in cases])


if __name__ == "__main__":
    with_tcmalloc()
    main()
