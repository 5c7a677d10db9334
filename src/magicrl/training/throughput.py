"""How fast a step's learner and engine were: tokens, model FLOPs and MFU over the seconds that they took.

What counts as a model FLOP is in ``planning/model_flops.py``; the keys are explained in docs/runs.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from magicrl.config.schema import TrainConfig
from magicrl.planning.hardware import peak_flops
from magicrl.planning.model_flops import SequenceWork, generation_flops, sequence_work, update_flops
from magicrl.planning.shapes import ModelShape, shape_from_config
from magicrl.records import ScoredGroup, TrainBatch
from magicrl.training.metrics import Values
from magicrl.training.protocols import OnDevices


class Throughput:
    """Of one run.

    Args:
        config: the recipe.
        model_config: the start model's, as Hugging Face writes it. FLOPs are counted for the dense decoders that the
            planner knows; for others there are tokens a second alone.
    """

    def __init__(self, config: TrainConfig, model_config: Mapping[str, Any]) -> None:
        lora = config.model.lora
        self._shape = _shape(model_config)
        self._adapters = None
        if lora is not None and self._shape is not None:
            self._adapters = self._shape.adapter_parameters(lora.rank, lora.target_modules)
        self._learner_bf16 = config.model.dtype == "bfloat16"
        self._engine_bf16 = (config.rollout.dtype or config.model.dtype) == "bfloat16"

    def metrics(
        self,
        groups: Sequence[ScoredGroup],
        batches: Sequence[TrainBatch],
        values: Mapping[str, float | int | str | None],
        *,
        learner: object,
        engine: object,
    ) -> Values:
        """Of one step.

        Args:
            groups: the step's buffer.
            batches: what each update learnt from.
            values: the step's other metrics, for its seconds.
            learner, engine: say on what they compute if they are ``OnDevices``; of one that does not say nothing is
                told (recorded rollouts are not generated).
        """
        found: Values = {}
        trained, sampled = trained_work(batches), sampled_work(groups)
        for who, part in (("learner", learner), ("engine", engine)):
            if isinstance(part, OnDevices):
                found[f"memory/{who}/peak_mb"] = part.peak_mb()
        if isinstance(learner, OnDevices) and batches:
            flops = None if self._shape is None else update_flops(self._shape, trained, adapters=self._adapters)
            tokens, seconds = trained.prompts + trained.predicted, _seconds(values, "time/train")
            found |= rates("learner", tokens, flops, seconds, learner.devices, bf16=self._learner_bf16)
        if isinstance(engine, OnDevices):
            flops = None if self._shape is None else generation_flops(self._shape, sampled)
            seconds = _seconds(values, "time/rollout")
            if "idle/engine/seconds" in values:  # asynchronous: it generates all the time, but for this
                seconds = _seconds(values, "time/step") - _seconds(values, "idle/engine/seconds")
            found |= rates("engine", sampled.predicted, flops, seconds, engine.devices, bf16=self._engine_bf16)
        return found


def rates(
    who: str, tokens: int, flops: float | None, seconds: float, devices: Sequence[str], *, bf16: bool
) -> dict[str, float]:
    """``speed/<who>/...`` and ``flops/<who>`` of ``tokens`` in ``seconds`` on ``devices``; nothing without these.

    MFU only where every device's peak is known and it is the peak of the arithmetic that is used (``bf16``).
    """
    if seconds <= 0 or not devices:
        return {}
    found = {
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_device": tokens / seconds / len(devices),
    }
    if flops is not None:
        found["flops_per_second"] = flops / seconds
        peaks = [peak_flops(name) for name in devices]
        known = [peak for peak in peaks if peak is not None]
        if bf16 and len(known) == len(devices):
            found["mfu"] = flops / seconds / sum(known)
    told = {f"speed/{who}/{name}": value for name, value in found.items()}
    return told if flops is None else {f"flops/{who}": flops, **told}


def trained_work(batches: Iterable[TrainBatch]) -> SequenceWork:
    """Of all updates; in each a prompt counts once for all responses to it."""
    total = SequenceWork()
    for batch in batches:
        by_prompt: dict[bytes, tuple[int, list[int]]] = {}
        for sample in batch.samples:
            known = by_prompt.setdefault(sample.prompt_tokens.tobytes(), (len(sample.prompt_tokens), []))
            known[1].append(len(sample.tokens))
        total += sequence_work(by_prompt.values())
    return total


def sampled_work(groups: Iterable[ScoredGroup]) -> SequenceWork:
    """Of sampling these groups; each draw's prompt counts once."""
    return sequence_work(
        (len(g.group.request.prompt_tokens), [len(c) for c in g.group.completions if len(c)]) for g in groups
    )


def _shape(model_config: Mapping[str, Any]) -> ModelShape | None:
    try:
        return shape_from_config(model_config, "the start model")
    except ValueError:
        return None


def _seconds(values: Mapping[str, float | int | str | None], key: str) -> float:
    value = values.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0
