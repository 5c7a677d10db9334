"""Recipe of ``magicrl train``: every setting with type, range and unit, those of the larger tables in the modules
next to this one.

The names follow the symbols of the report: ``rollout_batch`` is D_R, ``mini_batch`` D_T, ``group_size`` M (gs),
``reuse`` N_reuse, ``max_tokens`` T, ``temperature`` tau. An unknown key is an error, and no setting changes another
one. Importing this module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from magicrl.config.algorithm_schema import AlgorithmConfig, EntropyConfig, ReferenceConfig, TeacherConfig
from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.data_schema import DataConfig
from magicrl.config.model_schema import ModelConfig, OptimizerConfig
from magicrl.config.paths import FilePath, FolderOrName, RecipeName, Reference, reference_to
from magicrl.config.rollout_schema import RolloutConfig
from magicrl.config.section import Section
from magicrl.config.verifier_schema import VerifierConfig
from magicrl.registry import is_builtin


class StartConfig(Section):
    """Model that training starts from. Set exactly one of ``model`` and ``sft``."""

    model: FolderOrName | None = None
    """Folder of a Hugging Face model, or its name on the hub."""
    sft: RecipeName | None = None
    """Recipe of a supervised start (SFT): a file, or the name of a shipped recipe. Its model is trained first if it
    does not exist yet."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.model is None) == (self.sft is None):
            given = [f"{name} = {value!r}" for name, value in self if value is not None]
            raise ValueError(
                f"[start] needs exactly one of: model, sft; given: {', '.join(given) or 'none'} (--set model=NAME "
                "replaces the recipe's own)"
            )
        return self


class TransitionConfig(Section):
    """Rule that ends a stage before its ``max_steps``.

    ``converged``: the upper confidence bound of the gain of accuracy (of mean reward where rewards are graded)
    expected over the next ``horizon`` steps is below ``delta``. ``truncation``: the share of truncated responses has
    been below ``truncation_below`` for ``window`` steps. ``fixed``: the stage always has ``max_steps`` steps.
    """

    rule: Literal["converged", "truncation", "fixed"] = "converged"
    """Name of the rule (described above)."""
    horizon: int = Field(default=20, ge=1)
    """H, the number of steps for which the gain is predicted."""
    delta: float = Field(default=0.02, gt=0)
    """Gain that is too small to continue the stage for: of accuracy (0 to 1), or of a graded reward, in its units."""
    window: int = Field(default=20, ge=4)
    """Number of measurements between two tests of the rule, and the minimum number of measurements in a test."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence level of the upper bound."""
    truncation_below: float = Field(default=0.05, ge=0, le=1)
    """Share of truncated responses below which a stage with ``rule = "truncation"`` ends."""


class StageConfig(Section):
    """One stage of multi-stage training. A stage's own temperature, entropy target, KL coefficient, clip range, reuse
    and learning rate replace the recipe's."""

    max_tokens: int = Field(ge=1)
    """T, the maximum number of tokens per response. Longer responses are truncated."""
    rollout_batch: int = Field(ge=1)
    """D_R, the number of prompts per training step."""
    mini_batch: int | None = Field(default=None, ge=1)
    """D_T, the number of prompts per update (SGD step). Must divide ``rollout_batch``. Default: ``rollout_batch``, one
    on-policy update per step."""
    group_size: int = Field(ge=2)
    """M, the number of responses per prompt."""
    min_steps: int = Field(default=0, ge=0)
    """Minimum number of training steps of the stage."""
    max_steps: int = Field(ge=1)
    """Maximum number of training steps of the stage."""
    transition: TransitionConfig = TransitionConfig()
    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature (tau) of this stage. Default: ``rollout.temperature``."""
    entropy_target: float | None = Field(default=None, ge=0)
    """Target entropy in nats per token. Default: ``entropy.target``. The controller keeps its state, so its coefficient
    c continues from the earlier stage."""
    kl_coefficient: float | None = Field(default=None, ge=0)
    """beta, the weight of the KL penalty. Default: ``reference.coefficient``. With 0 the KL is measured only if
    ``reference.mode = "monitor"``."""
    clip_low: float | None = Field(default=None, gt=0)
    """eps_low of this stage. Default: ``algorithm.clip_low``."""
    clip_high: float | None = Field(default=None, gt=0)
    """eps_high of this stage. Default: ``algorithm.clip_high``."""
    reuse: int | None = Field(default=None, ge=1)
    """N_reuse of this stage. Default: ``algorithm.reuse``."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate of this stage. Default: ``optimizer.learning_rate``. The warm-up counts the updates of the whole
    run."""

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.mini_batch is not None and self.rollout_batch % self.mini_batch:
            raise ValueError(f"rollout_batch {self.rollout_batch} must be a multiple of mini_batch {self.mini_batch}")
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps {self.min_steps} exceeds max_steps {self.max_steps}")
        return self

    @property
    def num_minibatches(self) -> int:
        """D_R / D_T, the number of updates per pass over the rollout buffer."""
        return self.rollout_batch // (self.mini_batch or self.rollout_batch)

    def own(self) -> dict[str, float]:
        """Return the settings of ``STAGE_SETTINGS`` that this stage sets."""
        return {name: value for name in STAGE_SETTINGS if (value := getattr(self, name)) is not None}


STAGE_SETTINGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "temperature": ("rollout", "temperature"),
        "entropy_target": ("entropy", "target"),
        "kl_coefficient": ("reference", "coefficient"),
        "clip_low": ("algorithm", "clip_low"),
        "clip_high": ("algorithm", "clip_high"),
        "reuse": ("algorithm", "reuse"),
        "learning_rate": ("optimizer", "learning_rate"),
    }
)
"""Settings of a stage that replace a setting of the recipe, with that setting's table and key."""


class RunConfig(Section):
    """Name, seed, run folder and device of a run."""

    name: str = "run"
    """Name of the run, used for the run folder and in the report."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Random seed of prompts, sampling, mini-batches and held-out problems."""
    output: FilePath | None = None
    """Run folder; the option ``--output`` overrides it. Default: ``runs/<name>``."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads. Default: the number of cores that this process may use."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of learner and engine. ``auto`` uses CUDA if available, otherwise the CPU."""
    expected_minutes: float | None = Field(default=None, gt=0)
    """Duration of a shipped recipe, measured on two CPU cores. It is shown before the start if the recipe is
    unchanged."""

    @field_validator("name")
    @classmethod
    def _names_a_folder_of_its_own(cls, name: str) -> str:
        # "" and "." would be the folder of all runs itself
        if not re.search(r"[^\s./]", name):
            raise ValueError("names no folder; use letters, digits or dashes")
        return name


class EvaluationConfig(Section):
    """Validation during training, and the evaluation on the test sets before and after training."""

    every: int = Field(default=0, ge=0)
    """Number of training steps between two validations. 0: no validation during training."""
    validation_samples: int = Field(default=4, ge=1)
    """Number of responses per validation problem."""
    validation_temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of the validation. 0 is greedy, with one response per problem."""
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.6, 1.0)
    """Sampling temperatures of the test evaluation."""
    samples: int = Field(default=16, ge=1)
    """Number of responses per test problem and temperature. Temperature 0 always has one."""
    pass_at: tuple[int, ...] = (16,)
    """Values of k for pass@k, measured at temperature 1. With a k above ``samples``, k responses are sampled there."""
    start_pass_at: int | None = Field(default=None, ge=1)
    """Larger k of pass@k for the starting model at temperature 1. It shows what more sampling can find without
    training."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens per test response. Default: ``max_tokens`` of the last stage."""


class EnvironmentConfig(Section):
    """Limits and workers of the environments that problems name (`data.train[].environment`)."""

    max_turns: int = Field(default=8, ge=1)
    """Maximum number of model turns in one response. A response that is unfinished afterwards counts as truncated."""
    max_observation_tokens: int = Field(default=256, ge=1)
    """Maximum number of tokens of one observation, including the text that the chat template adds. A longer one is
    truncated. Observations do not count towards ``max_tokens``."""
    time_limit: float = Field(default=10.0, gt=0)
    """CPU seconds per call of an environment that sets no limit itself."""
    workers: int = Field(default=1, ge=1)
    """Number of worker processes per environment."""
    memory_limit_mb: int = Field(default=4096, ge=256)
    """Memory limit of each worker in MiB, for all its episodes together."""

    @property
    def most_observed(self) -> int:
        """Maximum number of tokens that observations can add to a response."""
        return (self.max_turns - 1) * self.max_observation_tokens


class CheckpointConfig(Section):
    """When checkpoints are written, and how many are kept. A checkpoint holds the complete state of the run."""

    every: int = Field(default=20, ge=1)
    """Number of training steps between two checkpoints."""
    keep_last: int = Field(default=2, ge=1)
    """Number of latest checkpoints to keep. Older ones are deleted."""
    keep_best: bool = True
    """Also keep the checkpoint with the best validation accuracy."""


class LoggingConfig(Section):
    """Records and trackers in addition to the metrics."""

    rollouts_every: int = Field(default=1, ge=0)
    """Number of training steps between two recordings of all rollouts (Parquet files). 0: none."""
    samples: int = Field(default=6, ge=0)
    """Number of test problems whose responses before and after training are shown in the report."""
    trackers: tuple[Annotated[Reference, reference_to("tracker")], ...] = ()
    """Trackers that receive the metrics: ``tensorboard``, ``wandb``, ``trackio``, ``mlflow`` (each an optional
    dependency), or a custom one (docs/guides/runs.md#trackers)."""
    project: str = Field(default="magicrl", min_length=1)
    """Project name in W&B and trackio, and experiment in MLflow."""


class TrainConfig(Section):
    """Complete recipe of `magicrl train`."""

    run: RunConfig = RunConfig()
    start: StartConfig
    model: ModelConfig = ModelConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    entropy: EntropyConfig = EntropyConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig | None = None
    """Teacher of on-policy distillation. Without this table there is none."""
    optimizer: OptimizerConfig = OptimizerConfig()
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    evaluation: EvaluationConfig = EvaluationConfig()
    verifier: VerifierConfig = VerifierConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    cluster: ClusterConfig | None = None
    """Placement on a Ray cluster. Without this table, the whole run uses this process and this machine."""

    @model_validator(mode="after")
    def _learner_and_engine_agree(self) -> Self:
        rollout, sampled = self.rollout, self.entropy.estimator == "sampled"
        if self.algorithm.loss == "nll":
            raise ValueError(
                'algorithm.loss = "nll" is the loss of magicrl sft: it imitates every response, right or wrong. '
                "Leave it out, or name another"
            )
        if rollout.engine == "vllm" and not sampled and not rollout.max_staleness:
            raise ValueError(
                'entropy.estimator = "exact" needs an engine that reports entropies, and rollout.engine = "vllm" does '
                'not; set entropy.estimator = "sampled"'
            )
        if rollout.max_staleness and sampled:
            raise ValueError(
                f'entropy.estimator = "sampled" with rollout.max_staleness = {rollout.max_staleness}: the tokens '
                "were sampled by older policies, whose log-probs do not measure the learner's entropy; use "
                '"exact", which the learner measures on the buffer'
            )
        controlled = self.entropy.controller not in ("none", "fixed")
        if controlled and rollout.max_staleness and self.model.entropy_clamp:
            raise ValueError(
                f"model.entropy_clamp = {self.model.entropy_clamp:g} with rollout.max_staleness = "
                f"{rollout.max_staleness}: the learner would measure the entropy that is controlled, without the least "
                "likely tokens, and in synchronous runs it is that of all tokens; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _exact_where_it_is_proven(self) -> Self:
        model, rollout = self.model, self.rollout
        faults = {
            f'rollout.engine = "{rollout.engine}": only the in_process engine\'s arithmetic is known': (
                rollout.engine != "in_process"
            ),
            "[cluster]: other machines and processes have kernels and threads of their own": self.cluster is not None,
            "model.lora: the learner adds adapters, the engine has them merged": model.lora is not None,
            "rollout.dtype is another precision than model.dtype": rollout.dtype not in (None, model.dtype),
            'run.device = "cuda": it is not proven there': self.run.device == "cuda",
            f'model.dtype = "{model.dtype}": it is proven for float32 and bfloat16': (
                model.dtype not in ("float32", "bfloat16")
            ),
            'model.head_dtype = "float32": that head is not known to be exact': model.head_dtype is not None,
            "model.entropy_clamp: the engine's entropies are over all words": model.entropy_clamp > 0,
        }
        fault = next((fault for fault, found in faults.items() if found), None)
        if model.exact and fault is not None:
            raise ValueError(f"model.exact with {fault}; leave one of them out")
        return self

    @model_validator(mode="after")
    def _stages_change_what_is_there(self) -> Self:
        control, reference = self.entropy.controller, self.reference
        own = not (is_builtin("loss", self.algorithm.loss) and is_builtin("correction", self.algorithm.correction))
        # a custom loss or correction may need the reference, which the run then adds
        if reference.model is not None and reference.mode == "none" and not own:
            raise ValueError(
                'reference.model with reference.mode = "none": no reference is used. Leave it out, or set '
                'reference.mode = "monitor" to watch the KL, or "loss" with a reference.coefficient'
            )
        for index, stage in enumerate(self.stages):
            if stage.entropy_target is not None and control in ("none", "fixed"):
                raise ValueError(
                    f'stages.{index}.entropy_target = {stage.entropy_target} is for entropy.controller = "adaptive" or '
                    f'your own; "{control}" has no target. Leave one of them out'
                )
            if stage.kl_coefficient is not None and reference.mode == "none":
                raise ValueError(
                    f"stages.{index}.kl_coefficient = {stage.kl_coefficient} needs a reference: set reference.mode = "
                    '"monitor" to watch the KL in every stage, or "loss" with a reference.coefficient for the stages '
                    "that state none"
                )
        if reference.mode == "loss" and not any(
            self.in_stage(i).reference.coefficient for i in range(len(self.stages))
        ):
            raise ValueError(
                'reference.mode = "loss", and every stage sets kl_coefficient = 0: leave these out and set '
                'reference.mode = "none", or "monitor" to watch the KL'
            )
        return self

    @model_validator(mode="after")
    def _advantage_fits_the_stages(self) -> Self:
        self.check_advantage(self.algorithm.advantage)
        return self

    def check_advantage(self, advantage: str) -> None:
        """Raise ``ValueError`` if the built-in advantage of this name does not fit the other settings."""
        k, buffer = self.algorithm.advantage_k, self.algorithm.overlong_buffer
        if buffer is not None and advantage == "gdpo":
            raise ValueError(
                'algorithm.overlong_buffer with algorithm.advantage = "gdpo": the penalty is added to the sum of the '
                "rewards, which gdpo does not read; leave one of them out, or add a reward that returns the penalty"
            )
        if buffer is not None and advantage == "maxrl":
            raise ValueError(
                'algorithm.overlong_buffer with algorithm.advantage = "maxrl": the penalty makes rewards negative, and '
                "maxrl divides by their mean; leave one of them out"
            )
        if advantage == "reinforce_pp" and self.algorithm.reject_zero_advantage:
            raise ValueError(
                'algorithm.advantage = "reinforce_pp" needs algorithm.reject_zero_advantage = false: groups of equal '
                "rewards have an advantage in it, and belong to its mean"
            )
        for number, stage in enumerate(self.stages):
            if buffer is not None and buffer >= stage.max_tokens:
                raise ValueError(
                    f"algorithm.overlong_buffer = {buffer} is not below stages.{number}.max_tokens = "
                    f"{stage.max_tokens}: every response would be penalised; take a smaller one"
                )
            if advantage == "pass_at_k" and k > stage.group_size:
                raise ValueError(
                    f"algorithm.advantage_k = {k} is above stages.{number}.group_size = {stage.group_size}: "
                    "pass@k needs k responses of a prompt; take a smaller k or larger groups"
                )

    @model_validator(mode="after")
    def _teacher_can_score(self) -> Self:
        teacher = self.teacher
        if teacher is None:
            return self
        if self.algorithm.reject_zero_advantage:
            raise ValueError(
                "[teacher] with algorithm.reject_zero_advantage = true: groups with equal rewards would be left out, "
                "and the teacher teaches there too; set algorithm.reject_zero_advantage = false"
            )
        if self.cluster is not None and teacher.local_model is not None:
            raise ValueError(
                "teacher.model with [cluster]: no process of the cluster holds the teacher; serve it with vLLM and set "
                "teacher.server"
            )
        for number, stage in enumerate(self.stages):
            own, common = stage.temperature, self.rollout.temperature
            if teacher.server is not None and (common if own is None else own) != 1.0:
                name = "rollout" if own is None else f"stages.{number}"
                raise ValueError(
                    f"teacher.server with {name}.temperature = {common if own is None else own:g}: a server returns "
                    f"log-probs of temperature 1; set {name}.temperature = 1, or use teacher.model without a server"
                )
        return self

    @model_validator(mode="after")
    def _muon_has_whole_matrices(self) -> Self:
        optimizer = self.optimizer
        if optimizer.kind == "muon" and self.cluster is not None:
            raise ValueError(
                'optimizer.kind = "muon" with [cluster]: each rank has some rows of a matrix, and Muon needs all of '
                'them; set optimizer.kind = "adamw", or leave [cluster] out'
            )
        # A run's written recipe holds the default too.
        default = type(optimizer).model_fields["momentum"].default
        if optimizer.kind == "adamw" and optimizer.momentum != default:
            raise ValueError('optimizer.momentum is Muon\'s: set optimizer.kind = "muon", or leave it out')
        return self

    @model_validator(mode="after")
    def _experts_can_be_replayed(self) -> Self:
        if not self.model.router_replay:
            return self
        if self.rollout.engine == "replay":
            raise ValueError(
                'model.router_replay with rollout.engine = "replay": recordings do not hold the experts that tokens '
                "went to; leave it out, and the learner's routers choose"
            )
        if self.cluster is not None and self.cluster.learner.sequence_parallel > 1:
            raise ValueError(
                "model.router_replay with cluster.learner.sequence_parallel above 1: the record of a row is not cut "
                "into slices; set one of them back"
            )
        return self

    @model_validator(mode="after")
    def _engine_fits_its_placement(self) -> Self:
        if self.cluster is None:
            return self
        rollout, placed = self.rollout, self.cluster.rollout
        newest_vllm = rollout.engine == "vllm" and not rollout.weight_lag
        if placed.weight_copy == "direct" and not newest_vllm:
            raise ValueError(
                'cluster.rollout.weight_copy = "direct" is how vLLM takes the newest weights: it needs rollout.engine '
                '= "vllm" and rollout.weight_lag = 0; set these, or weight_copy = "object_store"'
            )
        if placed.colocated and rollout.engine != "vllm":
            raise ValueError(
                f'cluster.rollout.colocated with rollout.engine = "{rollout.engine}": only vLLM releases its memory'
                '; set rollout.engine = "vllm" or leave colocated out'
            )
        if placed.colocated and (rollout.max_staleness or rollout.weight_lag):
            raise ValueError(
                "cluster.rollout.colocated: while the learner works the engine sleeps, so that nothing can be in "
                "flight and it keeps no older weights; set rollout.max_staleness and rollout.weight_lag to 0"
            )
        return self

    def in_stage(self, index: int) -> TrainConfig:
        """Return the recipe as it applies in a stage: each setting of the stage replaces the recipe's."""
        changes: dict[str, dict[str, object]] = {}
        for name, value in self.stages[index].own().items():
            table, key = STAGE_SETTINGS[name]
            changes.setdefault(table, {})[key] = value
        beta, mode = self.stages[index].kl_coefficient, self.reference.mode
        if beta is not None:
            # Without a penalty the reference model is needed only to monitor the KL.
            changes["reference"]["mode"] = "loss" if beta else "none" if mode == "loss" else mode
        return self.model_copy(
            update={table: getattr(self, table).model_copy(update=values) for table, values in changes.items()}
        )
