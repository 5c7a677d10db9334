"""The workloads of `learner_speed.py` in the forms of magicrl and of TRL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.speed.models import SMOLLM2, TINY, long_tailed, sample_of, story_tokens
from magicrl.config.model_schema import DType
from magicrl.records import TrainSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One response of a group, training data of both learners."""

    group: int
    prompt_tokens: list[int]
    tokens: list[int]
    reward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The work of one update."""

    name: str  # of the case in the JSON
    model: str  # a name that ``bench_models`` knows
    # precision of ours; bfloat16 is autocast over float32 weights on TRL's side, as ours has float32 masters
    dtype: DType
    prompts: int  # groups
    samples: int  # responses of each
    prompt_tokens: int  # tokens of every prompt
    tokens: int  # response tokens: of every response, or the longest where ``median`` is set
    peer_batch: int  # sequences of one of TRL's forward passes: the fastest found by ``--tune``
    peer_compiled: bool = False  # whether TRL compiles the model, likewise
    micro_batch_tokens: int  # the same of ours
    median: int | None = None  # median response length of the long-tailed case; None for equal lengths

    def responses(self) -> list[Response]:
        """Return stories of the case's lengths; in each group every other response is correct."""
        count = self.prompts * self.samples
        lengths = np.full(count, self.tokens)
        if self.median is not None:
            lengths = long_tailed(count, self.median, self.tokens)
            lengths[0] = self.tokens  # padding reaches the limit
        prompts = story_tokens(self.model, self.prompts * self.prompt_tokens, 0).reshape(self.prompts, -1)
        text = np.split(story_tokens(self.model, int(lengths.sum()), 1), np.cumsum(lengths)[:-1])
        return [
            Response(
                group=number // self.samples,
                prompt_tokens=prompts[number // self.samples].tolist(),
                tokens=text[number].tolist(),
                reward=float(number % 2),
            )
            for number in range(count)
        ]


def _smollm2(name: str, dtype: DType, *, ragged: bool) -> Case:
    shape: dict[str, Any] = (
        {"prompts": 2, "samples": 4, "prompt_tokens": 32, "tokens": 256, "median": 48}
        if ragged
        else {"prompts": 2, "samples": 4, "prompt_tokens": 128, "tokens": 128}
    )
    # as `--tune` found; float32 has the settings of bfloat16
    batches = {"peer_batch": 8 if ragged else 4, "peer_compiled": True, "micro_batch_tokens": 2048}
    return Case(name=name, model=SMOLLM2, dtype=dtype, **batches, **shape)


CASES = (
    _smollm2("bf16-equal", "bfloat16", ragged=False),
    _smollm2("bf16-long-tail", "bfloat16", ragged=True),
    _smollm2("fp32-equal", "float32", ragged=False),
)
QUICK = (
    Case(name="tiny-bf16", model=TINY, dtype="bfloat16", prompts=2, samples=2, prompt_tokens=5, tokens=6, peer_batch=2,
         micro_batch_tokens=64),
    Case(name="tiny-long-tail", model=TINY, dtype="float32", prompts=2, samples=4, prompt_tokens=5, tokens=16,
         median=5, peer_batch=4, micro_batch_tokens=64),
)  # fmt: skip


def samples_of(responses: Sequence[Response]) -> list[TrainSample]:
    """Return training samples as in the loop: the advantage is the reward minus its group's mean."""
    groups: dict[int, list[float]] = {}
    for response in responses:
        groups.setdefault(response.group, []).append(response.reward)
    return [
        sample_of(r.prompt_tokens, r.tokens, r.reward - float(np.mean(groups[r.group])), r.group, number)
        for number, r in enumerate(responses)
    ]
