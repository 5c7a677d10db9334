"""Scoring of an evaluation's samples into ``results.json``, from the files only, without a model.

The results also state what the samples cost. Tokens are counted from the samples. Times are not in the samples, so each
call of ``magicrl eval`` writes a small account next to them and renews it while it runs: a kill loses the last seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from magicrl.config.loader import leaves
from magicrl.evaluation.options import EvaluationOptions, Price
from magicrl.evaluation.presets import PRESETS, TABLE13_SETS, differs_from_preset, rows_with, table13
from magicrl.evaluation.provenance import now
from magicrl.evaluation.samples import RESULTS, SCHEMA_VERSION, EvaluationFolder, SampleRow, by_problem
from magicrl.evaluation.scaling import mark, samples_of_most, scaling
from magicrl.evaluation.statistics import score_rows
from magicrl.files import write_atomically

RENEWED_EVERY = 5.0
"""Seconds between two writings of a call's account."""


def worker_cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds of these processes and of the children they waited for; 0 for a process that ended."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended, or this is no Linux
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime
    return total


class Meter:
    """The account of one call on one benchmark, in a separate file.

    Args:
        folder: folder of the accounts, created with the first one.
        gpus: number of GPUs of the engine; None if it samples on another machine.
        workers: returns process ids of the workers of verifiers and environments.
        served: returns the counts of a server so far; None without a server.
    """

    def __init__(
        self,
        folder: Path,
        *,
        gpus: int | None,
        workers: Callable[[], Iterable[int]],
        served: Callable[[], dict[str, int]] | None,
    ) -> None:
        self._gpus, self._workers, self._served = gpus, workers, served
        self._started = now()
        # a unique name, since each call and shard writes its own account
        self._path = folder / f"{self._started.replace(':', '')}-{os.getpid()}-{time.monotonic_ns()}.json"
        self._samples = 0
        self._began = self._written = time.monotonic()
        self._first_cpu, self._first_judging = time.process_time(), self._judging()
        self._first_served = served() if served is not None else {}

    def count(self, row: SampleRow) -> None:
        """Count a sample that is in its file."""
        self._samples += 1
        if self._samples == 1 or time.monotonic() - self._written >= RENEWED_EVERY:
            self.write()

    def write(self, *, ended: bool = False) -> None:
        """Write the current account."""
        self._written = time.monotonic()
        seconds = self._written - self._began
        judging = self._judging() - self._first_judging
        counts = None if self._served is None else self._served()
        account = {
            "started": self._started,
            "ended": ended,
            "samples": self._samples,
            "seconds": round(seconds, 3),
            "cpu_seconds": round(time.process_time() - self._first_cpu + judging, 3),
            "judging_cpu_seconds": round(judging, 3),
            "gpu_seconds": None if self._gpus is None else round(seconds * self._gpus, 3),
            "server": counts and {name: count - self._first_served.get(name, 0) for name, count in counts.items()},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps(account))

    def _judging(self) -> float:
        """Return the CPU seconds of running workers, and of ended ones that were waited for."""
        waited = resource.getrusage(resource.RUSAGE_CHILDREN)
        return waited.ru_utime + waited.ru_stime + worker_cpu_seconds(self._workers())


def read_accounts(folder: Path) -> list[dict[str, Any]]:
    """Return the accounts of all calls so far, in the order they began.

    Raises:
        ValueError: a file is no account.
    """
    accounts: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        try:
            account = json.loads(path.read_text(encoding="utf-8"))
            accounts.append({"samples": int(account["samples"]), "seconds": float(account["seconds"]), **account})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is no record of a call ({error}); delete it (its seconds do not count)") from None
    return accounts


def total_cost(rows: Sequence[SampleRow], accounts: Sequence[Mapping[str, Any]], price: Price | None) -> dict[str, Any]:
    """Return the tokens, times and price of these samples and calls, for ``results.json``.

    ``prompt_tokens`` counts a prompt once per sample, as servers bill it, although magicrl's engines read it once per
    group. It is None if nobody counted. ``seconds`` is wall time, summed over calls and shards.
    """
    served = [account["server"] for account in accounts if account.get("server")]
    prompt = _sum(row.prompt_tokens for row in rows)
    # the server's count, if it is complete: its template is not known here
    if served and not any(counts["unreported"] for counts in served):
        prompt = sum(counts["prompt_tokens"] for counts in served)
    written = sum(row.tokens for row in rows)
    times = ("seconds", "cpu_seconds", "judging_cpu_seconds", "gpu_seconds")
    return {
        "samples": len(rows),
        "prompt_tokens": prompt,
        "response_tokens": written,
        **{name: _sum(account[name] for account in accounts) for name in times},
        "calls": len(accounts),
        "samples_without_times": max(0, len(rows) - sum(account["samples"] for account in accounts)),
        "price": _priced(price, prompt, written),
    }


def total_usage(parts: Sequence[Mapping[str, Any]], price: Price | None) -> dict[str, Any]:
    """Return the sum over benchmarks; None for each value that one of them does not know."""
    names = [name for name in (parts[0] if parts else {}) if name != "price"]
    total = {name: _sum(part[name] for part in parts) for name in names}
    return total | {"price": _priced(price, total.get("prompt_tokens"), total.get("response_tokens") or 0)}


def _sum(values: Iterable[Any]) -> Any:
    """Return the sum; None if a value is unknown."""
    known = list(values)
    return None if None in known else sum(known)


def _priced(price: Price | None, prompt: int | None, written: int) -> dict[str, Any] | None:
    if price is None:
        return None
    known = prompt is not None or price.per_million_in == 0
    return asdict(price) | {"total": price.of(prompt or 0, written) if known else None}


class Incomplete(ValueError):
    """Samples are missing: other shards are not complete, or a job was stopped."""


def write_results(options: EvaluationOptions, names: Sequence[str], samples: Mapping[str, int] | None = None) -> Path:
    """Score the folders of these benchmarks and write ``results.json``.

    Complete benchmarks from earlier calls with the same model and engine are scored as well, so that a further
    benchmark does not remove the others from the results.

    Args:
        options: folder, prices, the k to report, and the limits of fresh samples, which must be complete. Without
            limits all complete ones are reported.
        names: benchmarks, in the order of the results; they must be complete.
        samples: samples per problem by benchmark; default: those of each job.

    Raises:
        Incomplete: samples are missing; says how many of which benchmark.
        ValueError: a file is damaged, or a k is larger than the samples.
    """
    output = options.folder
    results = {name: result_of(EvaluationFolder(output / name), options, (samples or {}).get(name)) for name in names}
    # other complete benchmarks of earlier calls with the same model have other samples and other k
    others = replace(options, pass_at=None, majority_at=None, fresh_limits=None)
    engines = [result["settings"]["engine"] for result in results.values()]
    if any(engine != engines[0] for engine in engines):
        models = ", ".join(f"{name} ({result['model']['model']})" for name, result in results.items())
        raise ValueError(f"{output} has benchmarks of different models or engines: {models}; name those of one model")
    for folder in (EvaluationFolder(path.parent) for path in sorted(output.glob("*/job.json"))):
        if folder.path.name not in names and folder.job()["decides"]["engine"] in engines:
            # a benchmark of an earlier call that was stopped is left out
            with contextlib.suppress(Incomplete):
                results[folder.path.name] = result_of(folder, others)
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "written": now(),
        "benchmarks": results,
        "means": means(results),
        "usage": total_usage([result["usage"] for result in results.values()], options.price),
    }
    # only results that were sampled like Table 13 are compared with it
    comparable = {n: r["accuracy"]["mean"] for n, r in results.items() if not r["table13"]["differs"]}
    if comparable:
        document["table13"] = {"rows": rows_with(comparable), "note": table13()[1]}
    path = output / RESULTS
    write_atomically(path, json.dumps(document, indent=1, allow_nan=False))
    return path


def result_of(folder: EvaluationFolder, options: EvaluationOptions, samples: int | None = None) -> dict[str, Any]:
    """Return one benchmark's scores.

    Raises:
        Incomplete: samples are missing.
    """
    job = folder.job()
    decides, recorded, wanted = job["decides"], job["recorded"], samples or job["samples"]
    asked = folder.problems()
    ids, clusters = [problem.id for problem in asked], [problem.cluster for problem in asked]
    programs = any(problem.verifier == "code" for problem in asked)
    problems = complete_rows(folder, wanted)
    pass_at, majority_at = _counts(options, samples_of_most(problems), wanted)
    # programs and graded responses have no equal answers to vote on
    vote = not programs and all(row.score is None for rows in problems for row in rows)
    score = score_rows(problems, clusters, pass_at=pass_at, majority_at=majority_at if vote else ())
    fresh = _fresh_rows(folder, options.fresh, wanted)
    limit, knows = decides["sampling"]["max_tokens"], recorded["knows_limit"]
    every = [folder, *(folder.fresh_at(limit) for limit in folder.fresh_limits())]
    rows = [row for each in every for row in each.rows()]
    accounts = [account for each in every for account in read_accounts(each.usage)]
    source: Mapping[str, Any] = recorded["benchmark"]
    verifiers = {problem.verifier for problem in asked}
    differs = {
        name: differs_from_preset(preset, decides, source, samples=wanted, verifiers=verifiers)
        for name, preset in PRESETS.items()
    }
    return {
        "title": source["title"],
        "problems": len(ids),
        "samples": wanted,
        "accuracy": score.accuracy.as_dict(),
        **({} if score.reward is None else {"reward": score.reward.as_dict()}),
        "pass_at": {str(k): estimate.as_dict() for k, estimate in score.pass_at.items()},
        "majority_at": {str(k): estimate.as_dict() for k, estimate in score.majority_at.items()},
        "length": score.length.as_dict(),
        "truncation": score.truncation.as_dict(),
        "entropy": score.entropy,
        "answered_and_stopped": None if programs else score.answered_and_stopped,
        "not_judged": score.not_judged,
        "scored_sha256": scored_checksum(row for rows in problems for row in rows),
        "whole_set": source["whole"],
        "set_aside": source["set_aside"],
        "preset": recorded.get("preset"),
        "settings_of": [name for name, reasons in differs.items() if not reasons],
        "settings": decides,
        "model": recorded["engine"],
        "environment": recorded["environment"],
        "source": {name: value for name, value in source.items() if name not in ("whole", "set_aside", "title")},
        "table13": {
            "differs": differs["report"] if decides["benchmark"] in TABLE13_SETS else ["Table 13 has no such set"]
        },
        "scaling": scaling(
            problems, limit, clusters, knows_limit=knows, vote=vote, turns="environments" in decides, fresh=fresh
        ),
        "usage": total_cost(rows, accounts, options.price),  # including fresh samples, scored or not
        "per_problem": [_problem(*one) for one in zip(ids, problems, score.clusters, strict=True)],
    }


def complete_rows(folder: EvaluationFolder, samples: int) -> list[list[SampleRow]]:
    """Return the rows of every problem of the folder, in its order.

    Raises:
        Incomplete: samples are missing.
    """
    ids = [problem.id for problem in folder.problems()]
    rows = folder.rows(samples)
    missing = samples * len(ids) - len(rows)
    # no score of a part: short samples end first, so that missing ones are not a random part
    if missing:
        raise Incomplete(
            f"{folder.path}: {missing} of {samples * len(ids)} samples are missing; run the same command again, or the "
            "shards that are not complete"
        )
    return by_problem(rows, ids)


def _fresh_rows(folder: EvaluationFolder, limits: list[int] | None, samples: int) -> dict[int, list[list[SampleRow]]]:
    """Return fresh samples by limit: the requested limits, or all complete ones."""
    found: dict[int, list[list[SampleRow]]] = {}
    for limit in folder.fresh_limits() if limits is None else limits:
        try:
            found[limit] = complete_rows(folder.fresh_at(limit), samples)
        except Incomplete:
            if limits is not None:
                raise
    return found


def scored_checksum(rows: Iterable[SampleRow]) -> str:
    """Return a SHA-256 of the scored samples, in order: problem, sample, verdict, end, tokens and text."""
    digest = hashlib.sha256()
    for row in rows:
        line = json.dumps([row.problem, row.sample, row.outcome, row.finish_reason, row.tokens, row.text])
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def means(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return means over benchmarks: over all, and over a preset's sets if all of them were evaluated at its settings.

    Sets are independent, so the standard error is the root of the summed squares over their number. Of "all",
    ``settings_differ`` names the settings that are not the same for every benchmark.
    """
    wanted = {"all": tuple(results)} if len(results) > 1 else {}
    for name, preset in PRESETS.items():
        sets = preset.mean_of
        if sets and all(s in results and name in results[s]["settings_of"] for s in sets):
            wanted[name] = sets
    found: dict[str, Any] = {}
    for name, sets in wanted.items():
        accuracy = [results[s]["accuracy"] for s in sets]
        found[name] = {
            "sets": list(sets),
            "mean": sum(one["mean"] for one in accuracy) / len(sets),
            "standard_error": math.sqrt(sum(one["standard_error"] ** 2 for one in accuracy)) / len(sets),
        }
    if "all" in found:
        tables = [_settings(result) for result in results.values()]
        keys = sorted({key for table in tables for key in table})
        differ = [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]
        found["all"]["settings_differ"] = differ
    return found


def _settings(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a benchmark that can be the same for all."""
    tables = {name: result["settings"].get(name, {}) for name in ("sampling", "judging", "environments")}
    return {key: value for key, value in leaves(tables).items() if "sha256" not in key} | {"samples": result["samples"]}


def check_counts(options: EvaluationOptions, samples: int) -> None:
    """Raise ``ValueError`` if a requested k of pass@k or maj@k is above the samples of a problem."""
    for option, name in (("--pass-at", "pass_at"), ("--majority-at", "majority_at")):
        above = [k for k in options.counts(name) or () if not 1 <= k <= samples]
        if above:
            raise ValueError(f"{option} {above[0]}: k must be between 1 and the {samples} samples of a problem")


def _counts(options: EvaluationOptions, judged: int, samples: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the k of pass@k and maj@k. A requested k must be possible; defaults are those with ``judged`` samples."""
    check_counts(options, samples)
    pass_at, majority_at = options.counts("pass_at"), options.counts("majority_at")
    # pass@1 is avg@k, so powers start at 2
    powers = tuple(k for k in (1 << i for i in range(samples.bit_length())) if 1 < k <= judged)
    passed = powers if pass_at is None else pass_at
    return passed, (powers[-1:] if majority_at is None else majority_at)


def _problem(name: str, rows: Sequence[SampleRow], cluster: int) -> dict[str, Any]:
    counted = [row for row in rows if row.counted]
    correct = sum(row.correct for row in counted)
    return {
        "id": name,
        "cluster": cluster,
        "accuracy": correct / len(counted) if counted else None,
        "correct": correct,
        "counted": len(counted),
        "mean_tokens": sum(row.tokens for row in rows) / len(rows),
        "truncated": sum(row.truncated for row in rows),
        "outcomes": "".join(mark(row) for row in rows),
        "tokens": [row.tokens for row in rows],
    }
