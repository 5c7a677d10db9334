"""The training steps of a small run once more, by a naive loop over its recorded tokens, one response at a time.

It shares no code with the trainer: rewards from the recorded text, Eq. 2.5, rejection, entropy control, Eq. 3.1 by
`slow_loss`, plain autograd through transformers' model in float64, gradient clipping and AdamW by hand.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from magicrl.models.loading import quiet_bars
from magicrl.selfcheck.setup import Setup, metrics, relative_error
from magicrl.selfcheck.slow_loss import (
    Response,
    in_own_precision,
    reference_advantages,
    reference_loss,
    slow_scores,
)
from magicrl.training.checkpoint import load_checkpoint

TAU, LIMIT, CLIP_LOW, CLIP_HIGH, BETA, RATE = 0.9, 24, 0.1, 0.3, 0.05, 0.01
TARGET, STEP, MAXIMUM = 1.3, 0.02, 0.05
BETA1, BETA2, EPS, DECAY, NORM, REUSE = 0.8, 0.95, 0.01, 0.02, 1.2, 2
SETTINGS = (
    f"rollout.temperature={TAU}",
    f"algorithm={{clip_low = {CLIP_LOW}, clip_high = {CLIP_HIGH}, reuse = {REUSE}}}",
    f"entropy={{controller = 'adaptive', target = {TARGET}, step = {STEP}, maximum = {MAXIMUM}, estimator = 'exact'}}",
    f"reference={{mode = 'loss', coefficient = {BETA}}}",
    # eps is large, so that a gradient that is rounding alone moves nothing
    f"optimizer={{learning_rate = {RATE}, warmup_steps = 0, beta1 = {BETA1}, beta2 = {BETA2}, eps = {EPS}, "
    f"weight_decay = {DECAY}, max_grad_norm = {NORM}}}",
    f"stages.0.max_tokens={LIMIT}",
    "checkpoint.keep_last=99",
)
"""What differs from the recipe of the other checks: everything that the loop below reads."""


def whole_steps(setup: Setup, *, steps: int) -> dict[str, float]:
    """Train ``steps`` steps and return the relative error of each figure of each step, by name."""
    run = setup.train("steps", *SETTINGS, f"stages.0.max_steps={steps}")
    rows = [json.loads(line) for line in setup.problems.read_text().splitlines()]
    loop = NaiveLoop(setup.start, [row["answer"] for row in rows])
    errors: dict[str, float] = {}
    for number, values in enumerate(metrics(run), start=1):
        expected = loop.step(pq.read_table(run / "rollouts" / f"step-{number:06d}.parquet").to_pylist())
        for key, value in expected.items():
            # The policy term is a difference of terms of size 1, and no more exact than those.
            errors[f"step {number}: {key}"] = abs(float(values[key]) - value) / max(abs(value), 1.0)
        found = load_checkpoint(run / "checkpoints" / f"step-{number:06d}").tensors
        for kind, tensors in (("weights", loop.weights), ("exp_avg", loop.first), ("exp_avg_sq", loop.second)):
            there = {name: found[f"learner/{kind}/{name}"] for name in tensors}
            errors[f"step {number}: {kind}"] = relative_error(there.values(), list(tensors.values()))
            for name, tensor in there.items():  # so that rounding does not add up over steps
                tensors[name].data.copy_(tensor)
    if not loop.updates:
        raise RuntimeError(f"the run of the check made no update, so that nothing was compared; see {run}")
    return errors


class NaiveLoop:
    """Weights, moments and entropy control of the run, one step after another."""

    def __init__(self, folder: Path, answers: Sequence[str]) -> None:
        with quiet_bars():
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float64)
        self.model = in_own_precision(model)
        self.answers = answers
        self.reference = copy.deepcopy(self.model)
        self.weights = dict(self.model.named_parameters())
        self.first = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.updates = 0
        self.c = 0.0

    def step(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the figures of the step with these recorded responses, and make its updates."""
        groups: dict[int, list[Mapping[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["draw"], []).append(row)
        with torch.no_grad():
            entropies = torch.cat([self.scores(row)[1] for row in rows])
            entropy = float(entropies.mean())
            advantages = {draw: self.advantages(members) for draw, members in groups.items()}
            kept = {draw: found for draw, found in advantages.items() if found is not None}
            rewards = [self.reward(row) for row in rows]
            old = {id(row): self.scores(row)[0] for draw in kept for row in groups[draw]}
            ref = {id(row): self.scores(row, self.reference)[0] for draw in kept for row in groups[draw]}
        alpha = self.c if entropy <= TARGET else 0.0
        self.c = min(max(self.c + STEP * ((entropy < TARGET) - (entropy > TARGET)), 0.0), MAXIMUM)
        members = [(draw, row, a) for draw, found in kept.items() for row, a in zip(groups[draw], found, strict=True)]
        responses = [
            Response(
                group=draw,
                advantage=advantage,
                old=old[id(row)],
                sampler=old[id(row)],
                ref=ref[id(row)],
                mask=torch.ones(len(row["tokens"]), dtype=torch.bool),
            )
            for draw, row, advantage in members
        ]
        told = [self.update(responses, [row for _, row, _ in members], alpha) for _ in range(REUSE if members else 0)]
        return {
            "entropy/exact/mean": entropy,
            "entropy/alpha": alpha,
            "train/accuracy/mean": sum(rewards) / len(rewards),
            "groups/trained": len(kept),
            "learner/sgd_steps": len(told),
            **({"learner/loss": sum(loss for loss, _ in told) / REUSE} if told else {}),
            **({"learner/grad_norm": sum(norm for _, norm in told) / REUSE} if told else {}),
        }

    def reward(self, row: Mapping[str, Any]) -> float:
        """Return 1 for a response that ended by itself with the reference answer, else 0."""
        answer = self.answers[int(row["problem_id"].rpartition("-")[2])]
        return float(row["finish_reason"] == "stop" and row["text"].split()[-1:] == [answer])

    def advantages(self, members: Sequence[Mapping[str, Any]]) -> list[float] | None:
        cuts = [row["finish_reason"] == "length" for row in members]
        return reference_advantages([self.reward(row) for row in members], cuts, mask="none", divide=True)

    def scores(self, row: Mapping[str, Any], model: PreTrainedModel | None = None) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of a recorded response, under the present weights or those of ``model``."""
        return slow_scores(model or self.model, row["prompt_tokens"], row["tokens"], TAU)

    def update(
        self, responses: Sequence[Response], rows: Sequence[Mapping[str, Any]], alpha: float
    ) -> tuple[float, float]:
        """Make one update and return its loss and gradient norm."""
        self.model.zero_grad()
        loss = reference_loss(
            "magic",
            responses,
            [self.scores(row) for row in rows],
            alpha=alpha,
            beta=BETA,
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
            max_tokens=LIMIT,
        )
        loss.backward()
        gradients = {name: w.grad for name, w in self.weights.items() if w.grad is not None}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        self.updates += 1
        with torch.no_grad():
            for name, weight in self.weights.items():
                gradient = gradients[name] * min(1.0, NORM / norm)
                self.first[name].mul_(BETA1).add_((1 - BETA1) * gradient)
                self.second[name].mul_(BETA2).add_((1 - BETA2) * gradient**2)
                first = self.first[name] / (1 - BETA1**self.updates)
                second = self.second[name] / (1 - BETA2**self.updates)
                weight.mul_(1 - RATE * DECAY).sub_(RATE * first / (second.sqrt() + EPS))
        return float(loss.detach()), norm
