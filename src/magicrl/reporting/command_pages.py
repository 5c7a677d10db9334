"""Pages of the JSON objects of `magicrl plan`, `magicrl preflight` and `magicrl explain --step`, each in one file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from magicrl.reporting.charts import Bar, Chart, FigureView, Series, bars_view, chart_view
from magicrl.reporting.page import PageBlock, block, figures_block, render_page, write_page
from magicrl.reporting.wording import checkpoint_name, number_text, percent, visible
from magicrl_verifiers.progress import duration

Facts = Mapping[str, Any]
"""The JSON object of a command."""

# Plans.

TIMES = (
    "t_R: seconds to sample the responses of a step. t_T: seconds for its updates. t_O: seconds for everything else, "
    "such as judging and data handling."
)
"""Definition of the times of a step, in the report's notation."""
PLAN_LEFT = 136
"""Width reserved for the names of bars, in SVG units."""


def write_plan_page(facts: Facts, output: Path, command: str = "") -> Path:
    """Write the page of a plan (``magicrl plan --json``) and return its path.

    Raises:
        ValueError: the page cannot be written.
    """
    title = f"{facts['model']} on {facts['gpus']} × {facts['gpu']}"
    return write_page(render_page(title, _plan_head(facts), plan_blocks(facts), command, kind="plan"), output)


def plan_blocks(facts: Facts) -> list[PageBlock | None]:
    """Return the sections of the page in order."""
    # the alternatives of --compare; a refused one has its reason
    others = [{"refused": "", "hours": None, "gpu_hours": None, "stages": ()} | o for o in facts.get("compare", ())]
    rows = [o | {"steps": ", ".join(f"{stage['step_seconds']:.4g} s" for stage in o["stages"])} for o in others]
    return [
        block("plan", "Plan", {"stages": facts["stages"], "calibration": facts["calibration"]}),
        block("instead", "Alternatives", {"rows": rows} if rows else None, template="plan_instead"),
        figures_block("memory", "Memory", [[view] for view in memory_views(facts)]),
        figures_block("time", "Time of a step", [[view] for view in _time_views(facts)]),
        figures_block("changes", "Effect of changes", [[view] for view in _change_views(facts)]),
        _more_gpus(facts),
    ]


def _plan_head(facts: Facts) -> list[tuple[str, str]]:
    layout = facts["layout"]
    split = f"engine {layout['rollout_gpus']}, learner {layout['learner_gpus']}"
    shown = [
        ("parameters", f"{facts['parameters'] / 1e9:.3g} billion"),
        ("layout", "in turn on all" if layout["colocated"] else split),
        ("tensor parallel", str(layout["tensor_parallel"])),
        ("sequence parallel", str(layout["sequence_parallel"])),
        ("staleness", str(facts["staleness"])),
        ("all stages", duration(3600 * facts["hours"])),
        ("range", " to ".join(duration(3600 * hours) for hours in facts["hours_90_percent"])),
        ("accelerator-hours", number_text(facts["gpu_hours"])),
    ]
    if "cost" in facts:
        shown.append(("cost", f"{facts['cost']:,.2f}"))
    if "budget_hours" in facts:
        total = sum(stage["steps"] for stage in facts["stages"])
        shown.append((f"in {facts['budget_hours']:g} h", f"{facts['steps_in_budget']} of {total} steps"))
    return shown


def memory_views(facts: Facts) -> list[FigureView]:
    """Return figures of the GiB of one accelerator by term, of learner and engine, without terms that round to 0."""
    memory = facts["memory_gib"]
    verdict = "fits" if memory["fits"] else "does not fit"
    sides = (
        ("learner", "Learner at its peak", f"GiB of one accelerator, by term. The plan {verdict}.", 1),
        ("engine", "Engine while it samples", "The cache takes the rest. A larger cache lets more responses decode at "
         "once.", 0),
    )  # fmt: skip
    views: list[FigureView] = []
    for side, title, note, color in sides:
        terms: Mapping[str, float] = memory[side]
        rows = {name: value for name, value in terms.items() if value >= 0.005} | {"together": sum(terms.values())}
        bars = [(name, value, f"{value:.2f}") for name, value in rows.items()]
        limit = (memory["budget"], f"usable, {memory['budget']:.1f} GiB")
        views.append(bars_view(f"memory_{side}", title, "GiB of one accelerator", bars, note, color=color, limit=limit))
    return views


def _time_views(facts: Facts) -> list[FigureView]:
    """Return figures of the parts of each stage's step, and of the hours of 1000 steps."""
    parts = (("sampling t_R", "rollout_seconds"), ("updates t_T", "learn_seconds"), ("other t_O", "other_seconds"))
    several = len(facts["stages"]) > 1
    bars: list[Bar] = []
    hours: list[Bar] = []
    for i, stage in enumerate(facts["stages"], start=1):
        name = f"{i}: " if several else ""
        bars += [(name + label, stage[key], f"{number_text(stage[key])} s") for label, key in parts]
        value = stage["hours_per_1000_steps"]
        hours.append((f"{name}T = {stage['max_tokens']}", value, f"{number_text(value)} h"))
    note = f"{TIMES} " + ("With staleness the parts overlap." if facts["staleness"] else "The parts follow each other.")
    title = "Parts of a step, by stage" if several else "Parts of a step"
    whole, lengths = "Hours of 1000 steps, by stage", "At the stage's own T, D_R and lengths."
    return [
        bars_view("step_parts", title, "seconds", bars, note, left=PLAN_LEFT),
        bars_view("hours_per_1000_steps", whole, "hours", hours, lengths, color=2, left=PLAN_LEFT - 32),
    ]


def _change_views(facts: Facts) -> list[FigureView]:
    """Return a figure of the step time of the longest stage under each change that fits."""
    fitting = [change for change in facts["what_if"] if change["seconds"] is not None]
    if not fitting:
        return []
    now = max(facts["stages"], key=lambda stage: stage["hours"])
    bars: list[Bar] = [("as planned", now["step_seconds"], f"{number_text(now['step_seconds'])} s")]
    bars += [
        (one["change"], one["seconds"], f"{number_text(one['seconds'])} s (x {one['ratio']:.2f})") for one in fitting
    ]
    note = f"The stage with T = {now['max_tokens']}. Each change by itself, on its own best layout."
    return [bars_view("step_by_change", "Time of a step by change", "seconds", bars, note, left=PLAN_LEFT)]


def _more_gpus(facts: Facts) -> PageBlock | None:
    """Return step time by accelerators, and the saving of each doubling; None for a machine with one accelerator."""
    points = [point for point in facts["over_gpus"] if point["step_seconds"] is not None]
    if len(points) < 2:
        return None
    missing = [str(point["gpus"]) for point in facts["over_gpus"] if point["step_seconds"] is None]
    lead = f"The stage with T = {facts['over_gpus_max_tokens']}, each number of accelerators in its own best layout."
    if missing:
        lead += f" On {', '.join(missing)} nothing fits."
    saved: list[Bar] = []
    for a, b in itertools.pairwise(points):
        share = 1 - b["step_seconds"] / a["step_seconds"]
        words = f"{percent(share)} (ideal {percent(1 - a['gpus'] / b['gpus'])})"
        saved.append((f"{a['gpus']} → {b['gpus']}", max(0.0, share), words))
    hours = [p["step_seconds"] / 3.6 for p in points]  # of 1000 steps
    cost = [(str(p["gpus"]), p["gpus"] * h, f"{number_text(h)} h") for p, h in zip(points, hours, strict=True)]
    title, x_name = "Time saved by more accelerators", "share of the step's time"
    note = "More accelerators share the responses. None makes the longest response shorter."
    doubling = bars_view("doubling", title, x_name, saved, note, unit="percent", color=2)
    note = "After a bar: wall clock of the 1000 steps."
    costs = bars_view("gpu_hours_by_gpus", "Cost of 1000 steps", "accelerator-hours", cost, note, color=1)
    views = [[chart_view(gpu_chart(points))], [doubling, costs], [chart_view(cost_chart(points, facts.get("price")))]]
    return figures_block("more", "More accelerators", views, lead)


def cost_chart(points: Sequence[Facts], price: float | None) -> Chart:
    """Return a chart of the hours of 1000 steps by their cost, with the numbers of accelerators on the frontier.

    A number is on the frontier if none other is both faster and cheaper.
    """
    unit, each = ("accelerator-hours", 1.0) if price is None else ("cost", price)
    hours = {p["gpus"]: p["step_seconds"] / 3.6 for p in points}
    whole = sorted((gpus * hour * each, hour, gpus) for gpus, hour in hours.items())
    best = [one for i, one in enumerate(whole) if all(one[1] < other[1] for other in whole[:i])]
    names = ", ".join(f"{gpus}: {number_text(hour)} h for {number_text(paid)}" for paid, hour, gpus in best)
    frontier = "none is both faster and cheaper"
    return Chart(
        key="hours_over_cost",
        title="Hours of 1000 steps by cost",
        y_low=0.0,
        series=(
            Series(label="numbers of accelerators", points=tuple((c, h) for c, h, _ in whole), dots=True),
            Series(label=frontier, points=tuple((c, h) for c, h, _ in best), color=2, dots=True),
        ),
        x_name=unit,
        x_word=unit,
        note=f"Numbers of accelerators on the frontier: {names}.",
    )


def gpu_chart(points: Sequence[Facts]) -> Chart:
    """Return a chart of the step time with its interval, the rollout time, and the curve a + b/N through both ends."""
    first, last = points[0], points[-1]
    slope = (first["step_seconds"] - last["step_seconds"]) / (1 / first["gpus"] - 1 / last["gpus"])
    base = last["step_seconds"] - slope / last["gpus"]
    xs = tuple(float(point["gpus"]) for point in points)
    step, rollout = (tuple((float(p["gpus"]), p[key]) for p in points) for key in ("step_seconds", "rollout_seconds"))
    band = tuple((float(p["gpus"]), *p["step_seconds_90_percent"]) for p in points)
    curve = tuple((x, base + slope / x) for x in xs)
    return Chart(
        key="step_over_gpus",
        title="Time of a step",
        unit="seconds",
        y_low=0.0,
        series=(
            Series(label="step, with its range", points=step, band=band, dots=True),
            Series(label="sampling t_R", points=rollout, color=1, dots=True),
            Series(label="a + b/N through the ends", points=curve, color=4),
        ),
        x_name="accelerators",
        x_word="accelerators",
        x_log=True,
        x_ticks=xs,
        note="Nine of ten measured steps were in this range. The points of one plan move up and down together.",
    )


# Preflight checks.

SAMPLE_END = 80
"""Characters of the sample answer that the terminal shows. The answer is at its end."""


def write_preflight_page(found: Facts, output: Path, command: str = "") -> Path:
    """Write the page of a preflight check (``magicrl preflight --json``) and return its path.

    Raises:
        ValueError: the page cannot be written.
    """
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
    paid = [(kind, max(0.0, value), f"{value:.2g}") for kind, value in found["reward"]["earned"].items()]
    views = [bars_view("answers", "Responses of the initial model", "share", bars, "", unit="percent", left=220)]
    if paid:
        note = "Mean reward of constructed responses."
        views.append(bars_view("reward", "Reward by kind of response", "reward", paid, note, color=1, left=220))
    data = {"findings": found["findings"], "figures": preflight_figures(found), "verdict": preflight_verdict(found)}
    blocks = [
        block("preflight", "Before the run", data),
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
    head = [("seconds", f"{found['seconds']:.0f}"), ("findings", str(len(found["findings"])))]
    return write_page(render_page(found["recipe"], head, blocks, command, kind="preflight"), output)


def preflight_verdict(found: Facts) -> str:
    """Return the verdict in a sentence."""
    stops = [item["name"].replace("_", " ") for item in found["findings"] if item["severity"] == "stop"]
    if stops:
        return f"Not sound: {', '.join(stops)}. With this recipe the run would learn little or nothing."
    warned = len(found["findings"])
    warnings = f", {warned} {'warning' if warned == 1 else 'warnings'}" if warned else ""
    return f"Sound: nothing was found that would keep the run from learning{warnings}."


def preflight_figures(found: Facts) -> list[tuple[str, str]]:
    """Return the figures as (label, value)."""
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
    shown.append(("sample answer", _sample_answer(learnable)))
    if cost is not None:
        steps = ", ".join(f"{value:.3g} s" for value in cost["step_seconds"])
        hours = duration(3600 * cost["hours"])
        shown.append(("time, predicted", f"{hours} without evaluations; a step by stage: {steps}"))
        planned = "" if cost["planned_gib"] is None else f", {cost['planned_gib']:.1f} planned for the run"
        available = f"{cost['available_gib']:.1f} GiB"
        shown.append(("memory", f"{cost['peak_gib']:.1f} GiB here{planned}, of {available}"))
    return shown


def _sample_answer(learnable: Facts) -> str:
    """Return the end of the sample answer with its verdict and reference answer, in one line."""
    text = " ".join(learnable["example"].split())
    end = text if len(text) <= SAMPLE_END else f"… {text[-SAMPLE_END:]}"
    references = " or ".join(learnable["example_references"])
    against = f"; reference answer: {references}" if references else ""
    return f"{end!r}: {learnable['example_verdict']}{against}"


def _interval(estimate: Facts) -> str:
    return f"{percent(estimate['mean'])} (95 %: {percent(estimate['low'])} to {percent(estimate['high'])})"


# Explained steps.

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


def write_explain_page(found: Facts, output: Path, command: str = "") -> Path:
    """Write the page of a repeated step (``magicrl explain --step N --json``) and return its path.

    Raises:
        ValueError: the page cannot be written.
    """
    head, rows = group_rows(found)
    other_head, others = what_if_rows(found)
    what_if = {"head": other_head, "rows": others, "note": WHAT_IF} if others else None
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
        block("responses", "Responses", {"groups": _shown_groups(found)}, "explain_responses"),
    ]
    facts = [("step", str(found["step"])), ("seconds", f"{found['seconds']:.0f}")]
    title = f"{Path(str(found['run'])).name}, step {found['step']}"
    return write_page(render_page(title, facts, blocks, command, kind="a step"), output)


def explain_summary(found: Facts) -> str:
    """Return a sentence on what the step changed."""
    update, groups = found["update"], found["groups"]
    name = f"Step {found['step']}"
    if not update["sgd_steps"]:
        return f"{name} changed no weight: the responses to each of its {len(groups)} problems have equal rewards."
    learned = [group for group in groups if group["learned_from"]]
    better = sum(group["gain"] > 0 for group in learned)
    count = "1 update" if update["sgd_steps"] == 1 else f"{update['sgd_steps']} updates"
    change = update["entropy_change"]
    return (
        f"{name} made {count} with {len(learned)} of {len(groups)} groups: in {better} of these the better responses "
        f"became more likely relative to the worse ones, and the entropy {'rose' if change > 0 else 'fell'} by "
        f"{abs(change):.2g} to {update['entropy'] + change:.3g} nats per token."
    )


def explain_verdict(found: Facts) -> str:
    """Return a sentence on whether the repeated step equals the recorded one."""
    compared = [check for check in found["checks"] if check["equal"] is not None]
    names = ", ".join(check["name"] for check in compared)
    if found["equal"]:
        return f"Step {found['step']} repeated: equal to the recording bit for bit ({names})."
    wrong = [f"{c['name']}" + (f" ({c['note']})" if c["note"] else "") for c in compared if not c["equal"]]
    return f"Step {found['step']} repeated: NOT equal to the recording, by {'; '.join(wrong)}."


def explain_figures(found: Facts) -> list[tuple[str, str]]:
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


def group_rows(found: Facts) -> tuple[list[str], list[list[str]]]:
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


def what_if_rows(found: Facts) -> tuple[list[str], list[list[str]]]:
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


def _token_bars(found: Facts) -> list[FigureView]:
    """Return a figure of the vocabulary's tokens with the largest shares of the gradient's norm."""
    sums: dict[str, tuple[float, int]] = {}
    for group in found["groups"]:
        for response in group["responses"]:
            for text, value in zip(response["tokens"], response["norm"], strict=True):
                total, count = sums.get(text, (0.0, 0))
                sums[text] = total + value, count + 1
    largest = sorted(sums.items(), key=lambda item: -abs(item[1][0]))[:MOST_BARS]
    bars: list[Bar] = [
        (visible(text[:40]).replace("\n", "⏎").replace(" ", "␣"), abs(total), f"{total:+.2g}, {count} times")
        for text, (total, count) in largest
        if total
    ]
    note = "Length: absolute value. After a bar: the value, and how often the token was sampled."
    title = "Share of the gradient's norm by token"
    return [bars_view("tokens_norm", title, "absolute sum", bars, note, left=140)] if bars else []


def _shown_groups(found: Facts) -> list[dict[str, Any]]:
    """Return as many groups with coloured tokens as fit on the page, those with a gradient first."""
    largest = max((abs(v) for g in found["groups"] for r in g["responses"] for v in r["norm"]), default=0.0) or 1.0
    left, shown = MOST_TOKENS, list[dict[str, Any]]()
    order = sorted(range(len(found["groups"])), key=lambda i: -found["groups"][i]["learned_from"])
    for at in order:
        group = found["groups"][at]
        left -= sum(len(response["tokens"]) for response in group["responses"])
        if left < 0:
            break
        responses = [{**response, "pieces": _token_pieces(response, largest)} for response in group["responses"]]
        shown.append({**group, "number": at + 1, "responses": responses})
    return shown


def _token_pieces(response: Facts, largest: float) -> list[dict[str, Any]]:
    columns: Sequence[Sequence[Any]] = [response[k] for k in ("tokens", "norm", "logprob", "change")]
    return [
        {
            "text": visible(text),
            "level": sum(abs(norm) >= edge * largest for edge in EDGES),
            "words": f"norm {norm:+.2g}, log-prob {logprob:.3g} {change:+.2g}",
        }
        for text, norm, logprob, change in zip(*columns, strict=True)
    ]
