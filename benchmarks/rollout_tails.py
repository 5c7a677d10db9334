"""What long responses cost a step: t_R against its bounds, by the order in which groups start and by what is dropped.

    python benchmarks/rollout_tails.py runs/quickstart    # half a minute; writes docs/figures/rollout-tails.json

Steps of recorded runs and of a made-up long tail are played again (`tails.py`) on fewer rows than they have responses:

- in batches without refill, as `generate` does; with refill in issue order; the groups expected longest first, from
  their problems' last draw in the same run (`rollout.start_order`); longest first by an oracle that knows each group's
  longest response;
- in issue order, asked one step ahead (`rollout.max_staleness = 1`), the mean over consecutive steps;
- over-sampled: a step asks for a third more groups than it uses and stops when it has enough, dropping the others.

Two kinds of time: passes of the model (a device on which a pass costs the same for any number of rows, as where reading
weights decides), and seconds at what a pass of SmolLM2 costs on this CPU (``growth-rollout.json``). Two bounds: the
longest response with a row to itself from the first pass on, and the tokens at the best rate that so many rows have;
no schedule can be below either. Dropping has a bias, which is measured: what is kept is shorter than what is drawn.

The schedule is also run by the engine itself on a tiny model, with forced lengths, in CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from bench_models import TINY, long_tailed, model_folder, random_prompts, vocabulary
from graph_shapes import shapes_of
from measure import FIGURES, ROOT, document, rounded
from page_sections import put_section
from speculation import pass_cost
from tails import Cost, Group, Played, ahead, lock_step, refilled
from tails_page import SCHEDULES, section

from magicrl.models.loading import load_policy
from magicrl.records import Problem, RolloutRequest, SamplingParams, frozen_tokens
from magicrl.rollout.in_process import InProcessEngine
from magicrl.training.recorder import write_atomically
from magicrl.training.rollout_queue import PastLengths

Step = list[Group]
OVER = 1 / 3  # groups asked for beyond those that are used


def recorded(run: Path) -> list[Step]:
    """The steps of a run."""
    steps: list[Step] = []
    for path in sorted((run / "rollouts").glob("*.parquet")):
        table = pq.read_table(path, columns=["draw", "problem_id", "tokens", "reward", "finish_reason"])
        draws, lengths = table["draw"].to_numpy(), np.array([len(t) for t in table["tokens"].to_pylist()])
        rewards, ends = table["reward"].to_numpy(), np.array(table["finish_reason"].to_pylist())
        names = table["problem_id"].to_pylist()
        step: Step = []
        for draw in np.unique(draws):
            rows = np.flatnonzero(draws == draw)
            step.append(
                Group(
                    problem=names[rows[0]],
                    lengths=lengths[rows],
                    rewards=rewards[rows].astype(np.float64),
                    truncated=ends[rows] == "length",
                )
            )
        steps.append(step)
    return steps


def made_up(steps: int, prompts: int, samples: int, median: int, longest: int) -> list[Step]:
    """Long-tailed steps over a set of problems that each come every fourth step.

    A problem's median is log-normal with sigma 0.6, its responses about it with 0.7: 0.92 together, a 90 % quantile of
    3.3 medians, as published length distributions of reasoning models have it.
    """
    rng = np.random.default_rng(0)
    problems = 4 * prompts
    medians = rng.lognormal(np.log(median), 0.6, problems)
    found: list[Step] = []
    for number in range(steps):
        names = np.arange(prompts) + number % 4 * prompts
        names = rng.permutation(names)
        draws = [np.clip(rng.lognormal(np.log(medians[n]), 0.7, samples), 4, longest).astype(np.int64) for n in names]
        found.append([Group(problem=str(n), lengths=lengths) for n, lengths in zip(names, draws, strict=True)])
    return found


def orders(steps: Sequence[Step]) -> Iterable[tuple[Step, list[int], bool]]:
    """Every step with the order of its groups by past lengths, and whether half of its problems came before."""
    past, seen = PastLengths(), set[str]()
    for step in steps:
        names = [group.problem for group in step]
        yield step, past.longest_first(names), sum(name in seen for name in names) * 2 >= len(names)
        for group in step:
            past.saw(group.problem, float(group.lengths.mean()))
        seen.update(names)


def bounds(step: Step, rows: int, cost: Cost) -> dict[str, float]:
    """Passes and seconds that no schedule can be below."""
    lengths = np.concatenate([group.lengths for group in step])
    alone, work = int(lengths.max()) - 1, int(lengths.sum()) - len(lengths)
    best = min(cost(count) / count for count in range(1, rows + 1))
    return {
        "passes_alone": alone,
        "passes": max(alone, work / rows),
        "seconds_alone": alone * cost(1),
        "seconds": max(alone * cost(1), work * best),
    }


def schedules(steps: Sequence[Step], rows: int, cost: Cost) -> dict[str, list[Played]]:
    """Each step under each schedule."""
    found: dict[str, list[Played]] = {name: [] for name in SCHEDULES}
    for step, by_past, _ in orders(steps):
        longest = sorted(range(len(step)), key=lambda place: -int(step[place].lengths.max()))
        found["lock_step"].append(lock_step(step, rows, cost))
        for name, order in (("issued", list(range(len(step)))), ("past_lengths", by_past), ("oracle", longest)):
            found[name].append(refilled(step, order, rows, cost))
    found["ahead"] = ahead(steps, rows, cost)
    return found


def compared(steps: Sequence[Step], rows: int, cost: Cost) -> dict[str, Any]:
    """Means over the steps whose problems came before, of each schedule's time over the bounds and over issue order."""
    known = [again for _, _, again in orders(steps)]
    played, limits = schedules(steps, rows, cost), [bounds(step, rows, cost) for step in steps]
    issued = played["issued"]
    table: dict[str, Any] = {}
    for name, results in played.items():
        rows_of = [(p, b, i) for p, b, i, again in zip(results, limits, issued, known, strict=True) if again]
        table[name] = {
            "passes_over_longest_alone": _mean(p.passes / b["passes_alone"] for p, b, _ in rows_of),
            "passes_over_bound": _mean(p.passes / b["passes"] for p, b, _ in rows_of),
            "seconds_over_longest_alone": _mean(p.seconds / b["seconds_alone"] for p, b, _ in rows_of),
            "seconds_over_bound": _mean(p.seconds / b["seconds"] for p, b, _ in rows_of),
            "passes_over_issued": rounded(sum(p.passes for p, _, _ in rows_of) / sum(i.passes for *_, i in rows_of)),
            "passes_over_issued_standard_error": _standard_error([p.passes / i.passes for p, _, i in rows_of]),
            "seconds_over_issued": rounded(sum(p.seconds for p, _, _ in rows_of) / sum(i.seconds for *_, i in rows_of)),
        }
    return {"rows": rows, "steps": sum(known), "schedules": table, "dropping": dropping(steps, rows, cost)}


def past_correlation(steps: Sequence[Step]) -> float:
    """Correlation of a group's log mean length with that of its problem's last draw, over the groups that had one."""
    last: dict[str, float] = {}
    pairs: list[tuple[float, float]] = []
    for group in (group for step in steps for group in step):
        now = float(np.log(group.lengths.mean()))
        if group.problem in last:
            pairs.append((last[group.problem], now))
        last[group.problem] = now
    return rounded(float(np.corrcoef(np.array(pairs).T)[0, 1]))


def dropping(steps: Sequence[Step], rows: int, cost: Cost) -> dict[str, Any]:
    """Over-sampling with an early stop: time per group that is used, and what the kept differ in from all."""
    kept: list[Group] = []
    dropped: list[Group] = []
    ratios: list[tuple[float, float]] = []
    for step in steps:
        use = round(len(step) / (1 + OVER))
        played = refilled(step, list(range(len(step))), rows, cost)
        first = sorted(place for place, *_ in played.complete[:use])
        _, passes, seconds = played.complete[use - 1]
        ratios.append((passes / use * len(step) / played.passes, seconds / use * len(step) / played.seconds))
        kept += [step[place] for place in first]
        dropped += [group for place, group in enumerate(step) if place not in first]
    found: dict[str, Any] = {
        "asked_over_used": rounded(1 + OVER),
        "passes_per_used_group": _mean(p for p, _ in ratios),
        "seconds_per_used_group": _mean(s for _, s in ratios),
        "dropped_groups": rounded(len(dropped) / (len(kept) + len(dropped))),
        "mean_tokens": _kept_and_all(kept, dropped, lambda g: g.lengths),
    }
    if kept[0].rewards.size:
        found["accuracy"] = _kept_and_all(kept, dropped, lambda g: g.rewards)
        found["truncated"] = _kept_and_all(kept, dropped, lambda g: g.truncated)
        # what a group teaches needs right and wrong responses in it
        found["mixed_groups"] = _kept_and_all(kept, dropped, lambda g: np.array([0 < g.rewards.mean() < 1]))
    return found


def _kept_and_all(kept: Sequence[Group], dropped: Sequence[Group], of: Callable[[Group], Any]) -> dict[str, float]:
    values = [np.concatenate([of(group) for group in groups]) for groups in (kept, dropped, [*kept, *dropped])]
    return {name: rounded(float(v.mean())) for name, v in zip(("kept", "dropped", "all"), values, strict=True)}


def _mean(values: Iterable[float]) -> float:
    return rounded(statistics.fmean(values))


def _standard_error(values: Sequence[float]) -> float:
    return rounded(statistics.stdev(values) / len(values) ** 0.5)


# the engine itself


def engine_run(lengths: Sequence[int], rows: int) -> Callable[[Sequence[int]], tuple[float, int]]:
    """CPU seconds and passes of the in-process engine on a tiny model, given the order of these responses."""
    loaded = load_policy(model_folder(TINY), dtype="float32")
    vocab = vocabulary(loaded.model)
    prompts = random_prompts(len(lengths), 8, vocab)
    problem = Problem(id="tails", prompt="", golds=("",), verifier="exact", source="benchmark")
    torch.set_num_threads(1)

    def run(order: Sequence[int]) -> tuple[float, int]:
        engine = InProcessEngine(
            loaded.model, end_tokens=frozenset(), decode=lambda tokens: "", valid_vocab=vocab,
            max_context=loaded.max_context, max_rows=rows, memory_limit_mb=1024,
        )  # fmt: skip
        engine.submit(
            [
                RolloutRequest(
                    draw=place, problem=problem, prompt_tokens=frozen_tokens(prompts[place]), group_size=1,
                    sampling=SamplingParams(temperature=1.0, max_tokens=int(lengths[place]), seed=0),
                )
                for place in order
            ]
        )  # fmt: skip
        passes, step = 0, engine._decode_step  # pyright: ignore[reportPrivateUsage]

        def counted() -> Any:
            nonlocal passes
            passes += 1
            return step()

        engine._decode_step = counted  # pyright: ignore[reportPrivateUsage]
        start = time.process_time()
        for _ in engine.finished():
            pass
        return time.process_time() - start, passes

    return run


def by_engine(count: int, rows: int) -> dict[str, Any]:
    """The engine's own time for one long-tailed step: issue order, longest first, and the longest response alone."""
    lengths = [int(n) for n in long_tailed(count, 32, 224)]
    groups = [Group(problem=str(n), lengths=np.array([length])) for n, length in enumerate(lengths)]
    issued = list(range(count))
    longest = sorted(issued, key=lambda place: -lengths[place])
    run = engine_run(lengths, rows)
    run(issued)  # warm
    found: dict[str, Any] = {"responses": count, "rows": rows, "tokens": sum(lengths), "longest": max(lengths)}
    for name, order in (("issued", issued), ("longest_first", longest), ("longest_alone", longest[:1])):
        seconds, passes = min(run(order) for _ in range(3))
        planned = refilled([groups[place] for place in order], range(len(order)), rows, float).passes
        assert passes == planned, f"{name}: the engine took {passes} passes, the replay says {planned}"
        found[name] = {"cpu_s": rounded(seconds), "passes": passes}
    return found


def study(name: str, steps: Sequence[Step], cost: Cost) -> dict[str, Any]:
    """One source of steps, on a half and a quarter of the rows that would hold all of its responses."""
    responses = sum(len(group.lengths) for group in steps[0])
    cases = [compared(steps, rows, cost) for rows in (responses // 2, responses // 4)]
    return {"name": name, "responses": responses, "past_correlation": past_correlation(steps), "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="run folders with recorded rollouts")
    parser.add_argument("--quick", action="store_true", help="few made-up steps: shows that the script runs")
    parser.add_argument("--growth", type=Path, default=FIGURES / "growth-rollout.json", help="of rollout_growth.py")
    parser.add_argument("--output", type=Path, default=FIGURES / "rollout-tails.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    arguments = parser.parse_args()
    cost, known = pass_cost(arguments.growth)
    head = document({"asked_over_used": rounded(1 + OVER), "rows": "a half and a quarter of a step's responses"})
    found = [study(run.name, recorded(run), cost) for run in arguments.runs]
    size = (8, 4, 4, 40, 200) if arguments.quick else (40, 32, 8, 2000, 16384)
    tail = made_up(*size)
    found.append(study("long tail", tail, cost))
    responses = found[-1]["responses"]
    shapes = [shapes_of(tail[0], rows, 200) for rows in (responses, responses // 2, responses // 4)]
    engine = by_engine(16, 4) if arguments.quick else by_engine(256, 64)
    report = {
        "run": head,
        "pass_seconds": [[int(count), rounded(seconds)] for count, seconds in known],
        "studies": found,
        "engine": engine,
        "fixed_shapes": shapes,
    }
    write_atomically(arguments.output, json.dumps(report, indent=1, allow_nan=False) + "\n")
    put_section(arguments.page, "tails", section(found, engine, shapes))
    for entry in found:
        for case in entry["cases"]:
            print(entry["name"], case["rows"], json.dumps(case["schedules"], indent=1), case["dropping"])
    print(engine)


if __name__ == "__main__":
    main()
