"""The page of a look before a run: what ``magicrl preflight`` found, as one self-contained file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from magicrl.reporting.charts import bars_view
from magicrl.reporting.page import block, figures_block, render_page, write_page
from magicrl.reporting.wording import percent
from magicrl_verifiers.progress import duration

LEFT = 220
"""Room for the names of bars."""


def write_preflight_page(found: Mapping[str, Any], output: Path, command: str = "") -> Path:
    """Write the page of ``magicrl preflight --json``'s object and return its path.

    Raises:
        ValueError: it cannot be written.
    """
    learnable = found["learnable"]
    answers = learnable["answers"]
    shares = [
        ("right (pass@1)", learnable["pass_1"]["mean"]),
        (f"pass@{learnable['group_size']}", learnable["pass_all"]["mean"]),
        ("groups with a signal", learnable["signal"]["mean"]),
        ("readable answers", answers["answered"] or 0.0),
        (f"cut at T = {answers['max_tokens']}", answers["truncated"]),
    ]
    bars = [(name, value, percent(value)) for name, value in shares]
    paid = [(kind, max(0.0, value), f"{value:.2g}") for kind, value in found["reward"]["earned"].items()]
    views = [bars_view("answers", "Answers of the start model", "share", bars, "", unit="percent", left=LEFT)]
    if paid:
        note = "Mean reward of answers that were made up."
        views.append(bars_view("reward", "What the reward pays", "reward", paid, note, color=1, left=LEFT))
    data = {"findings": found["findings"], "figures": figures_of(found), "verdict": verdict_of(found)}
    blocks = (
        block("preflight", "Before the run", data),
        figures_block("measured", "Measured", [[view] for view in views]),
        block("example", "An answer", {"prompt": found["template"]["prompt"], "text": learnable["example"]}),
    )
    head = [("seconds", f"{found['seconds']:.0f}"), ("findings", str(len(found["findings"])))]
    shown = [item for item in blocks if item is not None]
    return write_page(render_page(found["recipe"], head, shown, command, kind="preflight"), output)


def verdict_of(found: Mapping[str, Any]) -> str:
    """The verdict in a sentence."""
    stops = [item["name"].replace("_", " ") for item in found["findings"] if item["severity"] == "stop"]
    if stops:
        return f"Not sound: {', '.join(stops)}. The run would learn little or nothing as it stands."
    warned = len(found["findings"])
    warnings = f", {warned} {'warning' if warned == 1 else 'warnings'}" if warned else ""
    return f"Sound: nothing was found that would keep the run from learning{warnings}."


def figures_of(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures in lines: (label, value)."""
    learnable, reward, update, cost = (found[key] for key in ("learnable", "reward", "update", "cost"))
    answers = learnable["answers"]
    lengths = learnable["lengths"]
    shown = [
        ("problems × answers", f"{answers['groups']} × {learnable['group_size']}"),
        ("pass@1", _interval(learnable["pass_1"])),
        (f"pass@{learnable['group_size']}", _interval(learnable["pass_all"])),
        ("groups with a signal", _interval(learnable["signal"])),
        ("cut", f"{percent(answers['truncated'])} at T = {answers['max_tokens']}"),
        ("tokens of ended answers", ", ".join(map(str, lengths)) + " (median, 95 %, longest)" if lengths else "–"),
    ]
    if found["longer"]:
        longer = found["longer"]
        shown.append((f"with T = {longer['max_tokens']}", f"{percent(longer['truncated'])} cut"))
    if reward["references"]:
        shown.append(("reference answers read", f"{reward['references'] - reward['unread']} of {reward['references']}"))
    if reward["consensus"]:
        against = (
            f"{reward['against']} of {reward['consensus']} (wrong references are among these, and habits of the model)"
        )
        shown.append(("answers agree, and not with the reference answer", against))
    shown += [(f"same verdict by {name}", percent(value)) for name, value in reward["second"].items()]
    shown.append(("end token", found["template"]["end"]))
    if found["template"]["system"]:
        shown.append(("system prompt of the template", found["template"]["system"]))
    if update is not None and update["kl"] is not None:
        shown.append(("KL of one step", f"{update['kl']:.2g} nats a token ({update['prompts']} prompts)"))
        shown.append(("gradient norm, entropy", f"{update['grad_norm']:.2g}, {update['entropy'][0]:.3g} nats a token"))
    elif update is not None:
        shown.append(("KL of one step", "not measured: no group of the steps made here had a signal"))
    if cost is not None:
        steps = ", ".join(f"{value:.3g} s" for value in cost["step_seconds"])
        shown.append(("time, predicted", f"{duration(3600 * cost['hours'])} beside tests; a step by stage: {steps}"))
        planned = "" if cost["planned_gib"] is None else f", {cost['planned_gib']:.1f} planned for the run"
        available = f"{cost['available_gib']:.1f} GiB"
        shown.append(("memory", f"{cost['peak_gib']:.1f} GiB here{planned}, of {available}"))
    return shown


def _interval(estimate: Mapping[str, Any]) -> str:
    return f"{percent(estimate['mean'])} (95 %: {percent(estimate['low'])} to {percent(estimate['high'])})"
