"""One training step of MAGIC (recipe, section 3): sample, verify, measure entropy, reject, advantages, update.

`Trainer.step` is the algorithm in the recipe's order. The engine, the verifier and the learner are behind protocols, so
one step serves all of them. The functions at the end of the file turn scored groups into mini-batches. ``metrics.py``
computes the step's metrics. ``session.py`` runs the stages, evaluations and checkpoints around it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from magicrl.algorithms.advantages import (
    Advantage,
    AdvantageError,
    AdvantageMask,
    MinibatchMode,
    advantage_of,
    group_relative,
    reads_parts,
    reject_zero_advantage,
    scored_advantages,
    split_minibatches,
)
from magicrl.algorithms.entropy import (
    EntropyController,
    EntropyEstimate,
    EntropyEstimator,
    coefficients_of,
    mean_entropy,
    measure_entropy,
)
from magicrl.algorithms.token_weights import Correction
from magicrl.config.schema import StageConfig, TrainConfig
from magicrl.data.sampler import PromptSampler
from magicrl.records import (
    FloatArray,
    Problem,
    RolloutGroup,
    ScoredGroup,
    StepMetrics,
    TokenArray,
    TrainBatch,
    TrainSample,
)
from magicrl.registry import is_builtin
from magicrl.rollout.protocol import RolloutEngine
from magicrl.training.diagnosis import answers_in, diagnose, judging_of, unjudged_text
from magicrl.training.meters import StalenessMeter, StepClock, Values
from magicrl.training.metrics import entropy_metrics, first_reason, step_metrics
from magicrl.training.objective import LearnerSettings, Objective, entropy_controller, resolve_setting
from magicrl.training.protocols import Controls, Learner, NotFiniteError, Reference, TrainingStopped
from magicrl.training.rollout_queue import RolloutQueue
from magicrl.training.teacher import Teacher
from magicrl_verifiers.records import VerifierService

ESTIMATORS: tuple[EntropyEstimator, ...] = ("sampled", "exact")

_log = logging.getLogger(__name__)


Scores: TypeAlias = tuple[Mapping[tuple[int, int], FloatArray], Sequence[FloatArray]]
"""The learner's log-probs of every response, ``[T]`` by (draw, index in the group), and its entropies, ``[T]`` each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One step's metrics, its whole buffer before rejection in draw order, and the mini-batches of its updates."""

    metrics: StepMetrics
    groups: tuple[ScoredGroup, ...]
    batches: tuple[TrainBatch, ...]
    clock: StepClock


class Trainer:
    """Training steps of a run. Its own state is the step counters and the rollout queue.

    Attributes:
        controller: Entropy controller: the given one until a stage changes the entropy settings.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        engine: RolloutEngine,
        learner: Learner,
        judge: VerifierService,
        encode: Callable[[Problem], TokenArray],
        sampler: PromptSampler,
        controller: EntropyController,
        reference: Reference | None = None,
        teacher: Teacher | None = None,
        progress: Callable[[str, int, int], None] = lambda _what, _done, _of: None,
    ) -> None:
        self._recipe = config
        self._config = config  # with the settings of the current stage
        self._engine, self._learner, self._reference = engine, learner, reference
        self._teacher = teacher
        self._sampler, self._progress = sampler, progress
        self.controller = controller
        self._queue = RolloutQueue(config, engine, judge, encode, sampler, progress)
        self._objective = Objective(LearnerSettings.of(config))
        self._advantage = resolve_setting("algorithm.advantage", advantage_of, config.algorithm.advantage)
        # Whether each of several rewards has its own advantage, as in GDPO: then each decides about rejection.
        self._by_parts = reads_parts(self._advantage)
        self._staleness = StalenessMeter(config.rollout.max_staleness)
        self.steps_done = 0
        # Consecutive steps. The checkpoint holds both counts, so that a restart continues them.
        self._empty_steps = 0
        self._unjudged_steps = 0
        self._why_unjudged = ""
        self._zeros_reported = False
        self._opposed_reported = is_builtin("advantage", config.algorithm.advantage)  # those have the right sign

    def step(self, stage: StageConfig, stage_index: int) -> StepResult:
        """Run one training step: D_R prompts, M responses each, N_SGD updates of Eq. 3.1."""
        config = self._recipe.in_stage(stage_index)
        if config.entropy != self._config.entropy:
            # A new controller takes over the state, as in a resumed run, so that c keeps its value.
            state, self.controller = self.controller.state(), entropy_controller(config.entropy)
            self.controller.restore(state)
        self._config = config
        mask, clock = self._config.algorithm.advantage_mask, StepClock()
        self._queue.begin_step(stage_index)
        self._staleness.begin_step(self._engine)

        # Sample and verify: D_R prompts, M responses each, at temperature tau, truncated at T.
        groups, refilled = self._collect(stage, clock)
        # Before the updates: nothing in the text itself shows that stale weights sampled it.
        self._staleness.check(groups)
        if self._engine.capabilities.sleep and not self._config.rollout.max_staleness:
            # No request is in flight, so the learner can use the engine's memory.
            with clock.measure("other", "sleep"):
                self._engine.sleep()

        # Entropy control: e_k is the entropy of the whole buffer. Over the kept groups alone it would be biased, since
        # rejected groups (all correct or all wrong) have another entropy. alpha_k belongs to this step's entropy. c
        # moves after the updates, once per step, so the metrics are taken here.
        scores = self._scored(groups, clock)
        estimates = self._measured_entropies(groups, scores)
        entropy = estimates[self._config.entropy.estimator]
        named = f"entropy.controller = {self._config.entropy.controller!r}"
        alpha, further = coefficients_of(self.controller, entropy.mean, named)
        control = entropy_metrics(self.controller, estimates, alpha, further)

        # Reject: a group whose rewards are all equal has zero advantage, but would still count in the entropy and KL
        # terms and in the number of tokens that divides the loss.
        rejection = reject_zero_advantage(groups, mask, by_parts=self._by_parts)
        # At most D_R groups remain, in issue order: finish order would favour short responses.
        if self._config.algorithm.reject_zero_advantage:
            # A round of refill samples as many prompts as are missing, so that no more than D_R survive.
            kept = [groups[i] for i in rejection.kept]
        else:
            # A group without any verdict has no sample.
            kept = [g for g in groups if g.counted.any()][: stage.rollout_batch]

        # Advantages (Eq. 2.5), old and reference log-probs, then N_SGD = D_R / D_T * N_reuse mini-batches.
        samples = self._prepare(kept, stage, scores, clock)
        batches = self._batches(samples, stage)

        # Update. c also moves in a step without a kept group: it follows the policy's entropy, not the updates.
        with self._step_in_errors(kept):
            updates = self._learn(batches, stage, alpha, further, clock)
        self.controller.observe(entropy.mean)

        # Asynchronous: the engine first generates with the old weights for as long as the learner worked.
        self._queue.meanwhile(sum(g.group.num_tokens for g in groups), clock)
        with clock.measure("other", "weights"):
            self._engine.sync_weights(self._learner)

        self.steps_done += 1
        self._empty_steps = 0 if kept else self._empty_steps + 1
        # A truncated response is a 0 without a verdict, so it does not show whether the verifier works.
        judged = any((g.counted & ~g.truncated).any() for g in groups)
        failed = any((~g.counted).any() for g in groups)
        self._unjudged_steps = self._unjudged_steps + 1 if failed and not judged else 0
        self._why_unjudged = first_reason(groups)
        asynchronous: Values = {}
        if scores is not None:
            asynchronous = {
                **self._staleness.metrics(groups, scores[0]),
                **self._staleness.idle(self._engine, clock),
                "queue/in_flight": self._queue.in_flight,
                "queue/finished": self._queue.finished,
                "queue/drained": self._queue.drained,
            }
        values = step_metrics(
            groups,
            rejection,
            updates,
            kept=kept,
            refilled=refilled,
            max_tokens=stage.max_tokens,
            control=control,
            clock=clock,
            asynchronous=asynchronous,
        )
        metrics = StepMetrics(step=self.steps_done, stage=stage_index, values=values)
        return StepResult(metrics=metrics, groups=tuple(groups), batches=tuple(batches), clock=clock)

    def _collect(self, stage: StageConfig, clock: StepClock) -> tuple[list[ScoredGroup], int]:
        """Return the step's buffer, and how many of its groups were sampled to replace rejected ones."""
        algorithm = self._config.algorithm
        groups = self._queue.take(stage, stage.rollout_batch, clock)
        # Each round waits for all groups it requested, so that short responses are not favoured (D4). Some of these are
        # rejected too, hence several rounds. `refill_rounds` bounds them where nearly every group is rejected.
        for _ in range(algorithm.refill_rounds if algorithm.refill == "until_full" else 0):
            kept = reject_zero_advantage(groups, algorithm.advantage_mask, by_parts=self._by_parts).kept
            missing = stage.rollout_batch - len(kept)
            if missing <= 0:
                break
            groups += self._queue.take(stage, missing, clock)
        return groups, len(groups) - stage.rollout_batch

    def _scored(self, groups: Sequence[ScoredGroup], clock: StepClock) -> Scores | None:
        """Return the learner's log-probs and entropies of the whole buffer in asynchronous mode, else None.

        In asynchronous mode older policies sampled the buffer: their entropies are not the learner's, and their
        log-probs are not those of the proximal policy. In synchronous mode the sampler has the learner's weights, so
        the forward pass is saved. With ``weight_lag`` and recorded rollouts it has others, of which the run warns.
        """
        if not self._config.rollout.max_staleness:
            return None
        samples = buffer_samples(scored.group for scored in groups)
        with clock.measure("other", "old_logprobs"):
            logprobs, entropies = self._learner.logprobs(samples, self._config.rollout.temperature)
        # Observation tokens were not sampled, so they are not part of the policy's entropy.
        sampled = [e if s.loss_mask is None else e[s.loss_mask] for s, e in zip(samples, entropies, strict=True)]
        return dict(zip(sample_keys(groups, samples), logprobs, strict=True)), sampled

    def _prepare(
        self, kept: Sequence[ScoredGroup], stage: StageConfig, scores: Scores | None, clock: StepClock
    ) -> list[TrainSample]:
        algorithm, tau = self._config.algorithm, self._config.rollout.temperature
        objective = self._objective
        try:
            samples = train_samples(
                kept,
                mask=algorithm.advantage_mask,
                normalise_std=objective.row.normalise_std,
                advantage=self._advantage,
                k=algorithm.advantage_k,
                overlong_buffer=algorithm.overlong_buffer,
            )
        except AdvantageError as error:
            raise ValueError(f"algorithm.advantage = {algorithm.advantage!r}: {error}") from error
        if not samples:
            return []
        mixed = algorithm.reject_zero_advantage and self._teacher is None  # then no group has equal rewards
        if mixed and not self._zeros_reported and not any(sample.advantage for sample in samples):
            self._zeros_reported = True
            _log.warning(
                "algorithm.advantage = %r is 0 for all %d responses of this step, in groups with different rewards: "
                "the policy learns nothing from them",
                *(algorithm.advantage, len(samples)),
            )
        if not self._opposed_reported and opposed(kept, samples):
            self._opposed_reported = True
            _log.warning(
                "algorithm.advantage = %r gives the better responses of every group of this step the lower advantages: "
                "training on them lowers the reward; check its sign",
                algorithm.advantage,
            )
        if self._config.teacher is not None and not self._config.teacher.with_rewards:
            samples = [dataclasses.replace(sample, advantage=0.0) for sample in samples]
        # Old log-probs are computed once, before the first update. With a single update they would equal the loss's own
        # log-probs and rho would be exactly 1, so the forward pass is saved.
        several = stage.num_minibatches * algorithm.reuse > 1
        if scores is not None:
            # Asynchronous: the learner scored the whole buffer for the entropy.
            samples = with_logprobs(samples, "old_logprobs", [scores[0][key] for key in sample_keys(kept, samples)])
        elif several or objective.needs_old_logprobs_first:
            with clock.measure("other", "old_logprobs"):
                samples = with_logprobs(samples, "old_logprobs", self._learner.logprobs(samples, tau)[0])
        wanted = self._config.reference.mode != "none" or "ref_logprobs" in objective.needs
        if self._reference is not None and wanted:
            with clock.measure("other", "ref_logprobs"):
                samples = with_logprobs(samples, "ref_logprobs", self._reference.logprobs(samples, tau)[0])
        if self._teacher is not None:
            with clock.measure("other", "teacher_logprobs"):
                asked = [kept[sample.group_index].group.request.problem for sample in samples]
                samples = with_logprobs(samples, "teacher_logprobs", self._teacher(samples, asked, tau))
        return samples

    def _batches(self, samples: Sequence[TrainSample], stage: StageConfig) -> list[TrainBatch]:
        """Return the mini-batch of each update."""
        algorithm = self._config.algorithm
        batches = minibatches(
            samples,
            parts=stage.num_minibatches,
            prompts_per_part=stage.mini_batch or stage.rollout_batch,
            mode=algorithm.minibatch,
            reuse=algorithm.reuse,
            seed=(self._config.run.seed, self.steps_done),
            max_response_tokens=stage.max_tokens,
        )
        correction = self._objective.correction
        if correction.batch_mask is not None:
            # The mask depends on the whole mini-batch, so it precedes the split into micro-batches and over ranks.
            batches = (with_policy_mask(batch, correction, algorithm.second_moment) for batch in batches)
        return list(batches)

    def _learn(
        self,
        batches: Sequence[TrainBatch],
        stage: StageConfig,
        alpha: float,
        coefficients: Mapping[str, float],
        clock: StepClock,
    ) -> list[Mapping[str, float]]:
        learner, total = self._learner, stage.num_minibatches * self._config.algorithm.reuse
        low, high = self._objective.clip(self._config.algorithm)
        updates: list[Mapping[str, float]] = []
        optimizer = self._config.optimizer
        for batch in batches:
            # Linear warm-up over updates, then constant. + 1: a first update at rate 0 would change nothing.
            warm = min(1.0, (learner.version + 1) / optimizer.warmup_steps) if optimizer.warmup_steps else 1.0
            # All updates share one alpha: c moves once per training step, whatever N_SGD is (section 3.2.5).
            controls = Controls(
                alpha=alpha,
                clip_low=low,
                clip_high=high,
                coefficients=coefficients,
                temperature=self._config.rollout.temperature,
                learning_rate=optimizer.learning_rate * warm,
                kl_coefficient=self._config.reference.coefficient,
                teacher_coefficient=0.0 if self._config.teacher is None else self._config.teacher.coefficient,
            )
            with clock.measure("train"):
                updates.append(learner.update(batch, controls))
            self._progress("train", len(updates), total)
        return updates

    @contextmanager
    def _step_in_errors(self, kept: Sequence[ScoredGroup]) -> Generator[None]:
        """Prefix a `NotFiniteError` of the block with the step and the response that caused it."""
        try:
            yield
        except NotFiniteError as error:
            where = f"step {self.steps_done + 1}"
            if error.culprit is not None:
                group, sample = error.culprit
                problem = kept[group].group.request.problem.id
                where += f", first seen in response {sample + 1} to problem {problem!r}"
            raise NotFiniteError(f"{where}: {error}", error.culprit) from error

    def _measured_entropies(
        self, groups: Sequence[ScoredGroup], scores: Scores | None
    ) -> dict[EntropyEstimator, EntropyEstimate]:
        """Return e_k over all sampled tokens by each available estimator; in asynchronous mode the learner's."""
        if scores is not None:
            return {"exact": mean_entropy(scores[1])}
        completions = [c for g in groups for c in g.group.completions]
        found: dict[EntropyEstimator, EntropyEstimate] = {}
        # The controller uses the recipe's estimator. The other one is reported next to it: the two must agree within
        # their standard errors.
        for estimator in ESTIMATORS:
            estimate = measure_entropy(completions, estimator)
            if estimate is not None:
                found[estimator] = estimate
        if self._config.entropy.estimator not in found:
            raise TrainingStopped(
                "the rollout engine does not report entropies; set entropy.estimator = 'sampled' for this engine"
            )
        return found

    def check(self, metrics: StepMetrics) -> None:
        """Raise where training cannot continue. Call it after the step is recorded and before it is in a checkpoint.

        Raises:
            TrainingStopped: All groups were rejected or unjudged for too many steps, or the engine and the learner have
                different weights.
        """
        patience = self._config.verifier.stop_after_unjudged_steps
        if self._unjudged_steps >= patience:
            why = self._why_unjudged or "no reason was given"
            raise TrainingStopped(
                f"no response of {patience} steps in a row could be judged ({why}). Nothing was learned from them. "
                "Check that the verifier, reward or environment works, then continue with --resume"
            )
        limit = self._config.algorithm.stop_after_empty_steps
        if self._empty_steps >= limit:
            seen = answers_in([metrics], judging_of(self._config.verifier, self._sampler.remaining))
            share = metrics.values.get("train/not_judged/ratio")
            # Where most responses have no verdict, the others are truncated and show no cause.
            unjudged = isinstance(share, float) and share > 0.5
            raise TrainingStopped(
                f"every group of {limit} steps in a row was rejected, so there is nothing to learn; in the last one "
                f"{unjudged_text(self._why_unjudged) if unjudged or seen is None else diagnose(seen).text}"
            )
        rollout = self._config.rollout
        # Asynchronous: only responses of the newest weights, since staleness widens the gap of all others.
        key = "staleness/fresh_gap/mean" if rollout.max_staleness else "learner/sampler_gap_mean"
        gap = metrics.values.get(key)
        # A lagging engine and recorded rollouts have other weights on purpose.
        exempt = rollout.weight_lag > 0 or rollout.engine == "replay"
        # A metric that is not finite is None. Without an update there is none.
        if metrics.values.get("learner/sampler_gap_mean", 0.0) is None and np.isfinite(rollout.max_sampler_gap):
            raise TrainingStopped(
                f"rollout.engine = {rollout.engine!r} reported log-probs that are NaN or infinite, so nothing shows "
                "which weights sampled. Correct the engine; this step is in no checkpoint"
            )
        if isinstance(gap, float) and gap > rollout.max_sampler_gap and not exempt:
            raise TrainingStopped(
                f"the rollout engine and the learner disagree by {gap:.3f} nats per token on average (limit "
                f"rollout.max_sampler_gap = {rollout.max_sampler_gap}): the engine has other weights than the "
                "learner. Check the engine's weight update; this step is in no checkpoint"
            )
        largest = metrics.values.get("learner/sampler_gap_max")
        # Responses of older weights have the log-probs of those weights.
        if self._config.model.exact and largest and not (rollout.weight_lag or rollout.max_staleness):
            raise TrainingStopped(
                f"model.exact: log-probs of the sampler and the learner differ by up to {largest:.3g} nats. Report "
                "this with run.json, and start a new run with --set model.exact=false"
            )

    def state(self) -> dict[str, Any]:
        """Return the state of the loop itself: JSON values, and tensors where rollouts are in flight."""
        return {
            "steps_done": self.steps_done,
            "empty_steps": self._empty_steps,
            "unjudged_steps": self._unjudged_steps,
            "versions": self._staleness.state(),
            **self._queue.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned. The engine must have the weights of that step already."""
        self.steps_done = int(state["steps_done"])
        self._empty_steps = int(state["empty_steps"])
        self._unjudged_steps = int(state.get("unjudged_steps", 0))  # absent in checkpoints of version 0.1
        self._staleness.restore(state["versions"])
        self._queue.restore(state)


def train_samples(
    groups: Sequence[ScoredGroup],
    *,
    mask: AdvantageMask,
    normalise_std: bool = True,
    advantage: Advantage = group_relative,
    k: int = 4,
    overlong_buffer: int | None = None,
) -> list[TrainSample]:
    """Return the counted responses of kept groups with their advantages (Eq. 2.5).

    A sample's ``group_index`` is the group's place in ``groups``. A response without a verdict counts neither in the
    group's mean nor in the loss. The keyword arguments are those of `scored_advantages`.
    """
    # Computed on whole groups, before responses without a verdict leave them.
    advantages = scored_advantages(
        groups, mask=mask, normalise_std=normalise_std, advantage=advantage, k=k, overlong_buffer=overlong_buffer
    )
    return [
        _sample(group.group, i, j, float(advantages[i][j]))
        for i, group in enumerate(groups)
        for j in range(len(group.rewards))
        if group.counted[j]
    ]


def opposed(groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]) -> bool:
    """Return whether the advantages of each of at least four groups fall as the rewards rise."""
    rises = np.zeros(len(groups))
    for sample in samples:
        group = groups[sample.group_index]
        above = group.rewards[sample.sample_index] - group.rewards[group.counted].mean()
        rises[sample.group_index] += sample.advantage * above
    rises = rises[np.abs(rises) > 1e-6]  # less is rounding, where all advantages of a group are equal
    return len(rises) >= 4 and bool((rises < 0).all())


def _sample(group: RolloutGroup, group_index: int, sample_index: int, advantage: float) -> TrainSample:
    completion = group.completions[sample_index]
    return TrainSample(
        prompt_tokens=group.request.prompt_tokens,
        tokens=completion.tokens,
        advantage=advantage,
        group_index=group_index,
        sample_index=sample_index,
        sampler_logprobs=completion.sampler_logprobs,
        policy_version=completion.policy_version,
        loss_mask=completion.sampled,
        version_spans=completion.version_spans,
        experts=completion.experts,
    )


def buffer_samples(groups: Iterable[RolloutGroup]) -> list[TrainSample]:
    """Return every response of the groups with advantage 0: the learner scores it, and does not learn from it."""
    return [_sample(group, i, j, 0.0) for i, group in enumerate(groups) for j in range(len(group.completions))]


def sample_keys(groups: Sequence[ScoredGroup], samples: Sequence[TrainSample]) -> list[tuple[int, int]]:
    """Return each sample's (draw, index in the group). It stays the same when groups are rejected."""
    return [(groups[s.group_index].group.request.draw, s.sample_index) for s in samples]


def with_logprobs(
    samples: Sequence[TrainSample],
    field: Literal["old_logprobs", "ref_logprobs", "teacher_logprobs"],
    logprobs: Sequence[FloatArray],
) -> list[TrainSample]:
    """Return the samples with log-probs of the learner before its first update, the reference model or the teacher."""
    return [dataclasses.replace(sample, **{field: array}) for sample, array in zip(samples, logprobs, strict=True)]


def with_policy_mask(batch: TrainBatch, correction: Correction, threshold: float) -> TrainBatch:
    """Return the mini-batch with the ``policy_mask`` of the correction's ``batch_mask``, such as M2PO's.

    The mask function sees all loss tokens of the mini-batch together, so it runs before the batch is split into
    micro-batches or over workers. Samples need ``old_logprobs``.

    Raises:
        ValueError: The mask is not one bool per loss token.
    """
    assert correction.batch_mask is not None, "a correction without a batch_mask masks nothing"
    gaps: list[NDArray[np.float64]] = []
    for sample in batch.samples:
        assert sample.old_logprobs is not None, "the mask needs the learner's log-probs"
        gap = sample.old_logprobs.astype(np.float64) - sample.sampler_logprobs
        # Tokens without loss are not part of the second moment.
        gaps.append(gap if sample.loss_mask is None else gap[sample.loss_mask])
    lengths = [len(gap) for gap in gaps]
    advantages = np.repeat([sample.advantage for sample in batch.samples], lengths)
    kept = correction.batch_mask(torch.from_numpy(np.concatenate(gaps)), torch.from_numpy(advantages), threshold)
    if kept.shape != advantages.shape or kept.dtype != torch.bool:
        raise ValueError(
            f"correction {correction.name!r}: batch_mask must return a bool per loss token, shape [{len(advantages)}]; "
            f"got {str(kept.dtype).removeprefix('torch.')}, shape {list(kept.shape)}"
        )
    # Split by sample again, and place each part on the sample's loss tokens.
    parts = np.split(kept.numpy(), np.cumsum(lengths)[:-1])
    samples: list[TrainSample] = []
    for sample, part in zip(batch.samples, parts, strict=True):
        mask = part
        if sample.loss_mask is not None:
            # Nothing reads the mask at tokens without loss.
            mask = np.zeros(len(sample.tokens), dtype=np.bool_)
            mask[sample.loss_mask] = part
        samples.append(dataclasses.replace(sample, policy_mask=mask))
    return dataclasses.replace(batch, samples=tuple(samples))


def minibatches(
    samples: Sequence[TrainSample],
    *,
    parts: int,
    prompts_per_part: int,
    mode: MinibatchMode,
    reuse: int,
    seed: Sequence[int],
    max_response_tokens: int | None = None,
) -> Iterator[TrainBatch]:
    """Yield the mini-batches of a step's updates: N_reuse passes, each with a new random split of the groups.

    Args:
        samples: Samples of all kept groups.
        parts: D_R / D_T.
        prompts_per_part: D_T.
        mode: ``keep_n_sgd`` keeps the number of updates, ``keep_d_t`` the groups per update (as the released code).
        reuse: N_reuse.
        seed: (run seed, step). The split of pass p depends only on it and p.
        max_response_tokens: T of the stage.
    """
    # Groups stay whole, since D_T counts prompts.
    by_group: dict[int, list[TrainSample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_index, []).append(sample)
    groups = list(by_group.values())
    for turn in range(reuse):
        # Each pass has its own generator, so that a resumed run makes the same splits.
        rng = np.random.Generator(np.random.PCG64([*seed, turn]))
        chosen = split_minibatches(len(groups), num_parts=parts, prompts_per_part=prompts_per_part, mode=mode, rng=rng)
        for part in chosen:
            members = [sample for index in part for sample in groups[index]]
            yield TrainBatch.of(members, max_response_tokens=max_response_tokens)
