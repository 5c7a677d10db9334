"""Settings of the problems: the table ``[data]`` with its sources."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from magicrl.config.paths import FilePath, Reference, reference_to
from magicrl.config.section import Section

FamilyName = Annotated[Reference, reference_to("family")]
SourceName = Annotated[Reference, reference_to("source")]


class FieldMapping(Section):
    """Columns of a data file. Needed only where the names do not show what a column holds. Dotted names
    (``extra.answer``) reach into records."""

    prompt: str | tuple[str, ...] | None = None
    """Column of the question: a text or a list of messages. The texts of several columns are joined as sentences."""
    answer: str | None = None
    r"""Column of the reference answer: one answer, a list of accepted answers, a solution with ``\boxed{}`` or a last
    line ``#### 42``, or the tests of a program."""
    id: str | None = None
    """Column of the problem's id. Default: the file's name and the row's number."""
    level: str | None = None
    """Column of the difficulty, an integer."""


class SourceConfig(Section):
    """One source of problems. Set exactly one of ``family``, ``path``, ``hub`` and ``source``."""

    family: FamilyName | None = None
    """Task family that generates problems (docs/start/own-data.md): a built-in name, ``reasoning_gym/TASK``, or a
    custom class, ``file.py:Family``."""
    path: FilePath | None = None
    """File (JSONL, JSON, CSV or Parquet), folder with one file per split, or folder written by ``save_to_disk``."""
    hub: str | None = None
    """Name of a data set on the Hugging Face hub."""
    source: SourceName | None = None
    """Custom function that returns the problems, or records that are read like the rows of a file: ``file.py:read``."""
    seed: int = Field(default=0, ge=0)
    """Random seed of the generated problems. Only for a family."""
    count: int | None = Field(default=None, ge=1)
    """Number of problems to generate (required for a family), or the maximum number to read. Default: all."""
    levels: tuple[int, ...] | None = None
    """Levels of difficulty of a family's problems. Default: all levels."""
    split: str = "train"
    """Split of the folder, the data set or the family. A family's ``train``, ``validation`` and ``test`` share no
    problem."""
    options: dict[str, float | int | str | bool] = Field(default_factory=dict[str, float | int | str | bool])
    """Keyword arguments of the family or the function. For a folder or a hub data set: ``subset`` and ``revision``."""
    label_noise: float = Field(default=0.0, ge=0, le=1)
    """Share of the problems that get the reference answer of another problem, for studies of wrong labels."""
    fields: FieldMapping = FieldMapping()
    difficulty_of: str | None = None
    """Name of a model in the ``model_difficulty`` column of the released data. Problems that this model solved always
    or never in 16 samples, or without its figure, are left out."""
    template: str | None = None
    """Text around each prompt; must contain ``{prompt}``. Default: no text, except for code problems, whose text says
    how the tests call the program."""
    verifier: Annotated[Reference, reference_to("reward")] | None = None
    """Verifier or reward: ``maths``, ``exact``, ``code``, ``judge``, or a custom one, ``my_reward.py:score``
    (docs/reference/maths-verifier.md); or several with weights, ``maths + 0.2 * my_reward.py:score``
    (docs/start/own-reward.md). Default: the family's own; otherwise ``code`` for problems with tests and ``maths`` for
    all others."""
    environment: Annotated[Reference, reference_to("environment")] | None = None
    """Environment that answers the model's turns, a class: ``file.py:Game``. Default: the family's own. Most problems
    have none."""

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
    """Offline difficulty filter. Before training, each training problem is sampled N times and left out if its accuracy
    is 0/N or N/N."""

    samples: int = Field(default=16, ge=2)
    """N, the number of responses per problem."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of these responses."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens per response. Default: ``max_tokens`` of the first stage."""


class DataConfig(Section):
    """Problems for training, for validation (which decides when a stage ends and which checkpoint is best) and for
    tests (which show what was learned)."""

    train: tuple[SourceConfig, ...] = Field(min_length=1)
    validation: tuple[SourceConfig, ...] = ()
    test: dict[str, SourceConfig] = Field(default_factory=dict[str, SourceConfig])
    holdout: int = Field(default=0, ge=0)
    """Number of training problems that become another test set, ``holdout``. They are chosen by a hash of the prompt
    and never trained on."""
    max_prompt_tokens: int = Field(default=2048, ge=1)
    """Maximum number of tokens of a prompt."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Handling of training and held-out prompts above ``max_prompt_tokens``: stop with an error, or leave them out.
    A too long prompt of another test set is always an error."""
    sampler: Annotated[Reference, reference_to("sampler")] = "uniform"
    """Order of the training problems: ``uniform`` (each once per epoch, shuffled), ``difficulty`` (pools by pass rate),
    ``short_first`` (short prompts first), or a custom class, ``file.py:Sampler``
    (docs/start/own-data.md)."""
    sampler_options: dict[str, float | int | str | bool] = Field(default_factory=dict[str, float | int | str | bool])
    """Keyword arguments of the sampler."""
    difficulty_filter: DifficultyFilterConfig | None = None
    online_filter: bool = True
    """At a stage change, remove prompts whose responses were all correct at their last visit."""
