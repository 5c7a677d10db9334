"""Entropy of a step's rollout buffer in nats per token (section 4), and controllers of its coefficient alpha_k (3.2.5).

``entropy.controller`` names a function that makes an `EntropyController` from `ControllerSettings`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from magicrl.records import Completion
from magicrl.registry import resolve

EntropyEstimator: TypeAlias = Literal["exact", "sampled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyEstimate:
    """Token-weighted mean entropy of a buffer.

    Attributes:
        mean: In nats per token.
        standard_error: Standard error with tokens clustered by response. Infinite with one response.
    """

    mean: float
    standard_error: float


def clustered_mean(totals_N: NDArray[np.float64], lengths_N: NDArray[np.int64]) -> EntropyEstimate:
    """Return the mean over tokens from the total of each response, with an error that allows for correlation within
    one.

    The mean is the ratio of two sums over responses, sum S / sum L. Its error comes from the residuals S_i - mean * L_i
    (linearised ratio estimator). ``totals_N`` are the S_i, ``lengths_N`` the L_i.

    Raises:
        ValueError: There are no tokens.
    """
    tokens = int(lengths_N.sum())
    if tokens == 0:
        raise ValueError("entropy needs at least one response token")
    mean = float(totals_N.sum()) / tokens
    count = len(totals_N)
    residuals = totals_N - mean * lengths_N
    # n / (n - 1) as in a sample variance. A single response shows no spread between responses.
    spread = math.sqrt(float((residuals**2).sum()) * count / (count - 1)) if count > 1 else math.inf
    return EntropyEstimate(mean=mean, standard_error=spread / tokens)


def measure_entropy(completions: Sequence[Completion], estimator: EntropyEstimator) -> EntropyEstimate | None:
    """Estimate e_k over all sampled tokens of the buffer. Pass every completion of the step, before rejection.

    ``exact`` averages the entropies of the full distribution that the engine recorded, and returns None if a completion
    has none. ``sampled`` averages -log-prob of the sampled tokens. That is unbiased at top_p = 1, if no completion was
    selected by its content.
    """
    if estimator == "sampled":
        return mean_entropy([-c.of_sampled(c.sampler_logprobs) for c in completions])
    if estimator != "exact":
        raise ValueError(f"entropy estimator must be exact or sampled, got {estimator!r}")
    known = [c.of_sampled(c.sampler_entropies) for c in completions if c.sampler_entropies is not None]
    # All or none: the completions that happen to have entropies do not represent the buffer.
    return mean_entropy(known) if len(known) == len(completions) else None


def mean_entropy(entropies: Sequence[NDArray[np.floating[Any]]]) -> EntropyEstimate:
    """Return the token-weighted mean of ``[T]`` entropies, one array per response."""
    totals = np.array([float(a.sum(dtype=np.float64)) for a in entropies])
    return clustered_mean(totals, np.array([len(a) for a in entropies], dtype=np.int64))


@runtime_checkable
class EntropyController(Protocol):
    """Controller of the entropy coefficient. It returns alpha_k for a measured entropy, and observes that entropy after
    the step.

    It may also have a method ``coefficients(entropy)`` that returns further coefficients by name. They go into
    `Controls` and from there to the loss row's surrogate, and into the metrics as ``entropy/coefficient/<name>``.
    """

    def coefficient(self, entropy: float) -> float:
        """Return alpha_k >= 0 for a step whose buffer has this entropy (nats per token). This changes no state."""
        ...

    def observe(self, entropy: float) -> None:
        """Update the state after a step: once per training step, whatever N_SGD is."""
        ...

    def state(self) -> dict[str, float | None]:
        """Return the state that a checkpoint must hold, as JSON scalars."""
        ...

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Restore what ``state`` returned."""
        ...


class FixedEntropyController:
    """Controller with a constant alpha."""

    def __init__(self, alpha: float) -> None:
        if not alpha >= 0:
            raise ValueError(f"entropy.alpha must be >= 0, got {alpha}")
        self.alpha = alpha

    def coefficient(self, entropy: float) -> float:
        return self.alpha

    def observe(self, entropy: float) -> None:
        return None

    def state(self) -> dict[str, float | None]:
        return {}

    def restore(self, state: Mapping[str, float | None]) -> None:
        return None


class AdaptiveEntropyController:
    """Controller with alpha_k = c_k * 1{e_k <= target}, where c grows by D below the target and shrinks by D above it.

    c starts at 0 and is clamped to [0, c_max].

    Args:
        target: tgt, nats per token.
        step: D, change of c per training step.
        c_max: Upper limit of c.
        lagged: Decide by the entropy of the previous step, as the released code does. The first step has alpha 0.
        decrease_at_equality: Also shrink c at e_k = target, as the released code does.
    """

    def __init__(
        self,
        target: float,
        step: float,
        *,
        c_max: float = math.inf,
        lagged: bool = False,
        decrease_at_equality: bool = False,
    ) -> None:
        if not target >= 0:
            raise ValueError(f"entropy.target must be >= 0 nats per token, got {target}")
        if not step > 0:
            raise ValueError(f"entropy.step must be > 0, got {step}")
        if not c_max >= 0:
            raise ValueError(f"the entropy coefficient needs 0 <= c_max, got {c_max}")
        self.target = target
        self.step = step
        self.c_max = c_max
        self.lagged = lagged
        self.decrease_at_equality = decrease_at_equality
        self.c = 0.0  # c_k, without the indicator
        self._previous: float | None = None

    def coefficient(self, entropy: float) -> float:
        assert math.isfinite(entropy), f"measured entropy is {entropy}"
        decisive = self._previous if self.lagged else entropy
        # c changes in every step, but alpha is not 0 only at or below the target.
        if decisive is None or decisive > self.target:
            return 0.0
        return self.c

    def observe(self, entropy: float) -> None:
        assert math.isfinite(entropy), f"measured entropy is {entropy}"
        change = 0.0  # at the target, unless the preset of the released code is used
        if entropy < self.target:
            change = self.step
        elif entropy > self.target or self.decrease_at_equality:
            change = -self.step
        # Without the lower limit, steps above the target would make c negative, and the bonus a penalty just when
        # entropy falls too low.
        self.c = min(max(self.c + change, 0.0), self.c_max)
        self._previous = entropy

    def state(self) -> dict[str, float | None]:
        return {"c": self.c, "previous_entropy": self._previous}

    def restore(self, state: Mapping[str, float | None]) -> None:
        c = state["c"]
        assert c is not None, "an adaptive controller's checkpoint holds c"
        self.c = c
        self._previous = state["previous_entropy"]


PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "report": {"target": 0.2, "step": 0.005},
        # Lagged, and decreasing at equality, as in the released code. Entropy is measured before rejection (D2).
        "code": {"target": 0.2, "step": 1e-4, "c_max": 0.005, "lagged": True, "decrease_at_equality": True},
        # Measured on models of 0.1M parameters: with a smaller D, c cannot follow within 100 steps.
        "small": {"target": 0.2, "step": 0.01, "c_max": 0.1},
    }
)
"""Arguments of the adaptive controller: ``report`` as in the report, ``code`` as in the released code, ``small`` for
models far below a billion parameters."""


class ControllerSettings(NamedTuple):
    """Values of the recipe's ``[entropy]`` table, from which a controller is made. None where it sets none."""

    preset: str = "report"
    alpha: float | None = None
    target: float | None = None
    step: float | None = None
    maximum: float | None = None


def no_control(s: ControllerSettings) -> EntropyController:
    """Return the controller of ``entropy.controller = "none"``."""
    return FixedEntropyController(0.0)


def fixed_control(s: ControllerSettings) -> EntropyController:
    """Return the controller of ``entropy.controller = "fixed"``, which requires ``alpha``."""
    if s.alpha is None:
        raise ValueError('entropy.controller = "fixed" needs entropy.alpha')
    return FixedEntropyController(s.alpha)


def adaptive_control(s: ControllerSettings) -> EntropyController:
    """Return the controller of ``entropy.controller = "adaptive"``. The settings override the preset."""
    if s.preset not in PRESETS:
        raise ValueError(f"unknown entropy.preset {s.preset!r}; known: {', '.join(PRESETS)}")
    own: dict[str, Any] = {"target": s.target, "step": s.step, "c_max": s.maximum}
    return AdaptiveEntropyController(**{**PRESETS[s.preset], **{name: x for name, x in own.items() if x is not None}})


def make_controller(reference: str, settings: ControllerSettings | None = None) -> EntropyController:
    """Return the controller that a recipe names.

    Raises:
        ValueError: The name is unknown (the message lists the known ones), makes no controller, or a value is out of
            range.
    """
    make = resolve("controller", reference)
    # Not a controller itself: it would ignore the settings, and keep its state from one run or stage to the next.
    made = make(settings or ControllerSettings()) if callable(make) else None
    if not isinstance(made, EntropyController):
        found = f"is a {type(make).__name__}" if made is None else f"returned a {type(made).__name__}"
        raise ValueError(
            f"controller {reference!r} {found}; it must be a function of ControllerSettings that returns an object "
            "with coefficient, observe, state and restore"
        )
    return made


def coefficients_of(
    controller: EntropyController, entropy: float, named: str = "entropy.controller"
) -> tuple[float, dict[str, float]]:
    """Return alpha_k, and a controller's further coefficients: {} if it has no ``coefficients(entropy)``.

    ``named`` is the setting with its value, for errors.

    Raises:
        ValueError: A coefficient is not a finite number, or alpha_k is negative.
    """

    def number(what: str, value: Any) -> float:
        try:
            # A comparison or a text that was returned by mistake also converts.
            found = math.nan if isinstance(value, bool | np.bool_ | str) else float(value)
        except (TypeError, ValueError):
            found = math.nan
        if not math.isfinite(found):
            raise ValueError(f"{named}: {what} is {value!r}; it must be a finite number")
        return found

    alpha = number("coefficient(entropy)", controller.coefficient(entropy))
    if alpha < 0:
        raise ValueError(f"{named}: coefficient(entropy) is {alpha}; it must be >= 0, since it multiplies a bonus")
    ask = getattr(controller, "coefficients", None)
    further: object = {} if ask is None else ask(entropy)
    if not isinstance(further, Mapping):
        raise ValueError(f"{named}: coefficients(entropy) must return a dict; got {type(further).__name__}")
    given = cast("Mapping[Any, Any]", further)
    return alpha, {str(name): number(f"the coefficient {name!r}", value) for name, value in given.items()}
