"""From a recipe to the parts of a run: models, engines, problems, controllers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from magicrl.config.errors import RecipeError, under
from magicrl.config.schema import StartConfig, TrainConfig
from magicrl.data.families import make_family
from magicrl.data.sources import problems_fingerprint
from magicrl.models import cpu_kernels
from magicrl.models.loading import LoadedModel, described_model, load_policy, resolve_device
from magicrl.models.model_files import files_fingerprint, find_model, weights_fingerprint
from magicrl.models.prompts import PromptEncoder, prompt_format
from magicrl.records import Problem
from magicrl.rollout.engine_settings import EngineSettings, TrainingUse
from magicrl.rollout.engines import make_engine
from magicrl.rollout.episodes import EpisodeEngine
from magicrl.rollout.protocol import RolloutEngine, WeightCheck
from magicrl.rollout.vllm_weights import Placed
from magicrl.rollout.weight_lag import LaggedEngine
from magicrl.training.learner import LocalLearner, ReferenceModel
from magicrl.training.logprob_check import PROBES, LogprobCheck
from magicrl.training.objective import LearnerSettings
from magicrl.training.protocols import Learner, Reference
from magicrl.training.sft import run_sft, supervised_start
from magicrl.training.start_checks import Ready, RunData, with_needed_reference
from magicrl.training.teacher import Teacher, make_teacher
from magicrl_verifiers.records import VerifierService
from magicrl_verifiers.secrets import without_secrets

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """Parts of a run that are loaded from files.

    Attributes:
        start: Initial model as it was loaded. Its ``model`` belongs to the learner, and may have no weights.
        encoder: Prompt encoder.
        data: Problems.
        learner: Learner with the trained weights.
        engine: Rollout engine, without weights yet.
        reference: Reference model, or None.
        teacher: Teacher of on-policy distillation, or None.
        devices: Number of accelerators, or of machines without any, that the run uses.
    """

    start: LoadedModel
    encoder: PromptEncoder
    data: RunData
    learner: Learner
    engine: RolloutEngine
    reference: Reference | None
    teacher: Teacher | None
    devices: int

    def facts(self) -> dict[str, Any]:
        """Return provenance for ``run.json``: initial model, and a checksum of every set of problems."""
        sets = {"train": self.data.train, "validation": self.data.validation}
        sets |= {f"test/{name}": problems for name, problems in self.data.test.items()}
        on_cpu = self.start.model.device.type == "cpu"
        return {
            "start_model": without_secrets(self.start.folder),
            "start_weights": weights_fingerprint(find_model(self.start.folder)),
            "start_files": files_fingerprint(find_model(self.start.folder)),
            "prompt_format": prompt_format(self.start.tokenizer),
            "start_model_licence": self.start.licence,
            "data": {name: _facts_of(problems) for name, problems in sets.items()},
            "dropped_overlong": self.data.dropped_overlong,
            "dropped_in_test": self.data.dropped_in_test,
            "dropped_conflicting": self.data.dropped_conflicting,
            "devices": self.devices,
            # They round differently. A process without a compiler or a cache folder may have torch's.
            "kernels": ("magicrl's" if cpu_kernels.missing() is None else "torch's") if on_cpu else None,
        }


class OwnedVerifiers(VerifierService, Protocol):
    """A verifier service that a run owns."""

    def warm_up(self, verifiers: Iterable[str]) -> None:
        """Start every worker of these verifiers now. Raises ``RuntimeError`` if one does not start."""
        ...

    def totals(self) -> Mapping[str, float]:
        """Return the usage of a served judge so far; {} without one."""
        ...


class LocalParts:
    """Creates the parts of a run, all in this process.

    Subclasses create them in other processes. The loop is the same for all of them.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    @property
    def devices(self) -> int:
        """Number of accelerators, or of machines without any, that learner and engine use."""
        return 1

    def judge(self) -> OwnedVerifiers:
        """Return the verifier pool of the recipe's ``[verifier]``."""
        return self._config.verifier.pool()

    def policy(self, start: Path | str) -> LoadedModel:
        """Return the initial model for `learner`: with float32 weights, or without any where other processes read them.

        Raises:
            RecipeError: ``run.device`` is unavailable, or ``start.model`` is not a model.
            ValueError: The model's files are unusable.
        """
        with under("run.device"):
            device = resolve_device(self._config.run.device)
        with under("start.model"):
            # Float32 whatever `model.dtype` is, since the master weights are copied from it.
            return load_policy(start, dtype="float32", device=device)

    def learner(self, policy: LoadedModel) -> Learner:
        """Return the learner. It owns the initial model from here on."""
        return make_learner(self._config, policy)

    def reference(self, start: Path | str, learner: Learner) -> Reference | None:
        """Return the frozen reference model (default: the initial model), or None where the recipe needs none."""
        return make_reference(self._config, start)

    def engine(self, start: Path | str, encoder: PromptEncoder, learner: Learner, check: WeightCheck) -> RolloutEngine:
        """Return the engine that ``rollout.engine`` names, without weights yet.

        It will load those of ``learner``. Engines outside the learner's process run ``check`` after loading.
        """
        return make_training_engine(self._config, start, encoder, check=check)


def build_run(config: TrainConfig, ready: Ready, start: Path | str, parts: LocalParts | None = None) -> Built:
    """Load the model and create the engines.

    Args:
        config: The recipe.
        ready: Result of ``check_run``.
        start: Folder of the initial model, or its hub name.
        parts: Creates the parts that may run in other processes.

    Raises:
        RecipeError: A setting or a combination of settings is unusable (with its key).
        ValueError: A file is unusable. The text says what to do.
    """
    parts = parts or LocalParts(config)
    data, loaded = ready
    policy = loaded or parts.policy(start)
    encoder = PromptEncoder(policy.tokenizer, config.data.max_prompt_tokens)
    learner = parts.learner(policy)
    check = LogprobCheck(
        learner,
        [(problem, encoder.encode(problem)) for problem in data.train[:PROBES]],
        float32=config.model.dtype == (config.rollout.dtype or config.model.dtype) == "float32",
        ceiling=config.rollout.max_sampler_gap,
        max_tokens=min(stage.max_tokens for stage in config.stages),  # no probe is longer than any stage allows
    )
    engine = parts.engine(start, encoder, learner, check)
    # Recorded rollouts include the environments' observations.
    if data.environments() and config.rollout.engine != "replay":
        engine = EpisodeEngine(engine, encoder, config.environment)
    return Built(
        start=policy,
        encoder=encoder,
        data=data,
        learner=learner,
        engine=engine,
        reference=parts.reference(start, learner),
        teacher=make_teacher(config, policy, learner),
        devices=parts.devices,
    )


def set_threads(config: TrainConfig) -> int:
    """Set torch's threads as in the recipe (default: the cores this process may use) and return their number."""
    threads = config.run.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def start_model_folder(start: StartConfig, models_root: Path, progress: Progress) -> Path | str:
    """Return the folder (or hub name) of the initial model. The model of an SFT recipe is trained if it is absent."""
    if start.model is not None:
        return start.model
    recipe, folder = supervised_start(start, models_root)
    return run_sft(recipe, folder, on_step=partial(progress, "supervised start"))


def make_training_engine(
    config: TrainConfig,
    folder: Path | str,
    encoder: PromptEncoder,
    *,
    check: WeightCheck | None = None,
    gpus: int = 1,
) -> RolloutEngine:
    """Return the engine that the recipe names, without weights yet.

    Args:
        config: The recipe.
        folder: Folder of the initial model.
        encoder: Prompt encoder and decoder.
        check: Weight check that engines outside the learner's process run after each weight copy.
        gpus: Number of GPUs over which vLLM spreads the model.
    """
    rollout, placed = config.rollout, None if config.cluster is None else config.cluster.rollout
    shared = placed is None or placed.colocated  # shares the GPU with the learner
    direct: Placed | None = None
    if placed is not None and placed.weight_copy == "direct":
        direct = "colocated" if placed.colocated else "apart"
    vllm = rollout.engine == "vllm"
    if vllm and resolve_device(config.run.device).type == "cpu" and torch.cuda.is_available():
        raise RecipeError("vLLM uses the GPU of this machine; leave run.device out", key="run.device")
    settings = EngineSettings(
        model=str(folder),
        dtype=rollout.dtype or config.model.dtype,
        head_dtype=config.model.head_dtype,
        device=config.run.device,
        max_rows=rollout.max_rows,
        max_context=_max_context(config, folder) if vllm else None,
        memory_limit_mb=rollout.memory_limit_mb,
        gpus=gpus,
        vllm=rollout.vllm,
        options={"replay": rollout.replay} if rollout.engine == "replay" else {},
        exact=config.model.exact,
        encoder=encoder,
        training=TrainingUse(
            check=check,
            shares_gpu=shared,
            # In asynchronous mode it generates while the learner works, so its memory is never free.
            sleeps=shared and not rollout.max_staleness,
            direct_weights=direct,
            experts=config.model.router_replay,
            lora=config.model.lora,
        ),
    )
    engine = make_engine(rollout.engine, settings, key="rollout.engine")
    # In asynchronous mode the learner measures the entropy of the whole buffer.
    if config.entropy.estimator == "exact" and not (engine.capabilities.entropies or rollout.max_staleness):
        # The engine may hold processes and GPU memory.
        engine.close()
        raise RecipeError(
            f'"exact" needs an engine that reports entropies, and {rollout.engine!r} declares that it does not; set it '
            'to "sampled"',
            key="entropy.estimator",
        )
    return LaggedEngine(engine, lag=rollout.weight_lag) if rollout.weight_lag else engine


def _max_context(config: TrainConfig, folder: Path | str) -> int:
    """Return the largest number of prompt and response tokens of any stage, evaluation or filter, at most the
    model's."""
    data = config.data
    filtered = 0 if data.difficulty_filter is None else data.difficulty_filter.max_tokens or 0
    longest = max(config.evaluation.max_tokens or 0, filtered, *(stage.max_tokens for stage in config.stages))
    # A source may have problems with an environment, whose observations come in addition. A custom source may.
    if any(
        source.environment is not None
        or source.source is not None
        or (source.family is not None and hasattr(make_family(source.family, source.options), "environment"))
        for source in (*data.train, *data.validation, *data.test.values())
    ):
        longest += config.environment.most_observed
    return min(described_model(str(folder)).max_context, data.max_prompt_tokens + longest)


def make_learner(config: TrainConfig, policy: LoadedModel) -> LocalLearner:
    """Return the learner on the initial model (float32 masters)."""
    return LocalLearner(
        policy.model, LearnerSettings.of(config), tokenizer=policy.tokenizer, valid_vocab=policy.valid_vocab
    )


def make_reference(config: TrainConfig, start: Path | str) -> ReferenceModel | None:
    """Return the frozen reference model in this process, or None where the recipe needs none."""
    if with_needed_reference(config).reference.mode == "none":
        return None
    with under("reference.model"):
        # A frozen model needs no master weights, so it is loaded in the compute precision.
        policy = load_policy(
            config.reference.model or start, dtype=config.model.dtype, device=resolve_device(config.run.device)
        )
    return ReferenceModel(policy.model, valid_vocab=policy.valid_vocab, model_config=config.model)


def _facts_of(problems: Sequence[Problem]) -> dict[str, Any]:
    """Return the provenance of a set of problems."""
    found = {"problems": len(problems), "prompts": len({problem.key for problem in problems})}
    checksums = {"sha256": problems_fingerprint(problems)}
    if any(".py:" in f"{problem.verifier} {problem.environment}" for problem in problems):
        checksums["sha256_with_folders"] = problems_fingerprint(problems, folders=True)
    return {**found, **checksums}
