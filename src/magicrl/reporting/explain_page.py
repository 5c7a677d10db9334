"""The page of a training step that was made again: what ``magicrl explain --step`` found, in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from magicrl.reporting.charts import Bar, FigureView, bars_view
from magicrl.reporting.page import block, figures_block, render_page, write_page
from magicrl.reporting.wording import checkpoint_name, number, visible

MOST_BARS = 24
MOST_TOKENS = 40_000
"""Tokens that the page shows one by one; responses beyond them are in the JSON alone."""
EDGES = (0.02, 0.1, 0.3, 0.6)
"""Of the colours of tokens, as shares of the largest absolute value."""


def write_explain_page(found: Mapping[str, Any], output: Path, command: str = "") -> Path:
    """Write the page of ``magicrl explain --step N --json``'s object and return its path.

    Raises:
        ValueError: it cannot be written.
    """
    head, rows = group_rows(found)
    other_head, others = what_if_rows(found)
    data = {"verdict": verdict_of(found), **found, "figures": figures_of(found)}
    blocks = (
        block("explain", "The step", data),
        figures_block("tokens", "Tokens", [[view] for view in _bars(found)]),
        block("groups", "Groups", {"head": head, "rows": rows, "note": GROUPS}, "explain_table"),
        block("what_if", "What if", {"head": other_head, "rows": others, "note": WHAT_IF}, "explain_table")
        if others
        else None,
        block("responses", "Responses", {"groups": _shown_groups(found)}, "explain_responses"),
    )
    facts = [("step", str(found["step"])), ("seconds", f"{found['seconds']:.0f}")]
    name = Path(str(found["run"])).name
    shown = [item for item in blocks if item is not None]
    return write_page(render_page(f"{name}, step {found['step']}", facts, shown, command, kind="a step"), output)


GROUPS = (
    "The gain of a group is how far the tokens of its better responses rose over those of its worse ones: the sum of "
    "(reward - mean reward) × change of log-prob, per token of the group. The norm is the group's share of the norm of "
    "the gradient."
)
WHAT_IF = (
    "The same responses from the same weights and moments. Cosines are of the change of the weights with that of the "
    "step as it was: whole, and without what momentum and weight decay give."
)


def verdict_of(found: Mapping[str, Any]) -> str:
    """Whether it is the step that was recorded, in a sentence."""
    told = [check for check in found["checks"] if check["equal"] is not None]
    names = ", ".join(check["name"] for check in told)
    if found["equal"]:
        return f"Step {found['step']} made again: equal to the recording bit for bit ({names})."
    wrong = [f"{c['name']}" + (f" ({c['note']})" if c["note"] else "") for c in told if not c["equal"]]
    return f"Step {found['step']} made again: NOT equal to the recording, by {'; '.join(wrong)}."


def figures_of(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures in lines: (label, value)."""
    update = found["update"]
    source = checkpoint_name(found["from_checkpoint"])
    shown = [("made from", source)]
    for check in found["checks"]:
        if check["equal"] is None:
            value = f"not compared: {check['note']}"
        elif check["equal"]:
            value = f"equal, SHA-256 {check['recorded'][:16]}"
        else:
            value = f"NOT equal: {check['recorded'][:16]} recorded, {check['repeated'][:16]} made again"
        shown.append((check["name"], value))
    if not update["sgd_steps"]:
        return [*shown, ("update", "none: every group was rejected")]
    norms = ", ".join(f"{n['recorded']:.4g} ({n['float64']:.4g} in float64)" for n in update["grad_norms"][:4])
    return [
        *shown,
        ("SGD steps", f"{update['sgd_steps']}, rate {update['learning_rate']:.3g}, alpha {number(update['alpha'])}"),
        ("gradient norm", norms + (" ..." if update["grad_norms"][4:] else "")),
        ("change of the weights", f"{update['norm']:.3g}; by this step's gradient {update['own_norm']:.3g}"),
        ("entropy", f"{update['entropy']:.4g} nats a token, {update['entropy_change']:+.2g}"),
    ]


def group_rows(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A table of the groups that learned or gained, the largest gradient first: its head, its rows."""
    head = ["group", "problem", "mean reward", "norm", "gain"]
    rows: list[list[str]] = []
    groups = found["groups"]
    for at in sorted(range(len(groups)), key=lambda i: -abs(groups[i]["norm"])):
        group = groups[at]
        if not (group["learned_from"] or group["gain"]):
            continue
        rewards = [response["reward"] for response in group["responses"]]
        mean = number(sum(rewards) / len(rewards), 2)
        figures = [f"{group[key]:+.2g}" for key in ("norm", "gain")]
        rows.append([str(at + 1), str(group["problem"]), mean, *figures])
    return head, rows


def what_if_rows(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A table of the step as it was and under other settings: its head, its rows."""
    update, gains = found["update"], [group["gain"] for group in found["groups"]]
    head = ["settings", "groups", "alpha", "clipped", "cosine", "own cosine", "change", "own", "entropy", "gain"]
    head.append("most changed group")
    learned = str(sum(group["learned_from"] for group in found["groups"]))
    as_was = ["as it was", learned, number(update["alpha"]), "", "", "", f"{update['norm']:.3g}"]
    as_was += [f"{update['own_norm']:.3g}", f"{update['entropy_change']:+.2g}", f"{sum(gains):+.2g}", ""]
    rows = [as_was] if found["what_if"] else []
    for other in found["what_if"]:
        differences = [one - was for one, was in zip(other["gains"], gains, strict=True)]
        at = max(range(len(gains)), key=lambda i: abs(differences[i]))
        row = [other["what_if"], str(other["trained"]), number(other["alpha"]), number(other["clip_ratio"])]
        row += ["–" if other[key] is None else f"{other[key]:.4f}" for key in ("cosine", "own_cosine")]
        row += [f"{other['norm']:.3g}", f"{other['own_norm']:.3g}", f"{other['entropy_change']:+.2g}"]
        row += [f"{sum(other['gains']):+.2g}", f"{at + 1} ({differences[at]:+.2g})"]
        rows.append(row)
    return head, rows


def _bars(found: Mapping[str, Any]) -> list[FigureView]:
    """The tokens of the vocabulary that gave most of the gradient's norm."""
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
    note = "Length: absolute value; behind it the value, and how often the token was drawn."
    title = "Share of the gradient's norm by token"
    return [bars_view("tokens_norm", title, "absolute sum", bars, note, left=140)] if bars else []


def _shown_groups(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups with coloured tokens, as many as the page has room for, those that were learned from first."""
    largest = max((abs(v) for g in found["groups"] for r in g["responses"] for v in r["norm"]), default=0.0) or 1.0
    left, shown = MOST_TOKENS, list[dict[str, Any]]()
    order = sorted(range(len(found["groups"])), key=lambda i: -found["groups"][i]["learned_from"])
    for at in order:
        group = found["groups"][at]
        left -= sum(len(response["tokens"]) for response in group["responses"])
        if left < 0:
            break
        responses = [{**response, "pieces": _pieces(response, largest)} for response in group["responses"]]
        shown.append({**group, "number": at + 1, "responses": responses})
    return shown


def _pieces(response: Mapping[str, Any], largest: float) -> list[dict[str, Any]]:
    columns: Sequence[Sequence[Any]] = [response[k] for k in ("tokens", "norm", "logprob", "change")]
    return [
        {
            "text": visible(text),
            "level": sum(abs(norm) >= edge * largest for edge in EDGES),
            "told": f"norm {norm:+.2g}, log-prob {logprob:.3g} {change:+.2g}",
        }
        for text, norm, logprob, change in zip(*columns, strict=True)
    ]
