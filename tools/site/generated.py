"""Generated parts of the site.

A page's line ``<!-- commands -->`` becomes the command line's reference, ``<!-- metrics -->`` the table of metrics, and
``<!-- peers -->`` the table of the peers' tested settings. In the repository each page says where to find them.
"""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path

from magicrl.commands.main import app
from magicrl.reporting.curves import METRICS, Metric

# by key, the first that fits; a row's own unit has priority
UNITS = {
    "learner/ratio*": "a ratio",
    "learner/grad_norm": "norm of the gradient",
    "learner/sampler_gap*": "nats",
    "learner/kl": "nats per token",
    "learner/teacher_kl": "nats per token",
    "entropy/alpha": "coefficient",
    "entropy/c": "coefficient",
    "entropy/*": "nats per token",
    "length/*": "tokens",
    "time/*": "seconds",
    "stage/max_tokens": "tokens",
    "staleness/*": "training steps",
    "tokens/per_second": "tokens per second",
    "groups/*": "groups",
    "environment/turns": "turns",
    "*reward/mean": "the reward's own",
    "reward/*/mean": "the reward's own",
}


def commands() -> str:
    """Return the help of every command as Markdown, one heading each."""
    text = app.generate_docs(output_format="markdown", heading_level=2)
    text = "".join(text.partition("\n### magicrl ")[1:])
    text = text.replace("\n**Parameters**:\n", "").replace("\n**Arguments**:\n", "")
    text = re.sub(r"</?think>", r"`\g<0>`", text)
    return re.sub(r"^Examples?: (magicrl .*)$", r"```console\n$ \1\n```", text, flags=re.MULTILINE)


def metrics() -> str:
    """Return a row per metric that the pages draw: key, unit, meaning."""
    rows: dict[str, str] = {}
    for group in METRICS:
        titles = {figure.key: figure for panel in group.panels for figure in panel}
        for metric in (metric for metric in group.metrics if metric.key not in rows):
            figure = titles.get(metric.figure)
            title = metric.title or ": ".join(filter(None, (figure.title if figure else "", metric.label)))
            note = metric.note or (figure.note if figure else "")
            rows[metric.key] = f"| `{metric.key}` | {unit_of(metric)} | {title}. {note} |"
    return "\n".join(["| key | unit | |", "|---|---|---|", *rows.values()])


def unit_of(metric: Metric) -> str:
    """Return the unit in words. A share of another metric is recorded in that metric's unit."""
    own = {"percent": "share, 0 to 1", "seconds": "seconds"}.get(metric.unit)
    if own and metric.share_of is None:
        return own
    return next((unit for pattern, unit in UNITS.items() if fnmatch.fnmatch(metric.key, pattern)), own or "a number")


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TRIED = (("bench-rollout", "transformers"), ("bench-rollout-vllm", "vLLM"), ("bench-learner-tuning", "TRL"))


def peers() -> str:
    """Return a row per measured setting of a peer: case, peer, setting, CPU seconds; the fastest is the peer."""
    rows = ["| case | peer | setting | CPU seconds |", "|---|---|---|---|"]
    for file, peer in TRIED:
        for name, case in json.loads((RESULTS / f"{file}.json").read_text())["cases"].items():
            tried = case["peer"]["cpu_s"] if "peer" in case else case["cpu_s"]
            theirs = {key: seconds for key, seconds in tried.items() if not key.startswith("magicrl")}
            rows += [f"| {name} | {peer} | {key} | {seconds:g} |" for key, seconds in theirs.items()]
    return "\n".join(rows)


PARTS = {
    "commands": commands,
    "metrics": metrics,
    "peers": peers,
}
"""Function that makes the part of each mark."""
