"""From a recipe to the parts of a run: models, engines, problems, controllers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from magicrl.algorithms.entropy_control import EntropyController, make_controller
from magicrl.config.errors import RecipeError, under, without_secrets
from magicrl.config.loader import load_sft_recipe
from magicrl.config.schema import EntropyConfig, StartConfig, TrainConfig
from magicrl.data.fingerprint import fingerprint
from magicrl.evaluation.engines import in_process_engine
from magicrl.models.loading import LoadedModel, load_policy, resolve_device
from magicrl.models.prompts import PromptEncoder
from magicrl.rollout.lagged import LaggedEngine
from magicrl.rollout.protocol import RolloutEngine
from magicrl.rollout.recording import read_rollouts
from magicrl.rollout.replay import ReplayEngine
from magicrl.training.learner import LocalLearner
from magicrl.training.reference import ReferenceModel
from magicrl.training.run_data import RunData, load_data
from magicrl.training.sft import recipe_hash, run_sft

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """Everything of a run that is made from files.

    Attributes:
        start: the start model as it was loaded (its ``model`` belongs to the learner).
        encoder: text to tokens.
        data: the problems.
        learner: holds the trained weights.
        engine: generates; has no weights yet.
        reference: None without one.
    """

    start: LoadedModel
    encoder: PromptEncoder
    data: RunData
    learner: LocalLearner
    engine: RolloutEngine
    reference: ReferenceModel | None

    def facts(self) -> dict[str, Any]:
        """Provenance for ``run.json``: start model, and a checksum of every set of problems."""
        sets = {"train": self.data.train, "validation": self.data.validation}
        sets |= {f"test/{name}": problems for name, problems in self.data.test.items()}
        return {
            "start_model": without_secrets(self.start.folder),
            "prompt_format": "chat template" if self.start.tokenizer.chat_template else "plain text",
            "start_model_licence": self.start.licence,
            "data": {name: {"problems": len(p), "sha256": fingerprint(p)} for name, p in sets.items()},
            "dropped_overlong": self.data.dropped_overlong,
            "dropped_in_test": self.data.dropped_in_test,
            "devices": len({parameter.device for parameter in self.start.model.parameters()}),  # the engine's, too
        }


def build(config: TrainConfig, recipe_folder: Path, start: Path | str) -> Built:
    """Load the model and the problems, check that they fit each other, and make the engines.

    Raises:
        RecipeError: a setting or a combination of them is unusable (with its key).
        ValueError: a file is; the text says what to do.
    """
    with under("run.device"):
        device = resolve_device(config.run.device)
    with under("start.model"):
        policy = load_policy(start, dtype="float32", device=device)
    encoder = PromptEncoder(policy.tokenizer, config.data.max_prompt_tokens)
    data = load_data(config, recipe_folder, encoder)
    tests = (p for problems in data.test.values() for p in problems)
    check_context(config, policy, max(len(encoder.encode(p)) for p in (*data.train, *data.validation, *tests)))
    return Built(
        start=policy,
        encoder=encoder,
        data=data,
        learner=make_learner(config, policy),
        engine=make_engine(config, start, encoder),
        reference=make_reference(config, start),
    )


def set_threads(config: TrainConfig) -> int:
    """Set torch's threads as the recipe says (default: the cores this process may use); returns them."""
    threads = config.run.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def start_model_folder(start: StartConfig, recipe_folder: Path, models_root: Path, progress: Progress) -> Path | str:
    """The folder (or hub name) of the start model; an SFT recipe's model is made when it is absent."""
    if start.model is not None:
        local = recipe_folder / start.model
        return local if local.exists() and not Path(start.model).exists() else start.model
    assert start.sft is not None, "the schema asks for exactly one"
    try:
        recipe = load_sft_recipe(recipe_folder / start.sft)
    except RecipeError as error:
        raise RecipeError(str(error), key="start.sft") from error
    folder = models_root / f"{recipe.run.name}-{recipe_hash(recipe)}"
    result = run_sft(recipe, folder, on_step=lambda info: progress("supervised start", info.step, info.total))
    return result.folder


def check_context(config: TrainConfig, policy: LoadedModel, longest_prompt: int) -> None:
    """Raise ``RecipeError`` if a stage's T and the longest prompt do not fit the model's context."""
    limits = {f"stages.{i}.max_tokens": stage.max_tokens for i, stage in enumerate(config.stages)}
    if config.evaluation.max_tokens:
        limits["evaluation.max_tokens"] = config.evaluation.max_tokens
    for key, max_tokens in limits.items():
        if longest_prompt + max_tokens > policy.max_context:
            room = policy.max_context - longest_prompt
            remedy = f"lower it to at most {room}" if room > 0 else "use shorter prompts or another model"
            raise RecipeError(
                f"{max_tokens} and the longest prompt ({longest_prompt} tokens) exceed the context of "
                f"{policy.folder} ({policy.max_context} tokens); {remedy}",
                key=key,
            )


def make_engine(config: TrainConfig, folder: Path | str, encoder: PromptEncoder) -> RolloutEngine:
    """The engine that the recipe names, with the start model's weights' shapes but no version yet."""
    rollout = config.rollout
    if rollout.engine == "replay":
        assert rollout.replay is not None, "the schema asks for it"
        try:
            return ReplayEngine(read_rollouts(Path(rollout.replay)))
        except ValueError as error:
            raise RecipeError(str(error), key="rollout.replay") from error
    policy = load_policy(folder, dtype=rollout.dtype or config.model.dtype, device=resolve_device(config.run.device))
    engine = in_process_engine(
        policy,
        encoder.decode,
        max_rows=rollout.max_rows,
        memory_limit_mb=rollout.memory_limit_mb,
        device=resolve_device(config.run.device),
    )
    return LaggedEngine(engine, lag=rollout.weight_lag) if rollout.weight_lag else engine


def make_learner(config: TrainConfig, policy: LoadedModel) -> LocalLearner:
    """The learner on the start model (float32 masters)."""
    return LocalLearner(
        policy.model,
        tokenizer=policy.tokenizer,
        valid_vocab=policy.valid_vocab,
        loss=config.algorithm.loss,
        optimizer=config.optimizer,
        model_config=config.model,
        correction=config.algorithm.correction,
        correction_cap=config.algorithm.correction_cap,
        kl_coefficient=config.reference.coefficient,
        max_response_tokens=max(stage.max_tokens for stage in config.stages),
    )


def make_reference(config: TrainConfig, start: Path | str) -> ReferenceModel | None:
    """The frozen reference (default: the start model), None without one."""
    if config.reference.mode == "none":
        return None
    with under("reference.model"):
        policy = load_policy(
            config.reference.model or start, dtype=config.model.dtype, device=resolve_device(config.run.device)
        )
    return ReferenceModel(policy.model, valid_vocab=policy.valid_vocab, model_config=config.model)


def entropy_controller(config: EntropyConfig) -> EntropyController:
    """The controller of the recipe's ``[entropy]`` section."""
    return make_controller(
        config.controller,
        preset=config.preset,
        alpha=config.alpha,
        target=config.target,
        step=config.step,
        maximum=config.maximum,
    )
