"""TRL's GRPO trainer as the peer of a whole step: its generation, its rewards function, its learner, its loop.

Nothing of magicrl runs inside its steps but the verifier that judges both sides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Clock, Times

from magicrl.records import Problem
from magicrl.verifiers.base import VerifierService

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

Measure = Callable[[int, Times, Any], bool]  # told ``(updates, time so far, model)`` after an update; True ends the run


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeSettings:
    """What decides TRL's run."""

    prompts: int
    samples: int
    max_tokens: int  # responses are cut here
    per_device_batch: int  # sequences of one forward pass of its learner
    learning_rate: float  # of AdamW, as the next three
    beta2: float
    weight_decay: float
    max_grad_norm: float
    bf16: bool  # autocast to bfloat16 over float32 weights
    steps: int  # at most so many
    seed: int  # of sampling and of the prompts' order
    entropy_target: float | None = None  # of its adaptive entropy bonus, as the next two; None switches it off
    entropy_step: float = 0.005
    entropy_maximum: float = 1.0


class _Watch(TrainerCallback):
    """Adds up the time of the steps and hands the model out between them."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._clock = Clock()
        self._total = Times(cpu=0.0, wall=0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock = Clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._total = self._total + self._clock.read()
        if self._measure(state.global_step, self._total, kwargs["model"]):
            control.should_training_stop = True


def train(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    prompts: Sequence[Any],
    judge: VerifierService,
    settings: WholeSettings,
    measure: Measure,
    *,
    scratch: Path,
) -> list[dict[str, Any]]:
    """Train ``model`` in place until ``measure`` says that it is enough; TRL's log.

    Args:
        model: a float32 causal model of transformers.
        tokenizer: its tokenizer.
        problems: to draw from, in an order of TRL's own.
        prompts: what TRL is to encode, one a problem: text, or chat messages.
        judge: gives the verdicts, as it does on magicrl's side.
        settings: see ``WholeSettings``.
        measure: called after every update.
        scratch: a folder for what TRL writes.
    """
    ends = {tokenizer.eos_token_id}

    def reward(completions: list[Any], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        tickets = [judge.submit(problems[n], [text]) for n, text in zip(number, texts, strict=True)]
        verdicts = [judge.result(ticket)[0] for ticket in tickets]
        # as on the other side, an answer that was cut at the limit is none
        pairs = zip(verdicts, completion_ids, strict=True)
        return [float(verdict.correct and bool(ids) and ids[-1] in ends) for verdict, ids in pairs]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=_config(settings, scratch),
        train_dataset=Dataset.from_dict({"prompt": list(prompts), "number": list(range(len(problems)))}),
        processing_class=tokenizer,
        callbacks=[_Watch(measure)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history


def _config(settings: WholeSettings, scratch: Path) -> GRPOConfig:
    entropy: dict[str, Any] = {}
    if settings.entropy_target is not None:
        entropy = {
            "use_adaptive_entropy": True,
            "entropy_target": settings.entropy_target,
            "entropy_coef_delta": settings.entropy_step,
            "entropy_coef_min": 0.0,
            "entropy_coef_max": settings.entropy_maximum,
            "entropy_coef": 0.0,
        }
    responses = settings.prompts * settings.samples
    return GRPOConfig(
        output_dir=str(scratch),
        per_device_train_batch_size=settings.per_device_batch,
        gradient_accumulation_steps=responses // settings.per_device_batch,
        num_generations=settings.samples,
        max_completion_length=settings.max_tokens,
        loss_type="dapo",  # the mean over all response tokens of the update
        scale_rewards="group",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        learning_rate=settings.learning_rate,
        adam_beta2=settings.beta2,
        lr_scheduler_type="constant",
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.bf16,
        gradient_checkpointing=False,
        max_steps=settings.steps,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        seed=settings.seed,
        **entropy,
    )
