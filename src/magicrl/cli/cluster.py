"""``magicrl cluster``: is this cluster fit for a run?"""

from __future__ import annotations

from pathlib import Path

from cyclopts import App
from rich.console import Console

cluster_app = App(name="cluster", help="Ray clusters: examine one before a run.")


@cluster_app.command
def doctor(recipe: Path | None = None, /, *, address: str | None = None, megabytes: int = 256) -> int:
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
    from magicrl.config.errors import RecipeError
    from magicrl.config.loader import load_train_recipe
    from magicrl.config.schema import ClusterConfig
    from magicrl.distributed.runtime import connected, nodes, require_ray

    require_ray()
    config = None if recipe is None else load_train_recipe(recipe)
    cluster = ClusterConfig(address="auto") if config is None or config.cluster is None else config.cluster
    if address is not None:
        cluster = cluster.model_copy(update={"address": address})
    from magicrl.distributed.doctor import Finding, examine, start_probe

    console = Console()
    with connected(cluster):
        found = nodes()
        examined = examine(found, megabytes=megabytes, probe=start_probe)
        if config is not None and config.cluster is not None:
            from magicrl.distributed.cluster_parts import ClusterParts

            try:
                ClusterParts(config)
                examined.findings.append(Finding(what=f"room for {recipe}", status="ok", text="everything fits"))
            except RecipeError as error:
                examined.findings.append(Finding(what=f"room for {recipe}", status="trouble", text=str(error)))
    colours = {"ok": "green", "warning": "yellow", "trouble": "red"}
    for finding in examined.findings:
        console.print(f"[{colours[finding.status]}]{finding.status:8}[/] {finding.what}: ", end="")
        console.print(finding.text, markup=False, highlight=False, soft_wrap=True)
    worst = "fit for a run" if examined.healthy else "not fit for a run: see the lines marked trouble"
    console.print(
        f"{len(found)} nodes, {sum(n.cpus for n in found):g} CPUs, {sum(n.gpus for n in found):g} GPUs: {worst}"
    )
    return 0 if examined.healthy else 1
