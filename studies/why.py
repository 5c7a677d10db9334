"""What an entropy bonus does to single words: a step of a run made again with it, without it, over the likelier words.

The question (race.md): which words gain probability under the bonus where a batch is used several times, and does
a bonus over the likelier words alone take that away? From one state and of the same responses a step is made in six
ways, three bonuses by two numbers of passes. At every sampled position the words fall into three classes by their
probability before the step: the sampled one, other likely ones (the fewest that together hold `LIKELY`), unlikely
ones. What a class gains with the bonus, less what it gains without, is the bonus's doing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from magicrl.records import TrainSample
from magicrl.training.attribution import of_state, weight_names
from magicrl.training.repeating import Repeated, recorded_config, repeat, vary
from studies.claims import Verdict, students
from studies.definition import Result, shipped_ablations
from studies.pages import markdown_table
from studies.runs import PlannedRun, do_run, folder_of, plan_runs, rounded

CLASSES = ("sampled", "likely", "unlikely")
LIKELY = 0.9
ALPHA = 0.02  # the bonus's coefficient, near what the controller of C9 pays
BONUSES: Mapping[str, Sequence[str]] = {
    "none": ("entropy.controller=none",),
    "all words": ("entropy.controller=fixed", f"entropy.alpha={ALPHA}"),
    "likelier words": ("entropy.controller=fixed", f"entropy.alpha={ALPHA}", "model.entropy_clamp=0.4"),
}
PASSES = (1, 4)
EVERY = 10  # steps from one that is taken apart to the next; a checkpoint lies before each
ARM = "reuse 4, control"  # of C9, whose runs the steps are taken from
ABOUT = (
    f'Written by `python -m studies why`. Steps of runs of C9\'s arm "{ARM}", one in {EVERY}, are made again from one '
    f"state and of the same responses, with the bonus (coefficient {ALPHA}) and without. Words are classed by their "
    f"probability before the step: sampled; likely, the fewest others that together hold {LIKELY}; unlikely. Figures "
    "are thousandths of probability a position that a class gains with the bonus, less what it gains without: means "
    "over the steps of a run, then over starts, with intervals of 95 %."
)


def classes(before: Tensor, sampled: Tensor) -> Tensor:
    """``[3, T, V]``: which words are in each of `CLASSES` at each position.

    Args:
        before: ``[T, V]`` probabilities.
        sampled: ``[T]`` words.

    Example:
        >>> before = torch.tensor([[0.6, 0.35, 0.05]])
        >>> classes(before, torch.tensor([0]))[:, 0].int().tolist()
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    ordered, places = before.sort(dim=1, descending=True)
    # a word is likely if those before it hold less than LIKELY
    likely = torch.empty_like(before, dtype=torch.bool).scatter_(1, places, ordered.cumsum(1) - ordered < LIKELY)
    own = torch.zeros_like(likely).scatter_(1, sampled[:, None], True)
    return torch.stack((own, likely & ~own, ~likely & ~own))


def gains(before: Tensor, after: Tensor, sampled: Tensor) -> list[float]:
    """What each of `CLASSES` gains of probability, the mean over positions; they sum to 0."""
    return ((after - before) * classes(before, sampled)).sum(dim=2).mean(dim=1).tolist()


class _Words:
    """The distributions over the next word that weights give, in float64."""

    def __init__(self, repeated: Repeated, samples: Sequence[TrainSample]) -> None:
        # transformers' own attention: a plain forward pass that gives all logits
        self._model = AutoModelForCausalLM.from_pretrained(repeated.learner.start, attn_implementation="sdpa").double()
        self._samples = samples
        own = dict(self._model.named_parameters())
        self._weights = [own[name] for name in weight_names(repeated.checkpoint.learner_state())]

    @torch.no_grad()
    def at(self, weights: Tensor) -> Tensor:
        """``[T, V]`` under the weights, ``[P]``."""
        for own, given in zip(self._weights, weights.split([w.numel() for w in self._weights]), strict=True):
            own.copy_(given.view_as(own))
        found: list[Tensor] = []
        for sample in self._samples:
            words = torch.tensor([[*sample.prompt_tokens, *sample.tokens]])
            logits = self._model(words).logits[0, len(sample.prompt_tokens) - 1 : -1]
            found.append(logits.softmax(dim=1))
        return torch.cat(found)


def step_found(run: Path, step: int) -> dict[str, Any]:
    """A step of the run made in all ways: what the classes gain in each, and the entropy before it.

    Raises:
        ValueError: the step cannot be made again here; says why.
    """
    repeated = repeat(run, step)
    samples = {id(s.tokens): s for batch, _, _ in repeated.updates for s in batch.samples}.values()
    words = _Words(repeated, list(samples))
    before = words.at(of_state(repeated.checkpoint.learner_state(), "weights"))
    sampled = torch.tensor([token for sample in samples for token in sample.tokens])
    made: dict[str, list[float]] = {}
    for passes in PASSES:
        for bonus, settings in BONUSES.items():
            config = recorded_config(run, [*settings, f"algorithm.reuse={passes}"])
            after = words.at(vary(repeated, config, " ".join(settings)).after)
            made[f"{passes}, {bonus}"] = [rounded(gain) for gain in gains(before, after, sampled)]
    entropy = -(before * before.clamp_min(1e-300).log()).sum(dim=1).mean()
    held = (before * classes(before, sampled)).sum(dim=2).mean(dim=1)
    return {
        "step": step,
        "equal": repeated.equal,
        "entropy": rounded(float(entropy)),
        "held": [rounded(share) for share in held.tolist()],
        "gains": made,
    }


def runs_of(starts: int) -> list[PlannedRun]:
    """A run of `ARM` from each of the first screened starts of every family of C9."""
    planned = plan_runs(shipped_ablations("starts"), "tiny", seeds=[0])
    found: dict[str, list[PlannedRun]] = {}
    for run in planned:
        if any(arm == ARM for _, arm in run.arms):
            found.setdefault(run.arms[0][0], []).append(run)
    return [run for runs in found.values() for run in runs[:starts]]


def take_apart(run: PlannedRun, work: Path) -> dict[str, Any]:
    """The line of a run: trained, then a step in `EVERY` of it taken apart; called in a process of its own."""
    kept = run.config.checkpoint.model_copy(update={"every": EVERY, "keep_last": 100})
    done = do_run(replace(run, config=run.config.model_copy(update={"checkpoint": kept})), work)
    folder = folder_of(run.key, work)
    steps = [step_found(folder, step) for step in range(1, done["steps"] + 1, EVERY)]
    return {**done, "words": steps}


def page(rows: Sequence[Result]) -> str:
    """What the bonus does to each class, by family and passes, and what becomes of the predictions."""
    titles = {ablation.id: ablation.title.rpartition(", ")[2] for ablation in shipped_ablations("starts")}
    gained: list[tuple[str, ...]] = []
    decided: list[tuple[str, ...]] = []
    for ablation, title in titles.items():
        runs = [row for row in rows if row["arms"][0][0] == ablation]
        if not runs:
            continue
        for passes, bonus in product(PASSES, list(BONUSES)[1:]):
            by_class = zip(*(_doing(row, passes, bonus) for row in runs), strict=True)
            gained.append((title, str(passes), bonus, *(_shown(_tested(values)) for values in by_class)))
        for says, value in PREDICTIONS.items():
            found = _tested([value(row) for row in runs])
            decided.append((title, says, _shown(found), _verdict(found)))
    equal = [step["equal"] for row in rows for step in row["words"]]
    parts = (
        "# What an entropy bonus does to single words",
        f"{ABOUT} {sum(equal)} of {len(equal)} steps came out bit for bit as their runs recorded them.",
        markdown_table(("family", "passes", "bonus over", *CLASSES), gained),
        "## Predictions",
        f"C10 of the [claims](../claims.md); {len(titles) * len(PREDICTIONS)} in all, which share the error of 0.05.",
        markdown_table(("family", "prediction", "by how much (95 %)", "verdict"), decided),
    )
    return "\n\n".join(parts) + "\n"


def _doing(row: Result, passes: int, bonus: str) -> list[float]:
    """Thousandths that each class gains by the bonus, the mean over the run's steps."""
    steps = [step["gains"] for step in row["words"]]
    return [
        1000 * sum(one[f"{passes}, {bonus}"][place] - one[f"{passes}, none"][place] for one in steps) / len(steps)
        for place in range(len(CLASSES))
    ]


def _unlikely(row: Result, passes: int, bonus: str) -> float:
    return _doing(row, passes, bonus)[CLASSES.index("unlikely")]


PREDICTIONS: Mapping[str, Callable[[Result], float]] = {
    "with four passes unlikely words gain more than likely ones": lambda row: (
        _unlikely(row, 4, "all words") - _doing(row, 4, "all words")[CLASSES.index("likely")]
    ),
    "a bonus over the likelier words gives unlikely ones less than half as much": lambda row: (
        0.5 * _unlikely(row, 4, "all words") - _unlikely(row, 4, "likelier words")
    ),
    "four passes give unlikely words more than twice what one pass gives": lambda row: (
        _unlikely(row, 4, "all words") - 2 * _unlikely(row, 1, "all words")
    ),
}
"""What C10 predicts, each as a number of a run that is above 0 where it is so."""


def _tested(values: Sequence[float]) -> Verdict:
    return students("", range(len(values)), np.array(values), bar=0.0)


def _shown(found: Verdict) -> str:
    return f"{found.effect:.2f} ({found.low:.2f} to {found.high:.2f})"


def _verdict(found: Verdict) -> str:
    sides = 2 * len(PREDICTIONS) * len(shipped_ablations("starts"))
    if sides * min(found.p_holds, found.p_fails) >= 0.05:
        return "undecided"
    return "holds" if found.p_holds < found.p_fails else "does not hold"
