"""Options of an evaluation, and the observer that follows it. Only light imports, so that ``--help`` is instant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from datetime import date
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Protocol

from magicrl import registry
from magicrl.config.errors import RecipeError
from magicrl.config.given import Data, PathText, Recipe, Reward, given_recipe, path_text, reward_reference
from magicrl.config.loader import load_train_recipe
from magicrl.config.model_schema import DType
from magicrl.config.schema import EnvironmentConfig
from magicrl.config.verifier_schema import JudgeConfig
from magicrl.evaluation.presets import NO_PRESET, PRESETS, Preset
from magicrl.evaluation.samples import SampleRow
from magicrl.records import Problem, SamplingParams
from magicrl_verifiers.batch import usable_cores
from magicrl_verifiers.records import Extract, JudgeOptions, Reasoning

Benchmarks = PathText | Sequence[PathText] | Mapping[str, Data]
Counts = str | Sequence[int]
"""Numbers, or a text of numbers separated by commas."""
Pairs = Mapping[str, Any] | Sequence[str]
"""Names and values, or texts ``NAME=VALUE``."""
FILTERS: Mapping[str, Callable[[Any, Problem], bool] | None] = {
    # a problem's prompt is without template and earlier turns here
    "levels": lambda levels, problem: problem.level in levels,
    "limit": None,
    "limit_seed": None,
}
"""Options that leave out problems, by name: whether a value keeps a problem. None: it depends on the other problems.

``eval --run`` compares them with those of earlier evaluations."""
_COUNTS = {"levels": 0, "fresh_limits": 1, "pass_at": 1, "majority_at": 1}
"""Options of several numbers, and the smallest number of each."""
_LEAST = {"samples": 1, "limit": 1, "workers": 1, "threads": 1}
"""The smallest value of options that nothing else checks: a 0 would count as not given."""
Window = tuple[date | None, date | None]
"""First and last day; None: no bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Prices per million prompt and response tokens, in the user's currency."""

    per_million_in: float = 0.0
    per_million_out: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("--price-in", self.per_million_in), ("--price-out", self.per_million_out)):
            if not 0 <= value < float("inf"):
                raise RecipeError(f"{name} {value}: give what a million tokens cost, 0 or more")

    def of(self, tokens_in: int, tokens_out: int) -> float:
        """Return the price of a number of prompt and response tokens."""
        return (tokens_in * self.per_million_in + tokens_out * self.per_million_out) / 1e6


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCost:
    """Upper bounds of the cost of a benchmark's job: missing samples and their tokens."""

    name: str
    problems: int
    samples: int  # per problem
    missing: int
    wanted: int  # samples of this shard
    max_tokens: int
    prompt_tokens: int | None = None  # of the missing samples; None if a server makes the prompts
    price: Price | None = None

    @property
    def most_tokens(self) -> int:
        return self.missing * self.max_tokens

    @property
    def most_price(self) -> float | None:
        """The highest price; None without prices, or if prompts have a price and an unknown number of tokens."""
        if self.price is None or (self.prompt_tokens is None and self.price.per_million_in):
            return None
        return self.price.of(self.prompt_tokens or 0, self.most_tokens)


class EvaluationObserver(Protocol):
    """A receiver of an evaluation's events. It must not change the evaluation."""

    def cost(self, costs: Sequence[JobCost]) -> None: ...  # before anything is generated
    def note(self, text: str) -> None: ...  # a remark for the user
    def progress(self, name: str, done: int, total: int) -> None: ...
    def sample(self, name: str, row: SampleRow) -> None: ...  # a judged sample
    # after the pilot: estimated seconds for the rest, and the mean length of responses
    def estimate(self, name: str, seconds: float, mean_tokens: float) -> None: ...


@dataclass(frozen=True)
class EvaluationOptions:
    """Arguments of `magicrl.evaluate` and options of ``magicrl eval``, which every part of an evaluation reads.

    Types, defaults and help of the options are here only. The properties give options that are texts or may be missing
    in the form that the parts need.
    """

    model: PathText
    """A model folder, or a hub name; with openai as the engine the name that the server knows it by."""
    benchmarks: Benchmarks
    """NAME, NAME=FILE, FILE or reasoning_gym/TASK (repeatable); --list shows the names. In Python also a dict of names
    to records, problems, a data frame or a function."""
    _: KW_ONLY
    output: PathText
    """The evaluation's folder; the same call again continues where it stopped."""
    shard: str = "0/1"
    """I/N: only every N-th problem, beginning with the I-th (from 0). Shards share an output."""
    preset: Literal["report", "released-code", "study"] | None = None
    """report: Table 13's settings; released-code: the same at temperature 0.6; study: the ablations' metric."""
    samples: int | None = None
    """Samples per problem; default: the preset's, or 1."""
    temperature: float | None = None
    """Sampling temperature; default: the preset's, or 1. 0 is greedy."""
    top_p: float | None = None
    """Sample only from the most likely tokens that together have this probability; default: the preset's, or 1."""
    top_k: int = 0
    """Sample only from this many most likely tokens; 0: all."""
    max_tokens: int | None = None
    """The response limit; default: the preset's, or 4096."""
    fresh_limits: Counts | None = None
    """Sample again at each of these response limits, e.g. 1024,2048, in addition to the curve that is computed by
    truncating one set."""
    seed: int = 0
    """Seed of the sampling."""
    keep_tokens: bool = False
    """Keep token ids and entropies with the samples."""
    max_turns: int = 8
    """Turns of a response to an environment; a response that is not done then is truncated."""
    max_observation_tokens: int = 256
    """Tokens of one reply of an environment; a longer one is truncated."""
    levels: Counts | None = None
    """Only problems of these levels, e.g. 4,5."""
    limit: int | None = None
    """Number of problems of each benchmark, from the first on."""
    limit_seed: int | None = None
    """Draw these at random with this seed instead."""
    template: str | None = None
    """Text around each prompt in place of the benchmark's; holds {prompt}."""
    fields: Pairs | None = None
    """prompt=COLUMN, answer=COLUMN, id=COLUMN or level=COLUMN for a file of another form (repeatable)."""
    reward: Reward | None = None
    """maths, exact, code or a custom reward (my_reward.py:score), in place of the benchmark's verifier."""
    environment: str | None = None
    """calculator, guessing or a custom one (game.py:Game), which answers each turn of a response."""
    window: str | None = None
    """FIRST..LAST day of problems that have one, e.g. 2024-08-01..2025-02-01; default: the benchmark's."""
    judge: Recipe | None = None
    """A training recipe's file or name: the served model of its [verifier.judge] judges every response."""
    reasoning: Reasoning | None = None
    """How the answer is found, as in magicrl verify math; default: required if the chat template opens the reasoning,
    else auto."""
    extract: Extract | None = None
    """box: only a boxed answer counts; lenient: another counts, too; default: the preset's, or lenient."""
    time_limit: float = 10.0
    """CPU seconds of judging one response (one test, for code)."""
    workers: int | None = None
    """Verifier processes; default: the cores this process may use."""
    engine: str = "in_process"
    """in_process, vllm (this machine), openai (any OpenAI-compatible server), or a custom file.py:function."""
    engine_options: Pairs | None = None
    """NAME=VALUE of that engine, e.g. base_url=http://localhost:8000/v1 (repeatable)."""
    dtype: DType = "float32"
    """Precision of the weights in memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    max_rows: int = 32
    """Sequences that decode at once."""
    memory_limit_mb: int = 4096
    """MiB of the key/value cache."""
    threads: int | None = None
    """Number of torch's threads; default: the cores this process may use."""
    pass_at: Counts | None = None
    """pass@k for these k, e.g. 1,4; default: powers of two."""
    majority_at: Counts | None = None
    """maj@k for these k; default: the largest power of two."""
    price_in: float | None = None
    """Price of a million prompt tokens, for the estimate and the account in results.json."""
    price_out: float | None = None
    """Price of a million response tokens."""
    progress: bool | EvaluationObserver = True
    """True for the usual display, False for none, or an observer."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.type in ("int", "int | None")):
            value, option = getattr(self, name), "--" + name.replace("_", "-")
            if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
                raise RecipeError(f"{option}: give a whole number, got {value!r}")
            object.__setattr__(self, name, None if value is None else int(value))  # of numpy's
            if value is not None and value < (least := _LEAST.get(name, value)):
                raise RecipeError(f"{option} must be at least {least}, got {value}")
        try:
            registry.check("engine", self.engine)
        except ValueError as error:
            raise RecipeError(str(error), key="--engine") from None
        if self.environment is not None:
            registry.check("environment", self.environment)
        if self.preset is not None and self.preset not in PRESETS:
            raise RecipeError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}")
        if self.sampling.temperature == 0 and (self.samples or 1) > 1:
            raise RecipeError("--temperature 0 gives the same response every time; use --samples 1")
        if self.template is not None and "{prompt}" not in self.template:
            raise ValueError(f"--template must hold {{prompt}}, got {self.template!r}")
        if self.limit_seed is not None and (self.limit is None or self.limit_seed < 0):
            raise ValueError("--limit-seed: give a whole number from 0, and with --limit how many problems to draw")
        if unknown := sorted({*self.columns} - {"prompt", "answer", "id", "level"}):
            raise ValueError(f"--field {unknown[0]}=...: known are prompt, answer, id and level")
        # each of these refuses a wrong text before a model is loaded
        _ = self.part, self.days, self.engine_values, self.price, self.judging
        _ = [self.counts(name) for name in _COUNTS]

    @property
    def folder(self) -> Path:
        """The evaluation's folder, ``output``."""
        return Path(path_text("output", self.output))

    @property
    def part(self) -> tuple[int, int]:
        """Shard (i, n), ``"0/4"`` as ``(0, 4)``: only the problems whose place is i modulo n."""
        index, _, count = self.shard.partition("/")
        if not index.isdecimal() or not count.isdecimal() or not int(index) < int(count):
            raise RecipeError(f"--shard {self.shard}: give I/N with I from 0 to N-1, e.g. 0/4 for the first of four")
        return int(index), int(count)

    @property
    def defaults(self) -> Preset:
        """Settings that hold where an option is not given."""
        return NO_PRESET if self.preset is None else PRESETS[self.preset]

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters, with the seed from which each benchmark's is derived."""
        temperature = self.defaults.temperature if self.temperature is None else self.temperature
        max_tokens = self.defaults.max_tokens if self.max_tokens is None else self.max_tokens
        top_p = self.defaults.top_p if self.top_p is None else self.top_p
        return SamplingParams(
            temperature=temperature, max_tokens=max_tokens, seed=self.seed, top_p=top_p, top_k=self.top_k
        )

    def samples_for(self, benchmark: str) -> int:
        """Return the number of samples per problem of a benchmark."""
        if self.samples is not None or self.sampling.temperature == 0:
            return self.samples or 1
        return self.defaults.samples_for(benchmark)

    @property
    def episodes(self) -> EnvironmentConfig:
        """Limits and workers of environments."""
        return EnvironmentConfig(
            max_turns=self.max_turns,
            max_observation_tokens=self.max_observation_tokens,
            workers=self.processes,
            time_limit=self.time_limit,
        )

    @cached_property
    def filters(self) -> dict[str, Any]:
        """Given options that leave out problems, as a job records them: a number or a sorted list."""
        values = {name: getattr(self, name) for name in FILTERS if getattr(self, name) is not None}
        several = {name: self.counts(name) for name in values if name in _COUNTS}
        return values | {name: sorted({*(numbers or ())}) for name, numbers in several.items()}

    def left_out_by(self, problem: Problem) -> str | None:
        """Return the name of the first filter that leaves out a problem; None if it is kept."""
        given = ((name, value, FILTERS[name]) for name, value in self.filters.items())
        return next((name for name, value, keeps in given if keeps and not keeps(value, problem)), None)

    @property
    def columns(self) -> dict[str, str]:
        """Columns by name, from ``fields``."""
        return _pairs("--field", self.fields, "prompt=COLUMN, answer=COLUMN, id=COLUMN or level=COLUMN")

    @cached_property
    def verifier(self) -> str | None:
        """Name of the reward that judges every problem; None: the benchmark's.

        Raises:
            ValueError: an unknown reward (names the nearest known one), or a function that cannot be one.
        """
        if self.reward is None:
            return None if self.judge is None else "judge"
        return registry.check("reward", reward_reference(self.reward))

    @property
    def days(self) -> Window | None:
        """First and last day of ``window``; either may be missing."""
        if self.window is None:
            return None
        try:
            first, last = (date.fromisoformat(day) if day else None for day in self.window.split(".."))
        except ValueError:
            raise RecipeError(
                f"--window {self.window}: give FIRST..LAST, two days, e.g. 2024-08-01..2025-02-01"
            ) from None
        return first, last

    @cached_property
    def judge_settings(self) -> JudgeConfig | None:
        """The served model behind the reward ``judge``, from the recipe ``judge``."""
        return None if self.judge is None else load_train_recipe(given_recipe(self.judge)).verifier.needed_judge()

    @property
    def judging(self) -> JudgeOptions:
        """Rules that find the answer in a response."""
        return JudgeOptions(reasoning=self.reasoning or "auto", extract=self.extract or self.defaults.extract)

    @property
    def processes(self) -> int:
        """Number of verifier processes, and of processes per environment."""
        return self.workers or usable_cores()

    @property
    def engine_values(self) -> dict[str, Any]:
        """Options of the engine by name; a command line gives texts, which the engine reads."""
        if self.engine_options and self.engine == "in_process":
            name = next(iter(self.engine_options)).partition("=")[0]
            raise RecipeError(f"--engine-option {name}: in_process has no options; choose another --engine")
        return _pairs("--engine-option", self.engine_options, "NAME=VALUE")

    def counts(self, name: str) -> tuple[int, ...] | None:
        """Return the numbers of an option, ``"1,4"`` as ``(1, 4)``; None if it is not given."""
        given: Counts | None = getattr(self, name)
        if given is None:
            return None
        parts = given.split(",") if isinstance(given, str) else given if isinstance(given, Iterable) else [given]
        texts = [str(part).strip() for part in parts]
        if not all(text.isdecimal() and int(text) >= _COUNTS[name] for text in texts):
            option = "--" + name.replace("_", "-")
            raise RecipeError(f"{option} {given}: give whole numbers separated by commas, e.g. 1,4")
        return tuple(int(text) for text in texts)

    @property
    def fresh(self) -> list[int] | None:
        """Response limits of fresh samples, ascending; None if none are requested."""
        limits = self.counts("fresh_limits")
        return None if limits is None else sorted({*limits})

    @property
    def price(self) -> Price | None:
        """Prices of tokens; None if they are not given."""
        if self.price_in is None and self.price_out is None:
            return None
        if self.price_in is None or self.price_out is None:
            raise RecipeError(
                "give both --price-in and --price-out, what a million tokens cost; 0 if they cost nothing"
            )
        return Price(per_million_in=self.price_in, per_million_out=self.price_out)


def arguments(**given: Any) -> EvaluationOptions:
    """Return options in which model, benchmarks and output may be missing: they are None then."""
    missing: dict[str, Any] = dict.fromkeys(("model", "benchmarks", "output"))
    return EvaluationOptions(**missing | given)


def _pairs(option: str, texts: Pairs | None, form: str) -> dict[str, Any]:
    """Return ``NAME=VALUE`` texts as a dict. Of a refused text only the name is shown: a value may be a secret."""
    if texts is None or isinstance(texts, Mapping):
        return dict(texts or {})
    pairs: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or name in pairs:
            raise RecipeError(f"{option} {name}: give {form}, each name once")
        pairs[name] = value
    return pairs
