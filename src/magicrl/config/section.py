"""What every table of a recipe, a pipeline or a catalogue is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of a recipe. Unknown keys are errors, values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
