"""Everything that a run can be refused for, looked at before anything is computed or written.

``magicrl train``, its ``--dry-run`` and the library's ``train`` call ``check_run``. A supervised recipe has
``check_sft``, by itself or as the start of a run. What is costly to read is handed on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from magicrl.config.errors import RecipeError, under
from magicrl.config.schema import ModelConfig, SftConfig, TrainConfig
from magicrl.models.loading import LoadedModel, load_policy, load_shell, resolve_device
from magicrl.models.prompts import PromptEncoder
from magicrl.models.scorer import check_isolation
from magicrl.planning.machine import host_memory, learner_terms, memory_fault, run_terms
from magicrl.planning.shapes import ModelShape, shape_from_config
from magicrl.rollout.recording import read_rollouts
from magicrl.rollout.vllm_engine import vllm_missing
from magicrl.training.recorder import check_folder
from magicrl.training.run_data import RunData, load_data
from magicrl.training.sft import first_batches, made_model, start_policy, supervised_start


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What the checks have read, for the run to go on with.

    Attributes:
        data: the problems.
        policy: ``start.model`` in float32 on the run's device; None where it is made first, or lives on other machines.
    """

    data: RunData
    policy: LoadedModel | None


def check_run(config: TrainConfig, output: Path, *, resume: bool) -> Ready:
    """Refuse what can be refused: output folder, packages, device, start model, problems, lengths, memory.

    Args:
        config: the resolved recipe.
        output: the run folder.
        resume: a run in ``output`` is to be continued.

    Raises:
        RecipeError: a setting or a combination of them is unusable (with its key).
        ValueError: a file or the machine is; the text says what to do.
    """
    check_folder(output, config, resume=resume)
    _check_packages(config)
    here = config.cluster is None
    with under("run.device"):
        device = resolve_device(config.run.device) if here else torch.device("cpu")
    if config.start.model is None:
        recipe, folder = supervised_start(config.start, output.parent / "models")
        with under("start.sft"):
            policy = check_sft(recipe, folder)
    else:
        with under("start.model"):
            name = config.start.model
            policy = load_policy(name, device=device) if here else load_shell(name)
        if here:
            check_isolation(policy.model, valid_vocab=policy.valid_vocab, shared=config.model.share_prompts)
    encoder = PromptEncoder(policy.tokenizer, config.data.max_prompt_tokens)
    data = load_data(config, encoder)
    tests = (p for problems in data.test.values() for p in problems)
    longest = max(encoder.length(p) for p in (*data.train, *data.validation, *tests))
    check_context(config, policy, longest)
    if config.reference.model is not None:
        with under("reference.model"):
            load_shell(config.reference.model)
    if config.rollout.replay is not None:
        with under("rollout.replay"):
            read_rollouts(Path(config.rollout.replay))
    shape = _shape(policy)
    if here and shape is not None:
        _check_memory("model", config.model, device, lambda model: run_terms(config, model, shape, longest))
    return Ready(data=data, policy=policy if config.start.model is not None and here else None)


def check_sft(config: SftConfig, output: Path) -> LoadedModel:
    """Refuse what a supervised recipe can be refused for; the model that it starts from, or has made already.

    Args:
        config: the recipe.
        output: the model folder that it writes.

    Raises:
        RecipeError, ValueError: as ``check_run``.
    """
    made = made_model(config, output)
    if made is not None:
        return load_policy(made)
    _check_peft("training", config.training)
    with under("run.device"):
        device = resolve_device(config.run.device)
    policy = start_policy(config, output)
    check_isolation(policy.model, valid_vocab=policy.valid_vocab, shared=config.training.share_prompts)
    batches = first_batches(config, policy)
    shape = _shape(policy)
    if shape is not None:
        tokens = max(sum(len(sample) for sample in batch) for batch in batches)
        longest = max(len(sample) for batch in batches for sample in batch)
        _check_memory(
            "training",
            config.training,
            device,
            lambda model: learner_terms(model, shape, batch_tokens=tokens, longest=longest),
        )
    return policy


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


def _check_packages(config: TrainConfig) -> None:
    """Optional extras that the recipe asks for; trackers are the command's to make."""
    _check_peft("model", config.model)
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise vllm_missing(ImportError(name="vllm"))


def _check_peft(section: str, model: ModelConfig) -> None:
    if model.lora is not None and importlib.util.find_spec("peft") is None:
        raise RecipeError("needs PEFT, which is not installed: pip install 'magicrl[lora]'", key=f"{section}.lora")


def _check_memory(
    section: str, model: ModelConfig, device: torch.device, terms: Callable[[ModelConfig], Mapping[str, float]]
) -> None:
    memory = float(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else host_memory()
    fault = memory_fault(section, model, terms, memory)
    if fault is not None:
        raise ValueError(fault)


def _shape(policy: LoadedModel) -> ModelShape | None:
    """The model's shape; None for an architecture whose memory the planner cannot count."""
    try:
        return shape_from_config(policy.model.config.to_dict(), policy.folder)
    except ValueError:
        return None
