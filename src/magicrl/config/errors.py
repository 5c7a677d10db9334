"""Error of a recipe, which knows the setting that caused it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial


class RecipeError(ValueError):
    """Error for a recipe that cannot be used. Its text is complete: the command prints it and exits with status 2.

    Args:
        problem: What is wrong, and what to do.
        key: Dotted setting at fault (``data.train.0.path``), used where the recipe's file and line are unknown.
            `config.loader.placed_errors` finds them. An empty key means the setting that `under` names. None means that
            the text names its own place.
    """

    def __init__(self, problem: str, *, key: str | None = None) -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.problem = problem
        self.key = key

    def __reduce__(self) -> tuple[object, ...]:
        # the text alone, as exceptions are pickled, would lose the key on the way from a worker process
        return partial(RecipeError, key=self.key), (self.problem,)


@contextmanager
def under(prefix: str) -> Generator[None]:
    """Prefix the key of errors raised inside with a table's name (``path`` becomes ``data.train.0.path``).

    Example:
        >>> try:
        ...     with under("data.train.0"):
        ...         raise RecipeError("no such file", key="path")
        ... except RecipeError as error:
        ...     print(error)
        data.train.0.path: no such file
    """
    try:
        yield
    except RecipeError as error:
        if error.key is None:
            raise
        raise RecipeError(error.problem, key=f"{prefix}.{error.key}".rstrip(".")) from error
