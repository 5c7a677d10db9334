"""Learning: one update of magicrl's learner and one of TRL's GRPO trainer, in one process, in turns.

    python -m benchmarks.speed.learner_speed            # minutes; writes benchmarks/results/bench-learner.json
    python -m benchmarks.speed.learner_speed --quick    # seconds, a tiny model: shows that the script runs
    python -m benchmarks.speed.learner_speed --tune     # one update for each setting of both; bench-learner-tuning.json

Both have the same weights, prompts, responses, rewards, loss (mean over all response tokens of the clipped surrogate,
no KL term, no entropy bonus) and AdamW. The first gradients are compared. Memory is that of a process for each side.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.shared import FIGURES, document, rounded, with_tcmalloc, write_case
from benchmarks.speed.learner_cases import CASES, QUICK, Case, Response, samples_of
from benchmarks.speed.measure import (
    GemmBound,
    PeakMemory,
    Times,
    Turn,
    chosen,
    plausible,
    ratio,
    speed_parser,
    summary,
    timed,
    turns,
)
from benchmarks.speed.models import TINY, model_folder, parameters, plain_model
from benchmarks.speed.rollout_speed import case_before
from benchmarks.speed.trl_peer import PeerHooks, PeerSettings, learn
from magicrl.config.algorithm_schema import AlgorithmConfig
from magicrl.config.model_schema import ModelConfig, OptimizerConfig
from magicrl.models.loading import load_policy
from magicrl.models.products import widens_bfloat16
from magicrl.records import TrainBatch
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Controls

SIDES = ("magicrl", "trl")
LEARNING_RATE = 1e-6
MAX_GRAD_NORM = 1000.0  # both sides compute the norm and never reach it, so gradients can be compared
CONTROLS = Controls(clip_low=0.2, clip_high=0.28, temperature=1.0, learning_rate=LEARNING_RATE)


class Ours:
    """The learner as the training loop uses it."""

    def __init__(self, case: Case, *, exact: bool = False) -> None:
        loaded = load_policy(model_folder(case.model), dtype="float32")
        self.responses = case.responses()
        self.batch = TrainBatch.of(samples_of(self.responses))
        self.learner = LocalLearner(
            loaded.model,
            LearnerSettings(
                algorithm=AlgorithmConfig(loss="dapo"),
                optimizer=OptimizerConfig(learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM),
                model=ModelConfig(dtype=case.dtype, micro_batch_tokens=case.micro_batch_tokens, exact=exact),
            ),
        )

    def update(self) -> Mapping[str, float]:
        return self.learner.update(self.batch, CONTROLS)

    def gradients(self) -> dict[str, Tensor]:
        """Return the batch's gradients at the current weights, without changing them."""
        self.learner.accumulate(self.batch.samples, self.learner.objective.sample_weights(self.batch), CONTROLS)
        found = {name: gradient.clone() for name, gradient in self.learner.gradients().items()}
        self.learner.restore(self.learner.state())  # discards accumulated gradients
        return found


class _Alternate(PeerHooks):
    """Hooks that run our update before or after TRL's in turn, with its thread count, and the bound."""

    def __init__(self, order: Sequence[Turn], ours: Ours, bound: Callable[[], dict[str, float]]) -> None:
        self._order, self._ours, self._bound = order, ours, bound
        self._our_gradients = ours.gradients()
        self.times: dict[str, list[tuple[Turn, Times]]] = {"magicrl": [], "trl": []}
        self.agreement: dict[str, float] = {}
        self.our_loss = float("nan")

    def before(self, number: int) -> None:
        turn = self._order[number]
        if turn.threads == 1:
            self._bound()
        if number % 2 == 0:
            self._run_ours(turn)
        torch.set_num_threads(turn.threads)

    def gradients(self, number: int, model: Any) -> None:
        if number == 0:
            theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            self.agreement = agreement(self._our_gradients, theirs)
            self._our_gradients = {}

    def after(self, number: int, times: Times) -> None:
        turn = self._order[number]
        self.times["trl"].append((turn, times))
        if number % 2:
            self._run_ours(turn)

    def _run_ours(self, turn: Turn) -> None:
        spent, values = timed(self._ours.update, turn.threads)
        if not self.times["magicrl"]:
            self.our_loss = values["loss"]
        self.times["magicrl"].append((turn, spent))


def agreement(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """Return cosine and relative L2 difference of two gradients over all parameters, and both norms."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())[:4]
    pairs = [(ours[name].double().flatten(), theirs[name].double().flatten()) for name in ours]
    product = sum(float(a @ b) for a, b in pairs)
    norms = [math.sqrt(sum(float(pair[side] @ pair[side]) for pair in pairs)) for side in (0, 1)]
    difference = math.sqrt(sum(float((a - b).square().sum()) for a, b in pairs))
    return {
        "cosine": product / (norms[0] * norms[1]),
        "relative_difference": rounded(difference / norms[1]),
        "norm_magicrl": rounded(norms[0]),
        "norm_trl": rounded(norms[1]),
    }


def run_case(case: Case, order: Sequence[Turn], before: Mapping[str, Any], *, memory: bool) -> dict[str, Any]:
    """Measure both sides in turns, with the bound before each turn and, with ``memory``, the memory of each side.

    The peer's memory is that of ``before`` if it is of this case, because its compilation takes minutes. Memory is
    measured first: later this process holds both models, and a child's model may be too much.
    """
    known = {"trl": before["trl"]["memory"]} if before.get("case") == json.loads(json.dumps(asdict(case))) else {}
    sides: dict[str, Any] = {}
    for name in SIDES:
        sides[name] = {"memory": (known.get(name) or memory_in_child(case, name)) if memory else None}
    model = plain_model(model_folder(case.model), case.dtype)
    ours, products = Ours(case), GemmBound(model)
    hooks = _Alternate(order, ours, lambda: bound_seconds(case, products))
    log = peer_updates(case, ours.responses, hooks, updates=len(order))
    bound = bound_seconds(case, products)
    responses = ours.responses
    tokens = sum(len(r.prompt_tokens) + len(r.tokens) for r in responses)
    work = {"responses": len(responses), "response_tokens": sum(len(r.tokens) for r in responses), "tokens": tokens}
    for name, side in sides.items():
        found = summary(hooks.times[name], work)
        side["measured"] = found
        side["share_of_gemm_bound"] = rounded(bound["total_s"] / found["threads_1"]["cpu_s"])
    return {
        "case": asdict(case),
        "parameters": parameters(model),
        **work,
        "padded_tokens_of_trl": len(responses) * max(len(r.prompt_tokens) + len(r.tokens) for r in responses),
        "bound": {key: rounded(value) for key, value in bound.items()},
        "parts": parts_of(ours.update),
        "gradients": hooks.agreement,
        "loss": {"magicrl": hooks.our_loss, "trl": float(log[0]["loss"])},
        **sides,
        "times_faster": ratio(sides["trl"]["measured"], sides["magicrl"]["measured"]),
    }


PARTS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("magicrl::attend_row", "GeneratedBackwardFor_magicrl_attend_row", "aten::_scaled_dot_product"),
    "optimizer": ("aten::_fused_adamw_", "magicrl::adamw"),
    "norms, gates, rotations": ("_Norm", "_Gated", "_Rotated"),
    "copies": ("aten::copy_", "aten::fill_", "aten::cat", "aten::index_select"),
}
"""Kinds of operators by the beginnings of their names; `attend_row`'s forward pass is called by its torch name."""


def parts_of(update: Callable[[], object]) -> dict[str, float]:
    """Return shares of one update's CPU time in one thread by kind of operator; the remainder is the rest."""
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        update()
    spent = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    whole = sum(spent.values())
    shares = {
        part: sum(time for key, time in spent.items() if key.startswith(names)) / whole for part, names in PARTS.items()
    }
    return {part: rounded(share) for part, share in {**shares, "the rest": 1 - sum(shares.values())}.items()}


def peer_updates(case: Case, responses: Sequence[Response], hooks: PeerHooks, updates: int) -> list[dict[str, Any]]:
    """Run TRL's updates in the case's precision and return its log."""
    settings = PeerSettings(
        bf16=case.dtype == "bfloat16",
        per_device_batch=case.peer_batch,
        compiled=case.peer_compiled,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
    )
    folder = model_folder(case.model)
    with tempfile.TemporaryDirectory() as scratch:
        return learn(
            plain_model(folder, "float32"), folder, responses, settings, hooks, updates=updates, scratch=Path(scratch)
        )


def bound_seconds(case: Case, bound: GemmBound) -> dict[str, float]:
    """Return CPU seconds in one thread of the products of one update, from the least times seen so far."""
    body, head = least_tokens(case)
    layers, output = bound.training(body)
    seconds = layers * body + output * head
    return {"total_s": seconds, "gflops": bound.flops(body, head, backward=True) / seconds / 1e9}


def least_tokens(case: Case) -> tuple[int, int]:
    """Return the tokens of layers and head: no padding, a prompt once per group, responses in the head."""
    responses = case.responses()
    head = sum(len(r.tokens) for r in responses)
    prompts = {r.group: len(r.prompt_tokens) for r in responses}
    return head - len(responses) + sum(prompts.values()), head


class _Second(PeerHooks):
    """Hooks that measure the second update, when moments exist."""

    def __init__(self) -> None:
        self.peak = PeakMemory()
        self.highest = 0

    def before(self, number: int) -> None:
        if number == 1:
            self.peak.start()

    def after(self, number: int, times: Times) -> None:
        if number == 1:
            self.highest = self.peak.read()


def memory_of(case: Case, side: str) -> dict[str, float]:
    """Return MiB of one side's second update in this process: peak resident size, and its part above the state.

    ``above_state_mib`` is the peak minus what the process held before model, weights, gradients and moments.
    """
    base = psutil.Process().memory_info().rss
    folder = model_folder(case.model)
    count = parameters(plain_model(folder, "float32"))
    if side == "magicrl":
        ours = Ours(case)
        ours.update()
        peak = PeakMemory()
        peak.start()
        ours.update()
        highest = peak.read()
    else:
        hooks = _Second()
        peer_updates(case, case.responses(), hooks, updates=2)
        highest = hooks.highest
    # float32 weights (masters), gradients and two moments; ours computes in a rounded copy in bfloat16
    state = count * (16 + (2 if side == "magicrl" and case.dtype == "bfloat16" else 0))
    return {
        "peak_mib": rounded(highest / 2**20),
        "before_model_mib": rounded(base / 2**20),
        "state_mib": rounded(state / 2**20),
        "above_state_mib": rounded((highest - base - state) / 2**20),
    }


def memory_in_child(case: Case, side: str) -> dict[str, float]:
    """Run ``memory_of`` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.speed.learner_speed", "--memory-of", side, "--case", case.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {side} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def tune(case: Case) -> dict[str, Any]:
    """Return CPU seconds of one update in one thread, the last of some, for several settings of both sides."""
    rows: dict[str, float] = {}
    responses = Ours(case).responses
    sizes = [size for size in (2, 4, 8) if len(responses) % size == 0]
    for batch, compiled in ((size, compiled) for compiled in (False, True) for size in sizes):
        hooks = _Last()
        torch.set_num_threads(1)
        peer_updates(replace(case, peer_batch=batch, peer_compiled=compiled), responses, hooks, updates=3)
        rows[f"trl_batch_{batch}{'_compiled' if compiled else ''}"] = rounded(hooks.times.cpu)
    for budget in (512, 1024, 2048):
        ours = Ours(replace(case, micro_batch_tokens=budget))
        timed(ours.update, 1)
        rows[f"magicrl_micro_batch_{budget}"] = rounded(timed(ours.update, 1)[0].cpu)
    return {"case": asdict(case), "cpu_s": rows}


class _Last(PeerHooks):
    times = Times(cpu=0.0, wall=0.0)

    def after(self, number: int, times: Times) -> None:
        self.times = times


def main() -> None:
    parser = speed_parser(__doc__)
    parser.add_argument("--tune", action="store_true", help="compare settings instead of sides")
    parser.add_argument("--no-memory", action="store_true", help="leave out the two processes that measure memory")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--memory-of", choices=("magicrl", "trl"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        (case,) = chosen((*CASES, *QUICK), arguments.case)
        print(json.dumps(memory_of(case, arguments.memory_of)))
        return
    known = QUICK if arguments.quick else CASES
    output = arguments.output or FIGURES / ("bench-learner-tuning.json" if arguments.tune else "bench-learner.json")
    head = document(SETTINGS | {"repetitions": arguments.repetitions}, packages=("trl", "accelerate", "datasets"))
    impossible: list[str] = []
    for case in chosen(known, arguments.case):
        slower = case.model != TINY and (case.dtype == "bfloat16") == widens_bfloat16()
        if slower and case.name not in (arguments.case or ()):
            print(f"{case.name}: left out, since this CPU is slower in {case.dtype}; --case {case.name} measures it")
            continue
        if arguments.tune:
            result = tune(case)
            print(case.name, result["cpu_s"])
        else:
            # float32 runs hold the same tensors as bfloat16 runs, at twice the size
            memory = case.dtype == "bfloat16" and not arguments.no_memory
            order = turns(arguments.repetitions, most_threads=1 if arguments.one_thread or case.model == TINY else None)
            before = case_before(output, case.name, head["machine"], "trl")
            result = run_case(case, order, before, memory=memory)
            print(case.name, result["times_faster"], result["gradients"])
        if not arguments.tune and not plausible(result, SIDES):
            impossible.append(case.name)  # not written; the other cases still run
            continue
        write_case(output, head, case.name, result, [c.name for c in known])
    if impossible:
        raise SystemExit(f"{', '.join(impossible)}: faster than the matrix products; the machine was disturbed")


SETTINGS = {
    "loss": "mean over all response tokens of the clipped surrogate (dapo in both), one update on-policy, no KL term",
    "optimizer": "AdamW, float32 weights and moments on both sides, gradient norm taken, never clipped",
    "timed": "forward, loss, backward, clipping, AdamW; on TRL's side without generation, rewards and advantages",
    "trl": "gradient checkpointing off, sdpa attention, bf16 as autocast (its default); responses by rollout_func",
    "trl_not_used": "padding-free batches (its GRPO trainer has none); Liger and Hub kernels (Triton, no CPU)",
    "bound": "the model's own linear layers and head at one thread, forward and backward, no padding, no attention",
}


if __name__ == "__main__":
    with_tcmalloc()
    main()
