"""Results of the showcase (docs/evidence/showcase.md): ``python -m studies.showcase collect RUN`` and ``... page``.

``collect`` writes what the page needs of a run to ``studies/results/showcase/NAME.json``. The folder's name says what
it is: ``family-SEED``, ``own-SEED`` (the supervised baseline), ``parts-VARIANT-SEED`` (20 steps of one variant),
``tiny-VARIANT-SEED`` (C18) or ``TASK-SEED``; seed 90 is a short run. ``page`` writes the results of all these files,
and of the screening, into the page, its figure, and C18's table into ``claims.md``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from magicrl.config.data_schema import SourceConfig
from magicrl.config.loader import load_train_recipe
from magicrl.data.sources import load_problems
from magicrl.evaluation.statistics import holm
from magicrl.records import Problem
from magicrl.reporting.charts import Chart, Series, draw
from magicrl.training.start_checks import check_run

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "studies" / "results" / "showcase"
PAGE = ROOT / "docs" / "evidence" / "showcase.md"
CLAIMS = PAGE.with_name("claims.md")
FIGURE = ROOT / "docs" / "figures" / "showcase.svg"
CURVES = (
    "train/accuracy/mean",
    "train/accuracy/standard_error",
    "groups/rejected/ratio",
    "entropy/exact/mean",
    "length/mean",
    "train/truncation/ratio",
    "learner/grad_norm",
    "learner/sgd_steps",
    "entropy/alpha",
    "time/rollout_cpu",
    "time/train_cpu",
    "validation/accuracy/mean",
    "validation/length/mean",
)
BAR, BAR_AT_1, PREMISE = 0.443, 0.38, 0.05
"""Claims on family_relationships: accuracy greedy, at temperature 1 (runs of 60 steps only), and greedy before."""
SEEDS = 3
"""Number of seeds of a claim; fewer can make it fail, and do not show it."""
OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: abs(a - b),
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: max(a, b) / (min(a, b) or 1),
}
PREMISES: dict[str, Callable[[Mapping[str, list[Any]], Mapping[str, list[Any]]], bool]] = {
    "entropy": lambda own, _: sum(alpha > 0 for alpha in own["entropy/alpha"]) >= 4,
    "stages": lambda own, base: sum(own["train/truncation/ratio"][:10]) > sum(base["train/truncation/ratio"][:10]),
    "nsgd4": lambda own, _: sum(filter(None, own["learner/sgd_steps"])) >= 30,
    "nsgd4-half": lambda own, _: sum(filter(None, own["learner/sgd_steps"])) >= 30,
    "all-groups": lambda _, base: sum(base["groups/rejected/ratio"]) >= 0.2 * len(base["groups/rejected/ratio"]),
}
"""Premise of each part of MAGIC: a function of its curves and those of ``base`` with the same seed."""
EQUAL, LEAST_LEARNED = 10.0, 10.0
"""Parts: the largest difference that counts as none, and the accuracy that ``base`` must reach, in points."""
LEAST_TESTED = 200
"""Number of test problems from which a run has a greedy accuracy in the table of parts; later runs had 20."""
HOW = {"0.0": "greedy", "1.0": "at temperature 1"}
LEAST_MIXED = 0.1
"""Share of mixed groups from which a screened task has a row."""


def collect(run: Path) -> dict[str, Any]:
    """Return the part of a run folder that the page needs."""
    config = load_train_recipe(run / "config.toml")
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    tests: dict[str, dict[str, Any]] = {}
    for file in sorted((run / "evaluations").glob("*-*.json")):
        document = json.loads(file.read_text(encoding="utf-8"))
        keep = ("accuracy", "pass_at", "length_mean", "truncation", "entropy", "per_problem")
        found = {tau: {key: found[key] for key in keep} for tau, found in document["temperatures"].items()}
        tests[file.name.partition("-")[0]] = found
    steps = [json.loads(line)["values"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    data, _ = check_run(config, run.with_name(f".{run.name}-collect"), resume=False)
    test = next(iter(data.test.values()), ())
    sources = (*config.data.train, *config.data.test.values())
    bare = [[without_template(p, config.data.train) for p in problems] for problems in (data.train, test or data.train)]
    return {
        "name": run.name,
        "seed": config.run.seed,
        "sources": [
            one.model_dump(exclude_defaults=True, exclude={"path", "verifier"}, mode="json") for one in sources
        ],
        "status": record["status"],
        "curves": {key: [step.get(key) for step in steps] for key in CURVES if any(key in step for step in steps)},
        "cpu_seconds": round(sum(step["time/rollout_cpu"] + step["time/train_cpu"] for step in steps)),
        "baselines": without_model(*bare),
        "tests": tests,
        "environment": record["environments"][-1],
    }


def problems_of(source: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of a recipe's source."""
    return load_problems(SourceConfig.model_validate(dict(source)))


def without_template(problem: Problem, sources: Sequence[SourceConfig]) -> Problem:
    """Return the problem without the text that its source's template puts around it."""
    for source in sources:
        head, _, tail = (source.template or "{prompt}").partition("{prompt}")
        if problem.prompt.startswith(head) and problem.prompt.endswith(tail):
            problem = replace(problem, prompt=problem.prompt.removeprefix(head).removesuffix(tail))
    return problem


def without_model(train: Sequence[Problem], test: Sequence[Problem]) -> dict[str, float]:
    """Return the accuracy on ``test`` of the commonest answer, and of the best rule about the problem's numbers.

    Both are chosen on ``train``. A rule about two numbers is wrong for a problem that has fewer.
    """
    commonest = Counter(p.references[0] for p in train).most_common(1)[0][0]
    rules: dict[str, Callable[[list[float]], float]] = {
        "first number": lambda n: n[0],
        "last number": lambda n: n[-1],
        "largest number": max,
        "smallest number": min,
    }
    for name, operation in OPERATIONS.items():
        rules[f"{name} of the first two numbers"] = lambda n, of=operation: of(n[0], n[1])
        rules[f"{name} of the last two numbers"] = lambda n, of=operation: of(n[-2], n[-1])

    def share(name: str, problems: Sequence[Problem]) -> float:
        """Return the share of problems that the rule answers."""
        pairs = [([float(n) for n in re.findall(r"\d+(?:\.\d+)?", p.prompt)], p.references[0]) for p in problems]
        right = [f"{rules[name](numbers):g}" == answer for numbers, answer in pairs if len(numbers) >= 2]
        return sum(right) / max(1, len(problems))

    best = max(rules, key=lambda name: share(name, train))
    constant = sum(p.references[0] == commonest for p in test) / max(1, len(test))
    return {f"always {commonest!r}": constant, best: share(best, test)}


def first_person(problem: Problem) -> str:
    """Return ``male`` or ``female``: the gender of the name that the question asks about."""
    entry = json.loads(problem.extra["reasoning_gym"])["entry"]
    names = importlib.import_module("reasoning_gym.graphs.family_relationships").FamilyRelationshipsConfig()
    return "male" if entry["metadata"]["person1"] in names.male_names else "female"


def baselines(train: Sequence[Problem], test: Sequence[Problem]) -> dict[str, float]:
    """Return the accuracy on ``test`` of rules without a model; what they answer is chosen on ``train``."""
    commonest = Counter(p.references[0] for p in train).most_common(1)[0][0]
    by_gender = {
        gender: Counter(p.references[0] for p in train if first_person(p) == gender).most_common(1)[0][0]
        for gender in ("male", "female")
    }
    rules: dict[str, Callable[[str], str]] = {
        f"always {commonest!r}": lambda _: commonest,
        f"{by_gender['male']!r} or {by_gender['female']!r}, best on the training problems": by_gender.__getitem__,
        "'son' or 'wife' by the name's gender": {"male": "son", "female": "wife"}.__getitem__,
    }
    return {
        name: sum(rule(first_person(p)) == p.references[0] for p in test) / len(test) for name, rule in rules.items()
    }


def percent(value: float) -> str:
    """Return a share in percent with one decimal."""
    return f"{100 * value:.1f}"


def with_interval(score: Mapping[str, float]) -> str:
    """Return a score with its interval over problems, in percent."""
    return f"{percent(score['mean'])} ({percent(score['low'])} to {percent(score['high'])})"


def sentence(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return what runs of one length show, and the verdict on their claim."""
    steps = len(runs[0]["curves"][CURVES[0]])
    bars = {"0.0": BAR, "1.0": BAR_AT_1} if steps > 30 else {"0.0": BAR}
    before = [run["tests"]["before"]["0.0"]["accuracy"]["mean"] for run in runs]
    after = {tau: [run["tests"]["after"][tau]["accuracy"]["mean"] for run in runs] for tau in ("0.0", "1.0")}
    wanted = " and ".join(f"{percent(bar)} % {HOW[tau]}" for tau, bar in bars.items())
    if max(before) > PREMISE:
        verdict = "is **undecided**: its premise is not met"
    elif any(value < bar for tau, bar in bars.items() for value in after[tau]):
        verdict = "**fails**"
    else:
        verdict = "**holds**" if len(runs) >= SEEDS else f"is **undecided** with {len(runs)} of {SEEDS} seeds"
    reached = "; ".join(f"{HOW[tau]} {', '.join(map(percent, values))} %" for tau, values in after.items())
    seeds = f"seed{'s' * (len(runs) > 1)} {', '.join(str(run['seed']) for run in runs)}"
    return (
        f"{steps} steps, {seeds}: {reached}. The claim that was stated before, at least {wanted} with every seed, "
        f"{verdict}."
    )


def results(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the page's results of these runs."""
    test = problems_of(runs[0]["test"])
    rules = baselines(problems_of(runs[0]["train"][0]), test)
    before = max(run["tests"]["before"]["0.0"]["accuracy"]["mean"] for run in runs)
    by_steps = [list(group) for _, group in groupby(runs, key=lambda run: len(run["curves"][CURVES[0]]))]
    lines = [
        f"SmolLM2-135M-Instruct as published has {percent(before)} % greedy on {len(test)} test problems. With "
        "reinforcement\nlearning alone it reaches:\n",
        *(textwrap.fill(f"- {sentence(group)}", 119, subsequent_indent="  ") for group in reversed(by_steps)),
        "",
        "| run | greedy before | greedy after | at 1 before | at 1 after | pass@16 before | pass@16 after |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        old, new = run["tests"]["before"], run["tests"]["after"]
        cells = [with_interval(tests[tau]["accuracy"]) for tau in ("0.0", "1.0") for tests in (old, new)]
        cells += [with_interval(tests["1.0"]["pass_at"]["16"]) for tests in (old, new)]
        lines.append(f"| {run['name']} | {' | '.join(cells)} |")
    lines += [
        "",
        "Percent, with 95 % intervals over problems (Wilson's). At temperature 1 with 16 samples per problem.\n",
    ]
    lines += ["| rule without a model | right |", "|---|---|"]
    lines += [f"| {name} | {percent(value)} |" for name, value in rules.items()]
    names = " | ".join(run["name"] for run in runs)
    lines += ["", "Greedy accuracy after training by relation, in percent:\n"]
    lines += [f"| answer | problems | {names} |", f"|---|---|{'---|' * len(runs)}"]
    for relation, count in Counter(p.references[0] for p in test).most_common():
        places = [i for i, p in enumerate(test) if p.references[0] == relation]
        shares = [percent(sum(run["tests"]["after"]["0.0"]["per_problem"][i] for i in places) / count) for run in runs]
        lines.append(f"| {relation} | {count} | {' | '.join(shares)} |")
    lines += ["", "![Share of right answers per step of each run](../figures/showcase.svg)"]
    return "\n".join(lines) + "\n"


def figure(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the share of right answers per step as an SVG file: a mean over five steps, and the raw values."""
    series: list[Series] = []
    for number, run in enumerate(runs):
        label = str(run["name"]).replace("family-", "RL, seed ").replace("own-", "SFT, seed ")
        raw = [100 * value for value in run["curves"]["train/accuracy/mean"]]
        windows = [raw[max(0, i - 4) : i + 1] for i in range(len(raw))]
        mean = [sum(window) / len(window) for window in windows]
        series.append(Series(label=label, points=tuple(enumerate(mean, start=1)), color=number))
        series.append(Series(label=f"{label}, raw", points=tuple(enumerate(raw, start=1)), color=number, style="faint"))
    chart = Chart(key="showcase", title="Right answers in training, percent", series=tuple(series), y_low=0.0)
    return str(draw(chart, alone=True))


def supervised(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table of the supervised baseline next to the RL run of its seed."""
    lines = [
        "| seed | method | greedy after | at 1 after | sampled tokens | tokens of kept groups |",
        "|---|---|---|---|---|---|",
    ]
    for name, own in runs.items():
        if not name.startswith("own-"):
            continue
        for label, run in (("RL", runs[f"family-{own['seed']}"]), ("SFT on own correct responses", own)):
            after = run["tests"]["after"]
            lengths, rejected = run["curves"]["length/mean"], run["curves"]["groups/rejected/ratio"]
            sampled = sum(256 * length for length in lengths)
            kept = sum(256 * length * (1 - share) for length, share in zip(lengths, rejected, strict=True))
            cells = [with_interval(after[tau]["accuracy"]) for tau in ("0.0", "1.0")]
            lines.append(f"| {own['seed']} | {label} | {' | '.join(cells)} | {sampled:,.0f} | {kept:,.0f} |")
    return lines


def late(curves: Mapping[str, list[Any]]) -> tuple[float, float]:
    """Return the training accuracy over steps 16 to 20 and its standard error over problems, in points."""
    accuracy, errors = (curves[f"train/accuracy/{key}"][15:20] for key in ("mean", "standard_error"))
    return 20 * sum(accuracy), 20 * float(np.linalg.norm(errors))


def parts(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the tables of MAGIC's parts: each run with its difference to ``base``, and the verdicts over seeds.

    ``base`` is the first 20 steps of the RL run with the same seed. A run that differs from it in its first step, which
    is before any update, is not compared.
    """
    bases = {run["seed"]: run["curves"] for name, run in runs.items() if name.startswith("family-")}
    found: dict[str, dict[int, Mapping[str, Any]]] = {"base": {}}
    for name, run in runs.items():
        seed, curves = run["seed"], run["curves"]
        if name.startswith("parts-") and curves["length/mean"][0] == bases[seed]["length/mean"][0]:
            found["base"][seed] = {"curves": bases[seed]}
            found.setdefault(name.removeprefix("parts-").rpartition("-")[0], {})[seed] = run
    if not found["base"]:
        return ["No run has ended."]
    lines = [
        "| variant | seed | steps 16 to 20 | minus `base` | greedy after | updates | sampled tokens | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    differences: dict[str, list[float]] = {}
    for variant, by_seed in found.items():
        for seed, run in sorted(by_seed.items()):
            curves = {key: values[:20] for key, values in run["curves"].items()}
            (accuracy, error), (known, other) = late(curves), late(bases[seed])
            minus, half, greedy = accuracy - known, 1.96 * float(np.hypot(error, other)), ""
            if variant != "base":
                differences.setdefault(variant, []).append(minus)
                after = run["tests"]["after"]["0.0"]
                greedy = with_interval(after["accuracy"]) if len(after["per_problem"]) >= LEAST_TESTED else ""
            cells = ["" if variant == "base" else f"{minus:+.1f} ({minus - half:+.1f} to {minus + half:+.1f})", greedy]
            updates, tokens = sum(filter(None, curves["learner/sgd_steps"])), 256 * sum(curves["length/mean"])
            cells += [f"{updates:.0f}", f"{tokens:,.0f}"]
            cells += [f"{sum(curves['time/rollout_cpu'] + curves['time/train_cpu']):.0f}"]
            shown = f"{accuracy:.1f} ({accuracy - 1.96 * error:.1f} to {accuracy + 1.96 * error:.1f})"
            lines.append(f"| `{variant}` | {seed} | {shown} | {' | '.join(cells)} |")
    decided = {name: d for name, d in differences.items() if name in PREMISES and len(d) == SEEDS}
    p_values = holm([2 * float(stats.t.sf(abs(np.mean(d)) / stats.sem(d), len(d) - 1)) for d in decided.values()])
    corrected = dict(zip(decided, p_values, strict=True))
    lines += ["", "| variant | premise | mean difference | over seeds (95 %) | verdict |", "|---|---|---|---|---|"]
    for variant in sorted(differences.keys() & PREMISES.keys()):
        pairs = [(run["curves"], bases[seed]) for seed, run in found[variant].items()]
        met = all(late(base)[0] >= LEAST_LEARNED and PREMISES[variant](own, base) for own, base in pairs)
        values = differences[variant]
        mean, half = float(np.mean(values)), float("inf")
        if len(values) > 1:
            half = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
        verdict = "undecided"
        if met and corrected.get(variant, 1.0) < 0.05:
            verdict = "higher" if mean > 0 else "lower"
        elif met and variant in decided and abs(mean) + half <= EQUAL:
            verdict = "no difference"
        interval = f"{mean - half:+.1f} to {mean + half:+.1f}" if len(values) > 1 else ""
        cells = ["met" if met else "not met", f"{mean:+.1f}", interval, f"{verdict}, {len(values)} of {SEEDS} seeds"]
        lines.append(f"| `{variant}` | {' | '.join(cells)} |")
    return lines


def over_seeds(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean of paired differences with Student's interval of 95 % over seeds."""
    mean, half = float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return f"{mean:+.{digits}f} ({mean - half:+.{digits}f} to {mean + half:+.{digits}f})"


def tiny(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table of C18: validation, greedy test accuracy and length of each variant, less those of `uniform`."""
    lines = [
        "| variant | at steps 10, 20, 30, 40 | mean minus `uniform` | greedy after | minus `uniform` | length at 40 |",
        "|---|---|---|---|---|---|",
    ]
    found: dict[str, dict[int, tuple[list[float], float, float]]] = {}
    for name, run in runs.items():
        if name.startswith("tiny-"):
            accuracy = [100 * x for x in run["curves"]["validation/accuracy/mean"] if x is not None]
            greedy = 100 * run["tests"]["after"]["0.0"]["accuracy"]["mean"]
            length = run["curves"]["validation/length/mean"][-1]
            found.setdefault(name.split("-")[1], {})[run["seed"]] = accuracy, greedy, length
    for variant, by_seed in found.items():
        curves, greedy, lengths = zip(*by_seed.values(), strict=True)
        cells = [", ".join(f"{x:.1f}" for x in np.mean(curves, axis=0)), "", f"{np.mean(greedy):.1f}", ""]
        if variant != "uniform":
            pairs = [(one, found["uniform"][seed]) for seed, one in by_seed.items()]
            cells[1] = over_seeds([float(np.mean(own[0]) - np.mean(base[0])) for own, base in pairs])
            cells[3] = over_seeds([own[1] - base[1] for own, base in pairs])
        lines.append(f"| `{variant}` | {' | '.join(cells)} | {np.mean(lengths):.1f} |")
    return lines


def other_tasks(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the tables of the other tasks: their runs at temperature 1, and the screening."""
    others = {
        name: run for name, run in runs.items() if name.partition("-")[0] not in ("family", "own", "parts", "tiny")
    }
    lines = [
        "| run | steps | right, first two | right, last two | truncated | without a model | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in others.items():
        right, long = run["curves"]["train/accuracy/mean"], run["curves"]["train/truncation/ratio"]
        rule = max(run["baselines"], key=run["baselines"].__getitem__)
        cells = [percent(sum(values) / 2) for values in (right[:2], right[-2:])]
        cells += [f"{percent(long[0])} to {percent(long[-1])}", f"{percent(run['baselines'][rule])} ({rule})"]
        lines.append(f"| {name} | {len(right)} | {' | '.join(cells)} | {run['cpu_seconds']} |")
    tested = {name: run for name, run in others.items() if "after" in run["tests"]}
    if tested:
        lines += ["", "| run | greedy before | greedy after | at 1 before | at 1 after |", "|---|---|---|---|---|"]
    for name, run in tested.items():
        pair = [run["tests"][when] for when in ("before", "after")]
        cells = [with_interval(tests[tau]["accuracy"]) for tau in HOW for tests in pair]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    screening = json.loads((RESULTS / "screening.json").read_text(encoding="utf-8"))
    rows = screening["rows"]
    sampled = {name: row for name, row in rows.items() if "left_out" not in row}
    lines += [
        "",
        f"The screening sampled {len(sampled)} tasks, {screening['cpu_seconds']} CPU seconds. In percent:\n",
        "| task | pass@1 | pass@8 | mixed groups | tokens | truncated |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in sorted(sampled.items(), key=lambda item: -item[1]["mixed"]):
        if row["mixed"] >= LEAST_MIXED:
            cells = [percent(row[key]) for key in ("accuracy", "found", "mixed")]
            lines.append(f"| {name} | {' | '.join(cells)} | {row['length']:.0f} | {percent(row['truncated'])} |")
    fewer = sorted(name for name, row in sampled.items() if row["mixed"] < LEAST_MIXED)
    text = (
        f"Fewer than {percent(LEAST_MIXED)} % mixed groups: {', '.join(fewer)}. Left out for the length of prompts or "
    )
    text += f"answers, or for want of a reference answer: {len(rows) - len(sampled)} tasks."
    return [*lines, "", *textwrap.wrap(text, 119, break_on_hyphens=False)]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("collect").add_argument("runs", type=Path, nargs="+")
    commands.add_parser("page")
    given = parser.parse_args()
    if given.command == "collect":
        RESULTS.mkdir(parents=True, exist_ok=True)
        for run in given.runs:
            (RESULTS / f"{run.name}.json").write_text(json.dumps(collect(run)) + "\n", encoding="utf-8")
        return
    files = sorted(RESULTS.glob("*-*.json"))
    runs: dict[str, Any] = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}
    family = [run for name, run in runs.items() if name.startswith("family-")]
    tables = {"baseline": supervised(runs), "parts": parts(runs), "tasks": other_tasks(runs)}
    for page, name, content in (
        (PAGE, "results", results(family)),
        *((PAGE, name, "\n".join(lines) + "\n") for name, lines in tables.items()),
        (CLAIMS, "tiny", "\n".join(tiny(runs)) + "\n"),
    ):
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        head, _, rest = page.read_text(encoding="utf-8").partition(begin)
        page.write_text(f"{head}{begin}\n{content}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
    steps = [len(run["curves"][CURVES[0]]) for run in family]
    drawn = [run for run, length in zip(family, steps, strict=True) if length == max(steps)]
    drawn += [run for name, run in runs.items() if name.startswith("own-")]
    FIGURE.write_text(figure(drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
