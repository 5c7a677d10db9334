"""The options of ``magicrl eval`` in their groups, as the command line reads them and ``--help`` shows them.

Only light imports: ``--help`` must be instant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

Flag = Annotated[bool, Parameter(negative=())]
Overrides = Annotated[list[str] | None, Parameter(name="--set", negative=(), consume_multiple=False)]
Several = Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False)]


def _group(title: str, place: int) -> Parameter:
    """Options shown under one title, their names without a prefix."""
    return Parameter(name="*", group=Group(title, sort_key=place))


@_group("What is evaluated", 0)
@dataclass(frozen=True, kw_only=True, slots=True)
class AskedOptions:
    """Model, benchmarks and place."""

    model: str | None = None
    """A model folder, or a hub name; with --engine openai the name that the server knows it by."""
    run: Path | None = None
    """In place of a model: the checkpoints of this run, each into its own folder of the output."""
    follow: Flag = False
    """With --run: go on with new checkpoints until the run ends."""
    benchmark: Several = None
    """NAME, NAME=FILE, FILE or reasoning_gym/TASK (repeatable); --list shows the names."""
    output: Path | None = None
    """The evaluation's folder; the same command again goes on where it stopped."""
    shard: str = "0/1"
    """I/N: only every N-th problem, beginning with the I-th (from 0). Shards share an output."""


@_group("Sampling", 1)
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How responses are drawn."""

    preset: Literal["report", "released-code", "study"] | None = None
    """report: Table 13's settings; released-code: the same at temperature 0.6; study: the ablations' metric."""
    samples: int | None = None
    """Samples a problem; default: the preset's, or 1."""
    temperature: float | None = None
    """Of sampling; default: the preset's, or 1. 0 is greedy."""
    max_tokens: int | None = None
    """The response limit; default: the preset's, or 4096."""
    fresh_limits: str | None = None
    """Sample anew at each of these response limits, too, e.g. 1024,2048, beside the curve that is cut from one set."""
    seed: int = 0
    """Of the sampling."""
    keep_tokens: Flag = False
    """Keep token ids and entropies with the samples."""


@_group("Problems", 2)
@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemOptions:
    """Which problems of a benchmark, and how its records are read."""

    limit: int | None = None
    """The first so many problems of each benchmark."""
    limit_seed: int | None = None
    """Draw them at random with this seed in place of the first ones."""
    template: str | None = None
    """Text around each prompt in place of the benchmark's; holds {prompt}."""
    field: Several = None
    """prompt=COLUMN, answer=COLUMN, id=COLUMN or level=COLUMN for a file of another form (repeatable)."""
    verifier: str | None = None
    """maths, exact, code or a reward of your own (my_reward.py:score), in place of the benchmark's."""
    window: str | None = None
    """FIRST..LAST day of problems that have one, e.g. 2024-08-01..2025-02-01; default: the benchmark's."""


@_group("Judging", 3)
@dataclass(frozen=True, kw_only=True, slots=True)
class JudgingOptions:
    """How an answer is found and judged."""

    reasoning: Literal["auto", "required", "none"] | None = None
    """How the answer is found, as in magicrl verify math; default: required where the chat template opens the
    reasoning, else auto."""
    extract: Literal["lenient", "box"] | None = None
    """box: only a boxed answer counts; lenient: another counts, too; default: the preset's, or lenient."""
    time_limit: float = 10.0
    """CPU seconds of judging one response (one test, for code)."""
    workers: int | None = None
    """Verifier processes; default: the cores this process may use."""


@_group("Engine", 4)
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What generates."""

    engine: str = "in_process"
    """in_process, vllm (this machine), openai (any OpenAI-compatible server), or your own as file.py:function."""
    engine_option: Several = None
    """NAME=VALUE of that engine, e.g. base_url=http://localhost:8000/v1 (repeatable)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights in memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    max_rows: int = 32
    """Sequences that decode at once."""
    memory_limit_mb: int = 4096
    """MiB of the key/value cache."""
    threads: int | None = None
    """Of torch; default: the cores this process may use."""


@_group("Scores", 5)
@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOptions:
    """What is computed from the samples."""

    pass_at: str | None = None
    """pass@k for these k, e.g. 1,4; default: powers of two."""
    majority_at: str | None = None
    """maj@k for these k; default: the largest power of two."""
    price_in: float | None = None
    """What a million prompt tokens cost, for the estimate and the account in results.json."""
    price_out: float | None = None
    """What a million response tokens cost."""


@_group("In place of an evaluation", 6)
@dataclass(frozen=True, kw_only=True, slots=True)
class InsteadOptions:
    """What needs no model."""

    merge: Flag = False
    """Only score what is in --output: the shards' samples, or those there are with other k and prices."""
    compare: Annotated[list[Path] | None, Parameter(negative=(), consume_multiple=True)] = None
    """Evaluation folders: the paired differences of each from the first; with --output DIR they and the curves are
    written to DIR/comparison.json."""
    list_benchmarks: Annotated[bool, Parameter(name="--list", negative=())] = False
    """Show the benchmarks."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """All of them."""

    asked: AskedOptions = field(default_factory=AskedOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    problems: ProblemOptions = field(default_factory=ProblemOptions)
    judging: JudgingOptions = field(default_factory=JudgingOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    scores: ScoreOptions = field(default_factory=ScoreOptions)
    instead: InsteadOptions = field(default_factory=InsteadOptions)


EVERY_DEFAULT = EvalOptions()
