"""The race of methods for off-policy stability: its definition, its rounds, and how it is decided.

``studies/race/race.toml`` says who takes part. Every method tries the same number of settings on the tuning starts (its
own numbers times learning rates); its best goes on. Then rounds drop the worse half until at most three are left. These
are compared with baselines at one learning rate, and run on all families and starts beside the yardstick. A run is a
`PlannedRun` like any of the studies, so that results are kept and shared in the same way.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from scipy.optimize import curve_fit
from scipy.stats import kendalltau

from studies.definition import Ablation, Curves, Result, parse_measure
from studies.runs import PlannedRun, plan_runs

DEFINITION = Path(__file__).parent / "race" / "race.toml"
TUNING_STARTS = 100  # starts from this number on are for tuning, those below decide
Overrides = tuple[str, ...]
Entrant = TypeVar("Entrant")
Failure = Literal["collapse", "blow-up", "destruction"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Bounds(_Part):
    """When a run has failed; collapse and blow-up are looked for in means of five steps in a row."""

    collapse: float = Field(gt=0)  # entropy below, in nats per token, before
    won: float = Field(gt=0, le=1)  # training accuracy has been above
    entropy: float = Field(gt=0)  # entropy above: blow-up
    grad_norm: float = Field(gt=0)  # so is a gradient's norm above
    destruction: float = Field(ge=0)  # test accuracy so far below its start in the end


class Conditions(_Part):
    """Numbers of SGD steps by name, each with its overrides, and ages of the sampler's weights in training steps."""

    sgd_steps: Mapping[str, Overrides]
    staleness: tuple[int, ...]
    stale: Overrides  # of every run whose staleness is not 0, before the method's own
    tuning: Condition
    rounds: tuple[Condition, ...] = Field(min_length=1)  # of the rounds before the final, which has every one

    def every(self) -> list[Condition]:
        return [Condition(sgd_steps=n, staleness=age) for n, age in product(self.sgd_steps, self.staleness)]

    def overrides(self, condition: Condition) -> Overrides:
        lag = (f"rollout.weight_lag={condition.staleness}", *self.stale) if condition.staleness else ()
        return (*self.sgd_steps[condition.sgd_steps], *lag)


class Condition(_Part):
    sgd_steps: str
    staleness: int

    def __str__(self) -> str:
        return f"N_SGD {self.sgd_steps}, staleness {self.staleness}"


class Family(_Part):
    """A task: a base recipe, and the entropy that methods with a target hold."""

    name: str
    base: str
    target: float
    set: Overrides = ()


class Method(_Part):
    """One that takes part. ``own`` are its own numbers, each setting of them a list of overrides, the default not first
    but in the middle; TARGET in an override is the family's."""

    name: Annotated[str, StringConstraints(pattern=r"^[^|]+$")]
    kind: Literal["method", "baseline", "negative control"] = "method"
    source: str
    formula: str
    set: Overrides
    own: tuple[Overrides, ...] = ((),)
    shown_by: str  # the test of its published property


class Candidate(NamedTuple):
    """One setting that a method tries."""

    method: str
    number: int
    set: Overrides

    def __str__(self) -> str:
        return f"{self.method} | {self.number}"


class Race(_Part):
    finalists: int = Field(ge=1)  # whom the rounds leave, at most
    yardstick: str  # a method that runs in the final whatever its place
    at_one_rate: tuple[str, ...] = Field(min_length=1)  # methods that run at the best finalist's learning rate as well
    margin: float = Field(gt=0)  # a default is so near, in test accuracy, to the best of every family
    budget: int = Field(ge=1)
    tuning_starts: tuple[int, ...] = Field(min_length=1)
    starts: int = Field(ge=2)  # of the final, each family's first ones that the screening accepted
    learning_rates: tuple[float, ...]
    set: Overrides
    bounds: Bounds
    conditions: Conditions
    families: tuple[Family, ...] = Field(min_length=1)
    methods: tuple[Method, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fair(self) -> Self:
        if len(self.learning_rates) != self.budget or list(self.learning_rates) != sorted(self.learning_rates):
            raise ValueError(f"learning_rates must be {self.budget} (the budget) and rise")
        if min(self.tuning_starts) < TUNING_STARTS:
            raise ValueError(f"a start that was tuned on decides nothing: tuning_starts are {TUNING_STARTS} and up")
        names = [method.name for method in self.methods]
        if len(set(names)) != len(names):
            raise ValueError(f"two methods have one name: {', '.join(names)}")
        for method in self.methods:
            if self.budget % len(method.own):
                raise ValueError(
                    f"method {method.name!r} has {len(method.own)} settings of its own, which do not divide the budget "
                    f"of {self.budget}"
                )
        if unknown := {self.yardstick, *self.at_one_rate}.difference(names):
            raise ValueError(f"no method is called {min(unknown)!r}, a yardstick or one to run at one rate")
        return self


def load_race(path: Path = DEFINITION) -> Race:
    """The race of this file.

    Raises:
        ValueError: not a race; says what is wrong.
    """
    return Race.model_validate(tomllib.loads(path.read_text()))


# --- rounds ---------------------------------------------------------------------------------------------------------


def candidates(race: Race, method: Method) -> list[Candidate]:
    """``budget`` settings: each of the method's own with as many learning rates as are left for it, evenly spread.

    Example: of nine rates a method with three settings of its own tries the second, fifth and eighth with each.
    """
    stride = len(method.own)
    rates = race.learning_rates[stride // 2 :: stride]
    pairs = product(method.own, rates)
    return [
        Candidate(method.name, number, (*method.set, *own, f"optimizer.learning_rate={rate:g}"))
        for number, (own, rate) in enumerate(pairs)
    ]


def field_sizes(entrants: int, finalists: int) -> list[int]:
    """How many start in each round: halves, rounded up, until at most ``finalists`` do.

    Example: 21 and at most 4 give 21, 11, 6, 3.
    """
    sizes = [entrants]
    while sizes[-1] > finalists:
        sizes.append(math.ceil(sizes[-1] / 2))
    return sizes


def survivors(scores: Mapping[Entrant, float], places: int) -> list[Entrant]:
    """The best ``places`` by score, best first; of equal ones those that come first, a score that is nan last."""
    return sorted(scores, key=lambda one: -scores[one] if math.isfinite(scores[one]) else math.inf)[:places]


def race_runs(
    race: Race,
    entrants: Sequence[Candidate],
    family: Family,
    conditions: Sequence[Condition],
    starts: int | Sequence[int],
    *,
    start_set: Sequence[str] = (),
) -> dict[tuple[Candidate, Condition, int], PlannedRun]:
    """The run of each entrant under each condition from each start; its key holds the text of the files it brings.

    Args:
        race: what all runs have in common.
        entrants: methods, each with its setting.
        family: the task.
        conditions: SGD steps and staleness.
        starts: how many of those that the screening accepted, or their numbers.
        start_set: overrides of the supervised start.

    Raises:
        ValueError: fewer starts have passed the screening than are asked for.
    """
    arms = {f"{entrant} | {condition}": (entrant, condition) for entrant in entrants for condition in conditions}

    def overrides(entrant: Candidate, condition: Condition) -> list[str]:
        own = [override.replace("TARGET", f"{family.target:g}") for override in entrant.set]
        return [*race.conditions.overrides(condition), *own]

    study = Ablation.model_validate(
        {
            "id": f"race {family.name}",
            "title": "The race",
            "question": "Which method keeps off-policy training stable?",
            "says": "",
            "scales": {
                "tiny": {
                    "base": family.base,
                    "screened": True,
                    "starts": starts if isinstance(starts, int) else len(starts),
                    "set": [*family.set, *race.set],
                    "start_set": list(start_set),
                    "arms": [{"name": name, "set": overrides(*pair)} for name, pair in arms.items()],
                }
            },
        }
    )
    found: dict[tuple[Candidate, Condition, int], PlannedRun] = {}
    for run in plan_runs([study], "tiny", None if isinstance(starts, int) else starts):
        # two arms with one recipe share its run
        for _, name in run.arms:
            entrant, condition = arms[name]
            found[entrant, condition, run.config.run.seed] = run
    return found


class Stage(NamedTuple):
    """The tuning or a round: what is run, and of which entrant each run is."""

    name: str
    entrants: list[Candidate]
    runs: dict[tuple[str, Candidate, Condition, int], PlannedRun]  # by family, entrant, condition, start

    def missing(self, results: Mapping[str, Result]) -> list[PlannedRun]:
        """Those without a result, each once."""
        return list({run.key: run for run in self.runs.values() if run.key not in results}.values())

    def scores(self, results: Mapping[str, Result], of: Callable[[Result], float]) -> dict[Candidate, float]:
        """An entrant's mean over its runs."""
        found: dict[Candidate, list[float]] = {entrant: [] for entrant in self.entrants}
        for (_, entrant, _, _), run in self.runs.items():
            found[entrant].append(of(results[run.key]))
        return {entrant: float(np.mean(values)) for entrant, values in found.items()}


def stages(race: Race, results: Mapping[str, Result]) -> Iterator[Stage]:
    """The tuning, the rounds and the comparison at one rate, up to the first that still has runs without a result, else
    up to the final."""
    stage = _stage(race, "tuning", [c for m in race.methods for c in candidates(race, m)], race.tuning_starts)
    yield stage
    if stage.missing(results):
        return
    tried = stage.scores(results, score)
    tuned = [max((c for c in tried if c.method == m.name), key=lambda c: tried[c]) for m in race.methods]
    entrants, kept = tuned, survivors({entrant: tried[entrant] for entrant in tuned}, len(tuned))
    for number, places in enumerate(field_sizes(len(tuned), race.finalists)[1:], start=1):
        stage = _stage(race, f"round {number}", entrants, min(race.starts, 2**number))
        yield stage
        if stage.missing(results):
            return
        kept = survivors(stage.scores(results, score), places)
        entrants = [entrant for entrant in entrants if entrant in kept]
    stage = _stage(race, "one rate", [*entrants, *at_rate_of(kept[0], race, tuned)], race.starts)
    yield stage
    if stage.missing(results):
        return
    finalists = [entrant for entrant in tuned if entrant in entrants or entrant.method == race.yardstick]
    yield _stage(race, "final", finalists, race.starts)


def at_rate_of(best: Candidate, race: Race, tuned: Sequence[Candidate]) -> list[Candidate]:
    """The baselines of the comparison at one rate: their tuned settings with the learning rate of ``best``."""
    return [
        entrant._replace(number=race.budget, set=(*entrant.set[:-1], best.set[-1]))
        for entrant in tuned
        if entrant.method in race.at_one_rate
    ]


def next_stage(race: Race, results: Mapping[str, Result]) -> Stage:
    """The first stage that still has runs without a result; else the final."""
    *_, stage = stages(race, results)
    return stage


QUICK = (
    "stages.0.max_steps=2", "stages.0.max_tokens=16", "stages.0.rollout_batch=8", "stages.0.group_size=4",
    "algorithm.reject_zero_advantage=false", "data.train.0.count=40", "data.test.held_out.count=4",
    "evaluation.samples=1", "evaluation.pass_at=[1]", "evaluation.temperatures=[1.0]", "rollout.weight_lag=1",
)  # fmt: skip
QUICK_START = ("phases.0.steps=60", "phases.1.steps=40")


def quick_stage(race: Race) -> Stage:
    """Every method in its default setting for two steps of two updates, with weights one update old."""
    short = race.model_copy(update={"set": (*race.set, *QUICK)})
    middle = [candidates(race, method)[race.budget // 2] for method in race.methods]
    runs = race_runs(
        short, middle, race.families[0], [race.conditions.tuning], race.tuning_starts, start_set=QUICK_START
    )
    return Stage("quick", middle, {(race.families[0].name, *place): run for place, run in runs.items()})


def _stage(race: Race, name: str, entrants: list[Candidate], starts: int | Sequence[int]) -> Stage:
    # tuned on the first family and one condition; rounds on that family under some; the final has all of both
    families = race.families if name == "final" else race.families[:1]
    rounds = race.conditions.every() if name == "final" else race.conditions.rounds
    conditions = [race.conditions.tuning] if name == "tuning" else rounds
    runs = {
        (family.name, *place): run
        for family in families
        for place, run in race_runs(race, entrants, family, conditions, starts).items()
    }
    return Stage(name, entrants, runs)


# --- measures -------------------------------------------------------------------------------------------------------


def score(result: Result, temperature: str = "best") -> float:
    """Test accuracy after training at a temperature, or where it is best; 0 of a run that did not get there.

    At one fixed temperature a method that only lowers the entropy would look better than it is.
    """
    accuracy = parse_measure(f"test@{temperature}")(result)
    return 0.0 if math.isnan(accuracy) else accuracy


def failures(result: Result, bounds: Bounds) -> list[Failure]:
    """What went wrong with a run (`Bounds`). Curves are of what was sampled: with stale weights, of those."""

    def measured(text: str) -> float:
        return parse_measure(text)(result)  # nan, which compares false, of a curve that is not there

    found: list[Failure] = []
    if measured(f"collapse:{bounds.collapse:g}@{bounds.won:g}") == 1:
        found.append("collapse")
    not_finite = str(result["stopped"] or "").startswith(("FloatingPointError", "NotFiniteError"))
    if not_finite or measured("entropy@max") > bounds.entropy or measured("grad_norm@max") > bounds.grad_norm:
        found.append("blow-up")
    if measured("rise@best") < -bounds.destruction:
        found.append("destruction")
    return found


def entropy_error(curves: Curves, target: float) -> float:
    """Root mean square of entropy less its target over the second half of the steps, in nats; nan without any."""
    values = list(curves.get("entropy", ()))
    late = np.array([value - target for value in values[len(values) // 2 :] if value is not None])
    return float(np.sqrt(np.mean(late**2))) if len(late) else math.nan


def regrets(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """A method's mean distance to the best of each family, from scores by family and method.

    Example: 0.9 and 0.5 of bests 0.9 and 0.7 make 0.1.
    """
    methods = list(next(iter(scores.values())))
    bests = {family: max(own.values()) for family, own in scores.items()}
    return {m: float(np.mean([bests[family] - own[m] for family, own in scores.items()])) for m in methods}


def ranking_agreement(scores: Sequence[Mapping[str, float]]) -> float:
    """Mean Kendall's tau of the methods' rankings over all pairs of ``scores`` (starts, temperatures); nan with one."""
    methods = list(scores[0])
    ranked = [[own[method] for method in methods] for own in scores]
    taus = [cast(float, kendalltau(a, b)[0]) for i, a in enumerate(ranked) for b in ranked[i + 1 :]]
    return float(np.mean(taus)) if taus else math.nan


class Sigmoid(NamedTuple):
    """R_0 + (A - R_0) / (1 + (C_mid / C)^B): accuracy by what was spent (ScaleRL, Khatri et al. 2025, 2510.13786)."""

    start: float  # R_0, given
    asymptote: float  # A
    efficiency: float  # B
    midpoint: float  # C_mid, at which half of the rise is done

    def __call__(self, spent: NDArray[np.float64]) -> NDArray[np.float64]:
        return _sigmoid(spent, self.start, self.asymptote, self.efficiency, self.midpoint)


def _sigmoid(
    spent: NDArray[np.float64], start: float, asymptote: float, efficiency: float, midpoint: float
) -> NDArray[np.float64]:
    # C^B / (C^B + C_mid^B), so that nothing spent is no division by 0
    share = spent**efficiency
    return start + (asymptote - start) * share / (share + midpoint**efficiency)


def fit_sigmoid(spent: Sequence[float], accuracy: Sequence[float | None], start: float) -> Sigmoid | None:
    """By least squares; None with fewer than eight values or no fit, and where it does not rise or not to its half.

    Args:
        spent: cost so far at each step, positive and rising: sampled tokens, updates, CPU seconds.
        accuracy: in 0 to 1; None where it was not measured.
        start: accuracy before anything was spent.
    """
    pairs = [(c, a) for c, a in zip(spent, accuracy, strict=True) if a is not None and math.isfinite(a)]
    if len(pairs) < 8:
        return None
    costs, values = np.array(pairs, dtype=np.float64).T
    scale = float(costs[-1])

    def model(c: NDArray[np.float64], a: float, b: float, mid: float) -> NDArray[np.float64]:
        return _sigmoid(c, start, a, b, mid)

    try:
        found, _ = curve_fit(
            model, costs / scale, values, p0=(values[-3:].mean(), 1.5, 0.3), bounds=((0, 0.1, 1e-3), (1, 10, 10))
        )
    except RuntimeError:  # no convergence
        return None
    asymptote, efficiency, midpoint = map(float, found)
    usable = asymptote > start and midpoint < 1
    return Sigmoid(start, asymptote, efficiency, midpoint * scale) if usable else None
