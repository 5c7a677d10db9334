"""Definitions of ablations: measures, variants and claims.

A measure is a number computed from one run's curves, written ``NAME@PLACE``:

=====================  ============================================================================================
``CURVE@20``           mean of the curve over steps 18 to 22
``CURVE@start``        mean over the first three steps
``CURVE@late``         mean over the last tenth, at least five steps
``CURVE@max``          largest mean of five consecutive steps, ``CURVE@min`` the smallest
``fall:CURVE@20``      value at the start minus value there, so runs with different starts can be compared
``test@1.0``           test accuracy after training at this temperature; ``start@1.0`` before it; ``test@best`` at the
                       best of the temperatures
``pass@4``             probability after training, at temperature 1, that one of four responses is correct
``rise@1.0``           ``test@1.0`` minus ``start@1.0``
``drop:CURVE``         ``max`` minus ``late``: how far it fell from its best; 0 if it still rises
``spread:CURVE``       standard deviation of the second half around a straight line
``CURVE@tokens:20000`` mean of five steps around the step at which this many tokens were sampled; also ``updates:`` and
                       ``seconds:``. A run that ended earlier has no such number.
``steps:CURVE>0.8``    steps until five consecutive ones have a mean above 0.8; ``tokens:`` sampled tokens, ``updates:``
                       updates, ``seconds:`` time of the steps. A run that never reaches it counts with its length,
                       which is too little.
``held:0.1``           share of steps with entropy above 0.1 - 0.02, after the first one below
``collapse:0.05@0.8``  1 if five consecutive steps have a mean entropy below 0.05 before five have a mean accuracy above
                       0.8 (or if the latter never happens), else 0
=====================  ============================================================================================

Curves: accuracy, accuracy_nontruncated, truncation, length, entropy, alpha, kl, clip, rejected, grad_norm, validation.

An ablation is a TOML file of ``studies/ablations`` with variants (``arms``) at each scale and claims::

    id = "6"
    title = "Updates per rollout batch"
    question = "Do more updates per rollout batch pay?"
    says = "N_SGD > 1 learns faster at first, collapses and ends lower."   # the report's finding

    [scales.tiny]
    base = "ladder.toml"                      # a recipe of studies/bases
    starts = 5                                # initial checkpoints
    set = ["stages.0.max_steps=100"]          # for every variant

    [[scales.tiny.arms]]
    name = "N_SGD 4"
    set = ["stages.0.mini_batch=4"]

    [scales.small]
    like = "tiny"                             # the same with these settings added or replaced
    starts = 3
    set = ["optimizer.learning_rate=3e-4"]
    start_set = ["model.tiny.hidden_size=288"]

    [[claims]]
    id = "6.entropy"
    says = "Entropy falls in a few steps with N_SGD > 1."
    kind = "difference"
    measure = "entropy@20"
    arm = "N_SGD 4"
    than = "on-policy"
    direction = "lower"
    effect = 0.05
    premise = { says = "On-policy learns.", arm = "on-policy", measure = "rise@best", direction = "above", bound = 0.2 }
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from magicrl_verifiers.references import did_you_mean

Curves: TypeAlias = Mapping[str, Sequence[float | None]]
Result: TypeAlias = Mapping[str, Any]
"""Row of the results file: ``curves``, ``tests`` and what made them (see ``results``)."""
Measure: TypeAlias = Callable[[Result], float]

CURVES = {
    "accuracy": "train/accuracy_unfiltered/mean",
    "accuracy_nontruncated": "train/accuracy_nontruncated/mean",
    "truncation": "train/truncation/ratio",
    "length": "length/mean",
    "entropy": "entropy/exact/mean",
    "alpha": "entropy/alpha",
    "kl": "learner/kl",
    "clip": "learner/clip_ratio",
    "rejected": "groups/rejected/ratio",
    "grad_norm": "learner/grad_norm",
    "validation": "validation/accuracy/mean",
}  # names of the curves in a result, with their metrics
COSTS = {"tokens": "tokens/sampled", "updates": "learner/sgd_steps", "seconds": "time/step"}
"""Costs of a step; results have their running sums."""
WINDOW = 5
HELD_MARGIN = 0.02


def parse_measure(text: str) -> Measure:
    """Return the measure that ``text`` names.

    Raises:
        ValueError: no such measure; the message says what is wrong.
    """
    reach = re.fullmatch(r"(steps|tokens|updates|seconds):(\w+)>(\d*\.?\d+)", text)
    if reach:
        cost, curve, bound = reach[1], _curve(reach[2], text), float(reach[3])
        return lambda result: _cost_until(result["curves"], cost, curve, bound)
    if held := re.fullmatch(r"held:(\d*\.?\d+)", text):
        target = float(held[1])
        return lambda result: _held(result["curves"], target)
    if early := re.fullmatch(r"collapse:(\d*\.?\d+)@(\d*\.?\d+)", text):
        low, won = float(early[1]), float(early[2])
        return lambda result: _collapsed(result["curves"], low, won)
    if found := re.fullmatch(r"pass@(\d+)", text):
        return lambda result: _number((result.get("passes") or {}).get("after", {}).get(found[1]))
    test = re.fullmatch(r"(test|start|rise)@(best|\d*\.?\d+)", text)
    if test:
        kind, temperature = test[1], test[2] if test[2] == "best" else str(float(test[2]))
        return lambda result: _tested(result["tests"], kind, temperature)
    if whole := re.fullmatch(r"(drop|spread):(\w+)", text):
        function, curve = {"drop": _drop, "spread": _spread}[whole[1]], _curve(whole[2], text)
        return lambda result: function(result["curves"], curve)
    if spent := re.fullmatch(r"(\w+)@(tokens|updates|seconds):(\d*\.?\d+)", text):
        curve, cost, amount = _curve(spent[1], text), spent[2], float(spent[3])
        return lambda result: _at_cost(result["curves"], curve, cost, amount)
    at = re.fullmatch(r"(fall:)?(\w+)@(start|late|max|min|\d+)", text)
    if at:
        curve, place = _curve(at[2], text), at[3]
        if at[1]:
            return lambda result: _at(result["curves"], curve, "start") - _at(result["curves"], curve, place)
        return lambda result: _at(result["curves"], curve, place)
    raise ValueError(f"no measure {text!r}; write CURVE@STEP, test@1.0, steps:accuracy>0.8 or held:0.1, for example")


def _curve(name: str, text: str) -> str:
    if name not in CURVES:
        hint = did_you_mean(name, CURVES)
        raise ValueError(f"measure {text!r}: no curve {name!r}{hint} Known: {', '.join(CURVES)}")
    return name


def _values(curves: Curves, name: str) -> NDArray[np.float64]:
    """Return ``[steps]`` values; nan if a step did not measure it (validation, or no update)."""
    return np.array([math.nan if value is None else value for value in curves.get(name, ())], dtype=np.float64)


def _mean(values: NDArray[np.float64]) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def _at(curves: Curves, name: str, place: str) -> float:
    values = _values(curves, name)
    if place == "start":
        return _mean(values[:3])
    if place == "late":
        return _mean(values[-max(WINDOW, len(values) // 10) :])
    if place in ("max", "min"):
        means = _running_means(values)
        if not len(means):
            return math.nan
        return float(means.max() if place == "max" else means.min())
    step = int(place)
    if step > len(values):
        return math.nan
    return _mean(values[max(0, step - 1 - WINDOW // 2) : step + WINDOW // 2])


def _running_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return means of ``WINDOW`` consecutive finite values."""
    finite = values[np.isfinite(values)]
    if len(finite) < WINDOW:
        return finite[:0]
    return np.convolve(finite, np.full(WINDOW, 1 / WINDOW), mode="valid").astype(np.float64)


def _cost_until(curves: Curves, cost: str, name: str, bound: float) -> float:
    values = _values(curves, name)
    spent = np.arange(1, len(values) + 1, dtype=np.float64) if cost == "steps" else _values(curves, cost)
    at = np.flatnonzero(np.isfinite(values))
    above = np.flatnonzero(_running_means(values) > bound)
    if not len(spent):
        return math.nan
    return float(spent[at[above[0] + WINDOW - 1]]) if len(above) else float(spent[-1])


def _at_cost(curves: Curves, name: str, cost: str, amount: float) -> float:
    spent = _values(curves, cost)
    if not len(spent) or spent[-1] < amount:
        return math.nan
    return _at(curves, name, str(int(np.searchsorted(spent, amount)) + 1))


def _drop(curves: Curves, name: str) -> float:
    fallen = _at(curves, name, "max") - _at(curves, name, "late")
    return math.nan if math.isnan(fallen) else max(0.0, fallen)


def _spread(curves: Curves, name: str) -> float:
    values = _values(curves, name)
    steps = np.arange(len(values))
    keep = np.isfinite(values) & (steps >= len(values) // 2)
    if keep.sum() < WINDOW:
        return math.nan
    slope, offset = np.polyfit(steps[keep], values[keep], 1)
    return float(np.std(values[keep] - (slope * steps[keep] + offset)))


def _held(curves: Curves, target: float) -> float:
    values = _values(curves, "entropy")
    below = np.flatnonzero(values < target)
    if not len(below):
        return 1.0
    return _mean((values[below[0] :] > target - HELD_MARGIN).astype(np.float64))


def _collapsed(curves: Curves, low: float, won: float) -> float:
    entropy, accuracy = (_running_means(_values(curves, name)) for name in ("entropy", "accuracy"))
    if not len(entropy):
        return math.nan
    fallen, solved = np.flatnonzero(entropy < low), np.flatnonzero(accuracy > won)
    return float(len(fallen) > 0 and (len(solved) == 0 or fallen[0] < solved[0]))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _tested(tests: Mapping[str, Mapping[str, float]], kind: str, temperature: str) -> float:
    def accuracy(name: str) -> float:
        found = tests[name]
        return max(found.values(), default=math.nan) if temperature == "best" else _number(found.get(temperature))

    before, after = accuracy("before"), accuracy("after")
    return {"test": after, "start": before, "rise": after - before}[kind]


Scale = Literal["tiny", "small", "paper", "quick"]
SCALES: tuple[Scale, ...] = ("tiny", "small", "paper", "quick")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Arm(_Part):
    """One variant."""

    name: str  # name in figures and claims
    set: tuple[str, ...] = ()  # overrides of the base recipe, as for ``magicrl train --set``
    after: str | None = None  # variant whose trained model of the same seed this one continues
    # Has no runs: each checkpoint takes the variant that was best on other checkpoints (``runs.better``).
    better_of: tuple[str, ...] = ()
    # Has no runs either: each checkpoint's test accuracy is the mean over these variants.
    mean_of: tuple[str, ...] = ()

    @property
    def derived(self) -> bool:
        """Whether the variant has no runs of its own."""
        return bool(self.better_of or self.mean_of)


BASE_STRIDE = 1_000
"""Distance between the checkpoint numbers of one base recipe and the next."""


class ScaleDefinition(_Part):
    """The variants at one scale."""

    base: str  # recipe that every variant starts from, a file of ``studies/bases``
    more_bases: tuple[str, ...] = ()  # further ones; their checkpoints are further units, numbered from BASE_STRIDE on
    starts: int = Field(default=5, ge=1)  # initial checkpoints per variant, the units of a claim
    skip: int = Field(default=0, ge=0)  # the first of ``starts``, left out because an earlier look has seen them
    seeds: int = Field(default=1, ge=1)  # runs per variant and checkpoint, with other prompts and sampling
    # starts are those that ``python -m studies starts`` accepted, each made from its first phase on; else numbers from
    # 0 on, which share their first phase
    screened: bool = False
    set: tuple[str, ...] = ()  # overrides for every configuration
    start_set: tuple[str, ...] = ()  # overrides for the supervised start
    arms: tuple[Arm, ...] = Field(min_length=1)  # the first one is the reference of figures
    # CPU minutes of one run on one core; None if unknown
    minutes: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _arms_fit(self) -> Self:
        if self.skip >= self.starts:
            raise ValueError(f"skip = {self.skip} leaves none of {self.starts} starts")
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise ValueError(f"two arms have one name: {', '.join(names)}")
        for number, arm in enumerate(self.arms):
            for earlier in (*filter(None, [arm.after]), *arm.better_of, *arm.mean_of):
                if earlier not in names[:number]:
                    raise ValueError(f"arm {arm.name!r} comes after {earlier!r}, which no earlier arm is called")
        return self

    def arm(self, name: str) -> Arm:
        """Return the variant of this name.

        Raises:
            KeyError: there is none.
        """
        return {arm.name: arm for arm in self.arms}[name]


class Premise(_Part):
    """Condition of a claim: a mean over checkpoints above or below ``bound``.

    The mean is of a variant's measure, or of its difference from that of ``than``.
    """

    says: str
    arm: str
    measure: str
    than: str | None = None  # paired by start and seed
    than_measure: str | None = None  # measure of ``than``, if it is another one
    direction: Literal["above", "below"]
    bound: float

    @model_validator(mode="after")
    def _measures_exist(self) -> Self:
        for text in (self.measure, self.than_measure):
            if text:
                parse_measure(text)
        return self


class _Claim(_Part):
    id: str
    says: str
    measure: str
    premise: Premise  # unmet: the claim is undecided

    @model_validator(mode="after")
    def _measures_exist(self) -> Self:
        for field in ("measure", "than_measure", "late"):
            if text := getattr(self, field, None):
                parse_measure(text)
        return self

    def arms(self) -> tuple[str, ...]:
        """Return the variants of the claim."""
        return tuple(getattr(self, field) for field in ("arm", "than") if hasattr(self, field))


class DifferenceClaim(_Claim):
    """``arm`` has a higher (lower) measure than ``than`` by at least ``effect``; paired by checkpoint and seed."""

    kind: Literal["difference"] = "difference"
    arm: str
    than: str
    than_measure: str | None = None  # measure of ``than``, if it is another one (the same run at another step)
    direction: Literal["higher", "lower"]
    effect: float = Field(ge=0)


class LevelClaim(_Claim):
    """``arm`` has a measure above (below) ``bound``."""

    kind: Literal["level"] = "level"
    arm: str
    direction: Literal["above", "below"]
    bound: float


class EqualClaim(_Claim):
    """The measures of ``arm`` and ``than`` differ by less than ``margin`` (two one-sided tests); paired."""

    kind: Literal["equal"] = "equal"
    arm: str
    than: str
    margin: float = Field(gt=0)


class CrossingClaim(_Claim):
    """``arm`` leads ``than`` early (``measure``) and trails it late (``late``), each by at least ``effect``."""

    kind: Literal["crossing"] = "crossing"
    late: str
    arm: str
    than: str
    effect: float = Field(ge=0)


class OrderClaim(_Claim):
    """The measure rises (falls) along ``along``: the mean Kendall's tau over checkpoints is above ``effect``."""

    kind: Literal["order"] = "order"
    along: tuple[str, ...] = Field(min_length=3)
    direction: Literal["rising", "falling"]
    effect: float = Field(default=0.0, ge=0, lt=1)

    def arms(self) -> tuple[str, ...]:
        return self.along


Claim = Annotated[DifferenceClaim | LevelClaim | EqualClaim | CrossingClaim | OrderClaim, Field(discriminator="kind")]


class Ablation(_Part):
    """One ablation of the report, with its claims."""

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
        """Merge a scale that is ``like`` another one with that scale's settings."""
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
            named = (*claim.arms(), claim.premise.arm, *filter(None, [claim.premise.than]))
            missing = [arm for arm in named if arm not in known]
            if missing:
                raise ValueError(f"claim {claim.id} names {missing[0]!r}, which is no arm at scale tiny")
        if len(set(ids)) != len(ids):
            raise ValueError(f"two claims of ablation {self.id} have one id")
        return self


def load_ablations(path: Path) -> list[Ablation]:
    """Return the ablations of a file: one, or one for each of its ``families``.

    A family is a table. Its `arms` are added to those of scale tiny; its other entries replace their names in angle
    brackets throughout the file, such as ``<base>``.

    Raises:
        ValueError: not readable as TOML, or not an ablation; the message has file and place.
    """
    try:
        data = tomllib.loads(path.read_text())
        return [
            Ablation.model_validate(_of_family(data, family) if family else data)
            for family in data.pop("families", [{}])
        ]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"{path}: {place + ': ' if place else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from error


def _of_family(data: Any, family: Mapping[str, Any]) -> Any:
    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: filled(value) for key, value in part.items()}
        if isinstance(part, list):
            return [filled(value) for value in part]
        if isinstance(part, str):
            return re.sub(r"<(\w+)>", lambda name: str(family.get(name[1], name[0])), part)
        return part

    own = filled(data)
    own["scales"]["tiny"]["arms"] += family.get("arms", [])
    return own


class Suite(_Part):
    """Ablations whose claims are corrected together."""

    title: str  # of its index
    about: str  # conditions of the verdicts
    folder: str  # of its ablations, in ``studies``
    pages: Path  # folder of its pages
    looks: int = 1  # number of looks at the verdicts; each has its share of the error
    beside: tuple[str, str] | None = None  # two variants that the index's figure compares
    reference: str = "on-policy"  # variant of the index's distances (see ``distances``)
    shares: str | None = None  # suite whose runs this one shares

    def results(self, scale: Scale) -> Path:
        """Return the suite's results file."""
        return Path("studies/results") / f"{self.pages.name}-{scale}.parquet"


_SAME_STARTS = (
    "Initial checkpoints are those of the [study of off-policy training](../study-starts/starts.md). Claims, premises "
    "and checkpoints were stated before the runs ([{}](../claims.md))."
)
SUITES: Mapping[str, Suite] = {
    "report": Suite(
        title="The report's ablations",
        about="Checkpoints differ in habits, prompts and sampling and share one skill phase, so a verdict is about "
        "that skill. Test accuracy is that at the best of the tested temperatures (ablation 4: at 0.6). This rule, the "
        "premises and that measure were stated after the runs had been seen: a re-analysis, not a test.",
        folder="ablations",
        pages=Path("docs/evidence/study"),
        looks=2,  # at five seeds, and at ten, as was decided then for all configurations alike
    ),
    "starts": Suite(
        title="Off-policy training over independent checkpoints",
        about="Every checkpoint is independent from its first SFT phase on and was screened before any RL "
        "([checkpoints](starts.md)). Claims, premises, checkpoints and seeds were stated before the runs "
        "([C9](../claims.md)).",
        folder="starts",
        pages=Path("docs/evidence/study-starts"),
    ),
    "recipe": Suite(
        title="The recipe's choices over independent checkpoints",
        about=_SAME_STARTS.format("C11"),
        folder="recipe",
        pages=Path("docs/evidence/study-recipe"),
    ),
    "target": Suite(
        title="Entropy targets over independent checkpoints",
        about=_SAME_STARTS.format("C12"),
        folder="target",
        pages=Path("docs/evidence/study-target"),
    ),
    "noise": Suite(
        title="Stale data or small batches, over independent checkpoints",
        about=_SAME_STARTS.format("C14"),
        folder="noise",
        pages=Path("docs/evidence/study-noise"),
        beside=("N_SGD 4", "fresh small batches"),
        shares="starts",
    ),
    "smollm2": Suite(
        title="Off-policy training of a pretrained model",
        about="SmolLM2-135M-Instruct from three independent SFT checkpoints, which were "
        "[screened](../study-starts/starts.md). Claims, premises, checkpoints and seeds were stated before the runs "
        "([C13](../claims.md)).",
        folder="smollm2",
        pages=Path("docs/evidence/study-smollm2"),
        beside=("N_SGD 4", "N_SGD 4, control"),
    ),
    "clip": Suite(
        title="The clip at the better of two learning rates",
        about=_SAME_STARTS.format("C19"),
        folder="clip",
        pages=Path("docs/evidence/study-clip"),
        reference="clip 0.20, {}",
    ),
}


def shipped_ablations(suite: str = "report") -> list[Ablation]:
    """Return all ablations of a suite, in order."""
    folder = Path(str(files("studies"))) / SUITES[suite].folder
    return [ablation for path in sorted(folder.glob("*.toml")) for ablation in load_ablations(path)]


def chosen(names: Sequence[str], known: Sequence[Ablation]) -> list[Ablation]:
    """Return the ablations of these ids, in the known order; ``all`` is every one.

    Raises:
        ValueError: no ablation has this id.
    """
    ids = [ablation.id for ablation in known]
    for name in names:
        if name != "all" and name not in ids:
            raise ValueError(f"no ablation {name!r}; known: {', '.join(ids)}, or all (python -m studies list)")
    return [ablation for ablation in known if "all" in names or ablation.id in names]


def base_recipe(name: str) -> Path:
    """Return the file of a base recipe.

    Raises:
        ValueError: there is none of this name.
    """
    folder = Path(str(files("studies"))) / "bases"
    path = folder / name
    if not path.is_file():
        known = ", ".join(sorted(p.name for p in folder.glob("*.toml")))
        raise ValueError(f"no base recipe {name!r}; known: {known}")
    return path
