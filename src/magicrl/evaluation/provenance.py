"""The provenance of a result: versions, machine, git commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_PACKAGES = ("magicrl", "torch", "transformers", "numpy", "safetensors", "tokenizers", "math-verify", "pydantic")


def environment_facts() -> dict[str, Any]:
    """Return versions, machine and git commit, as recorded with every run."""
    return {
        "started": now(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {_cpu_name()}, {os.cpu_count()} cores",
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "git": git_commit(),
    }


def git_commit() -> str | None:
    """Return the commit of the source tree of this package, with ``+changes`` if it is dirty; None outside git."""
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def now() -> str:
    """Return the current time in UTC, ISO 8601."""
    return datetime.fromtimestamp(time.time(), tz=UTC).isoformat(timespec="seconds")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
