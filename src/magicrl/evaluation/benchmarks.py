"""Benchmarks: known ones by name (``benchmarks.toml``), the user's files and functions, tasks of reasoning-gym."""

from __future__ import annotations

import hashlib
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from huggingface_hub import hf_hub_download

from magicrl.config.data_schema import FieldMapping
from magicrl.config.errors import RecipeError
from magicrl.config.given import data_reference, path_text
from magicrl.config.loader import shipped_table
from magicrl.config.section import Section
from magicrl.data.gym_tasks import PREFIX, GymTask
from magicrl.data.multiple_choice import check_numbers
from magicrl.data.schemas import Template
from magicrl.data.schemas import catalogue as schemas
from magicrl.data.sources import Place, Quarantined, Read, RecordReader, read_problems
from magicrl.evaluation.options import Benchmarks, EvaluationOptions, Window
from magicrl.records import Problem
from magicrl.registry import BUILTINS, is_builtin, names
from magicrl_verifiers.gym import NAME as GYM
from magicrl_verifiers.references import LIVE, did_you_mean

SEED = 0
COUNT = 100
"""Number of problems of a task without a limit."""


class Benchmark(Section):
    """One row of ``benchmarks.toml``.

    Attributes:
        problems: size of the whole set, if known.
        answers_sha256: checksum of its sorted whole numbers (`_is_known_set`), if known.
    """

    title: str
    hub: str
    subset: str | None = None
    split: str = "test"
    revision: str | None = None
    files: tuple[str, ...] = ()
    problems: int | None = None
    answers_sha256: str | None = None
    licence: str
    verifier: Literal["maths", "exact", "code"] = "maths"
    window: tuple[date, date] | None = None


def known_benchmarks() -> dict[str, Benchmark]:
    """Return the benchmarks that are shipped with magicrl, by name."""
    return shipped_table("evaluation/benchmarks.toml", dict[str, dict[str, Benchmark]])["benchmarks"]


def __getattr__(name: str) -> Benchmark:
    """Return a row of the catalogue by its registry name: ``magicrl.evaluation.benchmarks:aime24``."""
    if name not in BUILTINS["benchmark"]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return known_benchmarks()[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkSource:
    """A requested benchmark: a known name, a file, a hub data set, ``reasoning_gym/TASK`` or a function."""

    name: str  # name of its folder and its results
    known: Benchmark | None = None  # row of the catalogue; None for a custom set
    task: str | None = None  # task of reasoning-gym
    # the user's file, folder or hub data set, or the reference of a function that returns records or problems
    place: Place | None = None

    @property
    def source(self) -> str:
        """Source of the problems, for the record."""
        if self.place is not None:
            return self.place.name
        return f"{PREFIX}{self.task}, seed {SEED}" if self.known is None else self.known.hub


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedBenchmark:
    """The problems of a benchmark, and their source."""

    name: str  # name of its folder and its results
    problems: tuple[Problem, ...]  # in order, with unique ids and with the text around the prompts
    set_aside: tuple[str, ...]  # unusable records: place and reason
    facts: dict[str, Any]  # source, licence, window and template, for the record of the job
    whole: bool  # whether all problems of the known set are there, as for published figures


def parse_asked(text: str) -> BenchmarkSource:
    """Read the text of a ``--benchmark``.

    Raises:
        ValueError: neither a known name nor a file; the message has the nearest names.
    """
    if text.startswith(PREFIX):
        return BenchmarkSource(name=_folder_name(text), task=text.removeprefix(PREFIX))
    name, equals, path = text.partition("=")
    built_in = known_benchmarks()
    if equals and _is_reference(path):
        return BenchmarkSource(name=_folder_name(name), place=Place(reference=path))
    if _is_reference(text):
        place = Place(reference=text)
        return BenchmarkSource(name=_folder_name(place.stem), place=place)
    if equals and name and path and not Path(text).exists():
        return BenchmarkSource(name=_folder_name(name), known=built_in.get(name), place=Place(path=Path(path)))
    if text in built_in:
        return BenchmarkSource(name=text, known=built_in[text])
    if Path(text).exists() or Path(text).suffix:
        return BenchmarkSource(name=_folder_name(Path(text).stem), place=Place(path=Path(text)))
    if Place.of(text).hub is not None:
        return BenchmarkSource(name=_folder_name(text), place=Place(hub=text))
    known = names("benchmark")
    hint = did_you_mean(text.lower().replace("-", ""), known)
    raise RecipeError(
        f"--benchmark {text}: no such benchmark and no such file{hint} Known: {', '.join(known)}; "
        f"{PREFIX}TASK, NAME=FILE, a file or folder, a hub name (OWNER/NAME), or your function as FILE.py:NAME"
    )


def _is_reference(text: str) -> bool:
    """Return whether the text names a custom function, or one of an installed package."""
    where, colon, name = text.rpartition(":")
    if is_builtin("benchmark", text):
        return False
    return (
        text.startswith(LIVE)
        or text in names("benchmark")
        or bool(colon and where and name.isidentifier() and not Path(text).exists())
    )


def load_benchmarks(options: EvaluationOptions) -> list[LoadedBenchmark]:
    """Load the problems of each benchmark. Raises ``ValueError`` if two have one name, or one cannot be read."""
    sources = benchmark_sources(options.benchmarks)
    for name, count in Counter(one.name for one in sources).items():
        if count > 1:
            raise RecipeError(f"--benchmark: {name} is named twice; give one of them another name with NAME=FILE")
    found = [load_benchmark(one, options) for one in sources]
    if options.days is not None and not any(one.facts["window"] for one in found):
        raise RecipeError(
            f"no problem of {', '.join(one.name for one in found)} has a day that --window {options.window} could "
            "select by, such as LiveCodeBench's contest_date; leave the option out"
        )
    return found


def benchmark_sources(benchmarks: Benchmarks) -> list[BenchmarkSource]:
    """Return the benchmarks that are named or given in Python.

    Raises:
        ValueError: there is none, or one is neither a known name nor a file.
    """
    if isinstance(benchmarks, Mapping):
        given = cast("Mapping[Any, Any]", benchmarks)
        return [parse_asked(f"{name}={data_reference(f'benchmarks[{name!r}]', data)}") for name, data in given.items()]
    several = benchmarks if isinstance(benchmarks, list | tuple) else [benchmarks]
    names = [path_text("benchmarks (or one of them)", one) for one in cast("list[Any]", several)]
    if not names:
        raise ValueError("benchmarks is empty: name one, or give problems as {'mine': records}")
    return [parse_asked(name) for name in names]


def load_benchmark(asked: BenchmarkSource, options: EvaluationOptions) -> LoadedBenchmark:
    """Load the problems of a benchmark.

    Raises:
        RecipeError: there is no such file, or its kind is unknown.
        ValueError: the file cannot be read, no columns are known, or no problem is left.
    """
    known = asked.known
    window = options.days or (known.window if known is not None else None) or (None, None)
    found, aside, left_out = (
        (_generated(asked, asked.task, options), [], {})
        if asked.task is not None
        else _read_all(asked, options, window)
    )
    if not found:
        filters = [f"{name} = {options.filters[name]} leaves out {count}" for name, count in left_out.items()]
        why = "; ".join([*filters, *aside[:1]]) or "an empty file, or no problem in the window"
        raise ValueError(f"benchmark {asked.name}: no problem can be used: {why}")
    dated = any(read.date is not None for read in found)
    default = known.verifier if known is not None else GYM if asked.task is not None else "maths"
    problems = _finished(found, asked.name, options, default)
    narrowed = known is not None and options.days not in (None, known.window)
    size = known.problems if known is not None and known.problems is not None else len(problems)
    from_hub = known if asked.place is None else None
    whole = known is not None and len(problems) == size and not (aside or left_out or narrowed)
    return LoadedBenchmark(
        name=asked.name,
        problems=problems,
        set_aside=tuple(aside),
        facts={
            "title": known.title if known is not None else asked.name,
            "source": asked.source,
            **{name: getattr(from_hub, name, None) for name in ("subset", "split", "revision")},
            "licence": known.licence if known is not None else None,
            "window": [None if day is None else day.isoformat() for day in window] if dated and any(window) else None,
            **options.filters,
            "template_given": options.template is not None,
            "template": options.template or sorted({read.template for read in found}),
        },
        whole=whole and (from_hub is not None or _is_known_set(known, problems)),
    )


def _is_known_set(known: Benchmark | None, problems: Sequence[Problem]) -> bool:
    """Return whether a user's file has the problems of a known set, by its answers or else by its number of problems.

    Files of one set differ in their texts, so that the answers are compared: ``025`` and ``25^\\circ`` are 25.
    """
    if known is None or known.answers_sha256 is None:
        return known is not None and known.problems is not None
    digits = (re.sub(r"\D", "", "".join(problem.references[:1])) for problem in problems)
    answers = ",".join(map(str, sorted(int(text or -1) for text in digits)))
    return hashlib.sha256(answers.encode()).hexdigest() == known.answers_sha256


def _generated(asked: BenchmarkSource, task: str, options: EvaluationOptions) -> list[Read]:
    """Return the first problems of a task of reasoning-gym."""
    for name, value in options.filters.items():
        if name != "limit":
            raise ValueError(
                f"benchmark {asked.name}: {name} = {value} selects from a file, and a task of reasoning_gym "
                "generates its problems; leave it out"
            )
    try:
        problems = GymTask(task).benchmark(options.limit or COUNT, asked.name)
    except RecipeError as error:
        raise RecipeError(f"--benchmark {PREFIX}{task}: {error.problem}") from None
    return [Read(problem=p, schema="reasoning_gym", columns=((), None)) for p in problems]


def _read_all(
    asked: BenchmarkSource, options: EvaluationOptions, window: Window
) -> tuple[list[Read], list[str], dict[str, int]]:
    """Return the records that the filters leave, what is unusable, and the records that each filter left out."""
    found: list[Read] = []
    aside: list[str] = []
    left_out: Counter[str] = Counter()
    first, last = window[0] or date.min, window[1] or date.max
    stem, fields = asked.name, FieldMapping.model_validate(options.columns)
    offer = "--field {field}={column}"
    played = options.environment is not None  # an environment reads further columns, and may need no answer
    verifier = options.verifier or "maths"
    # a reward may read every column, like an environment
    extra = played or options.verifier is not None
    reader = RecordReader(stem=stem, fields=fields, verifier=verifier, offer=offer, extra=extra, reference=not played)
    for where, read in (record for place in _places(asked) for record in read_problems(place, reader)):
        # the first problems do not need the rest of a large set; a random part does
        if options.limit_seed is None and options.limit is not None and len(found) == options.limit:
            left_out["limit"] += 1
            break
        if isinstance(read, ValueError):
            aside.append(f"{where}: {read}" if isinstance(read, Quarantined) else str(read))
        elif read.date is not None and not first <= read.date <= last:
            continue
        elif filtered := options.left_out_by(read.problem):
            left_out[filtered] += 1
        else:
            found.append(read)
    check_numbers(reader.numbers)
    if options.limit_seed is not None and options.limit is not None and len(found) > options.limit:
        left_out["limit"] += len(found) - options.limit
        # a random part, in the order of the file
        places = np.random.Generator(np.random.PCG64(options.limit_seed)).permutation(len(found))
        found = [found[place] for place in sorted(places[: options.limit])]
    return found, aside, left_out


def _places(asked: BenchmarkSource) -> Iterator[Place]:
    known, place = asked.known, asked.place
    if place is not None:
        first = () if known is None else (known.split,)
        named = replace(place, splits=(*first, "test", "validation", "train"))
        yield Place.called("benchmark", place.reference, {}) if place.reference else named
        return
    assert known is not None, "without a place it is a known one"
    if not known.files:
        yield Place(hub=known.hub, splits=(known.split,), subset=known.subset, revision=known.revision)
    for name in known.files:
        try:
            path = hf_hub_download(known.hub, name, repo_type="dataset", revision=known.revision)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name} of hub data set {known.hub}: {str(error).strip() or type(error).__name__}. Without "
                "network download it once elsewhere and give NAME=FILE"
            ) from error
        yield Place(path=Path(path))


def _finished(found: Sequence[Read], name: str, options: EvaluationOptions, verifier: str) -> tuple[Problem, ...]:
    """Add the text around the prompts, the verifier, and the ids of the records. The benchmark is now their source."""
    problems: list[Problem] = []
    seen: Counter[str] = Counter()
    column_of_ids = "id" in options.columns
    for read in found:
        template = Template(text=options.template) if options.template else schemas().templates[read.template]
        # a record with tests is code, whatever the benchmark's default
        kind = options.verifier or (verifier if read.problem.verifier == "maths" else read.problem.verifier)
        own = read.problem.id if column_of_ids or read.own_id is None else read.own_id
        seen[own] += 1
        if seen[own] > 1 and column_of_ids:
            raise ValueError(f"benchmark {name}: id {own!r} appears twice; correct the file, or name another id")
        own = own if seen[own] == 1 else f"{own}#{seen[own]}"
        played = options.environment or read.problem.environment
        problem = replace(template.around(read.problem), id=own, verifier=kind, source=name, environment=played)
        problems.append(problem)
    return tuple(problems)


def prompts_not_trained_on(model: Path, benchmarks: Sequence[LoadedBenchmark]) -> Iterator[str]:
    """Yield a sentence per benchmark that puts another text around its prompts than the run that made the model."""
    try:
        sources = tomllib.loads((model / "config.toml").read_text(encoding="utf-8"))["data"]["train"]
    except (OSError, ValueError, KeyError, TypeError):  # not a model of magicrl train
        return
    trained = [source.get("template", "{prompt}") for source in sources if "family" not in source]
    for benchmark in benchmarks if trained else ():
        if benchmark.facts["template_given"]:
            continue
        texts = [schemas().templates[name].text for name in benchmark.facts["template"]]
        asked = next((text for text in texts if text not in trained), None)
        if asked is not None:
            yield (
                f"{benchmark.name}: the model was trained on other prompts than {asked!r}, which this evaluation asks; "
                f"to ask as in training, add --template {shell_text(trained[0])}"
            )


def shell_text(text: str) -> str:
    """Return a text as bash and zsh read it, on one line."""
    if "\n" not in text:
        return shlex.quote(text)
    escaped = text.replace("\\", r"\\").replace("'", r"\'").replace("\n", r"\n")
    return f"$'{escaped}'"


def _folder_name(name: str) -> str:
    """Turn a name into one that a folder can have."""
    kept = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip(".")
    if not kept:
        raise ValueError(f"--benchmark: {name!r} cannot be a folder's name")
    return kept
