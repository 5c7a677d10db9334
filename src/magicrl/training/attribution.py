"""What each token of a training step contributed to its gradient, and what the step's own gradient did to the weights.

A mini-batch's loss depends on the weights through the log-prob and the entropy of each of its tokens alone. With a and
b its derivatives by those two, g_t = a_t grad(logp_t) + b_t grad(H_t) is token t's share of the gradient g = sum_t g_t,
whatever the loss. Its inner product with any direction v needs no gradient of a single token: it is a_t and b_t times
the derivatives of logp_t and H_t along v.

All of it is computed in float64 at the weights that the update began with: gradients by autograd, derivatives along a
direction by a central difference of two forward passes, which gives eight digits and works for every architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from magicrl.algorithms.attribution import gain_weights, own_step
from magicrl.config.schema import TrainConfig
from magicrl.models.loading import load_policy, resolve_device, resolve_dtype
from magicrl.models.packing import PackedBatch
from magicrl.records import ScoredGroup, TrainBatch, TrainSample
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings, MicroBatch, Objective
from magicrl.training.protocols import Controls
from magicrl.training.step import buffer_samples

COPIES = 7
"""Copies of the weights in float64 that an attribution holds in addition to the learner."""
_SHIFT = 1e-5
"""Length of a central difference's half step, as a share of the weights'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One SGD step as it was made: what it learned from, and the learner's state on both sides."""

    batch: TrainBatch
    controls: Controls
    grad_norm: float
    before: Mapping[str, Any]
    after: Mapping[str, Any]


def vector(tensors: Iterable[Tensor]) -> Tensor:
    """One float64 vector of all their values, on the CPU."""
    return torch.cat([tensor.detach().reshape(-1).double().cpu() for tensor in tensors])


def of_state(state: Mapping[str, Any], prefix: str) -> Tensor:
    """Weights or one moment of a learner, ``[P]`` float32, by name; zeros for a moment before the first update."""
    names = weight_names(state)
    found, at = torch.empty(sum(state[f"weights/{name}"].numel() for name in names)), 0
    for name in names:
        values = _flat(state, prefix, name)
        found[at : (at := at + len(values))] = values
    return found


def weight_names(state: Mapping[str, Any]) -> list[str]:
    """Of a learner's weights, in the order of every ``[P]``."""
    return sorted(name.removeprefix("weights/") for name in state if name.startswith("weights/"))


def _flat(state: Mapping[str, Any], prefix: str, name: str) -> Tensor:
    return vector([state.get(f"{prefix}/{name}", torch.zeros_like(state[f"weights/{name}"]))])


def own_part(config: TrainConfig, update: Update) -> Tensor:
    """Return the part of an update of a run of this recipe that its own gradient gives, ``[P]`` float32."""
    optimizer, before, after = config.optimizer, update.before, update.after
    names = weight_names(before)
    # as exact as the learner's own state, at half of the gradients' memory
    found, at = torch.zeros(sum(before[f"weights/{name}"].numel() for name in names)), 0
    for name in names:  # one weight at a time: all of a model's temporaries at once are ten times its size
        part = own_step(
            _flat(before, "exp_avg", name),
            *(_flat(after, prefix, name) for prefix in ("exp_avg", "exp_avg_sq")),
            step=int(after["meta"]["optimizer_steps"]),
            learning_rate=update.controls.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        )
        found[at : (at := at + len(part))] = part
    return found


class Probe:
    """The policy in float64 at given weights.

    Args:
        config: of the run.
        folder: of its start model, whose architecture this is.
    """

    def __init__(self, config: TrainConfig, folder: str) -> None:
        policy = load_policy(folder, dtype="float32", device=resolve_device(config.run.device))
        plain = {"compile": False, "exact": False, "head_dtype": None, "dtype": "float32"}
        # activations of a whole micro-batch in float64 would be most of the memory
        settings = config.model.model_copy(update={**plain, "gradient_checkpointing": True})
        learning = LearnerSettings.of(config.model_copy(update={"model": settings}))
        self._learner = LocalLearner(policy.model, learning, valid_vocab=policy.valid_vocab)
        # only now: transformers' own normalisation, which the learner has replaced, would compute in float32
        self._learner.scorer.model.double()
        self._dtype = resolve_dtype(config.model.dtype)
        self._weights = [t for name, t in sorted(self._learner.state().items()) if name.startswith("weights/")]
        self._shapes = [weight.numel() for weight in self._weights]
        self.objective = Objective(learning)
        self.size = sum(self._shapes)

    @torch.no_grad()
    def put(self, weights: Tensor) -> None:
        """Take the weights, ``[P]``, rounded to the precision in which the run's model computes."""
        for own, given in zip(self._weights, weights.split(self._shapes), strict=True):
            own.copy_(given.to(self._dtype).view_as(own))

    @torch.no_grad()
    def scores(self, samples: Sequence[TrainSample], temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of every token, ``[tokens]`` each."""
        return tuple(torch.cat(parts) for parts in self._ordered(samples, temperature))  # pyright: ignore[reportReturnType]

    def _ordered(self, samples: Sequence[TrainSample], temperature: float) -> tuple[list[Tensor], list[Tensor]]:
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for members, packed in self._learner.scorer.micro_batches(samples):
            both = self._learner.scorer.forward(packed, temperature)
            parts = zip(*(array.cpu().split(packed.response_lengths) for array in both), strict=True)
            found.update(zip(members, parts, strict=True))
        return [found[i][0] for i in range(len(samples))], [found[i][1] for i in range(len(samples))]

    def gradient(
        self, samples: Sequence[TrainSample], by_logprob: Tensor, by_entropy: Tensor, temperature: float
    ) -> Tensor:
        """``[P]`` gradient of sum of by_logprob * log-prob + by_entropy * entropy over the tokens, ``[tokens]``."""
        lengths = [len(sample.tokens) for sample in samples]
        weights = list(zip(by_logprob.split(lengths), by_entropy.split(lengths), strict=True))
        for members, packed in self._learner.scorer.micro_batches(samples):
            logprobs, entropies = self._learner.scorer.forward(packed, temperature)
            a, b = (torch.cat([weights[i][k] for i in members]).to(logprobs.device) for k in (0, 1))
            ((a * logprobs).sum() + (b * entropies).sum()).backward()
        gradients = self._learner.gradients()
        found = vector(gradients[name] for name in sorted(gradients))
        for gradient in gradients.values():
            gradient.zero_()
        return found

    def along(self, direction: Tensor, samples: Sequence[TrainSample], temperature: float) -> tuple[Tensor, Tensor]:
        """Derivatives of log-probs and entropies along ``direction`` (``[P]``), ``[tokens]`` each."""
        length = float(direction.norm())
        if not length:
            zeros = torch.zeros(sum(len(sample.tokens) for sample in samples), dtype=torch.float64)
            return zeros, zeros
        at = [weight.detach().clone() for weight in self._weights]
        half = _SHIFT * float(torch.stack([weight.norm() for weight in at]).norm()) / length
        found: list[tuple[Tensor, Tensor]] = []
        for shift in (half, -half, 0.0):
            with torch.no_grad():
                for own, weight, part in zip(self._weights, at, direction.split(self._shapes), strict=True):
                    own.copy_(weight).add_(part.view_as(own).to(own.device), alpha=shift)
            if shift:
                found.append(self.scores(samples, temperature))
        (up, up_entropy), (down, down_entropy) = found
        return (up - down) / (2 * half), (up_entropy - down_entropy) / (2 * half)

    def derivatives(self, batch: TrainBatch, controls: Controls) -> tuple[Tensor, Tensor]:
        """The loss's derivatives by each token's log-prob and entropy, ``[tokens]`` each."""
        logprobs, entropies = (t.requires_grad_() for t in self.scores(batch.samples, controls.temperature))
        packed = PackedBatch.of(batch.samples, "cpu")
        job = MicroBatch(batch.samples, self.objective.sample_weights(batch), packed)
        self.objective.terms(job, logprobs, entropies, controls, self.objective.statistics(batch)).loss.backward()
        by_logprob, by_entropy = (torch.zeros_like(t) if t.grad is None else t.grad for t in (logprobs, entropies))
        return by_logprob, by_entropy


class Attributor:
    """Adds up what the updates of one step did to the responses of its buffer.

    Args:
        config: of the run, in the step's stage.
        probe: the policy in float64.
        groups: the step's whole buffer.

    Attributes:
        samples: every response of the buffer, in order.
        lengths: their tokens.
        sampled: ``[tokens]`` bool, False where an environment answered.
        gain: ``[tokens]``, what a group's gain weighs each log-prob by.
        temperature: tau.
        norm: ``[tokens]``, share of each token in its gradient's norm; over an update's tokens they sum to that norm.
        grad_norms: of each update so far: recorded, and in float64.
        own: ``[P]`` the own part of the change of the weights so far (`own_part`).
        moved: ``[P]`` all of it.
    """

    def __init__(self, config: TrainConfig, probe: Probe, groups: Sequence[ScoredGroup]) -> None:
        self._config, self._probe, self._groups = config, probe, groups
        self.temperature = config.rollout.temperature
        self.samples = buffer_samples(groups)
        self.lengths = [len(sample.tokens) for sample in self.samples]
        starts = np.cumsum([0, *self.lengths])
        # by identity: samples of a batch share their arrays with the completions
        self._start = {id(s.tokens): int(n) for s, n in zip(self.samples, starts[:-1], strict=True)}
        mask = [np.ones(len(s.tokens), bool) if s.loss_mask is None else s.loss_mask for s in self.samples]
        self.sampled = torch.from_numpy(np.concatenate(mask))
        self.gain = self._gain_weights() * self.sampled
        self.norm = torch.zeros(int(starts[-1]), dtype=torch.float64)
        self.grad_norms: list[tuple[float, float]] = []
        self.own, self.moved = torch.zeros(probe.size), torch.zeros(probe.size)

    def _gain_weights(self) -> Tensor:
        weights: list[Tensor] = []
        lengths = torch.tensor([s.num_loss_tokens for s in self.samples], dtype=torch.float64)
        parts = lengths.split([len(g.rewards) for g in self._groups])
        for group, tokens in zip(self._groups, parts, strict=True):
            rewards, counted = (
                torch.from_numpy(group.rewards.astype(np.float64)),
                torch.from_numpy(group.counted.copy()),
            )
            weights.append(gain_weights(rewards, counted, tokens))
        return torch.cat(weights).repeat_interleave(torch.tensor(self.lengths))

    def by_group(self, values: Tensor) -> list[float]:
        """Sum of values of the buffer's tokens, ``[tokens]``, over each group."""
        sums = [0.0] * len(self._groups)
        for sample, part in zip(self.samples, values.split(self.lengths), strict=True):
            sums[sample.group_index] += float(part.sum())
        return sums

    def add(self, update: Update) -> None:
        """Take one update of the step into account, the first one first."""
        probe, tau, samples = self._probe, self.temperature, update.batch.samples
        before = of_state(update.before, "weights")
        self.own += own_part(self._config, update)
        self.moved += of_state(update.after, "weights") - before
        probe.put(before)
        del before
        by_logprob, by_entropy = probe.derivatives(update.batch, update.controls)
        gradient = probe.gradient(samples, by_logprob, by_entropy, tau)
        norm = float(gradient.norm())
        self.grad_norms.append((update.grad_norm, norm))
        logprob_along, entropy_along = probe.along(gradient, samples, tau)
        shares = (by_logprob * logprob_along + by_entropy * entropy_along) / (norm or 1.0)
        for sample, part in zip(samples, shares.split([len(s.tokens) for s in samples]), strict=True):
            first = self._start[id(sample.tokens)]
            self.norm[first : first + len(part)] += part
