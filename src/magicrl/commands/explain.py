"""``magicrl explain`` and ``magicrl.explain``: notable steps of a run, and one step repeated and taken apart.

The figures are made into JSON values once; text, ``--json`` and the page show these.
"""

from __future__ import annotations

import functools
import json as json_text
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from magicrl.commands.given import in_python
from magicrl.commands.options import as_command
from magicrl.commands.tables import progress_lines
from magicrl.config.errors import RecipeError
from magicrl.config.given import PathText, path_text
from magicrl.reporting.wording import checkpoint_name, number_text, print_prose, visible
from magicrl_verifiers.progress import duration, plural

if TYPE_CHECKING:
    from torch import Tensor

    from magicrl.config.schema import TrainConfig
    from magicrl.reporting.charts import Bar, FigureView
    from magicrl.training.repeating import Attributor, PrecisePolicy, Repeated


NOT_EQUAL = 3
"""Exit status if the repeated step differs from the recorded one."""
SHOWN = 10
"""Groups in the terminal."""


@in_python()
def explain(
    run: PathText,
    step: int | None = None,
    *,
    what_if: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Find the notable steps of a run; with --step, repeat that step bit for bit and show what it changed.

    The run's files are read and never written.

    Args:
        run: A run folder.
        step: The step to repeat, from the newest kept checkpoint before it or from the start; default: find steps.
        what_if: The same responses under other settings of algorithm, entropy, optimizer, reference.coefficient or
            reward: ``KEY=VALUE``, several separated by spaces (repeatable).
        progress: Called with a line of text at each part of the work; default: not at all.

    Returns:
        What ``magicrl explain --json`` prints (docs/guides/preflight-and-explain.md#explain).

    Raises:
        ValueError: An argument is wrong, or the run cannot be repeated here (with the reason).

    Example::

        found = magicrl.explain("runs/quickstart", 40, what_if=["algorithm.loss=cispo"])
        print(found["equal"], found["what_if"][0]["cosine"])
    """
    folder = Path(path_text("run", run))
    if step is not None:
        return explained(folder, step, what_if, progress or (lambda _: None))
    if what_if:
        raise RecipeError("--what-if and --page belong to a step; name one with --step")
    return found_steps(folder)


def found_steps(run: Path) -> dict[str, Any]:
    """Return the notable steps, and the checkpoint from which each can be repeated.

    Raises:
        ValueError: It is not a run folder, or has no step yet.
    """
    from magicrl.records import StepMetrics
    from magicrl.training.checkpoint import step_of
    from magicrl.training.health import notable_steps
    from magicrl.training.repeating import newest_before, recorded_lines

    lines = recorded_lines(run)
    rows = [StepMetrics(step=r["step"], stage=r["stage"], values=r["values"]) for _, r in sorted(lines.items())]
    found: list[dict[str, Any]] = []
    for one in notable_steps(rows):
        source = newest_before(run, one["step"])
        begun = 0 if source is None else step_of(source)
        seconds = sum(float(row.values.get("time/step") or 0) for row in rows if begun < row.step <= one["step"])
        found.append({**one, "from_checkpoint": begun, "seconds": seconds})
    return {"run": str(run), "steps": len(rows), "notable": found}


def explained(
    run: Path, step: int, what_if: Sequence[str], tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Return a repeated step with the effect of each token, as JSON values.

    Raises:
        ValueError: an argument is wrong, or the run cannot be made again here; says why.
    """
    # torch takes seconds to import
    from magicrl.commands.training import threads_kept
    from magicrl.training.assemble import set_threads
    from magicrl.training.repeating import Attributor, PrecisePolicy, repeat, varied_config, weights_of

    # refused before anything is computed
    variants = [(words, varied_config(run, words)) for words in what_if]
    begun = time.monotonic()
    with threads_kept():
        repeated = repeat(run, step, tell)
        set_threads(repeated.config)
        _refuse_without_memory(repeated)
        tell("what each token did")
        config = repeated.config
        probe = PrecisePolicy(config, repeated.learner.start)
        attributor = Attributor(config.in_stage(repeated.metrics.stage), probe, repeated.groups)
        before = repeated.checkpoint.learner_state()
        for update in repeated.learner.again(before, repeated.updates):
            attributor.add(*update)
        measured = _Measured(probe, attributor, weights_of(before))
        moved, entropy_change, gains = measured.changes(repeated.after)
        controls = repeated.updates[0][1] if repeated.updates else None
        document = {
            "run": str(run),
            "step": step,
            "stage": repeated.metrics.stage,
            "from_checkpoint": repeated.begun,
            "equal": repeated.equal,
            "checks": list(repeated.checks),
            "warnings": list(repeated.warnings),
            "update": {
                "sgd_steps": len(repeated.updates),
                "learning_rate": None if controls is None else controls.learning_rate,
                "alpha": repeated.metrics.values.get("entropy/alpha"),
                "grad_norms": [{"recorded": one, "float64": other} for one, other in attributor.grad_norms],
                "norm": float(attributor.moved.norm()),
                "own_norm": float(attributor.own.norm()),
                "entropy": measured.mean(measured.entropies),
                "entropy_change": entropy_change,
            },
            "groups": _groups(repeated, attributor, measured.logprobs, moved, gains),
        }
        document["what_if"] = [_varied(repeated, attributor, measured, *pair, tell) for pair in variants]
    return {**document, "seconds": time.monotonic() - begun}


def _refuse_without_memory(repeated: Repeated) -> None:
    """Raise ``RuntimeError`` if the analysis needs more memory than is free, with whether the step is equal."""
    import psutil

    from magicrl.training.repeating import COPIES

    need = COPIES * 8 * len(repeated.after)
    free = psutil.virtual_memory().available
    if need > free:
        came = "equal to the recording" if repeated.equal else "NOT equal to the recording"
        raise RuntimeError(
            f"step {repeated.metrics.step}, repeated, is {came}; its analysis needs about {need / 2**30:.0f} GiB more "
            f"memory, and {free / 2**30:.0f} GiB are free: end other processes, or use another machine"
        )


class _Measured:
    """Measured changes of the step's responses compared with the weights before the step."""

    def __init__(self, probe: PrecisePolicy, attributor: Attributor, before: Tensor) -> None:
        self._probe, self._of = probe, attributor
        self.logprobs, self.entropies = self._at(before)

    def _at(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        self._probe.put(weights)
        return self._probe.scores(self._of.samples, self._of.temperature)

    def changes(self, after: Tensor) -> tuple[Tensor, float, list[float]]:
        """Return the changes of every token's log-prob and of the mean entropy to ``after``, and the groups' gains."""
        logprobs, entropies = self._at(after)
        moved = logprobs - self.logprobs
        return moved, self.mean(entropies - self.entropies), self._of.by_group(self._of.gain * moved)

    def mean(self, values: Tensor) -> float:
        """Return the mean over the sampled tokens."""
        return float(values[self._of.sampled].mean())


def _groups(
    repeated: Repeated, attributor: Attributor, logprobs: Tensor, moved: Tensor, gains: Sequence[float]
) -> list[dict[str, Any]]:
    """Return every group with its responses, verdicts, advantages and the effect of each token."""
    tokenizer = repeated.learner.tokenizer
    learned = {id(s.tokens): s.advantage for batch, _, _ in repeated.updates for s in batch.samples}
    columns = {"logprob": logprobs, "change": moved, "norm": attributor.norm}
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
                "gain": gains[index],
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
    """Return the step with other settings, compared with the recorded step."""
    from magicrl.algorithms.attribution import cosine
    from magicrl.training.repeating import vary

    tell(f"what if {words}")
    begun = time.monotonic()
    result, own, moved, after = vary(repeated, config, words)
    values = result.metrics.values
    keys = ("groups/trained", "learner/sgd_steps", "learner/grad_norm", "learner/clip_ratio", "entropy/alpha")
    _, entropy_change, gains = measured.changes(after)
    return {
        "what_if": words,
        **{key.rpartition("/")[2]: values.get(key) for key in keys},
        "cosine": cosine(attributor.moved, moved),
        "norm": float(moved.norm()),
        "own_cosine": cosine(attributor.own, own),
        "own_norm": float(own.norm()),
        "entropy_change": entropy_change,
        "gains": gains,
        "seconds": time.monotonic() - begun,
    }


def _present(work: functools.partial[dict[str, Any]], *, json: bool = False, page: Path | None = None) -> int:
    """Print the result.

    Exit status: 0; 3 the repeated step differs from the recorded one; 2 the command line is wrong, or the run cannot be
    repeated (it says why); 1 it failed.

    Example: magicrl explain runs/quickstart

    Example: magicrl explain runs/quickstart --step 40 --what-if algorithm.loss=cispo --page step-40.html

    Args:
        json: Print everything as a JSON object.
        page: Also write a page to this file: one HTML file that needs no server.
    """
    console, notes = (
        Console(emoji=False, highlight=False, soft_wrap=True),
        Console(emoji=False, stderr=True, highlight=False),
    )
    if page is not None and work.keywords.get("step") is None:
        raise RecipeError("--what-if and --page belong to a step; name one with --step")
    found = work(progress=progress_lines(notes))
    if json:
        sys.stdout.write(json_text.dumps(found, indent=None if "equal" in found else 1) + "\n")
    elif "equal" in found:
        _show(found, console)
    else:
        if not found["notable"]:
            console.print(f"notable steps: none of {found['steps']}; --step N repeats any step", markup=False)
        for one in found["notable"]:
            console.print(f"step {one['step']}: {one['sign']}", style="bold", markup=False)
            count = one["step"] - one["from_checkpoint"]
            steps = "1 step" if count == 1 else f"{count} steps, {duration(one['seconds'])} of training"
            console.print(
                f"  {one['why']}\n  repeated from {checkpoint_name(one['from_checkpoint'])}: {steps}", markup=False
            )
        if found["notable"]:
            words = shlex.join(["magicrl", "explain", found["run"], "--step", str(found["notable"][0]["step"])])
            console.print(words, markup=False, style="dim")
    if page is not None:
        written = write_explain_page(found, page, "magicrl " + shlex.join(sys.argv[1:]))
        notes.print(f"page: {written}", markup=False, soft_wrap=True)
    return 0 if found.get("equal", True) else NOT_EQUAL


command = as_command(explain, _present)


def _show(found: dict[str, Any], console: Console) -> None:
    print_prose(console, explain_summary(found), style="bold")
    print_prose(console, explain_verdict(found), style="green" if found["equal"] else "bold red")
    for text in found["warnings"]:
        print_prose(console, visible(text), style="yellow")
    table = Table(show_header=False, box=None, pad_edge=False)
    for label, value in explain_figures(found):
        table.add_row(label, visible(value))
    console.print(table, markup=False)
    head, rows = group_rows(found)
    table = Table(*(Column(name, overflow="fold") for name in head), box=None, pad_edge=False)
    for row in rows[:SHOWN]:
        table.add_row(*(visible(cell) for cell in row))
    if rows:
        console.print(table, markup=False)
    if rows[SHOWN:]:
        console.print(f"and {plural(len(rows) - SHOWN, 'more group')} (--page, --json)", style="dim")
    head, rows = what_if_rows(found)
    for row in rows:
        text = ", ".join(f"{name} {cell}" for name, cell in zip(head[1:], row[1:], strict=True) if cell)
        console.print(f"{visible(row[0])}: {text}", markup=False)


# The page.

MOST_BARS = 24
MOST_TOKENS = 40_000
"""Maximum number of tokens on the page. The responses of further groups are only in the JSON."""
EDGES = (0.02, 0.1, 0.3, 0.6)
"""Bounds of the colours of tokens, as shares of the largest absolute value."""

GROUPS = (
    "The gain of a group is how far the tokens of its better responses rose over those of its worse ones: the sum of "
    "(reward - mean reward) × change of log-prob, per token of the group. The norm is the group's share of the norm of "
    "the gradient."
)
WHAT_IF = (
    "The same responses with the same weights and optimizer moments. Cosines compare the change of the weights with "
    "that of the recorded step: the whole change, and without the parts from momentum and weight decay."
)


def write_explain_page(found: Mapping[str, Any], output: Path, command: str = "") -> Path:
    """Write the page of a repeated step (``magicrl explain --step N --json``) and return its path.

    Raises:
        ValueError: the page cannot be written.
    """
    from magicrl.reporting.page import block, figures_block, render_page, write_page

    head, rows = group_rows(found)
    other_head, others = what_if_rows(found)
    what_if = {"head": other_head, "rows": others, "note": WHAT_IF} if others else None
    # as many groups with coloured tokens as fit on the page, those with a gradient first
    largest = max((abs(v) for g in found["groups"] for r in g["responses"] for v in r["norm"]), default=0.0) or 1.0
    left, shown = MOST_TOKENS, list[dict[str, Any]]()
    order = sorted(range(len(found["groups"])), key=lambda i: -found["groups"][i]["learned_from"])
    for at in order:
        group = found["groups"][at]
        left -= sum(len(response["tokens"]) for response in group["responses"])
        if left < 0:
            break
        responses: list[dict[str, Any]] = []
        for response in group["responses"]:
            columns: Sequence[Sequence[Any]] = [response[k] for k in ("tokens", "norm", "logprob", "change")]
            pieces = [
                {
                    "text": visible(text),
                    "level": sum(abs(norm) >= edge * largest for edge in EDGES),
                    "words": f"norm {norm:+.2g}, log-prob {logprob:.3g} {change:+.2g}",
                }
                for text, norm, logprob, change in zip(*columns, strict=True)
            ]
            responses.append({**response, "pieces": pieces})
        shown.append({**group, "number": at + 1, "responses": responses})
    blocks = [
        block(
            "explain",
            "The step",
            {
                "summary": explain_summary(found),
                "verdict": explain_verdict(found),
                **found,
                "figures": explain_figures(found),
            },
        ),
        figures_block("tokens", "Tokens", [[view] for view in _token_bars(found)]),
        block("groups", "Groups", {"head": head, "rows": rows, "note": GROUPS}, "explain_table"),
        block("what_if", "What if", what_if, "explain_table"),
        block("responses", "Responses", {"groups": shown}, "explain_responses"),
    ]
    facts = [("step", str(found["step"])), ("seconds", f"{found['seconds']:.0f}")]
    title = f"{Path(str(found['run'])).name}, step {found['step']}"
    return write_page(render_page(title, facts, blocks, command, kind="a step"), output)


def explain_summary(found: Mapping[str, Any]) -> str:
    """Return a sentence on what the step changed."""
    update, groups = found["update"], found["groups"]
    name = f"Step {found['step']}"
    if not update["sgd_steps"]:
        return f"{name} changed no weight: the responses to each of its {len(groups)} problems have equal rewards."
    learned = [group for group in groups if group["learned_from"]]
    better = sum(group["gain"] > 0 for group in learned)
    count = plural(update["sgd_steps"], "update")
    change = update["entropy_change"]
    return (
        f"{name} made {count} with {len(learned)} of {len(groups)} groups: in {better} of these the better responses "
        f"became more likely relative to the worse ones, and the entropy {'rose' if change > 0 else 'fell'} by "
        f"{abs(change):.2g} to {update['entropy'] + change:.3g} nats per token."
    )


def explain_verdict(found: Mapping[str, Any]) -> str:
    """Return a sentence on whether the repeated step equals the recorded one."""
    compared = [check for check in found["checks"] if check["equal"] is not None]
    names = ", ".join(check["name"] for check in compared)
    if found["equal"]:
        return f"Step {found['step']} repeated: equal to the recording bit for bit ({names})."
    wrong = [f"{c['name']}" + (f" ({c['note']})" if c["note"] else "") for c in compared if not c["equal"]]
    return f"Step {found['step']} repeated: NOT equal to the recording, by {'; '.join(wrong)}."


def explain_figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures as (label, value)."""
    update = found["update"]
    shown = [("repeated from", checkpoint_name(found["from_checkpoint"]))]
    for check in found["checks"]:
        if check["equal"] is None:
            value = f"not compared: {check['note']}"
        elif check["equal"]:
            value = f"equal, SHA-256 {check['recorded'][:16]}"
        else:
            value = f"NOT equal: {check['recorded'][:16]} recorded, {check['repeated'][:16]} repeated"
        shown.append((check["name"], value))
    if not update["sgd_steps"]:
        return [*shown, ("update", "none: every group was rejected")]
    norms = ", ".join(f"{n['recorded']:.4g} ({n['float64']:.4g} in float64)" for n in update["grad_norms"][:4])
    steps = f"{update['sgd_steps']}, rate {update['learning_rate']:.3g}, alpha {number_text(update['alpha'])}"
    return [
        *shown,
        ("SGD steps", steps),
        ("gradient norm", norms + (" ..." if update["grad_norms"][4:] else "")),
        ("change of the weights", f"{update['norm']:.3g}; by this step's gradient {update['own_norm']:.3g}"),
        ("entropy", f"{update['entropy']:.4g} nats per token, {update['entropy_change']:+.2g}"),
    ]


def group_rows(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table of the groups with a gradient or a gain, the largest gradient first."""
    head = ["group", "problem", "mean reward", "norm", "gain"]
    rows: list[list[str]] = []
    groups = found["groups"]
    for at in sorted(range(len(groups)), key=lambda i: -abs(groups[i]["norm"])):
        group = groups[at]
        if not (group["learned_from"] or group["gain"]):
            continue
        rewards = [response["reward"] for response in group["responses"]]
        mean = number_text(sum(rewards) / len(rewards), 2)
        figures = [f"{group[key]:+.2g}" for key in ("norm", "gain")]
        rows.append([str(at + 1), str(group["problem"]), mean, *figures])
    return head, rows


def what_if_rows(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table of the recorded step and of the step under other settings."""
    update, gains = found["update"], [group["gain"] for group in found["groups"]]
    head = ["settings", "groups", "alpha", "clipped", "cosine", "own cosine", "change", "own", "entropy", "gain"]
    head.append("most changed group")
    learned = str(sum(group["learned_from"] for group in found["groups"]))
    recorded = ["as recorded", learned, number_text(update["alpha"]), "", "", "", f"{update['norm']:.3g}"]
    recorded += [f"{update['own_norm']:.3g}", f"{update['entropy_change']:+.2g}", f"{sum(gains):+.2g}", ""]
    rows = [recorded] if found["what_if"] else []
    for other in found["what_if"]:
        differences = [one - was for one, was in zip(other["gains"], gains, strict=True)]
        at = max(range(len(gains)), key=lambda i: abs(differences[i]))
        row = [other["what_if"], str(other["trained"]), number_text(other["alpha"]), number_text(other["clip_ratio"])]
        row += ["–" if other[key] is None else f"{other[key]:.4f}" for key in ("cosine", "own_cosine")]
        row += [f"{other['norm']:.3g}", f"{other['own_norm']:.3g}", f"{other['entropy_change']:+.2g}"]
        row += [f"{sum(other['gains']):+.2g}", f"{at + 1} ({differences[at]:+.2g})"]
        rows.append(row)
    return head, rows


def _token_bars(found: Mapping[str, Any]) -> list[FigureView]:
    """Return a figure of the vocabulary's tokens with the largest shares of the gradient's norm."""
    from magicrl.reporting.charts import bars_view

    sums: dict[str, tuple[float, int]] = {}
    for group in found["groups"]:
        for response in group["responses"]:
            for text, value in zip(response["tokens"], response["norm"], strict=True):
                total, count = sums.get(text, (0.0, 0))
                sums[text] = total + value, count + 1
    largest = sorted(sums.items(), key=lambda item: -abs(item[1][0]))[:MOST_BARS]
    bars: list[Bar] = [
        (
            visible(text[:40]).replace("\n", "⏎").replace(" ", "␣"),
            abs(total),
            f"{total:+.2g}, {'once' if count == 1 else f'{count} times'}",
        )
        for text, (total, count) in largest
        if total
    ]
    note = "Length: absolute value. After a bar: the value, and how often the token was sampled."
    title = "Share of the gradient's norm by token"
    return [bars_view("tokens_norm", title, "absolute sum", bars, note, left=140)] if bars else []
