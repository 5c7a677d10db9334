"""What a user is told: errors of a recipe that know the setting at fault, and texts without anybody's secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial

SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIALS")
SHORTEST_SECRET = 8
"""Shorter values of such variables ("1", "none") are no secrets and would blank out ordinary words."""


class RecipeError(ValueError):
    """A recipe that cannot be used. Its text is complete: the command prints it and exits with 2.

    Args:
        problem: what is wrong and what to do.
        key: the setting at fault, dotted (``data.train.0.path``), where the recipe's file and line are not known;
            ``config.loader.placed_errors`` finds them. Empty for the very setting that ``under`` names; None when
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
    """Errors raised inside speak of a table: put its name before their key (``path`` -> ``data.train.0.path``).

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


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """``text`` with the credentials of URLs, and the values of secret environment variables, replaced.

    A variable is secret when its name ends in one of ``SECRET_NAMES``, as ``HF_TOKEN`` and ``WANDB_API_KEY`` do.

    Args:
        text: an error, or anything else that is shown or written.
        environment: default: this process's.

    Example:
        >>> without_secrets("cannot reach https://ann:hunter2@host/x", {})
        'cannot reach https://***@host/x'
        >>> without_secrets("401 for abcd1234", {"HF_TOKEN": "abcd1234"})
        '401 for ***HF_TOKEN***'
    """
    for name, value in (os.environ if environment is None else environment).items():
        if len(value) >= SHORTEST_SECRET and name.upper().endswith(SECRET_NAMES):
            text = text.replace(value, f"***{name}***")
    # one slash too: pathlib makes https:/user of https://user
    return re.sub(r"(?<=[A-Za-z0-9]:)(//?)[^\s/'\"]+@", r"\1***@", text)
