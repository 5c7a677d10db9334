"""Settings of published evaluations by name, and Table 13 of the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from magicrl.config.loader import shipped_table
from magicrl.config.section import Section
from magicrl.records import TOKEN_FILTERS
from magicrl_verifiers.records import Extract

TABLE13_SETS = ("aime24", "aime25", "livecodebench")


class Preset(Section):
    """Settings of a published evaluation, by the name given to ``--preset``."""

    name: str
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 32768
    samples: Mapping[str, int]  # samples per problem, by benchmark
    other_samples: int = 4
    extract: Extract = "box"  # whether an answer must be in a box
    mean_of: tuple[str, ...] = ()  # sets whose mean is the preset's score
    source: str  # source of the settings, and decisions of this project

    def samples_for(self, benchmark: str) -> int:
        return self.samples.get(benchmark, self.other_samples)


_PRESETS = (
    Preset(
        name="report",
        samples={"aime24": 32, "aime25": 32, "livecodebench": 4},
        source="Table 13 of the report; 4 samples for sets it does not have are a decision of magicrl",
    ),
    Preset(
        name="released-code",
        temperature=0.6,
        samples={"aime24": 32, "aime25": 32, "livecodebench": 4},
        source="temperature of the released evaluation scripts; the rest as in `report`",
    ),
    Preset(
        name="study",
        samples={"aime24": 8, "aime25": 8, "livecodebench": 1},
        other_samples=8,
        mean_of=TABLE13_SETS,
        source="the test metric of the report's ablations: mean of AIME24 avg@8, AIME25 avg@8, LiveCodeBench "
        "pass@1; the limit is Table 13's, since the study's is not stated",
    ),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}
NO_PRESET = Preset(
    name="none", max_tokens=4096, samples={}, other_samples=1, extract="lenient", source="defaults of magicrl eval"
)
"""Settings of an evaluation without a preset."""


def table13() -> tuple[list[dict[str, Any]], str]:
    """Return the rows of Table 13 of the report, in per cent (None if the report has no figure), and a note on them."""
    table = shipped_table("evaluation/table13.toml", dict[str, Any])
    return [{name: row.get(name) for name in ("model", *TABLE13_SETS)} for row in table["rows"]], table["note"]


def average(row: Mapping[str, Any]) -> float | None:
    """Return the mean of a row's three figures; None if one is missing."""
    figures = [row.get(name) for name in TABLE13_SETS]
    return None if None in figures else sum(cast("list[float]", figures)) / len(figures)


def differs_from_preset(
    preset: Preset, settings: Mapping[str, Any], source: Mapping[str, Any], *, samples: int, verifiers: Iterable[str]
) -> list[str]:
    """Return how a benchmark's evaluation differs from a preset, on the whole set and with the set's own verifier.

    Args:
        preset: settings to compare with.
        settings: ``decides`` of the job.
        source: facts about its problems.
        samples: number per problem.
        verifiers: verifiers of its problems.
    """
    benchmark, sampling, judging = settings["benchmark"], settings["sampling"], settings["judging"]
    # what a server was sent instead; null leaves the value to the server
    sent = {name: "of the server" if v is None else v for name, v in settings["engine"].get("extra", {}).items()}
    wanted = {**TOKEN_FILTERS, **{name: getattr(preset, name) for name in ("temperature", "top_p", "max_tokens")}}
    # earlier evaluations have no entry of filters that were off
    pairs = [(n, sent.get(n, sampling.get(n, TOKEN_FILTERS.get(n))), value) for n, value in wanted.items()]
    pairs.append(("extract", judging["extract"], preset.extract))
    pairs.append(("verifier", ", ".join(sorted({*verifiers})), "code" if benchmark == "livecodebench" else "maths"))
    pairs.append(("samples per problem", samples, preset.samples_for(benchmark)))
    facts = {
        "reasoning none": judging["reasoning"] == "none",
        "an environment": "environments" in settings,
        "another text around the prompts": source.get("template_given"),
        "not known to be the whole set": not source["whole"],
    }
    return [f"{k} {now} instead of {v}" for k, now, v in pairs if now != v] + [
        fact for fact, is_so in facts.items() if is_so
    ]


def rows_with(results: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the rows of Table 13 and a row for a result: per cent by set and the computed average.

    Args:
        results: accuracy in [0, 1] by benchmark, for comparable benchmarks.
    """
    own = {"model": "this result", **{name: 100 * results[name] if name in results else None for name in TABLE13_SETS}}
    return [row | {"average": average(row)} for row in (*table13()[0], own)]
