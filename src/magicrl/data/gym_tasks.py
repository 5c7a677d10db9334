"""Task family ``reasoning_gym/TASK``: the generated tasks of the package reasoning-gym (the extra ``gym``).

reasoning-gym draws item ``i`` of seed ``s`` from the random numbers of ``s + i``: neighbouring seeds share nearly all
items. Here every pair of seed and split has a block of 1,000,000 seeds of its own. The first block belongs to the
benchmark ``reasoning_gym/TASK`` of ``magicrl eval``. A hash of the question decides the split of an item as well, so
that a task with few distinct questions shares none between its splits.

Levels are those of the task's curriculum, from 0: level ``n`` includes the ranges of lower levels, as reasoning-gym
defines it. Without levels the task has its default settings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from magicrl.config.errors import RecipeError
from magicrl.data.families import OptionValue, Split, hashed_split
from magicrl.records import Problem
from magicrl_verifiers.gym import EXTRA, NAME, entry_text
from magicrl_verifiers.references import did_you_mean

PREFIX = f"{NAME}/"
BLOCK = 1_000_000
"""Seeds of reasoning-gym per pair of seed and split."""
LARGEST = (2**32 // BLOCK - 2) // len(get_args(Split)) - 1
"""Largest seed. Tasks that use numpy need seeds below 2**32."""
MISSES = 10_000
"""Items in a row of other splits after which a task is taken to have no more items of this one."""
VARYING = (
    "intermediate_integration",
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
"""Tasks whose items depend on the order of Python's sets, which differs between processes."""
UNUSABLE = {
    **dict.fromkeys(VARYING, "its problems differ from process to process, so that no run could be resumed"),
    "game_of_life_halting": "its score_answer accepts any text where the answer is False",
    "composite": "it is a mixture of other tasks; list them as several [[data.train]]",
}


def reasoning_gym() -> Any:
    """Import and return reasoning-gym.

    Raises:
        RecipeError: it, or a package that it needs, is not installed.
    """
    try:
        return importlib.import_module(NAME)
    except ImportError as error:
        raise RecipeError(f"{error}; {EXTRA}", key="family") from None


def usable_tasks() -> tuple[str, ...]:
    """Return the names of the tasks that can be used, in alphabetical order."""
    reasoning_gym()
    datasets = importlib.import_module(f"{NAME}.factory").DATASETS
    return tuple(sorted(set(datasets) - UNUSABLE.keys()))


class GymTask:
    """A task of reasoning-gym.

    Args:
        task: Its name.
        options: Fields of its configuration class.

    Raises:
        RecipeError: no such task, it cannot be used, or an option is wrong. The message says why.
    """

    vocabulary = None

    def __init__(self, task: str, /, **options: OptionValue) -> None:
        known = usable_tasks()
        if task not in known:
            why = UNUSABLE.get(task, "reasoning-gym has no such task")
            hint = "" if task in UNUSABLE else did_you_mean(task, known)
            raise RecipeError(f"{PREFIX}{task}: {why}{hint or '.'} Usable: {', '.join(known)}", key="family")
        factory = importlib.import_module(f"{NAME}.factory")
        self.name = f"{PREFIX}{task}"
        self._task, self._options = task, dict(options)
        self._settings: type[Any] = factory.DATASETS[task][1]
        self._curriculum: Any = factory.CURRICULA[task]() if task in factory.CURRICULA else None
        fields = {field.name for field in dataclasses.fields(self._settings)} - {"seed", "size"}
        for option in options:
            if option not in fields:
                raise ValueError(
                    f"{self.name} has no option {option!r}{did_you_mean(option, fields)} Known: "
                    f"{', '.join(sorted(fields))}"
                )
        self._dataset(0, None)  # validates the options

    @property
    def levels(self) -> int:
        """Number of levels; 0 for a task without a curriculum."""
        if self._curriculum is None:
            return 0
        return max(len(attribute.levels) for attribute in self._curriculum.attributes.values())

    def stream(self, *, seed: int, split: Split, levels: Sequence[int] | None = None) -> Iterator[Problem]:
        """Yield problems of one split, the levels in turn.

        Raises:
            ValueError: the task has no such level, or the seed is too large.
        """
        if seed > LARGEST:
            raise ValueError(f"{self.name}: seed = {seed} is too large; use at most {LARGEST}")
        for level in levels or ():
            if not 0 <= level < self.levels:
                have = f"levels 0 to {self.levels - 1}" if self.levels else "no levels; leave levels out"
                raise ValueError(f"{self.name} has no level {level}: it has {have}")
        first = BLOCK * (1 + len(get_args(Split)) * seed + get_args(Split).index(split))
        return self._generate(first, seed, split, list(levels) if levels else [None])

    def _generate(self, first: int, seed: int, split: Split, levels: Sequence[int | None]) -> Iterator[Problem]:
        made = [self._dataset(first, level) for level in levels]
        misses = count = 0
        for index in range(BLOCK):
            dataset, config = made[count % len(made)]
            misses += 1
            entry: dict[str, Any] | None = None
            # reasoning-gym fails to generate some items, of codeio for example: they are left out
            with _random_state(first + index), contextlib.suppress(Exception):
                entry = dataset[index]
            if entry is not None and hashed_split(str(entry["question"])) == split:
                level = levels[count % len(made)]
                answer = entry["answer"]
                yield Problem(
                    id=f"{self._task}-{split}-{seed}-{index}",
                    prompt=str(entry["question"]).strip(),
                    references=() if answer is None else (str(answer).strip(),),
                    verifier=NAME,
                    source=self.name,
                    level=level,
                    extra={NAME: entry_text(self._task, config, entry)},
                )
                misses, count = 0, count + 1
            if misses == MISSES:
                return

    def benchmark(self, count: int, source: str) -> list[Problem]:
        """Return ``count`` problems of the test split from seeds that no training problem's reaches, each question
        once. There are fewer if the task repeats its questions.
        """
        found: dict[str, Problem] = {}
        for problem in itertools.islice(self._generate(0, 0, "test", [None]), 10 * count):
            found.setdefault(problem.key, dataclasses.replace(problem, source=source))
            if len(found) == count:
                break
        if not found:
            raise ValueError(f"{self.name}: none of its questions belongs to the test split; take another task")
        return list(found.values())

    def demonstration(self, problem: Problem, rng: np.random.Generator) -> str:
        """Raise ValueError: reasoning-gym has questions and answers, and no worked responses."""
        raise ValueError(f"{self.name} has no demonstrations for supervised fine-tuning; use [phases.data] with a file")

    def _dataset(self, seed: int, level: int | None) -> tuple[Any, Mapping[str, Any]]:
        """Return the data set from this seed on, and its settings that are no defaults."""
        config = dict(self._options)
        if level is not None:
            self._curriculum.set_global_level(level)
            settings = self._curriculum.generate_configuration()
            names = {
                name
                for attribute in self._curriculum.attributes.values()
                for key in ("field_name", "lower_field_name", "upper_field_name")
                if (name := getattr(attribute, key, None))
            }
            twice = sorted(names & self._options.keys())
            if twice:
                raise ValueError(f"{self.name}: levels set {', '.join(twice)}; leave the option or the levels out")
            config |= {name: getattr(settings, name) for name in names}
        try:
            made = reasoning_gym().create_dataset(self._task, size=BLOCK, seed=seed, **config)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: options {config}: {error}") from error
        return made, config


@contextlib.contextmanager
def _random_state(seed: int) -> Generator[None]:
    """Seed Python's and numpy's global generators, from which some tasks draw, and restore them afterwards."""
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that tasks use
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002
