"""lm-evaluation-harness's own filters and metrics on texts that are given: no model, no data set, no network.

Run by ``harness_agreement.py`` with the Python of an environment that has lm_eval (``pip install 'lm_eval[math]'``).
Reads JSON lines ``{"key", "form", "gold", "response"}`` and writes ``{"key", "scores", "read"}``: a score (0 or 1) and
what was read as the answer, by scorer. Nothing of magicrl is imported.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lm_eval
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import exact_match_fn
from lm_eval.filters import build_filter_ensemble

TASKS = Path(lm_eval.__file__).parent / "tasks"
WORD_PROBLEMS = ("gsm8k/gsm8k.yaml", "gsm8k/gsm8k-cot-zeroshot.yaml")
Scorer = Callable[[str, str], tuple[float, str]]


def word_problem_scorers() -> Iterator[tuple[str, Scorer]]:
    """Every filter of the GSM8K tasks with the tasks' exact match, as their files have them."""
    seen: list[Any] = []
    for path in WORD_PROBLEMS:
        task = yaml.safe_load((TASKS / path).read_text())
        options = {
            k: v for k, v in task["metric_list"][0].items() if k not in ("metric", "aggregation", "higher_is_better")
        }
        for filters in task["filter_list"]:
            steps = [(f["function"], {k: v for k, v in f.items() if k != "function"}) for f in filters["filter"]]
            if (steps, options) in seen:
                continue
            seen.append((steps, options))
            yield f"{task['task']} {filters['name']}", _filtered(filters["name"], steps, options)


def _filtered(name: str, steps: list[Any], options: dict[str, Any]) -> Scorer:
    ensemble = build_filter_ensemble(name, steps)

    def score(gold: str, response: str) -> tuple[float, str]:
        instance = Instance(request_type="generate_until", doc={}, arguments=(), idx=0, resps=[response])
        ensemble.apply([instance])
        read = instance.filtered_resps[name]
        return float(exact_match_fn(predictions=[read], references=[gold], **options)["exact_match"]), str(read)

    return score


def maths_scorers() -> Iterator[tuple[str, Scorer]]:
    """The MATH-500 tasks' own scoring functions."""
    minerva, hendrycks = _utils("minerva_math"), _utils("hendrycks_math")

    def math_verify(gold: str, response: str) -> tuple[float, str]:
        doc = {"answer": minerva.normalize_final_answer(gold), "solution": f"$\\boxed{{{gold}}}$"}
        read = minerva.parse(response)
        return float(minerva.process_results(doc, [response])["math_verify"]), str(read[-1]) if read else "[none]"

    def minerva_match(gold: str, response: str) -> tuple[float, str]:
        doc = {"answer": minerva.normalize_final_answer(gold), "solution": f"$\\boxed{{{gold}}}$"}
        read = minerva.get_unnormalized_answer(response)
        return float(minerva.process_results(doc, [response])["exact_match"]), read

    def hendrycks_match(gold: str, response: str) -> tuple[float, str]:
        doc = {"solution": f"$\\boxed{{{gold}}}$"}
        marks = [place for place, character in enumerate(response) if character == "$"]
        read = response if len(marks) <= 1 else response[marks[0] + 1 : marks[-1]]
        return float(hendrycks.process_results(doc, [response])["exact_match"]), read

    yield "minerva_math500 math_verify", math_verify
    yield "minerva_math500 exact_match", minerva_match
    yield "hendrycks_math500 exact_match", hendrycks_match


def _utils(task: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peer_{task}", TASKS / task / "utils.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Score standard input onto standard output; the first line says the versions."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # a task's functions print warnings
        scorers = {"number": dict(word_problem_scorers()), "maths": dict(maths_scorers())}
        names = ("lm_eval", "math-verify", "sympy")
        out.write(json.dumps({"versions": {name: importlib.metadata.version(name) for name in names}}) + "\n")
        for line in sys.stdin:
            item = json.loads(line)
            found = {n: score(item["gold"], item["response"]) for n, score in scorers[item["form"]].items()}
            scores, read = ({n: pair[i] for n, pair in found.items()} for i in (0, 1))
            out.write(json.dumps({"key": item["key"], "scores": scores, "read": read}) + "\n")


if __name__ == "__main__":
    main()
