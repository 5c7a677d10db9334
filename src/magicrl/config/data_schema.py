"""The ``[data]`` section of a recipe: the problems."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from magicrl.config.paths import FilePath
from magicrl.config.section import Section


class FieldMapping(Section):
    """Which columns of a file hold what, where that is not seen from their names; dotted names reach into records."""

    prompt: str | tuple[str, ...] | None = None
    """The question, or a list of messages; of several columns the texts are joined as sentences."""
    answer: str | None = None
    """The gold answer, a list of accepted ones, a solution that boxes it or ends in ``#### 42``, or the tests."""
    id: str | None = None
    """Default: the file's name and the row's number."""
    level: str | None = None
    """A difficulty, an integer."""


class SourceConfig(Section):
    """One source of problems: a generated family, a local file or a hub data set (exactly one)."""

    family: str | None = None
    """Name of a generated task family: ``running_sum`` or ``word_problems``."""
    path: FilePath | None = None
    """A JSONL, JSON, CSV or parquet file, or a folder of them with splits, or one of ``save_to_disk``."""
    hub: str | None = None
    """A data set of the Hugging Face hub."""
    # generated families
    seed: int = Field(default=0, ge=0)
    """Of a family's problems."""
    count: int | None = Field(default=None, ge=1)
    """Problems to generate (families) or the most to read (files)."""
    levels: tuple[int, ...] | None = None
    """A family's levels of difficulty; default: all."""
    split: str = "train"
    """Of a folder or a hub data set; or a family's: ``train``, ``validation`` and ``test`` share no instance."""
    options: dict[str, float | int | str | bool] = Field(default_factory=dict[str, float | int | str | bool])
    """Keyword arguments of the family; of a folder or hub data set ``subset`` and ``revision``."""
    label_noise: float = Field(default=0.0, ge=0, le=1)
    """Share of the problems that get another one's answer: for studies of wrong labels."""
    # files
    fields: FieldMapping = FieldMapping()
    difficulty_of: str | None = None
    """A model's name in the released schema's ``model_difficulty``: its offline filter as recorded there. Problems that
    it failed 0 or 16 times of 16, and those without its figure, are set aside."""
    template: str | None = None
    """Text around each prompt (the last turn of a conversation); holds ``{prompt}``. Default: none; for code sets what
    says how the tests call the program."""
    verifier: Literal["maths", "exact", "code"] | None = None
    """Default: the family's own; ``code`` for problems with tests, else ``maths``."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("family", "path", "hub") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a source needs exactly one of family, path, hub; given: {', '.join(given) or 'none'}")
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError(f"template must hold {{prompt}}, got {self.template!r}")
        if self.family is not None and self.difficulty_of is not None:
            raise ValueError("difficulty_of is for files of the released schema; a family's problems carry none")
        if self.family is not None and self.count is None:
            raise ValueError("a family needs count, the number of problems to generate")
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
    """What to do with training prompts over the limit; validation and test prompts are always an error."""
    difficulty_filter: DifficultyFilterConfig | None = None
    online_filter: bool = True
    """At a stage change drop prompts whose every response was correct in their last visit."""
