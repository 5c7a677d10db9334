"""Further parts of `gpu.py`: tests, tiles, packs, precision, weights, whole runs."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from model_cases import samples_of
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.shared import ROOT, rounded
from benchmarks.speed.gpu_device import copy_rate, forget_peak, name_of, now, peak_gib, random_model, remaining
from benchmarks.speed.gpu_engine import EngineCase, ask, engine_model, make_engine
from benchmarks.speed.gpu_learner import LearnerCase, make_learner
from benchmarks.speed.head_speed import Case as HeadCase
from benchmarks.speed.head_speed import tensors
from benchmarks.speed.models import long_tailed
from magicrl.config.model_schema import ModelConfig
from magicrl.models.attention import capability_of
from magicrl.models.head import HeadOptions, Tiles, logprobs_and_entropies
from magicrl.models.loading import resolve_dtype
from magicrl.models.packing import PackedContext, SharedLayout, SharedPromptContext
from magicrl.models.scorer import PolicyScorer

LATE = "stopped at the end of the part's time"
Precision = Literal["bfloat16", "float16"]


def seconds_of(action: Callable[[], object], device: str, times: int = 3) -> float:
    """Return the least time of some calls, after one that compiles."""
    action()
    found: list[float] = []
    for _ in range(times):
        start = now(device)
        action()
        found.append(now(device) - start)
    return min(found)


def ended(program: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a program, or None if it was stopped in time to write the part's figures."""
    left = remaining() - 25
    try:
        return program.wait(None if math.isinf(left) else max(0.0, left))
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGINT)  # pytest and a run then write what they have
    try:
        program.wait(10)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
    return None


def pytest_case(*paths: str) -> dict[str, Any]:
    """Return pytest's counts for these paths; ``failed`` names the failed tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-rs", f"--junitxml={report}", *paths]
        status = ended(subprocess.Popen(command, cwd=ROOT))
        if not report.exists():
            return {"failed": f"pytest: {LATE if status is None else status}, and no report"}
        suite = next(xml.parse(report).getroot().iter("testsuite"))
    red = [f"{case.get('classname')}::{case.get('name')}" for case in suite.iter("testcase")
           if case.find("failure") is not None or case.find("error") is not None]  # fmt: skip
    found: dict[str, Any] = {key: int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors")}
    if status == 0:
        return found
    return {**found, "failed": ", ".join(red) or f"pytest: {LATE if status is None else status}"}


def tile_case(case: HeadCase, tiles: Tiles | None, device: str) -> dict[str, Any]:
    """Return seconds of the Triton head's two passes with these tiles; None selects those of the dtype."""
    hidden, weight, targets = tensors(case, device)
    options = HeadOptions(backend="triton", chunk_tokens=case.chunk_tokens, tiles=tiles)

    def forward() -> Tensor:
        return sum(logprobs_and_entropies(hidden, weight, targets, options), torch.zeros((), device=device)).sum()

    def both() -> object:
        return torch.autograd.grad(forward(), (hidden, weight))

    product = 2 * case.tokens * case.vocab * case.width
    first, whole = seconds_of(forward, device), seconds_of(both, device)
    return {
        "device": name_of(device), "dtype": case.dtype, "tokens": case.tokens, "width": case.width,
        "forward_s": rounded(first), "both_s": rounded(whole), "forward_tflop_per_s": rounded(product / first / 1e12),
        "both_tflop_per_s": rounded(4 * product / whole / 1e12),
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PackCase:
    """Responses of uneven length in one micro-batch."""

    name: str
    responses: int
    median: int  # of their tokens
    longest: int
    heads: int
    kv_heads: int
    head_dim: int
    prompt: int = 0  # tokens of a prompt that all responses share; 0: each is a separate sequence

    def context(self, device: str) -> tuple[PackedContext | SharedPromptContext, int]:
        """Return the micro-batch and its number of tokens."""
        lengths = tuple(int(length) for length in long_tailed(self.responses, self.median, self.longest))
        if not self.prompt:
            return PackedContext(lengths, device), sum(lengths)
        layout = SharedLayout(prompts=(self.prompt,), owners=(0,) * len(lengths), responses=lengths)
        return SharedPromptContext(layout, device), self.prompt + sum(lengths)


def pack_case(case: PackCase, way: Literal["buckets", "varlen"], device: str) -> dict[str, Any]:
    """Return one layer's attention, forward and backward, by length buckets or by torch's kernel."""
    if way == "varlen" and capability_of(torch.device(device)) is None:
        return {"device": name_of(device), "left_out": "torch's kernel is for CUDA alone"}
    context, tokens = case.context(device)
    generator = torch.Generator(device=device).manual_seed(0)

    def made(heads: int) -> Tensor:
        # layout of projections: heads after tokens
        x = torch.randn(1, tokens, heads, case.head_dim, generator=generator, device=device)
        return x.bfloat16().transpose(1, 2).requires_grad_()

    leaves = query, key, value = made(case.heads), made(case.kv_heads), made(case.kv_heads)
    attend = getattr(context, way).attend
    forget_peak(device)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(query, key, value, case.head_dim**-0.5).sum(), leaves)

    seconds = seconds_of(gradients, device)
    return {
        "device": name_of(device), "tokens": tokens, "seconds": rounded(seconds), "peak_memory_gib": peak_gib(device),
        "norms_of_gradients": [rounded(float(grad.float().norm())) for grad in gradients()],
    }  # fmt: skip


def gap(learned: NDArray[Any], reported: NDArray[Any]) -> dict[str, float]:
    """Return distances of log-probs ``[tokens]``; the KL of sampler to learner is the k3 estimate, r - 1 - log r."""
    difference = learned.astype(np.float64) - reported
    ratio = np.exp(difference)
    return {
        "tokens": len(difference),
        "mean_gap": rounded(float(np.abs(difference).mean())),
        "max_gap": rounded(float(np.abs(difference).max())),
        "outside": rounded(float(((ratio < 0.9) | (ratio > 1.1)).mean())),
        "kl": rounded(float((ratio - 1 - difference).mean())),
    }


def gap_case(case: EngineCase, dtype: Precision, device: str, *, float32_head: bool) -> dict[str, Any]:
    """Return the distance of log-probs of sampler and learner, on one model with random weights."""
    sampler = engine_model(case, device, resolve_dtype(dtype))
    engine = make_engine(case, device, static=device == "cuda", model=sampler, float32_head=float32_head)
    ask(engine, case, 0)
    samples = samples_of(list(engine.finished()))
    engine.close()
    model = random_model(case.shape, resolve_dtype(dtype), device).eval()
    head_dtype = "float32" if float32_head else None
    scorer = PolicyScorer(model, ModelConfig(micro_batch_tokens=8192, head_dtype=head_dtype))
    learned, _ = scorer.score(samples, 1.0)
    told = np.concatenate([sample.sampler_logprobs for sample in samples])
    return {"device": name_of(device), "model": case.shape.name, **gap(np.concatenate(learned), told)}


def weight_case(learner_case: LearnerCase, engine_case: EngineCase, device: str, size: int) -> dict[str, Any]:
    """Return seconds to copy the learner's weights into the in-process engine, and of a plain copy of these bytes."""
    learner = make_learner(learner_case, device, lora=False)
    served = engine_model(engine_case, device)
    engine = make_engine(engine_case, device, static=device == "cuda", model=served)
    weights = learner.weights()
    moved = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    seconds = seconds_of(lambda: engine.load_weights(learner.weights(), 1), device)
    equal = all(torch.equal(weights[name].to(there.dtype), there) for name, there in served.named_parameters())
    engine.close()
    found = {"device": name_of(device), "gib": rounded(moved / 2**30), "seconds": rounded(seconds),
             "times_of_a_copy": rounded(seconds / (2 * moved / copy_rate(device, size)))}  # fmt: skip
    return found if equal else {**found, "failed": "the engine has other weights than the learner"}


def run_case(recipe: str, devices: Sequence[str], settings: Sequence[str] = ()) -> dict[str, Any]:
    """Train a shipped recipe on these devices at once; return the mean reward of every step."""
    with tempfile.TemporaryDirectory() as folder:
        running: dict[str, subprocess.Popen[bytes]] = {}
        for device in devices:
            command = [sys.executable, "-m", "magicrl", "train", recipe, "--output", f"{folder}/{device}"]
            for setting in (f"run.device={device}", *settings):
                command += ["--set", setting]
            hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
            running[device] = subprocess.Popen(command, cwd=folder, env={**os.environ, **hidden})
        found: dict[str, Any] = {}
        for device, process in running.items():
            status = ended(process)
            curve = _curve(Path(folder) / device / "metrics.jsonl")
            found[device] = {"exit": LATE if status is None else status, **curve}
    # 3: nothing was learned, which is allowed for a shortened run
    wrong = [f"{device}: {one['exit']}" for device, one in found.items() if one["exit"] not in (0, 3)]
    return {"runs": found, **({"failed": ", ".join(wrong)} if wrong else {})}


def _curve(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {"reward": [rounded(line["values"]["train/reward/mean"]) for line in lines]}
