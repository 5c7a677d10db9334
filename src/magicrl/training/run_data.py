"""The problems of a run: every set read, prompts held to their limit, test problems kept out of training."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from magicrl.config.errors import RecipeError, under
from magicrl.config.schema import SourceConfig, TrainConfig
from magicrl.data.sources import bare_prompt, load_parts, load_problems, place_of
from magicrl.models.prompts import PromptEncoder
from magicrl.records import Problem

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """The problems of a run.

    Attributes:
        train: training problems, before any filter.
        validation: drives stages; may be empty.
        test: test sets by name; drive claims.
        dropped_overlong: training problems left out because their prompt is too long.
        dropped_in_test: training problems left out because a validation or test set holds the same prompt.
    """

    train: tuple[Problem, ...]
    validation: tuple[Problem, ...]
    test: dict[str, tuple[Problem, ...]]
    dropped_overlong: int
    dropped_in_test: int = 0

    def verifiers(self) -> set[str]:
        """Names of the verifiers that the problems call for."""
        return {p.verifier for problems in (self.train, self.validation, *self.test.values()) for p in problems}


def load_data(config: TrainConfig, recipe_folder: Path, encoder: PromptEncoder) -> RunData:
    """Every set of the recipe, prompts checked against the limit, test problems kept out of training.

    Raises:
        RecipeError: a source is wrong, or the settings leave no training problem (with its key).
        ValueError: a source's content is wrong, or a prompt too long (unless they are dropped).
    """
    data = config.data
    with under("data.train"):
        parts = load_parts(data.train, base_folder=recipe_folder)
    with under("data.validation"):
        validation = load_parts(data.validation, base_folder=recipe_folder, key="data.validation")
    test = {name: _load_test(name, source, recipe_folder) for name, source in data.test.items()}
    examined = [*zip(data.validation, validation, strict=True), *((data.test[name], test[name]) for name in test)]
    train, in_test = _without_test_problems(list(zip(data.train, parts, strict=True)), examined)
    if data.holdout:
        train, test["holdout"] = _hold_out(train, data.holdout)
    checker = _PromptChecker(encoder, data.max_prompt_tokens, recipe_folder)
    for key, problems, sources in (
        ("data.validation", [p for part in validation for p in part], data.validation),
        *(
            (f"data.test.{name}", found, (data.test[name],) if name in data.test else data.train)
            for name, found in test.items()
        ),
    ):
        checker.check(key, problems, sources, "or leave it out")
    drop = data.overlong_prompts == "drop"
    fitting = [p for p in train if encoder.fits(p)] if drop else train
    if not fitting:
        raise RecipeError(
            f"every training prompt is longer than {data.max_prompt_tokens} tokens; raise the limit",
            key="data.max_prompt_tokens",
        )
    checker.check("data.train", fitting, data.train, "shorten it, or set data.overlong_prompts = 'drop'")
    return RunData(
        train=tuple(fitting),
        validation=tuple(p for part in validation for p in part),
        test={name: tuple(problems) for name, problems in test.items()},
        dropped_overlong=len(train) - len(fitting),
        dropped_in_test=in_test,
    )


def _load_test(name: str, source: SourceConfig, recipe_folder: Path) -> list[Problem]:
    with under(f"data.test.{name}"):
        return load_problems(source, base_folder=recipe_folder, key=f"data.test.{name}")


def _text(problem: Problem, source: SourceConfig) -> str:
    """The prompt as the source has it: a template, case and spacing make no other problem of one."""
    return " ".join(bare_prompt(problem, source).casefold().split())


def _without_test_problems(
    train: Sequence[tuple[SourceConfig, Sequence[Problem]]], examined: Sequence[tuple[SourceConfig, Sequence[Problem]]]
) -> tuple[list[Problem], int]:
    """The training problems that no validation or test set holds, and how many others there were."""
    held = {_text(p, source) for source, problems in examined for p in problems}
    kept = [p for source, problems in train for p in problems if _text(p, source) not in held]
    total = sum(len(problems) for _, problems in train)
    dropped = total - len(kept)
    if not kept:
        raise RecipeError(
            f"every one of its {total} problems stands in a validation or test set, so nothing is left to train on; "
            "give other problems, or let data.holdout set some aside",
            key="data.train",
        )
    if dropped:
        _log.warning(
            "data.train: %d of %d problems stand in a validation or test set too; they are left out of training",
            dropped,
            total,
        )
    return kept, dropped


def _hold_out(train: Sequence[Problem], count: int) -> tuple[list[Problem], list[Problem]]:
    """The training problems without ``count`` of them (chosen by a hash of the id), and those."""
    if count >= len(train):
        raise RecipeError(f"{count} would leave no training problems of {len(train)}; lower it", key="data.holdout")
    ordered = sorted(train, key=lambda p: hashlib.sha256(p.id.encode()).digest())
    held = {p.id for p in ordered[:count]}
    return [p for p in train if p.id not in held], [p for p in train if p.id in held]


@dataclass(frozen=True, slots=True)
class _PromptChecker:
    """Finds the prompts that cannot be encoded, and where they stand."""

    encoder: PromptEncoder
    limit: int
    recipe_folder: Path

    def check(self, key: str, problems: Sequence[Problem], sources: Sequence[SourceConfig], remedy: str) -> None:
        """Raise ``ValueError`` for a prompt that is empty, too long, or holds what the tokenizer does not know."""
        for problem in problems:
            try:
                self.encoder.encode(problem)
            except ValueError as error:
                place = self._place(key, problem, sources)
                if not self.encoder.fits(problem):
                    raise ValueError(f"{place}: {self._too_long(problem, problems)}, {remedy}") from None
                reason = str(error).removeprefix(f"problem {problem.id!r}: ")
                raise ValueError(f"{place}: {reason}") from None

    def _too_long(self, problem: Problem, problems: Sequence[Problem]) -> str:
        lengths = [length for p in problems if (length := self.encoder.length(p)) > self.limit]
        return (
            f"its prompt has {self.encoder.length(problem)} tokens, more than data.max_prompt_tokens = {self.limit} "
            f"({len(lengths)} of {len(problems)} prompts are too long, the longest has {max(lengths)}); raise the limit"
        )

    def _place(self, key: str, problem: Problem, sources: Sequence[SourceConfig]) -> str:
        places = (place_of(problem.id, source, base_folder=self.recipe_folder) for source in sources)
        place = next((place for place in places if place), key)
        return f"{place}: problem {problem.id!r}"
