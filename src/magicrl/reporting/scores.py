"""The headline: what the test says before and after training."""

from __future__ import annotations

from typing import Any

from magicrl.reporting.comparison import Comparison, comparisons
from magicrl.reporting.run_folder import RecordedRun
from magicrl.reporting.views import intervals_view
from magicrl.reporting.wording import number, percent, points, temperature

Tile = dict[str, str]


def run_verdict(run: RecordedRun) -> dict[str, Any] | None:
    """The data of the verdict's template, as the run's end recorded it; None for a run that has not ended."""
    learning = run.learning
    if learning is None:
        return None
    facts = learning.facts
    changed = {True: "the weights changed", False: "no weight changed", None: ""}[facts.weights_changed]
    inputs = [f"{facts.updates} SGD updates in {facts.steps} training steps", changed]
    if facts.answers is not None:
        inputs.append(f"{percent(facts.answers.mixed)} of the groups gave a gradient")
    if facts.tokens_share is not None:
        inputs.append(f"{percent(facts.tokens_share)} of the sampled tokens were learnt from")
    if facts.answers is not None and facts.answers.answered is not None:
        inputs.append(f"{percent(facts.answers.answered)} of the answers ended and could be read")
        inputs.append(f"{percent(facts.answers.truncated)} were cut at T")
    return {
        "title": learning.title,
        "reason": learning.reason,
        "advice": learning.advice,
        "good": learning.outcome == "learned",
        "failed": learning.failed,
        "inputs": ", ".join(part for part in inputs if part) + ".",
    }


def headline(run: RecordedRun) -> dict[str, Any] | None:
    """The data of the headline's template: tiles of the run, and a table and a figure a test set."""
    found = comparisons(run)
    if not found:
        return None
    sets = [
        {
            "comparison": comparison,
            "view": intervals_view("test" if len(found) == 1 else f"test_{i + 1}", comparison),
            "passes": _passes(comparison),
            "tiles": _score_tiles(comparison) + (_run_tiles(run) if i == 0 else []),
            "boxed": any(s.boxed is not None for p in comparison.pairs for s in (p.before, p.after) if s is not None),
        }
        for i, comparison in enumerate(found)
    ]
    return {"sets": sets}


def _passes(comparison: Comparison) -> list[dict[str, Any]]:
    before, after = comparison.pass_at("before"), comparison.pass_at("after")
    return [
        {
            "k": k,
            "temperature": (before.get(k) or after[k])[0],
            "before": before[k][1] if k in before else None,
            "after": after[k][1] if k in after else None,
        }
        for k in sorted({*before, *after})
    ]


def _score_tiles(comparison: Comparison) -> list[Tile]:
    """Accuracy at the temperature of training, and the rise over the start at its best."""
    at = comparison.training_temperature
    rise = None if at is None else comparison.rise_over_best(at)
    if at is None or rise is None or comparison.after is None:
        return []
    pair = next(p for p in comparison.pairs if p.temperature == at)
    old = "–" if pair.before is None else percent(pair.before.accuracy.mean)
    return [
        {
            "value": f"{old} → {percent(rise.after.mean)}",
            "label": f"accuracy at temperature {temperature(at)}",
            "detail": "before and after training",
        },
        {
            "value": f"{points(rise.change.mean)} points",
            "label": f"over the start's best temperature, {temperature(rise.before_temperature)}: "
            f"{percent(rise.before.mean)}",
            "detail": f"95 %: {points(rise.change.low)} to {points(rise.change.high)}",
        },
    ]


def _run_tiles(run: RecordedRun) -> list[Tile]:
    """Entropy and length over the training."""
    tiles: list[Tile] = []
    entropy, target = run.points("entropy/exact/mean", "entropy/sampled/mean"), run.points("entropy/target")
    if entropy:
        tiles.append(
            {
                "value": f"{number(entropy[0][1], 2)} → {number(entropy[-1][1], 2)}",
                "label": "entropy, nats per token",
                "detail": f"target {target[-1][1]:g}" if target else "no target",
            }
        )
    lengths = run.points("length/mean")
    if lengths:
        tiles.append(
            {
                "value": f"{lengths[0][1]:.0f} → {lengths[-1][1]:.0f}",
                "label": "mean response length, tokens",
                "detail": "first and last training step",
            }
        )
    return tiles
