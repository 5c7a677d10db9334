"""``magicrl preflight`` and ``magicrl.preflight``: check a run before compute is spent on it."""

from __future__ import annotations

import contextlib
import functools
import json as json_text
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from magicrl.commands.given import in_python, overrides_of
from magicrl.commands.options import as_command
from magicrl.commands.tables import progress_lines
from magicrl.config.errors import RecipeError
from magicrl.config.given import Data, PathText, Recipe, Reward, Settings, given_recipe
from magicrl.reporting.wording import percent, print_prose, visible
from magicrl_verifiers.progress import duration, plural

UNSOUND = 3
"""Exit status if something would keep the run from learning; ``magicrl train`` has the same for such a run."""
MINUTES = 5.0
"""Default time budget."""


@in_python()
def preflight(
    recipe: Recipe,
    *,
    settings: Settings | None = None,
    model: PathText | None = None,
    data: Data | None = None,
    reward: Reward | None = None,
    minutes: float = MINUTES,
    samples: int = 256,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Check a run before you spend compute on it: signal, reward, chat template, learning rate, time and memory.

    Samples from the initial model, calls the reward and makes two training steps on a copy in memory. No run folder is
    created.

    Args:
        recipe: The training recipe: a shipped name, a file, or in Python a dict.
        settings: A setting to override, ``KEY=VALUE`` (repeatable); in Python a dict of dotted keys.
        model: As in train.
        data: As in train.
        reward: As in train.
        minutes: Approximate time budget. SFT of an initial model that does not exist yet comes in addition; the model
            is kept.
        samples: Largest number of responses in the first measurement.
        progress: Called with a line of text at each measurement; default: not at all.

    Returns:
        ``sound``, ``findings`` (name, severity, message, remedy) and the figures behind them, as JSON values. There are
        no figures if no answer could be judged.

    Raises:
        ValueError: an argument is wrong, or the run would be refused at its start.

    Example::

        found = magicrl.preflight("quickstart", settings={"optimizer.learning_rate": 3e-2})
        print(found["findings"][0]["message"])
    """
    if not minutes > 0:
        raise RecipeError(f"minutes must be above 0, got {minutes:g}")
    if samples < 1:
        raise RecipeError(f"samples must be at least 1, got {samples}")
    from magicrl.config.loader import load_train_recipe, placed_errors

    given, overrides = given_recipe(recipe), overrides_of(settings, model=model, data=data, reward=reward)
    config = load_train_recipe(given, overrides)
    if config.rollout.replay is not None or config.rollout.engine == "replay":
        raise RecipeError("recorded rollouts are not the model's answers; name another engine", key="rollout.engine")
    # torch takes seconds to import, so the recipe is read first
    from magicrl.commands.training import threads_kept
    from magicrl.training.assemble import LocalParts, build_run, set_threads, start_model_folder
    from magicrl.training.metrics import UnjudgedError
    from magicrl.training.preflight import measure
    from magicrl.training.preflight_rules import nothing_judged, preflight_findings
    from magicrl.training.start_checks import check_run

    # the parts on other machines are measured on this machine
    config = config.model_copy(update={"cluster": None})
    run = Path(config.run.output or f"runs/{config.run.name}")
    with placed_errors(given, overrides), threads_kept():
        # next to the run, which may exist: the SFT model is stored where the run itself looks for it
        ready = check_run(config, run.with_name(f".{run.name}-preflight"), resume=False)
        set_threads(config)
        with contextlib.closing(LocalParts(config).judge()) as judge:
            judge.warm_up(ready[0].verifiers())
            start = start_model_folder(config.start, run.parent / "models", lambda what, done, of: None)
            # The steps on the copy are synchronous, so their engine has the newest weights.
            newest = {"rollout": config.rollout.model_copy(update={"weight_lag": 0})}
            built = build_run(config.model_copy(update=newest), ready, start)
            with contextlib.closing(built.engine):
                try:
                    facts = measure(
                        config, built, judge, progress or (lambda _: None), seconds=60 * minutes, samples=samples
                    )
                except UnjudgedError as error:
                    return {"recipe": config.run.name, "sound": False, "findings": [nothing_judged(str(error))]}
    found, values = preflight_findings(facts), asdict(facts)
    values["learnable"]["answers"].pop("judging")
    return {
        "recipe": config.run.name,
        "sound": all(item["severity"] != "stop" for item in found),
        "findings": found,
        **values,
    }


def _present(work: functools.partial[dict[str, Any]], *, json: bool = False, page: Path | None = None) -> int:
    """Print the findings.

    Exit status: 0 sound; 3 something would keep the run from learning (with the setting that fixes it); 2 the run would
    be refused: the command line, the recipe, the data or the model cannot be used; 1 it failed.

    Example: magicrl preflight quickstart --set optimizer.learning_rate=3e-2

    Args:
        json: Print the figures and findings as a JSON object.
        page: Also write a page to this file: one HTML file that needs no server.
    """
    notes = Console(emoji=False, stderr=True, highlight=False)
    found = work(progress=progress_lines(notes))
    if json:
        sys.stdout.write(json_text.dumps(found, indent=1) + "\n")
    else:
        console = Console(emoji=False, highlight=False, soft_wrap=True)
        table = Table(show_header=False, box=None, pad_edge=False)
        for label, value in preflight_figures(found):
            table.add_row(label, visible(value))
        console.print(table, markup=False, soft_wrap=True)
        for finding in found["findings"]:
            console.print(f"{finding['severity']}: {finding['name'].replace('_', ' ')}", style="bold", markup=False)
            print_prose(console, f"  {visible(finding['message'])}\n  {visible(finding['remedy'])}")
        print_prose(console, preflight_verdict(found))
        minutes = work.keywords.get("minutes", MINUTES)
        if found.get("seconds", 0.0) > 1.5 * 60 * minutes:
            took = f"the fewest answers and steps that say something took {duration(found['seconds'])}"
            print_prose(console, f"note: --minutes {minutes:g} is too short for this recipe: {took}")
    if page is not None:
        written = write_preflight_page(found, page, "magicrl " + shlex.join(sys.argv[1:]))
        notes.print(f"page: {written}", markup=False, soft_wrap=True)
    return 0 if found["sound"] else UNSOUND


command = as_command(preflight, _present)


# The page.

SAMPLE_END = 80
"""Characters of the sample answer that the terminal shows. The answer is at its end."""


def write_preflight_page(found: Mapping[str, Any], output: Path, command: str = "") -> Path:
    """Write the page of a preflight check (``magicrl preflight --json``) and return its path.

    Raises:
        ValueError: the page cannot be written.
    """
    from magicrl.reporting.charts import bars_view
    from magicrl.reporting.page import block, figures_block, render_page, write_page

    data = {"findings": found["findings"], "figures": preflight_figures(found), "verdict": preflight_verdict(found)}
    blocks = [block("preflight", "Before the run", data)]
    head = [("findings", str(len(found["findings"])))]
    if "learnable" not in found:
        return write_page(render_page(found["recipe"], head, blocks, command, kind="preflight"), output)
    learnable = found["learnable"]
    answers = learnable["answers"]
    shares = [
        ("right (pass@1)", learnable["pass_1"]["mean"]),
        (f"pass@{learnable['group_size']}", learnable["pass_all"]["mean"]),
        ("groups with unequal rewards", learnable["signal"]["mean"]),
        ("readable answers", answers["answered"] or 0.0),
        (f"truncated at T = {answers['max_tokens']}", answers["truncated"]),
    ]
    bars = [(name, value, percent(value)) for name, value in shares]
    earned = found["reward"]["earned"].items()
    # the names must fit into the space left of the bars
    names = {kind: kind.removeprefix("the ").replace("problem's reference", "problem's") for kind, _ in earned}
    paid = [(names[kind], max(0.0, value), f"{value:.2g}") for kind, value in earned]
    views = [bars_view("answers", "Responses of the initial model", "share", bars, "", unit="percent", left=220)]
    if paid:
        note = "Mean reward of constructed responses."
        views.append(bars_view("reward", "Reward by kind of response", "reward", paid, note, color=1, left=240))
    blocks += [
        figures_block("measured", "Measured", [[view] for view in views]),
        block(
            "example",
            "Sample answer",
            {
                "prompt": found["template"]["prompt"],
                "text": learnable["example"],
                "references": learnable["example_references"],
                "verdict": learnable["example_verdict"],
            },
        ),
    ]
    head.insert(0, ("seconds", f"{found['seconds']:.0f}"))
    return write_page(render_page(found["recipe"], head, blocks, command, kind="preflight"), output)


def preflight_verdict(found: Mapping[str, Any]) -> str:
    """Return the verdict in a sentence."""
    stops = [item["name"].replace("_", " ") for item in found["findings"] if item["severity"] == "stop"]
    if stops:
        return f"Not sound: {', '.join(stops)}. With this recipe the run would learn little or nothing."
    warnings = f", {plural(len(found['findings']), 'warning')}" if found["findings"] else ""
    return f"Sound: nothing was found that would keep the run from learning{warnings}."


def preflight_figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures as (label, value); [] if no answer could be judged."""
    if "learnable" not in found:
        return []
    learnable, reward, update, cost = (found[key] for key in ("learnable", "reward", "update", "cost"))
    answers = learnable["answers"]
    lengths = learnable["lengths"]
    shown = [
        ("problems × responses", f"{answers['groups']} × {learnable['group_size']}"),
        ("pass@1", _interval(learnable["pass_1"])),
        (f"pass@{learnable['group_size']}", _interval(learnable["pass_all"])),
        ("groups with unequal rewards", _interval(learnable["signal"])),
        ("truncated", f"{percent(answers['truncated'])} at T = {answers['max_tokens']}"),
        ("tokens of ended responses", ", ".join(map(str, lengths)) + " (median, 95 %, longest)" if lengths else "–"),
    ]
    for name, part in learnable["rewards"].items():
        failed = f", {percent(part['not_judged'])} not judged" if part["not_judged"] else ""
        text = f"mean {part['mean']:.3g}, unequal in {percent(part['signal'])} of the groups{failed}"
        shown.append((f"reward {name}, weight {part['weight']:g}", text))
    if found["longer"]:
        longer = found["longer"]
        shown.append((f"with T = {longer['max_tokens']}", f"{percent(longer['truncated'])} truncated"))
    if reward["references"]:
        shown.append(("reference answers read", f"{reward['references'] - reward['unread']} of {reward['references']}"))
    if reward["consensus"]:
        against = (
            f"{reward['against']} of {reward['consensus']} (these include wrong references, and habits of the model)"
        )
        shown.append(("answers agree, but not with the reference answer", against))
    shown += [(f"same verdict by {name}", percent(value)) for name, value in reward["second"].items()]
    shown.append(("end token", found["template"]["end"]))
    if found["template"]["system"]:
        shown.append(("system prompt of the template", found["template"]["system"]))
    if update is not None and update["kl"] is not None:
        shown.append(("KL of one step", f"{update['kl']:.2g} nats per token ({update['prompts']} prompts)"))
        norm, entropy = update["grad_norm"], update["entropy"][0]
        shown.append(("gradient norm, entropy", f"{norm:.2g}, {entropy:.3g} nats per token"))
    elif update is not None:
        shown.append(("KL of one step", "not measured: no group of these steps had unequal rewards"))
    text = " ".join(learnable["example"].split())
    last = text[-SAMPLE_END:]
    end = text if text == last else f"… {last.partition(' ')[2] or last}"  # from a whole word on
    references = " or ".join(learnable["example_references"])
    against = f"; reference answer: {references}" if references else ""
    shown.append(("sample answer", f"{end!r}: {learnable['example_verdict']}{against}"))
    if cost is not None:
        steps = ", ".join(f"{value:.3g} s" for value in cost["step_seconds"])
        hours = duration(3600 * cost["hours"])
        shown.append(("time, predicted", f"{hours} without evaluations; a step by stage: {steps}"))
        planned = "" if cost["planned_gib"] is None else f", {cost['planned_gib']:.1f} planned for the run"
        available = f"{cost['available_gib']:.1f} GiB"
        shown.append(("memory", f"{cost['peak_gib']:.1f} GiB here{planned}, of {available}"))
    return shown


def _interval(estimate: Mapping[str, Any]) -> str:
    return f"{percent(estimate['mean'])} (95 %: {percent(estimate['low'])} to {percent(estimate['high'])})"
