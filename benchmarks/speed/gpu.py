"""All GPU figures by one command: the head's kernels, the engine, the learner, and the parts of their time.

    python -m benchmarks.speed.gpu                        # one CUDA device; writes benchmarks/results/bench-gpu.json
    python -m benchmarks.speed.gpu --parts engine,learner # some parts; other figures in the JSON are kept
    python -m benchmarks.speed.gpu --device cpu --quick   # tiny sizes into runs/: shows that the script runs

`benchmarks/gpu.sh` runs it on a machine that lacks most of magicrl's packages.

- ``head``: the fused head, other formulations and its four matrix products (``head_speed.py``).
- ``engine``: a 1.5B architecture with and without CUDA graphs: 16 prompts x 16 samples of 1,024 tokens after 32, and
  the last 256 of 16,384 tokens of 64 independent sequences. The first 16,128 tokens are prompts, because decoding all
  of them would take minutes and the last ones are the slowest.
- ``learner``: one update on one response, 1.5B and 7B at 16K and 32K tokens, with and without checkpointing, at 16K
  also with compiled layers: MFU and peak memory against ``magicrl plan``. Cases that do not fit by plan are skipped.
- ``profile``: the time of a decode step and of an update by kind of operator.
- ``tests``: `pytest tests/gpu`; ``ranks``: its test that FSDP2 with one rank equals the learner of one process.
- ``tiles``: the head's Triton kernels by dtype and tiles; in a rehearsal in Triton's interpreter, with float16.
- ``gap``: distance of sampler and learner in bfloat16 and float16, with and without a float32 head.
- ``packs``: attention over responses of uneven length, with separate prompts and with a shared one, by buckets of
  similar length and by torch's variable-length kernel.
- ``runs``: `tiny` and `quickstart` trained on CUDA and on the CPU, with the mean reward of every step.
- ``weights``: copying the learner's weights into the engine.

Weights are random. If a case runs out of memory or fails, the JSON holds the failure and the next case runs; after a
failure other than out-of-memory the exit status is 1. `python -m tools.gpu_page FILE...` adds the figures to
docs/evidence/benchmarks.md.
"""

from __future__ import annotations

import math
import signal
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared import FIGURES, ROOT, document, parser_of, rounded, write_case
from benchmarks.speed import head_speed
from benchmarks.speed.gpu_device import forget_peak, name_of, now, remaining
from benchmarks.speed.gpu_engine import EngineCase, engine_case
from benchmarks.speed.gpu_learner import LearnerCase, learner_case
from benchmarks.speed.gpu_parts import PackCase, gap_case, pack_case, pytest_case, run_case, tile_case, weight_case
from benchmarks.speed.gpu_profile import decode_profile, update_profile
from benchmarks.speed.head_speed import Case as HeadCase
from magicrl.models.head import Tiles
from magicrl.planning.shapes import ModelShape, load_shape

PARTS = ("tests", "head", "tiles", "learner", "ranks", "engine", "profile", "gap", "packs", "runs", "weights")
OTHERS = (Tiles(words=128), Tiles(words=256, stages=4), Tiles(words=256, group=8))
Job = Callable[[], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Cases of one size of machine."""

    heads: str  # cases of ``head_speed.py``
    engines: tuple[EngineCase, ...]  # each with and without graphs
    learners: tuple[LearnerCase, ...]  # each with and without checkpointing
    decoding: tuple[EngineCase, ...]  # engine cases whose steps are profiled
    update: LearnerCase  # learner case that is profiled
    tiles: tuple[tuple[HeadCase, tuple[Tiles | None, ...]], ...]  # of the head's kernels; None: those of the dtype
    gap: EngineCase  # whose samples the learner scores
    packs: tuple[PackCase, ...]
    recipes: tuple[str, ...]  # trained on the device and on the CPU
    settings: tuple[str, ...]  # of those runs
    weights: tuple[LearnerCase, EngineCase]
    side: int  # of the plain matrix product
    copied: int  # bytes of the plain copy


def full() -> Plan:
    """Return the cases for a device of 80 GB or more."""
    small, large = load_shape("DeepSeek-R1-Distill-Qwen-1.5B"), load_shape("Qwen2.5-Math-7B")

    def engine(name: str, prompts: int, samples: int, prompt_tokens: int, generated: int, generations: int = 1) -> Any:
        return EngineCase(
            name=name, shape=small, prompts=prompts, samples=samples, prompt_tokens=prompt_tokens, generated=generated,
            generations=generations,
        )  # fmt: skip

    learners = [
        LearnerCase(name=f"{size}-{name}{suffix}", shape=shape, tokens=tokens, checkpointing=bool(suffix))
        for size, shape in (("1.5b", small), ("7b", large))
        for name, tokens in (("16k", 16384), ("32k", 32768))
        for suffix in ("", "-checkpointed")
    ]
    learners += [
        replace(case, name=f"{case.name}-compiled", compiled=True) for case in learners if case.tokens == 16384
    ]
    return Plan(
        heads="cuda",
        engines=(engine("1k", 16, 16, 32, 1024, generations=2), engine("16k", 64, 1, 16128, 256)),
        learners=tuple(learners),
        decoding=(engine("1k", 256, 1, 512, 32), engine("16k", 64, 1, 16352, 32)),
        update=learners[0],
        tiles=(
            (HeadCase(name="bfloat16", tokens=32768, vocab=151936, width=1536), (None, *OTHERS)),
            (HeadCase(name="bfloat16-3584", tokens=32768, vocab=151936, width=3584), (None, *OTHERS)),
            (HeadCase(name="float16", tokens=32768, vocab=151936, width=1536, dtype="float16"), (None,)),
            (
                HeadCase(name="float32", tokens=4096, vocab=151936, width=1536, dtype="float32"),
                (None, Tiles(words=128, inner=32)),
            ),
        ),
        gap=engine("1k", 16, 4, 32, 512),
        packs=(
            PackCase(name="10k", responses=16, median=600, longest=8192, heads=12, kv_heads=2, head_dim=128),
            PackCase(name="42k", responses=16, median=2500, longest=32768, heads=28, kv_heads=4, head_dim=128),
            PackCase(
                name="shared", responses=16, median=600, longest=4096, heads=12, kv_heads=2, head_dim=128, prompt=1024
            ),
        ),
        recipes=("tiny", "quickstart"),
        settings=(),
        weights=(learners[0], replace(engine("copy", 1, 1, 32, 32), cache_mb=1024)),
        side=8192,
        copied=4 << 30,
    )


def quick() -> Plan:
    """Return tiny cases for a CPU."""
    shape = ModelShape(
        name="tiny", hidden=32, intermediate=64, layers=2, heads=2, kv_heads=1, head_dim=16, vocabulary=300, tied=True,
        qkv_bias=True,
    )  # fmt: skip
    engine = EngineCase(
        name="tiny", shape=shape, prompts=2, samples=2, prompt_tokens=8, generated=12, generations=2, cache_mb=64
    )
    learner = LearnerCase(name="tiny", shape=shape, tokens=48, checkpointing=False, updates=1)
    adapters = LearnerCase(name="tiny-lora", shape=shape, tokens=48, checkpointing=True, lora=True, updates=1)
    compiled = replace(learner, name="tiny-compiled", compiled=True)
    return Plan(
        heads="quick", engines=(engine,), learners=(learner, adapters, compiled), decoding=(engine,), update=learner,
        tiles=((HeadCase(name="float16", tokens=40, vocab=300, width=64, dtype="float16"), (None,)),),
        packs=tuple(
            PackCase(name=n, responses=4, median=20, longest=60, heads=2, kv_heads=1, head_dim=16, prompt=prompt)
            for n, prompt in (("tiny", 0), ("tiny-shared", 30))
        ),
        gap=engine, recipes=("tiny",), settings=("stages.0.max_steps=2",), weights=(learner, engine), side=64,
        copied=1 << 16,
    )  # fmt: skip


def jobs(plan: Plan, device: str) -> dict[str, Job]:
    """Yield every case by its name in the JSON, which begins with the name of its part."""
    found: dict[str, Job] = {
        f"head-{case.name}": partial(head_speed.run_case, case, device, 5) for case in head_speed.CASES[plan.heads]
    }
    found["tests-gpu"] = partial(pytest_case, "tests/gpu", "--ignore=tests/gpu/test_one_rank.py")
    found["ranks-one"] = partial(pytest_case, "tests/gpu/test_one_rank.py")
    for case, choices in plan.tiles:
        for tiles in choices:
            size = "own" if tiles is None else f"{tiles.tokens}x{tiles.words}x{tiles.stages}-{tiles.group}"
            found[f"tiles-{case.name}-{size}"] = partial(tile_case, case, tiles, device)
    for dtype in ("bfloat16", "float16"):
        for suffix, wide in (("", False), ("-float32-head", True)):
            found[f"gap-{dtype}{suffix}"] = partial(gap_case, plan.gap, dtype, device, float32_head=wide)
    for case in plan.packs:
        for way in ("varlen", "buckets"):
            found[f"packs-{case.name}-{way}"] = partial(pack_case, case, way, device)
    for recipe in plan.recipes:
        devices = tuple(dict.fromkeys((device, "cpu")))
        found[f"runs-{recipe}"] = partial(run_case, recipe, devices, plan.settings)
    found["weights-copied"] = partial(weight_case, *plan.weights, device, plan.copied)
    for case in plan.engines:
        for mode, static in (("graphs", True), ("plain", False)):
            found[f"engine-{case.name}-{mode}"] = partial(
                engine_case, case, device, plan.side, plan.copied, static=static
            )
    for case in plan.learners:
        found[f"learner-{case.name}"] = partial(learner_case, case, device, plan.side)
    for case in plan.decoding:
        found[f"profile-decode-{case.name}"] = partial(decode_profile, case, device)
    found["profile-update"] = partial(update_profile, plan.update, device)
    return found


@contextmanager
def limited() -> Generator[None]:
    """Raise ``TimeoutError`` inside this context when the time of `remaining` is over."""

    def over(*_: object) -> None:
        raise TimeoutError("stopped at the end of the part's time")

    seconds = remaining()
    if math.isinf(seconds):
        yield
        return
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempted(job: Job) -> dict[str, Any]:
    """Return the figures of a case, or its failure, so that the other cases still run."""
    if remaining() <= 0:
        return {"failed": "no time of the part was left"}
    try:
        with limited():
            return job()
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0]}
    except Exception as error:  # noqa: BLE001 - device time is dear: the other cases are measured all the same
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; the output is in runs/ by default")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated parts (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="the JSON; default: benchmarks/results/bench-gpu.json")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--parts: {', '.join(unknown)} is none of {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --device cpu --quick shows that the script runs")
    output = arguments.output or (ROOT / "runs" if arguments.quick else FIGURES) / "bench-gpu.json"
    every = jobs(quick() if arguments.quick else full(), arguments.device)
    packages = ["triton"] if arguments.device == "cuda" else []
    head = document({"device": name_of(arguments.device), "cuda": torch.version.cuda}, packages)
    failed: list[str] = []
    for name, job in every.items():
        if name.partition("-")[0] not in parts:
            continue
        forget_peak(arguments.device)
        start = now(arguments.device)
        result = attempted(job)
        result["seconds_of_case"] = rounded(now(arguments.device) - start)
        print(name, result, flush=True)
        write_case(output, head, name, result, list(every))
        failed += [name] if "failed" in result else []
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
