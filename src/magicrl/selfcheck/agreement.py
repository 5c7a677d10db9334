"""Sampler and learner agree: the gap of their log-probs per token, over the steps of small runs."""

from __future__ import annotations

from magicrl.selfcheck.setup import Proof, Setup, judged, metrics
from magicrl.training.protocols import TrainingStopped

FLOAT32_LIMIT = 1e-4
"""Largest gap of a token in float32, in nats: rounding alone."""
ROUNDING_LIMIT = 0.02
"""Mean gap in a 16-bit precision, in nats. An engine with the weights of the step before shows more."""
MODES: dict[str, tuple[tuple[str, ...], str, float]] = {
    "float32": ((), "max", FLOAT32_LIMIT),
    "bfloat16": (("model.dtype=bfloat16",), "mean", ROUNDING_LIMIT),
    "bfloat16, float32 head": (("model.dtype=bfloat16", "model.head_dtype=float32"), "mean", ROUNDING_LIMIT),
    "float16": (("model.dtype=float16",), "mean", ROUNDING_LIMIT),
    "float32, exact": (("model.exact=true",), "max", 0.0),
    "bfloat16, exact": (("model.dtype=bfloat16", "model.exact=true"), "max", 0.0),
}
"""Settings of each mode, and the figure that must not exceed a limit."""


def check_agreement(setup: Setup) -> Proof:
    """Return whether the gap of each mode is within its limit: 0 in exact mode."""
    modes = {name: mode for name, mode in MODES.items() if not setup.quick or name in ("float32", "bfloat16, exact")}
    found: dict[str, dict[str, float]] = {}
    for name, (settings, _, _) in modes.items():
        try:
            run = setup.train(f"agreement {name}", *settings, f"stages.0.max_steps={2 if setup.quick else 4}")
        except TrainingStopped:  # a gap above the recipe's own limit
            found[name] = {"tokens": 0, "mean": float("nan"), "max": float("nan")}
            continue
        rows = [row for row in metrics(run) if row.get("learner/sgd_steps")]
        found[name] = {
            "tokens": sum(row["tokens/trained"] for row in rows),
            "mean": max((row["learner/sampler_gap_mean"] for row in rows), default=float("nan")),
            "max": max((row["learner/sampler_gap_max"] for row in rows), default=float("nan")),
        }
    off = [name for name, (_, figure, limit) in modes.items() if not found[name][figure] <= limit]
    figures = "; ".join(f"{name} {gap['mean']:.2g} (most {gap['max']:.2g})" for name, gap in found.items())
    failed = f"; above its limit: {', '.join(off)}" if off else ""
    return Proof(
        status=judged(not off),
        figure=f"mean gap of a step's tokens in nats, over the steps of a run: {figures}{failed}",
        against=f"0 in exact mode; {FLOAT32_LIMIT:g} per token in float32; a mean of {ROUNDING_LIMIT:g} in 16 bits",
        details=found,
    )
