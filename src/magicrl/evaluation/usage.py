"""What an evaluation used: tokens in and out, seconds, CPU- and GPU-seconds, and the price where one is given.

Tokens are counted from the samples themselves. Times are not in them, so each call of ``magicrl eval`` keeps a small
file of its own beside the samples and renews it while it goes on: a kill loses the last seconds of the account.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from magicrl.config.errors import RecipeError
from magicrl.evaluation.provenance import now
from magicrl.evaluation.samples import SampleRow
from magicrl.files import write_atomically

RENEWED_EVERY = 5.0
"""Seconds between two writings of a call's account."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Per million tokens, in whatever currency the user counts.

    Attributes:
        per_million_in: of prompt tokens.
        per_million_out: of response tokens.
    """

    per_million_in: float = 0.0
    per_million_out: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("--price-in", self.per_million_in), ("--price-out", self.per_million_out)):
            if not 0 <= value < float("inf"):
                raise RecipeError(f"{name} {value}: give what a million tokens cost, 0 or more")

    def of(self, tokens_in: int, tokens_out: int) -> float:
        """What so many tokens cost."""
        return (tokens_in * self.per_million_in + tokens_out * self.per_million_out) / 1e6


def worker_cpu_seconds(pids: Iterable[int]) -> float:
    """CPU seconds of these processes and of the children they have waited for; 0 for one that is gone."""
    ticks = os.sysconf("SC_CLK_TCK")
    total = 0.0
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it ended, or this is no Linux
            continue
        fields = stat.rpartition(")")[2].split()
        total += sum(int(field) for field in fields[11:15]) / ticks  # utime, stime, cutime, cstime
    return total


class Meter:
    """The account of one call on one benchmark, kept in a file of its own.

    Args:
        folder: where the accounts are; made with the first one.
        gpus: that the engine holds; None where it samples on another machine.
        workers: process ids of the verifier's workers.
        served: what a server has counted so far; None where there is none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        gpus: int | None,
        workers: Callable[[], Iterable[int]],
        served: Callable[[], dict[str, int]] | None,
    ) -> None:
        self._gpus = gpus
        self._workers = workers
        self._served = served
        self._started = now()
        self._path = folder / f"{self._started.replace(':', '')}-{os.getpid()}-{time.monotonic_ns()}.json"
        self._samples = 0
        self._began = time.monotonic()
        self._first_cpu = time.process_time()
        self._first_judging = self._judging()
        self._first_served = served() if served is not None else {}
        self._written = self._began

    def count(self, row: SampleRow) -> None:
        """A sample is in its file."""
        self._samples += 1
        if self._samples == 1 or time.monotonic() - self._written >= RENEWED_EVERY:
            self.write()

    def write(self, *, ended: bool = False) -> None:
        """Write the account as it stands."""
        self._written = time.monotonic()
        seconds = self._written - self._began
        judging = self._judging() - self._first_judging
        served = None
        if self._served is not None:
            served = {name: count - self._first_served.get(name, 0) for name, count in self._served().items()}
        account = {
            "started": self._started,
            "ended": ended,
            "samples": self._samples,
            "seconds": round(seconds, 3),
            "cpu_seconds": round(time.process_time() - self._first_cpu + judging, 3),
            "judging_cpu_seconds": round(judging, 3),
            "gpu_seconds": None if self._gpus is None else round(seconds * self._gpus, 3),
            "server": served,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(account))

    def _judging(self) -> float:
        """CPU seconds of the workers: of those that live, and of those that were waited for."""
        waited = resource.getrusage(resource.RUSAGE_CHILDREN)
        return waited.ru_utime + waited.ru_stime + worker_cpu_seconds(self._workers())


def read_accounts(folder: Path) -> list[dict[str, Any]]:
    """The accounts of every call so far, in the order they began.

    Raises:
        ValueError: a file that is no account.
    """
    accounts: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        try:
            account = json.loads(path.read_text(encoding="utf-8"))
            accounts.append({"samples": int(account["samples"]), "seconds": float(account["seconds"]), **account})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no account of a call ({error}); delete it, its seconds are lost") from None
    return accounts


def usage_of(rows: Sequence[SampleRow], accounts: Sequence[Mapping[str, Any]], price: Price | None) -> dict[str, Any]:
    """What these samples and calls used, for ``results.json``.

    ``prompt_tokens`` counts a prompt once a sample, as servers bill it; an engine of magicrl's own reads it once a
    group. It is None where nobody counted. ``seconds`` are of wall time, summed over calls and shards.
    """
    read = [row.prompt_tokens for row in rows]
    known = [tokens for tokens in read if tokens is not None]
    served = [account["server"] for account in accounts if account.get("server")]
    prompt = sum(known) if len(known) == len(read) else None
    if served and not any(counts["unreported"] for counts in served):
        prompt = sum(counts["prompt_tokens"] for counts in served)
    written = sum(row.tokens for row in rows)
    gpu = [account["gpu_seconds"] for account in accounts]
    on_gpus = [seconds for seconds in gpu if seconds is not None]
    return {
        "samples": len(rows),
        "prompt_tokens": prompt,
        "response_tokens": written,
        "seconds": sum(account["seconds"] for account in accounts),
        "cpu_seconds": sum(account["cpu_seconds"] for account in accounts),
        "judging_cpu_seconds": sum(account["judging_cpu_seconds"] for account in accounts),
        "gpu_seconds": sum(on_gpus) if len(on_gpus) == len(gpu) else None,
        "calls": len(accounts),
        "samples_without_times": max(0, len(rows) - sum(account["samples"] for account in accounts)),
        "price": _priced(price, prompt, written),
    }


def total_usage(parts: Sequence[Mapping[str, Any]], price: Price | None) -> dict[str, Any]:
    """The sum over benchmarks; what one of them does not know, the sum does not know."""
    names = [name for name in (parts[0] if parts else {}) if name != "price"]
    total = {name: None if any(p[name] is None for p in parts) else sum(p[name] for p in parts) for name in names}
    return total | {"price": _priced(price, total.get("prompt_tokens"), total.get("response_tokens") or 0)}


def _priced(price: Price | None, prompt: int | None, written: int) -> dict[str, Any] | None:
    if price is None:
        return None
    known = prompt is not None or price.per_million_in == 0
    return asdict(price) | {"total": price.of(prompt or 0, written) if known else None}
