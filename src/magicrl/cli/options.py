"""The options of ``magicrl eval`` under the titles of ``--help``, and types of options that commands share.

Only light imports: ``--help`` must be instant.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

Flag = Annotated[bool, Parameter(negative=())]
Overrides = Annotated[list[str] | None, Parameter(name="--set", negative=(), consume_multiple=False)]
Several = Annotated[list[str] | None, Parameter(negative=(), consume_multiple=False)]


_TITLES = ("What is evaluated", "Sampling", "Problems", "Judging", "Engine", "Scores", "In place of an evaluation")
_ASKED, _SAMPLING, _PROBLEMS, _JUDGING, _ENGINE, _SCORES, _INSTEAD = (
    Parameter(group=Group(title, sort_key=place)) for place, title in enumerate(_TITLES)
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions:
    """All options of ``magicrl eval``."""

    model: Annotated[str | None, _ASKED] = None
    """A model folder, or a hub name; with --engine openai the name that the server knows it by."""
    run: Annotated[Path | None, _ASKED] = None
    """In place of a model: the checkpoints of this run, each into its own folder of the output."""
    follow: Annotated[Flag, _ASKED] = False
    """With --run: go on with new checkpoints until the run ends."""
    benchmark: Annotated[Several, _ASKED] = None
    """NAME, NAME=FILE, FILE or reasoning_gym/TASK (repeatable); --list shows the names."""
    output: Annotated[Path | None, _ASKED] = None
    """The evaluation's folder; the same command again goes on where it stopped."""
    shard: Annotated[str, _ASKED] = "0/1"
    """I/N: only every N-th problem, beginning with the I-th (from 0). Shards share an output."""
    preset: Annotated[Literal["report", "released-code", "study"] | None, _SAMPLING] = None
    """report: Table 13's settings; released-code: the same at temperature 0.6; study: the ablations' metric."""
    samples: Annotated[int | None, _SAMPLING] = None
    """Samples a problem; default: the preset's, or 1."""
    temperature: Annotated[float | None, _SAMPLING] = None
    """Of sampling; default: the preset's, or 1. 0 is greedy."""
    max_tokens: Annotated[int | None, _SAMPLING] = None
    """The response limit; default: the preset's, or 4096."""
    fresh_limits: Annotated[str | None, _SAMPLING] = None
    """Sample anew at each of these response limits, too, e.g. 1024,2048, beside the curve that is cut from one set."""
    seed: Annotated[int, _SAMPLING] = 0
    """Of the sampling."""
    keep_tokens: Annotated[Flag, _SAMPLING] = False
    """Keep token ids and entropies with the samples."""
    limit: Annotated[int | None, _PROBLEMS] = None
    """The first so many problems of each benchmark."""
    limit_seed: Annotated[int | None, _PROBLEMS] = None
    """Draw them at random with this seed in place of the first ones."""
    template: Annotated[str | None, _PROBLEMS] = None
    """Text around each prompt in place of the benchmark's; holds {prompt}."""
    field: Annotated[Several, _PROBLEMS] = None
    """prompt=COLUMN, answer=COLUMN, id=COLUMN or level=COLUMN for a file of another form (repeatable)."""
    verifier: Annotated[str | None, _PROBLEMS] = None
    """maths, exact, code or a reward of your own (my_reward.py:score), in place of the benchmark's."""
    judge: Annotated[str | None, _JUDGING] = None
    """A training recipe's file or name: the served model of its [verifier.judge] judges every response."""
    environment: Annotated[str | None, _PROBLEMS] = None
    """calculator, guessing or one of your own (game.py:Game), which answers each turn of a response."""
    max_turns: Annotated[int, _SAMPLING] = 8
    """Turns of a response to an environment; one that is not done then is cut."""
    max_observation_tokens: Annotated[int, _SAMPLING] = 256
    """Of what an environment answers to a turn; a longer observation is cut."""
    window: Annotated[str | None, _PROBLEMS] = None
    """FIRST..LAST day of problems that have one, e.g. 2024-08-01..2025-02-01; default: the benchmark's."""
    reasoning: Annotated[Literal["auto", "required", "none"] | None, _JUDGING] = None
    """How the answer is found, as in magicrl verify math; default: required where the chat template opens the
    reasoning, else auto."""
    extract: Annotated[Literal["lenient", "box"] | None, _JUDGING] = None
    """box: only a boxed answer counts; lenient: another counts, too; default: the preset's, or lenient."""
    time_limit: Annotated[float, _JUDGING] = 10.0
    """CPU seconds of judging one response (one test, for code)."""
    workers: Annotated[int | None, _JUDGING] = None
    """Verifier processes; default: the cores this process may use."""
    engine: Annotated[str, _ENGINE] = "in_process"
    """in_process, vllm (this machine), openai (any OpenAI-compatible server), or your own as file.py:function."""
    engine_option: Annotated[Several, _ENGINE] = None
    """NAME=VALUE of that engine, e.g. base_url=http://localhost:8000/v1 (repeatable)."""
    # `config.schema.DType` again: the help loads no pydantic
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], _ENGINE] = "float32"
    """Precision of the weights in memory."""
    device: Annotated[Literal["auto", "cpu", "cuda"], _ENGINE] = "auto"
    """Where the model runs."""
    max_rows: Annotated[int, _ENGINE] = 32
    """Sequences that decode at once."""
    memory_limit_mb: Annotated[int, _ENGINE] = 4096
    """MiB of the key/value cache."""
    threads: Annotated[int | None, _ENGINE] = None
    """Of torch; default: the cores this process may use."""
    pass_at: Annotated[str | None, _SCORES] = None
    """pass@k for these k, e.g. 1,4; default: powers of two."""
    majority_at: Annotated[str | None, _SCORES] = None
    """maj@k for these k; default: the largest power of two."""
    price_in: Annotated[float | None, _SCORES] = None
    """What a million prompt tokens cost, for the estimate and the account in results.json."""
    price_out: Annotated[float | None, _SCORES] = None
    """What a million response tokens cost."""
    merge: Annotated[Flag, _INSTEAD] = False
    """Only score what is in --output: the shards' samples, or those there are with other k and prices."""
    compare: Annotated[list[Path] | None, Parameter(negative=(), consume_multiple=True), _INSTEAD] = None
    """Evaluation folders: the paired differences of each from the first; with --output DIR they and the curves are
    written to DIR/comparison.json."""
    list_benchmarks: Annotated[bool, Parameter(name="--list", negative=()), _INSTEAD] = False
    """Show the benchmarks."""


EVERY_DEFAULT = EvalOptions()
