"""A training step made again and taken apart, as JSON values: ``magicrl.explain`` and ``magicrl explain``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from magicrl.api.given import in_python, path_text
from magicrl.api.training import threads_kept

if TYPE_CHECKING:
    from os import PathLike

    from torch import Tensor

    from magicrl.config.schema import TrainConfig
    from magicrl.training.attribution import Attributor, Probe
    from magicrl.training.repeating import Repeated


def explain(run: str | PathLike[str], step: int | None = None, *, what_if: Sequence[str] = ()) -> dict[str, Any]:
    """Find the steps of a run that are worth looking at, or make one again bit for bit and take it apart.

    The run's files are read and never written.

    Args:
        run: a run folder.
        step: the step to be made again; None finds steps.
        what_if: the same step under other settings, ``KEY=VALUE`` each (several apart by spaces).

    Returns:
        What ``magicrl explain --json`` prints (docs/explain.md).

    Raises:
        ValueError: an argument is wrong, or the run cannot be made again here; says why.

    Example::

        found = magicrl.explain("runs/quickstart", 40, what_if=["algorithm.loss=cispo"])
        print(found["equal"], found["what_if"][0]["cosine"])
    """
    with in_python():
        folder = Path(path_text("run", run))
        return found_steps(folder) if step is None else explained(folder, step, what_if)


def found_steps(run: Path) -> dict[str, Any]:
    """The steps worth looking at, and from where each can be made again.

    Raises:
        ValueError: it is no run folder, or has no step yet.
    """
    from magicrl.records import StepMetrics
    from magicrl.training.checkpoint import step_of
    from magicrl.training.notable import notable_steps
    from magicrl.training.repeating import newest_before, recorded_lines

    lines = recorded_lines(run)
    rows = [StepMetrics(step=r["step"], stage=r["stage"], values=r["values"]) for _, r in sorted(lines.items())]
    found: list[dict[str, Any]] = []
    for one in notable_steps(rows):
        source = newest_before(run, one.step)
        begun = 0 if source is None else step_of(source)
        seconds = sum(float(row.values.get("time/step") or 0) for row in rows if begun < row.step <= one.step)
        found.append({**one._asdict(), "from_checkpoint": begun, "seconds": seconds})
    return {"run": str(run), "steps": len(rows), "notable": found}


def explained(
    run: Path, step: int, what_if: Sequence[str], tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """A step made again and taken apart, as JSON values.

    Raises:
        ValueError: an argument is wrong, or the run cannot be made again here; says why.
    """
    # torch takes seconds to import
    from magicrl.training.assemble import set_threads
    from magicrl.training.attribution import Attributor, Probe, of_state
    from magicrl.training.repeating import repeat, varied_config

    # refused before anything is computed
    variants = [(words, varied_config(run, words)) for words in what_if]
    begun = time.monotonic()
    with threads_kept():
        repeated = repeat(run, step, tell)
        set_threads(repeated.config)
        _refuse_without_memory(repeated)
        tell("what each token did")
        config = repeated.config
        probe = Probe(config, repeated.learner.start)
        attributor = Attributor(config.in_stage(repeated.metrics.stage), probe, repeated.groups)
        for update in repeated.again():
            attributor.add(update)
        measured = _Measured(probe, attributor, of_state(repeated.checkpoint.learner_state(), "weights"))
        changes = measured.changes(repeated.after)
        document = {
            "run": str(run),
            "step": step,
            "stage": repeated.metrics.stage,
            "from_checkpoint": repeated.begun,
            "equal": repeated.equal,
            "checks": [{**_fields(check), "equal": check.equal} for check in repeated.checks],
            "warnings": list(repeated.warnings),
            "update": _update(repeated, attributor, measured, changes),
            "groups": _groups(repeated, attributor, measured, changes),
        }
        document["what_if"] = [_varied(repeated, attributor, measured, *pair, tell) for pair in variants]
    return {**document, "seconds": time.monotonic() - begun}


def _refuse_without_memory(repeated: Repeated) -> None:
    """``ValueError`` where taking the step apart would be killed for want of memory; it says how the step came out."""
    import psutil

    from magicrl.training.attribution import COPIES

    need = COPIES * 8 * len(repeated.after)
    free = psutil.virtual_memory().available
    if need > free:
        came = "equal to the recording" if repeated.equal else "NOT equal to the recording"
        raise ValueError(
            f"step {repeated.metrics.step}, made again, is {came}; to take it apart needs about {need / 2**30:.0f} GiB "
            f"beside what is in use, and {free / 2**30:.0f} GiB are free: end other processes, or use another machine"
        )


class _Changes(NamedTuple):
    """Of every token's log-prob, of the mean entropy, and each group's gain."""

    logprobs: Tensor
    entropy: float
    gains: list[float]


class _Measured:
    """What really changed in the step's responses, against the weights before it."""

    def __init__(self, probe: Probe, attributor: Attributor, before: Tensor) -> None:
        self._probe, self._of = probe, attributor
        self.logprobs, self.entropies = self._at(before)

    def _at(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        self._probe.put(weights)
        return self._probe.scores(self._of.samples, self._of.temperature)

    def changes(self, after: Tensor) -> _Changes:
        """What the weights ``after`` changed."""
        logprobs, entropies = self._at(after)
        moved = logprobs - self.logprobs
        return _Changes(moved, self.mean(entropies - self.entropies), self._of.by_group(self._of.gain * moved))

    def mean(self, values: Tensor) -> float:
        """Over the sampled tokens."""
        return float(values[self._of.sampled].mean())


def _fields(named: Any) -> dict[str, Any]:
    return {name: getattr(named, name) for name in ("name", "recorded", "repeated", "note")}


def _update(repeated: Repeated, attributor: Attributor, measured: _Measured, changes: _Changes) -> dict[str, Any]:
    """The step as a whole."""
    controls = repeated.updates[0][1] if repeated.updates else None
    return {
        "sgd_steps": len(repeated.updates),
        "learning_rate": None if controls is None else controls.learning_rate,
        "alpha": repeated.metrics.values.get("entropy/alpha"),
        "grad_norms": [{"recorded": one, "float64": other} for one, other in attributor.grad_norms],
        "norm": float(attributor.moved.norm()),
        "own_norm": float(attributor.own.norm()),
        "entropy": measured.mean(measured.entropies),
        "entropy_change": changes.entropy,
    }


def _groups(repeated: Repeated, attributor: Attributor, measured: _Measured, changes: _Changes) -> list[dict[str, Any]]:
    """Every group with its responses, verdicts, advantages, and what each token did."""
    tokenizer = repeated.learner.tokenizer
    learned = {id(s.tokens): s.advantage for batch, _, _ in repeated.updates for s in batch.samples}
    columns = {"logprob": measured.logprobs, "change": changes.logprobs, "norm": attributor.norm}
    of_tokens = {name: values.split(attributor.lengths) for name, values in columns.items()}
    shown: list[dict[str, Any]] = []
    at = 0
    for index, scored in enumerate(repeated.groups):
        problem, responses = scored.group.request.problem, list[dict[str, Any]]()
        for place, completion in enumerate(scored.group.completions):
            verdict = scored.verdicts[place]
            responses.append(
                {
                    "outcome": verdict.outcome.value,
                    "status": verdict.status,
                    "truncated": completion.truncated,
                    "reward": float(scored.rewards[place]),
                    "advantage": learned.get(id(completion.tokens)),
                    "tokens": [str(tokenizer.decode([int(token)])) for token in completion.tokens],
                    **{name: parts[at].tolist() for name, parts in of_tokens.items()},
                }
            )
            at += 1
        shown.append(
            {
                "draw": scored.group.request.draw,
                "problem": problem.id,
                "prompt": problem.prompt,
                "references": list(problem.references),
                "learned_from": any(r["advantage"] is not None for r in responses),
                "gain": changes.gains[index],
                "norm": sum(math.fsum(r["norm"]) for r in responses),
                "responses": responses,
            }
        )
    return shown


def _varied(
    repeated: Repeated,
    attributor: Attributor,
    measured: _Measured,
    words: str,
    config: TrainConfig,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The step under other settings, against the step as it was."""
    from magicrl.algorithms.attribution import cosine
    from magicrl.training.repeating import vary

    tell(f"what if {words}")
    begun = time.monotonic()
    other = vary(repeated, config, words)
    values = other.result.metrics.values
    keys = ("groups/trained", "learner/sgd_steps", "learner/grad_norm", "learner/clip_ratio", "entropy/alpha")
    changes = measured.changes(other.after)
    return {
        "what_if": words,
        **{key.rpartition("/")[2]: values.get(key) for key in keys},
        "cosine": cosine(attributor.moved, other.moved),
        "norm": float(other.moved.norm()),
        "own_cosine": cosine(attributor.own, other.own),
        "own_norm": float(other.own.norm()),
        "entropy_change": changes.entropy,
        "gains": changes.gains,
        "seconds": time.monotonic() - begun,
    }
