"""The page of a result: ``magicrl selfcheck --page docs/evidence/proof.md``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

WIDTH = 120
PEERS = "Released packages and a clone of LiveCodeBench, used as documented. None of it is a ranking."
RECORDED = Path("benchmarks/results/mutants.json")
"""Result of the fault table, where the command runs in a checkout."""
HEAD = """# Proof

{counts}

    {command}

proves the promises below on your machine, with your versions, and ends with exit status 1 if one does not hold.
This page is of a run{quick} that took {minutes:.0f} minutes.

A check that lacks something is marked "not run" and does not count as passed. `--only NAME` runs one, `--seed N` tries
other random cases, `--peers` puts the same questions to TRL, verl and Math-Verify, and with `--livecodebench FOLDER` to
LiveCodeBench's harness. `--output` writes every figure as JSON.

| promise | result | seconds | command |
|---|---|---|---|
"""
TAIL = """
## How each is proven

- **The loss is the formula.** Random mini-batches of each loss, in float64, go the way of training from verdicts to
  gradients. The other side is a loop over responses and tokens, written from the papers. A small run is also computed
  again step by step: metrics, weights and both moments of AdamW.
- **Sampler and learner agree.** Runs in each precision record the difference between the log-probs of the engine and
  of the learner, for each trained token. In [exact mode](../guides/runs.md#exact-mode) it is 0. TRL 1.16 cannot be
  asked with vLLM on a CPU: its server mode requires CUDA for the copy of weights, and its colocate mode ends with an
  AttributeError at the first copy, because vLLM 0.32's CPU build packs its weights.
- **A killed run continues bit for bit.** Processes get SIGKILL at random moments and are resumed until they end. Most
  have saved a checkpoint of their own by then.
- **What was not judged is never a 0.** A right answer meets a trouble that is not its fault. It must be judged right
  after all, or leave its group. Answers that exhaust their own limits are wrong.
- **Verifiers.** The labelled sets ship with the package. They were written without knowledge of the verifier's code;
  their first run gave 3 of 561 and 14 of 155 wrong answers accepted, and 10 of 445 and 3 of 88 right ones missed. What
  was found then was repaired, so the figure above is no longer one of unseen answers.
- **It says when nothing was learned.** Small runs with an outcome that is known by construction, and the verdict in
  their `run.json`. TRL logs rewards and the share of groups without a signal, and leaves the verdict to its user.

## Promises that the tests hold

These are not part of the command.
"""


def page_of(document: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    own = [row for row in document["checks"] if row["peer"] is None]
    others = [row for row in document["checks"] if row["peer"] is not None]
    counts = {status: sum(row["status"] == status for row in own) for status in ("passed", "failed", "not run")}
    seconds = sum(row["seconds"] for row in own)
    text = HEAD.format(
        counts=f"{counts['passed']} of {len(own)} promises hold, {counts['failed']} fail, {counts['not run']} not run.",
        command="magicrl selfcheck",
        quick=" with `--quick`, which has fewer cases and runs," if document["quick"] else "",
        minutes=max(1.0, seconds / 60),
    )
    text += "".join(
        f"| {row['promise']} | {row['status']} | {row['seconds']:.0f} | `{row['command']}` |\n" for row in own
    )
    text += "\n## Figures\n\n" + "".join(_item(f"**{row['promise']}**", row) for row in own)
    if others:
        text += "\n## The same questions to other libraries\n\n"
        text += "\n".join(wrap(PEERS, WIDTH)) + "\n\n"
        text += "".join(_item(f"**{row['promise']}**, {row['peer']}", row) for row in others)
    found = document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    text += "\n".join(
        [
            "\n## Measured on\n",
            *wrap(f"{found['started'][:10]}; {found['machine']} ({', '.join(found['vector_units'])}).", WIDTH),
            *wrap(f"Python {found['python']}; {versions}; commit {found['git']}.", WIDTH),
            *wrap(f"Command: `{document['command']}`.", WIDTH),
            "",
        ]
    )
    return text + TAIL + "\n" + _recorded()


def _item(title: str, row: Mapping[str, Any]) -> str:
    against = f" Against: {row['against']}." if row["against"] else ""
    lines = wrap(f"- {title}: {row['figure']}.{against}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def _recorded() -> str:
    """Return the promises of the tests, with the last recorded result of the fault table."""
    items = [
        "Every setting acts: a test changes each setting of the recipe and observes the difference "
        "(`pytest tests/unit/config/test_every_setting.py`).",
        "The documentation runs: tests execute its commands and code blocks (`pytest tests/unit/docs`).",
    ]
    if RECORDED.exists():
        found = json.loads(RECORDED.read_text(encoding="utf-8"))
        # the day on which the file was last committed
        log = ["git", "log", "-1", "--format=%cs", "--", str(RECORDED)]
        day = subprocess.run(log, capture_output=True, text=True).stdout.strip() or "not committed"
        items.append(
            f"Faults in magicrl's own code are noticed: {found['killed']} of {found['tried']} planted faults turn a "
            f"test red in the last recorded run ({day}, `make mutants`)."
        )
    return "".join("\n".join(wrap(f"- {item}", WIDTH, subsequent_indent="  ")) + "\n" for item in items)
