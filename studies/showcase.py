"""Results of the showcase (docs/evidence/showcase.md): ``python -m studies.showcase collect RUN`` and ``... page``.

``collect`` writes what the page needs of a finished run of the recipe ``family`` to
``studies/results/showcase/NAME.json``. ``page`` writes the results of all these files into the page, and its figure.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from magicrl.config.schema import SourceConfig
from magicrl.data.sources import load_problems
from magicrl.records import Problem
from magicrl.reporting.charts import Chart, Series, draw

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "studies" / "results" / "showcase"
PAGE = ROOT / "docs" / "evidence" / "showcase.md"
FIGURE = ROOT / "docs" / "figures" / "showcase.svg"
BEGIN, END = "<!-- begin results -->\n", "<!-- end results -->"
CURVES = (
    "train/accuracy/mean",
    "groups/rejected/ratio",
    "entropy/exact/mean",
    "length/mean",
    "train/truncation/ratio",
    "learner/grad_norm",
)
RULE, MARGIN, PREMISE = 0.293, 0.15, 0.05


def collect(run: Path) -> dict[str, Any]:
    """Return the part of a run folder that the page needs."""
    config = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    tests = {}
    for moment in ("before", "after"):
        document = json.loads((run / "evaluations" / f"{moment}-held_out.json").read_text(encoding="utf-8"))
        keep = ("accuracy", "pass_at", "length_mean", "truncation", "entropy", "per_problem")
        tests[moment] = {tau: {key: found[key] for key in keep} for tau, found in document["temperatures"].items()}
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "name": run.name,
        "seed": config["run"].get("seed", 0),
        "train": config["data"]["train"],
        "test": config["data"]["test"]["held_out"],
        "status": record["status"],
        "curves": {key: [step["values"].get(key) for step in steps] for key in CURVES},
        "tests": tests,
        "environment": record["environments"][-1],
    }


def problems_of(source: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of a recipe's source."""
    return load_problems(SourceConfig.model_validate(dict(source)))


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


def results(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the page's results of these runs."""
    test = problems_of(runs[0]["test"])
    rules = baselines(problems_of(runs[0]["train"][0]), test)
    bar = max(RULE, rules["'son' or 'wife' by the name's gender"]) + MARGIN
    greedy = [run["tests"]["after"]["0.0"]["accuracy"]["mean"] for run in runs]
    before = [run["tests"]["before"]["0.0"]["accuracy"]["mean"] for run in runs]
    held = all(value >= bar for value in greedy) and all(value <= PREMISE for value in before)
    seeds = f"{len(runs)} seed{'s' if len(runs) > 1 else ''}"
    lines = [
        f"SmolLM2-135M-Instruct as published goes from {percent(max(before))} % to {', '.join(map(percent, greedy))} % "
        f"greedy on {len(test)} test problems ({seeds}), with reinforcement learning alone.",
        f"The claim that was stated before, at least {percent(bar)} % with every seed, "
        f"{'holds' if held else 'fails'}.\n",
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
        raw = [100 * value for value in run["curves"]["train/accuracy/mean"]]
        windows = [raw[max(0, i - 4) : i + 1] for i in range(len(raw))]
        mean = [sum(window) / len(window) for window in windows]
        series.append(Series(label=run["name"], points=tuple(enumerate(mean, start=1)), color=number))
        label = f"{run['name']}, raw"
        series.append(Series(label=label, points=tuple(enumerate(raw, start=1)), color=number, style="faint"))
    chart = Chart(key="showcase", title="Right answers in training, percent", series=tuple(series), y_low=0.0)
    return str(draw(chart, alone=True))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("collect").add_argument("run", type=Path)
    commands.add_parser("page")
    given = parser.parse_args()
    if given.command == "collect":
        RESULTS.mkdir(parents=True, exist_ok=True)
        found = collect(given.run)
        (RESULTS / f"{found['name']}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        return
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("family-?.json"))]
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{results(runs)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    FIGURE.write_text(figure(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
