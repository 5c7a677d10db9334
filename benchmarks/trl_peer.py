"""TRL's GRPO trainer as a peer: of the learner alone (``learn``), and of a whole step (``train``).

The learner is fed with given responses: they go in by TRL's ``rollout_func`` and their rewards by a reward function,
so that padding, shuffling, splitting into micro-batches, loss, backward pass, clipping and optimizer are TRL's own.
Timed is an update from TRL's ``on_step_begin`` to its ``on_step_end`` without the time in which it prepares inputs
(generation, rewards, advantages): forward, loss, backward, clipping, AdamW.

In a whole step generation, rewards function, learner and loop are TRL's; nothing of magicrl runs inside its steps but
the verifier that judges both sides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner_cases import Response
from measure import Clock, Times

from magicrl.config.schema import OptimizerConfig, StageConfig
from magicrl.records import Problem
from magicrl_verifiers.records import VerifierService

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func says at every start that it may change

from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NOTHING = Times(cpu=0.0, wall=0.0)


def _config(scratch: Path, *, responses: int, batch: int, samples: int, longest: int, **further: Any) -> GRPOConfig:
    """What both peers share: clips and loss of magicrl's side, nothing recomputed, nothing reported.

    Args:
        scratch: a folder for what TRL writes.
        responses: of an update.
        batch: sequences of one forward pass.
        samples: responses of a prompt.
        longest: responses are cut here.
        further: the rest.
    """
    return GRPOConfig(
        output_dir=str(scratch),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=responses // batch,
        num_generations=samples,
        max_completion_length=longest,
        loss_type="dapo",  # the mean over all response tokens of the update
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        temperature=1.0,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        **further,
    )


# ------------------------------------------------------------------------------------------------ the learner alone


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSettings:
    """How TRL's learner runs."""

    bf16: bool  # autocast to bfloat16 over float32 weights (TRL's default); False computes in the weights' precision
    compiled: bool = False  # the model's forward by ``torch.compile``
    per_device_batch: int  # sequences of one forward pass
    learning_rate: float  # of every update
    max_grad_norm: float  # gradients are clipped to this norm


class PeerHooks:
    """What the benchmark does around TRL's updates; numbers count updates from 0."""

    def before(self, number: int) -> None:
        """Called before an update's clock starts."""

    def gradients(self, number: int, model: Any) -> None:
        """Called when an update's gradient is complete and clipped."""

    def after(self, number: int, times: Times) -> None:
        """Called with an update's times."""


class _Timed(GRPOTrainer):
    """Counts the time spent on preparing inputs, which is no part of learning."""

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
    """Make ``updates`` updates on the same responses; TRL's log.

    Args:
        model: the policy, which TRL trains in place.
        folder: where its tokenizer is.
        responses: the groups one after the other, all of one size.
        settings: of TRL.
        hooks: called around each update.
        updates: how many.
        scratch: a folder for what TRL writes.
    """
    groups = max(r.group for r in responses) + 1
    samples = len(responses) // groups
    callback = _Callback(hooks)
    config = _config(
        scratch,
        responses=len(responses),
        batch=settings.per_device_batch,
        samples=samples,
        longest=max(len(r.tokens) for r in responses),
        scale_rewards="none",
        learning_rate=settings.learning_rate,
        weight_decay=0.01,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.bf16,
        torch_compile=settings.compiled,
        max_steps=updates,
        shuffle_dataset=False,
        seed=0,
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
    return _trained(trainer)


def _trained(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history


def _replay(responses: Sequence[Response], samples: int) -> Callable[[list[str], Any], dict[str, Any]]:
    """A rollout function that answers the prompts (group numbers, each ``samples`` times) with given responses."""

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


# ---------------------------------------------------------------------------------------------------- a whole step

Measure = Callable[[int, Times, Any], bool]  # told ``(updates, time so far, model)`` after an update; True ends the run


class _Watch(TrainerCallback):
    """Adds up the time of the steps and hands the model out between them."""

    def __init__(self, measure: Measure) -> None:
        self._measure, self._clock, self._total = measure, Clock(), NOTHING

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
    measure: Measure,
    *,
    stage: StageConfig,
    optimizer: OptimizerConfig,
    per_device_batch: int,
    bf16: bool,
    steps: int,
    seed: int,
    scratch: Path,
    **further: Any,
) -> None:
    """Train ``model`` in place until ``measure`` says that it is enough.

    Args:
        model: a float32 causal model of transformers.
        tokenizer: its tokenizer.
        problems: to draw from, in an order of TRL's own.
        prompts: what TRL is to encode, one a problem: text, or chat messages.
        judge: gives the verdicts, as it does on magicrl's side.
        measure: called after every update.
        stage: batch, group size and limit of a response.
        optimizer: settings of AdamW.
        per_device_batch: sequences of one forward pass of TRL's learner.
        bf16: autocast to bfloat16 over the model's own weights.
        steps: at most so many.
        seed: of sampling and of the prompts' order.
        scratch: a folder for what TRL writes.
        further: of TRL's configuration, such as ``use_transformers_continuous_batching``.
    """
    ends = {tokenizer.eos_token_id}

    def reward(completions: list[Any], completion_ids: list[list[int]], number: list[int], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        tickets = [judge.submit(problems[n], [text]) for n, text in zip(number, texts, strict=True)]
        verdicts = [judge.result(ticket)[0] for ticket in tickets]
        # as on the other side, an answer that was cut at the limit is none
        pairs = zip(verdicts, completion_ids, strict=True)
        return [float(verdict.correct and bool(ids) and ids[-1] in ends) for verdict, ids in pairs]

    config = _config(
        scratch,
        responses=stage.rollout_batch * stage.group_size,
        batch=per_device_batch,
        samples=stage.group_size,
        longest=stage.max_tokens,
        scale_rewards="group",
        learning_rate=optimizer.learning_rate,
        adam_beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        bf16=bf16,
        max_steps=steps,
        seed=seed,
        **further,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": list(prompts), "number": list(range(len(problems)))}),
        processing_class=tokenizer,
        callbacks=[_Watch(measure)],
    )
    _trained(trainer)
