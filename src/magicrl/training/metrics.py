"""The metrics of a training step: clock, buffer, updates, staleness and speed. docs/guides/runs.md explains their keys.

Nothing in this module changes what is trained.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from magicrl.algorithms.advantages import Rejection
from magicrl.algorithms.entropy import AdaptiveEntropyController, EntropyController, EntropyEstimate, EntropyEstimator
from magicrl.config.schema import TrainConfig
from magicrl.planning.costs import SequenceWork, generation_flops, sequence_work, update_flops
from magicrl.planning.hardware import peak_flops
from magicrl.planning.shapes import ModelShape, shape_from_config
from magicrl.records import FloatArray, ScoredGroup, TrainBatch, reward_earned
from magicrl.rollout.protocol import RolloutEngine
from magicrl.training.diagnosis import Judging, SampledAnswers, unjudged_text
from magicrl.training.protocols import OnDevices, TrainingStopped, WorkSpan

Part = Literal["rollout", "train", "other"]


class StepClock:
    """Times of one step. Everything outside ``rollout`` and ``train`` is ``other``, so that the parts add up to the
    step.

    Rewards, old and reference log-probs, weight copies and bookkeeping are t_O, as in the report. Verification that
    overlaps with generation costs nothing and is counted once.

    Attributes:
        spans: (``part/what``, begin, end) of each measured block.
        cpu: CPU seconds of all threads of this process by part. Other load on the machine does not change them.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.ended = 0.0  # at the last call of ``times``
        self.spans: list[tuple[str, float, float]] = []
        self.cpu: dict[str, float] = {}

    @contextmanager
    def measure(self, part: Part, what: str | None = None) -> Generator[None, None, None]:
        """Time a block. ``what`` names it in the timeline. Blocks do not nest."""
        begin, begin_cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.spans.append((f"{part}/{what or part}", begin, time.perf_counter()))
            self.cpu[part] = self.cpu.get(part, 0.0) + time.process_time() - begin_cpu

    def times(self) -> dict[str, float]:
        """Return seconds by part up to now; ``step`` is their sum."""
        self.ended = time.perf_counter()
        total = self.ended - self.started
        rollout, train = sum(self.seconds("rollout").values()), sum(self.seconds("train").values())
        return {"rollout": rollout, "train": train, "other": total - rollout - train, "step": total}

    def seconds(self, part: Part) -> dict[str, float]:
        """Return the measured seconds of a part by name."""
        found: dict[str, float] = {}
        for name, begin, end in self.spans:
            kind, _, what = name.partition("/")
            if kind == part:
                found[what] = found.get(what, 0.0) + end - begin
        return found

    def append_timeline(self, path: Path, step: int, workers: Iterable[WorkSpan] = ()) -> None:
        """Append the clock's spans and those of ``workers`` inside the step to ``timeline.jsonl``, in seconds since its
        start."""
        rows: list[dict[str, object]] = []

        def row(begin: float, end: float, **what: str) -> None:
            place = {"step": step, "start": round(begin - self.started, 6), "end": round(end - self.started, 6)}
            rows.append({**what, **place})

        for name, begin, end in self.spans:
            kind, _, what = name.partition("/")
            row(begin, end, worker="local", kind=kind, what=what)
        for span in workers:
            begin, end = max(span.begin, self.started), min(span.end, self.ended)
            if begin < end:
                row(begin, end, worker=span.worker, what=span.what)
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


Values = dict[str, float | int | str | None]


def step_metrics(
    groups: Sequence[ScoredGroup],
    rejection: Rejection,
    updates: Sequence[Mapping[str, float]],
    *,
    kept: int,
    refilled: int,
    max_tokens: int,
    control: Values,
    clock: StepClock,
    asynchronous: Values,
) -> Values:
    """Return every metric of a step except those of workers, speed and validation. The clock stops here.

    Args:
        groups: Whole buffer, before rejection.
        rejection: Rejection of ``groups``.
        updates: Metrics of each update.
        kept, refilled: Number of groups learned from, and of those sampled to replace rejected ones.
        max_tokens: T.
        control: Metrics of the entropy control before the updates.
        clock: Clock of the step.
        asynchronous: Metrics of staleness and queue, empty in synchronous mode.
    """
    tokens = np.array([group.group.num_tokens for group in groups])
    values: Values = {
        **rollout_metrics(groups),
        **control,
        "groups/rejected/ratio": (len(groups) - len(rejection.kept)) / len(groups),
        "groups/rejected/all_correct": rejection.all_correct,
        "groups/rejected/all_wrong": rejection.all_wrong,
        "groups/refilled": refilled,
        "groups/trained": kept,
        "groups/all_rejected": int(not kept),
        "tokens/rejected/ratio": 1.0 - float(tokens[list(rejection.kept)].sum()) / max(1, int(tokens.sum())),
        **merge_updates(updates),
        "stage/max_tokens": max_tokens,
    }
    times, others = clock.times(), clock.seconds("other")
    values |= {f"time/{part}": seconds for part, seconds in times.items()}
    values |= {f"time/{part}_cpu": clock.cpu.get(part, 0.0) for part in ("rollout", "train")}
    # In asynchronous mode a response also waits while the learner works.
    if not asynchronous:
        values["time/longest_response"] = max(c.seconds for g in groups for c in g.group.completions)
    values |= {f"time/other/{what}": seconds for what, seconds in others.items()}
    values["time/verify_waited"] = others.get("verify", 0.0)
    values |= asynchronous
    values["tokens/per_second"] = int(values["tokens/sampled"] or 0) / max(times["step"], 1e-9)
    # JSON has no NaN and no infinity.
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def entropy_metrics(
    controller: EntropyController,
    estimates: Mapping[EntropyEstimator, EntropyEstimate],
    alpha: float,
    coefficients: Mapping[str, float],
) -> Values:
    """Return the controller's inputs and outputs of this step. Call it before the controller observes the entropy."""
    values: Values = {"entropy/alpha": alpha}
    values |= {f"entropy/coefficient/{name}": value for name, value in coefficients.items()}
    for estimator, estimate in estimates.items():
        values[f"entropy/{estimator}/mean"] = estimate.mean
        values[f"entropy/{estimator}/standard_error"] = estimate.standard_error
    # A custom controller has no c.
    if isinstance(controller, AdaptiveEntropyController):
        values |= {"entropy/c": controller.c, "entropy/target": controller.target}
    return values


def rollout_metrics(groups: Sequence[ScoredGroup]) -> Values:
    """Return accuracy, truncation and lengths over the step's whole buffer, before rejection.

    A response is correct if it was judged right and is not truncated. ``train/accuracy_nontruncated`` is r_nontrunc of
    J = E[p_nontrunc * r_nontrunc] (Fig. 6). It is None where all responses were truncated. The standard error is
    clustered by prompt: a prompt that was drawn twice is one observation.
    """
    rewards = np.concatenate([g.rewards[g.counted] for g in groups])
    correct = np.concatenate([g.correct[g.counted] for g in groups]).astype(np.float32)
    truncated = np.concatenate([g.truncated[g.counted] for g in groups])
    lengths = np.array([c.num_sampled for g in groups for c in g.group.completions])
    # A group without any verdict has no mean.
    judged = [g for g in groups if g.counted.any()]
    finished = correct[~truncated]
    verified = [v.seconds for g in groups for v in g.verdicts]
    return {
        "train/accuracy/mean": _mean(correct),
        "train/accuracy/standard_error": _clustered_error(
            np.array([g.correct[g.counted].mean() for g in judged]), [g.group.request.problem.key for g in judged]
        ),
        "train/accuracy_nontruncated/mean": _mean(finished),
        "train/reward/mean": _mean(rewards),
        "train/answered/ratio": float(np.mean([one for g in groups for one in g.answered])),
        # Over all responses: one without a verdict can be truncated too.
        "train/truncation/ratio": float(np.mean([c.truncated for g in groups for c in g.group.completions])),
        "train/not_judged/ratio": float(np.mean([~counted for g in groups for counted in g.counted])),
        "length/mean": float(lengths.mean()),
        "length/min": int(lengths.min()),
        "length/max": int(lengths.max()),
        "length/q50": float(np.quantile(lengths, 0.5)),
        "length/q90": float(np.quantile(lengths, 0.9)),
        "length/q99": float(np.quantile(lengths, 0.99)),
        "groups/sampled": len(groups),
        "tokens/sampled": int(lengths.sum()),
        "verify/seconds": float(np.sum(verified)),
        **custom_metrics(groups),
    }


def answers_of(groups: Sequence[ScoredGroup], *, max_tokens: int, judging: Judging) -> SampledAnswers:
    """Return the figures of groups that were sampled and verified.

    Raises:
        RuntimeError: No answer has a verdict.
    """
    judged = [group for group in groups if group.counted.any()]
    if not judged:
        raise RuntimeError(unjudged_text(next((v.reason for g in groups for v in g.verdicts if v.reason), "")))
    right = [group.correct[group.counted] for group in judged]
    entropies = [
        c.sampler_entropies for group in judged for c in group.group.completions if c.sampler_entropies is not None
    ]
    return SampledAnswers(
        groups=len(groups),
        max_tokens=max_tokens,
        # By reward, as training rejects, and over all groups: one without any verdict has no advantage either.
        mixed=sum(len(np.unique(group.rewards[group.counted])) > 1 for group in judged) / len(groups),
        correct=float(np.concatenate(right).mean()),
        truncated=float(np.mean([c.truncated for group in judged for c in group.group.completions])),
        answered=float(np.mean([one for g in judged for one in g.answered])),
        judging=judging,
        entropy=float(np.concatenate(entropies).mean()) if entropies else None,
    )


def _clustered_error(values_N: NDArray[np.float64], keys: Sequence[str]) -> float | None:
    """Return the standard error of a mean whose values correlate within a key; None with fewer than two keys."""
    _, cluster = np.unique(keys, return_inverse=True)
    residuals = np.bincount(cluster, weights=values_N - values_N.mean()) if len(keys) else np.zeros(0)
    n = len(residuals)
    return math.sqrt(n / (n - 1) * float((residuals**2).sum())) / len(keys) if n > 1 else None


def custom_metrics(groups: Sequence[ScoredGroup]) -> Values:
    """Return the means over counted responses of the numbers that custom rewards and environments report.

    Each of several rewards has the mean score it pays, and the share of responses that it did not judge.
    """
    found: dict[str, list[float]] = {}
    for group in groups:
        for verdict, completion, counted in zip(group.verdicts, group.group.completions, group.counted, strict=True):
            if not counted:
                continue
            given = {f"reward/{name}": value for name, value in verdict.metrics.items()}
            if (episode := completion.episode) is not None:
                given |= {f"environment/{name}": value for name, value in episode.metrics.items()}
                given["environment/turns"] = len(episode.observed) + 1
                given["environment/observed_tokens"] = len(completion) - completion.num_sampled
                given["environment/observations_cut"] = episode.cut
            for name, (_, score) in verdict.parts.items():
                given[f"reward/{name}/not_judged/ratio"] = float(score is None)
                if score is not None:
                    given[f"reward/{name}/mean"] = reward_earned(score, truncated=completion.truncated)
            for name, value in given.items():
                found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def merge_updates(updates: Sequence[Mapping[str, float]]) -> Values:
    """Merge the step's updates: token-weighted means, extremes of extremes, sums of tokens."""
    if not updates:
        return {"learner/sgd_steps": 0, "tokens/trained": 0}
    columns = {key: np.array([u[key] for u in updates], dtype=np.float64) for key in updates[0]}
    # An update's means are means over its tokens.
    weights = columns.pop("tokens")
    merged: Values = {"learner/sgd_steps": len(updates), "tokens/trained": int(weights.sum())}
    for key, column in columns.items():
        if key.endswith("_max"):
            value = column.max()
        elif key.endswith("_min"):
            value = column.min()
        elif key == "learning_rate":
            # The last one: a mean over a warm-up is a rate that no update used.
            value = column[-1]
        else:
            value = np.average(column, weights=weights)
        merged[f"learner/{key}"] = float(value)
    return merged


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


_WAITS = ("rollout/rollout", "rollout/ahead", "other/verify")
"""Spans in which the learner waits: for an engine in its own process, and for verdicts."""


class StalenessMeter:
    """Versions that the engine has served, oldest first.

    The staleness of a token is the number of weight updates of the engine since the weights that sampled it. It counts
    training steps, however many updates a step makes. A step without an update leaves the weights as they were.

    Args:
        most: The bound, ``rollout.max_staleness``.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._versions: list[int] = []
        self._busy = 0.0

    def begin_step(self, engine: RolloutEngine) -> None:
        """Record the version that the engine serves now."""
        # A step without an update does not change the version.
        if not self._versions or self._versions[-1] != engine.policy_version:
            # Keep the newest and as many earlier versions as the bound allows.
            self._versions = [*self._versions[-self._most :], engine.policy_version] if self._most else []
        self._busy = engine.busy_seconds() if engine.capabilities.in_flight else 0.0

    def check(self, groups: Sequence[ScoredGroup]) -> None:
        """Check that the engine respected the bound, before anything is learned from ``groups``.

        Raises:
            TrainingStopped: Weights sampled a token that are older than the bound, or that the engine never had.
        """
        if not self._most:
            return
        known = set(self._versions)
        for scored in groups:
            for index, completion in enumerate(scored.group.completions):
                strange = {completion.policy_version, *completion.token_versions.tolist()} - known
                if strange:
                    raise TrainingStopped(
                        f"response {index + 1} to problem {scored.group.request.problem.id!r} has tokens of policy "
                        f"version {min(strange)}, but rollout.max_staleness = {self._most} allows versions "
                        f"{', '.join(map(str, self._versions))} only: the rollout engine did not load new weights, or "
                        "delayed a response. Nothing was learned from this step; resume from the last checkpoint"
                    )

    def metrics(self, groups: Sequence[ScoredGroup], old_logprobs: Mapping[tuple[int, int], FloatArray]) -> Values:
        """Return ``staleness/...`` of the buffer before rejection, from the learner's log-probs by (draw, index); see
        docs/guides/engines.md#asynchronous-training."""
        newest = self._versions[-1]
        age = {version: index for index, version in enumerate(reversed(self._versions))}
        completions = [(g.group.request.draw, i, c) for g in groups for i, c in enumerate(g.group.completions)]
        tokens = np.array([age[int(v)] for *_, c in completions for v in c.of_sampled(c.token_versions)])
        begun = np.array([age[c.policy_version] for *_, c in completions])
        fresh = [(d, i, c) for d, i, c in completions if c.policy_version == newest]
        gaps = [c.of_sampled(np.abs(old_logprobs[d, i] - c.sampler_logprobs)) for d, i, c in fresh]
        # One share per age up to the bound, so that all steps have the same keys.
        shares = np.bincount(tokens, minlength=self._most + 1) / len(tokens)
        return {
            "staleness/mean": float(tokens.mean()),
            "staleness/max": int(begun.max()),
            "staleness/begun/mean": float(begun.mean()),
            "staleness/older/ratio": float((tokens > 0).mean()),
            "staleness/spanning/ratio": float(np.mean([bool(c.version_spans) for *_, c in completions])),
            **{f"staleness/share_{steps}/ratio": float(share) for steps, share in enumerate(shares)},
            # Shows an engine that serves other weights than it reports, however old the rest of the buffer is.
            "staleness/fresh_gap/mean": float(np.concatenate(gaps).mean()) if gaps else None,
        }

    def idle(self, engine: RolloutEngine, clock: StepClock) -> Values:
        """Return the seconds of the step in which the learner, and the engine, had to wait."""
        assert engine.capabilities.in_flight, "asynchronous mode has such an engine"
        waited = sum(end - begin for name, begin, end in clock.spans if name in _WAITS)
        busy = engine.busy_seconds() - self._busy
        return {"idle/learner/seconds": waited, "idle/engine/seconds": max(0.0, clock.times()["step"] - busy)}

    def state(self) -> list[int]:
        """Return the versions, JSON-able."""
        return list(self._versions)

    def restore(self, state: Sequence[Any]) -> None:
        """Restore what ``state`` returned."""
        self._versions = [int(version) for version in state]


class Throughput:
    """Speed, FLOPs and memory of one run's learner and engine.

    Args:
        config: The recipe.
        model_config: Hugging Face configuration of the initial model. FLOPs are counted for the model types that the
            planner knows; for others only tokens per second.
    """

    def __init__(self, config: TrainConfig, model_config: Mapping[str, Any]) -> None:
        lora = config.model.lora
        self._shape: ModelShape | None = None
        with suppress(ValueError):
            self._shape = shape_from_config(model_config, "the initial model")
        self._adapters = None
        if lora is not None and self._shape is not None:
            self._adapters = self._shape.adapter_parameters(lora.rank, lora.target_modules)
        # Devices have one peak for float16 and bfloat16.
        self._bf16 = {
            "learner": config.model.dtype != "float32",
            "engine": (config.rollout.dtype or config.model.dtype) != "float32",
        }

    def metrics(
        self,
        groups: Sequence[ScoredGroup],
        batches: Sequence[TrainBatch],
        values: Mapping[str, float | int | str | None],
        *,
        learner: object,
        engine: object,
    ) -> Values:
        """Return the metrics of one step from its buffer, its mini-batches and its other metrics.

        A learner or engine that is not ``OnDevices`` has none (recorded rollouts are not generated).
        """
        trained, sampled = trained_work(batches), sampled_work(groups)
        generating = _seconds(values, "time/rollout")
        # Asynchronous: the engine generates whenever it is not idle.
        if "idle/engine/seconds" in values:
            generating = _seconds(values, "time/step") - _seconds(values, "idle/engine/seconds")
        shape, learned, made = self._shape, None, None
        if shape is not None:
            learned = update_flops(shape, trained, adapters=self._adapters)
            made = generation_flops(shape, sampled)
        # A learner also computes prompts. An engine's speed counts only the tokens that it samples.
        computed = (
            ("learner", learner, trained.prompts + trained.predicted, learned, _seconds(values, "time/train")),
            ("engine", engine, sampled.predicted, made, generating),
        )
        found: Values = {}
        for who, part, tokens, flops, seconds in computed:
            if isinstance(part, OnDevices):
                found[f"memory/{who}/peak_mb"] = part.peak_mb()
                if tokens:
                    found |= rates(who, tokens, flops, seconds, part.devices, bf16=self._bf16[who])
        return found


def rates(
    who: str, tokens: int, flops: float | None, seconds: float, devices: Sequence[str], *, bf16: bool
) -> dict[str, float]:
    """Return ``speed/<who>/...`` and ``flops/<who>`` of ``tokens`` in ``seconds``; nothing without ``devices``.

    MFU is included only if every device's peak is known and applies to the precision in use (``bf16``).
    """
    if seconds <= 0 or not devices:
        return {}
    speed = f"speed/{who}"
    found = {
        f"{speed}/tokens_per_second": tokens / seconds,
        f"{speed}/tokens_per_second_per_device": tokens / seconds / len(devices),
    }
    if flops is not None:
        found |= {f"flops/{who}": flops, f"{speed}/flops_per_second": flops / seconds}
        known = [peak for peak in map(peak_flops, devices) if peak is not None]
        if bf16 and len(known) == len(devices):
            found[f"{speed}/mfu"] = flops / seconds / sum(known)
    return found


def trained_work(batches: Iterable[TrainBatch]) -> SequenceWork:
    """Return the work of all updates. In each, a prompt counts once for all responses to it."""
    total = SequenceWork()
    for batch in batches:
        by_prompt: dict[bytes, tuple[int, list[int]]] = {}
        for sample in batch.samples:
            known = by_prompt.setdefault(sample.prompt_tokens.tobytes(), (len(sample.prompt_tokens), []))
            known[1].append(len(sample.tokens))
        total += sequence_work(by_prompt.values())
    return total


def sampled_work(groups: Sequence[ScoredGroup]) -> SequenceWork:
    """Return the work of sampling groups. Each draw's prompt counts once. Observations are read, not predicted."""
    work = sequence_work(
        (len(g.group.request.prompt_tokens), [len(c) for c in g.group.completions if len(c)]) for g in groups
    )
    return replace(work, predicted=sum(g.group.num_tokens for g in groups))


def _seconds(values: Mapping[str, float | int | str | None], key: str) -> float:
    value = values.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0
