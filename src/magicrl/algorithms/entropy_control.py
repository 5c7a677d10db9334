"""Who decides the entropy coefficient alpha_k: nobody, a constant, or adaptive control (Section 3.2.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias, runtime_checkable

ControllerKind: TypeAlias = Literal["none", "fixed", "adaptive"]
PresetName: TypeAlias = Literal["report", "code", "small"]


@runtime_checkable
class EntropyController(Protocol):
    """Asked for alpha_k with the step's measured entropy, told that entropy once the step is done."""

    def coefficient(self, entropy: float) -> float:
        """alpha_k >= 0 for a step whose buffer has this entropy (nats per token). Changes nothing."""
        ...

    def observe(self, entropy: float) -> None:
        """The step is done: one update per training step, whatever N_SGD is."""
        ...

    def state(self) -> dict[str, float | None]:
        """What a checkpoint must hold, as JSON scalars."""
        ...

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Inverse of ``state``."""
        ...


class NoEntropyControl:
    """alpha_k = 0 always."""

    def coefficient(self, entropy: float) -> float:
        return 0.0

    def observe(self, entropy: float) -> None:
        return None

    def state(self) -> dict[str, float | None]:
        return {}

    def restore(self, state: Mapping[str, float | None]) -> None:
        return None


class FixedEntropyController:
    """alpha_k = alpha always."""

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
    """alpha_k = c_k * 1{e_k <= target}; c grows by D below the target and shrinks by D above it.

    c starts at 0 and is clamped to [c_min, c_max]. The floor of 0 matters: without it the steps above the
    target would wind c negative, and the bonus would be a penalty just when entropy falls too low.

    Args:
        target: tgt, nats per token.
        step: D, change of c per training step.
        c_min: floor of c.
        c_max: ceiling of c.
        lagged: decide by the entropy of the step before (the released code); the first step has alpha 0.
        decrease_at_equality: also shrink c at e_k = target (the released code).
    """

    def __init__(
        self,
        target: float,
        step: float,
        *,
        c_min: float = 0.0,
        c_max: float = math.inf,
        lagged: bool = False,
        decrease_at_equality: bool = False,
    ) -> None:
        if not target >= 0:
            raise ValueError(f"entropy.target must be >= 0 nats per token, got {target}")
        if not step > 0:
            raise ValueError(f"entropy.step must be > 0, got {step}")
        if not 0 <= c_min <= c_max:
            raise ValueError(f"the entropy coefficient needs 0 <= c_min <= c_max, got [{c_min}, {c_max}]")
        self.target = target
        self.step = step
        self.c_min = c_min
        self.c_max = c_max
        self.lagged = lagged
        self.decrease_at_equality = decrease_at_equality
        self._c = c_min
        self._previous: float | None = None

    @property
    def c(self) -> float:
        """c_k, before the indicator."""
        return self._c

    def coefficient(self, entropy: float) -> float:
        assert math.isfinite(entropy), f"measured entropy is {entropy}"
        decisive = self._previous if self.lagged else entropy
        if decisive is None or decisive > self.target:
            return 0.0
        return self._c

    def observe(self, entropy: float) -> None:
        assert math.isfinite(entropy), f"measured entropy is {entropy}"
        if entropy < self.target:
            change = self.step
        elif entropy > self.target or self.decrease_at_equality:
            change = -self.step
        else:
            change = 0.0
        self._c = min(max(self._c + change, self.c_min), self.c_max)
        self._previous = entropy

    def state(self) -> dict[str, float | None]:
        return {"c": self._c, "previous_entropy": self._previous}

    def restore(self, state: Mapping[str, float | None]) -> None:
        c = state["c"]
        assert c is not None, "an adaptive controller's checkpoint holds c"
        self._c = c
        self._previous = state["previous_entropy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyPreset:
    """Settings of the adaptive controller; see its arguments."""

    target: float
    step: float
    c_max: float = math.inf
    lagged: bool = False
    decrease_at_equality: bool = False


PRESETS: Mapping[str, EntropyPreset] = MappingProxyType(
    {
        "report": EntropyPreset(target=0.2, step=0.005),
        "code": EntropyPreset(target=0.2, step=1e-4, c_max=0.005, lagged=True, decrease_at_equality=True),
        # Measured here on models of 0.1M parameters: a smaller D cannot keep up within 100 steps.
        "small": EntropyPreset(target=0.2, step=0.01, c_max=0.1),
    }
)
"""``report``: the report's; ``code``: the released code's; ``small``: for models far below a billion parameters."""


def make_controller(
    kind: ControllerKind,
    preset: PresetName = "report",
    *,
    alpha: float | None = None,
    target: float | None = None,
    step: float | None = None,
    maximum: float | None = None,
) -> EntropyController:
    """The controller that a recipe asks for; ``target``, ``step`` and ``maximum`` override the preset's.

    Raises:
        ValueError: unknown kind or preset, ``fixed`` without alpha, or a value out of range.
    """
    if kind == "none":
        return NoEntropyControl()
    if kind == "fixed":
        if alpha is None:
            raise ValueError('entropy.controller = "fixed" needs entropy.alpha')
        return FixedEntropyController(alpha)
    if kind != "adaptive":
        raise ValueError(f"entropy.controller must be none, fixed or adaptive, got {kind!r}")
    if preset not in PRESETS:
        raise ValueError(f"unknown entropy.preset {preset!r}; known: {', '.join(PRESETS)}")
    base = PRESETS[preset]
    return AdaptiveEntropyController(
        base.target if target is None else target,
        base.step if step is None else step,
        c_max=base.c_max if maximum is None else maximum,
        lagged=base.lagged,
        decrease_at_equality=base.decrease_at_equality,
    )
