"""The error that a wrong recipe raises: it names the file, the line, the key and the remedy."""

from __future__ import annotations


class RecipeError(ValueError):
    """A recipe that cannot be used. Its text is complete: the command prints it and exits with 2."""
