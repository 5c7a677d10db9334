"""Meters of training steps: clock, staleness and throughput. Nothing in this module changes what is trained."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from magicrl.config.schema import TrainConfig
from magicrl.files import named_errors
from magicrl.planning.costs import SequenceWork, generation_flops, sequence_work, update_flops
from magicrl.planning.hardware import peak_flops
from magicrl.planning.shapes import ModelShape, shape_from_config
from magicrl.records import FloatArray, ScoredGroup, TrainBatch
from magicrl.rollout.protocol import RolloutEngine
from magicrl.training.protocols import OnDevices, TrainingStopped, WorkSpan

Part = Literal["rollout", "train", "other"]
Values = dict[str, float | int | str | None]


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
        with named_errors(path), path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


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
