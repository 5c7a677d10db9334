"""A guessing game: the model searches a hidden number and learns whether each guess is too low or too high.

The problem's ``extra`` holds ``secret``, ``low``, ``high`` and ``guesses``. The prompt must not name the secret. The
guess is the last whole number of a turn. The reward is 1 if the number is found within the guesses, else 0.
"""

from __future__ import annotations

import re

from magicrl.environments.base import Step
from magicrl.records import Problem
from magicrl_verifiers.extraction import answer_part

TOO_LOW = "Too low."
TOO_HIGH = "Too high."
NO_GUESS = "Write one number."

# more digits are no guess: the time of int() grows with the square of their number
_NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)", re.ASCII)


def read_guess(text: str) -> int | None:
    """Return the last whole number of a turn, without its sign and after the reasoning; None without one.

    Example:
        >>> read_guess("Between 12 and 42, so 27.")
        27
    """
    found = _NUMBER.findall(answer_part(text, "auto") or "")
    return int(found[-1]) if found else None


class Guessing:
    """The game, with the metrics ``guesses`` (their number) and ``legal`` (share of guesses inside the open range)."""

    def reset(self, problem: Problem) -> None:
        """Begin the game of ``problem``.

        Raises:
            ValueError: ``extra`` lacks a field, or the secret is outside the range.
        """
        names = ("secret", "low", "high", "guesses")
        found = [problem.extra.get(name) for name in names]
        if any(type(value) is not int for value in found):
            raise ValueError(
                f"problem {problem.id!r}: the environment guessing needs the whole numbers {', '.join(names)} in extra "
                f"(further columns of a file), it has {sorted(problem.extra)}; the family guess_number gives them"
            )
        self._secret, self._low, self._high, self._left = (int(value) for value in found if value is not None)
        if not 0 <= self._low <= self._secret <= self._high or self._left < 1:
            raise ValueError(
                f"problem {problem.id!r}: needs 0 <= low <= secret <= high and at least one guess, got "
                f"{self._low} <= {self._secret} <= {self._high}, {self._left} guesses"
            )
        self._made = self._legal = 0

    def step(self, text: str) -> Step:
        """Answer a guess. A turn without a number counts as one."""
        guess = read_guess(text)
        self._made += 1
        self._left -= 1
        self._legal += guess is not None and self._low <= guess <= self._high
        if guess == self._secret or not self._left:
            metrics = {"guesses": float(self._made), "legal": self._legal / self._made}
            return Step(reward=float(guess == self._secret), done=True, metrics=metrics)
        if guess is None:
            return Step(observation=NO_GUESS)
        if guess < self._secret:
            self._low = max(self._low, guess + 1)
            return Step(observation=TOO_LOW)
        self._high = min(self._high, guess - 1)
        return Step(observation=TOO_HIGH)
