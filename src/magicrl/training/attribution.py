"""What each token and each group of a training step did to the policy, to first order and as it was measured.

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

from magicrl.algorithms.attribution import adamw_parts, dot, gain_weights, token_shares
from magicrl.config.schema import TrainConfig
from magicrl.models.loading import load_policy, resolve_device, resolve_dtype
from magicrl.models.packing import PackedBatch
from magicrl.records import ScoredGroup, TrainBatch, TrainSample
from magicrl.training.batches import buffer_samples
from magicrl.training.learner import LocalLearner
from magicrl.training.objective import LearnerSettings, MicroBatch, Objective
from magicrl.training.protocols import Controls

MEMORY = 2 << 30
"""Bytes of group gradients that are held at once; more groups are taken in several rounds."""
COPIES = 9
"""Copies of the weights in float64 that an attribution holds beside the learner and its group gradients."""
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


@dataclass(kw_only=True, slots=True)
class Attribution:
    """What a step did, group by group in the order of the buffer; tokens are response after response, ``[tokens]``.

    Attributes:
        norm: share of each token in its gradient's norm; over a mini-batch's tokens they sum to that norm.
        entropy: first-order change of the buffer's mean entropy by each token's share of the step, nats.
        influence: ``[groups, groups]``: first-order gain of the column's group by the row's share alone.
        gain_else: ``[groups]``: the same by momentum and weight decay.
        entropy_else: first-order change of the mean entropy by momentum and weight decay.
        grad_norms: of each update: recorded, and in float64.
        own: ``[P]`` the step's own part of the change of the weights.
        moved: ``[P]`` all of it.
    """

    norm: Tensor
    entropy: Tensor
    influence: Tensor
    gain_else: Tensor
    entropy_else: float
    grad_norms: list[tuple[float, float]]
    own: Tensor
    moved: Tensor


def vector(tensors: Iterable[Tensor]) -> Tensor:
    """One float64 vector of all their values, on the CPU."""
    return torch.cat([tensor.detach().reshape(-1).double().cpu() for tensor in tensors])


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Origins:
    """What made up an update, ``[P]`` each: its own gradient, momentum and weight decay, and what scales a gradient."""

    own: Tensor
    rest: Tensor
    scale: Tensor


def origins_of(config: TrainConfig, update: Update) -> Origins:
    """An update of a run of this recipe, by what it came from."""
    optimizer, before, after = config.optimizer, update.before, update.after
    names = weight_names(before)
    size = sum(before[f"weights/{name}"].numel() for name in names)
    # as exact as the learner's own state, at half of the gradients' memory
    own, rest, scale = (torch.zeros(size) for _ in range(3))
    found, at = Origins(own=own, rest=rest, scale=scale), 0
    for name in names:  # one weight at a time: all of a model's temporaries at once are ten times its size
        parts = adamw_parts(
            *(_flat(state, prefix, name) for state, prefix in ((before, "weights"), (before, "exp_avg"))),
            *(_flat(after, prefix, name) for prefix in ("exp_avg", "exp_avg_sq")),
            step=int(after["meta"]["optimizer_steps"]),
            learning_rate=update.controls.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        place = slice(at, at := at + len(parts.own))
        found.own[place], found.rest[place] = parts.own, parts.momentum + parts.decay
        found.scale[place] = parts.scale
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
            zeros = _zeros(sum(len(sample.tokens) for sample in samples))
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
        found: the sums so far.
    """

    def __init__(self, config: TrainConfig, probe: Probe, groups: Sequence[ScoredGroup]) -> None:
        self._config, self._probe, self._groups = config, probe, groups
        self.temperature = config.rollout.temperature
        self.samples = buffer_samples(groups)
        self.lengths = [len(sample.tokens) for sample in self.samples]
        starts = np.cumsum([0, *self.lengths])
        # by identity: samples of a batch share their arrays with the completions
        self._start = {id(s.tokens): int(n) for s, n in zip(self.samples, starts[:-1], strict=True)}
        self._group = {id(s.tokens): s.group_index for s in self.samples}
        mask = [np.ones(len(s.tokens), bool) if s.loss_mask is None else s.loss_mask for s in self.samples]
        self.sampled = torch.from_numpy(np.concatenate(mask))
        self.gain = self._gain_weights() * self.sampled
        count, size = len(groups), int(starts[-1])
        self.found = Attribution(
            norm=_zeros(size),
            entropy=_zeros(size),
            influence=_zeros(count, count),
            gain_else=_zeros(count),
            entropy_else=0.0,
            grad_norms=[],
            own=torch.zeros(probe.size),
            moved=torch.zeros(probe.size),
        )

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

    def _of_group(self, index: int) -> tuple[list[TrainSample], slice]:
        members = [i for i, s in enumerate(self.samples) if s.group_index == index]
        first = sum(self.lengths[: members[0]])
        return [self.samples[i] for i in members], slice(first, first + sum(self.lengths[i] for i in members))

    def by_group(self, values: Tensor) -> list[float]:
        """Sum of values of the buffer's tokens, ``[tokens]``, over each group."""
        return [float(values[self._of_group(index)[1]].sum()) for index in range(len(self._groups))]

    def add(self, update: Update) -> None:
        """Take one update of the step into account, the first one first."""
        probe, tau, batch, found = self._probe, self.temperature, update.batch, self.found
        origins, before = origins_of(self._config, update), of_state(update.before, "weights")
        found.own += origins.own
        found.moved += of_state(update.after, "weights") - before
        probe.put(before)
        del before
        a, b = probe.derivatives(batch, update.controls)
        # the gradient that AdamW saw was clipped to this share
        limit = self._config.optimizer.max_grad_norm
        step = origins.scale.mul_(min(1.0, limit / update.grad_norm if update.grad_norm else 1.0))
        flat = _zeros(len(self.sampled))
        mean = self.sampled.double() / self.sampled.sum()
        entropy = probe.gradient(self.samples, flat, mean, tau)
        found.entropy_else += dot(origins.rest, entropy)
        whole = self._influences(update, a, b, step, origins.rest)
        norm = float(whole.norm())
        found.grad_norms.append((update.grad_norm, norm))
        places = self._places(batch)
        along = probe.along(whole, batch.samples, tau)
        found.norm[places] += token_shares(a, b, *along) / (norm or 1.0)
        along = probe.along(entropy.mul_(step), batch.samples, tau)
        found.entropy[places] -= token_shares(a, b, *along)

    def _places(self, batch: TrainBatch) -> Tensor:
        """Where in the buffer's tokens those of the batch stand."""
        starts = [self._start[id(s.tokens)] for s in batch.samples]
        spans = zip(starts, batch.samples, strict=True)
        return torch.cat([torch.arange(n, n + len(s.tokens)) for n, s in spans])

    def _influences(self, update: Update, a: Tensor, b: Tensor, step: Tensor, rest: Tensor) -> Tensor:
        """Add what each group of the batch did to the gain of every group; the mini-batch's gradient, ``[P]``."""
        probe, tau, found = self._probe, self.temperature, self.found
        lengths = [len(s.tokens) for s in update.batch.samples]
        of_sample = list(zip(update.batch.samples, a.split(lengths), b.split(lengths), strict=True))
        members: dict[int, list[tuple[TrainSample, Tensor, Tensor]]] = {}
        for sample, *weights in of_sample:
            members.setdefault(self._group[id(sample.tokens)], []).append((sample, weights[0], weights[1]))
        whole = _zeros(probe.size)
        at_once = max(1, MEMORY // (8 * probe.size))
        rows = sorted(members)
        for first in range(0, len(rows), at_once):
            block = rows[first : first + at_once]
            moves: list[Tensor] = []
            for row in block:
                samples, by_logprob, by_entropy = zip(*members[row], strict=True)
                gradient = probe.gradient(samples, torch.cat(by_logprob), torch.cat(by_entropy), tau)
                whole += gradient
                moves.append(gradient.mul_(step).neg_())
            # what moves no weight of its own still moves others
            others = [] if first else [rest]
            for column in range(len(self._groups)):
                samples, tokens = self._of_group(column)
                weights = self.gain[tokens]
                if not weights.any():
                    continue  # all its rewards are equal: nothing to gain
                gradient = probe.gradient(samples, weights, torch.zeros_like(weights), tau)
                gained = torch.tensor([dot(move, gradient) for move in (*moves, *others)], dtype=torch.float64)
                found.influence[block, column] += gained[: len(block)]
                found.gain_else[column] += gained[len(block) :].sum()
        return whole
