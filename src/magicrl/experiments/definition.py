"""What an ablation is: a TOML file with arms at each scale, and claims about their measures.

A file of ``experiments/ablations`` reads::

    id = "6"
    title = "SGD steps per rollout"
    question = "Does taking more SGD steps from one rollout batch pay?"
    says = "N_SGD > 1 learns faster at first, collapses and ends lower."   # the report's finding

    [scales.tiny]
    base = "ladder.toml"                      # a recipe of experiments/bases
    seeds = 5
    set = ["stages.0.max_steps=100"]          # for every arm

    [[scales.tiny.arms]]
    name = "N_SGD 4"
    set = ["stages.0.mini_batch=4"]

    [scales.small]
    like = "tiny"                             # the same with these settings added or put in their place
    seeds = 3
    set = ["optimizer.learning_rate=3e-4"]
    start_set = ["model.tiny.hidden_size=288"]

    [[claims]]
    id = "6.entropy"
    says = "Entropy falls in a few steps where N_SGD > 1."
    kind = "difference"
    measure = "entropy@20"
    arm = "N_SGD 4"
    than = "on-policy"
    direction = "lower"
    effect = 0.05
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from magicrl.experiments.measures import parse_measure

Scale = Literal["tiny", "small", "paper", "quick"]
SCALES: tuple[Scale, ...] = ("tiny", "small", "paper", "quick")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(_Part):
    """One configuration.

    Attributes:
        name: as figures and claims call it.
        set: overrides of the base recipe, as for ``magicrl train --set``.
        after: another arm whose trained model this one starts from (the same seed's).
    """

    name: str
    set: tuple[str, ...] = ()
    after: str | None = None


class ScaleDefinition(_Part):
    """The arms at one scale.

    Attributes:
        base: recipe that every arm starts from, a file of ``experiments/bases``.
        seeds: runs an arm.
        set: overrides for every arm.
        start_set: overrides for the supervised start.
        arms: the first one is the one that others are drawn beside.
        minutes: CPU minutes of one run of one arm, measured on one core; None where nobody has measured it.
    """

    base: str
    seeds: int = Field(default=5, ge=1)
    set: tuple[str, ...] = ()
    start_set: tuple[str, ...] = ()
    arms: tuple[Arm, ...] = Field(min_length=1)
    minutes: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _arms_fit(self) -> Self:
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise ValueError(f"two arms have one name: {', '.join(names)}")
        for number, arm in enumerate(self.arms):
            if arm.after is not None and arm.after not in names[:number]:
                raise ValueError(f"arm {arm.name!r} comes after {arm.after!r}, which no earlier arm is called")
        return self

    def arm(self, name: str) -> Arm:
        """The arm of this name.

        Raises:
            KeyError: there is none.
        """
        return {arm.name: arm for arm in self.arms}[name]


class _Claim(_Part):
    id: str
    says: str
    measure: str

    @model_validator(mode="after")
    def _measure_exists(self) -> Self:
        parse_measure(self.measure)
        return self

    def arms(self) -> tuple[str, ...]:
        """The arms that the claim is about."""
        raise NotImplementedError


class DifferenceClaim(_Claim):
    """``arm`` has a higher (lower) measure than ``than``, by ``effect`` at least; paired by seed.

    Attributes:
        than_measure: of ``than``, where it is another one: one arm against itself at another step, for example.
    """

    kind: Literal["difference"] = "difference"
    arm: str
    than: str
    than_measure: str | None = None
    direction: Literal["higher", "lower"]
    effect: float = Field(ge=0)

    @model_validator(mode="after")
    def _other_exists(self) -> Self:
        parse_measure(self.than_measure or self.measure)
        return self

    def arms(self) -> tuple[str, ...]:
        return (self.arm, self.than)


class LevelClaim(_Claim):
    """``arm`` has a measure above (below) ``bound``."""

    kind: Literal["level"] = "level"
    arm: str
    direction: Literal["above", "below"]
    bound: float

    def arms(self) -> tuple[str, ...]:
        return (self.arm,)


class EqualClaim(_Claim):
    """The measures of ``arm`` and ``than`` differ by less than ``margin`` (two one-sided tests); paired by seed."""

    kind: Literal["equal"] = "equal"
    arm: str
    than: str
    margin: float = Field(gt=0)

    def arms(self) -> tuple[str, ...]:
        return (self.arm, self.than)


class CrossingClaim(_Claim):
    """``arm`` leads ``than`` early and trails it late: two differences that must both hold.

    Attributes:
        measure: the early one.
        late: the late one.
        effect: the least lead, at both ends.
    """

    kind: Literal["crossing"] = "crossing"
    late: str
    arm: str
    than: str
    effect: float = Field(ge=0)

    @model_validator(mode="after")
    def _late_exists(self) -> Self:
        parse_measure(self.late)
        return self

    def arms(self) -> tuple[str, ...]:
        return (self.arm, self.than)


class OrderClaim(_Claim):
    """The measure rises (falls) along ``along``: the mean over seeds of Kendall's tau is above ``effect``."""

    kind: Literal["order"] = "order"
    along: tuple[str, ...] = Field(min_length=3)
    direction: Literal["rising", "falling"]
    effect: float = Field(default=0.0, ge=0, lt=1)

    def arms(self) -> tuple[str, ...]:
        return self.along


Claim = Annotated[DifferenceClaim | LevelClaim | EqualClaim | CrossingClaim | OrderClaim, Field(discriminator="kind")]


class Ablation(_Part):
    """One ablation of the report's Table of section 6, with everything that is claimed of it here."""

    id: str
    title: str
    question: str
    says: str
    scales: Mapping[Scale, ScaleDefinition]
    claims: tuple[Claim, ...] = ()
    notes: str = ""

    @model_validator(mode="before")
    @classmethod
    def _inherited(cls, data: Any) -> Any:
        """A scale that is ``like`` another has that one's settings, its own overrides behind them."""
        scales: Any = data.get("scales") if isinstance(data, dict) else None
        if not isinstance(scales, dict):
            return data  # the schema says what is wrong
        merged: dict[str, Any] = {}
        for name, own in scales.items():
            model = own.get("like") if isinstance(own, dict) else None
            if model is None:
                merged[name] = own
                continue
            if not isinstance(scales.get(model), dict) or "like" in scales[model]:
                raise ValueError(f"scale {name} is like {model!r}, which is no scale with settings of its own")
            base, rest = scales[model], {key: value for key, value in own.items() if key != "like"}
            added = [*base.get("set", []), *rest.get("set", [])]
            merged[name] = {**{k: v for k, v in base.items() if k != "minutes"}, **rest, "set": added}
        return {**data, "scales": merged}

    @model_validator(mode="after")
    def _claims_name_arms(self) -> Self:
        if "tiny" not in self.scales:
            raise ValueError(f"ablation {self.id} has no scale tiny, which everybody can run")
        known = {arm.name for arm in self.scales["tiny"].arms}
        ids = [claim.id for claim in self.claims]
        for claim in self.claims:
            if not claim.id.startswith(f"{self.id}."):
                raise ValueError(f"claim {claim.id!r} of ablation {self.id} must begin with {self.id}.")
            missing = [arm for arm in claim.arms() if arm not in known]
            if missing:
                raise ValueError(f"claim {claim.id} names {missing[0]!r}, which is no arm at scale tiny")
        if len(set(ids)) != len(ids):
            raise ValueError(f"two claims of ablation {self.id} have one id")
        return self


def load_ablation(path: Path) -> Ablation:
    """One ablation from its file.

    Raises:
        ValueError: not readable as TOML, or not an ablation; names the file and the place in it.
    """
    try:
        return Ablation.model_validate(tomllib.loads(path.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"{path}: {place + ': ' if place else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from error


def shipped_ablations() -> list[Ablation]:
    """All ablations that come with magicrl, in the report's order."""
    folder = Path(str(files("magicrl.experiments"))) / "ablations"
    return [load_ablation(path) for path in sorted(folder.glob("*.toml"))]


def chosen(names: Sequence[str], known: Sequence[Ablation]) -> list[Ablation]:
    """The ablations of these ids, in the known order; ``all`` is every one.

    Raises:
        ValueError: an id that no ablation has.
    """
    ids = [ablation.id for ablation in known]
    for name in names:
        if name != "all" and name not in ids:
            raise ValueError(f"no ablation {name!r}; known: {', '.join(ids)}, or all (magicrl experiment list)")
    return [ablation for ablation in known if "all" in names or ablation.id in names]


def base_recipe(name: str) -> Path:
    """The file of a base recipe.

    Raises:
        ValueError: there is none of this name.
    """
    folder = Path(str(files("magicrl.experiments"))) / "bases"
    path = folder / name
    if not path.is_file():
        known = ", ".join(sorted(p.name for p in folder.glob("*.toml")))
        raise ValueError(f"no base recipe {name!r}; known: {known}")
    return path
