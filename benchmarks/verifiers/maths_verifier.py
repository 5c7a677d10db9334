r"""Measurements of the maths verifier: errors on labelled pairs, hostile answers, near misses, speed.

    python -m benchmarks.verifiers.maths_verifier

Reads ../shared/data/math; the output holds counts and row numbers, none of the data. CPU seconds are this process's
own. "Bare Math-Verify" is the report's four steps on unchanged Math-Verify, in the same process,
right after ours, on the same items. `python -m tools.benchmark_page` puts the numbers into
docs/reference/maths-verifier.md.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from maths_sets import Pair, hostile, labelled, references
from near_misses import near_misses
from rewrites import rewrites

from benchmarks.shared import FIGURES, ROOT, document, parser_of, write_figure
from magicrl.records import Outcome, Problem
from magicrl.selfcheck.verifiers import bare
from magicrl_verifiers import JudgeOptions, VerifierPool
from magicrl_verifiers.maths.maths_verifier import MathsVerifier

NEAR_MISSES = 10_000


def main() -> None:
    parser = parser_of(__doc__, FIGURES / "maths-verifier.json")
    parser.add_argument("--show", action="store_true", help="print the wrong verdicts (they quote the data)")
    arguments = parser.parse_args()
    show: bool = arguments.show
    verifier = warm_verifier()
    pairs = labelled()
    verdicts = [verifier.judge(pair.references, pair.response) for pair in pairs]
    correct = [verdict.correct for verdict in verdicts]
    found: dict[str, Any] = {
        "run": document({}, ("math-verify", "latex2sympy2_extended", "sympy", "python-flint")),
        "development": {
            "ours": errors(pairs, correct),
            "decided_by": dict(Counter(verdict.decided_by for verdict in verdicts).most_common()),
        },
        "hostile": hostile_figures(),
        "near_misses": changed_figures(verifier, near_miss_responses(), "accepted", right=False, show=show),
        "equality": equality_figures(verifier, show=show),
        "rewrites": changed_figures(verifier, rewrites(references(), seed=0), "missed", right=True, show=show),
        "speed": speed(pairs),
    }
    found["development"]["bare_math_verify"] = found["speed"].pop("errors")
    if show:
        for pair, said in zip(pairs, correct, strict=True):
            if said != pair.label:
                print(pair.number, pair.label, pair.references, repr(pair.response[-100:]))
    write_figure(arguments.output, found)


def warm_verifier() -> MathsVerifier:
    """Return a verifier as a worker has it: warmed up."""
    verifier = MathsVerifier(JudgeOptions())
    verifier.judge([r"\int_0^1 2x \, dx"], r"\boxed{\int_0^1 2y \, dy}")
    return verifier


def errors(pairs: Sequence[Pair], correct: Sequence[bool]) -> dict[str, Any]:
    """Return false positives and negatives, by source and by kind, with the rows' numbers."""
    wrong = [(pair, said) for pair, said in zip(pairs, correct, strict=True) if said != pair.label]

    def counted(chosen: Callable[[Pair], Any]) -> dict[str, dict[str, int]]:
        table: dict[str, dict[str, int]] = {}
        for key in sorted({str(chosen(pair)) for pair in pairs}):
            of_key = [pair for pair in pairs if str(chosen(pair)) == key]
            table[key] = {
                "true": sum(pair.label for pair in of_key),
                "false": sum(not pair.label for pair in of_key),
                "false_positives": sum(said for pair, said in wrong if str(chosen(pair)) == key),
                "false_negatives": sum(not said for pair, said in wrong if str(chosen(pair)) == key),
            }
        return table

    positives = sum(pair.label for pair in pairs)
    easy = sum(pair.label and not pair.hard for pair in pairs)
    missed = [pair for pair, said in wrong if not said]
    return {
        "pairs": len(pairs),
        "false_positives": sum(said for _, said in wrong),
        "false_negatives": len(missed),
        "false_negative_rate": round(len(missed) / positives, 4),
        "false_negative_rate_without_hard": round(sum(not pair.hard for pair in missed) / easy, 4),
        "wrong_rows": [pair.number for pair, _ in wrong],
        "by_source": counted(lambda pair: pair.source),
        "by_kind": counted(lambda pair: pair.kind),
    }


def hostile_figures() -> dict[str, Any]:
    """Run hostile answers through the pool: verdicts, CPU seconds of each item, and the pool's state afterwards."""
    import psutil

    cases = hostile()
    seconds: list[float] = []
    wrong: list[int] = []
    statuses: Counter[str] = Counter()
    with VerifierPool(workers=1) as pool:
        pool.warm_up()
        peak = 0
        for case in cases:
            problem = Problem(
                id=str(case.number), prompt="", references=case.references, verifier="maths", source="hostile"
            )
            before = pool_seconds(pool)
            (verdict,) = pool.judge(problem, [case.response])
            after = pool_seconds(pool)
            if verdict.status not in ("matched", "mismatch", "no_answer"):
                statuses[verdict.status] += 1
            seconds.append(after - before if after >= before else after)
            wrong += [case.number] if (verdict.outcome is Outcome.CORRECT) != case.label else []
            peak = max([peak, *(psutil.Process(pid).memory_info().rss for pid in pool.worker_pids)])
        problem = Problem(id="after", prompt="", references=("1/2",), verifier="maths", source="hostile")
        alive = pool.judge(problem, [r"\boxed{0.5}"])[0].correct
    return {
        "cases": len(cases),
        "wrong_cases": wrong,
        "most_cpu_seconds": round(max(seconds), 2),
        "cases_over_one_second": sum(one > 1 for one in seconds),
        "other_statuses": dict(statuses),
        "peak_worker_rss_mb": round(peak / 2**20),
        "pool_alive_after": alive,
    }


def pool_seconds(pool: VerifierPool) -> float:
    """Return CPU seconds of the one worker so far."""
    import psutil

    times = [psutil.Process(pid).cpu_times() for pid in pool.worker_pids]
    return sum(one.user + one.system for one in times)


def near_miss_responses() -> Iterator[tuple[str, str, str]]:
    """Return reference answers with one change, from as many seeds as it takes."""
    made = 0
    for seed in range(10):
        for name, reference, wrong in near_misses(references(), seed):
            made += 1
            yield name, reference, f"\\boxed{{{wrong}}}"
        if made >= NEAR_MISSES:
            return


def changed_figures(
    verifier: MathsVerifier, changed: Iterable[tuple[str, str, str]], fault: str, *, right: bool, show: bool
) -> dict[str, Any]:
    """Count wrong verdicts on changed reference answers, all of which are correct, or all wrong."""
    made: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    start = time.thread_time()
    for name, reference, response in changed:
        made[name] += 1
        if verifier.judge([reference], response).correct != right:
            faults[name] += 1
            if show:
                print(f"{fault}:", name, reference, response)
    return {
        "made": made.total(),
        fault: faults.total(),
        f"{fault}_rate": round(faults.total() / made.total(), 4),
        "by_class": {name: {"made": count, fault: faults[name]} for name, count in made.most_common()},
        "cpu_seconds": round(time.thread_time() - start, 1),
    }


def equality_figures(verifier: MathsVerifier, *, show: bool) -> dict[str, Any]:
    """Return the results of ``packages/verifiers/tests/maths/equality.txt`` by class, and for the held-out half."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    name = reference = ""
    for line in (ROOT / "packages" / "verifiers" / "tests" / "maths" / "equality.txt").read_text().splitlines():
        mark, _, rest = line.partition(" ")
        name, reference = (rest if mark == "##" else name), (rest if mark == "=" else reference)
        held = int(hashlib.sha256(reference.encode()).hexdigest(), 16) % 2
        for answer in rest.split(" || ") if mark in ("=", "+", "-") else ():
            equal = mark != "-"
            said = verifier.judge([reference], f"\\boxed{{{answer}}}").correct
            for rows in (table[name], table["all"], *([table["held out"]] if held else [])):
                rows["equal" if equal else "different"] += 1
                rows["missed" if equal else "accepted"] += said != equal
            if show and said != equal:
                print("equality:", name, reference, answer)
    total = table.pop("all")
    return {**total, "by_class": {name: dict(rows) for name, rows in table.items()}}


def speed(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return CPU seconds per item of ours and bare Math-Verify on the labelled pairs, in this process."""
    bare(pairs[0].references, pairs[0].response)  # triggers late imports
    figures: dict[str, Any] = {}
    verifier = warm_verifier()
    for name, judge in (
        ("ours", lambda pair: verifier.judge(pair.references, pair.response).correct),
        ("bare_math_verify", lambda pair: bare(pair.references, pair.response)),
    ):
        seconds: list[float] = []
        said: list[bool] = []
        for pair in pairs:
            start = time.thread_time()
            said.append(judge(pair))
            seconds.append(time.thread_time() - start)
        seconds.sort()
        figures[name] = {
            "items_per_cpu_second": round(len(seconds) / sum(seconds), 1),
            "p50_ms": round(seconds[len(seconds) // 2] * 1000, 3),
            "p99_ms": round(seconds[int(len(seconds) * 0.99)] * 1000, 2),
            "most_ms": round(seconds[-1] * 1000, 1),
        }
        if name == "bare_math_verify":
            figures["errors"] = errors(pairs, said)
    ours, other = figures["ours"], figures["bare_math_verify"]
    figures["ratio_items_per_second"] = round(ours["items_per_cpu_second"] / other["items_per_cpu_second"], 2)
    return figures


if __name__ == "__main__":
    main()
