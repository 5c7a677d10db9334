"""``magicrl doctor`` and ``magicrl cluster doctor``: findings with the line that mends each."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App
from rich.console import Console
from rich.table import Table
from rich.text import Text

from magicrl.config.errors import RecipeError

if TYPE_CHECKING:
    from magicrl.distributed.doctor import Finding

cluster_app = App(name="cluster", help="Ray clusters: examine one before a run.")
_COLOURS = {"ok": "green", "absent": "dim", "warning": "yellow", "trouble": "red"}


def doctor(*, json: bool = False) -> int:
    """Examine this machine: cores, memory, GPU, sandbox, packages, extras, browser, disk; and the line that mends each.

    Exit status: 0 a run can start here; 1 a line is marked trouble.

    Example: magicrl doctor

    Parameters
    ----------
    json
        One JSON object instead of text: {"healthy", "findings": [{"what", "status", "text", "remedy"}]}.
    """
    from magicrl.api.doctor import examine

    console = Console(highlight=False)
    found: list[Finding] = []
    for finding in examine():
        found.append(finding)
        if not json:
            show(console, finding)
    healthy = all(finding.status != "trouble" for finding in found)
    if json:
        told = {"healthy": healthy, "findings": [finding._asdict() for finding in found]}
        console.print(json_text.dumps(told, indent=2), markup=False, soft_wrap=True)
        return 0 if healthy else 1
    console.print("fit for magicrl train quickstart" if healthy else "not fit for a run: see the lines marked trouble")
    return 0 if healthy else 1


@cluster_app.command(name="doctor")
def cluster_doctor(recipe: Path | None = None, /, *, address: str | None = None, megabytes: int = 256) -> int:
    """Examine every node: versions, GPUs, memory, object store, clocks, ports, and a timed copy of weights.

    Example: magicrl cluster doctor --address auto

    Parameters
    ----------
    recipe
        A recipe with [cluster]: its address is used, and whether its parts fit the nodes is told.
    address
        Of a running Ray: auto for the one of this node, else HOST:PORT; default: the recipe's, else auto.
    megabytes
        Size of the array that is copied to every node.
    """
    from magicrl.config.cluster_schema import ClusterConfig
    from magicrl.config.loader import load_train_recipe
    from magicrl.distributed.runtime import connected, nodes, require_ray

    require_ray()
    config = None if recipe is None else load_train_recipe(recipe)
    cluster = ClusterConfig(address="auto") if config is None or config.cluster is None else config.cluster
    if address is not None:
        cluster = cluster.model_copy(update={"address": address})
    from magicrl.distributed.doctor import Finding, examine, start_probe

    with connected(cluster):
        found = nodes()
        findings = examine(found, megabytes=megabytes, probe=start_probe)
        if config is not None and config.cluster is not None:
            from magicrl.distributed.cluster_parts import ClusterParts

            try:
                ClusterParts(config)
                findings.append(Finding(what=f"room for {recipe}", status="ok", text="everything fits"))
            except RecipeError as error:
                findings.append(Finding(what=f"room for {recipe}", status="trouble", text=str(error)))
    console = Console(highlight=False)
    for finding in findings:
        show(console, finding)
    healthy = all(finding.status != "trouble" for finding in findings)
    worst = "fit for a run" if healthy else "not fit for a run: see the lines marked trouble"
    console.print(
        f"{len(found)} nodes, {sum(n.cpus for n in found):g} CPUs, {sum(n.gpus for n in found):g} GPUs: {worst}"
    )
    return 0 if healthy else 1


def show(console: Console, finding: Finding) -> None:
    """A finding, and under it, to be copied whole, the line that mends or brings what is not there."""
    status, text = Text(f"{finding.status:8}", _COLOURS[finding.status]), Text(f"{finding.what}: {finding.text}")
    if console.is_terminal:
        row = Table.grid()
        row.add_row(status, text)
        console.print(row)
    else:
        console.print(status + text, soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"{'':8}-> {finding.remedy}"), soft_wrap=True)
