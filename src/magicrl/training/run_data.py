"""The problems of a run: every set read, prompts held to their limit, test problems kept out of training."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from magicrl.config.errors import RecipeError, under
from magicrl.config.schema import SourceConfig, TrainConfig
from magicrl.data.sources import load_parts, load_problems, place_of
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
        dropped_in_test: training problems left out because a validation or test set holds the same prompt, the
            held-out ones' further copies among them.
        dropped_conflicting: training problems left out because an earlier one of the same prompt has other golds.
    """

    train: tuple[Problem, ...]
    validation: tuple[Problem, ...]
    test: dict[str, tuple[Problem, ...]]
    dropped_overlong: int
    dropped_in_test: int = 0
    dropped_conflicting: int = 0

    def verifiers(self) -> set[str]:
        """Names of the verifiers that the problems call for."""
        return {p.verifier for problems in (self.train, self.validation, *self.test.values()) for p in problems}


def load_data(config: TrainConfig, encoder: PromptEncoder) -> RunData:
    """Every set of the recipe, prompts checked against the limit, test problems kept out of training.

    Raises:
        RecipeError: a source is wrong, or the settings leave no training problem (with its key).
        ValueError: a source's content is wrong, or a prompt too long (unless they are dropped).
    """
    data = config.data
    with under("data.train"):
        parts = load_parts(data.train)
    with under("data.validation"):
        validation = load_parts(data.validation, key="data.validation")
    test = {name: _load_test(name, source) for name, source in data.test.items()}
    examined = {p.key for problems in (*validation, *test.values()) for p in problems}
    train, in_test = _without_test_problems([p for part in parts for p in part], examined)
    train, conflicting = _without_conflicts(train)
    if data.holdout:
        train, test["holdout"], copies = _hold_out(train, data.holdout)
        in_test += copies
    checker = _PromptChecker(encoder, data.max_prompt_tokens)
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
        dropped_conflicting=conflicting,
    )


def _load_test(name: str, source: SourceConfig) -> list[Problem]:
    with under(f"data.test.{name}"):
        return load_problems(source, key=f"data.test.{name}")


def _without_test_problems(train: Sequence[Problem], held: Collection[str]) -> tuple[list[Problem], int]:
    """The training problems whose key is not among ``held``, and how many others there were."""
    kept = [p for p in train if p.key not in held]
    dropped = len(train) - len(kept)
    if not kept:
        raise RecipeError(
            f"every one of its {len(train)} problems stands in a validation or test set, so nothing is left to train "
            "on; give other problems, or let data.holdout set some aside",
            key="data.train",
        )
    if dropped:
        _log.warning(
            "data.train: %d of %d problems stand in a validation or test set too; they are left out of training",
            dropped,
            len(train),
        )
    return kept, dropped


def _without_conflicts(train: Sequence[Problem]) -> tuple[list[Problem], int]:
    """The training problems without those that ask what an earlier one asks and want another answer, and how many.

    Rewarding both answers to one prompt would teach neither. Copies with the same golds stay: they weigh.
    """
    first: dict[str, Problem] = {}
    kept = [p for p in train if _same_golds(first.setdefault(p.key, p), p)]
    if len(kept) < len(train):
        other = next(p for p in train if not _same_golds(first[p.key], p))
        _log.warning(
            "data.train: %d of %d problems have the prompt of an earlier one and other golds (%r and %r, for one); "
            "the first one's golds count, the others are left out of training",
            len(train) - len(kept),
            len(train),
            first[other.key].id,
            other.id,
        )
    return kept, len(train) - len(kept)


def _same_golds(one: Problem, other: Problem) -> bool:
    return one is other or {" ".join(g.split()) for g in one.golds} == {" ".join(g.split()) for g in other.golds}


def _hold_out(train: Sequence[Problem], count: int) -> tuple[list[Problem], list[Problem], int]:
    """Training problems without ``count`` of their prompts, one problem of each of those, and how many copies went.

    A prompt's key decides, so that the choice depends on neither the order of a file nor its ids.
    """
    first: dict[str, Problem] = {}
    for problem in train:
        first.setdefault(problem.key, problem)
    if count >= len(first):
        raise RecipeError(
            f"{count} would leave no training problems of {len(first)} distinct prompts; lower it", key="data.holdout"
        )
    held = set(sorted(first)[:count])
    kept = [p for p in train if p.key not in held]
    return kept, [p for key, p in first.items() if key in held], len(train) - len(kept) - count


@dataclass(frozen=True, slots=True)
class _PromptChecker:
    """Finds the prompts that cannot be encoded, and where they stand."""

    encoder: PromptEncoder
    limit: int

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
        places = (place_of(problem.id, source) for source in sources)
        place = next((place for place in places if place), key)
        return f"{place}: problem {problem.id!r}"
