"""Shared parts of all scripts: paths, command line, and the JSON file of a result."""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from magicrl.evaluation.provenance import environment_facts
from magicrl.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "benchmarks" / "results"
FIGURES = Path(os.environ.get("FIGURES") or COMMITTED).resolve()
"""Folder for results; ``make bench FIGURES=benchmarks/results/second-machine`` sets that of another machine."""


def parser_of(description: str | None, output: Path | None = None) -> argparse.ArgumentParser:
    """Return a parser that prints the script's docstring unchanged, with ``--output`` if a default is given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if output is not None:
        parser.add_argument("--output", type=Path, default=output, help="the JSON")
    return parser


def command() -> str:
    """Return this process's command, with paths relative to the repository's root."""
    given = (argument.replace(f"{ROOT}/", "") for argument in sys.argv[1:])
    module = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    return shlex.join(["python", "-m", module, *given])


def with_tcmalloc() -> None:
    """Restart this process with tcmalloc, which makes all sides faster; ``--allocator system`` prevents it.

    Speed scripts do so before they measure. A missing tcmalloc (Debian's ``libtcmalloc-minimal4``) is reported.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--allocator", default="tcmalloc")
    wanted = parser.parse_known_args()[0].allocator
    if wanted == "system" or allocator() == "tcmalloc":
        return
    name = ctypes.util.find_library("tcmalloc_minimal")
    if name is None:
        print("no tcmalloc: the C library's allocator is measured with", file=sys.stderr)
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "LD_PRELOAD": name})


def allocator() -> str:
    """Return this process's allocator, ``tcmalloc`` or ``system``."""
    maps = Path("/proc/self/maps")
    return "tcmalloc" if maps.exists() and "libtcmalloc" in maps.read_text() else "system"


def rounded(value: float) -> float:
    """Round to four significant digits; further digits are noise."""
    return float(f"{value:.4g}")


def document(settings: Mapping[str, Any], packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return the head of a result: command, machine, date, versions, commit, load, settings."""
    facts = environment_facts()
    facts["versions"] |= {name: importlib.metadata.version(name) for name in packages}
    return {
        "command": command(),
        "machine": {**facts, "memory_gib": rounded(psutil.virtual_memory().total / 2**30), "cpu": _cpu_name()},
        "allocator": allocator(),
        "load_average_at_start": [*map(rounded, os.getloadavg())],
        "settings": dict(settings),
    }


def _cpu_name() -> str:
    """Return the CPU's model, its family and the vector units that decide how fast products are.

    Virtual machines often hide the generation in the name: an AMD EPYC of family 25 is Zen 4 at most, 26 is Zen 5.
    """
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    found = {key.strip(): value.strip() for key, value in lines.items()}
    units = [u for u in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if u in found.get("flags", "").split()]
    kind = f"{found.get('model name', 'unknown')}, family {found.get('cpu family')} model {found.get('model')}"
    return f"{kind} ({', '.join(units) or 'no vector units known'})"


def write_figure(path: Path, found: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(found, indent=1, allow_nan=False) + "\n")


def write_case(path: Path, head: Mapping[str, Any], name: str, result: Mapping[str, Any], known: Sequence[str]) -> None:
    """Write a case with the ``document`` of its run into the JSON and keep the other ``known`` cases there."""
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    cases[name] = {"run": {**head, "load_average_at_end": [*map(rounded, os.getloadavg())]}, **result}
    write_figure(path, {"cases": {name: cases[name] for name in known if name in cases}})
