"""TRL's GRPO trainer as a peer of the learner.

It trains on given responses: they enter through TRL's ``rollout_func``, rewards through a reward function. Padding,
shuffling, splitting into micro-batches, loss, backward pass, clipping and optimizer are TRL's own. The measured time is
from ``on_step_begin`` to ``on_step_end`` without preparing inputs (generation, rewards, advantages).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.speed.learner_cases import Response
from benchmarks.speed.measure import Clock, Times

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # silences a warning that rollout_func may change

from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NOTHING = Times(cpu=0.0, wall=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSettings:
    """Settings of TRL's learner."""

    bf16: bool  # autocast to bfloat16 over float32 weights (TRL's default); False computes in the weights' precision
    compiled: bool = False  # the model's forward by ``torch.compile``
    per_device_batch: int  # sequences of one forward pass
    learning_rate: float  # of every update
    max_grad_norm: float  # gradients are clipped to this norm


class PeerHooks:
    """Hooks around TRL's updates, which are counted from 0."""

    def before(self, number: int) -> None:
        """Called before an update's clock starts."""

    def gradients(self, number: int, model: Any) -> None:
        """Called when an update's gradient is complete and clipped."""

    def after(self, number: int, times: Times) -> None:
        """Called with an update's times."""


class _Timed(GRPOTrainer):
    """Clock of the time spent on preparing inputs, which is not learning."""

    preparing = NOTHING

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        clock = Clock()
        found = super()._prepare_inputs(generation_batch)
        self.preparing = self.preparing + clock.read()
        return found


class _Callback(TrainerCallback):
    trainer: _Timed

    def __init__(self, hooks: PeerHooks) -> None:
        self._hooks, self._clock = hooks, Clock()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hooks.before(state.global_step)
        self.trainer.preparing = NOTHING
        self._clock = Clock()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        clock = Clock()
        self._hooks.gradients(state.global_step, kwargs["model"])
        self.trainer.preparing = self.trainer.preparing + clock.read()  # ours, not TRL's

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        total, aside = self._clock.read(), self.trainer.preparing
        self._hooks.after(state.global_step - 1, Times(cpu=total.cpu - aside.cpu, wall=total.wall - aside.wall))


def learn(
    model: Any,
    folder: Path,
    responses: Sequence[Response],
    settings: PeerSettings,
    hooks: PeerHooks,
    *,
    updates: int,
    scratch: Path,
) -> list[dict[str, Any]]:
    """Run ``updates`` updates on the same responses and return TRL's log.

    Args:
        model: The policy, which TRL trains in place.
        folder: Folder of its tokenizer.
        responses: Groups of equal size, one after the other.
        settings: Settings of TRL.
        hooks: Called around each update.
        updates: Number of updates.
        scratch: Folder for TRL's output.
    """
    groups = max(r.group for r in responses) + 1
    samples = len(responses) // groups
    callback = _Callback(hooks)
    config = GRPOConfig(
        output_dir=str(scratch),
        per_device_train_batch_size=settings.per_device_batch,
        gradient_accumulation_steps=len(responses) // settings.per_device_batch,
        num_generations=samples,
        max_completion_length=max(len(r.tokens) for r in responses),
        # clips and loss of magicrl's side, nothing recomputed, nothing reported
        loss_type="dapo",  # the mean over all response tokens of the update
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        scale_rewards="none",
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.bf16,
        torch_compile=settings.compiled,
        gradient_checkpointing=False,
        max_steps=updates,
        shuffle_dataset=False,
        seed=0,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    )
    trainer = _Timed(
        model=model,
        reward_funcs=_given_rewards,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(group) for group in range(groups)]}),
        processing_class=AutoTokenizer.from_pretrained(folder, local_files_only=True),
        callbacks=[callback],
        rollout_func=_replay(responses, samples),
    )
    callback.trainer = trainer
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history


def _replay(responses: Sequence[Response], samples: int) -> Callable[[list[str], Any], dict[str, Any]]:
    """Return a rollout function that answers prompts (group numbers, each ``samples`` times) with given responses."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        taken: dict[str, int] = {}
        found: list[Response] = []
        for prompt in prompts:
            member = taken.get(prompt, 0)
            taken[prompt] = member + 1
            found.append(responses[int(prompt) * samples + member])
        return {
            "prompt_ids": [r.prompt_tokens for r in found],
            "completion_ids": [r.tokens for r in found],
            "logprobs": [[0.0] * len(r.tokens) for r in found],
            "given": [r.reward for r in found],
        }

    return rollout


def _given_rewards(given: list[float], **kwargs: Any) -> list[float]:
    return given
