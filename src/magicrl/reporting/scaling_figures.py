"""Test-time scaling as charts: accuracy over response limits and mean length, pass@k and maj@k over samples.

Pure functions from an evaluation's curves to charts; several models or checkpoints go into one figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from magicrl.reporting.canvas import PALETTE
from magicrl.reporting.charts import Chart, Series
from magicrl.reporting.eval_folder import Scaling
from magicrl.reporting.run_folder import Interval

EXACT = "Exact only while the sampler does not know the limit and no forced answer is used."
"""Must stand at every figure over limits that is computed from one set of samples."""

WIDE = 5
"""The factor from the least to the largest x from which on an axis grows by factors."""

Curve: TypeAlias = Sequence[tuple[float, Interval]]


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedScaling:
    """The curves of one evaluation under the name that the figure gives it, in a slot of the palette."""

    name: str
    slot: int
    scaling: Scaling


def scaling_charts(curves: Sequence[NamedScaling], key: str = "") -> tuple[Chart, ...]:
    """Every scaling figure that there are data for; ``key`` goes before the names of the exports."""
    charts = (limit_chart(curves, key), length_chart(curves, key), pass_chart(curves, key), vote_chart(curves, key))
    return tuple(chart for chart in charts if not chart.empty)


def limit_chart(curves: Sequence[NamedScaling], key: str = "") -> Chart:
    """Accuracy against the response limit; signs are samples that were drawn anew at their limit."""
    lines = [_line(c, [(p.limit, p.accuracy) for p in c.scaling.over_limits]) for c in curves]
    fresh = [
        Series(
            label=f"{c.name}, sampled anew",
            points=tuple((float(p.limit), p.accuracy.mean) for p in c.scaling.fresh),
            band=tuple((float(p.limit), p.accuracy.low, p.accuracy.high) for p in c.scaling.fresh),
            color=c.slot % len(PALETTE),
            style="marks",
        )
        for c in curves
        if c.scaling.fresh
    ]
    knowing = [c.name for c in curves if not c.scaling.exact]
    note = f"Computed from one set of long samples: what is longer than a limit counts as wrong there. {EXACT}"
    note += f" Not exact for: {'; '.join(knowing)}." if knowing else ""
    return _chart(
        f"{key}over_limits",
        "Accuracy against the response limit",
        (*lines, *fresh),
        "response limit, tokens",
        "limit",
        note,
    )


def length_chart(curves: Sequence[NamedScaling], key: str = "") -> Chart:
    """Token efficiency: accuracy against the mean length of a response, as the limit grows."""
    lines: list[Series] = []
    for c in curves:
        points = [(p.mean_tokens, p.accuracy) for p in c.scaling.efficiency]
        points = points or [
            (p.mean_tokens.mean, p.accuracy) for p in c.scaling.over_limits if p.mean_tokens is not None
        ]
        lines.append(_line(c, points))
    note = f"Mean tokens of a response as the limit grows, and what it gets right at that limit. {EXACT}"
    return _chart(
        f"{key}efficiency", "Accuracy against mean length", lines, "mean tokens of a response", "tokens", note
    )


def pass_chart(curves: Sequence[NamedScaling], key: str = "") -> Chart:
    """pass@k against k."""
    lines = [_line(c, [(p.k, p.passed) for p in c.scaling.over_samples]) for c in curves]
    note = "Chance that at least one of k samples is right (unbiased)."
    return _chart(f"{key}pass_at_k", "pass@k against samples", lines, "samples k", "samples", note)


def vote_chart(curves: Sequence[NamedScaling], key: str = "") -> Chart:
    """maj@k against k."""
    lines = [_line(c, [(p.k, p.majority) for p in c.scaling.over_samples if p.majority is not None]) for c in curves]
    note = "Chance that the most frequent answer of k samples is right."
    return _chart(f"{key}maj_at_k", "maj@k against samples", lines, "samples k", "samples", note)


def _line(curve: NamedScaling, points: Curve) -> Series:
    ordered = sorted(((x, value) for x, value in points if x > 0), key=_first)
    return Series(
        label=curve.name,
        points=tuple((float(x), value.mean) for x, value in ordered),
        band=tuple((float(x), value.low, value.high) for x, value in ordered),
        color=curve.slot % len(PALETTE),
        dots=True,
    )


def _first(item: tuple[float, Interval]) -> float:
    return item[0]


def _chart(key: str, title: str, series: Sequence[Series], x_name: str, x_word: str, note: str) -> Chart:
    xs = sorted({x for s in series for x, _ in s.points})
    whole = all(x == int(x) for x in xs)
    by_factors = len(xs) > 1 and xs[-1] >= WIDE * xs[0]
    return Chart(
        key=key,
        title=title,
        series=tuple(series),
        unit="percent",
        y_low=0.0,
        note=note + " Bands are 95 % intervals over problems.",
        x_name=x_name,
        x_word=x_word,
        x_log=by_factors,
        x_whole=False,
        x_ticks=(tuple(xs) if whole else _round_ticks(xs)) if by_factors else (),
    )


def _round_ticks(xs: Sequence[float]) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten inside the range of ``xs``."""
    candidates = [m * 10.0**e for e in range(8) for m in (1, 2, 5)]
    return tuple(c for c in candidates if xs and xs[0] <= c <= xs[-1])
