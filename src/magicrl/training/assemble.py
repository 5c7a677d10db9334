"""From a recipe to the parts of a run: models, engines, problems, controllers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from magicrl.config.cluster_schema import RolloutPlacement
from magicrl.config.errors import RecipeError, under
from magicrl.config.schema import StartConfig, TrainConfig
from magicrl.data.families import make_family
from magicrl.data.sources import fingerprint
from magicrl.models.loading import LoadedModel, described_model, load_policy, resolve_device
from magicrl.models.prompts import PromptEncoder
from magicrl.rollout.engine_settings import EngineSettings, TrainingUse
from magicrl.rollout.engines import make_engine as named_engine
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
from magicrl_verifiers.records import VerifierService
from magicrl_verifiers.secrets import without_secrets

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """Everything of a run that is made from files.

    Attributes:
        start: the start model as it was loaded (its ``model`` belongs to the learner, and may have no weights).
        encoder: text to tokens.
        data: the problems.
        learner: holds the trained weights.
        engine: generates; has no weights yet.
        reference: None without one.
        devices: accelerators, or machines without any, that the run holds.
    """

    start: LoadedModel
    encoder: PromptEncoder
    data: RunData
    learner: Learner
    engine: RolloutEngine
    reference: Reference | None
    devices: int

    def facts(self) -> dict[str, Any]:
        """Provenance for ``run.json``: start model, and a checksum of every set of problems."""
        sets = {"train": self.data.train, "validation": self.data.validation}
        sets |= {f"test/{name}": problems for name, problems in self.data.test.items()}
        return {
            "start_model": without_secrets(self.start.folder),
            "prompt_format": "chat template" if self.start.tokenizer.chat_template else "plain text",
            "start_model_licence": self.start.licence,
            "data": {
                name: {"problems": len(p), "prompts": len({one.key for one in p}), "sha256": fingerprint(p)}
                for name, p in sets.items()
            },
            "dropped_overlong": self.data.dropped_overlong,
            "dropped_in_test": self.data.dropped_in_test,
            "dropped_conflicting": self.data.dropped_conflicting,
            "devices": self.devices,
        }


class Judge(VerifierService, Protocol):
    """A verifier pool that a run owns."""

    def warm_up(self, verifiers: Iterable[str]) -> None:
        """Start every worker of these verifiers now. Raises ``RuntimeError`` where one does not start."""
        ...

    def totals(self) -> Mapping[str, float]:
        """What a served judge was asked for so far; {} without one."""
        ...


class LocalParts:
    """Makes the parts of a run: everything in this process, on this machine.

    Others make them elsewhere; the loop is the same for all of them.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    @property
    def devices(self) -> int:
        """Accelerators, or machines without any, that learner and engine hold together."""
        return 1

    def judge(self) -> Judge:
        """The verifier pool of the recipe's ``[verifier]``."""
        return self._config.verifier.pool()

    def policy(self, start: Path | str) -> LoadedModel:
        """The start model for `learner`: with float32 weights, or without any where other processes read them.

        Raises:
            RecipeError: ``run.device`` is not there, or ``start.model`` is no model.
            ValueError: its files are unusable.
        """
        with under("run.device"):
            device = resolve_device(self._config.run.device)
        with under("start.model"):
            # whatever `model.dtype` is: the masters are made of these
            return load_policy(start, dtype="float32", device=device)

    def learner(self, policy: LoadedModel) -> Learner:
        """The learner on the start model, which is the learner's from here on."""
        return make_learner(self._config, policy)

    def reference(self, start: Path | str, learner: Learner) -> Reference | None:
        """The frozen reference (default: the start model), None where nothing of the recipe asks for one."""
        return make_reference(self._config, start)

    def engine(self, start: Path | str, encoder: PromptEncoder, learner: Learner, check: WeightCheck) -> RolloutEngine:
        """The engine that ``rollout.engine`` names, without a version of weights yet.

        It will be given ``learner``'s. Engines beside the learner's process run ``check`` then.
        """
        return make_engine(self._config, start, encoder, check=check)


def build(config: TrainConfig, ready: Ready, start: Path | str, parts: LocalParts | None = None) -> Built:
    """Load the model and make the engines.

    Args:
        config: the recipe.
        ready: what ``check_run`` has read.
        start: folder of the start model, or its hub name.
        parts: makes the parts that may live elsewhere.

    Raises:
        RecipeError: a setting or a combination of them is unusable (with its key).
        ValueError: a file is; the text says what to do.
    """
    parts = parts or LocalParts(config)
    policy, data = ready.policy or parts.policy(start), ready.data
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
    # recorded rollouts hold what environments answered
    if data.environments() and config.rollout.engine != "replay":
        engine = EpisodeEngine(engine, encoder, config.environment)
    return Built(
        start=policy,
        encoder=encoder,
        data=data,
        learner=learner,
        engine=engine,
        reference=parts.reference(start, learner),
        devices=parts.devices,
    )


def set_threads(config: TrainConfig) -> int:
    """Set torch's threads as the recipe says (default: the cores this process may use); returns them."""
    threads = config.run.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    return threads


def start_model_folder(start: StartConfig, models_root: Path, progress: Progress) -> Path | str:
    """The folder (or hub name) of the start model; an SFT recipe's model is made when it is absent."""
    if start.model is not None:
        return start.model
    recipe, folder = supervised_start(start, models_root)
    result = run_sft(recipe, folder, on_step=partial(progress, "supervised start"))
    return result.folder


def make_engine(
    config: TrainConfig,
    folder: Path | str,
    encoder: PromptEncoder,
    *,
    check: WeightCheck | None = None,
    gpus: int = 1,
) -> RolloutEngine:
    """The engine that the recipe names, with the start model's weights' shapes but no version yet.

    Args:
        config: the recipe.
        folder: of the start model.
        encoder: text to tokens and back.
        check: run by engines beside the learner's process after each weight copy.
        gpus: over how many GPUs vLLM spreads the model.
    """
    rollout, placed = config.rollout, None if config.cluster is None else config.cluster.rollout
    shared = placed is None or placed.colocated  # the GPU, with the learner
    vllm = rollout.engine == "vllm"
    if vllm and resolve_device(config.run.device).type == "cpu" and torch.cuda.is_available():
        raise RecipeError("vLLM uses the GPU where there is one", key="run.device")
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
            # asynchronous: it generates while the learner works, so its memory is never free
            sleeps=shared and not rollout.max_staleness,
            direct_weights=_direct_weights(placed),
            experts=config.model.router_replay,
            lora=config.model.lora,
        ),
    )
    engine = named_engine(rollout.engine, settings, key="rollout.engine")
    # asynchronous: the learner measures it, on the whole buffer
    if config.entropy.estimator == "exact" and not (engine.capabilities.entropies or rollout.max_staleness):
        # it may hold processes and a GPU's memory
        engine.close()
        raise RecipeError(
            f'"exact" needs an engine that reports entropies, and {rollout.engine!r} declares that it does not; set it '
            'to "sampled"',
            key="entropy.estimator",
        )
    return LaggedEngine(engine, lag=rollout.weight_lag) if rollout.weight_lag else engine


def _direct_weights(placed: RolloutPlacement | None) -> Placed | None:
    if placed is None or placed.weight_copy != "direct":
        return None
    return "colocated" if placed.colocated else "apart"


def _max_context(config: TrainConfig, folder: Path | str) -> int:
    """The most tokens of prompt and response that any stage or test has, at most the model's."""
    longest = max(config.evaluation.max_tokens or 0, *(stage.max_tokens for stage in config.stages))
    longest += config.environment.most_observed if _may_observe(config) else 0
    return min(described_model(str(folder)).max_context, config.data.max_prompt_tokens + longest)


def _may_observe(config: TrainConfig) -> bool:
    """Whether a source gives problems with an environment; of a function of the user's nobody knows."""
    data = config.data
    return any(
        source.environment is not None
        or source.source is not None
        or (source.family is not None and hasattr(make_family(source.family, source.options), "environment"))
        for source in (*data.train, *data.validation, *data.test.values())
    )


def make_learner(config: TrainConfig, policy: LoadedModel) -> LocalLearner:
    """The learner on the start model (float32 masters)."""
    return LocalLearner(
        policy.model, LearnerSettings.of(config), tokenizer=policy.tokenizer, valid_vocab=policy.valid_vocab
    )


def make_reference(config: TrainConfig, start: Path | str) -> ReferenceModel | None:
    """The frozen reference (default: the start model) in this process, None where nothing asks for one."""
    if with_needed_reference(config).reference.mode == "none":
        return None
    with under("reference.model"):
        # in the precision of the passes: a frozen model needs no master weights
        policy = load_policy(
            config.reference.model or start, dtype=config.model.dtype, device=resolve_device(config.run.device)
        )
    return ReferenceModel(policy.model, valid_vocab=policy.valid_vocab, model_config=config.model)
