"""One training step of MAGIC: sample, verify, measure entropy, reject, advantages, update. Read ``Trainer.step``.

It is the algorithm in the recipe's own words (section 3): on-policy by default, rejection of groups without an
advantage, adaptive entropy control. What generates, judges and learns is behind protocols, so there is one step for
all of them. Its metrics are in ``metrics.py``, the run around it (stages, tests, checkpoints) in ``session.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from magicrl.algorithms.advantages import Rejection, advantage_of, reject_zero_advantage, select_refill
from magicrl.algorithms.entropy import (
    EntropyController,
    EntropyEstimate,
    EntropyEstimator,
    coefficients_of,
    mean_entropy,
    measure_entropy,
)
from magicrl.config.schema import StageConfig, TrainConfig
from magicrl.data.sampler import PromptSampler
from magicrl.records import (
    FloatArray,
    Problem,
    ScoredGroup,
    StepMetrics,
    TokenArray,
    TrainBatch,
    TrainSample,
)
from magicrl.rollout.protocol import RolloutEngine
from magicrl.training.batches import (
    SampleKey,
    buffer_samples,
    minibatches,
    sample_keys,
    train_samples,
    with_old_logprobs,
    with_policy_mask,
    with_ref_logprobs,
)
from magicrl.training.diagnosis import answers_in, diagnose, judging_of, unjudged_text
from magicrl.training.metrics import StalenessMeter, StepClock, Values, entropy_metrics, step_metrics
from magicrl.training.objective import LearnerSettings, Objective, brought, entropy_controller
from magicrl.training.protocols import Controls, Learner, NotFiniteError, Reference, TrainingStopped, UpdateMetrics
from magicrl.training.rollout_queue import RolloutQueue
from magicrl_verifiers.records import VerifierService

ESTIMATORS: tuple[EntropyEstimator, ...] = ("sampled", "exact")


class Scores(NamedTuple):
    """The learner's view of the whole buffer: log-probs ``[T]`` by response, entropies ``[T]`` one a response."""

    logprobs: Mapping[SampleKey, FloatArray]
    entropies: Sequence[FloatArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What the loop drives: the two engines, the judge, and the small state machines."""

    engine: RolloutEngine
    learner: Learner
    judge: VerifierService
    encode: Callable[[Problem], TokenArray]
    sampler: PromptSampler
    controller: EntropyController
    reference: Reference | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One step's metrics, its whole buffer (before rejection, in draw order), and what each update learnt from."""

    metrics: StepMetrics
    groups: tuple[ScoredGroup, ...]
    batches: tuple[TrainBatch, ...]
    clock: StepClock


class Trainer:
    """Runs training steps. State is the step count and what is in flight; the rest is the parts' own.

    Attributes:
        controller: of the entropy; of ``parts`` until a stage has another target.
    """

    def __init__(self, config: TrainConfig, parts: Parts, progress: Callable[[str, int, int], None]) -> None:
        self._recipe = config
        self._config = config  # as the present stage has it
        self._parts = parts
        self.controller = parts.controller
        self._progress = progress
        self._queue = RolloutQueue(config, parts.engine, parts.judge, parts.encode, parts.sampler, progress)
        self._objective = Objective(LearnerSettings.of(config))
        self._advantage = brought("algorithm.advantage", advantage_of, config.algorithm.advantage)
        self._staleness = StalenessMeter(config.rollout.max_staleness)
        self.steps_done = 0
        # of steps in a row; in the checkpoint, so that a restart does not begin the count anew
        self._empty_steps = 0
        self._unjudged_steps = 0
        self._why_unjudged = ""

    def step(self, stage: StageConfig, stage_index: int) -> StepResult:
        """One training step: D_R prompts, M responses each, N_SGD updates of Eq. 3.1."""
        self._enter(stage_index)
        parts, mask, clock = self._parts, self._config.algorithm.advantage_mask, StepClock()
        self._queue.begin_step(stage_index)
        self._staleness.begin_step(parts.engine)

        # Sample and verify: D_R prompts, M responses each, at temperature tau, cut at T.
        groups, refilled = self._collect(stage, clock)
        self._staleness.check(groups)  # before anything is learned: text of stale weights looks as good as any
        if parts.engine.capabilities.sleep and not self._config.rollout.max_staleness:
            with clock.measure("other", "sleep"):  # nothing is in flight now: the learner has the engine's memory
                parts.engine.sleep()

        # Entropy control: e_k of the whole buffer. Over the survivors it would be biased, since what rejection takes
        # away (always right or always wrong) has another entropy. alpha_k belongs to this step's entropy; c moves after
        # the updates, once a step, so the metrics are taken here.
        scores = self._scored(groups, clock)
        estimates = self._measured_entropies(groups, scores)
        entropy = estimates[self._config.entropy.estimator]
        alpha = self.controller.coefficient(entropy.mean)
        further = coefficients_of(self.controller, entropy.mean)
        control = entropy_metrics(self.controller, estimates, alpha, further)

        # Reject: a group whose rewards are all equal has zero advantage, but would still weigh in through the entropy
        # and KL terms and through the number of tokens that the loss is divided by.
        rejection = reject_zero_advantage(groups, mask)
        kept = self._surviving(groups, rejection, stage)

        # Advantages (Eq. 2.5), old and reference log-probs, then N_SGD = D_R / D_T * N_reuse mini-batches.
        samples = self._prepare(kept, stage, scores, clock)
        batches = self._batches(samples, stage)

        # Update. c moves also in a step without survivors: it follows the policy's entropy, not the updates.
        with self._naming_the_culprit(kept):
            updates = self._learn(batches, stage, alpha, further, clock)
        self.controller.observe(entropy.mean)

        # The engine goes on from the new weights, after what it did meanwhile with the old ones (asynchronous).
        self._queue.meanwhile(sum(g.group.num_tokens for g in groups), clock)
        with clock.measure("other", "weights"):
            parts.engine.sync_weights(parts.learner)

        self.steps_done += 1
        self._empty_steps = 0 if kept else self._empty_steps + 1
        # what was cut at T is a 0 without a verdict: it says nothing of the judge
        judged = any((g.counted & ~g.truncated).any() for g in groups)
        failed = any((~g.counted).any() for g in groups)
        self._unjudged_steps = self._unjudged_steps + 1 if failed and not judged else 0
        self._why_unjudged = next((v.reason for g in groups for v in g.verdicts if v.reason), "")
        values = step_metrics(
            groups,
            rejection,
            updates,
            kept=len(kept),
            refilled=refilled,
            max_tokens=stage.max_tokens,
            control=control,
            clock=clock,
            asynchronous={} if scores is None else self._asynchronous_metrics(groups, scores, clock),
        )
        metrics = StepMetrics(step=self.steps_done, stage=stage_index, values=values)
        return StepResult(metrics=metrics, groups=tuple(groups), batches=tuple(batches), clock=clock)

    def _enter(self, stage_index: int) -> None:
        """The stage's own settings from here on."""
        config = self._recipe.in_stage(stage_index)
        if config.entropy != self._config.entropy:
            # made anew and given the state, as a resumed run does it: c goes on where it was
            state, self.controller = self.controller.state(), entropy_controller(config.entropy)
            self.controller.restore(state)
        self._config = config

    def _collect(self, stage: StageConfig, clock: StepClock) -> tuple[list[ScoredGroup], int]:
        """The step's buffer, and how many of its groups were sampled to refill rejected ones."""
        algorithm = self._config.algorithm
        groups = self._queue.take(stage, stage.rollout_batch, clock)
        # whole rounds: each waits for all that it asked for, so that short responses have no advantage (D4); some of
        # these are rejected too, hence several rounds, and a bound where nearly nothing survives
        for _ in range(algorithm.refill_rounds if algorithm.refill == "until_full" else 0):
            missing = stage.rollout_batch - len(reject_zero_advantage(groups, algorithm.advantage_mask).kept)
            if missing <= 0:
                break
            groups += self._queue.take(stage, missing, clock)
        return groups, len(groups) - stage.rollout_batch

    def _surviving(self, groups: Sequence[ScoredGroup], rejection: Rejection, stage: StageConfig) -> list[ScoredGroup]:
        """Groups to learn from: at most D_R, in issue order (finish order would favour short responses)."""
        algorithm = self._config.algorithm
        if not algorithm.reject_zero_advantage:
            # a group that nobody could judge has no sample to give
            return [g for g in groups if g.counted.any()][: stage.rollout_batch]
        if algorithm.refill == "until_full":
            return [groups[i] for i in select_refill(groups, stage.rollout_batch, algorithm.advantage_mask)]
        return [groups[i] for i in rejection.kept]

    def _scored(self, groups: Sequence[ScoredGroup], clock: StepClock) -> Scores | None:
        """In asynchronous mode the learner's own log-probs and entropies of the whole buffer; else None.

        Older policies sampled it, so their entropies are not the learner's, and their log-probs not the proximal
        policy's. Synchronous, the sampler is the learner, and the forward pass is saved.
        """
        if not self._config.rollout.max_staleness:
            return None
        samples = buffer_samples(groups)
        with clock.measure("other", "old_logprobs"):
            logprobs, entropies = self._parts.learner.logprobs(samples, self._config.rollout.temperature)
        # of observations nothing was sampled: they are no part of the policy's entropy
        sampled = [e if s.loss_mask is None else e[s.loss_mask] for s, e in zip(samples, entropies, strict=True)]
        return Scores(dict(zip(sample_keys(groups, samples), logprobs, strict=True)), sampled)

    def _prepare(
        self, kept: Sequence[ScoredGroup], stage: StageConfig, scores: Scores | None, clock: StepClock
    ) -> list[TrainSample]:
        algorithm, tau = self._config.algorithm, self._config.rollout.temperature
        objective = self._objective
        samples = train_samples(
            kept,
            mask=algorithm.advantage_mask,
            normalise_std=objective.row.normalise_std,
            advantage=self._advantage,
            k=algorithm.advantage_k,
            overlong_buffer=algorithm.overlong_buffer,
        )
        if not samples:
            return []
        # Old log-probs are taken once, before the first update. With one SGD step they would equal the loss's own
        # log-probs, rho would be exactly 1, and the forward pass is saved.
        several = stage.num_minibatches * algorithm.reuse > 1 and "old_logprobs" in objective.needs
        # asynchronous: the whole buffer was scored for the entropy; the key finds a survivor's part of it
        if scores is not None:
            samples = with_old_logprobs(samples, [scores.logprobs[key] for key in sample_keys(kept, samples)])
        elif several or objective.needs_old_logprobs_first:
            with clock.measure("other", "old_logprobs"):
                samples = with_old_logprobs(samples, self._parts.learner.logprobs(samples, tau)[0])
        wanted = self._config.reference.mode != "none" or "ref_logprobs" in objective.needs
        if self._parts.reference is not None and wanted:
            with clock.measure("other", "ref_logprobs"):
                samples = with_ref_logprobs(samples, self._parts.reference.logprobs(samples, tau)[0])
        return samples

    def _batches(self, samples: Sequence[TrainSample], stage: StageConfig) -> list[TrainBatch]:
        """What each update of the step learns from."""
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
        mask_of = self._objective.correction.batch_mask
        if mask_of is not None:
            # of the whole mini-batch, so before it is cut into micro-batches or dealt to ranks
            batches = (with_policy_mask(batch, mask_of, algorithm.second_moment) for batch in batches)
        return list(batches)

    def _learn(
        self,
        batches: Sequence[TrainBatch],
        stage: StageConfig,
        alpha: float,
        coefficients: Mapping[str, float],
        clock: StepClock,
    ) -> list[UpdateMetrics]:
        learner, total = self._parts.learner, stage.num_minibatches * self._config.algorithm.reuse
        low, high = self._objective.clip(self._config.algorithm)
        updates: list[UpdateMetrics] = []
        for batch in batches:
            # one alpha for all updates of the step: c moves once a training step, whatever N_SGD is (section 3.2.5)
            controls = Controls(
                alpha=alpha,
                clip_low=low,
                clip_high=high,
                coefficients=coefficients,
                temperature=self._config.rollout.temperature,
                learning_rate=self._learning_rate(),
                kl_coefficient=self._config.reference.coefficient,
            )
            with clock.measure("train"):
                updates.append(learner.update(batch, controls))
            self._progress("train", len(updates), total)
        return updates

    @contextmanager
    def _naming_the_culprit(self, kept: Sequence[ScoredGroup]) -> Generator[None]:
        """Put the step, and the response that did it, before the learner's words."""
        try:
            yield
        except NotFiniteError as error:
            where = f"step {self.steps_done + 1}"
            if error.culprit is not None:
                group, sample = error.culprit
                problem = kept[group].group.request.problem.id
                where += f", first seen in response {sample + 1} to problem {problem!r}"
            raise NotFiniteError(f"{where}: {error}", error.culprit) from error

    def _learning_rate(self) -> float:
        """Linear warm-up by SGD steps, then constant."""
        optimizer = self._config.optimizer
        if optimizer.warmup_steps == 0:
            return optimizer.learning_rate
        # + 1: a first update at rate 0 would teach nothing
        return optimizer.learning_rate * min(1.0, (self._parts.learner.version + 1) / optimizer.warmup_steps)

    def _measured_entropies(
        self, groups: Sequence[ScoredGroup], scores: Scores | None
    ) -> dict[EntropyEstimator, EntropyEstimate]:
        """e_k over all sampled tokens, by every estimator that the engine allows; asynchronous by the learner."""
        if scores is not None:
            return {"exact": mean_entropy(scores.entropies)}
        completions = [c for g in groups for c in g.group.completions]
        found: dict[EntropyEstimator, EntropyEstimate] = {}
        # the recipe's estimator steers; where there is the other too, the two must agree within their standard error
        for estimator in ESTIMATORS:
            estimate = measure_entropy(completions, estimator)
            if estimate is not None:
                found[estimator] = estimate
        if self._config.entropy.estimator not in found:
            raise TrainingStopped(
                "the rollout engine does not report entropies; set entropy.estimator = 'sampled' for this engine"
            )
        return found

    def _asynchronous_metrics(self, groups: Sequence[ScoredGroup], scores: Scores, clock: StepClock) -> Values:
        return {
            **self._staleness.metrics(groups, scores.logprobs),
            **self._staleness.idle(self._parts.engine, clock),
            "queue/in_flight": self._queue.in_flight,
            "queue/finished": self._queue.finished,
            "queue/drained": self._queue.drained,
        }

    def check(self, metrics: StepMetrics) -> None:
        """Stop a run that cannot go on; call it once the step is recorded and before it is in a checkpoint.

        Raises:
            TrainingStopped: nothing to learn or nothing judged for too long, or an engine that serves other weights.
        """
        patience = self._config.verifier.stop_after_unjudged_steps
        if self._unjudged_steps >= patience:
            why = self._why_unjudged or "no reason was given"
            raise TrainingStopped(
                f"no response of {patience} steps in a row could be judged ({why}). Nothing was learned from them; see "
                "that the verifier or its server works, then continue with --resume"
            )
        limit = self._config.algorithm.stop_after_empty_steps
        if self._empty_steps >= limit:
            seen = answers_in([metrics], judging_of(self._config.verifier, self._parts.sampler.remaining))
            share = metrics.values.get("train/not_judged/ratio")
            # where most fail to be judged, the others are those that were cut at T, and tell nothing
            unjudged = isinstance(share, float) and share > 0.5
            raise TrainingStopped(
                f"every group of {limit} steps in a row was rejected, so there is nothing to learn; in the last one "
                f"{unjudged_text(self._why_unjudged) if unjudged or seen is None else diagnose(seen).text}"
            )
        rollout = self._config.rollout
        # asynchronous: responses of the newest weights alone, since staleness itself widens the gap of all others
        key = "staleness/fresh_gap/mean" if rollout.max_staleness else "learner/sampler_gap_mean"
        gap = metrics.values.get(key)
        # a lagging engine and recorded rollouts are of other weights on purpose
        exempt = rollout.weight_lag > 0 or rollout.engine == "replay"
        if isinstance(gap, float) and gap > rollout.max_sampler_gap and not exempt:
            raise TrainingStopped(
                f"the rollout engine and the learner disagree by {gap:.3f} nats a token on average (limit "
                f"rollout.max_sampler_gap = {rollout.max_sampler_gap}): the engine serves other weights than the "
                "learner's. Check the engine's weight update; this step is in no checkpoint"
            )
        largest = metrics.values.get("learner/sampler_gap_max")
        # what older weights sampled has their log-probs, exactly
        if self._config.model.exact and largest and not (rollout.weight_lag or rollout.max_staleness):
            raise TrainingStopped(
                f"model.exact: a log-prob of the sampler and the learner's differ by {largest:.3g} nats; please report "
                "this with run.json, and go on with --resume --set model.exact=false. This step is in no checkpoint"
            )

    def state(self) -> dict[str, Any]:
        """State of the loop itself: JSON values, and tensors where rollouts are in flight."""
        return {
            "steps_done": self.steps_done,
            "empty_steps": self._empty_steps,
            "unjudged_steps": self._unjudged_steps,
            "versions": self._staleness.state(),
            **self._queue.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; the engine has the weights of that time."""
        self.steps_done = int(state["steps_done"])
        self._empty_steps = int(state["empty_steps"])
        self._unjudged_steps = int(state.get("unjudged_steps", 0))  # checkpoints of before have none
        self._staleness.restore(state["versions"])
        self._queue.restore(state)
